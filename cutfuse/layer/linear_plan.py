"""Plans linear layers, explains the plans, and has PyTorch multiply in the precision that was asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..invariance import refusal
from ..native import address_of
from ..precision import SPLIT_MODES, allows_tf32, autocast_dtype, product_mode
from .layouts import NOT_CUDA, caution_of, device_facts, dtype_codes
from .planner import LinearArguments, decisive, first_scheme, plan_linear, precision_of, why_no_kernels
from .prepared import Planes
from .specialize import Matrix, explain_epilogues, explain_pass, find_epilogues

if TYPE_CHECKING:
    from .._C import Alternative, LinearPlan

SPLITS_ON_ITS_WAY = "the kernel of the product splits the weight itself"
KEEPS = "cutfuse.prepare has split the weight, and keeps its planes"

_SETTING = threading.Lock()


def plan_call(arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = "") -> LinearPlan:
    """The plan of a call. `kept`: the planes of a prepared weight, which the plan may or may not read."""
    precision = precision_of(arguments, captured_mode)
    has_planes = kept is not None and precision in SPLIT_MODES and kept.scheme == first_scheme(precision)
    return plan_linear(arguments, precision, has_planes)


def matrices_of(arguments: LinearArguments) -> list[Matrix]:
    """The operands as the native module takes them."""
    m, n = arguments.x.shape[0], arguments.weight.shape[0]
    codes = dtype_codes()
    return [(address_of(t), codes[t.dtype], 0, *operand_strides(t, m, n)) for t in arguments.operands]


def operand_strides(operand: Tensor, m: int, n: int) -> tuple[int, int]:
    """The strides of rows and columns. A stride is 0 where the operand is broadcast to `[m, n]`."""
    rows, columns = operand.shape
    if rows not in (1, m) or columns not in (1, n):
        raise ValueError(f"cutfuse: an operand of shape {(rows, columns)} does not broadcast against {(m, n)}")
    row_stride = operand.stride(0) if rows == m and m > 1 else 0
    column_stride = operand.stride(1) if columns == n and n > 1 else 0
    return row_stride, column_stride


def cublas_linear(x: Tensor, weight: Tensor, bias: Tensor | None, captured_mode: str = "") -> Tensor:
    """`x @ weight.T + bias` by PyTorch, for x `[..., K]`, as the product of a matrix, which is rounded once.

    A product of fp32 matrices has the precision that the caller has asked for.
    """
    if x.dim() > 2:
        z: Tensor = cublas_linear(x.flatten(0, -2), weight, bias, captured_mode).unflatten(0, x.shape[:-1])
        return z
    if not multiplies_otherwise(x, captured_mode):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        if not changes_setting(x, captured_mode):
            return F.linear(x, weight, bias)
        with _tf32_allowed(not allows_tf32()):
            return F.linear(x, weight, bias)


def multiplies_otherwise(x: Tensor, captured_mode: str = "") -> bool:
    """Whether `F.linear` would not multiply x in its type and in the precision that was asked for."""
    is_cast = x.dtype == torch.float32 and autocast_dtype(x.device.type) is not None  # in a backward pass
    return is_cast or changes_setting(x, captured_mode)


def changes_setting(x: Tensor, captured_mode: str = "") -> bool:
    """Whether PyTorch's own setting has to be changed for it to multiply x in the precision that was asked for."""
    return x.dtype == torch.float32 and (product_mode(captured_mode) == "tf32") != allows_tf32()


@contextlib.contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    """Changes PyTorch's setting, which holds for the whole process, until one product is launched."""
    settings = torch.backends.cuda.matmul
    with _SETTING:
        if not hasattr(settings, "fp32_precision"):  # torch 2.8
            before, settings.allow_tf32 = torch.get_float32_matmul_precision(), allowed
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)  # setting allow_tf32 back would turn "medium" into "high"
            return
        before, settings.fp32_precision = settings.fp32_precision, "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = "none"  # inherits the general setting, which may be `before` already
            if settings.fp32_precision != before:
                settings.fp32_precision = before


class FusedExplanation(NamedTuple):
    """What a fused call would run (nothing where it would not be fused), why, what it allocates beside its result in
    bytes, and what it has compiled. cublas: the plan's other way, where that runs because it is predicted faster."""

    steps: list[str]
    reasons: list[str]
    workspace_bytes: int = 0
    compiles: str = ""
    cublas: Alternative | None = None


def _rejections(plan: LinearPlan) -> list[str]:
    return sorted({f"{kernel.name}: {kernel.rejection}" for kernel in decisive(plan.alternatives[:-1])})


def require_kernel(plan: LinearPlan, arguments: LinearArguments) -> None:
    """Raises where cuBLAS would multiply rows whose bits are not to depend on how many there are."""
    if arguments.batch_invariant and not plan.is_fused:
        raise NotImplementedError(refusal(plan.ruled_out or "; ".join(_rejections(plan))))


def explain_fused(arguments: LinearArguments, kept: Planes | None = None) -> FusedExplanation:
    device = arguments.x.device
    if device_facts(device) == NOT_CUDA:
        reason = why_no_kernels(device)
        return FusedExplanation([], [reason], compiles=f"nothing: {reason}")
    plan = plan_call(arguments, kept)
    compiles = _explain_compiled(plan, device.index or 0, arguments)
    *kernels, cublas = plan.alternatives
    runnable = [kernel for kernel in kernels if not kernel.rejection]
    if plan.ruled_out:
        return FusedExplanation([], [plan.ruled_out], compiles=compiles)
    if not runnable:
        return FusedExplanation([], _rejections(plan), compiles=compiles)
    is_split = any(isinstance(launch, native.core.SplitPass) for launch in plan.launches)
    is_at_own_accuracy = precision_of(arguments) in SPLIT_MODES
    explain = _explain_planes if is_split or (is_at_own_accuracy and not plan.is_fused) else _explain_direct
    steps, reasons = explain(plan, runnable, cublas)
    caution = caution_of(device)
    reasons += [caution] if caution else []
    if not steps:
        return FusedExplanation(steps, reasons, compiles=compiles, cublas=cublas)
    return FusedExplanation(steps, reasons, plan.workspace_bytes, compiles)


def _explain_compiled(plan: LinearPlan, device: int, arguments: LinearArguments) -> str:
    """What the kernels of the product have compiled, or that of the pass behind it."""
    program, operands = arguments.program, matrices_of(arguments)
    if plan.is_fused:
        return explain_epilogues(plan, device, program, operands)
    return explain_pass(program, arguments.reduction != "none", lambda: find_epilogues(plan, device, program, operands))


def _explain_direct(plan: LinearPlan, runnable: list[Alternative], cublas: Alternative) -> tuple[list[str], list[str]]:
    best, *others = runnable[:4]
    if not plan.is_fused:
        return [], [rejected(way) for way in (best, *others)]
    (kernel,) = (launch.kernel for launch in plan.launches if isinstance(launch, native.core.FusedProduct))
    order = "M" if kernel.raster_along_m else "N"
    swizzle = "" if kernel.swizzle == 1 else f", swizzle {kernel.swizzle}"
    copies = _copies(plan)
    with_copies = ", with the copies" if copies else ""
    step = f"{kernel.name}, tiles along {order} first{swizzle}{with_copies}: {predicted(best)}"
    reasons = [cublas.rejection] if cublas.rejection else []
    of_cublas = rejected(cublas)
    if not cublas.rejection and cublas.microseconds < best.microseconds:
        of_cublas += f", but the host would take longer to launch {'them' if 'one more' in cublas.name else 'it'}"
    return [step, *copies], [*reasons, of_cublas, *map(rejected, others)]


def _copies(plan: LinearPlan) -> list[str]:
    """What a fused plan copies because the copy engine needs lines that begin at multiples of 16 bytes."""
    found = ["the bias is copied first"] if plan.copies_bias else []
    for copy in plan.launches:
        if isinstance(copy, native.core.AlignedCopy):
            size = f"{copy.lines} lines of {copy.length} elements, {copy.aligned.bytes / 1e6:.1f} MB"
            if copy.matrix == native.core.CopiedMatrix.result:
                found.append(f"the result, {size}, is stored {copy.from_pitch} elements apart and copied")
            else:
                found.append(f"{copy.matrix.name}, {size}, is copied first, to {copy.to_pitch} elements apart")
    return found


def _explain_planes(plan: LinearPlan, runnable: list[Alternative], cublas: Alternative) -> tuple[list[str], list[str]]:
    best = runnable[0]
    if not plan.is_fused:
        reasons = [rejected(best)]
        if best.microseconds < cublas.microseconds:
            least = 1 - native.core.plane_advantage
            reasons.append(f"a product of 16-bit parts has to be predicted at least {least:.0%} faster than cuBLAS")
        return [], reasons
    slices = f", {best.slices} slices of K" if best.slices > 1 else ""
    products = [launch for launch in plan.launches if isinstance(launch, native.core.FusedProduct)]
    weights = "a separate kernel splits the weight"
    if plan.reads_weight_planes:
        weights = KEEPS
    elif products[0].weight_flags.bytes:
        weights = SPLITS_ON_ITS_WAY
    others = [
        f"guarded: {product.kernel.name} runs instead where split3 would lose accuracy" for product in products[1:]
    ]
    step = f"{best.name}{slices}, with the kernels that split: {predicted(best)}"
    return [step, weights, *others], [rejected(cublas)]


def predicted(alternative: Alternative) -> str:
    return f"{alternative.microseconds:.1f} us predicted"


def rejected(alternative: Alternative) -> str:
    return f"{alternative.name} would take {alternative.microseconds:.1f} us (predicted)"
