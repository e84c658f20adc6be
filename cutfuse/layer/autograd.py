"""Gradients of the operators. Used only where a gradient is needed, as an autograd.Function costs 6 us of host time.

The forward pass of a layer keeps the pre-activation, as PyTorch's linear layer followed by an activation does; a fused
kernel stores it beside the result. In the backward pass, one kernel computes all elementwise gradients and the column
sum for the bias. In fp32 at PyTorch's "highest" (mode "guarded"), the products are split products where the planner
expects those to be faster than cuBLAS; cuBLAS computes tf32 products and those of large 16-bit layers, kernels of ours
those of small ones (training_step.py). `cutfuse.precision` forces another mode. Gradients that are batched, or
that are to be differentiated again, are those of PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed, dynamo
from ..epilogue import Program
from ..epilogue.program import arithmetic_dtype
from ..epilogue.table import GRADIENTS, NEEDS_RESULT
from ..invariance import may_be_batch_invariant
from ..native import stands_in_for
from ..precision import SPLIT_MODES, allows_tf32, captured_mode, process, product_mode
from . import inductor, schema
from .fake import sum_dtype
from .layouts import aligned_rows
from .linear_plan import cublas_linear
from .planner import LinearArguments
from .prepared import UNPREPARED, Prepared
from .training_step import hands_gradient_on, is_traced, is_turned_weight, issuer_of_products

# What a layer keeps for its backward pass beside x and the weight.
PRE_ACTIVATION = "pre-activation"  # and bias and operands
INPUTS = "inputs"  # bias and operands, and the backward pass multiplies x by the weight again
NOTHING = "nothing"  # of a layer plus an operand or a number, where the gradient that arrives is all gradients but two


def what_is_kept(arguments: LinearArguments, recompute: bool) -> str:
    """One of these. recompute: the backward pass computes the pre-activation again, where one would be kept."""
    if hands_gradient_on(arguments):
        return NOTHING
    is_pre_activation = arguments.program.text == schema.IDENTITY and arguments.reduction == "none"
    return INPUTS if recompute and not is_pre_activation else PRE_ACTIVATION


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def composes_gradient(grad: Tensor) -> bool:
    """Whether a backward pass has to differentiate PyTorch's own operations.

    That is so with create_graph=True, and if `grad` is batched (is_grads_batched=True, or vmap over a backward pass):
    the operators support neither.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return torch.is_grad_enabled() or functorch.is_legacy_batchedtensor(grad) or functorch.is_batchedtensor(grad)


def differentiate(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """PyTorch's own gradients of `function`. With create_graph=True they can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [t if t is None else t.view_as(t) for t in inputs]  # because one tensor may be two of the inputs
        y = function(*aliases)
    wanted = [t for t, needed in zip(aliases, needs, strict=True) if needed and t is not None]
    if not y.requires_grad:  # every op is a comparison
        return [None] * len(needs)
    found = torch.autograd.grad(y, wanted, grad, create_graph=again, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if needed else None for needed in needs]


@dynamo.assume_constant_result
def _inputs_with_gradient(program: str) -> tuple[int, ...]:
    return tuple(Program.parse(program).inputs_with_gradient)


def wanted_inputs(needs: Sequence[bool], program: str) -> list[int]:
    """Which gradients to compute: 0 for x, k for operand k - 1. Inputs that the result does not depend on have none."""
    reached = _inputs_with_gradient(program)
    return [k for k, needed in enumerate(needs) if needed and k in reached]


def element_gradients(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: list[int],
    sums_columns: bool = False,
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Gradients by index (0 for x, k for operand k - 1), and x's gradient summed over all but the last dimension."""
    if not wanted:
        return {}, None
    if reduction in NEEDS_RESULT:
        outputs = schema.pointwise_backward(grad, x, operands, program, reduction, result, wanted, sums_columns)
    else:
        outputs = schema.pointwise_backward(grad, x, operands, program, "none", None, wanted, sums_columns)
    # Dynamo of PyTorch 2.8 rejects zip() of lists of different lengths even with strict=False.
    return dict(zip(wanted, outputs[: len(wanted)], strict=True)), outputs[-1] if sums_columns else None


class OperandFacts(NamedTuple):
    """Of an operand of a forward pass: whether its backward pass reads the values, and what stands for it otherwise."""

    is_read: bool
    shape: torch.Size
    dtype: torch.dtype


def operand_facts(program: Program, operands: Sequence[Tensor]) -> tuple[OperandFacts, ...]:
    """Those of operands of a program, whose derivatives read none that is added alone; nothing where all are read."""
    read = program.operands_in_derivatives
    if len(read) == len(operands):
        return ()
    return tuple(OperandFacts(k in read, operand.shape, operand.dtype) for k, operand in enumerate(operands))


def facts_in_backward(program: str, reduction: str, operands: Sequence[Tensor]) -> tuple[OperandFacts, ...]:
    """Those of a program whose result is reduced: the gradient of a maximum compares all elements with it.

    Dynamo does not trace what parses a program; what compiled code keeps is for its partitioner to say.
    """
    if torch.compiler.is_compiling() or reduction in NEEDS_RESULT:
        return ()
    return operand_facts(Program.parse(program), operands)


def kept_of(facts: Sequence[OperandFacts], operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """What a backward pass has to keep of the operands."""
    if not facts:
        return operands
    return [operand if fact.is_read else None for operand, fact in zip(operands, facts, strict=True)]


def restored(
    facts: Sequence[OperandFacts], kept: Sequence[Tensor], device: torch.device, trained: Sequence[bool]
) -> list[Tensor]:
    """The operands of a forward pass, with zeros in the place of those that were not kept. trained: which of them have
    a gradient."""
    if not facts:
        return list(kept)
    return [
        operand if fact.is_read else _zeros(fact, device, is_trained)
        for operand, fact, is_trained in zip(kept, facts, trained, strict=True)
    ]


def _zeros(fact: OperandFacts, device: torch.device, is_trained: bool) -> Tensor:
    """By functions that transforms of torch.func, as vmap over a backward pass, have too."""
    with torch.set_grad_enabled(is_trained):
        zero = torch.zeros((), dtype=fact.dtype, device=device, requires_grad=is_trained)
        return zero.expand(fact.shape)


def kept_dtype(x: Tensor, operands: Sequence[Tensor]) -> torch.dtype:
    """The type of a reduction's result whose gradient compares the elements with it: what they are computed in."""
    return sum_dtype(arithmetic_dtype(x, operands))


def _compute_elements(
    x: Tensor, operands: Sequence[Tensor], program: str, reduction: str, dims: tuple[int, ...], out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The result; and a reduction's before it is rounded, where its gradient needs that."""
    if reduction == "none":
        return schema.pointwise(x, operands, program, out_dtype), None
    if reduction not in NEEDS_RESULT:
        return schema.reduce(x, operands, program, reduction, dims, out_dtype), None
    result = schema.reduce(x, operands, program, reduction, dims, kept_dtype(x, operands))
    return result.to(out_dtype, copy=True), result


class Elementwise(torch.autograd.Function):
    """`reduction(program(x, operands))` over `dims`; without the reduction where that is "none"."""

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        reduction: str,
        dims: tuple[int, ...],
        out_dtype: torch.dtype,
        x: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program = program
        ctx.reduction = reduction
        ctx.dims = dims
        ctx.operands = facts_in_backward(program, reduction, operands)
        y, result = _compute_elements(x, operands, program, reduction, dims, out_dtype)
        ctx.save_for_backward(result, x, *kept_of(ctx.operands, operands))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, x, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        operands = restored(ctx.operands, kept, x.device, needs[1:])
        if composes_gradient(grad):
            again = differentiate(_composed_elementwise(ctx, grad.dtype), (x, *operands), needs, grad)
            return (None, None, None, None, *again)
        if ctx.reduction != "none":
            reduced = [1 if d in ctx.dims else size for d, size in enumerate(x.shape)]
            count = 1
            for d in ctx.dims:
                count *= x.shape[d]
            grad = spread(grad.reshape(reduced), ctx.reduction, count)
            result = None if result is None else result.reshape(reduced)
        gradients, _ = element_gradients(
            grad, x, operands, ctx.program, ctx.reduction, result, wanted_inputs(needs, ctx.program)
        )
        return (None, None, None, None, *(gradients.get(k) for k in range(len(needs))))


def _composed_elementwise(forward: Any, out_dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of x and the operands that computes it by PyTorch's own operations."""
    program = Program.parse(forward.program)

    def compute(x: Tensor, *operands: Tensor) -> Tensor:
        if forward.reduction == "none":
            return composed.pointwise(x, operands, program, out_dtype)
        return composed.reduce(x, operands, program, forward.reduction, forward.dims, out_dtype)

    return compute


def spread(grad: Tensor, reduction: str, count: int) -> Tensor:
    """The gradient of each element of a row, before it is multiplied by the reduction's derivative."""
    return grad.to(sum_dtype(grad.dtype)) / count if GRADIENTS[reduction] == "share" else grad


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    if needs_gradient(x, *operands):
        y: Tensor = Elementwise.apply(program, "none", (), out_dtype, x, *operands)
        return y
    return schema.pointwise(x, operands, program, out_dtype)


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    dims: tuple[int, ...],
    out_dtype: torch.dtype,
) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        inductor.register()
    if needs_gradient(x, *operands):
        y: Tensor = Elementwise.apply(program, reduction, dims, out_dtype, x, *operands)
        return y
    return schema.reduce(x, operands, program, reduction, dims, out_dtype)


class Linear(torch.autograd.Function):
    """`program(x @ weight.T + bias, operands)`, its rows reduced where `reduction` is not "none".

    keeps: what is kept for the backward pass, as above.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: str,
        reduction: str,
        out_dtype: torch.dtype,
        keeps: str,
        snapshot: Tensor | None,
        planes: Tensor | None,
        scheme: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *operands: Tensor,
    ) -> Tensor:
        ctx.program = program
        ctx.reduction = reduction
        ctx.keeps = keeps
        ctx.mode = captured_mode()
        prepared = Prepared(snapshot, planes, scheme)
        z: Tensor | None
        result = z = None
        if keeps != PRE_ACTIVATION:  # no gradient is recorded in here
            y = linear(x, weight, bias, operands, program, reduction, out_dtype, prepared)
        elif program != schema.IDENTITY and reduction == "none" and not torch.compiler.is_compiling():
            y, z = schema.linear_with_pre_activation(x, weight, bias, operands, program, out_dtype, *prepared)
        else:
            y = _pre_activation(x, weight, bias, prepared)
            if program != schema.IDENTITY or reduction != "none" or out_dtype != y.dtype:
                z, rows = y, aligned_rows(y) if reduction != "none" and may_be_batch_invariant() else y
                y, result = _compute_elements(rows, operands, program, reduction, (1,), out_dtype)
                result = None if result is None else result.unsqueeze(1)
        if keeps == NOTHING:
            ctx.save_for_backward(x, weight)
            return y
        ctx.operands = facts_in_backward(program, reduction, operands)
        ctx.save_for_backward(result, x, weight, bias, z, *kept_of(ctx.operands, operands))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[7:]
        if ctx.keeps == NOTHING:
            x, weight = ctx.saved_tensors
            of_product = sum_gradients(grad, x, weight, ctx.mode, needed[:3])
            return (*[None] * 7, *of_product, *(grad if is_needed else None for is_needed in needed[3:]))
        result, x, weight, bias, z, *kept = ctx.saved_tensors
        operands = restored(ctx.operands, kept, x.device, needed[3:])
        if ctx.keeps == INPUTS and not composes_gradient(grad):
            z = _pre_activation_again(x, weight, bias, ctx.mode)
            if ctx.reduction in NEEDS_RESULT:  # of this z, whose values the gradient compares with it
                result_dtype = kept_dtype(z, operands)
                result = schema.reduce(z, operands, ctx.program, ctx.reduction, (1,), result_dtype).unsqueeze(1)
        found = linear_gradients(ctx, grad, result, x, weight, bias, z, operands, needed)
        return (*[None] * 7, *found)


def sum_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mode: str, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, of which those are `needed`, where `grad` is that of the pre-activation.

    mode: what the forward pass multiplied fp32 matrices in.
    """
    needs_x, needs_weight, needs_bias = needed
    if composes_gradient(grad):
        of_x, of_weight = differentiate(F.linear, (x, weight), (needs_x, needs_weight), grad)
        return of_x, of_weight, grad.sum(0) if needs_bias else None
    of_x, of_weight = _product_gradients(grad, x, weight, mode, needs_x, needs_weight)
    return of_x, of_weight, sum_of_rows(grad, grad.dtype) if needs_bias else None


def linear_gradients(
    forward: Any,
    grad: Tensor,
    result: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    operands: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias and the operands. `forward` has the forward pass's program, reduction and mode.

    result: the reduction's result, if its gradient needs that. z: the pre-activation; None if y is the pre-activation.
    """
    if composes_gradient(grad):
        function = _composed_linear(forward, grad.dtype)
        return tuple(differentiate(function, (x, weight, bias, *operands), needed, grad))
    needs_x, needs_weight, needs_bias, *needs = needed
    if forward.reduction != "none" and z is not None:
        grad = spread(grad.unsqueeze(1), forward.reduction, z.shape[1])
    if z is None:
        gradients = {0: grad}
        column_sum = sum_of_rows(grad, x.dtype) if needs_bias else None
    else:
        wanted = wanted_inputs([needs_x or needs_weight or needs_bias, *needs], forward.program)
        gradients, column_sum = element_gradients(
            grad, z, operands, forward.program, forward.reduction, result, wanted, needs_bias and 0 in wanted
        )
    grad_z = gradients.get(0)  # None if the result does not depend on z
    of_product: tuple[Tensor | None, ...] = (None, None)
    if grad_z is not None:
        of_product = _product_gradients(grad_z, x, weight, forward.mode, needs_x, needs_weight)
    return (
        *of_product,
        column_sum,
        *(gradients.get(k + 1) for k in range(len(needs))),
    )


def is_forced(x: Tensor, mode: str = "") -> bool:
    """Whether products of x need more than cuBLAS with PyTorch's setting: in `mode`, or if that is empty, in the mode
    that holds now.

    In compiled code the answer is yes as soon as any mode was asked for, because operators read the mode when they run.
    """
    if x.dtype != torch.float32 or not (x.device.type == "cuda" or stands_in_for(x.device)):
        return False
    if torch.compiler.is_compiling():
        return process.opted_in
    mode = product_mode(mode)
    return mode in SPLIT_MODES or (mode == "tf32") != allows_tf32()


def _pre_activation(x: Tensor, weight: Tensor, bias: Tensor | None, prepared: Prepared) -> Tensor:
    if is_forced(x) or may_be_batch_invariant():
        return schema.linear(x, weight, bias, [], schema.IDENTITY, "none", x.dtype, *prepared)
    return F.linear(x, weight, bias)


def _pre_activation_again(x: Tensor, weight: Tensor, bias: Tensor | None, mode: str) -> Tensor:
    """In a backward pass, whose forward pass was in `mode`."""
    if not is_forced(x, mode):
        return cublas_linear(x, weight, bias, mode)
    z = schema.product(x, weight, mode)
    return z if bias is None else z.add_(bias)


@dataclass  # not frozen: Dynamo of PyTorch 2.8 loses what the __init__ of a frozen one sets
class Multiplication:
    """What computes the products of a layer's backward pass, `a @ b`: PyTorch, where no other precision is asked for
    and the layer does not wait for the host.

    mode: what the forward pass multiplied fp32 matrices in. operators: who computes the others, by their names.
    """

    mode: str
    issuer: str
    operators: Any

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        if self.is_pytorch(a):
            return torch.mm(a, b)
        y: Tensor = self.operators.product(a, b.t(), self.mode, self.issuer)
        return y

    def is_pytorch(self, x: Tensor) -> bool:
        return self.issuer != "training" and not is_forced(x, self.mode)


def _product_gradients(
    grad_z: Tensor, x: Tensor, weight: Tensor, mode: str, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight. Kernels of ours multiply as in the direct path; compiled code has PyTorch's."""
    issuer = "call" if is_traced(grad_z, x, weight) else issuer_of_products(x.shape[0], weight, mode)
    multiply = Multiplication(mode, issuer, schema)
    return (
        multiply(grad_z, weight) if needs_x else None,
        weight_gradient(grad_z, x, weight, multiply) if needs_weight else None,
    )


def sum_of_rows(grad: Tensor, dtype: torch.dtype, operators: Any = schema) -> Tensor:
    total: Tensor = operators.reduce(grad, [], schema.IDENTITY, "sum", (0,), dtype)
    return total


def _composed_linear(forward: Any, out_dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of the layer's tensors that computes it by PyTorch's own operations."""
    program = Program.parse(forward.program)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor) -> Tensor:
        return composed.linear(x, weight, bias, operands, program, forward.reduction, out_dtype)

    return compute


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    prepared: Prepared = UNPREPARED,
    recompute: bool = False,
) -> Tensor:
    """Calls the linear operator; by autograd if a gradient is needed.

    recompute: a backward pass computes the pre-activation again, where the forward pass would keep one.
    """
    y: Tensor
    if torch.compiler.is_dynamo_compiling():
        inductor.register()
    if needs_gradient(x, weight, bias, *operands):
        keeps = PRE_ACTIVATION
        if not torch.compiler.is_compiling():  # Dynamo does not trace what parses a program
            arguments = LinearArguments(x, weight, bias, operands, Program.parse(program), reduction, out_dtype)
            keeps = what_is_kept(arguments, recompute)
        y = Linear.apply(program, reduction, out_dtype, keeps, *prepared, x, weight, bias, *operands)
        return y
    return schema.linear(x, weight, bias, operands, program, reduction, out_dtype, *prepared)


def weight_gradient(
    grad_z: Tensor, x: Tensor, weight: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """`grad_z.T @ x` `[N, K]`, laid out as the weight.

    multiply: gives `a @ b`; PyTorch does where it is None.
    """
    if is_turned_weight(weight):
        return weight_gradient(x, grad_z, weight.t(), multiply).t()
    return (multiply or torch.mm)(grad_z.t(), x)
