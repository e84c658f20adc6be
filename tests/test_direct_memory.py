"""Direct calls keep nothing: their tables are bounded, what falls out of them is freed, and memory does not grow."""

from __future__ import annotations

import gc
import os
import resource
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import RecordedLaunches, direct_calls, emulated_device
from torch import Tensor

import cutfuse
from cutfuse import native

core = native.module()
CALLS = {"linear": 15_000, "pointwise": 15_000, "reduce": 15_000, "training": 5_000}
ON_LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
PLANS_LIMIT = 8192

Call = Callable[[], Any]


class NoLaunches(RecordedLaunches):
    def write_down(self, launch: Any) -> None:
        pass


def make(scale: float) -> Callable[..., Tensor]:
    return lambda z: torch.relu(z) * scale


def calls() -> dict[str, Call]:
    """Of fresh lambdas, which run directly."""
    x, weight, r = torch.randn(4, 16), torch.randn(8, 16), torch.randn(4, 8)
    trained = torch.randn(8, 16, requires_grad=True)
    grad = torch.ones(4, 8)
    return {
        "linear": lambda: cutfuse.linear(x, weight, epilogue=lambda z, r: torch.relu(z) + r, operands=(r,)),
        "pointwise": lambda: cutfuse.pointwise(make(2.0), x),
        "reduce": lambda: cutfuse.reduce(x, -1, "sum", prologue=make(3.0)),
        "training": lambda: torch.autograd.grad(cutfuse.linear(x, trained, epilogue=make(4.0)), trained, grad),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def kept() -> dict[str, int]:
    """What there is at the moment, in numbers that do not depend on chance."""
    gc.collect()
    counts = core.callable_counts()
    return {
        "plans": core.remembered_calls(),
        "keys": counts["keys"],
        "numbers": counts["numbers"],
        "tracked": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
    }


def growth_of(call: Call, count: int) -> dict[str, int]:
    """What grows over so many calls, after the first ones."""
    for _ in range(200):
        call()
    before, resident, made = kept(), resident_bytes(), direct_calls()
    for _ in range(count):
        call()
    assert direct_calls() - made >= count
    grown = resident_bytes() - resident
    after = kept()
    return {**{name: after[name] - before[name] for name in before}, "resident": grown}


def is_nothing(grown: dict[str, int], count: int) -> bool:
    return grown["tracked"] < count // 100 and grown["blocks"] < count // 50 and grown["resident"] < 500_000


@ON_LINUX
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", CALLS)
def test_memory_does_not_grow_over_calls_of_fresh_lambdas(kind: str) -> None:
    """50 000 in all. One object that each fiftieth left would be seen: every time, unlike what others do meanwhile."""
    with emulated_device(launches=NoLaunches()):
        call = calls()[kind]
        for _ in range(3):
            grown = growth_of(call, CALLS[kind])
            assert {grown[name] for name in ("plans", "keys", "numbers")} == {0}
            if is_nothing(grown, CALLS[kind]):
                return
    raise AssertionError(grown)


@ON_LINUX
@pytest.mark.usefixtures("one_thread")
def test_memory_is_bounded_over_callables_that_differ() -> None:
    """Each is traced and planned: the tables fill, and are emptied."""
    x = torch.randn(4, 8)
    with emulated_device(launches=NoLaunches()):

        def call(k: int) -> None:
            fn = make(float(k))
            for _ in range(2):
                cutfuse.pointwise(fn, x)

        for k in range(4096):  # what the largest cache of Python's side holds
            call(k)
        before = kept()
        for k in range(4096, 5120):
            call(k)
        after = kept()
    assert [after[name] - before[name] for name in ("numbers", "plans")] == [1024, 1024], "every one is new"
    assert after["keys"] - before["keys"] <= 1024
    assert after["blocks"] - before["blocks"] < 4 * 1024, "of the plans"


def remember(x: Tensor, plan: Any) -> None:
    """For calls of a callable that nothing else has the number of."""
    function, given, number = core.CallFunction.pointwise, (torch.relu, x, (), None), core.new_callable_number()
    assert core.remember_call(function, given, number, core.call_key(function, given, number), plan)


class Apply:
    """What a plan may hold."""


@ON_LINUX
def test_the_table_of_plans_is_bounded_and_frees_what_falls_out() -> None:
    """Four times as many plans as it holds."""
    x = torch.randn(4, 8)
    alive: weakref.WeakSet[Apply] = weakref.WeakSet()
    with emulated_device(launches=NoLaunches()):
        core.forget_calls()
        resident = 0
        for k in range(4 * PLANS_LIMIT):
            apply = Apply()
            alive.add(apply)
            remember(x, core.training_call(apply, None))
            del apply
            if k % 1000 == 0:
                assert len(alive) == core.remembered_calls() <= PLANS_LIMIT
            if k == 2 * PLANS_LIMIT - 1:  # full, as at the end
                resident = resident_bytes()
        assert resident_bytes() - resident < 2e6
        assert len(alive) == core.remembered_calls() > 0
        core.forget_calls()
        assert len(alive) == core.remembered_calls() == 0


def run_once(kind: str, references: list[weakref.ref[Any]]) -> None:
    """Calls directly, with tensors and callables to which nothing but the references points afterwards."""
    x, weight, r = torch.randn(4, 16), torch.randn(8, 16, requires_grad=kind == "training"), torch.randn(4, 8)
    add = eval("lambda z, r: torch.relu(z) + r", {"torch": torch})
    relu = eval("lambda z: torch.relu(z)", {"torch": torch})
    before = direct_calls()
    for _ in range(3):
        if kind == "pointwise":
            y = cutfuse.pointwise(add, r, r)
        elif kind == "reduce":
            y = cutfuse.reduce(x, -1, "sum", prologue=relu)
        else:
            y = cutfuse.linear(x, weight, epilogue=add, operands=(r,))
        if kind == "training":
            y.sum().backward()
    assert direct_calls() == before + 2
    references += [weakref.ref(value) for value in (x, weight, r, add, relu, y)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", CALLS)
def test_a_direct_call_keeps_neither_its_tensors_nor_its_callable(kind: str) -> None:
    references: list[weakref.ref[Any]] = []
    with emulated_device(launches=NoLaunches()):
        run_once(kind, references)
        gc.collect()
        assert [reference() for reference in references] == [None] * 6
