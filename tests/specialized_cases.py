"""Programs and tensors for the tests of kernels with a program compiled in."""

from __future__ import annotations

import torch
from random_programs import Recipe, make_program, recipe_of
from torch import Tensor

from cutfuse.epilogue import Program, op_table

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPECIAL = [0.0, 1.0, 0.5, 3.0, 6.0, 1e-40, 1.2e-38, 1e-20, 88.0, 100.0, 65520.0, 3e38, float("inf")]
SPECIAL = [*SPECIAL, *(-value for value in SPECIAL), float("nan")]
COLUMNS = 264  # no whole number of a thread's pieces

HEAVY = "; ".join(["tanh prev", "gelu prev", "softplus prev 1.0 20.0", "erf prev"])
LONG = "; ".join([HEAVY] * 4)  # heavier than what is written element by element
GATED = "operands=1; sigmoid z -> s0; mul prev r0 -> s1; sub 1.0 s0; mul prev z; add prev s1"
LIGHT = "operands=1; mul z 1.5; add prev 0.25; relu prev; minimum prev r0; mul prev 0.75; hardswish prev"
FOUR = "add prev r0; mul prev r1; sub prev r2; div prev r3"


def call_of(name: str, first: str = "z") -> str:
    """One op with each argument from another source: the first, an operand and a slot."""
    op = op_table().op(name)
    parameters = [repr(float(default)) for _, default in op.parameters]
    return " ".join([name, *(first, "r0", "s0")[: op.arity], *parameters])


def program_of(name: str, tail: str = "") -> Program:
    return Program.parse(f"operands=2; copy r1 -> s0; {call_of(name)}{tail}")


def program_inside(name: str) -> Program:
    """The op behind a derivative that is infinite, masked or 0, and before another one."""
    return Program.parse(f"operands=2; relu r1 -> s0; sqrt z; {call_of(name, 'prev')}; mul prev r1; relu prev")


def long_program(recipe: Recipe) -> Program:
    """A random program behind what is written as a loop over passes."""
    head, *steps = make_program(recipe).text.split("; ")
    return Program.parse("; ".join([head, f"copy z; {LONG}", "mul prev z", "add prev r0", *steps][:33]))


def some_programs(count: int) -> list[Program]:
    """Random ones, the same every time."""
    return [make_program(recipe_of(seed)) for seed in range(count)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def special_inputs(dtype: torch.dtype) -> list[Tensor]:
    """x and two operands `[3, COLUMNS]`: every pair of special values, and ordinary ones."""
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    x, r = torch.cat([pairs, random(3 * COLUMNS - len(pairs), 2)]).T.contiguous()
    return [item.view(3, COLUMNS).to(dtype) for item in (x, r, r.roll(7))]


MATRIX = random(5, COLUMNS + 8, seed=2)
LAYOUTS = {
    "matrix": MATRIX[:, :COLUMNS].clone(),
    "with gaps": MATRIX[:, 8:],
    "off a boundary": MATRIX[:, 1 : COLUMNS + 1],
    "odd row pitch": torch.nn.functional.pad(MATRIX, (0, 1))[:, :COLUMNS],
    "transposed": MATRIX[:, :COLUMNS].T.contiguous().T,
    "row": MATRIX[:1, :COLUMNS].clone(),
    "row off a boundary": MATRIX[0].clone()[3 : COLUMNS + 3].view(1, COLUMNS),
    "column": MATRIX[:, :1].clone(),
    "column with gaps": MATRIX[:, 5:6],
    "number": MATRIX[:1, :1].clone(),
}


def laid_out(name: str, dtype: torch.dtype) -> Tensor:
    """The operand of a layout, in a type: a cast that keeps gaps and offsets."""
    layout = LAYOUTS[name]
    storage = torch.empty(0).set_(layout.untyped_storage()).to(dtype)
    return storage.as_strided(layout.shape, layout.stride(), layout.storage_offset())


def assert_same_bits(got: Tensor, expected: Tensor, *what: object) -> None:
    """But for NaNs, of which one is as good as another."""
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    same = (got.view(integers) == expected.view(integers)) | (got.isnan() & expected.isnan())
    assert same.all(), (*what, got[~same][:4], expected[~same][:4])
