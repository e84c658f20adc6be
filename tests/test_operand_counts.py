"""Epilogues that take another number of operands than they are given: the error names their parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cutfuse

X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)


@pytest.mark.parametrize("operands", [(2.0,), (2.0, B), (2.0, 3.0, B)], ids=len)
def test_numbers_that_the_epilogue_has_no_parameter_for(operands: tuple) -> None:
    message = f"called with the pre-activation and {len(operands)} operand"
    with pytest.raises(cutfuse.EpilogueError, match=message):
        cutfuse.linear(X, W, B, epilogue=lambda z: z, operands=operands)


class _Scaled(torch.nn.Module):
    def forward(self, z: Tensor, scale: Tensor) -> Tensor:
        return z * scale


# Epilogues that have no signature of a Python function, how many operands they are given, and how an error names them.
MISCOUNTED: dict[str, tuple[Callable[..., Tensor], int, str]] = {
    "function of one tensor": (
        torch.nn.functional.gelu,
        1,
        r"torch.nn.functional.gelu\(input, \*, approximate='none'\)",
    ),
    "function of two tensors": (torch.add, 0, r"torch.add\(input, other, \*, alpha=1\)"),
    "composition": (torch.lerp, 1, r"torch.lerp\(input, end, weight\)"),
    "method": (torch.Tensor.relu, 1, r"torch.Tensor.relu\((input|self, /)\)"),
    "module": (torch.nn.GELU(), 1, r"GELU.forward\(input\)"),
    "module with an operand": (_Scaled(), 0, r"_Scaled.forward\(z, scale\)"),
    "partial of a function": (functools.partial(torch.add, alpha=2), 0, r"torch.add\(input, other, \*, alpha=1\)"),
    "partial of a lambda": (functools.partial(lambda s, z: z * s, 2.0), 1, r"<lambda>\(s, z\)"),
    "PyTorch's Python function": (
        torch.nn.functional.silu,
        2,
        r"torch.nn.functional.silu\(input, inplace=False\)",
    ),
}


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
@pytest.mark.parametrize("name", MISCOUNTED)
def test_an_epilogue_of_another_number_of_operands_is_named_with_its_parameters(name: str, kind: str) -> None:
    fn, count, described = MISCOUNTED[name]
    operands = (2.0 if kind == "numbers" else B,) * count
    message = rf"the epilogue {described} is called with the pre-activation and {count} operands?; make its parameters"
    layer = cutfuse.nn.FusedLinear(7, 5, epilogue=fn)
    takes: dict[str, Callable[[], Tensor]] = {
        r"^cutfuse.linear: .* and operands= agree$": lambda: cutfuse.linear(X, W, B, epilogue=fn, operands=operands),
        r"^cutfuse.nn.FusedLinear: .* operands of forward\(x, \*operands\) agree$": lambda: layer(X, *operands),
        r"^cutfuse.pointwise: .* of pointwise\(fn, x, \*operands\) agree$": lambda: cutfuse.pointwise(
            fn, X[:, :5], *operands
        ),
    }
    for place, take in takes.items():
        with pytest.raises(cutfuse.EpilogueError, match=place) as caught:
            take()
        assert re.search(message, str(caught.value))


def test_one_operand_is_no_plural() -> None:
    with pytest.raises(cutfuse.EpilogueError, match="the pre-activation and 1 operand; "):
        cutfuse.linear(X, W, B, epilogue=torch.relu, operands=(B,))


@pytest.mark.parametrize(("fn", "count"), [(torch.addcmul, 2), (torch.add, 1), (torch.relu, 0), (_Scaled(), 1)])
def test_an_epilogue_counts_the_operands_of_functions_and_modules(fn: Callable[..., Tensor], count: int) -> None:
    assert cutfuse.Epilogue(fn).operand_count == count


def test_an_epilogue_of_any_number_of_operands_is_asked_how_many() -> None:
    def weighted(*values: Tensor) -> Tensor:
        return values[0] * values[1]

    with pytest.raises(cutfuse.EpilogueError, match=r"any number of arguments.*Epilogue\(fn, operand_count=...\)"):
        cutfuse.Epilogue(weighted)
    torch.testing.assert_close(cutfuse.Epilogue(weighted, 1)(X, X), X * X)
    torch.testing.assert_close(cutfuse.Epilogue(lambda z, *unused: z * 2)(X), X * 2)
