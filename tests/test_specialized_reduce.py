"""Programs before reductions that are compiled into their kernels: when launches take them, without a driver."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_epilogues import TypedCompiler, compiled_by
from emulated_device import core, direct_calls
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from torch import Tensor

import cutfuse
from cutfuse.ops import cuda
from cutfuse.planning import linear_launch, specialize
from cutfuse.planning.linear_plan import LinearArguments

KERNEL = 0x1000
DTYPES = core.dtypes()
REDUCTIONS = core.reductions()


def compiler(fails: bool = False) -> contextlib.AbstractContextManager[TypedCompiler]:
    return compiled_by(TypedCompiler(fails))  # type: ignore[return-value]


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(z) * r + z


def reduce(x: Tensor, *operands: Tensor, dim: int | None = -1, op: str = "sum", **given: Any) -> Tensor:
    return cutfuse.reduce(x, dim, op, prologue=gated, operands=operands, **given)


def run_generally(monkeypatch: pytest.MonkeyPatch, x: Tensor, *operands: Tensor) -> None:
    """What the operator does on a GPU; `emulated_device` leaves it to PyTorch."""
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "stream_of", lambda index: 0)
        patch.setattr(cuda, "on_device", lambda index: contextlib.nullcontext())
        cuda.reduce(x, operands, cutfuse.Epilogue(gated, 1).program.text, "sum", (1,), x.dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def kernels_of(launches: EmulatedLaunches) -> list[int]:
    return [launch.specialized for launch in launches.launches]


def test_a_first_call_waits_in_the_mode_now(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        before = direct_calls()
        for _ in range(3):
            reduce(x, r)
        assert direct_calls() == before + 2
    assert compiled.asked == [("row_reduce_sum_bfloat16", 3, [DTYPES["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * 2, "the first call was PyTorch's, as there is no GPU"


def test_the_general_path(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        run_generally(monkeypatch, x, r)
        run_generally(monkeypatch, x[:, :-1], r[:, :-1])
        with cutfuse.specialization("off"):
            run_generally(monkeypatch, x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [KERNEL + 1, 0, 0]


def test_calls_interpret_until_the_background_thread_is_done(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(specialize.background, "add", queued.append)
    x, r = inputs(8, 64)
    with compiler():
        run_generally(monkeypatch, x, r)
        before = direct_calls()
        for _ in range(3):
            reduce(x, r)
        assert direct_calls() == before, "until then calls take the general path"
        assert len(queued) == 1, "queued by the first call alone"
        queued[0].compile()
        reduce(x, r)
        assert direct_calls() == before + 1
    assert kernels_of(launches) == [0, KERNEL + 1]


def test_modes_have_keys_of_their_own(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled:
        reduce(x, r)
        cutfuse.wait(30)
        with cutfuse.specialization("off"):
            reduce(x, r)
            reduce(x, r)
        reduce(x, r)
    assert kernels_of(launches) == [0, KERNEL + 1]
    assert len(compiled.asked) == 1


def test_a_failure_is_interpreted_and_told_once(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, r = inputs(8, 64)
    monkeypatch.setattr(specialize.background, "_has_warned", False)
    with compiler(fails=True) as compiled, cutfuse.specialization("now"):
        with pytest.warns(RuntimeWarning, match="row_reduce_sum_bfloat16.*no driver for this"):
            reduce(x, r)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reduce(x, r)
            reduce(x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [0, 0]


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
    "no program": lambda x, r: cutfuse.reduce(x, -1),
    "a program that scales a sum": lambda x, r: cutfuse.reduce(x, -1, prologue=lambda z: z * 0.5),
    "rows of no whole vectors": lambda x, r: reduce(x[:, :-1], r[:, :-1]),
    "rows that begin off a boundary": lambda x, r: reduce(x[:, 1:9], r[:, 1:9]),
    "rows of an odd pitch": lambda x, r: reduce(x.view(-1)[:-8].view(8, 63)[:, :56], r[:, :56]),
    "columns of no whole vectors": lambda x, r: reduce(x[:, :-1], r[:, :-1], dim=0),
    "columns that begin off a boundary": lambda x, r: reduce(x[:, 1:9], r[:, 1:9], dim=0),
    "four columns": lambda x, r: reduce(x.view(128, 4), r.view(128, 4), dim=0),
    "every second column": lambda x, r: reduce(x[:, ::2], r[:, ::2], dim=0),
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
    "a row operand": lambda x, r: reduce(x, r[0]),
    "a column operand": lambda x, r: reduce(x, r[:, :1]),
    "a transposed operand": lambda x, r: reduce(x, columns_first(r)),
    "an operand off a boundary": lambda x, r: reduce(x[:, :56].clone(), r[:, 1:57]),
    "rows with gaps of whole vectors": lambda x, r: reduce(x[:, :56], r[:, :56]),
    "a transposed x": lambda x, r: reduce(x.t(), r.t(), dim=0),
    "columns": lambda x, r: reduce(x, r, dim=0),
    "columns with gaps of whole vectors": lambda x, r: reduce(x[:, :40], r[:, :40], dim=0),
    "columns of several matrices": lambda x, r: reduce(x.view(4, 2, 64), r.view(4, 2, 64), dim=1),
    "rows that are transposed": lambda x, r: reduce(columns_first(x), r),
    "everything": lambda x, r: reduce(x, r, dim=None),
    "another type of result": lambda x, r: reduce(x, r, out_dtype=torch.float32),
    "a maximum of products with a number": lambda x, r: cutfuse.reduce(x, -1, "amax", prologue=lambda z: z * 0.5),
    "rows inside of others": lambda x, r: reduce(x.view(4, 2, 64)[:, :, :32], r.view(4, 2, 64)[:, :, :32]),
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_compiled(launches: EmulatedLaunches, case: str) -> None:
    x, r = inputs(8, 64)
    with compiler(), cutfuse.specialization("now"):
        TAKEN[case](x, r)
        TAKEN[case](x, r)
    assert kernels_of(launches) == [KERNEL + 1]


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
def test_more_rows_or_columns_than_32_bits_count_are_interpreted(
    extents: tuple[int, int, int], more: tuple[int, int, int], kernel: str
) -> None:
    program = cutfuse.Epilogue(gated, 1).program
    code = DTYPES["bfloat16"]

    def kernel_of(outer: int, reduced: int, inner: int) -> str:
        is_strided = kernel.startswith("strided")
        strides = (reduced * inner, inner, 1) if is_strided else (reduced * inner, 1, reduced)
        problem = (outer, reduced, inner), (0, code, *strides), [(0, code, 0, 0, 0)], REDUCTIONS["sum"]
        return core.reduce_kernel(program.native, *problem)

    assert kernel_of(*extents) == kernel
    assert kernel_of(*(extent + add for extent, add in zip(extents, more, strict=True))) == ""


def test_a_row_of_more_elements_is_compiled() -> None:
    program = cutfuse.Epilogue(gated, 1).program
    row = (0, DTYPES["bfloat16"], 8 * MANY, 1, 0)
    assert core.reduce_kernel(program.native, (1, 8 * MANY, 1), row, [row], REDUCTIONS["sum"])


STRIDES = {"matrix": (64, 1), "row": (0, 1), "column": (1, 0), "number": (0, 0), "transposed": (1, 8)}
KINDS = {
    "rows": {"row": "strided", "column": "scalar", "number": "scalar"},
    "columns": {"row": "row", "column": "column", "number": "scalar"},
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("direction", KINDS)
def test_how_operands_lie_along_the_threads_lines(direction: str, layout: str) -> None:
    """Threads of a reduction of rows walk along rows, and those of one of columns down columns, eight at once."""
    program = cutfuse.Epilogue(gated, 1).program.native
    code, row_stride, column_stride = DTYPES["bfloat16"], *STRIDES[layout]
    if direction == "rows":
        problem = (8, 64, 1), (0, code, 64, 1, 0), [(0, code, row_stride, column_stride, 0)]
    else:
        problem = (1, 8, 64), (0, code, 0, 64, 1), [(0, code, 0, row_stride, column_stride)]
    kinds = core.reduce_operand_kinds(program, *problem, REDUCTIONS["sum"])
    assert [kind.name for kind in kinds] == [KINDS[direction].get(layout, "strided")]


def test_a_kernel_for_operands_of_other_kinds_is_refused() -> None:
    program = cutfuse.Epilogue(gated, 1).program.native
    problem = (8, 64, 1), (16, DTYPES["float32"], 64, 1, 0), [(16, DTYPES["float32"], 1, 0, 0)], REDUCTIONS["sum"]
    types = [DTYPES["float32"]]
    kernel = core.reduce_kernel(program, *problem)
    strided = core.find_specialization(kernel, 0, program, types)
    assert strided is not core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar])
    with pytest.raises(ValueError, match=f"{kernel} is of operands of other types or kinds"):
        core.reduce(0, program, *problem, 16, DTYPES["float32"], 0, strided)
    with pytest.raises(ValueError, match="the program has 1 operands, got 2"):
        core.find_specialization(kernel, 0, program, types, [core.OperandKind.scalar] * 2)


@pytest.mark.parametrize("depth", [63, 16384])
def test_the_reduction_after_a_product(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Of rows that no GEMM kernel takes, and of a matrix so deep that cuBLAS and one more kernel are faster."""
    x, weight, r = (torch.randn(shape).bfloat16() for shape in ((16, depth), (64, depth), (16, 64)))
    with compiler() as compiled, cutfuse.specialization("now"):
        with monkeypatch.context() as patch:
            patch.setattr(linear_launch, "stream_of", lambda index: 0)
            patch.setattr(linear_launch, "on_device", lambda index: contextlib.nullcontext())
            program = cutfuse.Epilogue(gated, 1).program
            cuda._run(LinearArguments(x, weight, None, [r], program, "amax", x.dtype))
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,), reduce="amax")
        assert direct_calls() == before + 1
    assert launches.names == ["reduce"] * 2
    assert compiled.asked == [("row_reduce_amax_bfloat16", 3, [DTYPES["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * 2


def test_a_capture_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        with monkeypatch.context() as patch:
            patch.setattr(specialize, "_is_capturing", lambda: True)
            before = core.remembered_calls()
            reduce(x, r)
            assert core.remembered_calls() == before, "a later call would never ask"
        assert compiled.asked == []
        reduce(x, r)
        reduce(x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [KERNEL + 1]


def test_results_are_those_of_the_program(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64, dtype=torch.float32)
    with compiler(), cutfuse.specialization("now"):
        for _ in range(2):
            torch.testing.assert_close(reduce(x, r), gated(x, r).sum(-1))
