"""The epilogue program: code for the accumulator machine of csrc/epilogue/program.h, its text form, and its values.

PyTorch's own operations compute them: the reference, and the path without kernels.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cutfuse import dynamo, native
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, constant, input, operand
from cutfuse.epilogue.table import CONDITION, Op, op_table

if TYPE_CHECKING:
    from cutfuse import _C

# Where an instruction takes an argument from: these numbers, and slots and operands after them, are program.h's.
_PREVIOUS, _INPUT, _IMMEDIATES, _FIRST_SLOT = 0, 1, (2, 3), 4
_NO_SLOT = 255
_NAMED_SOURCE = re.compile(r"prev|z|([rs])(\d+)")

Argument = str | float  # "prev", "z", "r0".., "s0".., or a number


@dataclass(frozen=True)
class Instruction:
    """`previous = op(*arguments, *parameters)`, kept in slot number `slot` as well unless that is None."""

    op: str
    arguments: tuple[Argument, ...]
    parameters: tuple[float, ...] = ()
    slot: int | None = None

    @property
    def text(self) -> str:
        words = [self.op, *(item if isinstance(item, str) else repr(item) for item in self.arguments)]
        words.extend(map(repr, self.parameters))
        return " ".join(words) + ("" if self.slot is None else f" -> s{self.slot}")

    @staticmethod
    def parse(text: str) -> Instruction:
        """From its text. Raises EpilogueError for an unknown op or source, or the wrong number of words."""
        body, arrow, target = text.partition("->")
        name, *words = body.split()
        op = _find_op(name, text)
        if len(words) != op.arity + len(op.parameters):
            raise EpilogueError(f"{text!r}: {name} takes {op.arity} arguments and {len(op.parameters)} parameters")
        slot = re.fullmatch(r"s(\d+)", target.strip())
        if arrow and slot is None:
            raise EpilogueError(f"{text!r}: the result goes to a slot, s0 to s{op_table().limits['slots'] - 1}")
        arguments = [word if _NAMED_SOURCE.fullmatch(word) else _number(word, text) for word in words[: op.arity]]
        parameters = [_number(word, text) for word in words[op.arity :]]
        return Instruction(name, tuple(arguments), tuple(parameters), int(slot[1]) if slot else None)

    def encode(self) -> tuple[int, int, int, int, int, float, float]:
        """The fields of the native instruction: op, a, b, c, slot and two immediates."""
        op = op_table().op(self.op)
        places, immediates = assign_immediates(op, self.arguments)
        sources = [
            _source_number(argument) if isinstance(argument, str) else _IMMEDIATES[places[k]]
            for k, argument in enumerate(self.arguments)
        ]
        a, b, c = (*sources, *[_PREVIOUS] * (3 - len(sources)))
        for k, value in enumerate(self.parameters):
            immediates[k] = value
        first, second = immediates
        return op.code, a, b, c, _NO_SLOT if self.slot is None else self.slot, first, second


def assign_immediates(op: Op, arguments: Sequence[Any]) -> tuple[dict[int, int], list[float]]:
    """Which immediate holds each argument that is a number, and the two immediates.

    Argument c can only be the second one. Raises EpilogueError where there are too few.
    """
    free = [] if op.parameters else [0, 1]
    places: dict[int, int] = {}
    immediates = [0.0, 0.0]
    for k, argument in sorted(enumerate(arguments), reverse=True):
        if isinstance(argument, str):
            continue
        wanted = free[-1:] if k == 2 else free[:1]
        if not wanted:
            raise EpilogueError(f"{op.name} has more numbers than an instruction holds: {arguments}")
        free.remove(wanted[0])
        places[k] = wanted[0]
        immediates[wanted[0]] = argument
    return places, immediates


@dataclass(frozen=True)
class Program:
    """Instructions, and the number of tensor operands that a run is given. No instructions: the identity.

    is_eager: ops have the bits of PyTorch's own kernels, by formulas that only compiled kernels have (see ops.def).
    """

    instructions: tuple[Instruction, ...]
    operand_count: int
    is_eager: bool = False

    @functools.cached_property
    def text(self) -> str:
        """One line that `parse` reads back exactly; numbers are Python floats in full."""
        head = f"operands={self.operand_count}" + (" eager" if self.is_eager else "")
        return "; ".join([head, *(item.text for item in self.instructions)])

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Program:
        """From its text. Raises EpilogueError where that is malformed."""
        head, *rest = text.split(";")
        count = re.fullmatch(r"\s*operands=(\d+)\s*(eager)?\s*", head)
        if count is None:
            raise EpilogueError(f"a program starts with operands=<count>, got {text!r}")
        return Program(tuple(Instruction.parse(part.strip()) for part in rest), int(count[1]), count[2] is not None)

    @functools.cached_property
    def native(self) -> _C.Program:
        """The native module's program, validated there; immediates are rounded to fp32."""
        return native.core.Program([item.encode() for item in self.instructions], self.operand_count, self.is_eager)

    @functools.cached_property
    def expression(self) -> Expr:
        """The expression that the program computes."""
        previous = input()
        slots: dict[str, Expr] = {}
        for item in self.instructions:
            arguments = tuple(_source_expression(argument, previous, slots) for argument in item.arguments)
            previous = apply(op_table().op(item.op), arguments, item.parameters)
            if item.slot is not None:
                slots[f"s{item.slot}"] = previous
        return previous

    @property
    def inputs_with_gradient(self) -> frozenset[int]:
        """From which inputs the result comes otherwise than through booleans: 0 for z, k for operand k - 1."""
        return self._inputs.with_gradient

    @property
    def operands_in_derivatives(self) -> frozenset[int]:
        """The operands whose values a derivative depends on: not those that are added alone, scaled by numbers."""
        return frozenset([k - 1 for k in self._inputs.in_derivatives if k])

    @functools.cached_property
    def _inputs(self) -> _Inputs:
        """Of the result."""
        leaves = [_Inputs(frozenset({k}), frozenset({k})) for k in range(1 + self.operand_count)]
        sources: dict[str, _Inputs | None] = {f"r{k}": own for k, own in enumerate(leaves[1:])}
        sources["z"] = sources["prev"] = leaves[0]
        for item in self.instructions:
            given = [sources[source] if isinstance(source, str) else None for source in item.arguments]
            sources["prev"] = _inputs_of(op_table().op(item.op), given)
            if item.slot is not None:
                sources[f"s{item.slot}"] = sources["prev"]
        return sources["prev"] or _Inputs()

    @functools.cached_property
    def operation(self) -> Operation | None:
        """None for a program that is more than one function, or one that is not known to round once."""
        if len(self.instructions) != 1:
            return None
        (instruction,) = self.instructions
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

    @property
    def is_sum(self) -> bool:
        """Whether it is z plus an operand or a number: all gradients are the one that arrives."""
        found = self.operation
        is_addition = found is not None and op_table().op(self.instructions[0].op).infix == "+"
        return found is not None and is_addition and found.arguments.count(0) == 1  # z + z has twice the gradient

    def pretty(self) -> str:
        """A listing, one instruction a line."""
        if not self.instructions:
            return "identity"
        rows = [item.text.partition(" -> ") for item in self.instructions]
        width = max(len(body) for body, _, _ in rows)
        return "\n".join(f"{k:2}  {body:{width}}{arrow}{slot}".rstrip() for k, (body, arrow, slot) in enumerate(rows))

    def __str__(self) -> str:
        return self.text


def _find_op(name: str, text: str) -> Op:
    try:
        return op_table().op(name)
    except ValueError as error:
        raise EpilogueError(f"{text!r}: {error}") from None


def _number(word: str, text: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise EpilogueError(f"{text!r}: {word!r} is neither prev, z, r0.., s0.. nor a number") from None


def _source_number(source: str) -> int:
    if source in ("prev", "z"):
        return _PREVIOUS if source == "prev" else _INPUT
    index, slots = int(source[1:]), op_table().limits["slots"]
    limit = slots if source[0] == "s" else op_table().limits["operands"]
    if index >= limit:
        raise EpilogueError(f"{source} is beyond the limit of {limit}")
    return _FIRST_SLOT + index + (0 if source[0] == "s" else slots)


def _source_expression(source: Argument, previous: Expr, slots: dict[str, Expr]) -> Expr:
    if isinstance(source, float):
        return constant(source)
    if source == "prev":
        return previous
    if source == "z":
        return input()
    if source[0] == "r":
        return operand(int(source[1:]))
    if source not in slots:
        raise EpilogueError(f"the program reads {source} before it is written")
    return slots[source]


class _Inputs(NamedTuple):
    """Of a value of a program: the inputs that it reads, those from which it comes otherwise than through booleans, and
    those on whose values a derivative of it depends. 0 for z, k for operand k - 1."""

    reads: frozenset[int] = frozenset()
    with_gradient: frozenset[int] = frozenset()
    in_derivatives: frozenset[int] = frozenset()


def _inputs_of(op: Op, given: Sequence[_Inputs | None]) -> _Inputs | None:
    """Of what an op gives; None stands for a number.

    A sum, a difference and a value that is scaled by a number have derivatives that depend on none of their terms.
    """
    if op is op_table().identity:
        return given[0]
    known = [item for item in given if item is not None]
    reads = frozenset[int]().union(*[item.reads for item in known])
    pairs = () if op.is_boolean else zip(op.tensors, given, strict=True)
    differentiated = [item.with_gradient for name, item in pairs if item is not None and name != CONDITION]
    if op.infix == "*":
        is_sum = None in given
    elif op.infix == "/":
        is_sum = given[1] is None
    else:
        is_sum = op.infix in ("+", "-") or op.prefix == "-"
    in_derivatives = frozenset[int]().union(*[item.in_derivatives for item in known]) if is_sum else reads
    return _Inputs(reads, frozenset[int]().union(*differentiated), in_derivatives)


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
            values = [_as_tensor(value, z) if isinstance(value, torch.Tensor) else value for value in values]
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


def arithmetic_dtype(x: torch.Tensor, operands: Sequence[torch.Tensor] = ()) -> torch.dtype:
    """fp64 where PyTorch promotes to it: for an input with dimensions, or any where none has dimensions. Else fp32."""
    if x.dtype == torch.float64:
        return x.dtype
    for t in operands:
        if t.dtype == torch.float64 and (t.dim() > 0 or x.dim() == 0):
            return t.dtype
    return torch.float32


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


def _as_tensor(value: Value, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        # PyTorch's functions round such a number to an infinity, and new_full refuses it.
        if like.dtype == torch.float32 and abs(value) > _LARGEST_FLOAT:
            value = math.inf if value > 0 else -math.inf
        return like.new_full((), value)
    return value if value.dtype == like.dtype else value.to(like.dtype)


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
