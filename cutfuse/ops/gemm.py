"""The fused matrix product: which kernel takes a problem, and its launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from .device import capability, dtype_codes, multiprocessors, on_device, reduction_codes, stream_of

if TYPE_CHECKING:
    from .._C import GemmCandidate, GemmProblem
    from .._C import Program as NativeProgram

HOPPER = (9, 0)
DIRECT = 0  # operands are multiplied as they are; otherwise the plan of their planes
ALIGNMENT = 16  # bytes; the tensor memory accelerator's
# How much faster cuBLAS and one more kernel have to be predicted before they are chosen: below the predictions' own
# error of 7% one launch and no matrix in between is the better choice.
UNFUSED_ADVANTAGE = 1.05

Matrix = tuple[int, int, int, int, int]  # address, type and strides, as the binding takes them
EpilogueArguments: TypeAlias = "tuple[int, int, int, NativeProgram, list[Matrix]]"


class Plan(NamedTuple):
    """The kernels that take a problem, fastest first by prediction, and the alternative."""

    problem: GemmProblem
    candidates: tuple[GemmCandidate, ...]  # runnable ones only
    rejections: tuple[str, ...]
    unfused_microseconds: float
    reduces: bool

    @property
    def chosen(self) -> GemmCandidate | None:
        """The candidate to launch, or None where cuBLAS and one more kernel are predicted to be faster.

        A row reduction is always fused where a kernel takes it: the matrix that it reduces is never allocated.
        """
        if not self.candidates:
            return None
        best = self.candidates[0]
        takes_it = self.reduces or best.microseconds <= UNFUSED_ADVANTAGE * self.unfused_microseconds
        return best if takes_it else None


class Result(NamedTuple):
    """`reduce(program(x @ weight.T + bias, operands))`: x `[M, K]` and weight `[N, K]`, none of them empty.

    `reduction` is "none" or a reduction's name; the result is `[M, N]`, or `[M]` with a reduction.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: Sequence[Tensor]
    program: Program
    reduction: str
    out_dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.weight.shape[0]

    @property
    def reduces(self) -> bool:
        return self.reduction != "none"

    def allocate(self, tile_n: int) -> tuple[Tensor, Tensor | None]:
        """The result `[M, N]`, or `[M]` and the partial states that it is folded from."""
        (m, n), device = self.shape, self.x.device
        y = torch.empty((m,) if self.reduces else (m, n), dtype=self.out_dtype, device=device)
        if not self.reduces:
            return y, None
        width = 2 if self.reduction == "logsumexp" else 1
        return y, torch.empty((-(-n // tile_n), m, width), dtype=torch.float32, device=device)

    def epilogue_arguments(self, y: Tensor, partials: Tensor | None) -> EpilogueArguments:
        """As the binding takes them, after the operands of the product."""
        m, n = self.shape
        return (
            0 if self.bias is None else self.bias.data_ptr(),
            0 if self.reduces else y.data_ptr(),
            0 if partials is None else partials.data_ptr(),
            self.program.native,
            [_operand(t, m, n) for t in self.operands],
        )

    def finalize(self, y: Tensor, partials: Tensor | None) -> None:
        """Folds the partial states of a row reduction by a second, small kernel."""
        if partials is None:
            return
        (m, n), index = self.shape, self.x.device.index
        code, output = reduction_codes()[self.reduction], dtype_codes()[self.out_dtype]
        with on_device(index):
            native.core.finalize_partials(
                stream_of(index), partials.data_ptr(), partials.shape[0], m, code, n, y.data_ptr(), output
            )


def run_gemm(result: Result) -> Tensor | None:
    """The result by one kernel that takes the operands as they are; None where none is to run."""
    if why_not(result.x, result.weight, result.bias):
        return None
    plan = plan_gemm(result)
    return None if plan.chosen is None else launch(plan, plan.chosen, result)


def explain_gemm(result: Result) -> tuple[str | None, list[str]]:
    """The kernel and configuration that `run_gemm` would launch (None for none), and why others were rejected."""
    reason = why_not(result.x, result.weight, result.bias)
    if reason:
        return None, [reason]
    plan = plan_gemm(result)
    unfused = f"cuBLAS and one more kernel: {plan.unfused_microseconds:.1f} us predicted"
    if not plan.candidates:
        return None, sorted(set(plan.rejections))
    best, *others = plan.candidates
    predicted = [f"{c.name}: {c.microseconds:.1f} us predicted" for c in others[:3]]
    if plan.chosen is None:
        return None, [unfused, f"{best.name}: {best.microseconds:.1f} us predicted", *predicted]
    order = "M" if best.raster_along_m else "N"
    name = f"{best.name}, tiles along {order} first, swizzle {best.swizzle}: {best.microseconds:.1f} us predicted"
    always = ["a row reduction is always fused: the matrix that it reduces is never allocated"] if plan.reduces else []
    return name, [*always, unfused, *predicted]


def why_not_hopper(x: Tensor) -> str:
    """Why no fused kernel runs where x is; empty on sm_90."""
    if x.device.type != "cuda":
        return f"fused products run on CUDA devices, not on {x.device.type}"
    if capability(x.device.index) != HOPPER:
        major, minor = capability(x.device.index)
        return f"fused products need compute capability 9.0, this device has {major}.{minor}"
    return ""


def why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Why no fused kernel takes these tensors, whatever their sizes; empty where one may."""
    elsewhere = why_not_hopper(x)
    if elsewhere:
        return elsewhere
    tensor: Tensor | None
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.stride(1) != 1 and tensor.shape[1] != 1:
            return f"{name} has strides {tensor.stride()}: its rows are not contiguous"
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.data_ptr() % ALIGNMENT:
            return f"{name} does not start at a multiple of {ALIGNMENT} bytes"
    if bias is not None and bias.stride(0) != 1 and bias.shape[0] != 1:
        return f"bias has stride {bias.stride(0)}: it is not contiguous"
    return ""


def plan_gemm(result: Result) -> Plan:
    """The plan for operands as they are; cached by everything that it depends on."""
    x, weight = result.x, result.weight
    m, k = x.shape
    n = weight.shape[0]
    lda = x.stride(0) if m > 1 else k
    ldb = weight.stride(0) if n > 1 else k
    count = multiprocessors(x.device.index)
    cost = result.program.native.cost
    return _plan(m, n, k, lda, ldb, x.dtype, result.out_dtype, result.reduction, count, cost, DIRECT)


def plan_planes(
    shape: tuple[int, int, int],
    weight_pitch: int,
    reduction: str,
    multiprocessor_count: int,
    epilogue_cost: float,
    product: int,
) -> Plan:
    """The plan for a product M, N, K over planes of K elements a row; `weight_pitch` is another where it has none."""
    m, n, k = shape
    fp32 = torch.float32
    return _plan(m, n, k, k, weight_pitch, fp32, fp32, reduction, multiprocessor_count, epilogue_cost, product)


@functools.lru_cache(maxsize=4096)
def _plan(
    m: int,
    n: int,
    k: int,
    lda: int,
    ldb: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    reduction: str,
    multiprocessor_count: int,
    epilogue_cost: float,
    product: int,
) -> Plan:
    codes = dtype_codes()
    problem = native.core.GemmProblem(
        m=m,
        n=n,
        k=k,
        lda=lda,
        ldb=ldb,
        input=codes[dtype],
        output=codes[out_dtype],
        reduction=reduction_codes()[reduction],
        multiprocessors=multiprocessor_count,
        epilogue_cost=epilogue_cost,
        product=product,
    )
    candidates = native.core.gemm_candidates(problem)
    of_kind = [c for c in candidates if c.is_of_kind]
    return Plan(
        problem,
        tuple(c for c in candidates if not c.rejection),
        tuple(f"{c.name}: {c.rejection}" for c in of_kind or candidates if c.rejection),
        native.core.unfused_microseconds(problem),
        reduction != "none",
    )


def launch(plan: Plan, candidate: GemmCandidate, result: Result) -> Tensor:
    """Runs one candidate of a plan."""
    y, partials = result.allocate(candidate.tile_n)
    index = result.x.device.index
    with on_device(index):
        native.core.gemm(
            stream_of(index),
            plan.problem,
            candidate,
            result.x.data_ptr(),
            result.weight.data_ptr(),
            *result.epilogue_arguments(y, partials),
        )
    result.finalize(y, partials)
    return y


def _operand(tensor: Tensor, m: int, n: int) -> Matrix:
    """Address, type and strides, 0 where the operand is broadcast."""
    rows, columns = tensor.shape
    if rows not in (1, m) or columns not in (1, n):
        raise ValueError(f"cutfuse: an operand of shape {(rows, columns)} does not broadcast against {(m, n)}")
    row_stride = tensor.stride(0) if rows == m and m > 1 else 0
    column_stride = tensor.stride(1) if columns == n and n > 1 else 0
    return tensor.data_ptr(), dtype_codes()[tensor.dtype], 0, row_stride, column_stride
