"""What a code object reads from outside, by its bytecode."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

_CODE_LIMIT = 16 * 1024  # bytes; an epilogue of ten lines has about 2000

_ATTRIBUTE_LOADS = {"LOAD_ATTR", "LOAD_METHOD"}
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
    """One instruction that reads from outside the function.

    "global" and "free": a name, and in `chain` the attributes that the next instructions read of it. "attribute": an
    attribute of any other value. "unknown": an instruction that stores outside, or reads by a name that the code does
    not hold.
    """

    kind: Literal["global", "free", "attribute", "unknown"]
    name: str = ""
    chain: tuple[str, ...] = ()


class Reads:
    """What a code object and the code nested in it read from outside.

    globals: (name, attributes taken of it at once). free: (index, such attributes for each read) of free variables.
    opaque: the code reads or writes more than these tell. attributes: what it takes of values whose origin the code
    does not tell, other than the attributes of tensors, numbers, strings and containers. names: of all attributes.
    """

    __slots__ = ("attributes", "free", "globals", "names", "opaque")

    def __init__(self, code: types.CodeType) -> None:
        found = tuple(dict.fromkeys(_find_reads(code, frozenset(code.co_freevars))))
        self.globals = tuple((read.name, read.chain) for read in found if read.kind == "global")
        # Each free variable at least once, as a nested function may hold it without reading it.
        chains = [(read.name, read.chain) for read in found if read.kind == "free"]
        read_names = dict(chains)
        chains.extend((name, ()) for name in code.co_freevars if name not in read_names)
        self.free = tuple((code.co_freevars.index(name), chain) for name, chain in chains)
        taken = {read.name for read in found if read.kind == "attribute"}
        everywhere = taken.union(*(read.chain for read in found))
        self.names = frozenset(everywhere)
        self.attributes = frozenset(taken - _VALUE_ATTRIBUTES)
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


def _find_reads(code: types.CodeType, free: frozenset[str]) -> Iterator[_Read]:
    """The reads in code and in the code nested in it. `free` has the outermost function's free variables."""
    root: _Read | None = None
    for item in dis.get_instructions(code):
        if item.opname in _NO_OPERATION:
            continue
        if item.opname in _ATTRIBUTE_LOADS and root is not None:
            root = root._replace(chain=(*root.chain, item.argval))
            continue
        if root is not None:
            yield root
        root = None
        is_free = "DEREF" in item.opname and item.argval in free
        if item.opname == "LOAD_GLOBAL":
            root = _Read("global", item.argval)
        elif is_free and item.opname.startswith("LOAD_"):
            root = _Read("free", item.argval)
        elif item.opname in _ATTRIBUTE_LOADS:
            yield _Read("attribute", item.argval)
        elif is_free or _is_opaque(item.opname):
            yield _Read("unknown")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _find_reads(constant, free)


def _is_opaque(instruction: str) -> bool:
    """Whether it stores outside the function, or reads by a name that cannot be told from the code."""
    return instruction.endswith("_NAME") or any(
        part in instruction for part in ("GLOBAL", "STORE_ATTR", "DELETE_ATTR", "BUILD_CLASS", "SUPER_ATTR")
    )


def _reveals_more(attribute: str) -> bool:
    """Whether an attribute may be of a function itself, as `__name__` is, or gives others, as `__dict__` does."""
    return attribute.startswith("__") or attribute in _FORMATTERS
