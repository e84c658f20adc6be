"""`cutfuse.pointwise` on a GPU: every op, type and layout, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from generators import EPILOGUES, FLOATS, REDUCTIONS, assert_no_worse, eager_reduce, operands_for, slack_for, to_double
from gpu_tensors import DEVICE, VIEWS, randn
from torch import Tensor

import cutfuse
from cutfuse.epilogue.table import CONDITION, Op, op_table

pytestmark = pytest.mark.gpu

SPECIAL = (
    float("nan"),
    float("inf"),
    float("-inf"),
    0.0,
    -0.0,
    1e-40,
    1e-6,
    -1e-6,
    1.0,
    -1.0,
    20.5,
    -20.5,
    88.8,
    -88.8,
    6e4,
)


def pointwise_op(op: Op, *values: Tensor) -> Tensor:
    """In a kernel. The direct path recognises an Epilogue by its expression, and no function that reads the op."""
    fn = cutfuse.Epilogue(lambda *tensors: call_op(op, *tensors), op.arity - 1)
    return cutfuse.pointwise(fn, *values)


def call_op(op: Op, *values: Tensor) -> Tensor:
    """The op on tensors, with its parameters at their defaults, as floats."""
    tensors = [value > 0 if name == CONDITION else value for name, value in zip(op.tensors, values, strict=True)]
    return op.compose(tensors, [default for _, default in op.parameters]) * 1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op(op: Op, dtype: torch.dtype) -> None:
    values = [randn(33 + k, 257, dtype=dtype)[:33] * 2 for k in range(op.arity)]
    actual = pointwise_op(op, *values)
    eager, exact = call_op(op, *values).to(dtype), call_op(op, *to_double(*values)).double()
    assert_no_worse(actual, eager, exact, slack=1.0 if dtype != torch.float32 else 3.0)


@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op_at_special_values(op: Op) -> None:
    tensors = [t.to(DEVICE) for t in torch.tensor(list(itertools.product(SPECIAL, repeat=op.arity))).unbind(-1)]
    actual, expected = pointwise_op(op, *tensors), call_op(op, *tensors)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 47), (300, 4096), (5, 100003)], ids=str)
def test_epilogues(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    fn, count = EPILOGUES[name]
    x, operands = randn(*shape, dtype=dtype), operands_for(count, *shape, dtype, DEVICE)
    actual = cutfuse.pointwise(fn, x, *operands)
    assert_no_worse(actual, fn(x, *operands), fn(x.double(), *to_double(*operands)), slack=slack_for(dtype))


# Views that a row over two of their dimensions leaves with four.
FOUR_DIMENSIONS = ("contiguous", "sliced", "offset", "expanded")


@pytest.mark.general_path(
    "row and view have four dimensions together", when=lambda case: case["view"] in FOUR_DIMENSIONS
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](randn(3, 4, 50, 66, dtype=dtype))
    row = randn(x.shape[1], 1, x.shape[3], dtype=dtype)
    actual = cutfuse.pointwise(lambda z, r: torch.tanh(z) * r, x, row)
    assert actual.stride() == torch.empty_like(x).stride()
    assert_no_worse(actual, torch.tanh(x) * row, torch.tanh(x.double()) * row.double())


@pytest.mark.general_path("tensors are cast, or empty")
def test_integers_and_empty_tensors() -> None:
    torch.testing.assert_close(
        cutfuse.sigmoid(torch.arange(3, device=DEVICE)), torch.sigmoid(torch.arange(3.0, device=DEVICE))
    )
    assert cutfuse.sigmoid(torch.empty(0, 3, device=DEVICE)).shape == (0, 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_than_2_31_elements(dtype: torch.dtype) -> None:
    rows, columns = 3, 2**30 + 11
    x = torch.empty(rows, columns, dtype=dtype, device=DEVICE).normal_()
    y = cutfuse.sigmoid(x)
    for part in (slice(0, 1000), slice(columns - 1000, columns)):
        exact = torch.sigmoid(x[:, part].double())
        assert_no_worse(y[:, part], torch.sigmoid(x[:, part]), exact, slack=2.0)


# Of one argument: rows of the op table, and compositions.
FUNCTIONS = {
    **{op.name: op.function for op in op_table().ops if op.arity == 1 and not op.parameters},
    **{
        function.__name__: function
        for function in (F.elu, F.selu, F.celu, F.leaky_relu, F.hardtanh, F.softplus, F.softshrink, F.hardshrink)
    },
}


@pytest.mark.general_path("gradients of pointwise and reduce")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_at_special_points_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    """NaN, infinities and zeros, with their signs, are those of PyTorch's kernels of a GPU."""
    points = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.25, -0.25, 1.0, -1.0], dtype=dtype)
    given, own = (points.to(DEVICE).requires_grad_() for _ in range(2))
    expected, found = FUNCTIONS[name](given), cutfuse.pointwise(FUNCTIONS[name], own)
    torch.testing.assert_close(found, expected, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(found.signbit()[zeros], expected.signbit()[zeros])
    if not expected.requires_grad:
        return
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y, x in ((found, own), (expected, given))]
    torch.testing.assert_close(*slopes, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["sum", "logsumexp"])
@pytest.mark.parametrize("view", VIEWS)
def test_reductions_of_any_strides(view: str, op: str, dtype: torch.dtype) -> None:
    # Reduced over all dimensions a draw is one number, whose error is chance: 8 of them average out.
    draws = [VIEWS[view](randn(3, 4, 50, 66, dtype=dtype, seed=seed)) for seed in range(8)]
    for dims in (dims for count in range(1, 5) for dims in itertools.combinations(range(4), count)):
        actual = torch.stack([cutfuse.reduce(x, dims, op) for x in draws])
        eager = torch.stack([eager_reduce(x, dims, op) for x in draws])
        exact = torch.stack([eager_reduce(x.double(), dims, op) for x in draws])
        assert_no_worse(actual, eager, exact, slack=slack_for(dtype))


@pytest.mark.general_path("the dimensions have no common layout", when=lambda case: case["dim"] == (0, 2))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((1000, 1), 1),
        ((1, 300001), 1),
        ((300001, 1), 0),
        ((4097, 33), 1),
        ((4097, 33), 0),
        ((3, 5001, 7), 1),
        ((16, 512, 511), 1),
        ((5, 7, 11), (0, 2)),
        ((64, 4096), None),
    ],
    ids=str,
)
def test_reductions(shape: tuple[int, ...], dim, op: str, dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype)
    dims = tuple(range(len(shape))) if dim is None else dim
    actual = cutfuse.reduce(x, dim, op, prologue=lambda z: z * 0.5 + 1)
    y = x * 0.5 + 1
    assert_no_worse(
        actual, eager_reduce(y, dims, op), eager_reduce(x.double() * 0.5 + 1, dims, op), slack=slack_for(dtype)
    )
    assert torch.equal(actual, cutfuse.reduce(x, dim, op, prologue=lambda z: z * 0.5 + 1))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_of_special_values(op: str) -> None:
    values = (0.0, 1.0, float("inf"), float("-inf"), float("nan"))
    x = torch.tensor(list(itertools.product(values, repeat=3)), device=DEVICE)
    for t, dim in ((x, 1), (x.t().contiguous(), 0), (x.repeat(1, 100), 1)):
        torch.testing.assert_close(cutfuse.reduce(t, dim, op), eager_reduce(t, dim, op), equal_nan=True)


@pytest.mark.general_path("tensors are integers, or empty")
def test_reductions_of_integers_and_empty_tensors() -> None:
    assert cutfuse.sum(torch.arange(10, device=DEVICE)).item() == 45
    empty = torch.empty(0, 3, device=DEVICE)
    torch.testing.assert_close(cutfuse.sum(empty, 0), torch.zeros(3, device=DEVICE))
    with pytest.raises(IndexError):
        cutfuse.reduce(empty, 0, "amax")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_of_more_than_2_31_elements(dtype: torch.dtype) -> None:
    x = torch.empty(3, 2**30 + 11, dtype=dtype, device=DEVICE).normal_()
    total = cutfuse.reduce(x, 1, out_dtype=torch.float32)
    exact = torch.stack([sum(part.double().sum() for part in row.split(2**26)) for row in x])
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=0.5)
    column_sums = cutfuse.reduce(x, 0, out_dtype=torch.float32)
    torch.testing.assert_close(column_sums[-1000:], x[:, -1000:].float().sum(0))
