"""What a code object reads from outside, by its bytecode."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

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
    "attribute": an attribute of any other value. "unknown": an instruction that stores outside, or reads by a name that
    the code does not hold. "stored": one that stores the first parameter, or uses it in a way that is not told here.
    """

    kind: Literal["global", "free", "first", "attribute", "unknown", "stored"]
    name: str = ""
    chain: tuple[str, ...] = ()


class Reads:
    """What a code object and the code nested in it read from outside.

    globals: (name, attributes taken of it at once). free: (index, such attributes for each read) of free variables.
    opaque: the code reads or writes more than these tell. names: of the attributes that it takes of values whose origin
    the code does not tell. attributes: those of them that tensors, numbers, strings and containers do not have.
    own: the attributes for each read of the first parameter, `self` in a method; None where the code uses it in any
    other way. other_names and others: like names and attributes, without those of the first parameter.
    """

    __slots__ = ("attributes", "free", "globals", "names", "opaque", "other_names", "others", "own")

    def __init__(self, code: types.CodeType) -> None:
        first = code.co_varnames[0] if code.co_argcount else None
        found = tuple(dict.fromkeys(_find_reads(code, frozenset(code.co_freevars), first)))
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


def is_comparable(code: types.CodeType) -> bool:
    """Whether code is small enough to be kept, and equals code of the same text, which a NaN in it prevents."""
    size = 0
    values: list[object] = [code]
    for value in values:
        size += sys.getsizeof(value)
        if size > _CODE_LIMIT or (isinstance(value, float) and value != value):
            return False
        if isinstance(value, types.CodeType):
            values.extend((value.co_consts, value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars))
        elif isinstance(value, tuple | frozenset):
            values.extend(value)
    return True


def _find_reads(code: types.CodeType, free: frozenset[str], first: str | None) -> Iterator[_Read]:
    """The reads in code and in the code nested in it. `free` has the outermost function's free variables, and `first`
    is its first parameter."""
    root: _Read | None = None
    for item in dis.get_instructions(code):
        if item.is_jump_target and root is not None:  # what is on the stack may come from elsewhere
            yield root
            root = None
        if item.opname in _NO_OPERATION:
            continue
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
        elif is_free or _is_opaque(item.opname):
            yield _Read("unknown")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _find_reads(constant, free, None)


def _locals_of(item: dis.Instruction) -> list[Any]:
    """The local variables that an instruction names: some name two."""
    if "_FAST" not in item.opname:
        return []
    return list(item.argval) if isinstance(item.argval, tuple) else [item.argval]


def _is_opaque(instruction: str) -> bool:
    """Whether it stores outside the function, or reads by a name that cannot be told from the code."""
    return instruction.endswith("_NAME") or any(
        part in instruction for part in ("GLOBAL", "STORE_ATTR", "DELETE_ATTR", "BUILD_CLASS", "SUPER_ATTR")
    )


def _reveals_more(attribute: str) -> bool:
    """Whether an attribute may be of a function itself, as `__name__` is, or gives others, as `__dict__` does."""
    return attribute.startswith("__") or attribute in _FORMATTERS
