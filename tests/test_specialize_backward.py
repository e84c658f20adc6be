"""Kernels of derivatives with a program compiled in, without a GPU: the bits of the interpreter, and what ptxas says.

The interpreter over dual numbers is compiled here to PTX, with the kernels' options, and runs on the same machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import Function, find_kernel
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_backward import MASKS, SpecializedBackward, backward_text
from specialized_cases import (
    COLUMNS,
    DTYPES,
    GATED,
    LAYOUTS,
    LONG,
    MATRIX,
    assert_same_bits,
    laid_out,
    long_program,
    program_inside,
    program_of,
    random,
    some_programs,
    special_inputs,
)
from specialized_kernels import assemble_without_spills, assert_roundings, compile_ptx, needs_ptxas
from specialized_pointwise import Memory
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

FRAGMENT = 8

SOURCE = """
#include "epilogue/interpreter.h"

using namespace cutfuse;

constexpr int F = 8;

struct Load {
  float const* data;
  int count;
  int first;

  __device__ __forceinline__ Fragment<F> operator()(int operand) const {
    Fragment<F> fragment;
    for (int i = 0; i < F; ++i) fragment.values[i] = data[operand * count + first + i];
    return fragment;
  }
};

template <class Primitives>
__global__ void interpret_gradient(Program const* program, float const* gradients, float const* data, int count,
                                   int wrt, float* out) {
  int const first = static_cast<int>(threadIdx.x) * F;
  Load const load = {data + count, count, first};
  Dual<F> const result = differentiate<F, Primitives>(*program, Load{data, count, first}(0), wrt, load);
  for (int i = 0; i < F; ++i) out[first + i] = input_gradient(gradients[first + i], result.tangent.values[i]);
}

template __global__ void interpret_gradient<FastPrimitives>(Program const*, float const*, float const*, int, int,
                                                            float*);
template __global__ void interpret_gradient<AccuratePrimitives>(Program const*, float const*, float const*, int, int,
                                                                float*);
"""


class Interpreter:
    """The interpreter's gradients in fp32, before they are stored. Those of 16-bit x are of the fast primitives."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.functions: dict[str, Function] = {
            name: find_kernel(ptx, f"\\w*interpret_gradient\\w*{name}Primitives") for name in ("Fast", "Accurate")
        }

    def run(self, program: Program, grad: Tensor, x: Tensor, operands: Sequence[Tensor], wrt: int) -> Tensor:
        count = -(-x.numel() // FRAGMENT) * FRAGMENT
        rows = [item.expand(x.shape).reshape(-1).float() for item in (grad, x, *operands)]
        data = torch.stack([torch.nn.functional.pad(row, (0, count - x.numel())) for row in rows])
        memory = Memory(self.ptx)
        places = [memory.add(item) for item in (bytes(program.native), data.numpy().tobytes(), bytes(4 * count))]
        out = places[2] - MEMORY_BASE
        threads = count // FRAGMENT
        special = {"%tid.x": np.arange(threads)}
        machine = Machine(threads, bytes(memory.image), memory.symbols, special, range(out, len(memory.image)))
        given = [np.uint64(places[0]), np.uint64(places[1]), np.uint64(places[1] + 4 * count)]
        given += [np.uint32(count), np.uint32(wrt), np.uint64(places[2])]
        function = self.functions["Accurate" if x.dtype == torch.float32 else "Fast"]
        machine.run(function, [np.tile(np.array([item]).view(np.uint8), (threads, 1)) for item in given])
        values = torch.from_numpy(machine.memory[out:].copy().view(np.float32))
        return values[: x.numel()].view(x.shape)


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return Interpreter(compile_ptx(SOURCE, tmp_path_factory.mktemp("interpreter"), ["-arch=compute_90a"]))


def check(
    interpreter: Interpreter,
    program: Program,
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
) -> None:
    kernel = SpecializedBackward(backward_text(program, x.dtype, operands, wanted), wanted)
    for wrt, got in zip(wanted, kernel.run(program, grad, x, operands).of, strict=True):
        expected = interpreter.run(program, grad, x, operands, wrt).to(got.dtype)
        assert_same_bits(got, expected, program.text, wrt)


def inputs_of(dtype: torch.dtype) -> list[Tensor]:
    """A gradient, x and two operands of special values among others."""
    x, *operands = special_inputs(dtype)
    return [x.view(-1).roll(11).view(x.shape), x, *operands]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Behind a derivative that is infinite, masked or 0, and before another one."""
    grad, x, *operands = inputs_of(dtype)
    for op in op_table().ops:
        wanted = range(1 + min(op.arity - 1, 2))
        check(interpreter, program_of(op.name), grad, x, operands, wanted)
        check(interpreter, program_inside(op.name), grad, x, operands, [0, 2])


@pytest.mark.parametrize("text", MASKS)
def test_masks(interpreter: Interpreter, text: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad, x, *operands = inputs_of(dtype)
        check(interpreter, Program.parse(text), grad, x, operands[:1], [0, 1])


def test_a_masked_tangent_is_selected_as_bits() -> None:
    """ptxas of CUDA 13.0 makes a +0 of a -0 that selp.f32 selects beside 1 or -1: its SASS is FSET.BF."""
    text = backward_text(Program.parse("operands=0; relu z -> s0; clamp_min z z; add prev s0"), torch.float32)
    selections = re.findall(r"selp\.\w+(?= [^;]*\b0f80000000\b)", text)
    assert selections
    assert set(selections) == {"selp.b32"}


@given(recipe=recipes())
@settings(max_examples=30, deadline=None)
def test_random_programs(interpreter: Interpreter, recipe: Recipe) -> None:
    program = make_program(recipe)
    assume(len(program.instructions) > 0)
    for dtype in (torch.float32, torch.bfloat16):
        operands = [random(2, 88, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        grad, x = random(2, 88, dtype=dtype, seed=9), random(2, 88, dtype=dtype)
        check(interpreter, program, grad, x, operands, range(1 + OPERANDS))


@given(recipe=recipes())
@settings(max_examples=6, deadline=None)
def test_long_programs(interpreter: Interpreter, recipe: Recipe) -> None:
    """What is written as a loop over passes."""
    program = long_program(recipe)
    for dtype in (torch.float32, torch.float16):
        operands = [random(1, 144, dtype=dtype, seed=k + 1) for k in range(OPERANDS)]
        assert "$Lpass1:" in backward_text(program, dtype, operands)
        check(interpreter, program, random(1, 144, dtype=dtype, seed=9), random(1, 144, dtype=dtype), operands, [0, 2])


@pytest.mark.parametrize("op", ["relu", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh"])
def test_chains_that_forwards_have_compiled_in(interpreter: Interpreter, op: str) -> None:
    grad, x, *_ = inputs_of(torch.bfloat16)
    for text in (f"{op} z", f"{op} z; mul prev 0.3", f"{op} z; mul prev 0.3; add prev z"):
        check(interpreter, Program.parse(f"operands=0; {text}"), grad, x, [], [0])


@pytest.mark.parametrize("column_sum", [False, True])
@pytest.mark.parametrize("operand_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_operands_of_every_layout(
    interpreter: Interpreter, dtype: torch.dtype, operand_dtype: torch.dtype, column_sum: bool
) -> None:
    program = Program.parse(GATED)
    grad, x = random(5, COLUMNS, dtype=dtype, seed=4), random(5, COLUMNS, dtype=dtype, seed=3)
    kernel = None
    for name in LAYOUTS:
        operand = laid_out(name, operand_dtype)
        text = backward_text(program, dtype, [operand], [0, 1], column_sum)
        kernel = kernel or SpecializedBackward(text, [0, 1], column_sum)
        got = kernel.run(program, grad, x, [operand], [dtype, torch.float32])
        for wrt, gradient in enumerate(got.of):
            expected = interpreter.run(program, grad, x, [operand], wrt).to(gradient.dtype)
            assert_same_bits(gradient, expected, name, wrt)


def added_up(gradient: Tensor, blocks: int) -> Tensor:
    """The partial sums of the interpreting kernel: each of a block's threads adds its rows up, then they are added."""
    rows, columns = gradient.shape
    height = min(128 // min(-(-columns // FRAGMENT), 32), rows)
    partials = []
    for block in gradient.split(-(-rows // blocks)):
        threads = torch.zeros(height, columns)
        for first in range(0, len(block), height):
            part = block[first : first + height]
            threads[: len(part)] += part
        total = threads[0].clone()
        for thread in threads[1:]:
            total += thread
        partials.append(total)
    return torch.stack(partials)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (70, 16), (5, 264), (37, 256), (40, 520), (300, 64), (17, 1032)])
def test_column_sums(interpreter: Interpreter, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    program = Program.parse(GATED)
    grad, x, r = (random(*shape, dtype=dtype, seed=k) for k in range(3))
    kernel = SpecializedBackward(backward_text(program, dtype, [r], [0], True), [0], True)
    got = kernel.run(program, grad, x, [r])
    gradient = interpreter.run(program, grad, x, [r], 0)
    assert got.partials is not None
    assert_same_bits(got.of[0], gradient.to(dtype))
    assert_same_bits(got.partials, added_up(gradient, len(got.partials)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (3, 2040), (1, 2056), (1, 4096 + 24), (2, 3, 40), (70, 24)])
def test_extents(interpreter: Interpreter, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of one block and several, of rows that are folded, and whose last is short."""
    program = Program.parse(GATED)
    grad, x, r = (random(*shape, dtype=dtype, seed=k) for k in range(3))
    check(interpreter, program, grad, x, [r], [0, 1])
    check(interpreter, program, grad, x, [r[..., :1].contiguous()], [0])


def test_gradients_and_inputs_with_gaps(interpreter: Interpreter) -> None:
    grad, x, r = (random(6, 48, dtype=torch.bfloat16, seed=k) for k in range(3))
    check(interpreter, Program.parse(GATED), grad[:, 8:], x[:, :40], [r[:, :40]], [0, 1])


def test_what_passes_rotate_is_set_before_them() -> None:
    """ptxas takes a register that nothing has set before a loop for any value: a mask of all elements was lost."""
    text = backward_text(Program.parse(f"operands=0; trunc z; {LONG}"), torch.bfloat16)
    before, *passes = re.split(r"^\$Lpass\d+:", text, flags=re.MULTILINE)
    assert passes
    for body in (before, *passes[:-1]):
        start = body.splitlines()[-40:]
        assert [
            register for register in range(8) if not any(f"mov.f32 %kept0_{register}, " in line for line in start)
        ] == []


def test_tangents_cost_nothing_where_they_are_known() -> None:
    """One that is 1 or masked for good is no instruction, and a factor is computed once for all derivatives."""
    program = Program.parse("operands=2; add z r0; add prev r1; mul prev 2.0; tanh prev")
    one, all_three = (backward_text(program, torch.float32, [MATRIX, MATRIX], wanted) for wanted in ([0], [0, 1, 2]))
    computed = "\t%factor2a_0, "
    assert one.count(computed) == all_three.count(computed) == 2, "once for each piece"
    assert "%factor0" not in all_three
    assert "%tangent0_0" not in all_three
    unreached = Program.parse("operands=1; mul r0 r0 -> s0; mul z s0; add prev s0")
    assert "%factor0" not in backward_text(unreached, torch.float32, [MATRIX], [0])


def test_derivatives_are_asked_of_their_kernels_alone() -> None:
    core = native.module()
    program = Program.parse("operands=0; tanh z; neg prev").native
    with pytest.raises(ValueError, match="is of derivatives, and none is asked for"):
        core.specialize_kernel(core.kernel_template("pointwise_backward_float32"), program, [])
    with pytest.raises(ValueError, match="has no marks of derivatives"):
        core.specialize_kernel(core.kernel_template("pointwise_float32"), program, [], derivatives=[0])


def assert_assembles(program: Program, wanted: Sequence[int], folder: Path, number: int = 0) -> None:
    """ptxas takes it without spills, warnings and calls."""
    dtype = DTYPES[number % 3]
    operands = [random(1, 8, dtype=DTYPES[(number + k) % 3]) for k in range(program.operand_count)]
    for column_sum in (False, True):
        text = backward_text(program, dtype, operands, wanted, column_sum)
        assert_roundings(text)
        assert "call" not in text
        assemble_without_spills(text, folder, "sm_90a", program.text, wanted, dtype, column_sum)


@needs_ptxas
def test_ptxas_takes_every_op(tmp_path: Path) -> None:
    for number, op in enumerate(op_table().ops):
        assert_assembles(program_of(op.name), range(1 + min(op.arity - 1, 2)), tmp_path, number)


@needs_ptxas
def test_ptxas_takes_random_programs(tmp_path: Path) -> None:
    for number, program in enumerate(some_programs(40)):
        if len(program.instructions) > 0:
            assert_assembles(program, [0, *range(1, number % 3 + 1)], tmp_path, number)


SIX = "mul z 1.5; add prev 0.25; leaky_relu prev 0.1; clamp prev -4.0 4.0; mul prev 0.75; hardswish prev"
SIX_FULL = "mul z 1.5; add prev 0.25; relu prev; minimum prev r0; mul prev 0.75; hardswish prev"
TWELVE = (
    "mul z z; mul prev z; mul prev 0.044715; add prev z; mul prev 0.797; tanh prev; add prev 1.0; mul prev z; "
    "mul prev 0.5; mul prev r0; add prev r1; relu prev"
)


@needs_ptxas
@pytest.mark.parametrize("number", range(3), ids=[str(dtype) for dtype in DTYPES])
def test_ptxas_takes_usual_programs(tmp_path: Path, number: int) -> None:
    for text, wanted in (
        ("operands=0; gelu z", [0]),
        (f"operands=0; {SIX}", [0]),
        (f"operands=1; {SIX_FULL}", [0]),
        (f"operands=1; {SIX_FULL}", [0, 1]),
        (f"operands=2; {TWELVE}", [0]),
        (f"operands=2; {TWELVE}", [0, 1]),
        (f"operands=2; {TWELVE}", [0, 1, 2]),
        (f"operands=2; {LONG.replace('prev', 'z', 1)}; {TWELVE.replace('mul z z', 'mul prev r1')}", [0, 1, 2]),
    ):
        assert_assembles(Program.parse(text), wanted, tmp_path, number)
