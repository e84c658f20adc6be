"""Programs for the tests of kernels with a program compiled in."""

from __future__ import annotations

from random_programs import make_program, recipe_of

from cutfuse.epilogue import Program, op_table

HEAVY = "; ".join(["tanh prev", "gelu prev", "softplus prev 1.0 20.0", "erf prev"])
LONG = "; ".join([HEAVY] * 4)  # heavier than what is written element by element
GATED = "operands=1; sigmoid z -> s0; mul prev r0 -> s1; sub 1.0 s0; mul prev z; add prev s1"
LIGHT = "operands=1; mul z 1.5; add prev 0.25; relu prev; minimum prev r0; mul prev 0.75; hardswish prev"
FOUR = "add prev r0; mul prev r1; sub prev r2; div prev r3"

# Masks behind masks, tangents that overflow and underflow before them, sums of masked and other tangents.
MASKS = (
    "operands=1; mul z 1e-30; mul prev 1e-30; relu prev; div prev 0.0",
    "operands=1; relu z; log prev; mul prev r0",
    "operands=1; mul z 3e38; mul prev 10.0; clamp prev -1.0 1.0; mul prev r0; relu6 prev",
    "operands=1; relu z -> s0; neg z; relu prev; add prev s0; reciprocal prev",
    "operands=1; clamp z -1.0 1.0 -> s0; mul z r0; add prev s0; maximum prev r0; sub s0 prev",
    "operands=1; copy r0 -> s0; gt z r0; mul prev z; sub prev r0; where prev z s0; abs prev",
    "operands=1; mul z r0 -> s0; relu prev -> s1; clamp s0 -1.0 1.0; add prev s1",
    "operands=1; maximum z r0 -> s0; clamp_min z z; add prev s0; atan prev",
    "operands=1; clamp_min z z; reciprocal prev; mul prev r0",
    "operands=1; relu z -> s0; mul prev 2.0; add prev s0; relu prev; sqrt prev; mul prev 0.0; reciprocal prev",
)


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


def some_programs(count: int) -> list[Program]:
    """Random ones, the same every time."""
    return [make_program(recipe_of(seed)) for seed in range(count)]
