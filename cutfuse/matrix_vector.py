"""Affine epilogues followed by a sum or mean over N, without the matrix product.

`sum_n(a * z + c)` with `z = x @ weight.T + bias` is `x @ (weight.T @ a) + a @ bias + sum_n(c)`. What in `a` varies over
the rows of z only goes outside of the sum, what varies over its columns only goes inside, so that weight and x are read
once each, forwards and backwards. Nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dynamo
from .arguments import is_size
from .epilogue import Epilogue, Program, evaluate
from .epilogue.expression import Expr, topological
from .epilogue.lower import compute, is_factor, split_affine
from .epilogue.program import arithmetic_dtype
from .epilogue.table import ADDITIVE, GRADIENTS, Op, op_table
from .layer import autograd, schema
from .layer.fake import sum_dtype
from .precision import autocast_dtype

_NOTHING = contextlib.nullcontext()
# A product that a kernel reduces in its epilogue is one launch, and takes as long as a step of the form from this size
# on: 20 us of the host at 600 TFLOP/s.
LEAST_FLOPS_OF_A_STEP = 12e9


class Part(NamedTuple):
    """A program over the operands, and the indices of those that it reads."""

    program: Program
    reads: tuple[int, ...]


class MatrixVector(NamedTuple):
    """`scale * outer * inner * z + offset + intercept`, None for absent parts."""

    scale: float
    outer: Part | None  # reads scalars and column operands, [M, 1]
    inner: Part | None  # reads row operands, [1, N]
    offset: float
    intercept: Part | None


class _Factors(NamedTuple):
    scale: float
    outer: Expr | float = 1.0
    inner: Expr | float = 1.0


def find_matrix_vector(
    epilogue: Epilogue, reduction: str | None, operands: Sequence[Tensor], columns: int
) -> MatrixVector | None:
    """How to sum the epilogue over its `columns` without z. None where every element of z has to be seen."""
    if reduction not in ADDITIVE or columns == 0:
        return None
    if not torch.compiler.is_compiling() and epilogue.affine is None:  # Dynamo does not trace what finds it
        return None
    if GRADIENTS[reduction] == "share" and not isinstance(columns, int):
        return None  # its share is a number of the program
    # Branches, as the comparison of a symbolic size is a symbol itself, and `split` takes constants.
    along_rows = tuple([k for k, t in enumerate(operands) if not is_size(t.shape[0], 1)])
    along_columns = tuple([k for k, t in enumerate(operands) if not is_size(t.shape[1], 1)])
    return split(epilogue.program.text, along_rows, along_columns)


def is_sooner(form: MatrixVector, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the steps of the form take less time than the product, in a kernel that sums it. Always, when compiling:
    then the steps are compiled together."""
    if torch.compiler.is_compiling():
        return True
    steps = 2 + 2 * (bias is not None) + (form.inner is not None) + 2 * (form.outer is not None)
    steps += (form.offset != 0) + 3 * (form.intercept is not None)
    return 2 * x.numel() * weight.shape[0] >= steps * LEAST_FLOPS_OF_A_STEP


@dynamo.assume_constant_result
def split(program: str, along_rows: tuple[int, ...], along_columns: tuple[int, ...]) -> MatrixVector | None:
    """The parts of an affine program, given which operands vary along each dimension."""
    return _split(program, along_rows, along_columns)


@functools.lru_cache(maxsize=1024)
def _split(program: str, along_rows: tuple[int, ...], along_columns: tuple[int, ...]) -> MatrixVector | None:
    parsed = Program.parse(program)
    form = split_affine(parsed.expression)
    if form is None or not form.reads_z:
        return None
    rows = frozenset(f"r{k}" for k in along_rows)
    columns = frozenset(f"r{k}" for k in along_columns)
    factors = _separate(form.slope, rows, columns)
    if factors is None:
        return None
    count = parsed.operand_count
    return MatrixVector(
        scale=factors.scale,
        outer=_part(factors.outer, count),
        inner=_part(factors.inner, count),
        offset=form.intercept if isinstance(form.intercept, float) else 0.0,
        intercept=_part(form.intercept, count),
    )


def _part(expression: Expr | float, operand_count: int) -> Part | None:
    if not isinstance(expression, Expr):
        return None
    reads = tuple(sorted(int(leaf[1:]) for leaf in expression.reads))
    return Part(Epilogue.from_expression(expression, operand_count).program, reads)


def _separate(slope: Expr | float, rows: frozenset[str], columns: frozenset[str]) -> _Factors | None:
    """A number, a factor that is the same along a row of z, and one that is the same along a column of z."""
    if not isinstance(slope, Expr):
        return _Factors(slope)
    found: dict[int, _Factors | None] = {}
    for node in topological(slope):
        factors: _Factors | None
        if node.number is not None:
            factors = _Factors(node.number)
        elif not node.reads & columns:
            factors = _Factors(1.0, outer=node)
        elif not node.reads & rows:
            factors = _Factors(1.0, inner=node)
        else:
            parts = [found[id(argument)] for argument in node.arguments]
            known = [part for part in parts if part is not None]
            factors = _combine(node.op, known) if len(known) == len(parts) else None
        found[id(node)] = factors
    return found[id(slope)]


def _combine(op: Op | None, parts: list[_Factors]) -> _Factors | None:
    """The factors of an op on values of which the factors are known; None where it does not keep them apart."""
    infix, prefix = op_table().infix, op_table().prefix
    if op is prefix["-"]:
        factors = parts[0]._replace(scale=-parts[0].scale)
    elif op is infix["*"] or (op is infix["/"] and parts[1].scale != 0):
        a, b = parts
        symbol, scale = ("*", a.scale * b.scale) if op is infix["*"] else ("/", a.scale / b.scale)
        factors = _Factors(scale, compute(symbol, a.outer, b.outer), compute(symbol, a.inner, b.inner))
    else:
        return None
    return factors if is_factor(factors.scale) else None


def affine_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    form: MatrixVector,
    reduction: str,
    uses_operators: bool,
    kernel_dtype: torch.dtype,
) -> Tensor:
    """The reduction over N of x [M, K], weight [N, K], bias [N]: `[M]`, in fp32 (fp64 for fp64).

    In `kernel_dtype` where a kernel's result is the last step: a cast would be one more launch.
    """
    dtype = arithmetic_dtype(x, operands)
    is_last = bias is None and form.outer is None and form.offset == 0 and form.intercept is None
    columns = weight.shape[0]
    share = 1.0 / columns if GRADIENTS[reduction] == "share" else 1.0
    weighted_sum = _weighted_sum_by_operators if uses_operators else _weighted_sum
    inner = None if form.inner is None else _evaluate(form.inner, operands, dtype).reshape(-1)
    scale = form.scale * share
    # The scale goes with the second sum: a sum over weight that has no program to run reads at the memory's rate.
    sums = weighted_sum(weight, inner, 0, 1.0, dtype)
    y = weighted_sum(x, sums, 1, scale, kernel_dtype if is_last and uses_operators else dtype)
    if bias is not None:
        y = y + weighted_sum(bias.unsqueeze(0), inner, 1, scale, dtype)
    if form.outer is not None:
        y = y * _evaluate(form.outer, operands, dtype).reshape(-1)
    if form.offset != 0:
        y = y + form.offset * columns * share
    if form.intercept is not None:
        y = y + _sum_intercept(form.intercept, operands, columns, dtype, uses_operators) * share
    return y


def _evaluate(part: Part, operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The part in the shape that what it reads broadcasts to."""
    shape = torch.broadcast_shapes(*[operands[k].shape for k in part.reads])
    z = operands[0].new_empty((), dtype=dtype).expand(shape)
    return evaluate(part.program, z, _only_read(part, operands, operands[part.reads[0]]))


def _only_read(part: Part, operands: Sequence[Tensor], stand_in: Tensor) -> list[Tensor]:
    """The operands; in place of those that the part does not read, one that surely broadcasts."""
    return [t if k in part.reads else stand_in for k, t in enumerate(operands)]


def _sum_intercept(
    part: Part, operands: Sequence[Tensor], columns: int, dtype: torch.dtype, uses_operators: bool
) -> Tensor:
    """`[M]`, or `[1]` where no operand varies over M."""
    varying = [operands[k] for k in part.reads if not is_size(operands[k].shape[1], 1)]
    if not varying:
        return _evaluate(part, operands, dtype).reshape(-1) * columns
    if not uses_operators:
        return _evaluate(part, operands, dtype).sum(1)
    # The program does not read z: any tensor of the right shape will do, but in fp64 it says what to compute in.
    stand_in = varying[0].detach()
    stand_in = stand_in.to(dtype) if dtype == torch.float64 else stand_in
    z = stand_in.expand(torch.broadcast_shapes(*[operands[k].shape for k in part.reads]))
    return autograd.reduce(z, _only_read(part, operands, z), part.program.text, "sum", (1,), dtype)


def _weighted_sum(matrix: Tensor, vector: Tensor | None, dim: int, scale: float, dtype: torch.dtype) -> Tensor:
    """The sum over `dim` of scale * matrix * vector, by PyTorch's own operations."""
    if vector is None:
        return matrix.sum(dim, dtype=dtype) * scale
    matrix = matrix.to(dtype)
    # autocast would round both sides of a product to its own type
    with torch.autocast(matrix.device.type, enabled=False) if autocast_dtype(matrix.device.type) else _NOTHING:
        return torch.mv(matrix.t() if dim == 0 else matrix, vector * scale)


def _weighted_sum_by_operators(
    matrix: Tensor, vector: Tensor | None, dim: int, scale: float, dtype: torch.dtype
) -> Tensor:
    if autograd.needs_gradient(matrix, vector):
        y: Tensor = WeightedSum.apply(matrix, vector, dim, scale, dtype)
        return y
    return _launch(matrix, vector, dim, scale, dtype)


def _launch(matrix: Tensor, vector: Tensor | None, dim: int, scale: float, dtype: torch.dtype) -> Tensor:
    operands = [] if vector is None else [vector.unsqueeze(1 - dim)]
    return schema.reduce(matrix, operands, _weighted(vector is not None, scale), "sum", (dim,), dtype)


def _weighted(has_vector: bool, scale: float) -> str:
    """The program of an element's share in a weighted sum."""
    instructions = ["mul prev r0"] * has_vector + [f"mul prev {scale!r}"] * (scale != 1)
    return "; ".join([f"operands={int(has_vector)}", *instructions])


class WeightedSum(torch.autograd.Function):
    """`[C]`, `[R]` for dim 0, 1 of a matrix `[R, C]`: the sum of scale * matrix * vector, the vector along `dim`.

    Its gradients are a rank-1 matrix and another weighted sum: matrix-vector work too.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, vector: Tensor | None, dim: int, scale: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(matrix, vector)
        ctx.dim, ctx.scale = dim, scale
        return _launch(matrix, vector, dim, scale, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matrix, vector = ctx.saved_tensors
        needs_matrix, needs_vector, *_ = ctx.needs_input_grad
        if autograd.composes_gradient(grad):
            wide = sum_dtype(matrix.dtype)
            again = autograd.differentiate(
                lambda matrix, vector: _weighted_sum(matrix, vector, ctx.dim, ctx.scale, wide).to(grad.dtype),
                (matrix, vector),
                (needs_matrix, needs_vector),
                grad,
            )
            return (*again, None, None, None)
        grad_matrix = grad_vector = None
        if needs_matrix:
            if vector is None:
                grad_matrix = (grad * ctx.scale).to(matrix.dtype).unsqueeze(ctx.dim).expand(matrix.shape)
            else:
                spread = grad.unsqueeze(ctx.dim).expand(matrix.shape)
                program = _weighted(True, ctx.scale)
                grad_matrix = schema.pointwise(spread, [vector.unsqueeze(1 - ctx.dim)], program, matrix.dtype)
        if needs_vector:
            grad_vector = _launch(matrix, grad, 1 - ctx.dim, ctx.scale, vector.dtype)
        return grad_matrix, grad_vector, None, None, None
