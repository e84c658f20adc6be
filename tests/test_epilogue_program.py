"""Lowering, the text form, the native program, and the limits."""

from __future__ import annotations

import copy
import functools
import math
import operator
import pickle
import re

import pytest
import torch
from host_program import run_on_host

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, Instruction, Program, input, op_table, split_affine
from cutfuse.native import module

LIMITS = op_table().limits


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
    assert epilogue.program.slot_count == 1
    sum_of_products = Epilogue(lambda z: sum((torch.exp(z * k) * torch.sin(z * k) for k in range(2, 6)), start=z))
    assert sum_of_products.program.slot_count == 3


def test_order_of_evaluation_saves_slots() -> None:
    """A chain that joins a fresh value at every step needs one slot, whichever side the chain is on."""

    def right_heavy(z: torch.Tensor) -> torch.Tensor:
        result = torch.sin(z)
        for k in range(2, 9):
            result = torch.cos(z * k) - result
        return result

    assert Epilogue(right_heavy).program.slot_count == 1


def test_orders_that_share_values_badly_are_replaced() -> None:
    """Six shared values under a tree: the first order that is tried need not fit, so others are."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        shared = [torch.sin(z * k) for k in range(2, 7)]
        return functools.reduce(operator.mul, shared) + functools.reduce(operator.add, shared[::-1])

    z = torch.linspace(-2, 2, 33, dtype=torch.float64)
    epilogue = Epilogue(fn)
    assert epilogue.program.slot_count <= LIMITS["slots"]
    torch.testing.assert_close(epilogue(z), fn(z))


def test_too_many_instructions() -> None:
    def chain(z: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            z = torch.sin(z)
        return z

    limit = LIMITS["instructions"]
    assert len(Epilogue(lambda z: chain(z, limit)).program.native) == limit
    with pytest.raises(EpilogueError, match=f"takes {limit + 1} instructions, and a program has at most {limit}"):
        Epilogue(lambda z: chain(z, limit + 1))
    with pytest.raises(EpilogueError, match="takes 5000 instructions"):
        Epilogue(lambda z: chain(z, 5000))


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


def test_encoding_is_the_native_modules() -> None:
    """Every source in every place that may hold it, run by the native interpreter."""
    program = Program.parse(
        "operands=2; copy r1 -> s5; mul z 3.0 -> s0; sub 1.0 prev; add s0 prev; add prev r0; gt prev z; "
        "where prev 2.0 s5"
    )
    assert program.slot_count == 6
    z, r0, r1 = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -9.0]), torch.tensor([7.0, 8.0])
    assert run_on_host(program, z, [r0, r1]).tolist() == [2.0, 8.0]
    assert len(program.native) <= len(program.instructions)
    assert program.native.operand_count == 2
    assert program.native is program.native
    assert isinstance(program.native, module().Program)


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


@pytest.mark.parametrize("count", [33, 3000])
def test_too_many_squarings_name_the_limit(count: int) -> None:
    def squarings(z: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda value, _: value * value, range(count), z)

    x = torch.randn(4, 8)
    for call in (
        lambda: cutfuse.linear(x, x, epilogue=squarings),
        lambda: cutfuse.pointwise(squarings, x),
        lambda: cutfuse.reduce(x, 1, prologue=squarings),
        lambda: cutfuse.explain(x, x, epilogue=squarings, reduce="sum"),
    ):
        with pytest.raises(EpilogueError, match=f"takes {count} instructions, and a program has at most 32"):
            call()
