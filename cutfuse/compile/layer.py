"""The operators that stand in a graph for a linear layer and what follows it, and how they are differentiated.

They are composites: AOTAutograd traces through them, to the operators that compute them and to their gradients. They
are operators of the dispatcher, because PyTorch keeps no compiled code on disk of graphs with functions that it does
not know.

A trained layer of 16 bits keeps no pre-activation where its backward pass needs none: storing it takes a fused kernel
as long as a pass of its own over it. A residual that is added needs nothing of it, and a relu nothing but the result,
which the next layer keeps anyway. Others are passes of ours behind PyTorch's product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import arguments, composed, native
from ..epilogue import Epilogue, Program
from ..epilogue.program import arithmetic_dtype
from ..head import linear_cross_entropy
from ..layer import schema
from ..layer.autograd import (
    differentiate,
    element_gradients,
    kept_of,
    needs_gradient,
    operand_facts,
    restored,
    wanted_inputs,
    weight_gradient,
)
from ..linear import LinearCall, autocast_inputs, run_linear, to_matrix
from ..matrix_vector import find_matrix_vector
from ..precision import captured_mode

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
    is_pass = bool(why_kept(call.x.dtype, call.reduction, call.epilogue, call.operands))
    if not is_pass or (call.x.element_size() == 2 and call.reduction == "none"):
        return _applied(TrainedLayer, call.epilogue.text, call.out_dtype, is_pass, *inputs)
    if call.matrix_vector is not None and not native.operators_everywhere:
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
        return schema.linear(x, weight, bias, [], schema.IDENTITY, "none", x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            schema.product(grad, weight.t(), ctx.mode) if needs_x else None,
            schema.product(grad.t(), x.t(), ctx.mode) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def layer_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    softcap: float,
    temperature: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """`F.cross_entropy(x @ weight.T + bias, target)` for x `[..., K]` of as many rows as the target `[M]` has items.

    softcap: 0 for none. A plain loss without gradients is made of operations that Inductor fuses; others are
    `cutfuse.linear_cross_entropy`, whose loops over parts of the vocabulary operators hold. In training it keeps the
    logits in x's type, as a compiled model does, so that it multiplies no more often.
    """
    x = x.reshape(target.shape[0], x.shape[-1])
    is_plain = label_smoothing == 0.0 and softcap == 0.0 and temperature == 1.0
    if not is_plain or needs_gradient(x, weight, bias):
        return linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            softcap=softcap or None,
            temperature=temperature,
            kept_bytes=2 * x.element_size() * x.shape[0] * weight.shape[0],  # the last part is kept as a whole one
        ).to(out_dtype)
    x, weight, bias = autocast_inputs(x, weight, bias)
    arithmetic = arithmetic_dtype(x)
    logsumexp = layer(x, weight, bias, [], schema.IDENTITY, "logsumexp", False, arithmetic)
    counts = target != ignore_index
    classes = torch.where(counts, target, 0)
    logits = (x.to(arithmetic) * F.embedding(classes, weight).to(arithmetic)).sum(-1)
    if bias is not None:
        logits = logits + bias[classes].to(arithmetic)
    losses = torch.where(counts, logsumexp - logits, 0.0)
    if reduction == "none":
        return losses.to(out_dtype)
    total = losses.sum()
    return (total / counts.sum() if reduction == "mean" else total).to(out_dtype)


_RELU = "operands=0; relu z"


def why_kept(dtype: torch.dtype, reduction: str, epilogue: Epilogue, operands: Iterable[Tensor]) -> str:
    """Why a trained layer is none of these; empty where it is one. dtype: of the product."""
    if dtype.itemsize != 2:
        return f"its product is of {dtype}"
    if reduction != "none":
        return "its rows are reduced"
    if epilogue.text == _RELU:
        return ""
    if epilogue.affine is None:
        return "its derivative depends on the product"
    trained = {k for k, operand in enumerate(operands) if operand.requires_grad}
    is_factor = trained.intersection(epilogue.affine.slope_operands)
    return "the gradient of a factor depends on the product" if is_factor else ""


class TrainedLayer(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)`, of 16 bits.

    By the operator forwards and by PyTorch's operations backwards, which Inductor fuses with those around them, if the
    program is one of which `why_kept` gives nothing. With `is_pass` by PyTorch's product and a kernel of ours, forwards
    and backwards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        out_dtype: torch.dtype,
        is_pass: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program, ctx.is_pass = program, is_pass
        ctx.operands = operand_facts(Program.parse(program), operands)
        value: Tensor | None  # at which the backward pass differentiates
        if is_pass:
            value = F.linear(x, weight, bias)
            y = schema.pointwise(value, operands, program, out_dtype)
        else:
            y = schema.linear(x, weight, bias, operands, program, "none", out_dtype)
            value = y if program == _RELU else None
        ctx.save_for_backward(x, weight, value, *kept_of(ctx.operands, operands))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, value, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[3:]
        operands = restored(ctx.operands, kept, grad.device, [needed and not ctx.is_pass for needed in needs])
        needed = [needs_x or needs_weight or needs_bias, *needs]
        if ctx.is_pass:
            wanted = wanted_inputs(needed, ctx.program)
            sums_columns = needs_bias and 0 in wanted
            found, of_bias = element_gradients(grad, value, operands, ctx.program, "none", None, wanted, sums_columns)
            grad_z, *rest = map(found.get, range(len(needed)))
        else:
            grad_z, *rest = _differentiate(ctx.program, grad, x.dtype, value, operands, needed)
            of_bias = None if grad_z is None or not needs_bias else grad_z.sum(0)
        return (
            None,
            None,
            None,
            None if grad_z is None or not needs_x else torch.mm(grad_z, weight),
            None if grad_z is None or not needs_weight else weight_gradient(grad_z, x, weight),
            of_bias,
            *rest,
        )


def _differentiate(
    program: str, grad: Tensor, dtype: torch.dtype, y: Tensor | None, operands: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of z, which is of that type, and the operands. y: the result of a relu."""
    parsed = Program.parse(program)
    # The derivative is the same at any z if the program is affine, and of relu at its result.
    z = grad.to(dtype) if y is None else y
    of_z, *rest = differentiate(
        lambda z, *operands: composed.pointwise(z, operands, parsed, grad.dtype),
        (z.detach().requires_grad_(), *operands),
        needed,
        grad,
    )
    return [None if of_z is None else of_z.to(dtype), *rest]  # a relu's result may be of another type
