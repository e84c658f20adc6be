"""Pointwise programs that are compiled into their kernels: when launches take them, with a function for the driver."""

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


def compiler(fails: bool = False) -> contextlib.AbstractContextManager[TypedCompiler]:
    return compiled_by(TypedCompiler(fails))  # type: ignore[return-value]


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(z) * r + z


def run_generally(monkeypatch: pytest.MonkeyPatch, x: Tensor, *operands: Tensor) -> None:
    """What the operator does on a GPU; `emulated_device` leaves it to PyTorch."""
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "stream_of", lambda index: 0)
        patch.setattr(cuda, "on_device", lambda index: contextlib.nullcontext())
        cuda.pointwise(x, operands, cutfuse.Epilogue(gated, 1).program.text, x.dtype)


def run_layer_generally(monkeypatch: pytest.MonkeyPatch, x: Tensor, weight: Tensor, r: Tensor) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(linear_launch, "stream_of", lambda index: 0)
        patch.setattr(linear_launch, "on_device", lambda index: contextlib.nullcontext())
        program = cutfuse.Epilogue(gated, 1).program
        cuda._run(LinearArguments(x, weight, None, [r], program, "none", x.dtype))


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def kernels_of(launches: EmulatedLaunches) -> list[int]:
    return [launch.specialized for launch in launches.launches]


def test_a_first_call_waits_in_the_mode_now(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        before = direct_calls()
        for _ in range(3):
            cutfuse.pointwise(gated, x, r)
        assert direct_calls() == before + 2
    assert compiled.asked == [("pointwise_bfloat16", 3, [core.dtypes()["bfloat16"]])]
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
            cutfuse.pointwise(gated, x, r)
        assert direct_calls() == before, "until then calls take the general path"
        assert len(queued) == 1, "queued by the first call alone"
        queued[0].compile()
        cutfuse.pointwise(gated, x, r)
        assert direct_calls() == before + 1
    assert kernels_of(launches) == [0, KERNEL + 1]


def test_the_background_thread_compiles(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler():
        cutfuse.pointwise(gated, x, r)
        cutfuse.wait(30)
        cutfuse.pointwise(gated, x, r)
    assert kernels_of(launches)[-1] == KERNEL + 1


def test_nothing_is_compiled_in_the_mode_off(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled:
        cutfuse.pointwise(gated, x, r)
        cutfuse.wait(30)
        with cutfuse.specialization("off"):
            cutfuse.pointwise(gated, x, r)
            cutfuse.pointwise(gated, x, r)
        cutfuse.pointwise(gated, x, r)
    assert kernels_of(launches) == [0, KERNEL + 1]
    assert len(compiled.asked) == 1


def test_a_failure_is_interpreted_and_told_once(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, r = inputs(8, 64)
    monkeypatch.setattr(specialize.background, "_has_warned", False)
    with compiler(fails=True) as compiled, cutfuse.specialization("now"):
        with pytest.warns(RuntimeWarning, match="pointwise_bfloat16.*no driver for this"):
            cutfuse.pointwise(gated, x, r)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cutfuse.pointwise(gated, x, r)
            cutfuse.pointwise(gated, x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [0, 0]


def test_programs_that_differ_in_numbers_share_a_kernel(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        for number in (0.5, 1.5):
            for _ in range(2):
                cutfuse.pointwise(lambda z, r, number=number: torch.tanh(z * number) * r, x, r)
    assert len(compiled.asked) == 1
    assert kernels_of(launches) == [KERNEL + 1] * 2


def test_operands_of_other_types_have_another_kernel(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64)
    with compiler() as compiled, cutfuse.specialization("now"):
        for _ in range(2):
            cutfuse.pointwise(gated, x, r)
            cutfuse.pointwise(gated, x, r.float(), out_dtype=torch.bfloat16)
            cutfuse.pointwise(gated, x.float(), r)
    dtypes = core.dtypes()
    assert [(kernel, types) for kernel, _, types in compiled.asked] == [
        ("pointwise_bfloat16", [dtypes["bfloat16"]]),
        ("pointwise_bfloat16", [dtypes["float32"]]),
        ("pointwise_float32", [dtypes["bfloat16"]]),
    ]
    assert kernels_of(launches) == [KERNEL + 1, KERNEL + 2, KERNEL + 3]


INTERPRETED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a chain that is compiled in": lambda x, r: cutfuse.pointwise(torch.tanh, x),
    "rows of no whole vectors": lambda x, r: cutfuse.pointwise(gated, x[:, :-1], r[:, :-1]),
    "rows that begin off a boundary": lambda x, r: cutfuse.pointwise(gated, x[:, 1:9], r[:, 1:9]),
    "another type of result": lambda x, r: cutfuse.pointwise(gated, x, r, out_dtype=torch.float32),
    "a few elements after the last vector": lambda x, r: cutfuse.pointwise(gated, x.view(-1)[:-3], r.view(-1)[:-3]),
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
    "a row operand": lambda x, r: cutfuse.pointwise(gated, x, r[0]),
    "a column operand": lambda x, r: cutfuse.pointwise(gated, x, r[:, :1]),
    "a transposed operand": lambda x, r: cutfuse.pointwise(gated, x, r.t().contiguous().t()),
    "an operand off a boundary": lambda x, r: cutfuse.pointwise(gated, x[:, :56].clone(), r[:, 1:57]),
    "rows with gaps of whole vectors": lambda x, r: cutfuse.pointwise(gated, x[:, :56], r[:, :56]),
    "a transposed x": lambda x, r: cutfuse.pointwise(gated, x.t(), r.t()),
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
    program = cutfuse.Epilogue(gated, 1).program
    code = core.dtypes()["bfloat16"]

    def kernel(columns: int) -> str:
        vector = (0, code, columns, columns, 1)
        return core.pointwise_kernel(program.native, (1, 1, columns), vector, [vector], 0, code)

    assert kernel((1 << 20) + 3) == "pointwise_bfloat16"
    assert kernel((1 << 19) + 3) == ""


@pytest.mark.parametrize(("rows", "columns", "more"), [(1 << 30, 8, (1, 0)), (2, 1 << 30, (0, 8))])
def test_more_rows_or_columns_than_32_bits_count_are_interpreted(
    rows: int, columns: int, more: tuple[int, int]
) -> None:
    program = cutfuse.Epilogue(gated, 1).program
    code = core.dtypes()["bfloat16"]

    def kernel(rows: int, columns: int) -> str:
        x, row = (0, code, rows * columns, columns, 1), (0, code, 0, 0, 1)
        return core.pointwise_kernel(program.native, (1, rows, columns), x, [row], 0, code)

    assert kernel(rows, columns) == "pointwise_bfloat16"
    assert kernel(rows + more[0], columns + more[1]) == ""


LAYER = (16, 64, 63)  # rows, columns, depth: of rows that no GEMM kernel takes, so cuBLAS and one more kernel run


def layer_inputs(is_trained: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    m, n, k = LAYER
    x, weight, r = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    return x.bfloat16(), weight.bfloat16().requires_grad_(is_trained), r.bfloat16()


def test_the_pass_after_a_product(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, r = layer_inputs()
    with compiler() as compiled, cutfuse.specialization("now"):
        run_layer_generally(monkeypatch, x, weight, r)
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,))
        assert direct_calls() == before + 1
    assert launches.names == ["pointwise"] * 2
    assert compiled.asked == [("pointwise_bfloat16", 3, [core.dtypes()["bfloat16"]])]
    assert kernels_of(launches) == [KERNEL + 1] * 2


def test_the_forward_pass_of_a_trained_layer(launches: EmulatedLaunches) -> None:
    x, weight, r = layer_inputs(is_trained=True)
    with compiler() as compiled, cutfuse.specialization("now"):
        before = direct_calls()
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,))
        assert direct_calls() == before + 1
    assert kernels_of(launches) == [KERNEL + 1]
    asked = [kernel for kernel, *_ in compiled.asked]
    assert asked == ["pointwise_bfloat16", "pointwise_backward_bfloat16_d0"]


@pytest.mark.parametrize(("function", "is_trained"), [("pointwise", False), ("linear", False), ("linear", True)])
def test_a_capture_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch, launches: EmulatedLaunches, function: str, is_trained: bool
) -> None:
    x, weight, r = layer_inputs(is_trained)

    def call() -> None:
        if function == "pointwise":
            cutfuse.pointwise(gated, r, r)
        else:
            cutfuse.linear(x, weight, epilogue=gated, operands=(r,))

    with compiler() as compiled, cutfuse.specialization("now"):
        with monkeypatch.context() as patch:
            patch.setattr(specialize, "_is_capturing", lambda: True)
            before = core.remembered_calls()
            call()
            assert core.remembered_calls() == before, "a later call would never ask"
        assert compiled.asked == []
        call()
        call()
    assert len(compiled.asked) == 1 + is_trained, "a trained layer asks for both passes"
    assert kernels_of(launches) == [KERNEL + 1]


def test_results_are_those_of_the_program(launches: EmulatedLaunches) -> None:
    x, r = inputs(8, 64, dtype=torch.float32)
    with compiler(), cutfuse.specialization("now"):
        for _ in range(2):
            torch.testing.assert_close(cutfuse.pointwise(gated, x, r), gated(x, r))
