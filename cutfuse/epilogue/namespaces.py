"""What names in a function give: its code, globals, free variables, and attributes of modules and classes."""

from __future__ import annotations

import threading
import types
from collections.abc import Hashable
from typing import Any, TypeVar

from cutfuse.epilogue.reads import Reads, is_comparable

_CODES_LIMIT = 1024
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
MISSING = object()

_Value = TypeVar("_Value")


class NoKeyError(Exception):
    """Something that may change without the key changing, or that is too large for one."""


# By value, so that code compiled again from the same text has the same key; and by identity, which is faster and needs
# the code kept alive, so that no other takes its place.
_reads_by_code: dict[types.CodeType, Reads] = {}
_reads_by_identity: dict[int, tuple[types.CodeType, Reads]] = {}
_lock = threading.Lock()


def remember(cache: dict[Any, _Value], key: Hashable, value: _Value, limit: int) -> _Value:
    """Stores in a cache that is read without a lock, and gives what it holds: of two threads the first one's value.

    When the cache is full the older half goes.
    """
    with _lock:
        if len(cache) >= limit:
            for old in list(cache)[: limit // 2]:
                del cache[old]
        return cache.setdefault(key, value)


def reads_of(code: types.CodeType) -> Reads:
    """What code reads. Raises NoKeyError where it is too large to be kept."""
    found = _reads_by_identity.get(id(code))
    if found is not None:
        return found[1]
    if not is_comparable(code):
        raise NoKeyError
    reads = _reads_by_code.get(code)
    if reads is None:
        reads = remember(_reads_by_code, code, Reads(code), _CODES_LIMIT)
    return remember(_reads_by_identity, id(code), (code, reads), _CODES_LIMIT)[1]


def read_global(fn: types.FunctionType, name: str) -> Any:
    """What a function's LOAD_GLOBAL gives."""
    namespace = fn.__globals__
    value = namespace.get(name, MISSING)
    if value is MISSING:
        value = builtins_of(fn).get(name, MISSING)
    # A subclass of dict may compute what it gives.
    if value is MISSING or type(namespace) is not dict:
        raise NoKeyError
    return value


def builtins_of(fn: Any) -> dict[str, Any]:
    """A function's `__builtins__`. Not typed as a function: mypy forgets this attribute when it reads its own cache."""
    found: dict[str, Any] = fn.__builtins__
    return found


def read_free(fn: types.FunctionType, index: int) -> Any:
    """What a function's free variable holds."""
    try:
        return (fn.__closure__ or ())[index].cell_contents
    except ValueError:
        raise NoKeyError from None


def read_attribute(module: types.ModuleType, name: str) -> Any:
    """What a module holds itself: its `__getattr__` might give another value the next time."""
    value = module.__dict__.get(name, MISSING)
    if value is MISSING:
        raise NoKeyError
    return value


def look_up(kind: type, name: str) -> Any:
    """What a class or the first of its bases that has the attribute holds; MISSING where none has it."""
    for home in kind.__mro__:
        found = vars(home).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def can_change(kind: type) -> bool:
    """Whether attributes of a class can be set: it is made in Python, or as those are."""
    return bool(kind.__flags__ & _HEAP_TYPE)
