"""What the native module keeps of callables: bounded, freed, safe among threads and after a fork."""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recognition_checks import afresh as afresh
from recognition_checks import any_trace as any_trace
from recognition_checks import learn, make, teach
from torch import nn

from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.epilogue.fingerprint import fingerprint
from cutfuse.epilogue.resolve import recognised
from cutfuse.epilogue.types import unknown_types

Fn = Callable[..., Any]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_a_million_fresh_lambdas() -> None:
    recognise = native.core.recognise
    number = learn(make(2.0))
    counts, before = native.core.callable_counts(), resident_bytes()
    for _ in range(1_000_000):
        assert recognise(make(2.0)) == number
    for k in range(100_000):
        assert recognise(make(k)) == 0
    assert native.core.callable_counts() == {**counts, "hits": counts["hits"] + 1_000_000}
    assert resident_bytes() - before < 20e6


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.usefixtures("any_trace")
def test_the_table_is_bounded() -> None:
    """Of fresh values, and of code that is compiled again."""
    makers: list[Callable[[int], Fn]] = [
        lambda k: make(float(k)),
        lambda k: make(f"{k}" * 100),
        lambda k: eval("lambda z: torch.tanh(z) * GLOBAL", {"torch": torch, "GLOBAL": 2.0}),
    ]
    for maker in makers:
        for k in range(4000):
            recognised(maker(k), (), unknown_types(0))
    before = resident_bytes()
    for maker in makers:
        for k in range(12_000):
            recognised(maker(-k), (), unknown_types(0))
            if k % 100 == 0:
                assert native.core.callable_counts()["nodes"] <= 16384
    assert resident_bytes() - before < 40e6
    fn = make(2.0)
    assert teach(fn) == native.core.recognise(fn)


@pytest.mark.parametrize("large", [lambda: torch.ones(12_000_000), lambda: bytes(48_000_000)])
@pytest.mark.parametrize(
    "capture",
    [
        lambda large: make(large),
        lambda large: eval("lambda z: z * 2", {"large": large}),
        lambda large: eval("lambda z: z * scale", {"large": large, "scale": 2.0}),
        lambda large: eval("(lambda scale: lambda z: z * scale)(2.0)", {"large": large}),
        lambda large: eval("lambda z: f(z)", {"f": eval("lambda z: z * scale", {"large": large, "scale": 2.0})}),
        lambda large: with_cell_of(make(2.0), large),
        lambda large: Epilogue(lambda z: z * (2 if large is not None else 3)),
        lambda large: module_with(nn.Tanh(), large),
    ],
)
def test_nothing_large_is_kept_alive(capture: Callable[[Any], Any], large: Callable[[], Any]) -> None:
    value = large()
    before = sys.getrefcount(value)
    fn = capture(value)
    if not isinstance(fn, nn.Module) and fingerprint(fn) is not None:
        assert learn(fn)
    else:
        assert native.core.recognise(fn) == 0
    del fn
    gc.collect()
    assert sys.getrefcount(value) == before


def with_cell_of(fn: Any, large: object) -> Fn:
    """Learnt with a number in the cell, which is a large object from then on."""
    assert learn(fn)
    fn.__closure__[0].cell_contents = large
    assert native.core.recognise(fn) == 0
    return fn


def module_with(module: Any, large: object) -> nn.Module:
    assert learn(module)
    module.large = large
    return module


@pytest.mark.usefixtures("any_trace")
def test_threads() -> None:
    """Half of 64 redefine what they and others read, forget and learn; the others have callables of their own."""
    shared: dict[str, Any] = {"torch": torch, "scale": 1.0}
    fn = eval("lambda z: torch.tanh(z) * scale", shared)
    keys: dict[int, Any] = {}
    learning = threading.Lock()  # as in recognition_checks: from where a number is learnt until its key is written down
    errors: list[BaseException] = []
    stop = threading.Event()

    def change(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            shared["scale"] = float(chance.randrange(5))
            fn.__code__ = eval(f"lambda z: torch.tanh(z) * scale + {chance.randrange(3)}").__code__
            recognised(fn, (), unknown_types(0))
            native.core.recognise(fn)
            if chance.random() < 0.01:
                native.core.forget_callables()

    def check(seed: int) -> None:
        try:
            for k in range(200):
                own = make((k * seed) % 13)
                key = fingerprint(own)
                for _ in range(2):
                    number = native.core.recognise(own)
                    with learning:
                        assert number == 0 or keys[number] == key
                        taught = recognised(own, (), unknown_types(0))
                        assert taught is not None
                        assert keys.setdefault(taught[0], key) == key
        except BaseException as error:
            errors.append(error)

    changers = [threading.Thread(target=change, args=(seed,)) for seed in range(32)]
    checkers = [threading.Thread(target=check, args=(seed,)) for seed in range(1, 33)]
    for thread in (*changers, *checkers):
        thread.start()
    for thread in checkers:
        thread.join()
    stop.set()
    for thread in changers:
        thread.join()
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, which is what is tested
def test_fork() -> None:
    fn = make(2.0)
    number = learn(fn)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            native.core.recognise(fn)
            recognised(fn, (), unknown_types(0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                taught = recognised(fn, (), unknown_types(0))
                native.core.forget_callables()
                os._exit(0 if taught and taught[0] == number and native.core.recognise(fn) == 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_forgetting() -> None:
    fn = make(2.0)
    number = learn(fn)
    native.core.forget_callables()
    assert native.core.callable_counts()["nodes"] == 0
    assert native.core.recognise(fn) == 0
    assert learn(fn) == number
    numbers = native.core.callable_counts()["numbers"]
    assert learn(make(4.0)) == numbers + 2  # 1 is the identity's
    assert native.core.callable_counts()["numbers"] == numbers + 1


@pytest.mark.parametrize("trail", [None, [1], [()], [("value", 0, None, "no such answer", 1)], [("value", 0, None)]])
def test_what_is_no_trail(trail: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        native.core.learn_callable(trail, 2)
    fn = make(2.0)
    assert learn(fn) == native.core.recognise(fn)
