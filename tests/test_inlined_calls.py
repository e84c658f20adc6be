"""Programs in the place of the calls of run_epilogue: they give what the function gives, where they are short."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import find_kernel
from random_programs import make_program, recipe_of
from specialized_kernels import (
    ACCUMULATORS,
    FIRST_COLUMNS,
    FRAGMENT,
    SpecializedEpilogue,
    make_kernel,
    operand_types,
    specialize,
)

from cutfuse import native
from cutfuse.epilogue import Program

core = native.module()
pytestmark = pytest.mark.skipif(not core.cuda_build, reason="this build of cutfuse has no CUDA kernels")

THREADS = 8
# What a thread of make_kernel's kernel loads and stores: the fragment, and the accumulators that it holds meanwhile.
VALUES = FRAGMENT + ACCUMULATORS
GATED = "operands=2; mul z r0; sigmoid prev; mul prev z; add prev r1"


def inlined(kernel: str, program: Program, operands: tuple[torch.Tensor, ...] = (), kinds: tuple[str, ...] = ()) -> str:
    named = [core.OperandKind.__members__[kind] for kind in kinds]
    program_text: str = core.specialize_kernel(
        kernel, program.native.without_chain, operand_types(operands), kinds=named, inlines=True
    )
    return program_text


def run_kernel(
    text: str,
    program: Program,
    values: torch.Tensor,
    operands: tuple[torch.Tensor, ...] = (),
    tile: tuple[int, int] = (0, 0),
    staged: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the kernel leaves of values [threads, VALUES], the first of which are the fragments.

    tile, staged: as of `SpecializedEpilogue.memory`.
    """
    epilogue = SpecializedEpilogue.__new__(SpecializedEpilogue)
    epilogue.kernel = text
    memory, symbols = epilogue.memory(program, operands, 4 * THREADS * FIRST_COLUMNS, tile, staged)
    start = MEMORY_BASE + len(memory)
    stores = range(len(memory), len(memory) + values.numel() * 4)
    machine = Machine(THREADS, memory + values.numpy().tobytes(), symbols, stores=stores)
    addresses = [
        np.full(THREADS, MEMORY_BASE, np.uint64),
        (start + np.arange(THREADS) * VALUES * 4).astype(np.uint64),
    ]
    parameters = [np.ascontiguousarray(value).view(np.uint8).reshape(THREADS, -1) for value in addresses]
    machine.run(find_kernel(text, re.findall(r"\.entry (\w+)\(", text)[0]), parameters)
    left = machine.memory[len(memory) :].tobytes()
    return torch.frombuffer(bytearray(left), dtype=torch.float32).view(THREADS, VALUES)


def values_of(seed: int) -> torch.Tensor:
    return torch.randn(THREADS, VALUES, generator=torch.Generator().manual_seed(seed)) * 3


def test_random_programs_give_the_bits_of_the_function() -> None:
    compared = 0
    for seed in range(60):
        program = make_program(recipe_of(seed))
        operands = tuple(torch.randn(1, 1) for _ in range(program.operand_count))
        kinds = ("scalar",) * program.operand_count
        kernel = make_kernel("Fast" if seed % 2 else "Accurate")
        text = inlined(kernel, program, operands, kinds)
        if "call.uni" in text:
            continue  # it loops
        compared += 1
        values = values_of(seed)
        left = run_kernel(text, program, values, operands)
        function = SpecializedEpilogue(specialize(kernel, program, operand_types(operands), kinds=kinds))
        expected = function.run(program, values[:, :FRAGMENT].contiguous(), operands)
        assert torch.equal(left[:, :FRAGMENT].view(torch.int32), expected.view(torch.int32)), program.text
        assert torch.equal(left[:, FRAGMENT:], values[:, FRAGMENT:])
    assert compared > 20


def test_rows_and_columns_are_loaded_at_the_place_that_the_call_gives() -> None:
    program = Program.parse(GATED)
    columns = 4 * THREADS * FIRST_COLUMNS
    row, column = torch.randn(1, columns), torch.randn(9, 1)
    text = inlined(make_kernel("Accurate"), program, (row, column), ("row", "column"))
    assert "call.uni" not in text
    values = values_of(1)
    left = run_kernel(text, program, values, (row, column))
    # make_kernel's call is at row 3 and column 5 of the matrix, for every thread.
    places = torch.tensor([5 + i // 4 * 8 + i % 2 for i in range(FRAGMENT)])
    rows = torch.tensor([3 + i // 2 % 2 * 8 for i in range(FRAGMENT)]).clamp(max=8)
    z = values[:, :FRAGMENT]
    expected = torch.sigmoid(z * row[0, places]) * z + column[rows, 0]
    inside = torch.tensor([3 + i // 2 % 2 * 8 < 9 for i in range(FRAGMENT)])
    torch.testing.assert_close(left[:, :FRAGMENT][:, inside], expected[:, inside], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tile", [(64, 128), (128, 64), (64, 64)])
def test_staged_operands_are_read_at_their_place_in_the_tile(tile: tuple[int, int]) -> None:
    program = Program.parse("operands=3; mul z r0; add prev r1; maximum prev r2")
    operands = torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    kernel = make_kernel("Accurate", stages=True)
    kernel = kernel.replace("[param1+0], 3;", f"[param1+0], {3 + 5 * tile[0]};")
    kernel = kernel.replace("[param2+0], 5;", f"[param2+0], {6 + 3 * tile[1]};")
    text = inlined(kernel, program, operands, ("row", "column", "scalar"))
    assert "call.uni" not in text
    staged = torch.randn(4, max(tile))
    values = values_of(2)
    left = run_kernel(text, program, values, operands, tile, staged)
    places = torch.tensor([6 + i // 4 * 8 + i % 2 for i in range(FRAGMENT)])
    rows = torch.tensor([3 + i // 2 % 2 * 8 for i in range(FRAGMENT)])
    expected = (values[:, :FRAGMENT] * staged[0, places] + staged[1, rows]).maximum(staged[2, 0])
    assert torch.equal(left[:, :FRAGMENT], expected)


def test_instructions_between_the_parameters_stay() -> None:
    kernel = make_kernel("Fast").replace(".param .b32 param1;", "add.s32 %place, 1, 2;\n.param .b32 param1;", 1)
    kernel = kernel.replace(".reg .b64 %rd<3>;", ".reg .b64 %rd<3>;\n.reg .b32 %place;", 1)
    kernel = kernel.replace("st.param.b32 [param1+0], 3;", "st.param.b32 [param1+0], %place;", 1)
    text = inlined(kernel, Program.parse("operands=0; relu z"))
    assert "add.s32 %place, 1, 2;" in text
    assert "mov.b32 %m, %place;" in text


RESULT = "ld.param.f32 %f0, [retval0+0];"


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        (RESULT, "add.s32 %f0, 1, 2;"),
        (RESULT, "ld.param.b64 %rd0, [retval0+0];"),
        (RESULT, "ld.param.f32 %f0, [kernel0_param_0];"),
        (".param .b32 param1;", "ld.param.u32 %place, [kernel0_param_0];"),
        (".param .b32 param1;", ".reg .b32 %place;"),
    ],
)
def test_a_call_that_is_not_as_nvcc_writes_it_is_refused(text: str, instead: str) -> None:
    kernel = make_kernel("Fast").replace(text, instead if text == RESULT else f"{instead}\n{text}", 1)
    with pytest.raises(ValueError, match=f"has '{re.escape(instead)}' around a call that is to be inlined"):
        inlined(kernel, Program.parse("operands=0; relu z"))
