"""A key for what a callable computes: equal keys, equal traces.

A function is named by its code and by everything from outside that the code can reach: defaults, closure, globals.
That works only while all of this is immutable or is itself a function like that; any other callable has no key, and is
traced afresh on every call. A callable that reaches something large has no key either: the cache would keep that alive.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

import torch

from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.module_class import class_token
from cutfuse.epilogue.reads import Reads, is_comparable
from cutfuse.epilogue.trace import Epilogue

_CODES_LIMIT = 1024
# Of one key. With these and the limit on code, a full cache of 1024 entries stays below 100 MB at the very worst.
_VALUES_LIMIT = 256
_TEXT_LIMIT = 4096
_INTEGER_BITS_LIMIT = 1024

_EXACT_TYPES = {bool, type(None), torch.dtype}
_TEXT_TYPES = {str, bytes}
# Without effects or state; they see numbers and symbolic values only.
_PURE_TYPES = {bool, float, int, range, tuple, torch.finfo, torch.iinfo}
_PURE_FUNCTIONS = {abs, divmod, isinstance, len, max, min, pow, round, sum}
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType)
# Attributes of these may change without their key changing.
_CALLABLES = (types.FunctionType, *_BUILTINS, functools.partial)
_CONTAINERS = {dict, OrderedDict, set}
_MISSING = object()

_Value = TypeVar("_Value")


class NoKeyError(Exception):
    """Something that may change without the key changing, or that is too large for one."""


# By value, so that code compiled again from the same text has the same key; and by identity, which is faster and needs
# the code kept alive, so that no other takes its place.
_reads_by_code: dict[types.CodeType, Reads] = {}
_reads_by_identity: dict[int, tuple[types.CodeType, Reads]] = {}
# The callables met so far that stand for themselves in a key: the language's and Python's own, hence few. For those
# written in Python the code and the defaults that they had: their bodies run before `__torch_function__` is called, so
# one that was patched since has no key.
_builtins = _PURE_FUNCTIONS.union(value for value in vars(math).values() if isinstance(value, _BUILTINS))
_functions: dict[types.FunctionType, tuple[Any, ...]] = {}
_lock = threading.Lock()


def fingerprint(fn: Callable[..., Any]) -> Hashable | None:
    """The key of a callable, or None where it has none."""
    try:
        return _key(fn)
    except NoKeyError:
        return None


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
    value = namespace.get(name, _MISSING)
    if value is _MISSING:
        value = builtins_of(fn).get(name, _MISSING)
    # A subclass of dict may compute what it gives.
    if value is _MISSING or type(namespace) is not dict:
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
    value = module.__dict__.get(name, _MISSING)
    if value is _MISSING:
        raise NoKeyError
    return value


def _key(fn: Callable[..., Any]) -> Hashable:
    """The parts of all values that fn reaches, breadth first.

    Flat, as functions may call each other in long chains, in circles, or share others; one that is reached again is
    named by its number.
    """
    parts: list[Hashable] = []
    numbers: dict[types.FunctionType, int] = {}
    values: list[Any] = [fn]
    text = 0
    for value in values:
        kind = type(value)
        if kind is types.FunctionType:
            body = _functions.get(value)
            if body is not None:
                if value.__code__ is not body[0] or value.__defaults__ is not body[1]:
                    raise NoKeyError
                parts.append(value)
            elif value in numbers:
                parts.append(numbers[value])
            elif is_known(value):
                _functions[value] = value.__code__, value.__defaults__
                parts.append(value)
            else:
                numbers[value] = len(numbers)
                _add_function(value, parts, values)
        elif kind in _BUILTINS:
            parts.append(value if value in _builtins else _check_builtin(value))
        elif kind is float:
            # 0.0 == -0.0, and NaN differs from itself.
            parts.append((kind, value if value and value == value else struct.pack("d", value)))
        elif kind in _EXACT_TYPES:
            parts.append((kind, value))
        elif kind is int:
            if value.bit_length() > _INTEGER_BITS_LIMIT:
                raise NoKeyError
            parts.append((kind, value))
        elif kind in _TEXT_TYPES:
            text += len(value)
            if text > _TEXT_LIMIT:
                raise NoKeyError
            parts.append((kind, value))
        elif kind is tuple:
            parts.append((kind, len(value)))
            _add_values(value, values)
        else:
            _add_object(value, kind, parts, values)
    return tuple(parts)


def _check_builtin(value: Any) -> Any:
    if not is_known(value):
        raise NoKeyError
    _builtins.add(value)
    return value


def _add_function(fn: types.FunctionType, parts: list[Hashable], values: list[Any]) -> None:
    reads = reads_of(fn.__code__)
    if reads.opaque or reads.attributes or fn.__dict__:
        raise NoKeyError
    _add_reads(fn, reads, parts, values)


def _add_reads(fn: types.FunctionType, reads: Reads, parts: list[Hashable], values: list[Any]) -> None:
    parts.append(reads)
    parts.append(fn.__qualname__)  # a part of what f"{fn}" gives
    if len(fn.__qualname__) > _TEXT_LIMIT:
        raise NoKeyError
    for name, chain in reads.globals:
        value = read_global(fn, name)
        values.append(_follow(value, chain) if chain else value)
    for index, chain in reads.free:
        value = read_free(fn, index)
        values.append(_follow(value, chain) if chain else value)
    if fn.__defaults__:
        parts.append("defaults")
        values.append(fn.__defaults__)
    if fn.__kwdefaults__:
        parts.append("keyword defaults")
        _add_mapping(fn.__kwdefaults__, parts, values)
    if len(values) > _VALUES_LIMIT:
        raise NoKeyError


def _follow(value: Any, chain: tuple[str, ...]) -> Any:
    """What `value.a.b` reads where value is a module, or the first thing on the way that is not one."""
    for name in chain:
        if type(value) is not types.ModuleType:
            if isinstance(value, _CALLABLES) or value is torch.Tensor:
                raise NoKeyError
            break
        value = read_attribute(value, name)
    return value


def _add_values(new: Collection[Any], values: list[Any]) -> None:
    if len(values) + len(new) > _VALUES_LIMIT:
        raise NoKeyError
    values.extend(new)


def _add_mapping(new: Mapping[str, Any], parts: list[Hashable], values: list[Any]) -> None:
    items = tuple(new.items())
    parts.append(len(items))
    for item in items:
        values.extend(item)


def _add_object(value: Any, kind: type, parts: list[Hashable], values: list[Any]) -> None:
    if value is torch.Tensor or (kind is type and value in _PURE_TYPES):
        parts.append(value)
    elif kind is Epilogue:
        # Hash-consed, unlike the Epilogue, which may be made anew for every call.
        parts.extend((kind, value.expression, value.operand_count))
    elif kind is functools.partial and not value.__dict__:
        parts.append(kind)
        values.append(value.func)
        values.append(value.args)
        _add_mapping(value.keywords, parts, values)
    elif issubclass(kind, torch.nn.Module):
        _add_module(value, kind, parts, values)
    elif kind.__module__ == "numpy" and issubclass(kind, float):
        parts.append(kind)  # type: ignore[arg-type]  # mypy takes float.__hash__, which is of instances, for the class's
        values.append(float(value))
    else:
        raise NoKeyError


def _add_module(module: torch.nn.Module, kind: type, parts: list[Hashable], values: list[Any]) -> None:
    """For PyTorch's own modules without tensors and hooks: their class, what `forward` reads, and their attributes."""
    token = class_token(kind)
    forward = getattr(kind, "forward", None)  # a scripted module's class has none that can be read
    if token is None or type(forward) is not types.FunctionType or _has_global_hooks():
        raise NoKeyError
    attributes = vars(module)
    parts.append(token)
    parts.append(tuple(attributes))
    for name, value in tuple(attributes.items()):
        if type(value) not in _CONTAINERS:
            values.append(value)
        elif value and name == "_modules":
            _add_mapping(value, parts, values)
        elif value:
            raise NoKeyError
    reads = reads_of(forward.__code__)
    if reads.opaque or not reads.attributes <= attributes.keys():
        raise NoKeyError
    _add_reads(forward, reads, parts, values)


def _has_global_hooks() -> bool:
    check = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return check is None or bool(check())
