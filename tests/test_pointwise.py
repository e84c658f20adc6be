"""`cutfuse.pointwise` and `cutfuse.sigmoid` on the CPU."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from generators import EPILOGUES, FLOATS, assert_no_worse, operands_for, to_double
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse.native import use_operators_everywhere


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_error_is_at_most_eager_pytorchs(name: str, dtype: torch.dtype, path: str) -> None:
    fn, count = EPILOGUES[name]
    torch.manual_seed(0)
    x, operands = torch.randn(33, 47, dtype=dtype), operands_for(count, 33, 47, dtype)
    actual = cutfuse.pointwise(fn, x, *operands)
    assert actual.dtype == dtype
    assert_no_worse(actual, fn(x, *operands), fn(x.double(), *to_double(*operands)))


@given(
    sizes=st.lists(st.integers(0, 4), max_size=4),
    others=st.lists(st.lists(st.booleans(), max_size=4), max_size=3),
    order=st.permutations(range(4)),
    operators=st.booleans(),
)
def test_any_shapes_and_strides(sizes: list[int], others: list[list[bool]], order: list[int], operators: bool) -> None:
    torch.manual_seed(0)
    permutation = [d for d in order if d < len(sizes)]
    x = torch.randn(sizes, dtype=torch.float64).permute(permutation)
    shapes = [
        [1 if is_one else size for is_one, size in zip(ones[::-1], x.shape[::-1], strict=False)][::-1]
        for ones in others
    ]
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def fn(z: Tensor, *rest: Tensor) -> Tensor:
        return sum((r * z for r in rest), torch.tanh(z))

    with use_operators_everywhere() if operators else contextlib.nullcontext():
        actual = cutfuse.pointwise(fn, x, *operands)
    expected = fn(x, *operands)
    torch.testing.assert_close(actual, expected)
    assert actual.numel() == 0 or actual.squeeze().stride() == torch.empty_like(x).squeeze().stride()


def test_x_is_broadcast_too(path: str) -> None:
    x, matrix = torch.randn(5, requires_grad=True), torch.randn(4, 5)
    actual = cutfuse.pointwise(lambda z, r: z * r, x, matrix)
    torch.testing.assert_close(actual, x * matrix)
    (grad,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(grad, matrix.sum(0))


def test_numbers_are_operands(path: str) -> None:
    x = torch.randn(3, 4)
    actual = cutfuse.pointwise(lambda z, s, r: z * s + r, x, 2, x)
    torch.testing.assert_close(actual, x * 3)


@pytest.mark.parametrize("x", [torch.arange(-3, 4), torch.tensor([True, False])], ids=["int64", "bool"])
def test_integers_are_taken_as_the_default_type(x: Tensor, path: str) -> None:
    torch.testing.assert_close(cutfuse.sigmoid(x), torch.sigmoid(x))


def test_result_type(path: str) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert cutfuse.pointwise(lambda z, r: z + r, x, torch.randn(4)).dtype == torch.float32
    assert cutfuse.pointwise(lambda z, r: z + r, x, torch.randn(())).dtype == torch.bfloat16
    rounded = cutfuse.pointwise(torch.exp, x, out_dtype=torch.float16)
    torch.testing.assert_close(rounded, torch.exp(x.float()).half(), rtol=0, atol=0)
    wide = cutfuse.pointwise(torch.exp, x, out_dtype=torch.float64)
    torch.testing.assert_close(wide, torch.exp(x.float()).double())


def test_result_is_a_new_tensor(path: str) -> None:
    x = torch.randn(3, 4)
    results = [cutfuse.pointwise(fn, x) for fn in (lambda z: z, lambda z: +z, cutfuse.Epilogue(lambda z: z * 1))]
    for y in (*results, cutfuse.Epilogue(lambda z: z)(x)):
        assert y.data_ptr() != x.data_ptr()
        torch.testing.assert_close(y, x, rtol=0, atol=0)


@pytest.mark.parametrize(
    "fn", [lambda z, r: r, lambda z, r: torch.relu(r), lambda z, r: (r > 0).to(z.dtype)], ids=["r", "relu", "gt"]
)
def test_result_has_memory_for_every_element(fn, path: str) -> None:
    """Also where the function reads nothing of x's full shape, so that it may be changed in place."""
    x, row = torch.randn(3, 4), torch.randn(4)
    results = [cutfuse.pointwise(fn, x, row), cutfuse.linear(x, torch.eye(4), epilogue=fn, operands=(row,))]
    results += [cutfuse.Epilogue(fn)(x, row), cutfuse.epilogue.evaluate(cutfuse.Epilogue(fn).program, x, (row,))]
    expected = fn(x, row).float().expand(3, 4) + 1
    for y in results:
        torch.testing.assert_close(y.add_(1), expected)


def test_memory_format_is_kept(path: str) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert cutfuse.sigmoid(x).is_contiguous(memory_format=torch.channels_last)


def test_special_values_as_in_pytorch(path: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 88.8, -88.8, 3e38])
    pairs = torch.tensor(list(itertools.product(x.tolist(), repeat=2)))
    a, b = pairs.unbind(-1)
    for fn in (torch.maximum, torch.minimum, lambda z, r: torch.where(z > r, z, r), lambda z, r: (z - r) / r):
        torch.testing.assert_close(cutfuse.pointwise(fn, a, b), fn(a, b), equal_nan=True)
    for fn in (torch.sigmoid, torch.tanh, torch.relu, lambda z: z.clamp(-1, 1), torch.log1p, torch.nn.functional.silu):
        torch.testing.assert_close(cutfuse.pointwise(fn, x), fn(x), equal_nan=True)
