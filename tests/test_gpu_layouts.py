"""Kernels that read the weight by its columns, or x too, and those of fp32 on CUDA cores: each forced, beside fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_products import dtype_of, placed, run_plan
from generators import EPILOGUES, assert_linear, make_inputs, slack_for
from gpu_tensors import DEVICE, guarded_results, randn
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = pytest.mark.gpu

KERNELS = [name for name in native.module().gemm_kernels() if any(kind in name for kind in ("_nn_", "_tn_", "_fp32_"))]
OF_COLUMNS = [name for name in KERNELS if "_nn_" in name or "_tn_" in name]
# Rows, columns, depth. By the weight's columns: one row, whole tiles, one vector more than a tile, K shorter than a
# stage and no whole stages, a deep K, and more tiles than a GPU has multiprocessors.
SHAPES = (
    *((1, 8, 8), (7, 64, 64), (128, 256, 128), (129, 264, 72), (200, 328, 136), (513, 1000, 336), (65, 520, 4104)),
    (4200, 2552, 136),
)
# By the columns of both: one vector of rows, a depth of one element more than a stage and of odd numbers, ragged tiles,
# and more tiles than a GPU has multiprocessors.
TRANSPOSED_SHAPES = ((8, 8, 8), (64, 128, 65), (72, 264, 197), (384, 1536, 3), (136, 328, 1576), (2552, 4200, 31))
# In fp32: the least that has columns to read, odd numbers, one element more than a tile and fewer than a vector, whole
# tiles, a depth of many stages, and more tiles than a GPU has multiprocessors.
FP32_SHAPES = (
    *((2, 2, 2), (3, 5, 7), (8, 8, 1024), (17, 33, 65), (64, 64, 64), (65, 131, 30), (129, 66, 1026), (40, 520, 4104)),
    (1100, 1400, 100),
)


def is_fp32(kernel: str) -> bool:
    return "_fp32_" in kernel


def shapes_of(kernel: str) -> Sequence[tuple[int, int, int]]:
    return FP32_SHAPES if is_fp32(kernel) else TRANSPOSED_SHAPES if "_tn_" in kernel else SHAPES


def epilogues_of(kernel: str) -> Sequence[str]:
    """Where x is read by its columns, gradients, and what the table's other kernels can."""
    return ("identity", "gelu_gate") if "_tn_" in kernel and not is_fp32(kernel) else ("identity", *EPILOGUES)


def identity(z: Tensor) -> Tensor:
    return z


def by_columns(matrix: Tensor) -> Tensor:
    """The same values, with a stride of 1 between rows."""
    return matrix.t().contiguous().t()


def operands_of(count: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """A full matrix, a row, a column and a scalar, in this order."""
    shapes = ((rows, columns), (1, columns), (rows, 1), (1, 1))
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes[:count])]


def make(kernel: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias of the kernel's type."""
    return make_inputs(*shape, dtype_of(kernel), DEVICE)


def arguments_for(
    kernel: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor],
    operands: Sequence[Tensor] = (),
    **place: int,
) -> LinearArguments:
    """With x and the weight where the kernel reads them. place: of `placed`."""
    given = placed(x, kernel, is_weight=False, **place), placed(weight, kernel, is_weight=True, **place)
    program = Epilogue(epilogue, len(operands)).program
    return LinearArguments(*given, bias, operands, program, "none", x.dtype)


def run(kernel: str, arguments: LinearArguments, mode: str = "now") -> Any:
    with cutfuse.specialization(mode):
        plan = plan_linear(arguments, "guarded" if is_fp32(kernel) else "tf32", only=kernel)
        return run_plan(plan, arguments)


def assert_right(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor],
    operands: Sequence[Tensor] = (),
) -> None:
    assert_linear(y, x, weight, bias, epilogue, operands, slack=slack_for(y.dtype))


@pytest.fixture(autouse=True)
def _guarded() -> Iterator[None]:
    with guarded_results():
        yield


@pytest.mark.parametrize(
    ("kernel", "name", "shape"),
    [(kernel, name, shape) for kernel in KERNELS for name in epilogues_of(kernel) for shape in shapes_of(kernel)],
    ids=str,
)
def test_every_kernel(kernel: str, name: str, shape: tuple[int, int, int]) -> None:
    """Interpreted and compiled epilogues give the same bits, and both what PyTorch does in fp64."""
    epilogue, count = (identity, 0) if name == "identity" else EPILOGUES[name]
    x, weight, bias = make(kernel, shape)
    operands = operands_of(count, *shape[:2], x.dtype)
    arguments = arguments_for(kernel, x, weight, bias, epilogue, operands)
    interpreted, compiled = (run(kernel, arguments, mode) for mode in ("off", "now"))
    bits = torch.int32 if is_fp32(kernel) else torch.int16
    assert torch.equal(interpreted.view(bits), compiled.view(bits))
    assert_right(interpreted, x, weight, bias, epilogue, operands)


# Shapes, and where lines begin and how far they lie apart: those of 16 bits by whole vectors.
PLACES = {
    False: [((200, 328, 136), place) for place in ((0, 8), (8, 24))],
    True: [(shape, place) for shape in ((9, 70, 36), (130, 100, 132)) for place in ((1, 0), (4, 4), (0, 3), (2, 1))],
}


@pytest.mark.parametrize(
    ("kernel", "shape", "place"),
    [(kernel, *case) for kernel in KERNELS for case in PLACES[is_fp32(kernel)]],
    ids=str,
)
def test_any_place_and_pitch(kernel: str, shape: tuple[int, int, int], place: tuple[int, int]) -> None:
    """What lies between the lines is not read; neither is a bias that is not there."""
    x, weight, _ = make(kernel, shape)
    y = run(kernel, arguments_for(kernel, x, weight, None, F.gelu, offset=place[0], gap=place[1]))
    assert_right(y, x, weight, None, F.gelu)


@pytest.mark.parametrize("shape", [(64, 128, 64), (200, 328, 136)], ids=str)
@pytest.mark.parametrize("kernel", OF_COLUMNS)
def test_the_same_bits_as_of_rows(kernel: str, shape: tuple[int, int, int]) -> None:
    """Products of the same elements are added in the same order, however the operands lie."""
    x, weight, bias = make(kernel, shape)
    of_rows = kernel.replace("_nn_", "_").replace("_tn_", "_")
    y, expected = (run(name, arguments_for(name, x, weight, bias, torch.tanh)) for name in (kernel, of_rows))
    assert torch.equal(y, expected)


STORED = [(kernel, shape) for kernel in KERNELS if is_fp32(kernel) for shape in ((5, 7, 9), (197, 384, 160))]
STORED += [(kernel, shape) for kernel in OF_COLUMNS if not is_fp32(kernel) and "_nn_" in kernel for shape in SHAPES]


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize(("kernel", "shape"), STORED, ids=str)
def test_the_pre_activation_is_stored(kernel: str, shape: tuple[int, int, int], mode: str) -> None:
    x, weight, bias = make(kernel, shape)
    arguments = arguments_for(kernel, x, weight, bias, F.silu)._replace(stores_pre_activation=True)
    y, z = run(kernel, arguments, mode)
    assert_right(y, x, weight, bias, F.silu)
    assert_right(z, x, weight, bias, identity)


@pytest.mark.parametrize("kernel", KERNELS)
def test_special_values_reach_their_elements_alone(kernel: str) -> None:
    x, weight, bias = make(kernel, (40, 72, 64))
    x[3, 5], x[7, 0], weight[11, 63] = torch.inf, torch.nan, -torch.inf
    y = run(kernel, arguments_for(kernel, x, weight, bias, identity))
    assert torch.equal(y.isfinite(), F.linear(x.double(), weight.double(), bias.double()).isfinite())


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 72), (40, 1, 72), (9, 20, 1)], ids=str)
def test_single_lines_are_read_by_rows(shape: tuple[int, int, int]) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, DEVICE)
    for kernel in (name for name in KERNELS if name not in OF_COLUMNS):
        for given in (weight, by_columns(weight)):
            if shape[1] == 1 or shape[2] == 1 or given is weight:
                arguments = LinearArguments(x, given, bias, (), Epilogue(torch.tanh).program, "none", torch.float32)
                assert_right(run(kernel, arguments), x, weight, bias, torch.tanh)
