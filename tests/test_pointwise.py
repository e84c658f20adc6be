"""`cutfuse.pointwise` and `cutfuse.sigmoid` on the CPU, and chains on a GPU too."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from generators import (
    EPILOGUES,
    REDUCTIONS,
    Way,
    assert_no_worse,
    eager_reduce,
    operands_for,
    slack_for,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import table
from cutfuse.native import use_operators_everywhere

SHAPES = {"cpu": ((33, 47),), "cuda": ((1, 1), (33, 47), (300, 4096), (5, 100003))}


@pytest.mark.parametrize("name", EPILOGUES)
def test_error_is_at_most_eager_pytorchs(name: str, way: Way) -> None:
    fn, count = EPILOGUES[name]
    for shape in SHAPES[way.device]:
        torch.manual_seed(sum(shape))
        x = torch.randn(shape, device=way.device).to(way.dtype)
        operands = operands_for(count, *shape, way.dtype, way.device)
        actual = cutfuse.pointwise(fn, x, *operands)
        assert actual.dtype == way.dtype
        exact = fn(x.double(), *to_double(*operands))
        assert_no_worse(actual, fn(x, *operands), exact, slack=slack_for(way.dtype))


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


def test_numbers_are_operands(path: str) -> None:
    x, row, column = torch.randn(4, 5, 6), torch.randn(6), torch.randn(5, 1)

    def fn(z: Tensor, r: Tensor, c: Tensor, s: float) -> Tensor:
        return z * r * s + c

    expected = fn(x, row, column, 2)
    torch.testing.assert_close(cutfuse.pointwise(fn, x, row, column, 2), expected)
    actual = cutfuse.reduce(x, (0, 2), "logsumexp", prologue=fn, operands=(row, column, 2.0))
    torch.testing.assert_close(actual, expected.logsumexp((0, 2)))


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


# `cutfuse.reduce` and `cutfuse.sum` on the CPU.


def test_the_table_of_reductions_is_the_only_list() -> None:
    assert tuple(table.REDUCTIONS) == tuple(native.core.reductions()) == REDUCTIONS
    assert list(native.core.reductions().values()) == list(range(1, len(REDUCTIONS) + 1))
    assert table.ADDITIVE == ("sum", "mean")
    assert table.NEEDS_RESULT == ("amax", "amin", "logsumexp")
    *first, last = (f'"{name}"' for name in REDUCTIONS)
    for documented in (cutfuse.linear, cutfuse.reduce, cutfuse.nn.FusedLinear):
        assert f"{', '.join(first)} or {last}" in documented.__doc__


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    order=st.permutations(range(4)),
    chosen=st.lists(st.booleans(), min_size=4, max_size=4),
    negative=st.booleans(),
    keepdim=st.booleans(),
    op=st.sampled_from(REDUCTIONS),
    with_prologue=st.booleans(),
    operators=st.booleans(),
)
def test_any_shapes_strides_and_dimensions(
    sizes, order, chosen, negative, keepdim, op, with_prologue, operators
) -> None:
    torch.manual_seed(0)
    rank = len(sizes)
    x = torch.randn(sizes, dtype=torch.float64).permute([d for d in order if d < rank])
    dims = tuple(d - rank if negative else d for d in range(rank) if chosen[d])
    prologue = (lambda z: z * z - z) if with_prologue else None
    with use_operators_everywhere() if operators else contextlib.nullcontext():
        actual = cutfuse.reduce(x, dims, op, keepdim, prologue)
    y = x * x - x if with_prologue else x
    torch.testing.assert_close(actual, eager_reduce(y, dims or tuple(range(rank)), op, keepdim))


def test_sum_is_torch_sum(path: str) -> None:
    x = torch.randn(4, 5, 6)
    torch.testing.assert_close(cutfuse.sum(x), x.sum())
    torch.testing.assert_close(cutfuse.sum(x, -1, keepdim=True), x.sum(-1, keepdim=True))
    torch.testing.assert_close(cutfuse.sum(x, ()), x.sum(()))
    torch.testing.assert_close(cutfuse.sum(x, [0, 2]), x.sum([0, 2]))


@pytest.mark.parametrize("x", [torch.arange(12).view(3, 4), torch.rand(3, 4) > 0.5], ids=["int64", "bool"])
def test_integers_are_pytorchs_own_reduction(x: Tensor, path: str) -> None:
    torch.testing.assert_close(cutfuse.sum(x, 1), x.sum(1))
    torch.testing.assert_close(cutfuse.reduce(x, 1, "amax"), x.amax(1))
    torch.testing.assert_close(cutfuse.reduce(x, 1, "mean"), x.float().mean(1))
    torch.testing.assert_close(cutfuse.reduce(x, 1, prologue=torch.exp), torch.exp(x).sum(1))
    large = torch.tensor([2**53 + 1, 1])
    assert cutfuse.sum(large).item() == 2**53 + 2


def test_out_dtype(path: str) -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(cutfuse.reduce(x, 1, out_dtype=torch.float32), x.float().sum(1))
    torch.testing.assert_close(cutfuse.reduce(x, 1, out_dtype=torch.float64), x.float().sum(1).double())
    with torch.autocast("cpu", torch.bfloat16):
        assert cutfuse.sum(x, 1).dtype == x.sum(1).dtype


def test_sums_accumulate_beyond_the_type(path: str) -> None:
    x = torch.ones(4096, 3, dtype=torch.bfloat16)
    torch.testing.assert_close(cutfuse.sum(x, 0), torch.full((3,), 4096.0, dtype=torch.bfloat16), rtol=0, atol=0)
    large = torch.full((4, 4096), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(cutfuse.reduce(large, 1, "mean"), large[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("dim", [np.int64(1), np.int32(-1), (np.int64(0), 1), torch.tensor(1), range(2)], ids=repr)
def test_dimensions_are_integers_of_any_type(dim, path: str) -> None:
    x = torch.randn(4, 5)
    expected = x.sum() if isinstance(dim, tuple | range) else x.sum(1)
    torch.testing.assert_close(cutfuse.sum(x, dim), expected)


def test_complex_numbers_are_pytorchs_own_reduction(path: str) -> None:
    x = torch.randn(4, 5, dtype=torch.complex64)
    torch.testing.assert_close(cutfuse.sum(x, 1), x.sum(1))
    torch.testing.assert_close(cutfuse.reduce(x, 1, "mean"), x.mean(1))
