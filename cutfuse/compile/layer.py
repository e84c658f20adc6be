"""The operator that stands in a graph for a linear layer and what follows it.

It is a composite: AOTAutograd traces through it, to the operators that compute it and to their gradients. It is an
operator of the dispatcher, because PyTorch keeps no compiled code on disk of graphs with functions that it does not
know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import arguments, routing
from ..epilogue import Epilogue
from ..epilogue.program import arithmetic_dtype
from ..gradients.elementwise import needs_gradient
from ..linear import LinearCall, autocast_inputs, run_linear, to_matrix
from ..matrix_vector import find_matrix_vector
from ..ops import schema
from ..precision import captured_mode
from .trained_layer import PassedLayer, TrainedLayer, why_kept

DIFFERENTIATED = "torch.compile differentiates it, and fuses it with the operations around it"


def layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    keepdim: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """`reduction(program(x @ weight.T + bias, operands))` for x `[..., K]`, with operands against `[..., N]`."""
    x, weight, bias = autocast_inputs(x, weight, bias)
    composed_because = arguments.why_composed(x, arithmetic_dtype(x, operands))
    leading, columns = x.shape[:-1], weight.shape[0]
    matrices = [to_matrix(index, operand, leading, columns) for index, operand in enumerate(operands)]
    if not composed_because:
        matrices = [arguments.to_kernel_dtype(operand) for operand in matrices]
    epilogue = Epilogue.from_text(program)
    call = LinearCall(
        x=x if x.dim() == 2 else x.reshape(arguments.rows_of(x), x.shape[-1]),
        weight=weight,
        bias=bias,
        operands=matrices,
        epilogue=epilogue,
        reduction=reduction,
        out_dtype=out_dtype,
        composed_because=composed_because,
        operation=None,
        matrix_vector=find_matrix_vector(epilogue, None if reduction == "none" else reduction, matrices, columns),
        prepared=None,
    )
    last = (columns,) if reduction == "none" else (1,) * keepdim
    return _shaped(_run(call), (*leading, *last))


def _shaped(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result in another shape, and no view: autograd refuses to write to one that was made without gradients."""
    return y if len(shape) == y.dim() else torch.ops.aten._unsafe_view(y.contiguous(), shape)


def _run(call: LinearCall) -> Tensor:
    if call.composed_because or not needs_gradient(call.x, call.weight, call.bias, *call.operands):
        return run_linear(call)
    if call.reduction == "none" and not call.epilogue.program.instructions and call.out_dtype == call.x.dtype:
        return _applied(_Product, call.x, call.weight, call.bias)
    inputs = call.x, call.weight, call.bias, *call.operands
    if not why_kept(call.x.dtype, call.reduction, call.epilogue, call.operands):
        return _applied(TrainedLayer, call.epilogue.text, call.out_dtype, *inputs)
    if call.x.element_size() == 2 and call.reduction == "none":
        return _applied(PassedLayer, call.epilogue.text, call.out_dtype, *inputs)
    if call.matrix_vector is not None and not routing.everywhere:
        call = call._replace(composed_because=DIFFERENTIATED)
    return run_linear(call)


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    y: Tensor = function.apply(*arguments)
    return y


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias` with our products forwards and backwards.

    The bias's gradient is PyTorch's own sum, which Inductor computes together with what the gradient comes from.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mode = captured_mode()
        return schema.linear(x, weight, bias, [], schema.IDENTITY, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            schema.product(grad, weight.t(), ctx.mode) if needs_x else None,
            schema.product(grad.t(), x.t(), ctx.mode) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
