"""torch.profiler shows a range for each call of a public function, on every path, and what runs inside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from torch import Tensor

import cutfuse
from cutfuse import native

X, WEIGHT, RESIDUAL = torch.randn(6, 16), torch.randn(8, 16), torch.randn(6, 8)
LAYER = cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu)

CALLS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "linear": ("cutfuse.linear", lambda: cutfuse.linear(X, WEIGHT, epilogue=torch.tanh)),
    "operands": (
        "cutfuse.linear",
        lambda: cutfuse.linear(X, WEIGHT, epilogue=lambda z, r: z * 0.5 + r, operands=(RESIDUAL,)),
    ),
    "plain": ("cutfuse.linear", lambda: cutfuse.linear(X, WEIGHT)),
    "recompute": ("cutfuse.linear", lambda: cutfuse.linear(X, WEIGHT, epilogue=torch.tanh, recompute=True)),
    "module": ("cutfuse.linear", lambda: LAYER(X)),
    "pointwise": ("cutfuse.pointwise", lambda: cutfuse.pointwise(torch.sigmoid, X)),
    "reduce": ("cutfuse.reduce", lambda: cutfuse.reduce(X, 1, "amax", prologue=torch.exp)),
    "integers": ("cutfuse.reduce", lambda: cutfuse.sum(torch.arange(4))),
}


def ranges_of(profile: Any) -> list[str]:
    return [event.name for event in profile.events() if event.name.startswith("cutfuse.")]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_a_range(name: str) -> None:
    range_name, call = CALLS[name]
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
        call()
    assert ranges_of(profile) == [range_name] * 2
    outer = next(event for event in profile.events() if event.name == range_name)
    assert [child.name for child in outer.cpu_children if child.name.startswith("aten::")]


def test_a_call_that_was_direct_is_a_range_too(launches: EmulatedLaunches) -> None:
    call = CALLS["operands"][1]
    expected = call()
    before = native.core.direct_calls()
    call()
    assert native.core.direct_calls() == before + 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = call()
    assert ranges_of(profile) == ["cutfuse.linear"]
    assert torch.equal(y, expected)


def test_an_error_ends_the_range() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ValueError, match="shapes"):
            cutfuse.linear(X, WEIGHT[:, :3])
        CALLS["pointwise"][1]()
    assert ranges_of(profile) == ["cutfuse.linear", "cutfuse.pointwise"]
    assert all(not event.cpu_parent for event in profile.events() if event.name.startswith("cutfuse."))


def test_compiled_code_has_no_range_and_is_whole() -> None:
    compiled = torch.compile(CALLS["linear"][1], backend="eager", fullgraph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = compiled()
    assert ranges_of(profile) == []
    torch.testing.assert_close(y, CALLS["linear"][1]())
