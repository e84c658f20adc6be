"""The pointwise and reduction kernels that interpret programs, against fp64, in memory whose margins are watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import kernel_cases as cases
import pytest
import torch
from generators import FLOATS, REDUCTIONS, eager_reduce
from kernel_cases import LAYOUTS, Layout, Shape, assert_within, layouts
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.epilogue.table import NEEDS_RESULT
from cutfuse.layer import calls, cuda

pytestmark = pytest.mark.gpu

# (outer, reduced, inner): one for every way in which the planner lays threads over a tensor, and their ragged edges.
ROW_SHAPES = [(1, 1, 1), (37, 1, 1), (5, 3, 1), (300, 33, 1), (70, 128, 1), (9, 1000, 1), (3, 5000, 1), (2, 300001, 1)]
STRIDED_SHAPES = [
    (3, 1, 5),
    (2, 7, 300),
    (40, 9, 4),
    (2, 600, 7),
    (1, 2100, 64),
    (3, 513, 95),
    (2, 1100, 130),
    (1, 9001, 8),
]

IDENTITY = "operands=0"


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    memory = cases.WatchedMemory()
    native.core.connect_calls({**calls.torch_functions(), "empty_strided": memory})
    with cutfuse.specialization("off"):
        yield
    calls.connect()
    memory.check()


def text_of(function: Callable[..., Tensor]) -> str:
    return Epilogue(function).program.text


def reduce(
    x: Tensor, reduction: str, out_dtype: torch.dtype, program: str = IDENTITY, operands: Sequence[Tensor] = ()
) -> Tensor:
    """Over the middle one of three dimensions."""
    return cuda.reduce(x, operands, program, reduction, (1,), out_dtype)


def reduction_bound(values: Tensor, reduction: str) -> Tensor | float:
    if reduction == "logsumexp":
        return 2e-6
    if reduction in ("amax", "amin"):
        return 0.0
    total = values.abs().sum(1) * 2e-7
    return total / values.shape[1] if reduction == "mean" else total


def check_reduction(x: Tensor, reduction: str, out_dtype: torch.dtype) -> None:
    values = x.double()
    actual = reduce(x, reduction, out_dtype)
    assert_within(actual, eager_reduce(values, 1, reduction), reduction_bound(values, reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROW_SHAPES + STRIDED_SHAPES, ids=str)
def test_reduce(shape: Shape, dtype: torch.dtype, reduction: str) -> None:
    check_reduction(cases.random(shape, dtype), reduction, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@layouts(*[*LAYOUTS][1:])
@pytest.mark.parametrize("shape", ROW_SHAPES + STRIDED_SHAPES, ids=str)
def test_reduce_layouts(shape: Shape, layout: Layout, dtype: torch.dtype) -> None:
    for reduction in ("sum", "amax", "logsumexp"):
        check_reduction(layout(shape, dtype), reduction, torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "special", [(math.nan,), (math.inf,), (-math.inf,), (math.inf, -math.inf), (math.nan, math.inf)]
)
@pytest.mark.parametrize("shape", [(6, 33, 1), (2, 20000, 1), (2, 700, 7), (1, 3000, 64), (3, 5, 6)], ids=str)
def test_reduce_special_values(shape: Shape, special: tuple[float, ...], reduction: str) -> None:
    x = cases.random(shape, torch.float32)
    for index, value in enumerate(special):
        x[0, (index * 17 + 3) % shape[1]] = value
    check_reduction(x, reduction, torch.float32)
    check_reduction(torch.full_like(x, special[0]), reduction, torch.float32)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 700001, 1), (2, 40000, 9), (1, 20000, 256), (1, 5000, 4095)], ids=str)
def test_two_runs_agree(shape: Shape, reduction: str) -> None:
    x = cases.random(shape, torch.bfloat16)
    first = reduce(x, reduction, torch.float32)
    assert torch.equal(first, reduce(x, reduction, torch.float32))


def prologue(z: Tensor, row: Tensor, column: Tensor, full: Tensor, scalar: Tensor) -> Tensor:
    return torch.tanh(z * row + column) * full - scalar


def operands_of(shape: Shape, full: Layout, dtype: torch.dtype) -> list[Tensor]:
    """A row vector, a column vector, a full tensor and a scalar."""
    a, b, c = shape
    return [
        cases.random((1, 1, c), torch.float32, 1),
        cases.random((a, b, 1), torch.bfloat16, 2),
        full(shape, dtype).clone(memory_format=torch.preserve_format),
        cases.random((1, 1, 1), torch.float16, 3),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@layouts()
@pytest.mark.parametrize("shape", [(9, 33, 1), (3, 5000, 1), (2, 7, 300), (2, 600, 7), (1, 2100, 64)], ids=str)
def test_reduce_program(shape: Shape, layout: Layout, dtype: torch.dtype) -> None:
    x = layout(shape, dtype)
    operands = operands_of(shape, layout, dtype)
    program = text_of(prologue)
    values = prologue(x.double(), *(operand.double() for operand in operands))
    for reduction in REDUCTIONS:
        actual = reduce(x, reduction, torch.float32, program, operands)
        bound = reduction_bound(values, reduction) + 3e-6 * (shape[1] if reduction == "sum" else 1)
        assert_within(actual, eager_reduce(values, 1, reduction), bound)


def scaled(z: Tensor, weight: Tensor) -> Tensor:
    return 0.5 * (z * weight) * 3.0


@pytest.mark.parametrize("reduction", ["sum", "mean", "amin"])
@pytest.mark.parametrize("dtype", FLOATS)
@layouts("contiguous", "offset", "middle_last")
@pytest.mark.parametrize("shape", [(9, 33, 1), (70, 128, 1), (3, 5000, 1), (1, 400000, 1), (1, 2100, 64)], ids=str)
def test_reduce_scaled(shape: Shape, layout: Layout, dtype: torch.dtype, reduction: str) -> None:
    """Programs that only scale, which sums run without the interpreter."""
    x = layout(shape, dtype)
    vector = cases.random((1, shape[1], 1), torch.float32, 1)
    misaligned = cases.random((1, shape[1] + 1, 1), torch.float32, 2)[:, 1:]
    weights = [vector, misaligned, vector.to(dtype), cases.random((1, 1, 1), torch.float32, 3)]
    programs = [(scaled, [weight]) for weight in weights] + [(lambda z: z / 2 * 3.0, [])]
    for function, operands in programs:
        values = function(x.double(), *(operand.double() for operand in operands))
        actual = reduce(x, reduction, torch.float32, text_of(function), operands)
        bound = values.abs().sum(1) * 3e-7
        assert_within(actual, eager_reduce(values, 1, reduction), bound)


def sigmoid(z: Tensor) -> Tensor:
    return torch.sigmoid(z)


def chain(z: Tensor) -> Tensor:
    return torch.clamp(torch.nn.functional.silu(z) * 1.5 + z, -2.0, 3.0)


def residual(z: Tensor) -> Tensor:
    return torch.tanh(z) * 2.5 - 0.5 + z


POINTWISE_SHAPES = [
    (1, 1, 1),
    (1, 1, 7),
    (1, 1, 5000),
    (1, 1, 100001),
    (1, 3, 4096),
    (1, 50, 33),
    (3, 17, 40),
    (2, 1, 2049),
    (1, 700, 8),
    (200, 3, 5),
    (1, 5, 3000),
]


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@layouts()
@pytest.mark.parametrize("shape", POINTWISE_SHAPES, ids=str)
def test_pointwise(shape: Shape, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    x = layout(shape, dtype)
    for function in (sigmoid, chain, residual):
        actual = cuda.pointwise(x, (), text_of(function), out_dtype)
        assert_within(actual, function(x.double()), 4e-6)
    if out_dtype == dtype:
        operands = operands_of(shape, layout, dtype)
        expected = prologue(x.double(), *(operand.double() for operand in operands))
        assert_within(cuda.pointwise(x, operands, text_of(prologue), dtype), expected, 4e-6)


@pytest.mark.parametrize("function", [sigmoid, chain, residual])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pointwise_ragged_large(dtype: torch.dtype, function: object) -> None:
    """Long enough that whole vectors and the rest are two launches."""
    x = cases.random((1, 1, (1 << 20) + 4099), dtype)
    actual = cuda.pointwise(x, (), text_of(function), dtype)
    assert_within(actual, function(x.double()), 4e-6)


BACKWARD_SHAPES = [
    (1, 1, 1),
    (1, 1, 5000),
    (1, 3, 1024),
    (1, 70, 33),
    (3, 17, 40),
    (1, 300, 8),
    (1, 100, 1000),
    (4, 5, 3),
]


@pytest.mark.parametrize("dtype", FLOATS)
@layouts()
@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=str)
def test_backward(shape: Shape, layout: Layout, dtype: torch.dtype) -> None:
    x = layout(shape, dtype)
    operands = operands_of(shape, layout, dtype)
    grad = cases.random(shape, dtype, 5)
    tensors = [x, *(operand.expand(shape) for operand in operands)]
    sources = [t.double().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(prologue(*sources), sources, grad.double())
    for own, reference in zip(gradients(grad, tensors, range(5)), expected, strict=True):
        assert_within(own, reference, 1e-5 * (1 + reference.abs()))
    if shape[0] == 1:
        matrices = [t[0] for t in tensors]
        *_, sums = gradients(grad[0], matrices, range(5), sums_columns=True)
        assert_within(sums, expected[0].sum(1)[0], 1e-5 * (1 + expected[0].abs().sum(1)[0]))
        (alone,) = gradients(grad[0], matrices, (), sums_columns=True)
        assert torch.equal(alone, sums)


def gradients(
    grad: Tensor, tensors: Sequence[Tensor], wanted: Sequence[int], sums_columns: bool = False
) -> list[Tensor]:
    """Those that are wanted of prologue's, and the sums of the columns of x's."""
    return cuda.pointwise_backward(
        grad, tensors[0], tensors[1:], text_of(prologue), "none", None, list(wanted), sums_columns
    )


@pytest.mark.parametrize("reduction", NEEDS_RESULT)
@layouts("contiguous", "offset", "middle_last")
@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=str)
def test_backward_of_row_reduction(shape: Shape, layout: Layout, reduction: str) -> None:
    x = layout(shape, torch.float32).round(decimals=1)  # ties
    grad = cases.random((*shape[:2], 1), torch.float32, 5)
    source = x.double().requires_grad_()
    y = eager_reduce(source * 2 + 0.25, -1, reduction, keepdim=True)
    (expected,) = torch.autograd.grad(y, source, grad.double())
    program = text_of(lambda z: z * 2 + 0.25)
    result = eager_reduce(x * 2 + 0.25, -1, reduction, keepdim=True)
    (actual,) = cuda.pointwise_backward(grad, x, (), program, reduction, result, [0], False)
    assert_within(actual, expected, 1e-5 * (1 + expected.abs()))


@pytest.mark.parametrize("reduction", ["sum", "amax"])
def test_reduce_is_as_accurate_as_torch(reduction: str) -> None:
    for shape in [(8, 100000, 1), (1, 8192, 1024), (4, 4096, 999)]:
        x = cases.random(shape, torch.float32)
        expected = eager_reduce(x.double(), 1, reduction)
        own = (reduce(x, reduction, torch.float32).double() - expected).abs().max()
        rounding = torch.finfo(torch.float32).eps / 2 * expected.abs().max()
        assert own <= (eager_reduce(x, 1, reduction).double() - expected).abs().max() + rounding


def test_empty() -> None:
    empty = torch.empty((0, 4, 4), device=cases.DEVICE)
    assert reduce(empty, "sum", torch.float32).shape == (0, 4)
    assert cuda.pointwise(empty, (), text_of(sigmoid), torch.float32).shape == (0, 4, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [(1 << 31) + 24, (1 << 31) + 27])
def test_more_than_2_31_elements(columns: int, dtype: torch.dtype) -> None:
    x = torch.zeros((1, 1, columns), dtype=dtype, device=cases.DEVICE)
    x[..., -30:] = 3.0
    y = cuda.pointwise(x, (), text_of(chain), dtype)
    assert_within(y[..., -40:], chain(x[..., -40:].double()), 4e-6)
    assert y[..., 1 << 30] == 0
    assert reduce(x.view(1, columns, 1), "sum", torch.float32).item() == 90
    tall = x[..., : columns - columns % 4].view(1, -1, 4)
    assert reduce(tall, "sum", torch.float32).sum().item() == 3 * (30 - columns % 4)
