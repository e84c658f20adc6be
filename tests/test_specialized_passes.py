"""Products, passes, reductions and derivatives with a program compiled in: when launches take these kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from compiled_epilogues import FakeCompiler, compiled_by
from emulated_device import EmulatedLaunches, core, direct_calls, paused
from emulated_device import launches as launches
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Program
from cutfuse.layer import cuda, specialize

KERNEL = 0x1000
DTYPES = core.dtypes()
BFLOAT16, FLOAT32, FLOAT16 = (DTYPES[name] for name in ("bfloat16", "float32", "float16"))
REDUCTIONS = core.reductions()


def compiler(fails: bool = False) -> contextlib.AbstractContextManager[FakeCompiler]:
    return compiled_by(FakeCompiler(lambda kernel: fails))


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(z) * r + z


PROGRAM = cutfuse.Epilogue(gated, 1).program


def reduce(x: Tensor, *operands: Tensor, dim: int | None = -1, op: str = "sum", **given: Any) -> Tensor:
    return cutfuse.reduce(x, dim, op, prologue=gated, operands=operands, **given)


class Pass(NamedTuple):
    """A public function, and its kernel.

    launches_first: whether its first call runs a plan, and not the operator, which `emulated_device` leaves to PyTorch.
    """

    call: Callable[[Tensor, Tensor], Tensor]
    kernel: str
    launches_first: bool = False


WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def weight_for(x: Tensor, r: Tensor) -> Tensor:
    return WEIGHT[: r.shape[1], : x.shape[1]].to(x.dtype)


PASSES = {
    "linear": Pass(
        lambda x, r: cutfuse.linear(x, weight_for(x, r), epilogue=gated, operands=(r,)),
        "sm90_bf16_64x32x128_1x1_pingpong",
        launches_first=True,
    ),
    "pointwise": Pass(
        lambda x, r: cutfuse.pointwise(gated, x, r),
        "pointwise_bfloat16",
    ),
    "reduce": Pass(
        reduce,
        "row_reduce_sum_bfloat16",
    ),
}


@pytest.fixture(params=PASSES)
def passed(request: pytest.FixtureRequest) -> Pass:
    return PASSES[request.param]


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def kernels_of(launches: EmulatedLaunches) -> list[int]:
    return [launch.specialized for launch in launches.launches]


def test_a_first_call_waits_in_the_mode_now(passed: Pass, launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        before = direct_calls()
        for _ in range(3):
            passed.call(x, r)
        assert direct_calls() == before + 2
    assert compiled.asked == [(passed.kernel, 3, [BFLOAT16])]
    assert kernels_of(launches) == [KERNEL + 1] * (2 + passed.launches_first)


def test_calls_interpret_until_the_background_thread_is_done(
    passed: Pass, launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(specialize.background, "add", queued.append)
    x, r = inputs(8, 64)
    with compiler():
        before = direct_calls()
        for _ in range(3):  # the first one makes the plan
            passed.call(x, r)
        assert direct_calls() == before + 2
        assert len(queued) == 1, "queued by the first call alone"
        queued[0].compile()
        passed.call(x, r)
        assert direct_calls() == before + 3
    assert kernels_of(launches) == [0] * (2 + passed.launches_first) + [KERNEL + 1]


def test_nothing_is_compiled_in_the_mode_off(passed: Pass, launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled:
        for has_compiled in (False, True):
            with cutfuse.specialization("off"):
                passed.call(x, r)
                passed.call(x, r)
            assert core.specialization_count() == len(compiled.asked) == has_compiled
            passed.call(x, r)
            cutfuse.wait(30)
    # In the mode "off", and until it is compiled, the program is interpreted.
    *interpreted, compiled_last = kernels_of(launches)
    assert ({*interpreted[:2], *interpreted[-2:]}, compiled_last) == ({0}, KERNEL + 1)
    assert len(compiled.asked) == 1


def test_a_failure_is_interpreted_and_told_once(
    passed: Pass, launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, r = inputs(8, 64)
    monkeypatch.setattr(specialize.background, "_has_warned", False)
    with compiler(fails=True) as compiled, cutfuse.specialization("now"):
        with pytest.warns(RuntimeWarning, match=f"{passed.kernel}.*no driver for this"):
            passed.call(x, r)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            passed.call(x, r)
            passed.call(x, r)
            cutfuse.pointwise(lambda z, r: torch.tanh(z) + r, x, r)  # another one that fails
    assert len(compiled.asked) == 2
    assert kernels_of(launches) == [0] * (2 + passed.launches_first)


def test_a_kernel_for_each_fold_and_type(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        for op in REDUCTIONS:
            for dtype in (torch.float32, torch.bfloat16):
                reduce(x.to(dtype), r, op=op)
                reduce(x.to(dtype), r, op=op, dim=0)
    assert [kernel for kernel, _, _ in compiled.asked] == [
        f"{kernel}_reduce_{fold}_{dtype}"
        for fold in ("sum", "amax", "amin", "logsumexp")
        for dtype in ("float32", "bfloat16")
        for kernel in ("row", "strided")
    ], "a mean is a sum until it is divided"


def columns_first(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


# How x and the operand lie.
COMPILED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "a row operand": lambda x, r: (x, r[0]),
    "a column operand": lambda x, r: (x, r[:, :1]),
    "a transposed operand": lambda x, r: (x, columns_first(r)),
    "an operand off a boundary": lambda x, r: (x[:, :56].clone(), r[:, 1:57]),
    "rows with gaps of whole vectors": lambda x, r: (x[:, :56], r[:, :56]),
    "several matrices": lambda x, r: (x.view(4, 2, 64), r.view(4, 2, 64)),
    "rows inside of others": lambda x, r: (x.view(4, 2, 64)[:, :, :32], r.view(4, 2, 64)[:, :, :32]),
    "transposed": lambda x, r: (x.t(), r.t()),
    "rows that are transposed": lambda x, r: (columns_first(x), r),
}
INTERPRETED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rows of no whole vectors": lambda x, r: (x[:, :-1], r[:, :-1]),
    "rows that begin off a boundary": lambda x, r: (x[:, 1:9], r[:, 1:9]),
    "rows of an odd pitch": lambda x, r: (x.view(-1)[:-8].view(8, 63)[:, :56], r[:, :56]),
    "every second column": lambda x, r: (x[:, ::2], r[:, ::2]),
    "a few elements after the last vector": lambda x, r: (x.view(-1)[:-3], r.view(-1)[:-3]),
}
ALONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pointwise": lambda x, r: cutfuse.pointwise(gated, x, r),
    "rows": reduce,
    "columns": lambda x, r: reduce(x, r, dim=max(x.dim() - 2, 0)),
}


@pytest.mark.parametrize("function", ALONG)
@pytest.mark.parametrize("layout", [*COMPILED, *INTERPRETED])
def test_which_layouts_are_compiled(launches: EmulatedLaunches, layout: str, function: str) -> None:
    given = (COMPILED | INTERPRETED)[layout](*inputs(8, 64))
    with compiler() as compiled, cutfuse.specialization("now"):
        for _ in range(2):
            ALONG[function](*given)
    assert len(compiled.asked) == (layout in COMPILED)
    assert kernels_of(launches) == [KERNEL + 1 if layout in COMPILED else 0]


# Calls, and whether they are compiled.
CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "pointwise, a chain that is compiled in": (lambda x, r: cutfuse.pointwise(torch.tanh, x), False),
    "pointwise, another type": (lambda x, r: cutfuse.pointwise(gated, x, r, out_dtype=torch.float32), False),
    "reduce, another type": (lambda x, r: reduce(x, r, out_dtype=torch.float32), True),
    "reduce, no program": (lambda x, r: cutfuse.reduce(x, -1), False),
    "reduce, a scaled sum": (lambda x, r: cutfuse.reduce(x, -1, prologue=lambda z: z * 0.5), False),
    "reduce, a scaled maximum": (lambda x, r: cutfuse.reduce(x, -1, "amax", prologue=lambda z: z * 0.5), True),
    "reduce, one op": (lambda x, r: cutfuse.reduce(x, -1, prologue=torch.tanh), True),
    "reduce, everything": (lambda x, r: reduce(x, r, dim=None), True),
    "reduce, four columns": (lambda x, r: reduce(x.view(128, 4), r.view(128, 4), dim=0), False),
}


@pytest.mark.parametrize("case", CALLS)
def test_which_calls_are_compiled(launches: EmulatedLaunches, case: str) -> None:
    """The kernels of reductions have no chain compiled in."""
    call, is_compiled = CALLS[case]
    with compiler() as compiled, cutfuse.specialization("now"):
        for _ in range(2):
            call(*inputs(8, 64))
    assert len(compiled.asked) == is_compiled
    assert kernels_of(launches) == [KERNEL + is_compiled if is_compiled else 0]


def kernel_of_pass(extents: tuple[int, ...], x: tuple[int, ...], operand: tuple[int, ...]) -> str:
    given = (PROGRAM.native, extents, (0, BFLOAT16, *x), [(0, BFLOAT16, *operand)])
    kernel: str = core.PointwiseProblem(*given, BFLOAT16).kernel
    return kernel


def kernel_of_reduction(extents: tuple[int, ...], x: tuple[int, ...]) -> str:
    given = (PROGRAM.native, extents, (0, BFLOAT16, *x), [(0, BFLOAT16, 0, 0, 0)])
    kernel: str = core.ReduceProblem(*given, REDUCTIONS["sum"], BFLOAT16).kernel
    return kernel


def test_a_long_tensor_with_a_rest_is_compiled_but_for_the_rest() -> None:
    """Beyond a million elements the rest is a launch of its own, which interprets."""
    for columns, kernel in (((1 << 20) + 3, "pointwise_bfloat16"), ((1 << 19) + 3, "")):
        vector = (columns, columns, 1)
        assert kernel_of_pass((1, 1, columns), vector, vector) == kernel


MANY = 1 << 30


@pytest.mark.parametrize(
    ("extents", "more", "kernel"),
    [
        ((1, MANY, 8), (0, 1, 0), "pointwise_bfloat16"),
        ((1, 2, MANY), (0, 0, 8), "pointwise_bfloat16"),
        ((MANY, 8, 1), (1, 0, 0), "row_reduce_sum_bfloat16"),
        ((2, 8, MANY // 2), (1, 0, 0), "row_reduce_sum_bfloat16"),
        ((1, MANY, 8), (0, 1, 0), "strided_reduce_sum_bfloat16"),
        ((1, 2, MANY * 8), (0, 0, 8), "strided_reduce_sum_bfloat16"),
        ((MANY, 2, 8), (1, 0, 0), "strided_reduce_sum_bfloat16"),
    ],
)
def test_more_elements_than_32_bits_count_are_interpreted(
    extents: tuple[int, int, int], more: tuple[int, int, int], kernel: str
) -> None:
    def kernel_of(outer: int, rows: int, columns: int) -> str:
        if kernel.startswith("pointwise"):
            return kernel_of_pass((outer, rows, columns), (rows * columns, columns, 1), (0, 0, 1))
        is_strided = kernel.startswith("strided")
        strides = (rows * columns, columns, 1) if is_strided else (rows * columns, 1, rows)
        return kernel_of_reduction((outer, rows, columns), strides)

    assert kernel_of(*extents) == kernel
    assert kernel_of(*(extent + add for extent, add in zip(extents, more, strict=True))) == ""


def test_a_row_of_more_elements_is_compiled() -> None:
    assert kernel_of_reduction((1, 8 * MANY, 1), (8 * MANY, 1, 0))


STRIDES = {"matrix": (64, 1), "row": (0, 1), "column": (1, 0), "number": (0, 0), "transposed": (1, 8)}
KINDS = {
    "rows": {"row": "strided", "column": "scalar", "number": "scalar"},
    "columns": {"row": "row", "column": "column", "number": "scalar"},
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("direction", KINDS)
def test_how_operands_lie_along_the_threads_lines(direction: str, layout: str) -> None:
    """Threads of a reduction of rows walk along rows, and those of one of columns down columns, eight at once."""
    if direction == "rows":
        problem = (8, 64, 1), (0, BFLOAT16, 64, 1, 0), [(0, BFLOAT16, *STRIDES[layout], 0)]
    else:
        problem = (1, 8, 64), (0, BFLOAT16, 0, 64, 1), [(0, BFLOAT16, 0, *STRIDES[layout])]
    kinds = core.ReduceProblem(PROGRAM.native, *problem, REDUCTIONS["sum"], BFLOAT16).operand_kinds
    assert [kind.name for kind in kinds] == [KINDS[direction].get(layout, "strided")]


def test_operands_of_other_kinds_have_a_kernel_of_their_own() -> None:
    program = PROGRAM.native
    problem = (8, 64, 1), (16, FLOAT32, 64, 1, 0), [(16, FLOAT32, 1, 0, 0)], REDUCTIONS["sum"], FLOAT32
    types = [FLOAT32]
    kernel = core.ReduceProblem(program, *problem).kernel
    strided = core.find_specialization(kernel, 0, program, types)
    assert strided is not core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar])
    with pytest.raises(ValueError, match="the program has 1 operands, got 2"):
        core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar] * 2)


LAYER = (16, 64, 63)  # rows, columns, depth: of rows that no GEMM kernel takes, so cuBLAS and one more kernel run


def layer_inputs(is_trained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    m, n, k = LAYER
    x, weight, r = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return x.bfloat16(), weight.bfloat16().requires_grad_(is_trained), r.bfloat16()


@pytest.mark.parametrize(
    ("reduction", "depth", "launch", "kernel"),
    [
        (None, 63, "pointwise", "pointwise_bfloat16"),
        ("amax", 63, "reduce", "row_reduce_amax_bfloat16"),
        ("amax", 16384, "reduce", "row_reduce_amax_bfloat16"),  # so deep that cuBLAS and one more kernel are faster
    ],
)
def test_the_kernel_after_a_product(
    launches: EmulatedLaunches, reduction: str | None, depth: int, launch: str, kernel: str
) -> None:
    x, weight, r = (torch.randn(shape).bfloat16() for shape in ((16, depth), (64, depth), (16, 64)))
    with compiler() as compiled, cutfuse.specialization("now"):
        with paused():
            cuda.linear(x, weight, None, [r], PROGRAM.text, reduction or "none", x.dtype)
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,), reduce=reduction)
        assert direct_calls() == before + 1
    assert launches.names == [launch] * 3
    assert compiled.asked == [(kernel, 3, [BFLOAT16])]
    assert kernels_of(launches) == [KERNEL + 1] * 3


@pytest.mark.parametrize("case", [*PASSES, "layer", "trained layer"])
def test_a_capture_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, launches: EmulatedLaunches, case: str) -> None:
    x, weight, r = layer_inputs(is_trained=case == "trained layer")

    def call() -> object:
        return PASSES[case].call(r, r) if case in PASSES else cutfuse.linear(x, weight, epilogue=gated, operands=(r,))

    with compiler() as compiled, cutfuse.specialization("now"):
        with monkeypatch.context() as patch:
            patch.setattr(specialize, "is_capturing", lambda: True)
            before = core.remembered_calls()
            call()
            assert core.remembered_calls() == before, "a later call would never ask"
        assert compiled.asked == []
        call()
        call()
    assert len(compiled.asked) == 1 + (case == "trained layer"), "a trained layer asks for both passes"
    is_layer = case not in PASSES or PASSES[case].launches_first
    assert kernels_of(launches) == ([0, KERNEL + 1, KERNEL + 1] if is_layer else [KERNEL + 1])


# Derivatives.


def kernel_for(
    text: str = PROGRAM.text,
    shape: Sequence[int] = (8, 64),
    grad: tuple[int, ...] | None = None,
    x: tuple[int, ...] | None = None,
    outputs: Sequence[tuple[int, int, int]] = ((0, 0, BFLOAT16),),
    column_sum: bool = False,
) -> str:
    rows, columns = shape
    whole = (0, BFLOAT16, 0, columns, 1)
    program = Program.parse(text)
    operands = [whole] * program.operand_count
    problem = program.native, (1, rows, columns), grad or whole, x or whole, operands, outputs, column_sum
    return core.PointwiseBackwardProblem(*problem).kernel


def test_a_kernel_is_named_after_what_it_gives() -> None:
    assert kernel_for() == "pointwise_backward_bfloat16_d0"
    assert kernel_for(outputs=[(1, 0, FLOAT32), (0, 0, BFLOAT16)]) == "pointwise_backward_bfloat16_d01"
    assert kernel_for(outputs=[(1, 0, BFLOAT16)]) == "pointwise_backward_bfloat16_d1"
    assert kernel_for(column_sum=True) == "pointwise_backward_columns_bfloat16_d0"
    assert kernel_for(outputs=[(1, 0, BFLOAT16)], column_sum=True) == "pointwise_backward_columns_bfloat16_d01"
    fp32 = (0, FLOAT32, 0, 64, 1)
    assert kernel_for(grad=fp32, x=fp32, outputs=[(0, 0, FLOAT32)]) == "pointwise_backward_float32_d0"
    assert kernel_for("operands=0; gelu z") == "pointwise_backward_bfloat16_d0", "forwards have it compiled in"


# Problems, and whether their derivatives are compiled.
PROBLEMS: dict[str, tuple[dict[str, Any], bool]] = {
    "one row of all elements": ({"shape": (8, 63), "text": "operands=0; tanh z; neg prev"}, True),
    "rows with gaps of whole vectors": ({"x": (0, BFLOAT16, 0, 72, 1), "grad": (16, BFLOAT16, 0, 80, 1)}, True),
    "a single row": ({"shape": (1, 64)}, True),
    "few columns": ({"shape": (1000, 8), "column_sum": True}, True),
    "the identity": ({"text": "operands=0"}, False),
    "rows of no whole vectors, added up": ({"shape": (8, 63), "column_sum": True}, False),
    "no whole vectors": ({"shape": (3, 63)}, False),
    "a gradient of another type": ({"grad": (0, FLOAT32, 0, 64, 1)}, False),
    "a gradient of copies": ({"grad": (0, BFLOAT16, 0, 0, 0)}, False),
    "a gradient in columns": ({"grad": (0, BFLOAT16, 0, 1, 8)}, False),
    "rows off a boundary": ({"x": (2, BFLOAT16, 0, 64, 1)}, False),
    "an odd pitch": ({"x": (0, BFLOAT16, 0, 67, 1)}, False),
    "a derivative in another type of 16 bits": ({"outputs": [(0, 0, BFLOAT16), (1, 0, FLOAT16)]}, False),
    "nothing is wanted": ({"outputs": []}, False),
    "an empty tensor": ({"shape": (0, 64)}, False),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_which_derivatives_are_compiled(problem: str) -> None:
    given, is_compiled = PROBLEMS[problem]
    assert bool(kernel_for(**given)) == is_compiled


@pytest.mark.parametrize(
    ("shape", "row_blocks"),
    [((3152, 3072), 197), ((196, 3072), 13), ((16384, 4096), 164), ((50000, 256), 1021), ((4, 40000), 1), ((0, 8), 0)],
)
def test_blocks_of_rows_fill_a_device_and_leave_few_partial_sums(shape: tuple[int, int], row_blocks: int) -> None:
    assert core.pointwise_backward_row_blocks(*shape) == row_blocks


@pytest.mark.parametrize(("columns", "tile"), [(528, 176), (264, 136), (256, 256), (40, 40), (1024, 256)])
def test_columns_are_shared_out_evenly(columns: int, tile: int) -> None:
    _, threads, tile_columns, _ = core.pointwise_backward_launch((1, 500, columns), BFLOAT16, columns, True)
    assert (tile_columns, threads) == (tile, 128 // (tile // 8) * (tile // 8))


@pytest.mark.skipif(not core.cuda_build, reason="this build of cutfuse has no CUDA kernels")
@pytest.mark.parametrize("shape", [(1, 8), (70, 24), (333, 264), (8192, 16384), (100000, 8)])
def test_columns_are_added_up_in_one_order(shape: tuple[int, int]) -> None:
    """Whichever kernel runs, a block has as many rows: as the partial sums' memory has been allocated for."""
    rows, columns = shape
    whole = (0, BFLOAT16, 0, columns, 1)
    program = PROGRAM.native
    problem = core.PointwiseBackwardProblem(program, (1, rows, columns), whole, whole, [whole], [(0, 0, BFLOAT16)])
    blocks, threads = core.backward_launch_shape(problem, 256)
    tiles, rest = divmod(blocks, core.pointwise_backward_row_blocks(rows, columns))
    assert rest == 0
    assert tiles * min(256, -(-columns // 8) * 8) >= columns
    assert threads <= 128


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 5000), st.integers(1, 3000)),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from([BFLOAT16, FLOAT32]),
)
@example((1, 77, 131), 0, False, FLOAT32)
def test_the_interpreting_kernel_is_launched_for_all_columns(
    extents: tuple[int, int, int], gap: int, keep_columns: bool, dtype: int
) -> None:
    """Along rows where these are not aligned, with a thread for each column."""
    columns = extents[2]
    launch = core.pointwise_backward_launch(extents, dtype, columns + gap, keep_columns)
    blocks, threads, block_columns, blocks_beside = launch
    assert 1 <= threads <= 128
    assert blocks >= blocks_beside >= 1
    if keep_columns:
        assert block_columns * (blocks_beside - 1) < columns <= block_columns * blocks_beside


def train(bias: bool = False, wants_operand: bool = False) -> None:
    x, weight, r = layer_inputs(is_trained=True)
    b = torch.randn(len(weight)).bfloat16().requires_grad_() if bias else None
    r.requires_grad_(wants_operand)
    for _ in range(2):
        y = cutfuse.linear(x, weight, b, epilogue=gated, operands=(r,))
        y.backward(torch.ones_like(y))


def backward_kernels(launches: EmulatedLaunches) -> list[int]:
    return [launch.specialized for launch in launches.launches if launch.function == "pointwise_backward"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wants_operand", [False, True])
def test_a_trained_layer(launches: EmulatedLaunches, bias: bool, wants_operand: bool) -> None:
    """Its plan asks for the kernels of both passes."""
    kind = "columns_" if bias else ""
    suffix = "d01" if wants_operand else "d0"
    with compiler() as compiled, cutfuse.specialization("now"):
        before = direct_calls()
        train(bias, wants_operand)
        assert direct_calls() == before + 1
    kernels = [kernel for kernel, _, _ in compiled.asked]
    assert kernels == ["pointwise_bfloat16", f"pointwise_backward_{kind}bfloat16_{suffix}"]
    assert backward_kernels(launches) == [0x1002, 0x1002]


def test_the_backward_is_compiled_while_the_forward_runs(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(specialize.background, "add", queued.append)
    x, weight, _ = layer_inputs(is_trained=True)
    with compiler():
        for _ in range(2):
            y = cutfuse.linear(x, weight, epilogue=lambda z: torch.tanh(z) * z)
        assert [item.kernel for item in queued] == ["pointwise_bfloat16", "pointwise_backward_bfloat16_d0"]
        y.backward(torch.ones_like(y), retain_graph=True)
        for item in queued:
            item.compile()
        y.backward(torch.ones_like(y))
    assert backward_kernels(launches)[0] == 0
    assert backward_kernels(launches)[-1] > 0x1000


def test_a_gradient_that_the_kernel_does_not_take(launches: EmulatedLaunches) -> None:
    """The launch is given it nevertheless, and interprets."""
    x, weight, _ = layer_inputs(is_trained=True)
    with compiler(), cutfuse.specialization("now"):
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=lambda z: torch.tanh(z) * z).sum().backward()
    assert len(backward_kernels(launches)) == 2


def backward_kernels_asked(compiled: FakeCompiler) -> list[str]:
    return [kernel for kernel, _, _ in compiled.asked if "backward" in kernel]


@pytest.mark.parametrize(
    ("operand_rows", "wanted", "column_sum", "kernel"),
    [
        (8, [0, 1], False, "pointwise_backward_bfloat16_d01"),
        (1, [0, 1], False, "pointwise_backward_bfloat16_d01"),  # a row, whose gradient is added up
        (8, [1], False, "pointwise_backward_bfloat16_d1"),
        (8, [0], True, "pointwise_backward_columns_bfloat16_d0"),
    ],
)
def test_the_operator_of_derivatives(
    launches: EmulatedLaunches, operand_rows: int, wanted: list[int], column_sum: bool, kernel: str
) -> None:
    grad, x, r = (torch.randn(rows, 64).bfloat16() for rows in (8, 8, operand_rows))
    with compiler() as compiled, cutfuse.specialization("now"):
        for mode in ("now", "off"):
            with cutfuse.specialization(mode):
                cuda.pointwise_backward(grad, x, [r], PROGRAM.text, "none", None, wanted, column_sum)
    assert backward_kernels_asked(compiled) == [kernel]
    assert [kernel > 0 for kernel in backward_kernels(launches)] == [True, False]


def test_a_reductions_weights_are_interpreted(launches: EmulatedLaunches) -> None:
    x = torch.randn(8, 64).bfloat16()
    result = torch.logsumexp(x.float(), 1, keepdim=True)
    with compiler() as compiled, cutfuse.specialization("now"):
        cuda.pointwise_backward(torch.ones(8, 1), x, [], "operands=0; tanh z", "logsumexp", result, [0], False)
    assert backward_kernels_asked(compiled) == []


def test_what_compares_with_a_reductions_result_is_computed_as_there(launches: EmulatedLaunches) -> None:
    """Kernels of reductions have accurate primitives, whose last bits the fast ones of 16-bit tensors lose."""
    x = torch.randn(8, 64).bfloat16()
    result = torch.tanh(x.float()).amax(0, keepdim=True)
    with compiler() as compiled, cutfuse.specialization("now"):
        arguments = torch.ones(1, 64), x, [], "operands=0; tanh z"
        cuda.pointwise_backward(*arguments, "amax", result, [0], False)
        cuda.pointwise_backward(torch.ones(8, 64), *arguments[1:], "none", None, [0], False)
    own = [launch for launch in launches.launches if launch.function == "pointwise_backward"]
    assert [launch.is_accurate for launch in own] == [True, False]
    assert [bool(launch.specialized) for launch in own] == [False, False], "the gradient has another type than x"
    assert backward_kernels_asked(compiled) == []
