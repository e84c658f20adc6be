"""Programs: lowering, the text form, limits, the native interpreter, affine epilogues, and random expressions."""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from host_program import VALUE, run_on_host
from hypothesis import assume, given
from hypothesis import strategies as st
from random_programs import OPERANDS, STEADY, Recipe, make_inputs, make_program, recipes, run_with_noise

import cutfuse
from cutfuse.epilogue import (
    Epilogue,
    EpilogueError,
    Expr,
    Instruction,
    Program,
    evaluate,
    input,
    op_table,
    split_affine,
)
from cutfuse.epilogue.lower import lower

LIMITS = op_table().limits


def slot_count(epilogue: Epilogue) -> int:
    return max((item.slot + 1 for item in epilogue.program.instructions if item.slot is not None), default=0)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda z: z, "operands=0"),
        (lambda z, r: r, "operands=1; copy r0"),
        (lambda z: z + 2.0 * torch.sigmoid(z), "operands=0; sigmoid z; mul prev 2.0; add z prev"),
        (lambda z, r: torch.sigmoid(z) * 2.0 + r, "operands=1; sigmoid z; mul prev 2.0; add prev r0"),
        (lambda z: torch.exp(z) * torch.exp(z), "operands=0; exp z; mul prev prev"),
        (lambda z: torch.where(z > 0, z, 0.1 * z), "operands=0; mul z 0.1 -> s0; gt z 0.0; where prev z s0"),
        (lambda z: torch.where(z > 0, 1.0, 0.0), "operands=0; gt z 0.0; where prev 1.0 0.0"),
        (lambda z, r: torch.where(z > 0, 0.1, r), "operands=1; copy r0 -> s0; gt z 0.0; where prev 0.1 s0"),
        (
            lambda z: torch.where(z < 0, 0.5 * z, z),
            "operands=0; lt z 0.0 -> s0; copy z -> s1; mul z 0.5; where s0 prev s1",
        ),
        (lambda z: torch.nn.functional.hardtanh(z, -1, math.inf), "operands=0; hardtanh z -1.0 inf"),
        (lambda z: z * math.nan, "operands=0; mul z nan"),
        (lambda z: (z > 0).float(), "operands=0; gt z 0.0"),
    ],
)
def test_lowering(fn, text: str) -> None:
    assert Epilogue(fn).text == text


def test_a_shared_value_takes_one_slot_until_its_last_use() -> None:
    epilogue = Epilogue(lambda z: (torch.exp(z) + 1) * torch.exp(z) + torch.tanh(z) * 2)
    assert slot_count(epilogue) == 1
    sum_of_products = Epilogue(lambda z: sum((torch.exp(z * k) * torch.sin(z * k) for k in range(2, 6)), start=z))
    assert slot_count(sum_of_products) == 3


def test_orders_that_share_values_badly_are_replaced() -> None:
    """Six shared values under a tree: the first order that is tried need not fit, so others are."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        shared = [torch.sin(z * k) for k in range(2, 7)]
        return functools.reduce(operator.mul, shared) + functools.reduce(operator.add, shared[::-1])

    z = torch.linspace(-2, 2, 33, dtype=torch.float64)
    epilogue = Epilogue(fn)
    assert slot_count(epilogue) <= LIMITS["slots"]
    torch.testing.assert_close(epilogue(z), fn(z))


def chained(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda z: functools.reduce(lambda value, _: torch.sin(value), range(length), z)


def test_a_program_of_as_many_instructions_as_it_may_have() -> None:
    assert len(Epilogue(chained(LIMITS["instructions"])).program.native) == LIMITS["instructions"]


def test_too_many_slots() -> None:
    count = LIMITS["slots"] + 2

    def fn(z: torch.Tensor) -> torch.Tensor:
        shared = [torch.sin(z * k) for k in range(2, 2 + count)]
        return functools.reduce(operator.mul, shared) / functools.reduce(operator.add, shared)

    with pytest.raises(EpilogueError, match=f"a program has {LIMITS['slots']} slots: compute a part of it"):
        Epilogue(fn)


def test_text_is_exact() -> None:
    """Numbers keep their double precision; the native program rounds them to fp32."""
    program = Program.parse("operands=1; mul z 0.1; add prev r0")
    assert program.instructions[0].arguments == ("z", 0.1)
    z = torch.ones(1, dtype=torch.float64)
    assert Epilogue.from_text(program.text)(z, 0 * z).item() == 0.1
    assert run_on_host(program, z, [0 * z]).item() == torch.tensor(0.1).item()
    odd = Program(
        (Instruction("clamp", ("prev",), (-math.inf, -0.0), 5), Instruction("where", ("s5", 1e-45, 1e300))), 4
    )
    assert Program.parse(odd.text) == odd
    assert odd.text == "operands=4; clamp prev -inf -0.0 -> s5; where s5 1e-45 1e+300"
    long = Epilogue(lambda z: torch.nn.functional.leaky_relu(z * math.pi, math.sqrt(2) / 9) + 1 / 3)
    assert Program.parse(long.text) == long.program
    assert Epilogue.from_text(long.text).text == long.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sigmoid z", "starts with operands=<count>"),
        ("operands=x", "starts with operands=<count>"),
        ("operands=0; sigmoid", "sigmoid takes 1 arguments and 0 parameters"),
        ("operands=0; clamp z 1.0", "clamp takes 1 arguments and 2 parameters"),
        ("operands=0; sigmoid y", "'y' is neither prev, z, r0.., s0.. nor a number"),
        ("operands=0; sigmoid z -> t0", "the result goes to a slot, s0 to s5"),
        ("operands=0; sigmoid z -> ", "the result goes to a slot"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(EpilogueError, match=re.escape(message)):
        Program.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("operands=0; sigmoid s0", "reads slot 0 before"),
        ("operands=0; add z r0", "operand"),
        ("operands=0; sigmoid z -> s6", "slot"),
        ("operands=5", "operand"),
        ("operands=0; gt z 0.0; where prev z prev", "c"),
        ("operands=1; gt z 0.0; where prev z r0", "c"),
    ],
)
def test_native_validation(text: str, message: str) -> None:
    """What the text form can say but no program may do."""
    with pytest.raises(ValueError, match=message):
        _ = Program.parse(text).native


def test_sources_beyond_the_limits() -> None:
    with pytest.raises(EpilogueError, match="s7 is beyond the limit of 6"):
        Instruction("sigmoid", ("s7",)).encode()
    with pytest.raises(EpilogueError, match="r4 is beyond the limit of 4"):
        Instruction("sigmoid", ("r4",)).encode()
    with pytest.raises(EpilogueError, match="more numbers than an instruction holds"):
        Instruction("where", (1.0, 2.0, 3.0)).encode()
    with pytest.raises(EpilogueError, match="more numbers than an instruction holds"):
        Instruction("leaky_relu", (1.0,), (0.1,)).encode()
    with pytest.raises(EpilogueError, match="reads s3 before it is written"):
        _ = Program.parse("operands=0; sigmoid s3").expression


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("operands=0", (1.0, -1)),
        ("operands=0; mul z 3.0", (3.0, -1)),
        ("operands=0; mul 3.0 prev; mul prev 0.5; mul 4.0 prev", (6.0, -1)),
        ("operands=2; mul r1 z; mul prev -2.0", (-2.0, 1)),
        ("operands=1; mul z 2.0; mul prev r0; mul prev 2.0", (4.0, 0)),
        ("operands=0; mul z 3.0; add prev 0.0", (3.0, -1)),
        ("operands=0; mul z 3.0; add prev 1.0", None),
        ("operands=0; mul z z", None),
        ("operands=2; mul z r0; mul prev r1", None),
        ("operands=0; mul z 2.0 -> s0; mul prev s0", None),
        ("operands=0; div z 2.0", None),
        ("operands=0; mul 2.0 3.0", None),
        ("operands=0; mul z 2.0; mul prev z", None),
        # The product of the numbers overflows or vanishes in fp32, where those with z may not.
        ("operands=0; mul z 1e30; mul prev 1e30", None),
        ("operands=0; mul z 1e-30; mul prev 1e-30; mul prev 1e30", None),
    ],
)
def test_programs_that_only_scale(text: str, scaling: tuple[float, int] | None) -> None:
    assert Program.parse(text).native.scaling == scaling


def test_numbers_only() -> None:
    """An op on numbers alone, which only a text can ask for."""
    program = Program.parse("operands=0; add 1.0 2.0; mul prev z")
    assert run_on_host(program, torch.tensor([2.0])).item() == 6.0
    assert Epilogue.from_text(program.text)(torch.tensor([2.0], dtype=torch.float64)).item() == 6.0


def test_listing() -> None:
    program = Program.parse("operands=0; mul z 0.1 -> s0; gt z 0.0; where prev z s0")
    assert program.pretty().splitlines() == [" 0  mul z 0.1       -> s0", " 1  gt z 0.0", " 2  where prev z s0"]
    assert Program((), 0).pretty() == "identity"
    assert str(program) == program.text


def test_pickle() -> None:
    epilogue = Epilogue(lambda z, r: torch.where(z > 0, z, torch.exp(r) * 0.1))
    other = pickle.loads(pickle.dumps(epilogue))
    assert other.text == epilogue.text
    assert other.expression is epilogue.expression
    assert pickle.loads(pickle.dumps(epilogue.expression)) is epilogue.expression


def test_a_deep_expression_pickles_and_copies_to_itself() -> None:
    """Squarings, so that it is a tree of 2 ** 3000 leaves too."""
    expression = functools.reduce(lambda value, _: value * value, range(3000), input())
    assert pickle.loads(pickle.dumps(expression)) is expression
    assert copy.deepcopy(expression) is expression
    assert copy.copy(expression) is expression
    assert len(repr(expression)) <= 400
    assert split_affine(expression) is None


@pytest.mark.parametrize("count", [LIMITS["instructions"] + 1, 3000])
def test_too_many_instructions(count: int) -> None:
    x = torch.randn(4, 8)

    def squarings(z: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, _: value * value, range(count), z)

    for call in (
        lambda: Epilogue(chained(count)),
        lambda: cutfuse.linear(x, x, epilogue=squarings),
        lambda: cutfuse.pointwise(squarings, x),
        lambda: cutfuse.reduce(x, 1, prologue=squarings),
        lambda: cutfuse.explain(x, x, epilogue=squarings, reduce="sum"),
    ):
        with pytest.raises(EpilogueError, match=f"takes {count} instructions, and a program has at most 32"):
            call()


AFFINE: dict[str, tuple[Callable[..., torch.Tensor], object, object]] = {
    "identity": (lambda z: z, 1.0, 0.0),
    "divide_and_scale": (lambda z: (z / 2) * 1.5, 0.75, 0.0),
    "numbers": (lambda z: -(3 - z * 2) / 4 + z, 1.5, -0.75),
    "operand_slope": (lambda z, r: z * r, "r0", 0.0),
    "operand_intercept": (lambda z, r: r - z, -1.0, "r0"),
    "both": (lambda z, r, s: (z + r) * s, "r1", "(r0 * r1)"),
    "twice": (lambda z, r: z * r + z, "(r0 + 1)", 0.0),
    "any_function_of_operands": (lambda z, r: z / torch.exp(r) + r**2, "(1 / exp(r0))", "square(r0)"),
    "alpha": (lambda z, r: torch.add(r, z, alpha=2), 2.0, "r0"),
    "without_z": (lambda z, r: r, 0.0, "r0"),
    "copies": (lambda z: +z.contiguous(), 1.0, 0.0),
}


@pytest.mark.parametrize("name", AFFINE)
def test_slopes_and_intercepts(name: str) -> None:
    fn, slope, intercept = AFFINE[name]
    epilogue = Epilogue(fn)
    form = epilogue.affine
    assert form is not None
    assert describe(form.slope) == slope
    assert describe(form.intercept) == intercept
    z, r, s = (torch.randn(50, dtype=torch.float64) for _ in range(3))
    operands = (r, s)[: epilogue.operand_count]
    parts = [value_of(part, operands) for part in (form.slope, form.intercept)]
    torch.testing.assert_close(parts[0] * z + parts[1], fn(z, *operands))


def describe(part: Expr | float) -> object:
    return repr(part) if isinstance(part, Expr) else part


def value_of(part: Expr | float, operands: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
    if not isinstance(part, Expr):
        return part
    program = Epilogue.from_expression(part, len(operands)).program
    return evaluate(program, torch.zeros_like(operands[0]), operands)


@pytest.mark.parametrize(
    "fn",
    [
        torch.sigmoid,
        lambda z: z * z,
        lambda z: 1 / z,
        lambda z: torch.square(z),
        lambda z: torch.where(z > 0, z, z),
        lambda z, r: torch.maximum(z, r),
        lambda z, r: r / (z + 1),
        # Affine for finite z only, where the product still has to be made: 0 * inf is NaN.
        lambda z: z * 0 + 1,
        lambda z: (z - z) * 2 + z,
        # Numbers whose product overflows or vanishes in fp32, where those with z may not.
        lambda z: z * 1e30 * 1e30,
        lambda z: z * 1e-30 / 1e30,
        lambda z: (z + 1e30) * 1e30,
    ],
)
def test_not_affine(fn: Callable[..., torch.Tensor]) -> None:
    assert Epilogue(fn).affine is None


def test_division_by_zero_is_left_to_the_program() -> None:
    form = Epilogue(lambda z: z / 0.0).affine
    assert form is not None
    z = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert (value_of(form.slope, (z,)) * z).tolist() == [torch.inf, -torch.inf]


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

    assert slot_count(Epilogue(lambda z: build(leaves, z))) <= (leaves - 1).bit_length()
