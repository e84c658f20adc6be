"""Pointwise kernels with a program compiled in, without a GPU: their values, and what ptxas makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_cases import (
    COLUMNS,
    DTYPES,
    FOUR,
    GATED,
    LAYOUTS,
    LONG,
    assert_same_bits,
    laid_out,
    long_program,
    program_of,
    random,
    some_programs,
    special_inputs,
)
from specialized_kernels import (
    SpecializedEpilogue,
    assemble_without_spills,
    assert_roundings,
    make_kernel,
    needs_ptxas,
    specialize,
    spread,
)
from specialized_pointwise import SpecializedPointwise, kernel_text
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program, op_table
from cutfuse.epilogue.table import Op

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

FRAGMENT = 16


def expected_of(program: Program, x: Tensor, operands: list[Tensor]) -> Tensor:
    """The same program in the function that a GEMM kernel calls, whose bits test_specialize.py compares."""
    primitives = "Accurate" if x.dtype == torch.float32 else "Fast"
    function = SpecializedEpilogue(specialize(make_kernel(primitives), program))
    count = -(-x.numel() // FRAGMENT) * FRAGMENT
    values = [item.expand(x.shape).reshape(-1).float() for item in (x, *operands)]
    padded = [torch.nn.functional.pad(item, (0, count - x.numel())).view(-1, FRAGMENT) for item in values]
    result = function.run(program, padded[0], [spread(item) for item in padded[1:]])
    return result.reshape(-1)[: x.numel()].view(x.shape).to(x.dtype)


def check(program: Program, x: Tensor, operands: list[Tensor]) -> None:
    got = SpecializedPointwise(kernel_text(program, x.dtype, operands)).run(program, x, operands)
    assert_same_bits(got, expected_of(program, x, operands))


def is_compiled(program: Program) -> bool:
    """Not the identity, and no chain that the interpreting kernels have compiled in."""
    return native.module().find_specialization("any", 0, program.native, [0] * program.operand_count) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op(dtype: torch.dtype) -> None:
    x, *operands = special_inputs(dtype)
    for op in op_table().ops:
        check(program_of(op.name), x, operands)


@given(recipe=recipes())
@settings(max_examples=25)
def test_random_programs(recipe: Recipe) -> None:
    program = make_program(recipe)
    assume(is_compiled(program))
    for dtype in (torch.float32, torch.bfloat16):
        check(program, random(2, 88, dtype=dtype), [random(2, 88, dtype=dtype, seed=k + 1) for k in range(OPERANDS)])


@given(recipe=recipes())
@settings(max_examples=6)
def test_long_programs(recipe: Recipe) -> None:
    """What is written as a loop over passes."""
    program = long_program(recipe)
    for dtype in (torch.float32, torch.float16):
        operands = [random(1, 144, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        assert "$Lpass1:" in kernel_text(program, dtype, operands)
        check(program, random(1, 144, dtype=dtype), operands)


@pytest.mark.parametrize("operand_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", ["short", "long"])
def test_operands_of_every_layout(dtype: torch.dtype, operand_dtype: torch.dtype, length: str) -> None:
    """Each is read as it lies in memory, which ends with it."""
    program = Program.parse(GATED if length == "short" else f"operands=1; mul z r0; {LONG}; mul prev r0")
    x = random(5, COLUMNS, dtype=dtype, seed=3)
    kernel = None
    for name in LAYOUTS:
        operand = laid_out(name, operand_dtype)
        kernel = kernel or SpecializedPointwise(kernel_text(program, dtype, [operand]))
        assert_same_bits(kernel.run(program, x, [operand]), expected_of(program, x, [operand]), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8), (1, 16), (7, 8), (3, 2040), (1, 2056), (1, 4096 + 24), (2, 3, 40), (70, 24), (5, 2, 8)]
)
def test_extents(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of one block and several, of rows that are folded, and whose last is short."""
    program = Program.parse(GATED)
    check(program, random(*shape, dtype=dtype), [random(*shape, dtype=dtype, seed=1)])
    check(program, random(*shape, dtype=dtype), [random(*shape[:-1], 1, dtype=dtype, seed=1)])


def test_an_operand_that_nothing_reads_is_not_loaded() -> None:
    program = Program.parse("operands=2; mul z r1; tanh prev")
    x = random(2, 40)
    text = kernel_text(program, x.dtype, [x, x])
    assert "%word1_" in text
    assert "%word0_" not in text
    check(program, x, [random(2, 40, seed=1), random(2, 40, seed=2)])


# What the message says, the template, and what its text has in the place of what.
KERNEL_FAULTS = {
    "does not begin with a cutfuse.layout": ("pointwise", r"cutfuse\.layout [^;]*;", "cutfuse.layout 1, 2;"),
    "has '%r1' in cutfuse.layout": ("pointwise", r"cutfuse\.layout \d+", "cutfuse.layout %r1"),
    "has an unknown mark cutfuse.other": ("pointwise", r"cutfuse\.load", "cutfuse.other"),
    "has a cutfuse.load without an offset": (
        "pointwise",
        r"cutfuse\.load [^;]*",
        "cutfuse.load %rd1, %rd2, %rd3, {0}",
    ),
    "has a cutfuse.compute of another length": ("pointwise", r"cutfuse\.compute 0, \{%f\d+,", "cutfuse.compute 0, {"),
    "has no '.minnctapersm": ("pointwise", r"\.minnctapersm", ".minblocks"),
    "has a cutfuse.locate without a position": (
        "row_reduce_amax",
        r"cutfuse\.locate [^;]*",
        "cutfuse.locate %rd1, %rd2, %rd3",
    ),
    "has a cutfuse.fetch without a piece": ("row_reduce_amax", r"cutfuse\.fetch [^;]*", "cutfuse.fetch 0"),
    "has a cutfuse.derivative of another length": (
        "pointwise_backward",
        r"cutfuse\.derivative 0, \{%f\d+,",
        "cutfuse.derivative 0, {",
    ),
}


@pytest.mark.parametrize("message", KERNEL_FAULTS)
def test_errors_name_what_a_kernel_lacks(message: str) -> None:
    core = native.module()
    name, pattern, instead = KERNEL_FAULTS[message]
    kernel, count = re.subn(pattern, instead, core.kernel_template(f"{name}_float32"))
    assert count
    program = Program.parse("operands=0; tanh z; neg prev").native
    with pytest.raises(ValueError, match=f"the kernel's PTX {message}"):
        core.specialize_kernel(kernel, program, [], derivatives=[0] if "backward" in name else [])


def assert_assembles(programs: list[Program], folder: Path, architecture: str) -> None:
    """ptxas takes each, without spills, warnings and calls, and with room for blocks as the text asks."""
    for number, program in enumerate(programs):
        dtype = DTYPES[number % 3]
        operands = [random(1, 8, dtype=DTYPES[(number + k) % 3]) for k in range(program.operand_count)]
        text = kernel_text(program, dtype, operands)
        assert_roundings(text)
        assert "call" not in text
        assemble_without_spills(text, folder, architecture, program.text)


@needs_ptxas
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_ptxas_takes_every_op(tmp_path: Path, architecture: str) -> None:
    assert_assembles([program_of(op.name) for op in op_table().ops], tmp_path, architecture)


@needs_ptxas
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_ptxas_takes_random_programs(tmp_path: Path, architecture: str) -> None:
    programs = some_programs(60)
    for text in (
        f"gelu z; {FOUR}; tanh prev",
        f"copy z; {LONG}; {FOUR}",
        f"asin z; {FOUR}; atan2 prev r0; {FOUR}; {LONG}",
    ):
        programs += [Program.parse(f"operands=4; {text}")] * 3
    assert_assembles(programs, tmp_path, architecture)


EAGER = [op for op in op_table().ops if op.eager.startswith("(")]


@pytest.mark.parametrize("op", EAGER, ids=lambda op: op.name)
def test_pytorchs_own_formulas_compute_the_ops(op: Op) -> None:
    """Their bits are compared on a GPU, by test_gpu_rounding.py."""
    x, r = torch.linspace(-9, 9, 96).bfloat16().view(2, 48), torch.linspace(0.1, 5, 96).bfloat16().view(2, 48)
    parameters = [default + 0.5 for _, default in op.parameters]
    words = " ".join([op.name, *("z", "r0")[: op.arity], *map(repr, parameters)])
    operands = [r][: op.arity - 1]
    program = Program.parse(f"operands={len(operands)} eager; {words}")
    text = kernel_text(program, x.dtype, operands)
    assert f"_eager_{op.name}" in text
    expected = op.compose([t.double() for t in (x, *operands)], parameters)
    got = SpecializedPointwise(text).run(program, x, operands)
    torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-6, equal_nan=True)
