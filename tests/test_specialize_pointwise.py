"""Pointwise kernels with a program compiled in, without a GPU: their values, and what ptxas makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_kernels import SpecializedEpilogue, assemble, find_ptxas, make_kernel, specialize, spread
from specialized_pointwise import SpecializedPointwise, kernel_text
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FRAGMENT = 16
COLUMNS = 264  # no whole number of a thread's pieces
SPECIAL = [0.0, 1.0, 0.5, 3.0, 6.0, 1e-40, 1.2e-38, 1e-20, 88.0, 100.0, 65520.0, 3e38, float("inf")]
SPECIAL = [*SPECIAL, *(-value for value in SPECIAL), float("nan")]
LONG = "; ".join(["tanh prev", "gelu prev", "softplus prev 1.0 20.0", "erf prev"] * 4)
GATED = "operands=1; sigmoid z -> s0; mul prev r0 -> s1; sub 1.0 s0; mul prev z; add prev s1"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def expected_of(program: Program, x: Tensor, operands: list[Tensor]) -> Tensor:
    """The same program in the function that a GEMM kernel calls, whose bits test_specialize_interpreter.py compares."""
    primitives = "Accurate" if x.dtype == torch.float32 else "Fast"
    function = SpecializedEpilogue(specialize(make_kernel(primitives), program))
    count = -(-x.numel() // FRAGMENT) * FRAGMENT
    values = [item.expand(x.shape).reshape(-1).float() for item in (x, *operands)]
    padded = [torch.nn.functional.pad(item, (0, count - x.numel())).view(-1, FRAGMENT) for item in values]
    result = function.run(program, padded[0], [spread(item) for item in padded[1:]])
    return result.reshape(-1)[: x.numel()].view(x.shape).to(x.dtype)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    same = (got.view(integers) == expected.view(integers)) | (got.isnan() & expected.isnan())
    assert same.all(), (got[~same][:4], expected[~same][:4])


def check(program: Program, x: Tensor, operands: list[Tensor]) -> None:
    got = SpecializedPointwise(kernel_text(program, x.dtype, operands)).run(program, x, operands)
    assert_same_bits(got, expected_of(program, x, operands))


def is_compiled(program: Program) -> bool:
    """Not the identity, and no chain that the interpreting kernels have compiled in."""
    return native.module().find_specialization("any", 0, program.native, [0] * program.operand_count) is not None


def special_inputs(dtype: torch.dtype) -> list[Tensor]:
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    x, r = torch.cat([pairs, random(3 * COLUMNS - len(pairs), 2)]).T.contiguous()
    return [item.view(3, COLUMNS).to(dtype) for item in (x, r, r.roll(7))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op(dtype: torch.dtype) -> None:
    x, *operands = special_inputs(dtype)
    for op in op_table().ops:
        words = [op.name, *("z", "r0", "s0")[: op.arity], *(repr(float(default)) for _, default in op.parameters)]
        check(Program.parse(f"operands=2; copy r1 -> s0; {' '.join(words)}"), x, operands)


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
    head, *steps = make_program(recipe).text.split("; ")
    program = Program.parse("; ".join([head, f"copy z; {LONG}", "mul prev z", "add prev r0", *steps][:33]))
    for dtype in (torch.float32, torch.float16):
        operands = [random(1, 144, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        assert "$Lpass1:" in kernel_text(program, dtype, operands)
        check(program, random(1, 144, dtype=dtype), operands)


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


@pytest.mark.parametrize("operand_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", ["short", "long"])
def test_operands_of_every_layout(dtype: torch.dtype, operand_dtype: torch.dtype, length: str) -> None:
    """Each is read as it lies in memory, which ends with it."""
    program = Program.parse(GATED if length == "short" else f"operands=1; mul z r0; {LONG}; mul prev r0")
    x = random(5, COLUMNS, dtype=dtype, seed=3)
    kernel = None
    for name, layout in LAYOUTS.items():
        operand = layout.to(operand_dtype, memory_format=torch.preserve_format)
        if operand_dtype != torch.float32 and not layout.is_contiguous():  # a cast that keeps gaps and offsets
            storage = torch.empty(0).set_(layout.untyped_storage()).to(operand_dtype)
            operand = storage.as_strided(layout.shape, layout.stride(), layout.storage_offset())
        kernel = kernel or SpecializedPointwise(kernel_text(program, dtype, [operand]))
        got = kernel.run(program, x, [operand])
        try:
            assert_same_bits(got, expected_of(program, x, [operand]))
        except AssertionError as error:
            raise AssertionError(name) from error


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


def template() -> str:
    return native.module().kernel_template("pointwise_float32")


KERNEL_FAULTS = {
    "does not begin with a cutfuse.layout": (r"cutfuse\.layout [^;]*;", "cutfuse.layout 1, 2;"),
    "has '%r1' in cutfuse.layout": (r"cutfuse\.layout \d+", "cutfuse.layout %r1"),
    "has an unknown mark cutfuse.other": (r"cutfuse\.load", "cutfuse.other"),
    "has a cutfuse.load without an offset": (r"cutfuse\.load [^;]*", "cutfuse.load %rd1, %rd2, %rd3, {0}"),
    "has a cutfuse.compute of another length": (r"cutfuse\.compute 0, \{%f\d+,", "cutfuse.compute 0, {"),
    "has no '.minnctapersm": (r"\.minnctapersm", ".minblocks"),
}


@pytest.mark.parametrize("message", KERNEL_FAULTS)
def test_errors_name_what_a_kernel_lacks(message: str) -> None:
    kernel, count = re.subn(*KERNEL_FAULTS[message], template())
    assert count
    with pytest.raises(ValueError, match=f"the kernel's PTX {message}"):
        native.module().specialize_kernel(kernel, Program.parse("operands=0; tanh z; neg prev").native, [])


def assert_assembles(programs: list[Program], folder: Path, architecture: str) -> None:
    """ptxas takes each, without spills, warnings and calls, and with room for blocks as the text asks."""
    for number, program in enumerate(programs):
        dtype = DTYPES[number % 3]
        operands = [random(1, 8, dtype=DTYPES[(number + k) % 3]) for k in range(program.operand_count)]
        text = kernel_text(program, dtype, operands)
        assert not re.search(r"\b(add|sub|mul|mad)(\.ftz)?\.f(32|64)\b", text), "a rounding is left open"
        assert "call" not in text
        report = assemble(text, folder, architecture)
        assert not report.warnings
        assert not any(report.spills.values()), program.text


assembled = pytest.mark.skipif(find_ptxas() is None, reason="there is no ptxas here")
FOUR = "add prev r0; mul prev r1; sub prev r2; div prev r3"


@assembled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_ptxas_takes_every_op(tmp_path: Path, architecture: str) -> None:
    programs = []
    for op in op_table().ops:
        words = [op.name, *("z", "r0", "s0")[: op.arity], *(repr(float(default)) for _, default in op.parameters)]
        programs.append(Program.parse(f"operands=2; copy r1 -> s0; {' '.join(words)}"))
    assert_assembles(programs, tmp_path, architecture)


@assembled
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_ptxas_takes_random_programs(tmp_path: Path, architecture: str) -> None:
    programs: list[Program] = []

    @given(recipes())
    @settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def collect(recipe: Recipe) -> None:
        programs.append(make_program(recipe))

    collect()
    for text in (
        f"gelu z; {FOUR}; tanh prev",
        f"copy z; {LONG}; {FOUR}",
        f"asin z; {FOUR}; atan2 prev r0; {FOUR}; {LONG}",
    ):
        programs += [Program.parse(f"operands=4; {text}")] * 3
    assert_assembles(programs, tmp_path, architecture)
