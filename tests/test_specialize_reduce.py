"""Reductions with a program compiled in, without a GPU: the bits of the interpreting kernels, and what ptxas says.

What PTX leaves open is the same in both runs; what ptxas may do with it is for a GPU to tell.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host_program import run_on_host
from hypothesis import given, settings
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_cases import (
    DTYPES,
    FOUR,
    GATED,
    HEAVY,
    LAYOUTS,
    LIGHT,
    LONG,
    assert_same_bits,
    laid_out,
    long_program,
    program_of,
    random,
    some_programs,
)
from specialized_kernels import assemble_without_spills, assert_roundings, needs_ptxas
from specialized_reduce import SpecializedReduce, interpreting_reduce, kernel_text, kinds_of, template_name
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

REDUCTIONS = tuple(native.module().reductions())


def check(
    program: Program, x: Tensor, operands: list[Tensor], reduction: str = "sum", columns: bool = False, **given: Any
) -> None:
    """given: the kernel, where a test has it for several calls, and arguments of its `run`."""
    kernel = given.pop("kernel", None) or SpecializedReduce(kernel_text(program, x.dtype, reduction, operands, columns))
    got, plan = kernel.run(program, x, operands, reduction, **given)
    expected, same = interpreting_reduce(kernel.columns).run(program, x, operands, reduction, **given)
    assert plan == same
    assert_same_bits(got, expected)


# Of one thread a row and of a block, of several chunks, of steps that are whole and not; multiprocessors.
SHAPES = [((3, 8), 1), ((9, 40), 1), ((5, 264), 1), ((70, 72), 1), ((2, 8192 + 104), 1), ((1, 2 * 16384 + 1096), 8)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction(dtype: torch.dtype, reduction: str) -> None:
    program = Program.parse(LIGHT)
    kernel = SpecializedReduce(kernel_text(program, dtype, reduction, [random(1, dtype=dtype)]))
    for shape, multiprocessors in SHAPES:
        x, r = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
        check(program, x, [r], reduction, kernel=kernel, multiprocessors=multiprocessors)


# Of one row of threads and several, of blocks that are not full, of a part of a fragment and of several chunks.
COLUMNS = [((1, 8), 1), ((5, 64), 1), ((70, 520), 1), ((130, 8), 1), ((3, 66, 24), 1), ((700, 104), 8)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction_of_columns(dtype: torch.dtype, reduction: str) -> None:
    program = Program.parse(LIGHT)
    kernel = SpecializedReduce(kernel_text(program, dtype, reduction, [random(1, dtype=dtype)], columns=True))
    for shape, multiprocessors in COLUMNS:
        x, r = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
        check(program, x, [r], reduction, kernel=kernel, multiprocessors=multiprocessors)


def test_shapes_reach_every_plan() -> None:
    program = Program.parse("operands=0; relu z")
    kernel = SpecializedReduce(kernel_text(program, torch.float32, "sum"))
    plans = [kernel.run(program, random(*shape), multiprocessors=count)[1] for shape, count in SHAPES]
    assert {plan.lanes for plan in plans} >= {2, 4, 16, 256}
    assert {plan.splits > 1 for plan in plans} == {False, True}
    kernel = SpecializedReduce(kernel_text(program, torch.float32, "sum", columns=True))
    plans = [kernel.run(program, random(*shape), multiprocessors=count)[1] for shape, count in COLUMNS]
    assert {plan.height for plan in plans} >= {1, 4, 8, 16}
    assert {plan.splits > 1 for plan in plans} == {False, True}


@pytest.mark.parametrize("rows", [64, 1024])
def test_fewer_threads_of_more_rows(rows: int) -> None:
    """With a program a thread takes up to 32 vectors of a row, where rows are many."""
    program, x = Program.parse(LIGHT), random(rows, 512, dtype=torch.bfloat16)
    kernel = SpecializedReduce(kernel_text(program, x.dtype, "sum", [x]))
    _, plan = kernel.run(program, x, [x])
    assert plan.lanes == (8 if rows == 64 else 4)
    check(program, x, [x], kernel=kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op(dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, 1.0, -0.5, 1e-40, 88.0, 65520.0, 3e38, float("inf"), float("-inf"), float("nan")])
    pairs = torch.cartesian_prod(special, special).T
    x, *operands = (item.reshape(-1, 1).expand(-1, 8).to(dtype).contiguous() for item in (*pairs, pairs[1].roll(7)))
    for op in op_table().ops:
        check(program_of(op.name), x, operands, "amax")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_special_values(reduction: str) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 3e38, float("inf"), float("-inf"), float("nan")])
    x = torch.cartesian_prod(special, special, special).T.contiguous().view(3, -1)[:, :336].T.reshape(-1, 24)
    check(Program.parse("operands=0; neg z; neg prev"), x.contiguous(), [], reduction)


@given(recipe=recipes())
@settings(max_examples=20)
def test_random_programs(recipe: Recipe) -> None:
    program = make_program(recipe)
    if not len(program.native) or program.native.scaling is not None:
        return
    for dtype in (torch.float32, torch.bfloat16):
        operands = [random(2, 88, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        check(program, random(2, 88, dtype=dtype), operands)


@given(recipe=recipes())
@settings(max_examples=5)
def test_long_programs(recipe: Recipe) -> None:
    """What is written as a loop over passes."""
    program = long_program(recipe)
    for dtype in (torch.float32, torch.float16):
        operands = [random(1, 144, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        assert "$Lpass3:" in kernel_text(program, dtype, "sum", operands)
        check(program, random(1, 144, dtype=dtype), operands)


def test_the_host_has_the_values_too() -> None:
    """So that not everything rests on the interpreting kernels."""
    x, r = random(3, 264), random(3, 264, seed=1)
    program = Program.parse("operands=1; mul z r0; clamp prev -0.5 2.0 -> s0; sub z s0; maximum prev r0")
    got, _ = SpecializedReduce(kernel_text(program, x.dtype, "sum", [r])).run(program, x, [r])
    host = run_on_host(program, x.view(-1), [r.view(-1)]).view(x.shape)
    torch.testing.assert_close(got, host.sum(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_inside_of_others(dtype: torch.dtype) -> None:
    """x of (outer, inner, reduced), whose rows have gaps between them."""
    program = Program.parse(GATED)
    x = random(3, 5, 48, dtype=dtype)[:, :, :40]
    for operand in (random(3, 5, 40, seed=1), random(1, 5, 1, seed=1), random(3, 1, 40, seed=1)):
        check(program, x, [operand.to(dtype)])


def test_types_of_results() -> None:
    program, x = Program.parse("operands=0; relu z"), random(4, 264, dtype=torch.bfloat16)
    kernel = SpecializedReduce(kernel_text(program, x.dtype, "mean"))
    exact, _ = kernel.run(program, x, reduction="mean")
    for dtype in (torch.bfloat16, torch.float16):
        got, _ = kernel.run(program, x, reduction="mean", out_dtype=dtype)
        assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("operand_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("length", ["short", "long"])
def test_operands_of_every_layout(dtype: torch.dtype, operand_dtype: torch.dtype, length: str, columns: bool) -> None:
    """Each is read as it lies in memory, which ends with it, whether that is compiled in or not."""
    program = Program.parse(GATED if length == "short" else f"operands=1; mul z r0; {HEAVY}; mul prev r0")
    x = random(5, 264, dtype=dtype, seed=3)
    kernels = {}
    for name in LAYOUTS:
        operand = laid_out(name, operand_dtype)
        kinds = {*kinds_of(program, x, [operand], "sum", columns), *(["strided"] if dtype == operand_dtype else [])}
        for kind in kinds:
            if kind not in kernels:
                kernels[kind] = SpecializedReduce(kernel_text(program, dtype, "sum", [operand], columns, [kind]))
                assert ("$Lpass" in kernels[kind].text) == (length == "long")
            try:
                check(program, x, [operand], kernel=kernels[kind])
            except AssertionError as error:
                raise AssertionError(name, kind) from error
    assert set(kernels) == {"strided", "scalar", *(("row", "column") if columns else ())}


def test_operands_of_several_layouts_at_once() -> None:
    program = Program.parse("operands=4; mul z r0; add prev r1; mul prev r2; sub prev r3")
    names = ["matrix", "transposed", "number", "row off a boundary", "column"]
    x = random(5, 264, dtype=torch.bfloat16)
    for turn in range(len(names)):
        operands = [LAYOUTS[name] for name in (names[turn:] + names[:turn])[:4]]
        for columns in (False, True):
            kinds = kinds_of(program, x, operands, "sum", columns)
            text = kernel_text(program, x.dtype, "sum", operands, columns, kinds)
            check(program, x, operands, kernel=SpecializedReduce(text))
            check(program, x, operands, columns=columns)


@pytest.mark.parametrize("kind", ["scalar", "row", "column"])
def test_operands_along_lines_of_several_dimensions(kind: str) -> None:
    """x of (outer, reduced, inner), and operands that are other ones for each outer index."""
    program, x = Program.parse(GATED), random(3, 70, 24)
    shape = {"scalar": (3, 1, 1), "row": (3, 1, 24), "column": (3, 70, 1)}[kind]
    operand = random(*shape, seed=1)
    assert kinds_of(program, x, [operand], "sum", True) == [kind]
    check(
        program, x, [operand], kernel=SpecializedReduce(kernel_text(program, x.dtype, "sum", [operand], True, [kind]))
    )


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_reduction_has_a_template(dtype: torch.dtype, reduction: str, columns: bool) -> None:
    name = template_name(dtype, reduction, columns)
    template = native.module().kernel_template(name)
    assert re.findall(r"\.entry (\w+)\(", template) == [name]
    assert_roundings(template)


def programs_to_assemble() -> list[Program]:
    programs = [Program.parse(text) for text in (LIGHT, GATED, "operands=0; tanh z", f"operands=1; mul z r0; {LONG}")]
    programs += [Program.parse(f"operands=4; {text}") for text in (f"gelu z; {FOUR}", f"copy z; {LONG}; {FOUR}")]
    return programs + some_programs(8)


@needs_ptxas
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("reduction", ["sum", "amax", "logsumexp"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_ptxas_takes_programs(tmp_path: Path, reduction: str, architecture: str, columns: bool) -> None:
    """Without spills, warnings and calls, and with room for blocks as the text asks."""
    for number, program in enumerate(programs_to_assemble()):
        dtype = DTYPES[number % 3]
        operands = [random(1, 8, dtype=DTYPES[(number + k) % 3]) for k in range(program.operand_count)]
        possible = ("strided", "row", "column", "scalar") if columns else ("strided", "scalar")
        kinds = [possible[(number // 2 + k) % len(possible)] for k in range(program.operand_count)]
        text = kernel_text(program, dtype, reduction, operands, columns, kinds if number % 2 else ())
        assert "call" not in text
        assemble_without_spills(text, tmp_path, architecture, program.text, dtype)
