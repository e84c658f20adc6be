"""Finds layers that PyTorch computes faster: a product by cuBLAS, and one of PyTorch's operations behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import native
from .arguments import KERNEL_DTYPES
from .epilogue.program import Operation
from .layer.autograd import needs_gradient
from .layer.linear_plan import plan_call
from .layer.planner import LinearArguments
from .layer.training import adds_bias_apart, multiplies_at_once
from .layer.training_step import takes_few_launches, waits_for_host
from .precision import autocast_dtype

TRAINED = "PyTorch's own operations take less host time to train a layer with one operation behind the product"
BEHIND_CUBLAS = "behind cuBLAS's product, PyTorch's own kernel of this one operation is faster than our interpreter"


def find_pytorch_operation(
    arguments: LinearArguments, given_x: Tensor, given_operands: Sequence[Tensor]
) -> tuple[Operation, str] | None:
    """The operation behind a layer's product, with the reason, if PyTorch computes it faster than our kernels do.

    The operation runs on x `[..., K]` and the operands as the caller has given them.
    """
    x, _, _, operands, program, reduction, out_dtype, *_ = arguments
    if x.dtype not in KERNEL_DTYPES or out_dtype != x.dtype or reduction != "none" or native.operators_everywhere:
        return None
    if any(t.dtype != x.dtype for t in operands):
        return None
    operation = program.operation
    if operation is None or autocast_dtype(x.device.type) is not None:
        return None
    if not _gives_rows(operation, given_x.dim(), given_operands):
        return None
    reason = _why(arguments, operation, given_x, given_operands)
    return (operation, reason) if reason else None


def _why(arguments: LinearArguments, operation: Operation, given_x: Tensor, given_operands: Sequence[Tensor]) -> str:
    """Why PyTorch computes the operation; empty if a kernel of cutfuse does.

    In training, our kernel also sums the bias's gradient. Where kernels of ours do not compute the products too,
    PyTorch is faster if the host takes longer than the device, or if the operation passes its gradient on unchanged,
    because then that sum is all that our kernel would compute.
    """
    x, weight, bias, operands, *_ = arguments
    (m, k), n = x.shape, weight.shape[0]
    has_sizes = all([isinstance(size, int) for size in (m, n, k)])  # not while torch.compile traces symbolic sizes
    is_fp32 = x.dtype == torch.float32
    if not needs_gradient(x, weight, bias, *operands):
        return BEHIND_CUBLAS if has_sizes and not is_fp32 and not plan_call(arguments).is_fused else ""
    if not (operation.hands_gradient_on or waits_for_host(m, weight)):
        return ""
    keeps_no_more = operation.keeps_values or arguments.program.is_sum
    # On the general path Python costs more than our kernels gain.
    shape = (*given_x.shape[:-1], n)
    may_train_directly = not adds_bias_apart(given_x, bias) and all(
        [operand.shape == shape for operand in given_operands if operand.requires_grad]
    )
    if may_train_directly and keeps_no_more and takes_few_launches(arguments):
        return ""
    return TRAINED if not is_fp32 or (has_sizes and multiplies_at_once(arguments)) else ""


def _gives_rows(operation: Operation, dimensions: int, operands: Sequence[Tensor]) -> bool:
    """Whether the operation keeps the shape and memory order of the layer's result, which has that many dimensions."""
    if any(t.dim() > dimensions for t in operands):
        return False
    first = operation.arguments[0]  # PyTorch's result has the memory order of its first argument
    return first == 0 or operands[first - 1].dim() <= 1 or operands[first - 1].is_contiguous()
