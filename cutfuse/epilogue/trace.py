"""Epilogues: a callable run once on symbolic values, its expression, and its program."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodDescriptorType
from typing import Any

import torch

from cutfuse.epilogue.affine import Affine, split_affine
from cutfuse.epilogue.calls import call
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.evaluate import evaluate
from cutfuse.epilogue.expression import Expr, input, operand
from cutfuse.epilogue.lower import count_operands_read, lower
from cutfuse.epilogue.program import Program
from cutfuse.epilogue.symbolic import Symbolic
from cutfuse.epilogue.table import op_table

ONE_SCALAR = "an epilogue returns one elementwise expression of the pre-activation and the operands"


class Epilogue:
    """An epilogue, traced: `Epilogue(lambda z, r: torch.sigmoid(z) * 2 + r)`.

    fn: a callable of the pre-activation and of `operand_count` tensor operands. Where that is None it is the number of
    further positional arguments without a default.

    Never changes: what fn reads from outside is fixed when it is traced. Raises EpilogueError where fn cannot be traced
    or does not fit a program. Calling it computes it on tensors by composed PyTorch operations.

    program: the program. text: its text form. expression: what it computes. operand_count: how many tensor operands it
    takes. affine: its affine form in the pre-activation, or None.
    """

    program: Program
    text: str
    expression: Expr
    operand_count: int
    affine: Affine | None

    def __init__(self, fn: Callable[..., Any], operand_count: int | None = None) -> None:
        count = count_operands(fn) if operand_count is None else operand_count
        self._set(trace(fn, count), count)

    @classmethod
    def from_expression(cls, expression: Expr, operand_count: int | None = None) -> Epilogue:
        """From an expression of `input()` and `operand(k)`. By default it takes as many operands as it reads."""
        epilogue = cls.__new__(cls)
        epilogue._set(expression, count_operands_read(expression) if operand_count is None else operand_count)
        return epilogue

    @classmethod
    def from_text(cls, text: str) -> Epilogue:
        """From a program's text form."""
        program = Program.parse(text)
        return cls.from_expression(program.expression, program.operand_count)

    def _set(self, expression: Expr, operand_count: int) -> None:
        program = lower(expression, operand_count)
        values = {
            "program": program,
            "text": program.text,
            "expression": expression,
            "operand_count": operand_count,
            "affine": split_affine(expression),
        }
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an Epilogue does not change, so {name} cannot be set")

    def __call__(self, z: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """z and the operands: floating-point tensors; computes in z's dtype and gives z's shape."""
        if any(isinstance(value, Symbolic) for value in (z, *operands)):
            raise EpilogueError("an Epilogue inside another one's callable: call the plain function instead")
        return evaluate(self.program, z, operands)

    def __repr__(self) -> str:
        operands = "".join(f", r{k}" for k in range(self.operand_count))
        return f"Epilogue(z{operands} -> {self.expression!r})"

    def __reduce__(self) -> tuple:
        return Epilogue.from_text, (self.text,)


def trace(fn: Callable[..., Any], operand_count: int) -> Expr:
    """The expression that fn computes from the pre-activation and `operand_count` operands."""
    if not callable(fn):
        raise EpilogueError(f"an epilogue is a callable or a cutfuse.Epilogue, got {fn!r} of type {type(fn).__name__}")
    arguments = symbolic_arguments(operand_count)
    try:
        # Methods of Tensor, taken from the class, refuse other objects before anyone could intercept the call.
        result = call(fn, tuple(arguments), {}) if isinstance(fn, MethodDescriptorType) else fn(*arguments)
    except TypeError as error:
        check_arity(fn, operand_count, error)
        raise
    return check_result(result)


def symbolic_arguments(operand_count: int) -> list[Expr]:
    """z and the operands."""
    limit = op_table().limits["operands"]
    if operand_count > limit:
        raise EpilogueError(f"{operand_count} operands exceed the limit of {limit}: combine some of them beforehand")
    return [input(), *map(operand, range(operand_count))]


def check_result(result: Any) -> Expr:
    """What the callable returned, if that is an expression that is not a number. Raises EpilogueError otherwise."""
    if isinstance(result, Expr) and not result.is_number:
        return result
    if isinstance(result, torch.Tensor):
        raise EpilogueError(
            f"the epilogue returns a tensor of shape {tuple(result.shape)} that does not come from its arguments: "
            f"{ONE_SCALAR}; pass tensors through operands="
        )
    if isinstance(result, tuple | list):
        raise EpilogueError(f"the epilogue returns {len(result)} values: {ONE_SCALAR}")
    raise EpilogueError(f"the epilogue returns {result!r}, which does not depend on its arguments: {ONE_SCALAR}")


def check_arity(fn: Callable[..., Any], operand_count: int, error: TypeError) -> None:
    """Raises EpilogueError where fn does not take z and that many operands."""
    if isinstance(error, EpilogueError):
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * (1 + operand_count))
    except TypeError:
        raise EpilogueError(
            f"the epilogue {getattr(fn, '__name__', fn)}{signature} is called with {1 + operand_count} arguments, the "
            f"pre-activation and {operand_count} operands: make its parameters and operands= agree"
        ) from error


def count_operands(fn: Callable[..., Any]) -> int:
    """How many arguments without a default a callable takes after the first; by the op table for a torch function."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        candidates = op_table().callables.get(fn)
        return candidates[0].arity - 1 if candidates else 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [item for item in parameters if item.kind in positional and item.default is item.empty]
    return max(len(required) - 1, 0)
