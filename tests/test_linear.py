"""`cutfuse.linear` on the CPU: values against fp64, operands, shapes and types."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from generators import (
    EPILOGUES,
    FLOATS,
    LAYOUTS,
    REDUCTIONS,
    assert_no_worse,
    eager_linear,
    make_inputs,
    operands_for,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse.native import use_operators_everywhere


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_error_is_at_most_eager_pytorchs(name: str, dtype: torch.dtype, path: str) -> None:
    epilogue, count = EPILOGUES[name]
    x, weight, bias = make_inputs(33, 47, 65, dtype)
    operands = operands_for(count, 33, 47, dtype)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
    eager = eager_linear(x, weight, bias, epilogue, operands)
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands))
    assert actual.dtype == eager.dtype
    assert_no_worse(actual, eager, exact)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_error_of_reductions_is_at_most_eager_pytorchs(reduction: str, dtype: torch.dtype, path: str) -> None:
    epilogue, count = EPILOGUES["residual"]
    x, weight, bias = make_inputs(17, 130, 64, dtype)
    operands = operands_for(count, 17, 130, dtype)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    eager = eager_linear(x, weight, bias, epilogue, operands, reduction)
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands), reduction)
    assert actual.dtype == dtype
    assert_no_worse(actual, eager, exact)


@pytest.mark.parametrize("name", EPILOGUES)
def test_double_is_computed_in_double(name: str, path: str) -> None:
    epilogue, count = EPILOGUES[name]
    x, weight, bias = make_inputs(5, 7, 9, torch.float64)
    operands = operands_for(count, 5, 7, torch.float64)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands), rtol=1e-13, atol=1e-13)


@st.composite
def _problems(draw: st.DrawFn) -> dict:
    leading = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    columns, depth = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    full = (*leading, columns)
    shapes = []
    for _ in range(draw(st.integers(0, 4))):
        kept = draw(st.integers(0, len(full)))
        shape = tuple(1 if draw(st.booleans()) else size for size in full[len(full) - kept :])
        shapes.append(draw(st.sampled_from([shape, full, (columns,), ()])))
    reduction = draw(st.sampled_from([None, "sum", "mean", "logsumexp"]))
    return {
        "leading": leading,
        "columns": columns,
        "depth": depth,
        "operands": shapes,
        "reduce": reduction,
        "keepdim": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "affine": draw(st.booleans()),
        "operators": draw(st.booleans()),
    }


@given(_problems())
def test_any_shapes(problem: dict) -> None:
    torch.manual_seed(0)
    x = torch.randn(*problem["leading"], problem["depth"], dtype=torch.float64)
    weight = torch.randn(problem["columns"], problem["depth"], dtype=torch.float64)
    bias = torch.randn(problem["columns"], dtype=torch.float64) if problem["bias"] else None
    operands = [torch.randn(shape, dtype=torch.float64) for shape in problem["operands"]]

    def epilogue(z: Tensor, *others: Tensor) -> Tensor:
        y = z * 2 + 1 if problem["affine"] else torch.tanh(z)
        for k, other in enumerate(others):
            y = y * other if k % 2 else y - other
        return y

    reduce, keepdim = problem["reduce"], problem["keepdim"] and problem["reduce"] is not None
    with use_operators_everywhere() if problem["operators"] else contextlib.nullcontext():
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduce, keepdim=keepdim)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands, reduce, keepdim))


def test_keepdim_has_no_effect_without_a_reduction(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.tanh, keepdim=True)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, torch.tanh, ()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, path: str) -> None:
    make = LAYOUTS[layout]
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    residual = torch.randn(6, 5)
    epilogue = EPILOGUES["residual"][0]
    expected = eager_linear(x, weight, bias, epilogue, [residual])
    actual = cutfuse.linear(make(x), make(weight), bias, epilogue=epilogue, operands=(make(residual),))
    torch.testing.assert_close(actual, expected)


def test_expanded_inputs(path: str) -> None:
    x, weight, bias = torch.randn(1, 7).expand(6, 7), torch.randn(5, 1).expand(5, 7), torch.randn(1).expand(5)
    residual = torch.randn(1).expand(6, 5)
    epilogue = EPILOGUES["residual"][0]
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(residual,))
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, [residual]))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 5, 7), (6, 0, 7), (6, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("reduction", [None, "sum", "mean", "logsumexp"])
@pytest.mark.parametrize("epilogue", [torch.sigmoid, lambda z: z / 2 + 1], ids=["sigmoid", "affine"])
def test_empty_dimensions(rows, columns, depth, reduction, epilogue, path: str) -> None:
    x, weight, bias = make_inputs(rows, columns, depth, torch.float32)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, reduce=reduction)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, (), reduction), equal_nan=True)


def test_maximum_of_nothing_is_an_error_as_in_pytorch(path: str) -> None:
    x, weight, _ = make_inputs(6, 0, 7, torch.float32)
    with pytest.raises(IndexError, match="non-zero size"):
        cutfuse.linear(x, weight, epilogue=torch.sigmoid, reduce="amax")


def test_numbers_as_operands(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    residual = torch.randn(6, 5)

    def epilogue(z, scale, r, power, slope):
        return F.leaky_relu(z, slope) ** power * scale + r

    operands = (0.5, residual, 2, torch.tensor(0.1))
    with pytest.raises(cutfuse.EpilogueError):  # a parameter of an op has to be a number
        cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
    operands = (0.5, residual, 2, 0.1)
    for scale in (0.5, 0.25):  # a second value is a second program
        operands = (scale, *operands[1:])
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands))


def test_zeros_of_both_signs_are_different_numbers(path: str) -> None:
    x, weight = torch.ones(1, 1), torch.ones(1, 1)
    for zero in (0.0, -0.0):
        for epilogue in (lambda z, s: z / s, cutfuse.Epilogue(lambda z, s: z / s)):
            actual = cutfuse.linear(x, weight, epilogue=epilogue, operands=(zero,))
            torch.testing.assert_close(actual, torch.tensor([[1.0]]) / zero)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("number", [1e300, -1e300])
def test_numbers_beyond_fp32_are_infinities(number: float, is_compiled: bool, path: str) -> None:
    """As in PyTorch, which rounds a number to the type that it computes in."""
    x, w = torch.randn(3, 4), torch.randn(5, 4)

    def epilogue(z: Tensor, r: float) -> Tensor:
        return torch.add(z, r, alpha=2) * torch.sigmoid(z)

    def layer() -> Tensor:
        return cutfuse.linear(x, w, epilogue=epilogue, operands=(number,))

    y = torch.compile(layer, backend="eager", fullgraph=True)() if is_compiled else layer()
    assert torch.equal(y, epilogue(F.linear(x, w), number))
    assert y.isinf().all()


def test_prebuilt_epilogue_with_numbers(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    residual = torch.randn(6, 5)
    epilogue = cutfuse.Epilogue(lambda z, s, r: torch.relu(z) * s + r)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(0.5, residual))
    torch.testing.assert_close(actual, torch.relu(F.linear(x, weight, bias)) * 0.5 + residual)


def test_operands_of_other_types(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.bfloat16)
    mask, counts = torch.rand(6, 5) > 0.5, torch.arange(5)

    def epilogue(z, m, c):
        return torch.where(m, z, 0.0) * c

    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(mask, counts))
    expected = torch.where(mask, F.linear(x, weight, bias).float(), 0.0) * counts
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "other", "expected"),
    [
        (torch.bfloat16, torch.randn(5), torch.float32),
        (torch.bfloat16, torch.randn(()), torch.bfloat16),
        (torch.bfloat16, torch.randn(5, dtype=torch.float16), torch.float32),
        (torch.float32, torch.randn(5, dtype=torch.float64), torch.float64),
        (torch.float32, torch.randn((), dtype=torch.float64), torch.float32),
        (torch.float16, torch.ones(5, dtype=torch.bool), torch.float16),
    ],
)
def test_result_type_is_pytorchs_promotion(dtype, other, expected, path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, dtype)
    actual = cutfuse.linear(x, weight, bias, epilogue=lambda z, r: z * z + r, operands=(other,))
    assert actual.dtype == expected == (F.linear(x, weight, bias) + other).dtype


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", [None, "sum", "amax"])
def test_out_dtype_is_one_rounding(out_dtype: torch.dtype, reduction: str | None, path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.bfloat16)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.exp, reduce=reduction, out_dtype=out_dtype)
    expected = torch.exp(F.linear(x, weight, bias).float())
    expected = expected if reduction is None else getattr(torch, reduction)(expected, dim=-1)
    torch.testing.assert_close(actual, expected.to(out_dtype))


def test_without_epilogue_it_is_a_linear_layer(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    torch.testing.assert_close(cutfuse.linear(x, weight, bias), F.linear(x, weight, bias), rtol=0, atol=0)
    torch.testing.assert_close(cutfuse.linear(x, weight, reduce="amax"), F.linear(x, weight).amax(-1))
    doubled = cutfuse.linear(x, weight, bias, out_dtype=torch.float64)
    torch.testing.assert_close(doubled, F.linear(x, weight, bias).double())


def test_nan_and_infinities_go_through_as_in_pytorch(path: str) -> None:
    x = torch.eye(4)
    weight = torch.tensor([[1.0, float("nan"), 2.0, -1.0], [0.5, 1.0, float("inf"), float("-inf")]])
    x[3, 3] = 3e38
    for epilogue in (
        lambda z: torch.relu(z),
        lambda z: z.clamp(-1, 1),
        torch.sigmoid,
        lambda z: torch.maximum(z, z * 0),
    ):
        expected = epilogue(F.linear(x, weight))
        torch.testing.assert_close(cutfuse.linear(x, weight, epilogue=epilogue), expected, equal_nan=True)
        for reduction in REDUCTIONS:
            actual = cutfuse.linear(x, weight, epilogue=epilogue, reduce=reduction)
            torch.testing.assert_close(actual, getattr(torch, reduction)(expected, dim=-1), equal_nan=True)


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_autocast(reduction: str | None, path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager = eager_linear(x, weight, bias, torch.sigmoid, (), reduction)
        actual = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduction)
        plain = cutfuse.linear(x, weight, bias)
        affine = cutfuse.linear(x, weight, bias, epilogue=lambda z, a: z * a, operands=(bias,), reduce="sum")
    assert actual.dtype == plain.dtype == torch.bfloat16
    assert affine.dtype == torch.float32
    assert_no_worse(actual, eager, eager_linear(*to_double(x, weight, bias), torch.sigmoid, (), reduction))
    rounded = [t.bfloat16() for t in (x, weight, bias)]
    exact = (F.linear(*to_double(*rounded)) * bias.double()).sum(-1)
    torch.testing.assert_close(affine.double(), exact, rtol=1e-5, atol=1e-5)
