"""`cutfuse.reduce` on a GPU: every reduction, type and layout, against fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from generators import FLOATS, REDUCTIONS, assert_no_worse, eager_reduce, slack_for
from gpu_tensors import DEVICE, VIEWS, randn

import cutfuse

pytestmark = pytest.mark.gpu


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
def test_integers_and_empty_tensors() -> None:
    assert cutfuse.sum(torch.arange(10, device=DEVICE)).item() == 45
    empty = torch.empty(0, 3, device=DEVICE)
    torch.testing.assert_close(cutfuse.sum(empty, 0), torch.zeros(3, device=DEVICE))
    with pytest.raises(IndexError):
        cutfuse.reduce(empty, 0, "amax")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_than_2_31_elements(dtype: torch.dtype) -> None:
    x = torch.empty(3, 2**30 + 11, dtype=dtype, device=DEVICE).normal_()
    total = cutfuse.reduce(x, 1, out_dtype=torch.float32)
    exact = torch.stack([sum(part.double().sum() for part in row.split(2**26)) for row in x])
    torch.testing.assert_close(total.double(), exact, rtol=1e-4, atol=0.5)
    column_sums = cutfuse.reduce(x, 0, out_dtype=torch.float32)
    torch.testing.assert_close(column_sums[-1000:], x[:, -1000:].float().sum(0))
