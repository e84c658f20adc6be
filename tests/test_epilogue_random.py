"""Random expressions: the program against the callable on tensors, and the native interpreter against the program."""

from __future__ import annotations

import pytest
import torch
from host_program import VALUE, run_on_host
from hypothesis import assume, given
from hypothesis import strategies as st
from random_programs import OPERANDS, STEADY, Recipe, make_inputs, make_program, recipes, run_with_noise

from cutfuse.epilogue import Epilogue, Expr, Program, evaluate
from cutfuse.epilogue.lower import lower


@given(recipes())
def test_program_gives_what_the_callable_gives(recipe: Recipe) -> None:
    inputs = make_inputs()
    program = make_program(recipe)
    expected = recipe(*inputs)
    torch.testing.assert_close(evaluate(program, inputs[0], inputs[1:]), expected, rtol=0, atol=0, equal_nan=True)
    assert Program.parse(program.text) == program
    assert lower(program.expression, OPERANDS).text == program.text
    assert len(program.native) <= len(program.instructions)


def gradient_of(result: torch.Tensor, inputs: list[torch.Tensor], wrt: int) -> torch.Tensor:
    if not result.requires_grad:
        return torch.where(result.isnan(), torch.nan, 0.0)
    gradient = torch.autograd.grad(result.sum(), inputs[wrt], allow_unused=True)[0]
    return torch.zeros_like(result) if gradient is None else torch.where(result.isnan(), torch.nan, gradient)


def run_exactly(program: Program, wrt: int, size: float = 0.0) -> torch.Tensor:
    inputs = [tensor.requires_grad_(wrt != VALUE) for tensor in make_inputs()]
    result = run_with_noise(program, inputs, size)
    return result if wrt == VALUE else gradient_of(result, inputs, wrt)


def check_on_host(program: Program, wrt: int) -> bool:
    """Asserts that the error stays within what one of a few units in the last place after every op makes of it.

    Neighbours of a jump (comparisons, floor) may fall on its other side: a few in a hundred. False where no element's
    value is known.
    """
    expected = run_exactly(program, wrt)
    spread = torch.stack([run_exactly(program, wrt, 1e-6 * k) - expected for k in (0.5, 1, 1.5, 2, 2.5)]).abs().amax(0)
    known = expected.isfinite() & spread.isfinite() & (expected.abs() < 1e30)
    if not known.any():
        return False
    inputs = make_inputs()
    got = run_on_host(program, inputs[0], inputs[1:], wrt).double()
    error = (got - expected)[known].abs()
    bound = (8 * spread + 2e-6 * expected.abs() + 1e-7)[known]
    wrong = ~(error <= bound)
    assert wrong.float().mean() <= 0.1, (program.text, got[known][wrong], expected[known][wrong])
    return True


@pytest.mark.parametrize("wrt", range(VALUE, 1 + OPERANDS))
@given(recipe=recipes(STEADY))
def test_native_value_and_derivatives(wrt: int, recipe: Recipe) -> None:
    assume(check_on_host(make_program(recipe), wrt))


def test_a_derivative_whose_terms_cancel() -> None:
    assert check_on_host(Program.parse("operands=2; hypot r0 r0; atan2 prev r0"), 1)


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
