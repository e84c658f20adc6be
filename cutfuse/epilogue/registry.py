"""The register of compositions: torch functions that the ops of the table spell."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from cutfuse.epilogue.table import Op, find_attribute, find_namesakes, op_table

Composition = Callable[..., Any]
_Function = TypeVar("_Function", bound=Composition)

_registered: list[tuple[tuple[str, ...], bool, Composition]] = []


def composes(*paths: str, exact: bool = False) -> Callable[[_Function], _Function]:
    """Registers a composition under dotted names of torch functions.

    It has the torch function's own signature and returns an expression, or NotImplemented to leave the call to the op
    table. It holds for every callable of the op that a path belongs to, or for the functions of the same name in torch,
    its submodules and Tensor; for the path alone where it is exact.
    """

    def register(function: _Function) -> _Function:
        _registered.append((paths, exact, function))
        return function

    return register


@functools.lru_cache(maxsize=1)
def compositions() -> dict[Callable[..., Any], Composition]:
    """By PyTorch callable; those that this version of PyTorch lacks are left out."""
    by_op: dict[int, list[Callable[..., Any]]] = {}
    for function, candidates in op_table().callables.items():
        by_op.setdefault(candidates[0].code, []).append(function)
    result: dict[Callable[..., Any], Composition] = {}
    for paths, exact, composition in sorted(_registered, key=lambda entry: entry[1]):
        for path in paths:
            target = find_attribute(path)
            if target is None:
                continue
            op = next(iter(op_table().callables.get(target, ())), None)
            functions = [target] if exact else find_namesakes(path) if op is None else by_op[op.code]
            result.update(dict.fromkeys(functions, composition))
    return result


class Description(NamedTuple):
    """How a function is written and what it computes, for lists of the language.

    names: dotted ones and, of an op, its operators, as `a + b`. formula: over the arguments a, b and c, in their order.
    special: what is to know at NaN, infinities and ties.
    """

    names: tuple[str, ...]
    signature: str
    formula: str
    special: str = ""

    @property
    def spellings(self) -> str:
        return ", ".join([f"{self.names[0]}{self.signature}", *self.names[1:]])


def describe_op(op: Op) -> Description:
    arguments = list(op.tensors)
    arguments += [f"{name}={value:g}" for name, value in op.parameters]
    arguments += [f"{name}={value!r}" for name, value in op.literals]
    operators = [f"a {op.infix} b"] if op.infix else [f"{op.prefix}a"] if op.prefix else []
    return Description((op.path, *op.aliases, *operators), f"({', '.join(arguments)})", op.formula, op.special)


def describe_compositions() -> Iterator[Description]:
    for paths, _, composition in _registered:
        call = without_annotations(inspect.signature(composition))
        yield Description(paths, str(call), " ".join((composition.__doc__ or "").split()))


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)
