"""Random programs: expressions that run on symbolic values and on tensors alike, and what errors make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from cutfuse.epilogue import Epilogue, Expr, Program, op_table
from cutfuse.epilogue.table import CONDITION, Op

OPERANDS = 2
SAMPLES = 64
# Not 2, 0.5 and the like: tracing spells powers of these by other ops, which rounds otherwise.
NUMBERS = [0.1, -0.75, 1.5, 4.0, 0.0]

# Casts are apart: on tensors they change the type of all that follows.
OPS = tuple(op for op in op_table().ops if not op.path.startswith("torch.Tensor."))
# Remainders jump where a quotient is whole, and quotients of related values are whole at every element. copysign tells
# the sign of a NaN, which is chance. Autograd's
# backward of xlogy takes 0 * ln(x) for 0 where ln(x) is NaN; forward mode does not know what comes after.
UNSTEADY = ("floor_divide", "trunc_divide", "remainder", "fmod", "copysign", "xlogy", "xlog1py")
STEADY = tuple(op for op in OPS if op.name not in UNSTEADY)

Value = torch.Tensor | Expr | float


@dataclass(frozen=True)
class Step:
    """An op on earlier values, counted backwards from the latest; the parameters are the defaults."""

    op: Op
    picks: tuple[int, ...]
    number: float | None  # takes the place of the last argument, or of the first for an odd pick


@dataclass(frozen=True)
class Recipe:
    """A callable in steps, so that the same thing runs on symbolic values and on tensors."""

    steps: tuple[Step, ...]

    def __call__(self, z: Value, *operands: Value) -> Value:
        values = [*operands, z]
        for step in self.steps:
            values.append(self._run(step, values))
        return values[-1]

    @staticmethod
    def _run(step: Step, values: list[Value]) -> Value:
        arguments = [values[-1 - pick % len(values)] for pick in step.picks]
        if step.op.operator is not None:
            if step.number is not None:
                arguments[step.picks[0] % 2] = step.number
            result = step.op.operator(*arguments)
        else:
            pairs = zip(step.op.tensors, arguments, strict=True)
            arguments = [item > 0 if name == CONDITION else item for name, item in pairs]
            result = step.op.compose(arguments, [default for _, default in step.op.parameters])
        if not step.op.is_boolean:
            return result
        return result.double()


def draw_recipe(draw: Callable[[int, int], int], ops: tuple[Op, ...] = OPS) -> Recipe:
    """draw: gives an integer from its first argument to its second, both among them."""
    steps = []
    for _ in range(draw(1, 14)):
        op = ops[draw(0, len(ops) - 1)]
        picks = tuple(draw(0, 8) for _ in range(op.arity))
        number = NUMBERS[draw(0, len(NUMBERS) - 1)] if draw(0, 1) else None
        steps.append(Step(op, picks, number))
    return Recipe(tuple(steps))


@st.composite
def recipes(draw: Callable, ops: tuple[Op, ...] = OPS) -> Recipe:
    return draw_recipe(lambda first, last: draw(st.integers(first, last)), ops)


def recipe_of(seed: int) -> Recipe:
    return draw_recipe(random.Random(seed).randint)


def make_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SAMPLES, generator=generator) * 1.5 for _ in range(1 + OPERANDS)]
    return [tensor.double() for tensor in inputs]


def make_program(recipe: Recipe) -> Program:
    return Epilogue(recipe, OPERANDS).program


def run_with_noise(program: Program, inputs: list[torch.Tensor], size: float) -> torch.Tensor:
    """In fp64, with a relative error of `size` after every instruction. NaN where fp32 would leave its range.

    The error is a number, and no factor that derivatives pass: terms of a derivative that cancel in exact arithmetic
    then leave what their roundings do, as those of `atan2(hypot(r, r), r)`.
    """
    generator = torch.Generator().manual_seed(int(size * 1e9))
    sources: dict[str, torch.Tensor] = {f"r{k}": tensor for k, tensor in enumerate(inputs[1:])}
    sources["z"] = previous = inputs[0]
    lost = torch.zeros_like(previous, dtype=torch.bool)
    for item in program.instructions:
        op = op_table().op(item.op)
        arguments = []
        for name, source in zip(op.tensors, item.arguments, strict=True):
            value = previous if source == "prev" else sources.get(source, previous.new_full((), 0.0))
            value = previous.new_full((), source) if isinstance(source, float) else value
            arguments.append(value != 0 if name == CONDITION else value)
        exact = op.compose(arguments, item.parameters).double()
        error = size * exact.detach() * torch.randn(exact.shape, generator=generator)
        previous = exact if op.is_boolean else exact + error
        magnitude = previous.detach().abs()
        lost |= (magnitude > 1e30) | ((magnitude < 1e-30) & (magnitude > 0))
        if item.slot is not None:
            sources[f"s{item.slot}"] = previous
    return torch.where(lost, torch.nan, previous.expand(lost.shape))
