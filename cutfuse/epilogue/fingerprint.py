"""A key for what a callable computes: equal keys, equal traces.

A function is named by its code and by everything from outside that the code can reach: defaults, closure, globals.
That works only while all of this is immutable or is itself a function like that, and of an object only what the code
reads of it; any other callable has no key, and is traced afresh on every call. A callable that reaches something large
has no key either: the cache would keep that alive.

A trail has the reads behind a key, for the native module, which recognises a callable by making them again. What is
traced is a copy of the callable with all that it reads: the callable itself could change between the computation of its
key and its trace, and change back before a second key.
"""

from __future__ import annotations

import functools
import math
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from cutfuse import native
from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.reads import (
    IN_CHILDREN,
    IN_CLASS,
    NoKeyError,
    Reads,
    Unread,
    added_names,
    attributes_of,
    builtins_of,
    can_change,
    children_of,
    class_token,
    is_plain,
    new_object,
    read_attribute,
    read_free,
    read_global,
    read_plain,
    reads_of,
)
from cutfuse.epilogue.trace import Epilogue

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

# The callables met so far that stand for themselves in a key: the language's and Python's own, hence few. For those
# written in Python the code and the defaults that they had: their bodies run before `__torch_function__` is called, so
# one that was patched since has no key.
_builtins = _PURE_FUNCTIONS.union(value for value in vars(math).values() if isinstance(value, _BUILTINS))
_functions: dict[types.FunctionType, tuple[types.CodeType, tuple[Any, ...] | None]] = {}


# What is read, of which of the values met so far, by which name or index; the kind of answer, and the answer.
Step = tuple[str, int, Any, str, Any]


def fingerprint(value: object) -> Hashable | None:
    """The key of a callable, or of numbers in a tuple; None where it has none."""
    try:
        return _Walk(value).key()
    except NoKeyError:
        return None


def fingerprint_with_trail(value: object) -> tuple[Hashable, list[Step]] | None:
    """The key, and the reads that it was made of, in their order, with what each gave.

    None where there is no key, or something was read that the native module cannot read.
    """
    trail: list[Step] = []
    walk = _Walk(value, trail)
    try:
        key = walk.key()
    except NoKeyError:
        return None
    return (key, trail) if walk.is_readable else None


class _Walk:
    """Looks at all values that a value reaches, breadth first, for the parts of its key.

    Flat, as functions may call each other in long chains, in circles, or share others; one that is reached again is
    named by its number. The values are numbered in the order in which they are found, the callable first:
    `csrc/call/callable_walk.h` has the same order. `csrc/call/observations.h` says what each read is.

    trail: where to write the reads down. is_readable: nothing was read that the native module cannot read.
    """

    def __init__(self, root: object, trail: list[Step] | None = None) -> None:
        self.parts: list[Hashable] = []
        self.values: list[Any] = [root]
        self.slot = 0  # of the value that is being looked at
        self.trail = trail
        self.is_readable = True

    def _note(self, read: str, answer: str, found: Any, argument: Any = None) -> None:
        if self.trail is not None:
            self.trail.append((read, self.slot, argument, answer, found))

    def key(self) -> Hashable:
        parts, values = self.parts, self.values
        numbers: dict[types.FunctionType, int] = {}
        text = 0
        for self.slot, value in enumerate(values):
            kind = type(value)
            if kind is types.FunctionType:
                if value in _functions or (value not in numbers and is_known(value)):
                    self._add_known_function(value)
                elif value in numbers:
                    parts.append(numbers[value])
                    self._note("value", "seen", numbers[value])
                else:
                    numbers[value] = len(numbers)
                    self._add_function(value)
            elif kind in _BUILTINS:
                parts.append(value if value in _builtins else _check_builtin(value))
                self._note("value", "same", value)
            elif kind is float:
                # 0.0 == -0.0, and NaN differs from itself.
                parts.append((kind, value if value and value == value else struct.pack("d", value)))
                self._note("value", "float", value)
            elif kind in _EXACT_TYPES:
                parts.append((kind, value))
                self._note("value", "same", value)
            elif kind is int:
                if value.bit_length() > _INTEGER_BITS_LIMIT:
                    raise NoKeyError
                parts.append((kind, value))
                self._note("value", "int", value)
            elif kind in _TEXT_TYPES:
                text += len(value)
                if text > _TEXT_LIMIT:
                    raise NoKeyError
                parts.append((kind, value))
                self._note("value", "text", value)
            elif kind is tuple:
                if len(values) + len(value) > _VALUES_LIMIT:
                    raise NoKeyError
                parts.append((kind, len(value)))
                values.extend(value)
                self._note("value", "tuple", len(value))
            else:
                self._add_object(value, kind)
        return tuple(parts)

    def _add_known_function(self, fn: types.FunctionType) -> None:
        """A function that stands for itself. Raises NoKeyError where it was patched since it was met first."""
        body = fn.__code__, fn.__defaults__
        code, defaults = _functions.setdefault(fn, body)
        if body[0] is not code or body[1] is not defaults:
            raise NoKeyError
        self.parts.append(fn)
        self._note("value", "same", fn)
        self._note("code", "same", code)
        self._note("default values", "same", defaults)

    def _add_function(self, fn: types.FunctionType) -> None:
        code = fn.__code__
        reads = reads_of(code)
        if reads.opaque or reads.attributes or fn.__dict__ or (reads.names and reads.names & added_names()):
            raise NoKeyError
        self._note("value", "code", code)
        self._add_reads(fn, reads)

    def _add_reads(self, fn: types.FunctionType, reads: Reads) -> None:
        name_of_function, defaults, keyword_defaults = fn.__qualname__, fn.__defaults__, fn.__kwdefaults__
        self.parts.append(reads)
        self.parts.append(name_of_function)  # a part of what f"{fn}" gives
        if len(name_of_function) > _TEXT_LIMIT:
            raise NoKeyError
        self._note("qualname", "text", name_of_function)
        for name, chain in reads.globals:
            self._note("global", "depth", self._add_read(read_global(fn, name), chain), (name, *chain))
        for index, chain in reads.free:
            self._note("free", "depth", self._add_read(read_free(fn, index), chain), (index, *chain))
        if defaults:
            self.parts.append("defaults")
            self.values.append(defaults)
        self._note("defaults", "size", 1 if defaults else 0)
        if keyword_defaults:
            self.parts.append("keyword defaults")
        self._note("keyword defaults", "size", self._add_mapping(keyword_defaults) if keyword_defaults else 0)
        if len(self.values) > _VALUES_LIMIT:
            raise NoKeyError

    def _add_read(self, value: Any, chain: tuple[str, ...]) -> int:
        """What `value.a.b` reads where value is a module, or the first thing on the way that is not one.

        How far it came is a part of the key: `a` may be a module with an attribute `imag`, or a number.
        """
        depth = self._add_chain(value, chain)
        if chain:
            self.parts.append(depth)
        return depth

    def _add_chain(self, value: Any, chain: tuple[str, ...]) -> int:
        """Adds what a chain of attributes of modules gives, or an object that the rest is read of; how far it came."""
        depth = 0
        for name in chain:
            if type(value) is not types.ModuleType:
                break
            value = read_attribute(value, name)
            depth += 1
        rest = chain[depth:]
        if rest and is_plain(type(value)):
            value = Unread(value, (rest,))
        elif rest and (isinstance(value, _CALLABLES) or value is torch.Tensor):
            raise NoKeyError
        self.values.append(value)
        return depth

    def _add_mapping(self, new: Mapping[str, Any]) -> int:
        """Adds names and values; how many."""
        items = tuple(new.items())
        self.parts.append(len(items))
        for item in items:
            self.values.extend(item)
        return len(items)

    def _add_object(self, value: Any, kind: type) -> None:
        if kind is Unread:
            self._add_attributes(value)
        elif kind is types.MethodType and len(self.values) == 1:  # as a value it has a repr and an identity
            self._add_method(value)
        elif value is torch.Tensor or (kind is type and value in _PURE_TYPES):
            self.parts.append(value)
            self._note("value", "same", value)
        elif kind is Epilogue:
            # Hash-consed, unlike the Epilogue, which may be made anew for every call.
            self.parts.extend((kind, value.expression, value.operand_count))
            self._note("value", "epilogue", (value.expression, value.operand_count))
        elif kind is functools.partial and not value.__dict__:
            self.parts.append(kind)
            self.values.append(value.func)
            self.values.append(value.args)
            self._note("value", "partial", None)
            self._note("keywords", "size", self._add_mapping(value.keywords))
        elif issubclass(kind, torch.nn.Module):
            self._add_module(value, kind)
        elif kind.__module__ == "numpy" and issubclass(kind, float):
            self.parts.append(kind)  # type: ignore[arg-type]  # mypy takes float.__hash__ for the class's own
            self.values.append(float(value))
            self._note("value", "float of type", kind)
            self.is_readable &= not can_change(kind)
        else:
            raise NoKeyError

    def _note_class(self, answer: str, kind: type) -> None:
        """Before the class is looked at, so that it is a former one's version where the class changes meanwhile."""
        if self.trail is not None:
            self._note("value", answer, (kind, native.core.class_version(kind)))

    def _add_attributes(self, unread: Unread) -> None:
        kind = type(unread.value)
        self._note_class("class", kind)
        if not is_plain(kind):
            raise NoKeyError
        for chain in unread.chains:
            place, found = read_plain(unread.value, kind, chain[0])
            if place == IN_CLASS and len(chain) > 1 and (type(found) is types.ModuleType or is_plain(type(found))):
                raise NoKeyError  # a copy, which has the class too, would read what the class holds at that time
            depth = self._add_chain(found, chain[1:])
            self.parts.append(("attribute", depth))
            self._note("attribute", "place", (place, depth), chain)
        if len(self.values) > _VALUES_LIMIT or type(unread.value) is not kind:
            raise NoKeyError

    def _add_method(self, method: types.MethodType) -> None:
        """For a method written in Python that reads attributes of its object, and uses the object for nothing else."""
        function = method.__func__
        if type(function) is not types.FunctionType or function.__dict__:
            raise NoKeyError
        reads = reads_of(function.__code__)
        if reads.opaque or reads.others or reads.own is None or reads.other_names & added_names():
            raise NoKeyError
        self.parts.append(types.MethodType)
        self._note("value", "method", function.__code__)
        self.values.append(Unread(method.__self__, reads.own))
        self._add_reads(function, reads)

    def _add_module(self, module: torch.nn.Module, kind: type) -> None:
        """For PyTorch's own modules without tensors and hooks: their class, what `forward` reads, and their
        attributes."""
        self._note_class("module", kind)
        token = class_token(kind)
        if sum(value is module for value in self.values) > 1:  # code may ask whether two modules are one
            raise NoKeyError
        forward = getattr(kind, "forward", None)  # a scripted module's class has none that can be read
        if token is None or type(forward) is not types.FunctionType:
            raise NoKeyError
        self._check_global_hooks()
        attributes = vars(module).copy()
        self.parts.append(("module", token))
        self.parts.append(tuple(attributes))
        kinds = tuple(map(type, attributes.values()))
        self.parts.append(kinds)  # an empty container has no part of its own
        children: dict[str, Any] = {}
        for name, value in attributes.items():
            if type(value) not in _CONTAINERS:
                self.values.append(value)
            elif value and name == "_modules":
                children = value.copy()
                self._add_mapping(children)
            elif value:
                raise NoKeyError
        code = forward.__code__
        reads = reads_of(code)
        if reads.opaque or not reads.attributes <= attributes.keys():
            raise NoKeyError
        self._note("attributes", "names", (tuple(attributes), kinds, len(children)))
        self.is_readable &= all(type(name) is str for name in attributes)
        self.is_readable &= not children or type(attributes["_modules"]) is dict
        self._note("forward", "code", code)
        self._add_reads(forward, reads)

    def _check_global_hooks(self) -> None:
        """Raises NoKeyError where modules have global hooks. Notes which containers the check of PyTorch's asks: it is
        to be a function that reads nothing else."""
        check: Any = getattr(torch.nn.modules.module, "_has_any_global_hook", None)
        if check is None or bool(check()):
            raise NoKeyError
        if self.trail is None:
            return
        if type(check) is types.FunctionType and check.__globals__ is vars(torch.nn.modules.module):
            code = check.__code__
            reads = reads_of(code)
            names = tuple(name for name, _ in reads.globals)
            is_simple = not (reads.opaque or reads.attributes or reads.free or any(chain for _, chain in reads.globals))
            if is_simple and all(type(check.__globals__.get(name)) in _CONTAINERS for name in names):
                self._note("hooks", "none", None, (check.__globals__, check.__name__, code, names))
                return
        self.is_readable = False


def _check_builtin(value: Any) -> Any:
    if not is_known(value):
        raise NoKeyError
    _builtins.add(value)
    return value


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
        self._copies: dict[types.FunctionType, types.FunctionType] = {}

    def copy(self, value: Any) -> Any:
        """Of a function only the code and empty cells, which `fill` fills later: functions may refer to each other in
        circles and long chains."""
        kind = type(value)
        if kind is types.FunctionType:
            return value if is_known(value) else self._copies.get(value) or self._copy_shell(value)
        if kind is tuple:
            return tuple(map(self.copy, value))
        if kind is functools.partial:
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self._copy_items(value.keywords))
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
