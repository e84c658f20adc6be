"""Reductions with a program compiled in and the kernels that interpret it: the same bits, from the PTX of both.

The interpreting kernels are compiled here with their options, but for their functions, which become part of their
bodies. What PTX leaves open is the same in both runs; what ptxas may do with it is for a GPU to tell.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from interpreter_ptx import CSRC, compile_ptx
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_reduce import InterpretingReduce, SpecializedReduce, kernel_text
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

REDUCTIONS = tuple(native.module().reductions())
# Of a few threads a row and of a block, of one step and several, of a row in several chunks; multiprocessors.
SHAPES = [((3, 8), 1), ((9, 40), 1), ((5, 264), 1), ((2, 8192 + 104), 1), ((1, 2 * 16384 + 1096), 8)]
PROGRAMS = [
    "operands=1; sigmoid z -> s0; mul prev r0 -> s1; sub 1.0 s0; mul prev z; add prev s1",
    "operands=1; mul z 1.5; add prev 0.25; relu prev; minimum prev r0; mul prev 0.75; hardswish prev",
    "operands=0; tanh z; add prev z",  # a chain, which kernels of reductions interpret
]


COLUMNS = [((1, 8), 1), ((5, 64), 1), ((70, 520), 1), ((130, 8), 1), ((700, 104), 8)]


@pytest.fixture(scope="module", params=["row_reduce_program", "strided_reduce_program"])
def interpreter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> InterpretingReduce:
    file = CSRC / "reduce" / f"{request.param}.cu"
    source = file.read_text() if file.exists() else ""
    assert "__noinline__" in source or not source
    options = ["-arch=compute_80", "--jump-table-density=50"]
    inlined = source.replace("__noinline__", "__forceinline__")
    return InterpretingReduce(compile_ptx(inlined, tmp_path_factory.mktemp("interpreter"), options))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5).to(dtype)


def check(
    interpreter: InterpretingReduce, program: Program, x: Tensor, operands: list[Tensor], reduction: str, count: int = 1
) -> None:
    compiled = SpecializedReduce(kernel_text(program, x.dtype, reduction, operands, interpreter.columns))
    results = [kernel.run(program, x, operands, reduction, count)[0] for kernel in (compiled, interpreter)]
    bits = [result.view(torch.int32) for result in results]
    same = (bits[0] == bits[1]) | (results[0].isnan() & results[1].isnan())
    assert same.all(), (program.text, results[0][~same][:4], results[1][~same][:4])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_reduction(interpreter: InterpretingReduce, dtype: torch.dtype, reduction: str) -> None:
    for text in PROGRAMS:
        program = Program.parse(text)
        for shape, count in COLUMNS if interpreter.columns else SHAPES:
            operands = [random(*shape, dtype=dtype, seed=1)] * program.operand_count
            check(interpreter, program, random(*shape, dtype=dtype), operands, reduction, count)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_special_values(interpreter: InterpretingReduce, reduction: str) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 3e38, float("inf"), float("-inf"), float("nan")])
    x = torch.cartesian_prod(special, special, special).reshape(-1)[:1024].view(-1, 16).contiguous()
    check(interpreter, Program.parse("operands=0; neg z; neg prev"), x, [], reduction)


@given(recipe=recipes())
@settings(max_examples=15)
def test_random_programs(interpreter: InterpretingReduce, recipe: Recipe) -> None:
    program = make_program(recipe)
    assume(len(program.native) > 0)
    for dtype in (torch.float32, torch.bfloat16):
        operands = [random(3, 88, dtype=torch.float32, seed=k + 1) for k in range(OPERANDS)]
        check(interpreter, program, random(3, 88, dtype=dtype), operands, "amax")


def test_operands_of_rows_and_columns(interpreter: InterpretingReduce) -> None:
    program = Program.parse("operands=2; mul z r0; add prev r1")
    x = random(5, 264, dtype=torch.bfloat16)
    for shape in ((1, 264), (5, 1), (1, 1)):
        operands = [random(*shape, dtype=torch.float16), random(5, 264, dtype=torch.float32)]
        check(interpreter, program, x, operands, "sum")
