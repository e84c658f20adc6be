"""The native module of a build with CUDA kernels. Written by `make stub`, from csrc/bindings*."""

from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = [
    "GemmCandidate",
    "GemmProblem",
    "OpInfo",
    "Program",
    "cuda_build",
    "dtypes",
    "evaluate",
    "finalize_partials",
    "gemm",
    "gemm_candidates",
    "gemm_convert",
    "gemm_planes",
    "limits",
    "op_table",
    "planes_shape",
    "pointwise",
    "pointwise_backward",
    "pointwise_backward_row_blocks",
    "reduce",
    "reduce_workspace",
    "reductions",
    "split",
    "split_microseconds",
    "split_reference",
    "unfused_microseconds",
]

class OpInfo:
    """
    A row of ops.def.
    """
    @property
    def aliases(self) -> str: ...
    @property
    def arity(self) -> int: ...
    @property
    def formula(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def parameter_count(self) -> int: ...
    @property
    def signature(self) -> str: ...
    @property
    def special(self) -> str: ...

class Program:
    """
    An epilogue program, validated.
    """
    def __init__(
        self, instructions: collections.abc.Sequence[tuple[int, int, int, int, int, float, float]], operand_count: int
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def operand_count(self) -> int: ...

class GemmProblem:
    """
    What the choice of a GEMM kernel depends on.
    """
    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        lda: int,
        ldb: int,
        input: int,
        output: int,
        reduction: int,
        multiprocessors: int,
        epilogue_cost: float = 0.0,
        product: int = 0,
    ) -> None: ...
    def __repr__(self) -> str: ...

class GemmCandidate:
    """
    A GEMM kernel with its prediction, or the reason against it.
    """

    raster_along_m: bool
    @property
    def is_of_kind(self) -> bool: ...
    @property
    def microseconds(self) -> float: ...
    @property
    def name(self) -> str: ...
    @property
    def rejection(self) -> str: ...
    @property
    def slices(self) -> int: ...
    @property
    def swizzle(self) -> int: ...
    @swizzle.setter
    def swizzle(self, arg0: int) -> None: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...

def dtypes() -> dict[str, int]:
    """
    The number of each element type.
    """

def evaluate(
    program: Program,
    input: int,
    output: int,
    count: int,
    operands: collections.abc.Sequence[tuple[int, int]],
    wrt: int = -1,
) -> None:
    """
    Runs a program on the host over fp32 values: its value (wrt -1), or its derivative with respect to the input (0) or operand wrt - 1. Pointers are integers; an operand is (pointer, stride 0 or 1).
    """

def finalize_partials(
    stream: int, partials: int, tiles: int, rows: int, reduction: int, count: int, out: int, out_dtype: int
) -> None:
    """
    Folds fp32 partial states [tiles, rows] (pairs for logsumexp) to out [rows]; the mean divides by count.
    """

def gemm(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: int,
    b: int,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Launches a candidate. Pointers and the stream are integers; 0 for no bias, and for whichever of d and partials the kernel does not write.
    """

def gemm_candidates(problem: GemmProblem) -> list[GemmCandidate]:
    """
    Every kernel of the table: the runnable ones first, by predicted time.
    """

def gemm_convert(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: tuple[int, int],
    b: tuple[int, int, int, int, int],
    slices: tuple[int, int],
    guard: collections.abc.Sequence[tuple[int, int]],
    run: int,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Like gemm_planes, with b in fp32: its address, row pitch and columns, and address and number of the flags that converting it leaves (0 for none).
    """

def gemm_planes(
    stream: int,
    problem: GemmProblem,
    candidate: GemmCandidate,
    a: tuple[int, int],
    b: tuple[int, int],
    slices: tuple[int, int],
    guard: collections.abc.Sequence[tuple[int, int]],
    run: int,
    bias: int,
    d: int,
    partials: int,
    program: Program,
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
) -> None:
    """
    Launches a candidate over planes: a and b are addresses of values and scales, slices those of the sums (a tile's elements in fp32 for each slice of each tile) and the arrivals (int32 for each tile, zero when the product starts: split clears them) of a candidate with slices of K, guard up to two pairs of flags and their number, run 0 (always), 1 (if the guard is clear) or 2 (if it trips).
    """

def limits() -> dict[str, int]:
    """
    The most instructions, operands and slots that a program has.
    """

def op_table() -> list[OpInfo]:
    """
    The rows of ops.def, in the order of their codes.
    """

def planes_shape(
    rows: int, columns: int, plan: int, transposed: bool, is_weight: bool
) -> tuple[int, int, int, int, int, int]:
    """
    (pitch, scale_pitch, flag_count, bytes of values, of scales, of flags) of a matrix split by plan 3 or 6; transposed: its column stride is not 1; is_weight: it is a product's second operand.
    """

def pointwise(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    out: int,
    out_dtype: int,
) -> None:
    """
    out = program(x, operands) over (outer, rows, columns); out is contiguous. A tensor is (pointer, dtype, outer, row and column stride in elements).
    """

def pointwise_backward(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    grad: tuple[int, int, int, int, int],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    outputs: collections.abc.Sequence[tuple[int, int, int]],
    column_partials: int,
    reduction: int,
    row_result: int,
    tie_count: int,
) -> None:
    """
    For each output (wrt, pointer, dtype): grad * weight * d program / d input, contiguous. column_partials: fp32 [pointwise_backward_row_blocks, columns] or 0. row_result, tie_count: fp32 [outer, rows] or 0.
    """

def pointwise_backward_row_blocks(rows: int, columns: int) -> int:
    """
    Rows of column partial sums that pointwise_backward writes.
    """

def reduce(
    stream: int,
    program: Program,
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    x: tuple[int, int, int, int, int],
    operands: collections.abc.Sequence[tuple[int, int, int, int, int]],
    reduction: int,
    out: int,
    out_dtype: int,
    workspace: int,
) -> None:
    """
    Reduces program(x, operands) over the middle one of (outer, reduced, inner) to out [outer, inner].
    """

def reduce_workspace(
    extents: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"],
    dtype: int,
    reduction: int,
    multiprocessors: int,
) -> int:
    """
    Bytes of workspace that reduce needs, 0 for none.
    """

def reductions() -> dict[str, int]:
    """
    The number of each reduction.
    """

def split(
    stream: int,
    plan: int,
    is_weight: bool,
    source: int,
    rows: int,
    columns: int,
    row_stride: int,
    column_stride: int,
    values: int,
    scales: int,
    flags: int,
    guard: collections.abc.Sequence[tuple[int, int]] | None = None,
    cleared: tuple[int, int] = (0, 0),
) -> None:
    """
    Splits an fp32 matrix to planes, which are 128-byte aligned. guard: None, or at most two (flags, count) of split3's planes: nothing is written unless a flag says that it would lose accuracy. cleared: address and number of words that are set to zero.
    """

def split_microseconds(rows: int, columns: int) -> float:
    """
    What splitting a matrix into planes takes, predicted.
    """

def split_reference(source: int, rows: int, columns: int, plan: int, is_weight: bool, values: int, scales: int) -> int:
    """
    What split does, on the host: splits a contiguous fp32 matrix to values [pitch / 64, 2 or 3, rows, 64] of 16 bits and scales [pitch / 64, scale_pitch], and returns the flags, for the matrix as a whole.
    """

def unfused_microseconds(problem: GemmProblem) -> float:
    """
    What cuBLAS and one pointwise or reduction kernel after it would take, predicted.
    """

cuda_build: bool
