"""A program computed by PyTorch's own operations: the reference, and the path without kernels."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cutfuse import dynamo
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.program import Argument, Program
from cutfuse.epilogue.table import CONDITION, op_table

_ROOTS = {"torch": torch, "operator": operator}
_LARGEST_FLOAT = torch.finfo(torch.float32).max

Value = torch.Tensor | float


class _Step(NamedTuple):
    """An instruction as a call: strings and numbers only, which Dynamo takes as constants."""

    path: tuple[str, ...]  # of the function, from torch or operator
    keywords: tuple[tuple[str, float | str], ...]
    arguments: tuple[Argument, ...]
    condition: int | None  # which argument has to be boolean
    takes_numbers: bool  # otherwise they are made tensors
    target: str | None


def evaluate(program: Program, z: torch.Tensor, operands: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Runs a program by composed PyTorch operations, differentiably.

    z: floating-point, any shape. operands: as many as the program says, each broadcastable to z; they are converted to
    z's dtype, booleans to 1 and 0. Returns a new tensor of z's shape and dtype, or z itself where the program is the
    identity; a program whose result is a comparison gives 1 and 0.
    Raises EpilogueError for a wrong number of operands.
    """
    if len(operands) != program.operand_count:
        raise EpilogueError(f"the program takes {program.operand_count} operands, got {len(operands)}")
    sources: dict[str, torch.Tensor] = {f"r{k}": tensor for k, tensor in enumerate(operands)}
    sources["z"] = sources["prev"] = z
    for step in _steps(program.text):
        values = [sources[item] if isinstance(item, str) else item for item in step.arguments]
        if step.takes_numbers:
            values = [_as_float(value, z) for value in values]
        else:
            values = [_as_tensor(value, z) for value in values]
            if step.condition is not None:
                values[step.condition] = values[step.condition] != 0
            if len(values) == 3:  # PyTorch's clamp has no derivative where one bound is larger than the input
                values = list(torch.broadcast_tensors(*values))
        function: Any = _ROOTS[step.path[0]]
        for name in step.path[1:]:
            function = getattr(function, name)
        sources["prev"] = function(*values, **dict(step.keywords))
        if step.target is not None:
            sources[step.target] = sources["prev"]
    y = _as_tensor(sources["prev"], z)
    return y if y.shape == z.shape else y.expand(z.shape).clone(memory_format=torch.contiguous_format)


def arithmetic_dtype(x: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.dtype:
    """fp64 where PyTorch promotes to it: for an input with dimensions, or any where none has dimensions. Else fp32."""
    wide = x.dtype == torch.float64 or any(t.dtype == torch.float64 and (t.dim() > 0 or x.dim() == 0) for t in operands)
    return torch.float64 if wide else torch.float32


@dynamo.assume_constant_result
def _steps(program: str) -> tuple[_Step, ...]:
    return _cached_steps(program)


@functools.lru_cache(maxsize=1024)
def _cached_steps(program: str) -> tuple[_Step, ...]:
    steps = []
    for item in Program.parse(program).instructions:
        op = op_table().op(item.op)
        steps.append(
            _Step(
                path=("operator", op.operator.__name__) if op.operator else tuple(op.path.split(".")),
                keywords=op.keywords(item.parameters),
                arguments=item.arguments,
                condition=op.tensors.index(CONDITION) if CONDITION in op.tensors else None,
                takes_numbers=op.operator is not None and any(isinstance(source, str) for source in item.arguments),
                target=None if item.slot is None else f"s{item.slot}",
            )
        )
    return tuple(steps)


def _as_float(value: Value, like: torch.Tensor) -> Value:
    return _as_tensor(value, like) if isinstance(value, torch.Tensor) else value


def _as_tensor(value: Value, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        # PyTorch's functions round such a number to an infinity, and new_full refuses it.
        if like.dtype == torch.float32 and abs(value) > _LARGEST_FLOAT:
            value = math.inf if value > 0 else -math.inf
        return like.new_full((), value)
    return value if value.dtype == like.dtype else value.to(like.dtype)
