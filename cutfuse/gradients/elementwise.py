"""Gradients of the operators that do not multiply, and what all gradients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import composed, dynamo
from ..epilogue import Program
from ..epilogue.program import arithmetic_dtype
from ..epilogue.table import GRADIENTS, NEEDS_RESULT
from ..ops import inductor, schema
from ..ops.fake import sum_dtype


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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


class Pointwise(torch.autograd.Function):
    """`program(x, operands)`."""

    @staticmethod
    def forward(ctx: Any, program: str, out_dtype: torch.dtype, x: Tensor, *operands: Tensor) -> Tensor:
        ctx.operands = facts_in_backward(program, "none", operands)
        ctx.save_for_backward(x, *kept_of(ctx.operands, operands))
        ctx.program = program
        return schema.pointwise(x, operands, program, out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        operands = restored(ctx.operands, kept, x.device, needs[1:])
        if composes_gradient(grad):
            program = Program.parse(ctx.program)
            again = differentiate(
                lambda x, *operands: composed.pointwise(x, operands, program, grad.dtype), (x, *operands), needs, grad
            )
            return (None, None, *again)
        gradients, _ = element_gradients(
            grad, x, operands, ctx.program, "none", None, wanted_inputs(needs, ctx.program)
        )
        return (None, None, *(gradients.get(k) for k in range(len(needs))))


class Reduce(torch.autograd.Function):
    """`reduction(program(x, operands))` over `dims`."""

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
        kept = kept_of(ctx.operands, operands)
        if reduction not in NEEDS_RESULT:
            ctx.save_for_backward(None, x, *kept)
            return schema.reduce(x, operands, program, reduction, dims, out_dtype)
        result = schema.reduce(x, operands, program, reduction, dims, kept_dtype(x, operands))
        ctx.save_for_backward(result, x, *kept)
        return result.to(out_dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result, x, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        operands = restored(ctx.operands, kept, x.device, needs[1:])
        if composes_gradient(grad):
            program = Program.parse(ctx.program)
            again = differentiate(
                lambda x, *operands: composed.reduce(x, operands, program, ctx.reduction, ctx.dims, grad.dtype),
                (x, *operands),
                needs,
                grad,
            )
            return (None, None, None, None, *again)
        reduced = [1 if d in ctx.dims else size for d, size in enumerate(x.shape)]
        count = 1
        for d in ctx.dims:
            count *= x.shape[d]
        gradients, _ = element_gradients(
            spread(grad.reshape(reduced), ctx.reduction, count),
            x,
            operands,
            ctx.program,
            ctx.reduction,
            None if result is None else result.reshape(reduced),
            wanted_inputs(needs, ctx.program),
        )
        return (None, None, None, None, *(gradients.get(k) for k in range(len(needs))))


def spread(grad: Tensor, reduction: str, count: int) -> Tensor:
    """The gradient of each element of a row, before it is multiplied by the reduction's derivative."""
    return grad.to(sum_dtype(grad.dtype)) / count if GRADIENTS[reduction] == "share" else grad


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    if needs_gradient(x, *operands):
        y: Tensor = Pointwise.apply(program, out_dtype, x, *operands)
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
        y: Tensor = Reduce.apply(program, reduction, dims, out_dtype, x, *operands)
        return y
    return schema.reduce(x, operands, program, reduction, dims, out_dtype)
