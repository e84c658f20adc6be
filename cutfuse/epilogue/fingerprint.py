"""A key for what a callable computes: equal keys, equal traces.

A function is named by its code and by everything from outside that the code can reach: defaults, closure, globals.
That works only while all of this is immutable or is itself a function like that; any other callable has no key, and is
traced afresh on every call.
"""

from __future__ import annotations

import dis
import functools
import threading
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.trace import Epilogue

_PLANS_LIMIT = 1024

_EXACT_TYPES = {int, bool, str, bytes, type(None), torch.dtype}
# Without effects or state; they see numbers and symbolic values only.
_PURE_BUILTINS = {abs, bool, divmod, float, int, isinstance, len, max, min, pow, range, round, sum, tuple}
_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType)
_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}
_NO_OPERATION = {"EXTENDED_ARG", "CACHE", "NOP"}


class _NoKeyError(Exception):
    """Something that may change without the key changing."""


class _Plan:
    """What a code object reads from outside: globals and free variables, each with the attributes taken at once."""

    __slots__ = ("code", "free", "globals", "opaque")

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        reads = dict.fromkeys(_outside_reads(code, set(code.co_freevars)))
        self.opaque = None in reads
        found = [read for read in reads if read is not None]
        self.globals = tuple((name, chain) for is_free, name, chain in found if not is_free)
        self.free = tuple(
            (index, tuple(chain for is_free, other, chain in found if is_free and other == name) or ((),))
            for index, name in enumerate(code.co_freevars)
        )


_plans: dict[int, _Plan] = {}
_lock = threading.Lock()


def fingerprint(fn: Callable[..., Any]) -> Hashable | None:
    """The key of a callable, or None where it has none."""
    try:
        return _key(fn, ())
    except _NoKeyError:
        return None


def remember(cache: dict, key: Hashable, value: Any, limit: int) -> None:
    """Stores in a cache that is read without a lock. When it is full the older half goes."""
    with _lock:
        if len(cache) >= limit:
            for old in list(cache)[: limit // 2]:
                del cache[old]
        cache[key] = value


def _plan_of(code: types.CodeType) -> _Plan:
    # By identity, which is faster than by value; the plan keeps the code alive, so that no other takes its place.
    plan = _plans.get(id(code))
    if plan is None:
        plan = _Plan(code)
        remember(_plans, id(code), plan, _PLANS_LIMIT)
    return plan


def _key(value: Any, pending: tuple[types.FunctionType, ...]) -> Hashable:
    kind = type(value)
    if kind is float:
        # 0.0 == -0.0
        return (kind, value) if value else (kind, repr(value))
    if kind in _EXACT_TYPES:
        return kind, value
    if kind is types.FunctionType:
        return value if is_known(value) else _function_key(value, pending)
    if kind is tuple:
        return (kind, *[_key(item, pending) for item in value])
    return _object_key(value, pending)


def _object_key(value: Any, pending: tuple[types.FunctionType, ...]) -> Hashable:
    if isinstance(value, _BUILTINS):
        if is_known(value) or value.__module__ == "math" or value in _PURE_BUILTINS:
            return value
    elif isinstance(value, type):
        if value in _PURE_BUILTINS:
            return value
    elif isinstance(value, Epilogue):
        return value
    elif type(value) is functools.partial:
        keywords = tuple((name, _key(item, pending)) for name, item in value.keywords.items())
        return (functools.partial, _key(value.func, pending), _key(value.args, pending), keywords)
    elif isinstance(value, torch.nn.Module):
        return _module_key(value, pending)
    elif type(value).__module__ == "numpy" and isinstance(value, float | int):
        return type(value), repr(value)
    raise _NoKeyError


def _function_key(fn: types.FunctionType, pending: tuple[types.FunctionType, ...]) -> Hashable:
    for depth, other in enumerate(pending):
        if other is fn:
            return "recursion", depth
    plan = _plan_of(fn.__code__)
    if plan.opaque or fn.__dict__:
        raise _NoKeyError
    pending = (*pending, fn)
    parts: list[Hashable] = [plan]
    namespace = fn.__globals__
    for name, chain in plan.globals:
        try:
            value = namespace[name] if name in namespace else fn.__builtins__[name]
        except KeyError:
            raise _NoKeyError from None
        parts.append(_chain_key(value, chain, pending))
    for index, chains in plan.free:
        try:
            value = fn.__closure__[index].cell_contents
        except ValueError:
            raise _NoKeyError from None
        parts.extend([_chain_key(value, chain, pending) for chain in chains])
    if fn.__defaults__:
        parts.append(_key(fn.__defaults__, pending))
    if fn.__kwdefaults__:
        parts.extend((name, _key(value, pending)) for name, value in fn.__kwdefaults__.items())
    return tuple(parts)


def _chain_key(value: Any, chain: tuple[str, ...], pending: tuple[types.FunctionType, ...]) -> Hashable:
    """The key of what `value.a.b` reads where value is a module, or of the first thing on the way that is not one."""
    for name in chain:
        if type(value) is not types.ModuleType:
            break
        try:
            value = getattr(value, name)
        except AttributeError:
            raise _NoKeyError from None
    return _key(value, pending)


def _module_key(module: torch.nn.Module, pending: tuple[types.FunctionType, ...]) -> Hashable:
    """For PyTorch's own modules without tensors and hooks: their type and attributes."""
    if not type(module).__module__.startswith("torch.nn.modules.") or _has_global_hooks():
        raise _NoKeyError
    parts: list[Hashable] = [type(module)]
    for name, value in vars(module).items():
        if name == "_modules":
            parts.extend((child_name, _key(child, pending)) for child_name, child in value.items())
        elif isinstance(value, dict | set):
            if value:
                raise _NoKeyError
        else:
            parts.append((name, _key(value, pending)))
    return tuple(parts)


def _has_global_hooks() -> bool:
    check = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    return check is None or bool(check())


def _outside_reads(code: types.CodeType, free: set[str]) -> Iterator[tuple[bool, str, tuple[str, ...]] | None]:
    """(is a free variable, name, attributes) for each read from outside in code and the code nested in it.

    None for an instruction that makes the code opaque. `free` has the outermost function's free variables.
    """
    root: tuple[bool, str] | None = None
    chain: list[str] = []
    for item in dis.get_instructions(code):
        if item.opname in _NO_OPERATION:
            continue
        if item.opname in _ATTRIBUTE_LOADS and root is not None:
            chain.append(item.argval)
            continue
        if root is not None:
            yield (*root, tuple(chain))
        root, chain = None, []
        is_free = "DEREF" in item.opname and item.argval in free
        if item.opname == "LOAD_GLOBAL" or (is_free and item.opname.startswith("LOAD_")):
            root = (is_free, item.argval)
        elif is_free or _is_opaque(item.opname):
            yield None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _outside_reads(constant, free)


def _is_opaque(instruction: str) -> bool:
    """Whether it stores outside the function, or reads by a name that cannot be told from the code."""
    return instruction.endswith("_NAME") or any(
        part in instruction for part in ("GLOBAL", "STORE_ATTR", "DELETE_ATTR", "BUILD_CLASS")
    )
