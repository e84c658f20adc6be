"""Random expressions: the program against the callable on tensors, and the native interpreter against the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from host_program import VALUE, run_on_host
from hypothesis import assume, given
from hypothesis import strategies as st

from cutfuse.epilogue import Epilogue, Expr, Program, evaluate, op_table
from cutfuse.epilogue.lower import lower
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


@st.composite
def recipes(draw: Callable, ops: tuple[Op, ...] = OPS) -> Recipe:
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(ops))
        picks = draw(st.tuples(*[st.integers(0, 8)] * op.arity))
        steps.append(Step(op, picks, draw(st.none() | st.sampled_from(NUMBERS))))
    return Recipe(tuple(steps))


def make_inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SAMPLES, generator=generator) * 1.5 for _ in range(1 + OPERANDS)]
    return [tensor.double() for tensor in inputs]


def make_program(recipe: Recipe) -> Program:
    return Epilogue(recipe, OPERANDS).program


@given(recipes())
def test_program_gives_what_the_callable_gives(recipe: Recipe) -> None:
    inputs = make_inputs()
    program = make_program(recipe)
    expected = recipe(*inputs)
    torch.testing.assert_close(evaluate(program, inputs[0], inputs[1:]), expected, rtol=0, atol=0, equal_nan=True)
    assert Program.parse(program.text) == program
    assert lower(program.expression, OPERANDS).text == program.text
    assert len(program.native) <= len(program.instructions)


def run_with_noise(program: Program, inputs: list[torch.Tensor], size: float) -> torch.Tensor:
    """In fp64, with a relative error of `size` after every instruction. NaN where fp32 would leave its range."""
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
        previous = exact if op.is_boolean else exact * (1 + size * torch.randn(exact.shape, generator=generator))
        magnitude = previous.detach().abs()
        lost |= (magnitude > 1e30) | ((magnitude < 1e-30) & (magnitude > 0))
        if item.slot is not None:
            sources[f"s{item.slot}"] = previous
    return torch.where(lost, torch.nan, previous.expand(lost.shape))


def gradient_of(result: torch.Tensor, inputs: list[torch.Tensor], wrt: int) -> torch.Tensor:
    if not result.requires_grad:
        return torch.where(result.isnan(), torch.nan, 0.0)
    gradient = torch.autograd.grad(result.sum(), inputs[wrt], allow_unused=True)[0]
    return torch.zeros_like(result) if gradient is None else torch.where(result.isnan(), torch.nan, gradient)


def run_exactly(program: Program, wrt: int, size: float = 0.0) -> torch.Tensor:
    inputs = [tensor.requires_grad_(wrt != VALUE) for tensor in make_inputs()]
    result = run_with_noise(program, inputs, size)
    return result if wrt == VALUE else gradient_of(result, inputs, wrt)


@pytest.mark.parametrize("wrt", range(VALUE, 1 + OPERANDS))
@given(recipe=recipes(STEADY))
def test_native_value_and_derivatives(wrt: int, recipe: Recipe) -> None:
    """The error stays within what an error of a few units in the last place after every op makes of it.

    Neighbours of a jump (comparisons, floor) may fall on its other side: a few in a hundred.
    """
    program = make_program(recipe)
    expected = run_exactly(program, wrt)
    spread = torch.stack([run_exactly(program, wrt, 1e-6 * k) - expected for k in (0.5, 1, 1.5, 2, 2.5)]).abs().amax(0)
    known = expected.isfinite() & spread.isfinite() & (expected.abs() < 1e30)
    assume(bool(known.any()))
    inputs = make_inputs()
    got = run_on_host(program, inputs[0], inputs[1:], wrt).double()
    error = (got - expected)[known].abs()
    bound = (8 * spread + 2e-6 * expected.abs() + 1e-7)[known]
    wrong = ~(error <= bound)
    assert wrong.float().mean() <= 0.1, (program.text, got[known][wrong], expected[known][wrong])


@given(st.integers(1, 11), st.integers(0, 2**32))
def test_a_tree_needs_slots_by_its_depth_only(leaves: int, seed: int) -> None:
    """Sethi and Ullman: a sum of n terms in any association needs at most log2(n) slots, rounded up."""
    generator = torch.Generator().manual_seed(seed)

    def build(count: int, z: Expr) -> Expr:
        if count == 1:
            return torch.exp(z * float(torch.rand((), generator=generator)))
        left = int(torch.randint(1, count, (), generator=generator))
        return build(left, z) + build(count - left, z)

    assert Epilogue(lambda z: build(leaves, z)).program.slot_count <= (leaves - 1).bit_length()
