"""A number for what a callable computes: equal numbers, equal traces.

A function is named by its code and by everything from outside that the code can reach: defaults, closure, globals.
That works only while all of this is immutable or is itself a function like that, and of an object only what the code
reads of it; any other callable has no number, and is traced afresh on every call. A callable that reaches something
large has none either: the cache would keep that alive.

The native module walks through the values (csrc/call/callable_walk.h). What it has to know of code and classes is told
here, once for each.

What is traced is a copy of the callable with all that it reads: the callable itself could change between the
computation of its number and its trace, and change back before a second one.
"""

from __future__ import annotations

import functools
import math
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from cutfuse import dynamo, native
from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.reads import (
    IN_CHILDREN,
    IN_CLASS,
    MISSING,
    NoKeyError,
    Reads,
    added_names,
    attributes_of,
    builtins_of,
    children_of,
    class_attribute,
    functions_of_torch,
    gives_children,
    has_plain_dict,
    is_of_torch,
    is_plain,
    new_object,
    read_attribute,
    read_free,
    read_global,
    read_plain,
    reads_of,
)
from cutfuse.epilogue.table import compositions, op_table
from cutfuse.epilogue.trace import Epilogue

# Without effects or state; they see numbers and symbolic values only.
_PURE_TYPES = (bool, float, int, range, tuple, torch.finfo, torch.iinfo)
_PURE_FUNCTIONS = (abs, divmod, isinstance, len, max, min, pow, round, sum)
_CONTAINERS = {dict, OrderedDict, set}
_FACTS_LIMIT = 1024  # of one callable


def fingerprint(value: object) -> int | None:
    """The number of a callable, or of numbers in a tuple; None where it has none."""
    found: Any = native.core.number_callable(value)
    return (found or None) if type(found) is int else _number_once_told(value, found)


@dynamo.disable  # after a graph break Dynamo would try to compile this
def _number_once_told(value: object, found: Any) -> int | None:
    """The number, after all that the native module has to know for it. found: what it has asked for first."""
    _tell_language()
    try:
        for _ in range(_FACTS_LIMIT):
            if type(found) is int:
                return found or None
            name, *of = found
            native.core.learn_fact(name, _FACTS[name](*of))
            found = native.core.number_callable(value)
    except NoKeyError:
        pass
    return None


@functools.lru_cache(maxsize=1)
def _tell_language() -> None:
    """What stands for itself in a key: the language's and Python's own. For those written in Python with what they are
    told by: their bodies run before `__torch_function__` is called, so one that is patched later has no key."""
    known = {*op_table().callables, *compositions(), *_PURE_FUNCTIONS, *_PURE_TYPES, torch.Tensor}
    known.update(value for value in vars(math).values() if isinstance(value, types.BuiltinFunctionType))
    bodies: dict[Any, Any] = {}
    for value in known:
        bodies[value] = bodies[getattr(value, "__code__", None)] = _told(value)
    kinds = torch.dtype, torch.Tensor, nn.Module, Epilogue, functools.partial
    native.core.learn_language(bodies, _check_of_global_hooks(), kinds)


def _told(value: Any) -> tuple[Any, ...]:
    """A function of PyTorch's, its code, its defaults and how many attributes it has, which a library may replace in
    place. Those that matter here have no arguments by keyword alone."""
    code, defaults = getattr(value, "__code__", None), getattr(value, "__defaults__", None)
    return value, code, defaults, len(getattr(value, "__dict__", ()))


def _check_of_global_hooks() -> Any:
    """How to see that no module has a global hook: which containers the check of PyTorch's asks, if it is a function
    that reads nothing else."""
    check: Any = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
    if type(check) is types.FunctionType and check.__globals__ is vars(torch.nn.modules.module):
        reads = reads_of(check.__code__)
        names = tuple(name for name, _ in reads.globals)
        is_simple = not (reads.opaque or reads.attributes or reads.free or any(chain for _, chain in reads.globals))
        if is_simple and all(type(check.__globals__.get(name)) in _CONTAINERS for name in names):
            return check.__globals__, check.__name__, check.__code__, names
    return None


@dynamo.disable  # after a graph break Dynamo would try to compile this
def _facts_of_code(code: types.CodeType) -> tuple[Any, ...]:
    """What code reads, and whether it has a key as a function, as a method and as a module's forward."""
    base = native.core.class_version(nn.Module)
    reads, added = reads_of(code), added_names()
    is_function = not (reads.opaque or reads.attributes or reads.names & added)
    is_method = not (reads.opaque or reads.others or reads.own is None or reads.other_names & added)
    globals_ = tuple((name, *chain, *_mark(name, chain, reads)) for name, chain in reads.globals)
    free = tuple((index, *chain, *_mark(code.co_freevars[index], chain, reads)) for index, chain in reads.free)
    own, attributes = reads.own or (), tuple(reads.attributes)
    return code, reads, is_function, is_method, not reads.opaque, globals_, free, own, attributes, base


def _mark(name: str, chain: tuple[str, ...], reads: Reads) -> tuple[None, ...]:
    """What ends the chain of something that is compared by identity."""
    return (None,) if (name, chain) in reads.compared else ()


@dynamo.disable
def _facts_of_class(kind: type) -> tuple[Any, ...]:
    version = _version_of(kind)
    is_module = issubclass(kind, nn.Module)
    forward = getattr(kind, "forward", None) if is_module and is_of_torch(kind) else None
    functions = tuple(map(_told, functions_of_torch(kind))) if is_module else ()
    # A scripted module's class has none that can be read.
    return version, is_plain(kind), forward if type(forward) is types.FunctionType else None, functions


def _facts_of_attribute(kind: type, name: str) -> tuple[Any, ...]:
    version = _version_of(kind)
    has_key, may_be_in_object, of_class = class_attribute(kind, name)
    found = () if of_class is MISSING else (of_class,)
    return version, name, has_key and has_plain_dict(kind), may_be_in_object, gives_children(kind), found


def _version_of(kind: type) -> int:
    """Taken before the class is looked at, so that it is a former one's where the class changes meanwhile."""
    version = native.core.class_version(kind)
    if not version:
        raise NoKeyError
    return version


def _facts_of_base() -> tuple[Any, ...]:
    _version_of(torch.Tensor)  # which the native module reads itself, once there is one
    return (_version_of(nn.Module),)


_FACTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "code": _facts_of_code,
    "class": _facts_of_class,
    "attribute": _facts_of_attribute,
    "base": _facts_of_base,
}


_Name = TypeVar("_Name", str, int)


def detach(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of fn with the same fingerprint, whose globals, free variables, defaults and attributes of objects are
    those of this moment.

    For callables that have a fingerprint. Raises NoKeyError where fn has changed so that it has none.
    """
    copier = _Copier()
    copy: Callable[..., Any] = copier.copy(fn)
    for original, function in copier.functions:  # grows while it is walked
        copier.fill(original, function)
    return copy


def shorter_first(reads: tuple[tuple[_Name, tuple[str, ...]], ...]) -> list[tuple[_Name, tuple[str, ...]]]:
    """Reads of a module as a whole before reads of its attributes, which its copy has."""
    return sorted(reads, key=lambda read: len(read[1]))


class _Copier:
    def __init__(self) -> None:
        self.functions: list[tuple[types.FunctionType, types.FunctionType]] = []
        self._copies: dict[Any, Any] = {}  # of functions and partials: code may ask whether two are one

    def copy(self, value: Any) -> Any:
        """Of a function only the code and empty cells, which `fill` fills later: functions may refer to each other in
        circles and long chains."""
        kind = type(value)
        if kind is types.FunctionType:
            return value if is_known(value) else self._copies.get(value) or self._copy_shell(value)
        if kind is tuple:
            return tuple(map(self.copy, value))
        if kind is functools.partial:
            return self._copies.get(value) or self._copy_partial(value)
        if kind is types.MethodType:
            return self._copy_method(value)
        if issubclass(kind, nn.Module):
            return self._copy_module(value)
        if kind is types.ModuleType or is_plain(kind):  # since the key was taken
            raise NoKeyError
        return value

    def fill(self, original: types.FunctionType, function: types.FunctionType) -> None:
        """Copies what the original reads into a function that `_copy_shell` made."""
        reads = reads_of(function.__code__)
        for name, chain in shorter_first(reads.globals):
            self._place(function.__globals__, name, read_global(original, name), chain)
        variables: dict[int, dict[str, Any]] = {}
        for index, chain in shorter_first(reads.free):
            self._place(variables.setdefault(index, {}), "value", read_free(original, index), chain)
        for index, variable in variables.items():
            (function.__closure__ or ())[index].cell_contents = variable["value"]
        function.__defaults__ = self.copy(original.__defaults__)
        function.__kwdefaults__ = self._copy_items(original.__kwdefaults__ or {})
        functools.update_wrapper(function, original)
        del vars(function)["__wrapped__"]

    def _copy_partial(self, partial: functools.partial[Any]) -> functools.partial[Any]:
        arguments = self.copy(partial.args)
        copy = functools.partial(self.copy(partial.func), *arguments, **self._copy_items(partial.keywords))
        self._copies[partial] = copy
        return copy

    def _copy_shell(self, original: types.FunctionType) -> types.FunctionType:
        code = original.__code__
        cells = tuple(types.CellType() for _ in code.co_freevars)
        namespace = {"__builtins__": builtins_of(original)}
        function = types.FunctionType(code, namespace, original.__name__, None, cells)
        self._copies[original] = function
        self.functions.append((original, function))
        return function

    def _copy_items(self, items: dict[str, Any]) -> dict[str, Any]:
        return {name: self.copy(value) for name, value in tuple(items.items())}

    def _copy_module(self, module: nn.Module) -> nn.Module:
        copy: nn.Module = new_object(type(module))
        for name, value in tuple(vars(module).items()):
            if name == "_modules":
                vars(copy)[name] = self._copy_items(value)
            else:
                vars(copy)[name] = value.copy() if isinstance(value, dict | set) else self.copy(value)
        return copy

    def _copy_method(self, method: types.MethodType) -> types.MethodType:
        owner = method.__self__
        home = {"self": new_object(type(owner))}
        for chain in sorted(reads_of(method.__func__.__code__).own or (), key=len):
            self._place(home, "self", owner, chain)
        return types.MethodType(self.copy(method.__func__), home["self"])

    def _place(self, home: dict[str, Any], name: str, value: Any, chain: tuple[str, ...]) -> None:
        """Puts what `name` or `name.a.b` reads into a namespace, with stand-ins for modules and objects on the way."""
        for attribute in chain:
            kind = type(value)
            if kind is not types.ModuleType and not is_plain(kind):
                break
            stand_in = home.setdefault(name, types.ModuleType(name) if kind is types.ModuleType else new_object(kind))
            # Another thread may have put another there since an earlier read.
            if type(stand_in) is not kind:
                raise NoKeyError
            name = attribute
            if kind is types.ModuleType:
                home, value = vars(stand_in), read_attribute(value, attribute)
            else:
                place, value = read_plain(value, kind, attribute)
                if place == IN_CLASS:
                    return  # the stand-in has the class
                home = children_of(stand_in) if place == IN_CHILDREN else attributes_of(stand_in)
        home.setdefault(name, self.copy(value))
