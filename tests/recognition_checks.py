"""Whether `recognise` gives a number only for callables whose fingerprint is that number's."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cutfuse import native
from cutfuse.epilogue import Epilogue, resolve
from cutfuse.epilogue.fingerprint import fingerprint
from cutfuse.epilogue.resolve import IDENTITY, recognised
from cutfuse.epilogue.types import unknown_types

Fn = Callable[..., Any]

HOME: Any = types.ModuleType("home")
HOME.inner = types.ModuleType("inner")
HOME.inner.scale = 2.0

_keys: dict[int, Any] = {}
# Held from where a number is learnt until its key is written down: another thread may be given the number in between.
_learning = threading.RLock()


def start() -> None:
    """Forgets everything. A key names code by an object that a bounded cache holds, so a test of many may change it."""
    native.core.forget_callables()
    _keys.clear()


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """For the tests of a module that imports it: nothing is known before, and nothing is left."""
    start()
    yield
    start()


def check_number(epilogue: Any) -> int:
    """The number that is given now."""
    number = native.core.recognise(epilogue)
    if number > IDENTITY:
        with _learning:
            key = _keys[number]
        assert key == fingerprint(epilogue)
    return number


def teach(epilogue: Any, numbers: tuple = (), types: tuple | None = None, operand_count: int = 0) -> int:
    """The number that a callable has from now on; 0 where it has none."""
    check_number(epilogue)
    key = fingerprint(epilogue)
    with _learning:
        taught = recognised(epilogue, numbers, unknown_types(operand_count) if types is None else types)
        if taught is None:
            return 0
        number, found = taught
        assert isinstance(found, Epilogue)
        assert _keys.setdefault(number, key) == key
    assert native.core.recognise(epilogue) == number
    return number


def checked(resolve: Callable[..., Epilogue]) -> Callable[..., Epilogue]:
    """`resolve`, with what is recognised checked before and after each call."""

    def check(epilogue: Any, operand_count: int = 0, types: tuple | None = None, numbers: tuple = ()) -> Epilogue:
        check_number(epilogue)
        result = resolve(epilogue, operand_count, types, numbers)
        if callable(epilogue):
            teach(epilogue, numbers, types, operand_count)
        return result

    return check


def learn(fn: Any, operand_count: int = 0) -> int:
    """The number of a callable; that it is recognised is checked, and counted."""
    resolve(fn, operand_count)
    before = native.core.callable_counts()["hits"]
    number = teach(fn, operand_count=operand_count)
    assert (native.core.callable_counts()["hits"] > before) == (number > 1)
    return number


def make(scale: Any) -> Callable[..., Any]:
    return lambda z: torch.sigmoid(z) * scale


@pytest.fixture
def any_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if everything that has a key had been traced."""
    epilogue = Epilogue(lambda z: z * 2)
    monkeypatch.setattr(sys.modules["cutfuse.epilogue.resolve"], "find_traced", lambda *_: epilogue)
