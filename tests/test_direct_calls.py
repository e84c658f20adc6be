"""The direct path of the public functions: the same results and launches as the general path's, on a CPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from emulated_device import EmulatedLaunches, direct_calls, paused
from emulated_device import launches_of_each_reader as launches_of_each_reader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cutfuse
from cutfuse.layer.calls import record

Result = TypeVar("Result", Tensor, list[Tensor])


def run_three_ways(call: Callable[[], Result]) -> tuple[Result, Result, bool]:
    """On the general path, directly where there is a plan, and whether there was."""
    with paused():
        expected = call()
    call()
    before = direct_calls()
    y = call()
    return expected, y, direct_calls() > before


def steps(tensor: Tensor) -> list[int]:
    """The strides of the dimensions along which there is a step."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def check_same(y: Tensor, expected: Tensor, inputs: torch.dtype = torch.float32) -> None:
    """`inputs`: a type to which one of the two may round what is in between."""
    assert (y.shape, steps(y), y.dtype) == (expected.shape, steps(expected), expected.dtype)
    tolerance = 1e-4 if y.dtype is inputs is torch.float32 else 6e-2
    torch.testing.assert_close(y.float(), expected.float(), rtol=tolerance, atol=tolerance)


EPILOGUES: dict[str, tuple[Callable[..., Tensor] | None, int]] = {
    "none": (None, 0),
    "relu": (torch.relu, 0),
    "lambda": (lambda z: torch.sigmoid(z) * 2, 0),
    "add": (lambda z, r: torch.relu(z) + r, 1),
    "two": (lambda z, r, s: z * r + s, 2),
    "sum alone": (lambda z, r: r + z, 1),
    "difference from a number": (lambda z: 1 - z, 0),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_operand(kind: str, leading: tuple[int, ...], columns: int, dtype: torch.dtype) -> Any:
    shapes = {"full": (*leading, columns), "row": (columns,), "column": (*leading, 1), "scalar": ()}
    return torch.randn(shapes[kind]).to(dtype) if kind in shapes else {"number": 1.5, "integer": 2}[kind]


def whole(*shape: int, dtype: torch.dtype) -> Tensor:
    """-1, 0 and 1. Sums of up to 256 products of them are exact in every type, whichever path rounds them to it."""
    return torch.randint(-1, 2, shape).to(dtype)


KINDS = ["full", "row", "column", "scalar", "number", "integer"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_linear_as_on_the_general_path(launches: EmulatedLaunches, data: st.DataObject) -> None:
    draw = data.draw
    leading = draw(st.sampled_from([(1,), (5,), (2, 3), (130,)]))
    columns, depth = draw(st.sampled_from([(8, 16), (24, 8), (1, 8), (264, 72), (7, 5)]))
    dtype = draw(st.sampled_from(DTYPES))
    name = draw(st.sampled_from(sorted(EPILOGUES)))
    epilogue, count = EPILOGUES[name]
    x = whole(*leading, depth, dtype=dtype)
    weight = whole(columns, depth, dtype=dtype)
    if draw(st.booleans()):
        weight = weight.t().contiguous().t()
    bias = whole(columns, dtype=dtype) if draw(st.booleans()) else None
    operands = tuple(
        make_operand(draw(st.sampled_from(KINDS)), leading, columns, draw(st.sampled_from(DTYPES)))
        for _ in range(count)
    )
    reduce = draw(st.sampled_from([None, None, "sum", "amax"]))
    options = {"keepdim": draw(st.booleans()), "out_dtype": draw(st.sampled_from([None, torch.float32]))}

    def call() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduce, **options)

    with cutfuse.precision("tf32" if dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"):
        expected, y, was_direct = run_three_ways(call)
    check_same(y, expected, dtype)
    assert was_direct, (name, reduce, operands)


def rows_with_gaps() -> tuple[Tensor, Tensor, Tensor]:
    """Whose product PyTorch rounds before it adds the bias."""
    x = whole(2, 3, 24, dtype=torch.bfloat16)[..., :16]
    return x, whole(7, 16, dtype=torch.bfloat16), whole(7, dtype=torch.bfloat16)


def with_a_strided_bias() -> tuple[Tensor, Tensor, Tensor]:
    """Which a kernel over planes reads from a copy."""
    return whole(16, 64, dtype=torch.float32), whole(64, 64, dtype=torch.float32), whole(128, dtype=torch.float32)[::2]


def of_odd_columns() -> tuple[Tensor, Tensor, Tensor]:
    """Whose product is cuBLAS's."""
    return tuple(whole(*shape, dtype=torch.float32) for shape in ((5, 8), (7, 8), (7,)))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "mode"),
    [(rows_with_gaps, None), (with_a_strided_bias, "split3"), (of_odd_columns, "tf32"), (of_odd_columns, "ieee")],
)
@pytest.mark.parametrize("allows_tf32", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_what_is_presented_otherwise_is_direct(
    launches: EmulatedLaunches,
    make: Callable[[], tuple[Tensor, Tensor, Tensor]],
    mode: str | None,
    allows_tf32: bool,
    is_trained: bool,
) -> None:
    """A copied bias, rows that are multiplied as a matrix, and a product in another precision than PyTorch's own."""
    given = [t.requires_grad_(is_trained) for t in make()]

    def call() -> list[Tensor]:
        y = cutfuse.linear(*given, epilogue=limited)
        return [y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y))] if is_trained else [y]

    torch.set_float32_matmul_precision("high" if allows_tf32 else "highest")
    with cutfuse.precision(mode) if mode else contextlib.nullcontext():
        expected, found, was_direct = run_three_ways(call)
        made_by = cutfuse.linear(*given, epilogue=limited).grad_fn
    assert was_direct
    assert not is_trained or type(made_by).__name__ == "DirectLinearBackward"
    assert all(map(torch.equal, found, expected))


def limited(z: Tensor) -> Tensor:
    return (z * 2).clamp(-9, 9)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pointwise_as_on_the_general_path(launches: EmulatedLaunches, data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.sampled_from([(3,), (4, 6), (2, 3, 5), (2, 3, 4, 4)]))
    x = torch.randn(shape).to(draw(st.sampled_from(DTYPES)))
    if len(shape) == 4 and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    if len(shape) == 2 and draw(st.booleans()):
        x = x.t()
    epilogue, count = EPILOGUES[draw(st.sampled_from(["relu", "lambda", "add", "two"]))]
    kinds = ["number", "scalar", "full", "row"]
    operands = [
        make_operand(draw(st.sampled_from(kinds)), tuple(x.shape[:-1]), x.shape[-1], draw(st.sampled_from(DTYPES)))
        for _ in range(count)
    ]
    out_dtype = draw(st.sampled_from([None, torch.float32]))
    expected, y, was_direct = run_three_ways(lambda: cutfuse.pointwise(epilogue, x, *operands, out_dtype=out_dtype))
    check_same(y, expected)
    assert was_direct or len(shape) == 4, "operands in another order of memory than x are copied first"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reduce_as_on_the_general_path(launches: EmulatedLaunches, data: st.DataObject) -> None:
    draw = data.draw
    x = torch.randn(draw(st.sampled_from([(4, 6), (2, 3, 5)]))).to(draw(st.sampled_from(DTYPES)))
    dim = draw(st.sampled_from([None, 0, -1, (0, 1), (-1,)]))
    op = draw(st.sampled_from(["sum", "mean", "amax", "amin", "logsumexp"]))
    prologue, _ = EPILOGUES[draw(st.sampled_from(["none", "relu", "lambda"]))]
    keepdim = draw(st.booleans())
    expected, y, was_direct = run_three_ways(lambda: cutfuse.reduce(x, dim, op, keepdim, prologue))
    check_same(y, expected)
    assert was_direct


def test_a_gradient_is_handed_on_to_an_operand_of_more_dimensions(launches: EmulatedLaunches) -> None:
    x, weight = torch.randn(2, 3, 16).bfloat16().requires_grad_(), torch.randn(8, 16).bfloat16()
    residual = torch.randn(1, 2, 3, 8).bfloat16().requires_grad_()
    for _ in range(2):
        y = cutfuse.linear(x, weight, epilogue=torch.add, operands=(residual,))
        (found,) = torch.autograd.grad(y, residual, torch.ones_like(y))
        assert torch.equal(found, torch.ones_like(residual))


@pytest.mark.parametrize("is_trained", [True, False])
def test_an_operand_that_is_broadcast_already(launches: EmulatedLaunches, is_trained: bool) -> None:
    """Its rows lie in the same memory, so that it is a matrix [M, N] without a copy, but its gradient is none."""
    x, weight = torch.randn(2, 3, 16).bfloat16().requires_grad_(), torch.randn(8, 16).bfloat16()
    operand = torch.randn(8).expand(2, 1, 8).requires_grad_(is_trained)
    grad = torch.ones(8, 3, 2).permute(2, 1, 0)  # for which a backward pass is general
    leaf = operand if is_trained else x

    def call() -> Tensor:
        y = cutfuse.linear(x, weight, epilogue=lambda z, r: torch.tanh(z) * r, operands=(operand,))
        return torch.autograd.grad(y, leaf, torch.ones_like(y) if is_trained else grad)[0]

    expected, found, _ = run_three_ways(call)
    assert found.untyped_storage().nbytes() == leaf.numel() * leaf.itemsize
    check_same(found, expected, torch.bfloat16)


def test_a_record_of_a_tensor_in_two_places_serves_two_tensors(launches: EmulatedLaunches) -> None:
    weight, bias = torch.randn(16, 16), torch.randn(16)

    def call(x: Tensor, residual: Tensor, row: Tensor) -> Tensor:
        return cutfuse.linear(
            x, weight, bias, epilogue=lambda z, r, s: z + r * s, operands=(residual, row), reduce="sum"
        )

    x = torch.randn(4, 16)
    call(x, x, bias)
    given = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    before = direct_calls()
    y = call(*given)
    assert direct_calls() > before
    with paused():
        check_same(y, call(*given))


class Alive(TorchFunctionMode):
    """Counts the results of operations that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.results.append(weakref.ref(result))
        self.most = max(self.most, sum(found() is not None for found in self.results))
        return result


def doubled(x: Tensor) -> Tensor:
    for _ in range(6):
        x = x * 2
    return x


def test_a_record_frees_what_is_not_read_again() -> None:
    x = torch.randn(5)
    with Alive() as recording:
        _, replay = record(doubled, (x,))
    with Alive() as replaying:
        y = replay(x)
    assert torch.equal(y, x * 64)
    assert (recording.most, len(recording.results)) == (replaying.most, len(replaying.results)) == (2, 6)


def test_records_that_differ_in_sizes_alone_share_their_code() -> None:
    first, second = (record(lambda x: x.expand(x.shape[1], -1), (torch.randn(1, size),))[1] for size in (3, 4))
    assert first.__code__ is second.__code__
    assert second(torch.zeros(1, 4)).shape == (4, 4)
