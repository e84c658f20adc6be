"""Specialized epilogues and the interpreter of the same kernels: the same bits, from the PTX of both.

The interpreter is compiled here, alone and without CUTLASS, with the kernels' options. What PTX leaves open is the same
in both runs; what ptxas may do with it is for a GPU to tell.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from random_programs import Recipe, make_inputs, make_program, recipes
from specialized_cases import program_of
from specialized_kernels import FRAGMENT, SpecializedEpilogue, compile_ptx, make_kernel, specialize, spread

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

SOURCE = """
#include "epilogue/sm90_epilogue_function.h"

using namespace cutfuse;

template <class Primitives>
__global__ void call(sm90::EpilogueParams const* params, float* data) {
  Fragment<sm90::kFragmentSize> z;
  for (int i = 0; i < sm90::kFragmentSize; ++i) z.values[i] = data[i];
  z = sm90::run_epilogue<Primitives>(params, threadIdx.x, threadIdx.y, z);
  for (int i = 0; i < sm90::kFragmentSize; ++i) data[i] = z.values[i];
}

template __global__ void call<FastPrimitives>(sm90::EpilogueParams const*, float*);
template __global__ void call<AccuratePrimitives>(sm90::EpilogueParams const*, float*);
"""

LONG = ["tanh z", "gelu prev", "softplus prev 1.0 20.0", "erf prev", "expm1 prev", "sin prev", "log1p prev"]
SPECIAL = [0.0, 1.0, 0.5, 3.0, 1e-40, 1.2e-38, 1e-20, 88.0, 3e38, float("inf")]
SPECIAL = [*SPECIAL, *(-value for value in SPECIAL), float("nan")]


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpecializedEpilogue]:
    ptx = compile_ptx(SOURCE, tmp_path_factory.mktemp("interpreter"), ["-arch=compute_90a"])
    return {name: SpecializedEpilogue(ptx, f"run_epilogue\\w*{name}Primitives") for name in ("Fast", "Accurate")}


def assert_same_bits(
    interpreters: dict[str, SpecializedEpilogue], program: Program, z: torch.Tensor, operands: list[torch.Tensor]
) -> None:
    fragments = z.view(-1, FRAGMENT)
    matrices = [spread(operand.view(-1, FRAGMENT)) for operand in operands]
    for name, interpreter in interpreters.items():
        specialized = SpecializedEpilogue(specialize(make_kernel(name), program))
        got, expected = (epilogue.run(program, fragments, matrices) for epilogue in (specialized, interpreter))
        wrong = got.view(torch.int32) != expected.view(torch.int32)
        assert not wrong.any(), (name, program.text, got[wrong][:4], expected[wrong][:4])


def test_every_op(interpreters: dict[str, SpecializedEpilogue]) -> None:
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    others = torch.randn(512 - len(pairs), 2, generator=torch.Generator().manual_seed(4)) * 3
    z, r = torch.cat([pairs, others]).T.contiguous()
    for op in op_table().ops:
        assert_same_bits(interpreters, program_of(op.name), z, [r, r.roll(5)])


@given(recipe=recipes())
@settings(max_examples=25)
def test_random_programs(interpreters: dict[str, SpecializedEpilogue], recipe: Recipe) -> None:
    z, *operands = [tensor.float() for tensor in make_inputs()]
    assert_same_bits(interpreters, make_program(recipe), z, operands)


@pytest.mark.parametrize("op", ["relu", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh"])
def test_chains_that_are_compiled_in(interpreters: dict[str, SpecializedEpilogue], op: str) -> None:
    z = torch.tensor((SPECIAL * 2)[:32])
    for text in (f"{op} z", f"{op} z; mul prev 0.3", f"{op} z; mul prev 0.3; add prev z"):
        assert_same_bits(interpreters, Program.parse(f"operands=0; {text}"), z, [])


@given(recipe=recipes())
@settings(max_examples=6)
def test_long_programs(interpreters: dict[str, SpecializedEpilogue], recipe: Recipe) -> None:
    """What is written as a loop over passes."""
    head, *steps = make_program(recipe).text.split("; ")
    program = Program.parse("; ".join([head, *LONG, "mul prev z", "add prev r0", *steps]))
    assert "$Lpass:" in specialize(make_kernel("Fast"), program)
    z, *operands = [tensor.float() for tensor in make_inputs()]
    assert_same_bits(interpreters, program, z, operands)
