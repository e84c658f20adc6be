"""Notices when a class of torch.nn is patched, in anything that a call of a module runs besides its `forward`."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_MODULE = vars(nn.Module)
_CALL_PATH = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")


class _State:
    """The attributes of a class and its bases, without `forward`.

    `token` stands for them in keys. It refers to nothing, so that a key keeps nothing alive.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.token = object()
        self._homes: list[tuple[Mapping[str, Any], tuple[str, ...]]] = [(_MODULE, _CALL_PATH)]
        for home in map(vars, _own_classes(kind)):
            self._homes.append((home, tuple(name for name in tuple(home) if name != "forward")))
        self._sizes = self._find_sizes()
        self._values = self._find_values()  # kept alive, so that no other object gets the id of one
        self._identities = list(map(id, self._values))

    def is_current(self) -> bool:
        return self._sizes == self._find_sizes() and self._identities == list(map(id, self._find_values()))

    def _find_sizes(self) -> list[int]:
        return [len(home) for home, _ in self._homes]

    def _find_values(self) -> list[Any]:
        values: list[Any] = []
        for home, names in self._homes:
            values.extend(map(home.get, names))
        return values


_states: dict[type[nn.Module], _State] = {}


def class_token(kind: type[nn.Module]) -> object | None:
    """An object for a key: a new one after any attribute but `forward` has changed in a class of torch.nn.

    None for other classes, and where a function of the class other than `forward` is not PyTorch's.
    """
    found = _states.get(kind)
    if found is None or not found.is_current():
        if not _is_of_torch(kind):
            return None
        found = _states[kind] = _State(kind)
    return found.token


def _own_classes(kind: type[nn.Module]) -> list[type]:
    """The class and its bases, up to nn.Module."""
    return [home for home in kind.__mro__ if home is not nn.Module and home is not object]


def added_names() -> set[str]:
    """The functions of nn.Module that are not PyTorch's, such as one that transformers adds to initialize models."""
    items = tuple(_MODULE.items())
    return {name for name, value in items if type(value) is types.FunctionType and not is_function_of_torch(value)}


def _is_of_torch(kind: type[nn.Module]) -> bool:
    homes = (*_own_classes(kind), nn.Module)
    unused = _unused_names(homes)
    for home in homes:
        module = sys.modules.get(home.__module__)
        if not home.__module__.startswith("torch.nn.modules.") or getattr(module, home.__name__, None) is not home:
            return False
        for name, value in tuple(vars(home).items()):
            if name == "forward" or is_function_of_torch(value) or (home is nn.Module and name in unused):
                continue
            if callable(value) or hasattr(value, "__get__"):
                return False
    return True


def _unused_names(homes: Iterable[type]) -> set[str]:
    """The added functions that no call of a module runs: Python does not, and no code of its classes has their name."""
    added = {name for name in added_names() if not name.startswith("__")}
    return added.difference(_CALL_PATH, _names_read_by(homes)) if added else added


def _names_read_by(homes: Iterable[type]) -> set[str]:
    functions = [value for home in homes for value in vars(home).values() if isinstance(value, types.FunctionType)]
    codes = [function.__code__ for function in functions if is_function_of_torch(function)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return names


def is_function_of_torch(value: Any) -> bool:
    """Whether PyTorch or Python defines a function or descriptor."""
    if type(value) is types.FunctionType:
        return str(value.__globals__.get("__name__")).partition(".")[0] == "torch"
    return type(value) is types.GetSetDescriptorType
