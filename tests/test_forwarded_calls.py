"""Direct calls that run PyTorch's own operations, within what watches or changes these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import core, direct_calls
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from torch import Tensor
from watchers import Functions, Operators, autocast, check, profiled

import cutfuse


def gelu_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return cutfuse.linear(x, weight, bias, epilogue=F.gelu)


def gelu_in_eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


@pytest.fixture
def trained(launches: EmulatedLaunches) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer whose next call runs PyTorch's own operations, which see to their surroundings themselves: no kernel
    that trains small layers reads every other column of a weight."""
    weight = torch.randn(8, 32)[:, ::2]
    given = torch.randn(6, 16).requires_grad_(), weight.requires_grad_(), torch.randn(8).requires_grad_()
    gelu_of(*given)
    before = direct_calls()
    assert type(gelu_of(*given).grad_fn).__name__ == "GeluBackward0"
    assert direct_calls() == before + 1
    return given


def same_gradients(y: Tensor, expected: Tensor, given: tuple[Tensor, ...]) -> None:
    check(y, expected)
    for got, wanted in zip(*(torch.autograd.grad(result.sum(), given) for result in (y, expected)), strict=True):
        check(got, wanted)


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_mode_sees_pytorchs_operations_of_a_trained_layer(
    trained: tuple[Tensor, Tensor, Tensor], mode: Callable[[], Any]
) -> None:
    with mode() as watching:
        y = gelu_of(*trained)
    with mode() as eager:
        expected = gelu_in_eager(*trained)
    assert set(watching.seen) >= set(eager.seen) != set()
    same_gradients(y, expected, trained)


def test_a_trained_layer_is_pytorchs_where_it_is_profiled(trained: tuple[Tensor, Tensor, Tensor]) -> None:
    before = direct_calls()
    with profiled() as profile:
        y = gelu_of(*trained)
    assert direct_calls() == before
    assert {"cutfuse.linear", "aten::linear", "aten::gelu"} <= {event.name for event in profile.function_events}
    same_gradients(y, gelu_in_eager(*trained), trained)


def test_a_trained_layer_takes_the_general_path_under_autocast(trained: tuple[Tensor, Tensor, Tensor]) -> None:
    before = direct_calls()
    with autocast():
        y, expected = gelu_of(*trained), gelu_in_eager(*trained)
    assert direct_calls() == before
    assert y.dtype == expected.dtype == torch.bfloat16


def test_a_trained_layer_within_a_transform(trained: tuple[Tensor, Tensor, Tensor]) -> None:
    """Its own tensors are none that the transform has wrapped."""
    found: list[Tensor] = []

    def run(wrapped: Tensor) -> Tensor:
        found.append(gelu_of(*trained))
        return wrapped.sum()

    torch.func.grad(run)(torch.ones(3))
    same_gradients(found[0], gelu_in_eager(*trained), trained)


def test_a_plan_is_not_made_while_operations_are_watched(launches: EmulatedLaunches) -> None:
    given = torch.randn(5, 16).requires_grad_(), torch.randn(8, 16), torch.randn(8)
    plans = core.remembered_calls()
    for watcher in (Functions(), Operators(), autocast(), profiled()):
        with watcher:
            gelu_of(*given)
    assert core.remembered_calls() == plans
