"""Copies a callable with all that it reads from outside, so that what is traced is what its key describes.

The callable itself could change between the computation of its key and its trace, and change back before a second key.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from cutfuse.epilogue.calls import is_known
from cutfuse.epilogue.namespaces import NoKeyError, builtins_of, read_attribute, read_free, read_global, reads_of
from cutfuse.epilogue.objects import IN_CHILDREN, IN_CLASS, attributes_of, children_of, is_plain, new_object, read_plain

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
