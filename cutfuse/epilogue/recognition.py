"""Teaches the native module which callables are equal, so that it recognises one without running Python code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from cutfuse import native
from cutfuse.epilogue.fingerprint import fingerprint
from cutfuse.epilogue.namespaces import remember
from cutfuse.epilogue.operand_numbers import Numbers
from cutfuse.epilogue.resolve import find_traced, has_function_modes, identity, may_change_traces, resolve
from cutfuse.epilogue.trace import Epilogue
from cutfuse.epilogue.trail import Trail
from cutfuse.epilogue.types import ValueTypes

IDENTITY = 1  # the number of None

_NUMBERS_LIMIT = 1024

_numbers: dict[Hashable, int] = {}


def recognised(
    epilogue: Callable[..., Any] | Epilogue | None, numbers: Numbers, types: ValueTypes
) -> tuple[int, Epilogue] | None:
    """The number that `recognise` gives for a callable from now on, and the Epilogue of what has that number.

    numbers and types: as for `resolve`, which is to be called before: nothing is traced here. None where the callable
    has no key, or has changed since. The Epilogue is found by the key that the number is given for, so that a plan for
    it holds wherever `recognise` gives that number.
    """
    if epilogue is None:
        return IDENTITY, identity(0)
    if has_function_modes() and may_change_traces():
        return None
    trail = Trail()
    key = fingerprint(epilogue, trail)
    if key is None or not trail.is_complete:
        return None
    if isinstance(epilogue, Epilogue):  # never changes
        found: Epilogue | None = resolve(epilogue, len(types) - 1, types, numbers)
    else:
        found = find_traced(key, numbers, types)
    if found is None:
        return None
    _learn_types()
    number = number_of(key)
    return (number, found) if native.core.learn_callable(trail.steps, number) else None


def number_of(key: Hashable) -> int:
    """Of a fingerprint: one number as long as it is remembered, and never another key's."""
    found = _numbers.get(key)
    return remember(_numbers, key, native.core.new_callable_number(), _NUMBERS_LIMIT) if found is None else found


@functools.lru_cache(maxsize=1)
def _learn_types() -> None:
    native.core.learn_callable_types(functools.partial, Epilogue)
