"""Attributes of objects that an epilogue reads, as `self.scale` in a method: where a read of one runs no code."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import nn

from cutfuse.epilogue.module_class import is_function_of_torch
from cutfuse.epilogue.namespaces import MISSING, NoKeyError, can_change, look_up
from cutfuse.epilogue.trace import Epilogue

# Where an attribute was found. `csrc/call/callable_walk.h` looks in the same order.
IN_OBJECT, IN_CLASS, IN_CHILDREN = range(3)

_NOT_PLAIN = (torch.Tensor, types.ModuleType, Epilogue)


class Unread(NamedTuple):
    """An object, and for each read of it by code the attribute, and the attributes that are read of that one."""

    value: Any
    chains: tuple[tuple[str, ...], ...]


def is_plain(kind: type) -> bool:
    """Whether an instance's attributes are what it or its class holds, unless that is a descriptor or is missing.

    One with a `__del__` is not: that would run for the copies that `detach` makes.
    """
    return (
        type(kind) is type
        and can_change(kind)
        and look_up(kind, "__getattribute__") is vars(object)["__getattribute__"]
        and look_up(kind, "__del__") is MISSING
        and not issubclass(kind, _NOT_PLAIN)
    )


def read_plain(value: Any, kind: type, name: str) -> tuple[int, Any]:
    """Where an object of a plain class has an attribute, and the attribute.

    Raises NoKeyError where a read may run code.
    """
    of_class = look_up(kind, name)
    if look_up(type(of_class), "__get__") is not MISSING:
        raise NoKeyError
    attributes = attributes_of(value)
    found = attributes.get(name, MISSING)
    if found is not MISSING:
        # What the class has may become a descriptor, which the version of its own class tells and no other.
        if of_class is not MISSING and can_change(type(of_class)):
            raise NoKeyError
        return IN_OBJECT, found
    if of_class is not MISSING:
        return IN_CLASS, of_class
    return IN_CHILDREN, _read_child(kind, attributes, name)


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's `__dict__`, whatever its class calls so."""
    if type(look_up(type(value), "__dict__")) is not types.GetSetDescriptorType:
        raise NoKeyError
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except TypeError:  # a descriptor of another class
        raise NoKeyError from None
    if type(attributes) is not dict:
        raise NoKeyError
    return attributes


def new_object(kind: type) -> Any:
    """An object without attributes. Raises NoKeyError for a class that makes its own."""
    try:
        return object.__new__(kind)
    except TypeError:
        raise NoKeyError from None


def children_of(module: Any) -> dict[str, Any]:
    """Where an object of `new_object` gets the modules inside of it."""
    attributes = attributes_of(module)
    for home in ("_parameters", "_buffers"):
        attributes.setdefault(home, {})
    children: dict[str, Any] = attributes.setdefault("_modules", {})
    return children


def _read_child(kind: type, attributes: dict[str, Any], name: str) -> Any:
    """A module inside of a module, which nn.Module's own `__getattr__` gives."""
    getter = vars(nn.Module).get("__getattr__")
    homes: list[Any] = [attributes.get(home) for home in ("_parameters", "_buffers", "_modules")]
    is_module = issubclass(kind, nn.Module) and look_up(kind, "__getattr__") is getter and is_function_of_torch(getter)
    if not is_module or any(type(home) is not dict for home in homes):
        raise NoKeyError
    parameters, buffers, children = homes
    if name in parameters or name in buffers or name not in children:
        raise NoKeyError
    return children[name]
