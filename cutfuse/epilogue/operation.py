"""Programs that are one PyTorch function whose kernels for 16 bits round once, as those of cutfuse do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cutfuse.epilogue.program import Argument, Program
from cutfuse.epilogue.table import Op, op_table

# Infix operators whose backward pass hands the gradient on as it is, and those that round once. A quotient is none:
# PyTorch multiplies a rounded reciprocal, and a divisor's derivative in steps that overflow in fp16.
_HANDING_ON = ("+", "-")
_ARITHMETIC = (*_HANDING_ON, "*")


class Operation(NamedTuple):
    """The function that a program is, of z and operands of z's type."""

    function: Callable[..., torch.Tensor]
    arguments: tuple[int, ...]  # 0 for z, k for operand k - 1
    hands_gradient_on: bool
    keeps_values: bool  # whether PyTorch's backward pass needs values of the arguments

    def __call__(self, z: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors = (z, *operands)
        return self.function(*(tensors[k] for k in self.arguments))


@functools.lru_cache(maxsize=1024)
def is_sum(program: str) -> bool:
    """Whether a program, in its text form, is z plus an operand or a number: all gradients are the one that arrives."""
    instructions = Program.parse(program).instructions
    found = find_operation(program)
    is_addition = found is not None and op_table().op(instructions[0].op).infix == "+"
    return found is not None and is_addition and found.arguments.count(0) == 1  # z + z has twice the gradient


@functools.lru_cache(maxsize=1024)
def find_operation(program: str) -> Operation | None:
    """None for a program, in its text form, that is more than one function, or one that is not known to round once."""
    instructions = Program.parse(program).instructions
    if len(instructions) != 1:
        return None
    (instruction,) = instructions
    op = op_table().op(instruction.op)
    tensors = [item for item in instruction.arguments if isinstance(item, str)]
    takes_numbers = op.operator is not None
    if not rounds_once(op):
        return None
    if len(tensors) < op.arity and not takes_numbers:
        return None
    arguments = tuple(0 if item in ("z", "prev") else 1 + int(item.removeprefix("r")) for item in tensors)
    if 0 not in arguments:
        return None
    keywords = dict(op.keywords(instruction.parameters))
    function: Any = op.operator or (functools.partial(op.function, **keywords) if keywords else op.function)
    if len(tensors) < op.arity:
        function = _with_numbers(function, instruction.arguments)
    hands_gradient_on = op.infix in _HANDING_ON
    scales = op.infix == "*" and len(tensors) == 1
    return Operation(function, arguments, hands_gradient_on, not (hands_gradient_on or scales))


def rounds_once(op: Op) -> bool:
    """Whether PyTorch computes the op of 16 bits in fp32, and its derivative from the argument: the activations do.

    Others may compute in 16 bits throughout, as `torch.logit` does on a CPU, or differentiate by the rounded result, as
    `torch.tanh` does, which is then not to be changed in place either.
    """
    return op.path.startswith("torch.nn.functional.") or op.infix in _ARITHMETIC


def _with_numbers(
    function: Callable[..., torch.Tensor], arguments: tuple[Argument, ...]
) -> Callable[..., torch.Tensor]:
    """`function` of the arguments that are no numbers, with those that are in their places."""

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        rest = iter(tensors)
        return function(*(next(rest) if isinstance(item, str) else item for item in arguments))

    return call
