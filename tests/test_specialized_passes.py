"""Products, elementwise passes and reductions with a program compiled in: when launches take these kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from compiled_epilogues import TypedCompiler, compiled_by
from emulated_device import core, direct_calls, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from torch import Tensor

import cutfuse
from cutfuse.layer import cuda, specialize

KERNEL = 0x1000
DTYPES = core.dtypes()
REDUCTIONS = core.reductions()


def compiler(fails: bool = False) -> contextlib.AbstractContextManager[TypedCompiler]:
    return compiled_by(TypedCompiler(fails))  # type: ignore[return-value]


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(z) * r + z


PROGRAM = cutfuse.Epilogue(gated, 1).program


def reduce(x: Tensor, *operands: Tensor, dim: int | None = -1, op: str = "sum", **given: Any) -> Tensor:
    return cutfuse.reduce(x, dim, op, prologue=gated, operands=operands, **given)


class Pass(NamedTuple):
    """A public function, what its operator does on a GPU, and its kernel.

    launches_first: whether its first call runs a plan, and not the operator, which `emulated_device` leaves to PyTorch.
    """

    call: Callable[[Tensor, Tensor], Tensor]
    operator: Callable[[Tensor, Tensor], object]
    kernel: str
    expected: Callable[[Tensor, Tensor], Tensor]
    launches_first: bool = False

    def run_generally(self, x: Tensor, r: Tensor) -> None:
        with paused():
            self.operator(x, r)


WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def weight_for(x: Tensor, r: Tensor) -> Tensor:
    return WEIGHT[: r.shape[1], : x.shape[1]].to(x.dtype)


PASSES = {
    "linear": Pass(
        lambda x, r: cutfuse.linear(x, weight_for(x, r), epilogue=gated, operands=(r,)),
        lambda x, r: cuda.linear(x, weight_for(x, r), None, [r], PROGRAM.text, x.dtype),
        "sm90_bf16_64x64x128_1x1_pingpong",
        lambda x, r: gated(torch.nn.functional.linear(x, weight_for(x, r)), r),
        launches_first=True,
    ),
    "pointwise": Pass(
        lambda x, r: cutfuse.pointwise(gated, x, r),
        lambda x, r: cuda.pointwise(x, (r,), PROGRAM.text, x.dtype),
        "pointwise_bfloat16",
        gated,
    ),
    "reduce": Pass(
        reduce,
        lambda x, r: cuda.reduce(x, (r,), PROGRAM.text, "sum", (1,), x.dtype),
        "row_reduce_sum_bfloat16",
        lambda x, r: gated(x, r).sum(-1),
    ),
}


@pytest.fixture(params=PASSES)
def passed(request: pytest.FixtureRequest) -> Pass:
    return PASSES[request.param]


def run_layer_generally(x: Tensor, weight: Tensor, r: Tensor, reduction: str = "none") -> None:
    with paused():
        cuda.linear_reduce(x, weight, None, [r], PROGRAM.text, reduction, x.dtype)


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
    assert compiled.asked == [(passed.kernel, 3, [DTYPES["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * (2 + passed.launches_first)


def test_the_general_path(passed: Pass, launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        passed.run_generally(x, r)
        passed.run_generally(x[:, :-1], r[:, :-1])
        with cutfuse.specialization("off"):
            passed.run_generally(x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [KERNEL + 1, 0, 0]


def test_calls_interpret_until_the_background_thread_is_done(
    passed: Pass, launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(specialize.background, "add", queued.append)
    x, r = inputs(8, 64)
    with compiler():
        passed.run_generally(x, r)
        before = direct_calls()
        for _ in range(3):  # the first one makes the plan
            passed.call(x, r)
        assert direct_calls() == before + 2
        assert len(queued) == 1, "queued by the first call alone"
        queued[0].compile()
        passed.call(x, r)
        assert direct_calls() == before + 3
    assert kernels_of(launches) == [0] * (3 + passed.launches_first) + [KERNEL + 1]


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


def test_one_op_is_compiled(launches: EmulatedLaunches) -> None:
    """The kernels of reductions have no chain compiled in."""
    x, _ = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        for _ in range(2):
            cutfuse.reduce(x, -1, prologue=torch.tanh)
            cutfuse.pointwise(torch.tanh, x)
    assert compiled.asked == [("row_reduce_sum_bfloat16", 1, [])]


def columns_first(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


INTERPRETED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pointwise, a chain that is compiled in": lambda x, r: cutfuse.pointwise(torch.tanh, x),
    "pointwise, rows of no whole vectors": lambda x, r: cutfuse.pointwise(gated, x[:, :-1], r[:, :-1]),
    "pointwise, rows that begin off a boundary": lambda x, r: cutfuse.pointwise(gated, x[:, 1:9], r[:, 1:9]),
    "pointwise, another type of result": lambda x, r: cutfuse.pointwise(gated, x, r, out_dtype=torch.float32),
    "pointwise, a few elements after the last vector": lambda x, r: cutfuse.pointwise(
        gated, x.view(-1)[:-3], r.view(-1)[:-3]
    ),
    "reduce, no program": lambda x, r: cutfuse.reduce(x, -1),
    "reduce, a program that scales a sum": lambda x, r: cutfuse.reduce(x, -1, prologue=lambda z: z * 0.5),
    "reduce, rows of no whole vectors": lambda x, r: reduce(x[:, :-1], r[:, :-1]),
    "reduce, rows that begin off a boundary": lambda x, r: reduce(x[:, 1:9], r[:, 1:9]),
    "reduce, rows of an odd pitch": lambda x, r: reduce(x.view(-1)[:-8].view(8, 63)[:, :56], r[:, :56]),
    "reduce, columns of no whole vectors": lambda x, r: reduce(x[:, :-1], r[:, :-1], dim=0),
    "reduce, columns that begin off a boundary": lambda x, r: reduce(x[:, 1:9], r[:, 1:9], dim=0),
    "reduce, four columns": lambda x, r: reduce(x.view(128, 4), r.view(128, 4), dim=0),
    "reduce, every second column": lambda x, r: reduce(x[:, ::2], r[:, ::2], dim=0),
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_what_stays_interpreted(launches: EmulatedLaunches, case: str) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        INTERPRETED[case](x, r)
        INTERPRETED[case](x, r)
    assert compiled.asked == []
    assert kernels_of(launches) == [0]


TAKEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "pointwise, a row operand": lambda x, r: cutfuse.pointwise(gated, x, r[0]),
    "pointwise, a column operand": lambda x, r: cutfuse.pointwise(gated, x, r[:, :1]),
    "pointwise, a transposed operand": lambda x, r: cutfuse.pointwise(gated, x, r.t().contiguous().t()),
    "pointwise, an operand off a boundary": lambda x, r: cutfuse.pointwise(gated, x[:, :56].clone(), r[:, 1:57]),
    "pointwise, rows with gaps of whole vectors": lambda x, r: cutfuse.pointwise(gated, x[:, :56], r[:, :56]),
    "pointwise, a transposed x": lambda x, r: cutfuse.pointwise(gated, x.t(), r.t()),
    "reduce, a row operand": lambda x, r: reduce(x, r[0]),
    "reduce, a column operand": lambda x, r: reduce(x, r[:, :1]),
    "reduce, a transposed operand": lambda x, r: reduce(x, columns_first(r)),
    "reduce, an operand off a boundary": lambda x, r: reduce(x[:, :56].clone(), r[:, 1:57]),
    "reduce, rows with gaps of whole vectors": lambda x, r: reduce(x[:, :56], r[:, :56]),
    "reduce, a transposed x": lambda x, r: reduce(x.t(), r.t(), dim=0),
    "reduce, columns": lambda x, r: reduce(x, r, dim=0),
    "reduce, columns with gaps of whole vectors": lambda x, r: reduce(x[:, :40], r[:, :40], dim=0),
    "reduce, columns of several matrices": lambda x, r: reduce(x.view(4, 2, 64), r.view(4, 2, 64), dim=1),
    "reduce, rows that are transposed": lambda x, r: reduce(columns_first(x), r),
    "reduce, everything": lambda x, r: reduce(x, r, dim=None),
    "reduce, another type of result": lambda x, r: reduce(x, r, out_dtype=torch.float32),
    "reduce, a maximum of products with a number": lambda x, r: cutfuse.reduce(
        x, -1, "amax", prologue=lambda z: z * 0.5
    ),
    "reduce, rows inside of others": lambda x, r: reduce(x.view(4, 2, 64)[:, :, :32], r.view(4, 2, 64)[:, :, :32]),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_compiled(launches: EmulatedLaunches, case: str) -> None:
    x, r = inputs(8, 64)
    with compiler(), cutfuse.specialization("now"):
        TAKEN[case](x, r)
        TAKEN[case](x, r)
    assert kernels_of(launches) == [KERNEL + 1]


def test_a_long_tensor_with_a_rest_is_compiled_but_for_the_rest() -> None:
    """Beyond a million elements the rest is a launch of its own, which interprets."""
    code = DTYPES["bfloat16"]

    def kernel(columns: int) -> str:
        vector = (0, code, columns, columns, 1)
        return core.pointwise_kernel(PROGRAM.native, (1, 1, columns), vector, [vector], 0, code)

    assert kernel((1 << 20) + 3) == "pointwise_bfloat16"
    assert kernel((1 << 19) + 3) == ""


@pytest.mark.parametrize(("rows", "columns", "more"), [(1 << 30, 8, (1, 0)), (2, 1 << 30, (0, 8))])
def test_more_elements_than_32_bits_count_are_interpreted(rows: int, columns: int, more: tuple[int, int]) -> None:
    code = DTYPES["bfloat16"]

    def kernel(rows: int, columns: int) -> str:
        x, row = (0, code, rows * columns, columns, 1), (0, code, 0, 0, 1)
        return core.pointwise_kernel(PROGRAM.native, (1, rows, columns), x, [row], 0, code)

    assert kernel(rows, columns) == "pointwise_bfloat16"
    assert kernel(rows + more[0], columns + more[1]) == ""


MANY = 1 << 30


@pytest.mark.parametrize(
    ("extents", "more", "kernel"),
    [
        ((MANY, 8, 1), (1, 0, 0), "row_reduce_sum_bfloat16"),
        ((2, 8, MANY // 2), (1, 0, 0), "row_reduce_sum_bfloat16"),
        ((1, MANY, 8), (0, 1, 0), "strided_reduce_sum_bfloat16"),
        ((1, 2, MANY * 8), (0, 0, 8), "strided_reduce_sum_bfloat16"),
        ((MANY, 2, 8), (1, 0, 0), "strided_reduce_sum_bfloat16"),
    ],
)
def test_more_elements_to_reduce_than_32_bits_count_are_interpreted(
    extents: tuple[int, int, int], more: tuple[int, int, int], kernel: str
) -> None:
    code = DTYPES["bfloat16"]

    def kernel_of(outer: int, reduced: int, inner: int) -> str:
        is_strided = kernel.startswith("strided")
        strides = (reduced * inner, inner, 1) if is_strided else (reduced * inner, 1, reduced)
        problem = (outer, reduced, inner), (0, code, *strides), [(0, code, 0, 0, 0)], REDUCTIONS["sum"]
        return core.reduce_kernel(PROGRAM.native, *problem)

    assert kernel_of(*extents) == kernel
    assert kernel_of(*(extent + add for extent, add in zip(extents, more, strict=True))) == ""


def test_a_row_of_more_elements_is_compiled() -> None:
    row = (0, DTYPES["bfloat16"], 8 * MANY, 1, 0)
    assert core.reduce_kernel(PROGRAM.native, (1, 8 * MANY, 1), row, [row], REDUCTIONS["sum"])


STRIDES = {"matrix": (64, 1), "row": (0, 1), "column": (1, 0), "number": (0, 0), "transposed": (1, 8)}
KINDS = {
    "rows": {"row": "strided", "column": "scalar", "number": "scalar"},
    "columns": {"row": "row", "column": "column", "number": "scalar"},
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("direction", KINDS)
def test_how_operands_lie_along_the_threads_lines(direction: str, layout: str) -> None:
    """Threads of a reduction of rows walk along rows, and those of one of columns down columns, eight at once."""
    program = PROGRAM.native
    code, row_stride, column_stride = DTYPES["bfloat16"], *STRIDES[layout]
    if direction == "rows":
        problem = (8, 64, 1), (0, code, 64, 1, 0), [(0, code, row_stride, column_stride, 0)]
    else:
        problem = (1, 8, 64), (0, code, 0, 64, 1), [(0, code, 0, row_stride, column_stride)]
    kinds = core.reduce_operand_kinds(program, *problem, REDUCTIONS["sum"])
    assert [kind.name for kind in kinds] == [KINDS[direction].get(layout, "strided")]


def test_operands_of_other_kinds_have_a_kernel_of_their_own() -> None:
    program = PROGRAM.native
    problem = (8, 64, 1), (16, DTYPES["float32"], 64, 1, 0), [(16, DTYPES["float32"], 1, 0, 0)], REDUCTIONS["sum"]
    types = [DTYPES["float32"]]
    kernel = core.reduce_kernel(program, *problem)
    strided = core.find_specialization(kernel, 0, program, types)
    assert strided is not core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar])
    with pytest.raises(ValueError, match="the program has 1 operands, got 2"):
        core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar] * 2)


LAYER = (16, 64, 63)  # rows, columns, depth: of rows that no GEMM kernel takes, so cuBLAS and one more kernel run


def layer_inputs(is_trained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    m, n, k = LAYER
    x, weight, r = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return x.bfloat16(), weight.bfloat16().requires_grad_(is_trained), r.bfloat16()


def test_the_pass_after_a_product(launches: EmulatedLaunches) -> None:
    x, weight, r = layer_inputs()
    with compiler() as compiled, cutfuse.specialization("now"):
        run_layer_generally(x, weight, r)
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,))
        assert direct_calls() == before + 1
    assert launches.names == ["pointwise"] * 3
    assert compiled.asked == [("pointwise_bfloat16", 3, [DTYPES["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * 3


@pytest.mark.parametrize("depth", [63, 16384])
def test_the_reduction_after_a_product(launches: EmulatedLaunches, depth: int) -> None:
    """Of rows that no GEMM kernel takes, and of a matrix so deep that cuBLAS and one more kernel are faster."""
    x, weight, r = (torch.randn(shape).bfloat16() for shape in ((16, depth), (64, depth), (16, 64)))
    with compiler() as compiled, cutfuse.specialization("now"):
        run_layer_generally(x, weight, r, "amax")
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,), reduce="amax")
        assert direct_calls() == before + 1
    assert launches.names == ["reduce"] * 3
    assert compiled.asked == [("row_reduce_amax_bfloat16", 3, [DTYPES["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * 3


@pytest.mark.parametrize("case", [*PASSES, "layer", "trained layer"])
def test_a_capture_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, launches: EmulatedLaunches, case: str) -> None:
    x, weight, r = layer_inputs(is_trained=case == "trained layer")

    def call() -> object:
        return PASSES[case].call(r, r) if case in PASSES else cutfuse.linear(x, weight, epilogue=gated, operands=(r,))

    with compiler() as compiled, cutfuse.specialization("now"):
        with monkeypatch.context() as patch:
            patch.setattr(specialize, "_is_capturing", lambda: True)
            before = core.remembered_calls()
            call()
            assert core.remembered_calls() == before, "a later call would never ask"
        assert compiled.asked == []
        call()
        call()
    assert len(compiled.asked) == 1 + (case == "trained layer"), "a trained layer asks for both passes"
    is_layer = case not in PASSES or PASSES[case].launches_first
    assert kernels_of(launches) == ([0, KERNEL + 1, KERNEL + 1] if is_layer else [KERNEL + 1])
