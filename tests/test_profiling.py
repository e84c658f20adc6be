"""torch.profiler shows a range for each call of a public function, on every path, and what runs inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import EmulatedLaunches, core, direct_calls
from emulated_device import launches as launches
from torch import Tensor
from watchers import Functions, Operators, autocast, check, profiled

import cutfuse
from cutfuse import native

X, WEIGHT = torch.randn(6, 16), torch.randn(8, 16)
LAYER = cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu)

CALLS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "linear": ("cutfuse.linear", lambda: cutfuse.linear(X, WEIGHT, epilogue=torch.tanh)),
    "module": ("cutfuse.linear", lambda: LAYER(X)),
    "pointwise": ("cutfuse.pointwise", lambda: cutfuse.pointwise(torch.sigmoid, X)),
    "reduce": ("cutfuse.reduce", lambda: cutfuse.reduce(X, 1, "amax", prologue=torch.exp)),
    "integers": ("cutfuse.reduce", lambda: cutfuse.sum(torch.arange(4))),
}


def profiled_ranges() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def ranges_of(profile: Any) -> list[str]:
    return [event.name for event in profile.events() if event.name.startswith("cutfuse.")]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_a_range(name: str) -> None:
    range_name, call = CALLS[name]
    call()
    with profiled_ranges() as profile:
        call()
        call()
    assert ranges_of(profile) == [range_name] * 2
    outer = next(event for event in profile.events() if event.name == range_name)
    assert [child.name for child in outer.cpu_children if child.name.startswith("aten::")]


def test_a_call_that_was_direct_is_a_range_too(launches: EmulatedLaunches) -> None:
    call = CALLS["linear"][1]
    expected = call()
    before = native.core.direct_calls()
    call()
    assert native.core.direct_calls() == before + 1
    with profiled_ranges() as profile:
        y = call()
    assert ranges_of(profile) == ["cutfuse.linear"]
    torch.testing.assert_close(y, expected)


def test_an_error_ends_the_range() -> None:
    with profiled_ranges() as profile:
        with pytest.raises(ValueError, match="shapes"):
            cutfuse.linear(X, WEIGHT[:, :3])
        CALLS["pointwise"][1]()
    assert ranges_of(profile) == ["cutfuse.linear", "cutfuse.pointwise"]
    assert all(not event.cpu_parent for event in profile.events() if event.name.startswith("cutfuse."))


def test_compiled_code_has_no_range_and_is_whole() -> None:
    compiled = torch.compile(CALLS["linear"][1], backend="eager", fullgraph=True)
    with profiled_ranges() as profile:
        y = compiled()
    assert ranges_of(profile) == []
    torch.testing.assert_close(y, CALLS["linear"][1]())


# Direct calls that run PyTorch's own operations, within what watches or changes these.


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


@pytest.mark.parametrize("watcher", [Functions, Operators, autocast, profiled])
def test_a_trained_layer_is_pytorchs_where_its_operations_are_watched(
    trained: tuple[Tensor, Tensor, Tensor], watcher: Callable[[], Any]
) -> None:
    before = direct_calls()
    with watcher() as watching:
        y = gelu_of(*trained)
    is_mode = watcher in (Functions, Operators)
    assert is_mode or direct_calls() == before
    with watcher() as eager:
        expected = gelu_in_eager(*trained)
    if is_mode:
        assert set(watching.seen) >= set(eager.seen) != set()
    if watcher is profiled:
        assert {"cutfuse.linear", "aten::linear", "aten::gelu"} <= {event.name for event in watching.function_events}
    if watcher is autocast:
        assert y.dtype == expected.dtype == torch.bfloat16
    else:
        same_gradients(y, expected, trained)


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
