"""The operators on CPU tensors: PyTorch's operations forwards, and the op table's derivatives backwards.

The public functions do not call these on a CPU, but `composed` directly. They exist so that the operators, and the
autograd that is built on them, can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import composed, native
from ..epilogue import Program, evaluate
from ..epilogue.program import arithmetic_dtype
from ..epilogue.table import GRADIENTS
from .planner import composed_joined
from .prepared import check_unchanged


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    *prepared: Any,
) -> Tensor:
    _check_prepared(weight, *prepared)
    parsed = Program.parse(program)
    return composed.linear(x, weight, bias, operands, parsed, reduction, out_dtype).contiguous()


def linear_with_pre_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    *prepared: Any,
) -> tuple[Tensor, Tensor]:
    _check_prepared(weight, *prepared)
    z = torch.nn.functional.linear(x, weight, bias)
    return pointwise(z, operands, program, out_dtype), z


def _check_prepared(weight: Tensor, snapshot: Tensor | None = None, *_: Any) -> None:
    if snapshot is not None:
        check_unchanged(weight, snapshot)


def product(a: Tensor, b: Tensor, mode: str, issuer: str = "call") -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(a, b.t())


def joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return composed_joined(x, weights, biases)


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    y = composed.pointwise(x, operands, Program.parse(program), out_dtype)
    expected = torch.empty_like(x, dtype=out_dtype)
    if y.stride() == expected.stride():
        return y
    copied: Tensor = torch.ops.aten.copy.default(
        expected, y
    )  # and no write, which a program's decomposition may not do
    return copied


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    dims: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    return composed.reduce(x, operands, Program.parse(program), reduction, tuple(dims), out_dtype).contiguous()


def pointwise_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: Sequence[int],
    sums_columns: bool,
) -> list[Tensor]:
    dtype = arithmetic_dtype(x, operands)
    tensors = (x, *operands)
    inputs = [t.to(dtype).expand(x.shape).contiguous() for t in tensors]
    indices = dict.fromkeys((*wanted, 0) if sums_columns else wanted)
    differentiate = _differentiate_double if dtype == torch.float64 else _differentiate
    weight = grad.to(dtype)
    if result is not None:
        weight = weight * _reduction_weight(Program.parse(program), inputs, reduction, result)
    weight = weight.expand(x.shape)
    gradients = dict(zip(indices, differentiate(Program.parse(program), inputs, list(indices), weight), strict=True))
    outputs = []
    for k in wanted:
        gradient = gradients[k].sum_to_size(tensors[k].shape)
        # the strides that sum_to_size() gives are not defined; the kernels keep those of x
        outputs.append((torch.empty_like(x) if k == 0 else tensors[k].new_empty(tensors[k].shape)).copy_(gradient))
    if sums_columns:
        outputs.append(gradients[0].flatten(end_dim=-2).sum(0).to(x.dtype))
    return outputs


def _reduction_weight(program: Program, inputs: list[Tensor], reduction: str, result: Tensor) -> Tensor:
    """The factor by which a reduction multiplies the gradient of each element."""
    y = evaluate(program, inputs[0], inputs[1:])
    if GRADIENTS[reduction] == "softmax":
        return torch.exp(y - result)
    ties = y == result
    dims = [d for d in range(y.dim()) if result.shape[d] != y.shape[d]]
    return ties / (ties.sum(dims, keepdim=True) if dims else ties)


def _differentiate(program: Program, inputs: list[Tensor], indices: list[int], weight: Tensor) -> list[Tensor]:
    """The gradients of the program's inputs, in fp32, by the formulas that the kernels use too.

    weight: the gradient of the program's result.
    """
    operands = [(t.data_ptr(), 1) for t in inputs[1:]]
    derivatives = [torch.empty_like(inputs[0]) for _ in indices]
    for k, derivative in zip(indices, derivatives, strict=True):
        native.core.evaluate(
            program.native, inputs[0].data_ptr(), derivative.data_ptr(), derivative.numel(), operands, k
        )
    # -0 is the derivative of what a mask such as relu's hides: 0, also of an infinite gradient
    return [torch.where((d == 0) & d.signbit(), 0, weight * d) for d in derivatives]


def _differentiate_double(program: Program, inputs: list[Tensor], indices: list[int], weight: Tensor) -> list[Tensor]:
    """The same in fp64, by PyTorch's autograd: the native evaluator supports fp32 only."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = evaluate(program, leaves[0], leaves[1:])
    wanted = [leaves[k] for k in indices]
    if not y.requires_grad:  # every op is a comparison
        return [torch.zeros_like(leaf) for leaf in wanted]
    return list(torch.autograd.grad(y, wanted, weight, allow_unused=True, materialize_grads=True))
