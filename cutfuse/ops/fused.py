"""Which fused product takes a linear layer: by type, and for fp32 by the precision that is asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import allows_tf32, autocast_dtype, product_mode
from . import gemm, split
from .gemm import Result
from .planes import Planes

_SETTING = threading.Lock()


def run_fused(result: Result, captured_mode: str = "", kept: Planes | None = None) -> Tensor | None:
    """The result with the product in one kernel; None where cuBLAS is to multiply. `kept`: the weight's planes."""
    mode = _mode(result, captured_mode)
    if mode == "tf32":
        return gemm.run_gemm(result)
    return None if why_not_split(result, mode) else split.run_split(result, mode, kept)


def explain_fused(result: Result, kept: Planes | None = None) -> tuple[str | None, list[str]]:
    """The kernel and configuration that `run_fused` would launch (None for none), and the reasons."""
    mode = _mode(result)
    if mode == "tf32":
        return gemm.explain_gemm(result)
    reason = why_not_split(result, mode)
    return (None, [reason]) if reason else split.explain_split(result, mode, kept)


def _mode(result: Result, captured_mode: str = "") -> str:
    """How to multiply: kernels for tf32 take 16-bit operands as they take fp32."""
    return product_mode(captured_mode) if result.x.dtype == torch.float32 else "tf32"


def why_not_split(result: Result, mode: str) -> str:
    """Why an fp32 product runs through cuBLAS, whatever its sizes; empty where planes may be multiplied."""
    if mode == "ieee":
        return 'float32 products run through cuBLAS in precision "ieee"'
    elsewhere = gemm.why_not_hopper(result.x)
    if elsewhere or result.out_dtype == torch.float32:
        return elsewhere
    return f"products over planes give float32, not {result.out_dtype}"


def cublas_linear(x: Tensor, weight: Tensor, bias: Tensor | None, captured_mode: str = "") -> Tensor:
    """`x @ weight.T + bias` by PyTorch, in the precision that is asked for where the product is one of fp32."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if autocast_dtype(x.device.type) is not None:  # a backward pass under autocast of a forward outside of it
        with torch.autocast(x.device.type, enabled=False):
            return cublas_linear(x, weight, bias, captured_mode)
    wants_tf32 = product_mode(captured_mode) == "tf32"
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
            before, settings.allow_tf32 = torch.get_float32_matmul_precision(), allowed
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)  # allow_tf32 would make "high" of "medium"
            return
        before, settings.fp32_precision = settings.fp32_precision, "tf32" if allowed else "ieee"
        try:
            yield
        finally:
            settings.fp32_precision = "none"  # what it inherits, which may be what it was
            if settings.fp32_precision != before:
                settings.fp32_precision = before
