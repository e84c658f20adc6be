"""On a GPU: reductions with a program compiled in give the interpreting kernels' bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generators import FLOATS, REDUCTIONS
from gpu_tensors import DEVICE, randn
from interpreted_and_compiled import assert_same_reduction as assert_same_bits
from specialized_cases import GATED, LIGHT, LONG, program_of
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program, op_table

pytestmark = pytest.mark.gpu
calls_an_operator = pytest.mark.no_path("calls an operator's implementation, and no public function")

# Rows and columns of one block and many, of whole steps and of none, of one chunk and several.
SHAPES = [(3, 8), (70, 72), (513, 264), (2, 70000), (40000, 16), (4096, 8192), (8192, 1096), (5, 3000, 24)]
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, 1e-20, 88.0, 3e4, 3e38, float("inf"), -float("inf"), float("nan"))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    native.core.forget_specializations()
    native.core.forget_calls()


@calls_an_operator
@pytest.mark.parametrize("dim", [-1, -2], ids=["rows", "columns"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_reduction(dtype: torch.dtype, reduction: str, dim: int) -> None:
    for shape in SHAPES:
        for text in (LIGHT, GATED):
            operand = randn(*shape, dtype=dtype, seed=1)
            assert_same_bits(Program.parse(text), randn(*shape, dtype=dtype), [operand], reduction, dim)


@calls_an_operator
@pytest.mark.parametrize("dim", [-1, -2], ids=["rows", "columns"])
@pytest.mark.parametrize("reduction", ["sum", "logsumexp"])
def test_long_programs(reduction: str, dim: int) -> None:
    program = Program.parse(f"operands=1; copy z; {LONG}; mul prev r0")
    for dtype in FLOATS:
        assert_same_bits(program, randn(513, 264, dtype=dtype), [randn(513, 264, seed=1)], reduction, dim)


@calls_an_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [op.name for op in op_table().ops])
def test_every_op(name: str, dtype: torch.dtype) -> None:
    program = program_of(name, "; copy prev")
    x, *operands = (randn(200, 264, dtype=dtype, seed=seed) for seed in range(3))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, device=DEVICE).to(dtype)[:, None]
    operands[0][:, ::3] = torch.tensor(SPECIAL, device=DEVICE).repeat(16)[:200, None].to(dtype)
    for dim in (-1, -2):
        for reduction in ("sum", "amax"):
            assert_same_bits(program, x, operands, reduction, dim)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": lambda r: r[:, :264].contiguous(),
    "with gaps": lambda r: r[:, 8:],
    "off a boundary": lambda r: r[:, 1:265],
    "transposed": lambda r: r[:, :264].t().contiguous().t(),
    "row": lambda r: r[:1, :264].contiguous(),
    "column": lambda r: r[:, :1].contiguous(),
    "number": lambda r: r[:1, :1].contiguous(),
}


@calls_an_operator
@pytest.mark.parametrize("dim", [-1, -2], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_every_layout(layout: str, dtype: torch.dtype, dim: int) -> None:
    for operand_dtype in FLOATS:
        operand = LAYOUTS[layout](randn(200, 272, dtype=operand_dtype, seed=1))
        assert_same_bits(Program.parse(GATED), randn(200, 264, dtype=dtype), [operand], "sum", dim)


def test_values() -> None:
    """Against fp64, through the public function."""
    x, r = randn(1000, 4096), randn(1000, 4096, seed=1)
    for dim in (0, 1):
        with cutfuse.specialization("now"):
            y = cutfuse.reduce(x, dim, prologue=lambda z, r: torch.tanh(z) * r, operands=(r,))
        torch.testing.assert_close(y.double(), (torch.tanh(x.double()) * r).sum(dim), rtol=1e-5, atol=1e-3)
