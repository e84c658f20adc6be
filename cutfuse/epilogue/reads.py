"""What a callable reads from outside: by its bytecode, and what each read gives, where that runs no code.

Names give globals, free variables, attributes of modules and, as `self.scale` in a method, of plain objects. A class of
torch.nn is watched for patches, in anything that a call of a module runs besides its `forward`.
"""

from __future__ import annotations

import dis
import re
import sys
import threading
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

_CODE_LIMIT = 16 * 1024  # bytes; an epilogue of ten lines has about 2000

_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}
# Instructions that leave a local variable on top of the stack, the last of those that they name.
_LOCAL_LOADS = {
    "LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
    "STORE_FAST_LOAD_FAST",
}
_NO_OPERATION = {"EXTENDED_ARG", "CACHE", "NOP"}
# Constants of which Python has one object.
_SINGLETONS = {bool, type(None), type(...)}
# Instructions that store outside the function, or read by a name that cannot be told from the code.
_OPAQUE = {name for name in dis.opmap if re.search("_NAME$|GLOBAL|STORE_ATTR|DELETE_ATTR|BUILD_CLASS|SUPER_ATTR", name)}

# These methods read attributes whose names are inside a string.
_FORMATTERS = {"format", "format_map"}
# The attributes of tensors, numbers, strings and containers.
_VALUE_ATTRIBUTES = {
    name
    for kind in (torch.Tensor, int, float, complex, str, bytes, tuple, list, dict, set, range, slice)
    for name in dir(kind)
    if not name.startswith("_")
} - _FORMATTERS


class _Read(NamedTuple):
    """One instruction that reads from outside the function, or its first parameter.

    "global", "free" and "first": a name, and in `chain` the attributes that the next instructions read of it.
    "attribute": an attribute of any other value. "unknown": an instruction that stores outside, reads by a name that
    the code does not hold, or asks whether two other values are one object. "stored": one that stores the first
    parameter, or uses it in a way that is not told here.
    is_compared: whether the next instruction asks if another value is the same object.
    """

    kind: Literal["global", "free", "first", "attribute", "unknown", "stored"]
    name: str = ""
    chain: tuple[str, ...] = ()
    is_compared: bool = False


class Reads:
    """What a code object and the code nested in it read from outside.

    globals: (name, attributes taken of it at once). free: (index, such attributes for each read) of free variables.
    compared: those of both, as names and attributes, of which the code asks whether another value is the same object.
    opaque: the code reads or writes more than these tell. names: of the attributes that it takes of values whose origin
    the code does not tell. attributes: those of them that tensors, numbers, strings and containers do not have.
    own: the attributes for each read of the first parameter, `self` in a method; None where the code uses it in any
    other way. other_names and others: like names and attributes, without those of the first parameter.
    """

    __slots__ = ("attributes", "compared", "free", "globals", "names", "opaque", "other_names", "others", "own")

    def __init__(self, code: types.CodeType) -> None:
        first = code.co_varnames[0] if code.co_argcount else None
        reads = tuple(dict.fromkeys(_find_reads(code, frozenset(code.co_freevars), first)))
        self.compared = frozenset((read.name, read.chain) for read in reads if read.is_compared)
        found = tuple(dict.fromkeys(read._replace(is_compared=False) for read in reads))
        self.globals = tuple((read.name, read.chain) for read in found if read.kind == "global")
        # Each free variable at least once, as a nested function may hold it without reading it.
        chains = [(read.name, read.chain) for read in found if read.kind == "free"]
        read_names = dict(chains)
        chains.extend((name, ()) for name in code.co_freevars if name not in read_names)
        self.free = tuple((code.co_freevars.index(name), chain) for name, chain in chains)
        self.other_names = frozenset(read.name for read in found if read.kind == "attribute")
        of_first = [read.chain for read in found if read.kind == "first"]
        is_elsewhere = first is None or first in code.co_cellvars or any(read.kind == "stored" for read in found)
        self.own = tuple(of_first) if not is_elsewhere and all(of_first) else None
        self.names = self.other_names.union(*of_first)
        self.others = self.other_names - _VALUE_ATTRIBUTES
        self.attributes = self.names - _VALUE_ATTRIBUTES
        everywhere = self.names.union(*(read.chain for read in found))
        self.opaque = any(read.kind == "unknown" for read in found) or any(map(_reveals_more, everywhere))


_CONSTANTS = {*_SINGLETONS, int, float, complex, str, bytes, slice, tuple, frozenset, types.CodeType}


def _identify(code: types.CodeType) -> tuple[Any, ...]:
    """What equals that of code that computes the same: equal code may have sets of another order, and other names.

    Raises NoKeyError for code that is too large to be kept, or with constants that change or do not equal themselves.
    """
    size = 0
    values: list[Any] = [code]
    unequal: list[Any] = []
    for value in values:
        size += sys.getsizeof(value)
        if size > _CODE_LIMIT or type(value) not in _CONSTANTS or value != value:
            raise NoKeyError
        if isinstance(value, types.CodeType):
            unequal.append(getattr(value, "co_qualname", ""))  # which Python 3.10 has as a constant
            values.extend((value.co_consts, value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars))
        elif isinstance(value, tuple | frozenset):
            values.extend(items := tuple(value))
            unequal.append(items if isinstance(value, frozenset) else ())
        elif isinstance(value, slice):
            values.extend((value.start, value.stop, value.step))
    return code, *unequal


def _find_reads(code: types.CodeType, free: frozenset[str], first: str | None) -> Iterator[_Read]:
    """The reads in code and in the code nested in it. `free` has the outermost function's free variables, and `first`
    is its first parameter."""
    root: _Read | None = None
    is_singleton = False  # what the last instruction gave
    for item in dis.get_instructions(code):
        if item.is_jump_target:  # what is on the stack may come from elsewhere
            is_singleton = False
            if root is not None:
                yield root
                root = None
        if item.opname in _NO_OPERATION:
            continue
        if item.opname == "IS_OP":
            if root is not None and root.kind != "first":
                root = root._replace(is_compared=True)
            elif root is not None or not is_singleton:
                yield _Read("unknown")
        is_singleton = item.opname == "LOAD_COMMON_CONSTANT" or (
            item.opname == "LOAD_CONST" and type(item.argval) in _SINGLETONS
        )
        if item.opname in _ATTRIBUTE_LOADS and root is not None:
            root = root._replace(chain=(*root.chain, item.argval))
            continue
        if root is not None:
            yield root
        root = None
        is_free = "DEREF" in item.opname and item.argval in free
        locals_ = _locals_of(item)
        if first in locals_[:-1] or (locals_[-1:] == [first] and item.opname not in _LOCAL_LOADS):
            yield _Read("stored")
        elif first is not None and locals_[-1:] == [first]:
            root = _Read("first", first)
        elif item.opname == "LOAD_GLOBAL":
            root = _Read("global", item.argval)
        elif is_free and item.opname.startswith("LOAD_"):
            root = _Read("free", item.argval)
        elif item.opname in _ATTRIBUTE_LOADS:
            yield _Read("attribute", item.argval)
        elif is_free or item.opname in _OPAQUE:
            yield _Read("unknown")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _find_reads(constant, free, None)


def _locals_of(item: dis.Instruction) -> list[Any]:
    """The local variables that an instruction names: some name two."""
    if "_FAST" not in item.opname:
        return []
    return list(item.argval) if isinstance(item.argval, tuple) else [item.argval]


def _reveals_more(attribute: str) -> bool:
    """Whether an attribute may be of a function itself, as `__name__` is, or gives others, as `__dict__` does."""
    return attribute.startswith("__") or attribute in _FORMATTERS


_CODES_LIMIT = 1024
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
MISSING = object()

_Value = TypeVar("_Value")


class NoKeyError(Exception):
    """Something that may change without the key changing, or that is too large for one."""


# By value, so that code compiled again from the same text has the same key.
_reads_by_code: dict[tuple[Any, ...], Reads] = {}
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
    key = _identify(code)
    return _reads_by_code.get(key) or remember(_reads_by_code, key, Reads(code), _CODES_LIMIT)


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


_MODULE, _MODULE_GLOBALS = vars(nn.Module), vars(sys.modules[nn.Module.__module__])
_CALL_PATH = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")


def _own_classes(kind: type[nn.Module]) -> list[type]:
    """The class and its bases, up to nn.Module."""
    return [home for home in kind.__mro__ if home is not nn.Module and home is not object]


def functions_of_torch(kind: type[nn.Module]) -> list[types.FunctionType]:
    """What a call of a module of torch.nn may run besides its `forward`, and a read of a module in another one."""
    homes = [vars(home) for home in _own_classes(kind)] if is_of_torch(kind) else []
    found = [value for home in homes for name, value in home.items() if name != "forward"]
    found += [_MODULE.get(name) for name in _CALL_PATH]
    return [value for value in found if type(value) is types.FunctionType]


def added_names() -> set[str]:
    """The functions of nn.Module that are not PyTorch's, such as one that transformers adds to initialize models."""
    items = tuple(_MODULE.items())
    functions = [item for item in items if type(item[1]) is types.FunctionType]
    others = [item for item in functions if item[1].__globals__ is not _MODULE_GLOBALS]
    return {name for name, value in others if not is_function_of_torch(value)}


def is_of_torch(kind: type[nn.Module]) -> bool:
    """Whether a class is one of torch.nn, all of whose functions other than `forward` are PyTorch's."""
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


# Where an attribute was found. `csrc/call/callable_walk.h` looks in the same order.
IN_OBJECT, IN_CLASS, IN_CHILDREN = range(3)

_NOT_PLAIN = (torch.Tensor, types.ModuleType)


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


def class_attribute(kind: type, name: str) -> tuple[bool, bool, Any]:
    """Whether a read of an attribute of a plain class's object runs no code; whether that is so if the object itself
    has it; and what the class has, or MISSING."""
    of_class = look_up(kind, name)
    runs_code = look_up(type(of_class), "__get__") is not MISSING
    # What the class has may become a descriptor, which the version of its own class tells and no other.
    return not runs_code, of_class is MISSING or not can_change(type(of_class)), of_class


def read_plain(value: Any, kind: type, name: str) -> tuple[int, Any]:
    """Where an object of a plain class has an attribute, and the attribute.

    Raises NoKeyError where a read may run code.
    """
    has_key, may_be_in_object, of_class = class_attribute(kind, name)
    if not has_key:
        raise NoKeyError
    attributes = attributes_of(value)
    found = attributes.get(name, MISSING)
    if found is not MISSING:
        if not may_be_in_object:
            raise NoKeyError
        return IN_OBJECT, found
    if of_class is not MISSING:
        return IN_CLASS, of_class
    return IN_CHILDREN, _read_child(kind, attributes, name)


def has_plain_dict(kind: type) -> bool:
    """Whether what a class calls `__dict__` are its objects' attributes."""
    found = look_up(kind, "__dict__")
    return type(found) is types.GetSetDescriptorType and found.__objclass__ in kind.__mro__


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's `__dict__`, whatever its class calls so."""
    if not has_plain_dict(type(value)):
        raise NoKeyError
    attributes = object.__getattribute__(value, "__dict__")
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


def gives_children(kind: type) -> bool:
    """Whether modules inside of a module are what nn.Module's own `__getattr__` gives."""
    getter = vars(nn.Module).get("__getattr__")
    return issubclass(kind, nn.Module) and look_up(kind, "__getattr__") is getter and is_function_of_torch(getter)


def _read_child(kind: type, attributes: dict[str, Any], name: str) -> Any:
    homes: list[Any] = [attributes.get(home) for home in ("_parameters", "_buffers", "_modules")]
    if not gives_children(kind) or any(type(home) is not dict for home in homes):
        raise NoKeyError
    parameters, buffers, children = homes
    if name in parameters or name in buffers or name not in children:
        raise NoKeyError
    return children[name]
