"""Derivatives that are compiled into their kernel: when launches take it, with a function for the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from compiled_epilogues import FakeCompiler, compiled_by
from emulated_device import core, direct_calls
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Program
from cutfuse.layer import cuda, specialize

BFLOAT16, FLOAT32, FLOAT16 = (core.dtypes()[name] for name in ("bfloat16", "float32", "float16"))
GATED = "operands=1; sigmoid z; mul prev r0; add prev z"


class NamingCompiler(FakeCompiler):
    """`asked`: the kernels, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __call__(self, kernel: str, device: int, program: Any, types: list[int]) -> int:
        self.asked.append(kernel)
        return super().__call__(kernel, device, program, types)


def compiler() -> contextlib.AbstractContextManager[NamingCompiler]:
    return compiled_by(NamingCompiler())  # type: ignore[return-value]


def kernel_for(
    text: str = GATED,
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
    return core.pointwise_backward_kernel(*problem)


def test_a_kernel_is_named_after_what_it_gives() -> None:
    assert kernel_for() == "pointwise_backward_bfloat16_d0"
    assert kernel_for(outputs=[(1, 0, FLOAT32), (0, 0, BFLOAT16)]) == "pointwise_backward_bfloat16_d01"
    assert kernel_for(outputs=[(1, 0, BFLOAT16)]) == "pointwise_backward_bfloat16_d1"
    assert kernel_for(column_sum=True) == "pointwise_backward_columns_bfloat16_d0"
    assert kernel_for(outputs=[(1, 0, BFLOAT16)], column_sum=True) == "pointwise_backward_columns_bfloat16_d01"
    fp32 = (0, FLOAT32, 0, 64, 1)
    assert kernel_for(grad=fp32, x=fp32, outputs=[(0, 0, FLOAT32)]) == "pointwise_backward_float32_d0"
    assert kernel_for("operands=0; gelu z") == "pointwise_backward_bfloat16_d0", "forwards have it compiled in"


INTERPRETED: dict[str, dict[str, Any]] = {
    "the identity": {"text": "operands=0"},
    "rows of no whole vectors, added up": {"shape": (8, 63), "column_sum": True},
    "no whole vectors": {"shape": (3, 63)},
    "a gradient of another type": {"grad": (0, FLOAT32, 0, 64, 1)},
    "a gradient of copies": {"grad": (0, BFLOAT16, 0, 0, 0)},
    "a gradient in columns": {"grad": (0, BFLOAT16, 0, 1, 8)},
    "rows off a boundary": {"x": (2, BFLOAT16, 0, 64, 1)},
    "an odd pitch": {"x": (0, BFLOAT16, 0, 67, 1)},
    "a derivative in another type of 16 bits": {"outputs": [(0, 0, BFLOAT16), (1, 0, FLOAT16)]},
    "nothing is wanted": {"outputs": []},
    "an empty tensor": {"shape": (0, 64)},
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_what_stays_interpreted(case: str) -> None:
    assert kernel_for(**INTERPRETED[case]) == ""


TAKEN: dict[str, dict[str, Any]] = {
    "one row of all elements": {"shape": (8, 63), "text": "operands=0; tanh z; neg prev"},
    "rows with gaps of whole vectors": {"x": (0, BFLOAT16, 0, 72, 1), "grad": (16, BFLOAT16, 0, 80, 1)},
    "a single row": {"shape": (1, 64)},
    "few columns": {"shape": (1000, 8), "column_sum": True},
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_compiled(case: str) -> None:
    assert kernel_for(**TAKEN[case])


@pytest.mark.skipif(not core.cuda_build, reason="this build of cutfuse has no CUDA kernels")
@pytest.mark.parametrize("shape", [(1, 8), (70, 24), (333, 264), (8192, 16384), (100000, 8)])
def test_columns_are_added_up_in_one_order(shape: tuple[int, int]) -> None:
    """Whichever kernel runs, a block has as many rows: as the partial sums' memory has been allocated for."""
    rows, columns = shape
    whole = (0, BFLOAT16, 0, columns, 1)
    program = Program.parse(GATED).native
    problem = program, (1, rows, columns), whole, whole, [whole], [(0, 0, BFLOAT16)]
    _, blocks, threads = core.pointwise_backward_parameters(*problem, 256)
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


LAYER = (16, 64, 63)  # rows, columns, depth


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.sigmoid(z) * r + z


def train(bias: bool = False, wants_operand: bool = False, calls: int = 2) -> None:
    m, n, k = LAYER
    x, weight, r = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.randn(m, n).bfloat16()
    b = torch.randn(n).bfloat16().requires_grad_() if bias else None
    weight.requires_grad_()
    r.requires_grad_(wants_operand)
    for _ in range(calls):
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
    assert compiled.asked == ["pointwise_bfloat16", f"pointwise_backward_{kind}bfloat16_{suffix}"]
    assert backward_kernels(launches) == [0x1002, 0x1002]


def test_the_backward_is_compiled_while_the_forward_runs(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(specialize.background, "add", queued.append)
    m, n, k = LAYER
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().requires_grad_()
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
    m, n, k = LAYER
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16().requires_grad_()
    with compiler(), cutfuse.specialization("now"):
        for _ in range(2):
            cutfuse.linear(x, weight, epilogue=lambda z: torch.tanh(z) * z).sum().backward()
    assert len(backward_kernels(launches)) == 2


def differentiate(wanted: list[int], column_sum: bool, grad: Tensor, x: Tensor, r: Tensor) -> list[Tensor]:
    return cuda.pointwise_backward(grad, x, [r], GATED, "none", None, wanted, column_sum)


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], list[int], bool, list[str]]] = {
    "a full operand": (lambda r: r, [0, 1], False, ["pointwise_backward_bfloat16_d01"]),
    "a row, whose gradient is added up": (lambda r: r[:1], [0, 1], False, ["pointwise_backward_bfloat16_d01"]),
    "only the operand": (lambda r: r, [1], False, ["pointwise_backward_bfloat16_d1"]),
    "column sums": (lambda r: r, [0], True, ["pointwise_backward_columns_bfloat16_d0"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_operator(launches: EmulatedLaunches, way: str) -> None:
    grad, x, r = (torch.randn(8, 64).bfloat16() for _ in range(3))
    shaped, wanted, column_sum, kernels = WAYS[way]
    with compiler() as compiled, cutfuse.specialization("now"):
        differentiate(wanted, column_sum, grad, x, shaped(r))
        with cutfuse.specialization("off"):
            differentiate(wanted, column_sum, grad, x, shaped(r))
    assert [kernel for kernel in compiled.asked if "backward" in kernel] == kernels
    assert [kernel > 0 for kernel in backward_kernels(launches)] == [True, False]


def test_a_reductions_weights_are_interpreted(launches: EmulatedLaunches) -> None:
    x = torch.randn(8, 64).bfloat16()
    result = torch.logsumexp(x.float(), 1, keepdim=True)
    with compiler() as compiled, cutfuse.specialization("now"):
        grad = torch.ones(8, 1)
        cuda.pointwise_backward(grad, x, [], "operands=0; tanh z", "logsumexp", result, [0], False)
    assert not any("backward" in kernel for kernel in compiled.asked)


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
    assert not any("backward" in kernel for kernel in compiled.asked)
