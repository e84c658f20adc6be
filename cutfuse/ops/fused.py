"""Which fused product takes a linear layer: by type, and for fp32 by the precision that is asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..epilogue import Program
from ..precision import allows_tf32, autocast_dtype, product_mode
from . import gemm, split
from .gemm import HOPPER, capability

_SETTING = threading.Lock()


def run_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: Program,
    reduction: str,
    out_dtype: torch.dtype,
    captured_mode: str = "",
    b_is_weight: bool = True,
) -> Tensor | None:
    """`reduce(program(x @ weight.T + bias, operands))`, fused; None where cuBLAS is to multiply.

    x `[M, K]`, weight `[N, K]`, none of them empty; the result is `[M, N]`, or `[M]` with a reduction.
    """
    if x.dtype != torch.float32:
        return gemm.run_gemm(x, weight, bias, operands, program, reduction, out_dtype)
    mode = product_mode(captured_mode or None)
    if mode == "tf32":
        return gemm.run_gemm(x, weight, bias, operands, program, reduction, out_dtype)
    if why_not_split(x, mode, out_dtype):
        return None
    return split.run_split(x, weight, bias, operands, program, reduction, mode, b_is_weight)


def explain_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: Program,
    reduction: str,
    out_dtype: torch.dtype,
) -> tuple[str | None, list[str]]:
    """The kernel and configuration that `run_fused` would launch (None for none), and the reasons."""
    mode = product_mode() if x.dtype == torch.float32 else "tf32"
    if mode == "tf32":
        return gemm.explain_gemm(x, weight, bias, operands, program, reduction, out_dtype)
    reason = why_not_split(x, mode, out_dtype)
    return (None, [reason]) if reason else split.explain_split(x, weight, program, reduction, mode)


def why_not_split(x: Tensor, mode: str, out_dtype: torch.dtype) -> str:
    """Why an fp32 product runs through cuBLAS, whatever its sizes; empty where planes may be multiplied."""
    if mode == "ieee":
        return 'float32 products run through cuBLAS in precision "ieee"'
    if x.device.type != "cuda":
        return f"fused products run on CUDA devices, not on {x.device.type}"
    if capability(x.device.index) != HOPPER:
        major, minor = capability(x.device.index)
        return f"fused products need compute capability 9.0, this device has {major}.{minor}"
    return "" if out_dtype == torch.float32 else f"products over planes give float32, not {out_dtype}"


def cublas_linear(x: Tensor, weight: Tensor, bias: Tensor | None, captured_mode: str = "") -> Tensor:
    """`x @ weight.T + bias` by PyTorch, in the precision that is asked for where the product is one of fp32."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if autocast_dtype(x.device.type) is not None:  # a backward pass under autocast of a forward outside of it
        with torch.autocast(x.device.type, enabled=False):
            return cublas_linear(x, weight, bias, captured_mode)
    wants_tf32 = product_mode(captured_mode or None) == "tf32"
    if wants_tf32 == allows_tf32():
        return F.linear(x, weight, bias)
    with _tf32_allowed(wants_tf32):
        return F.linear(x, weight, bias)


@contextlib.contextmanager
def _tf32_allowed(allowed: bool) -> Iterator[None]:
    """PyTorch's own setting, which is the process's, changed for as long as one product takes to launch."""
    settings = torch.backends.cuda.matmul
    with _SETTING:
        if not hasattr(settings, "fp32_precision"):  # torch 2.8
            before, settings.allow_tf32 = settings.allow_tf32, allowed
            try:
                yield
            finally:
                settings.allow_tf32 = before
            return
        before, settings.fp32_precision = settings.fp32_precision, "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = "none"  # what it inherits, which may be what it was
            if settings.fp32_precision != before:
                settings.fp32_precision = before
