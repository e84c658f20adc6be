"""Forward-mode derivatives and torch.func transforms, also where the operators would run otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import cutfuse
from cutfuse.ops.switch import use_operators_everywhere


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 8), torch.randn(6, 8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, at the first dual number
def test_forward_mode() -> None:
    x, weight = inputs()
    with forward_ad.dual_level(), use_operators_everywhere():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for actual, expected in (
            (cutfuse.linear(dual, weight, epilogue=torch.tanh), torch.tanh(torch.nn.functional.linear(dual, weight))),
            (cutfuse.pointwise(torch.sigmoid, dual), torch.sigmoid(dual)),
            (cutfuse.sum(dual, 1), dual.sum(1)),
        ):
            torch.testing.assert_close(forward_ad.unpack_dual(actual).tangent, forward_ad.unpack_dual(expected).tangent)


def test_functional_gradients_and_vmap() -> None:
    x, weight = inputs()

    def loss(x: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, epilogue=torch.tanh).sum()

    def eager(x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.linear(x, weight)).sum()

    with use_operators_everywhere():
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(eager)(x))
        torch.testing.assert_close(torch.vmap(loss)(x), torch.vmap(eager)(x))
