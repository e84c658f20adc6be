"""Decomposes a linear operator for Inductor, where PyTorch's operations are predicted to be faster.

If cuBLAS's product is faster than a fused kernel, Inductor is given the product and the epilogue in PyTorch's
operations, because it compiles the epilogue and the operations around it into one kernel. If a fused kernel is faster,
the operator stays. It also stays in fp32, whose precision is chosen when the operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed, dynamo
from ..epilogue import Program
from ..planning.device import device_facts
from ..planning.linear_plan import ALIGNMENT, LinearArguments, bytes_of_operands, plan_layouts
from . import schema

if TYPE_CHECKING:
    from .._C import LinearPlan


@dynamo.assume_constant_result
def register() -> bool:
    """Adds `linear` to Inductor's decompositions. Runs while Dynamo traces a call, which is before Inductor runs."""
    # Imported here because that takes seconds, and other backends of torch.compile do not import it.
    from torch._inductor import decomposition, lowering

    if schema.linear in decomposition.decompositions:
        return True
    # A fallback is how Inductor calls an operator that it does not know. It makes one by itself only for operators
    # without a decomposition, because it does not expect a decomposition to return NotImplemented.
    lowering.make_fallback(schema.linear, lowering.constrain_to_fx_strides, warn=False)
    # The second table is a copy of the first, made once. A setting of Inductor decides which one it reads.
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        table[schema.linear] = linear
    return True


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    planes: Tensor | None = None,
    scheme: int = 0,
) -> Any:
    """The operator in PyTorch's operations, or NotImplemented if it has to stay."""
    parsed = Program.parse(program)
    arguments = LinearArguments(x, weight, bias, operands, parsed, "none", out_dtype)
    if snapshot is not None or x.element_size() != 2 or _is_fused(arguments):
        return NotImplemented
    z = F.linear(x, weight, bias)
    return composed.after_product(z, operands, parsed, "none", out_dtype).contiguous()


def _is_fused(arguments: LinearArguments) -> bool:
    plan = _plan(arguments)
    return plan is None or plan.is_fused


def _plan(arguments: LinearArguments) -> LinearPlan | None:
    """The plan of a layer. For symbolic sizes it takes the sizes of the call that is traced; None if one is unknown."""
    x, weight, bias, operands, program, reduction, out_dtype = arguments
    tensors = [_seen(tensor) for tensor in (x, weight, *([] if bias is None else [bias]), *operands)]
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors):
        return None
    seen_x, seen_weight, *rest = known
    seen_bias = None if bias is None else rest.pop(0)
    shape = seen_x.shape[0], seen_weight.shape[0]
    return plan_layouts(
        (*seen_x.shape, *seen_x.strides, seen_x.is_aligned),
        (*seen_weight.shape, *seen_weight.strides, seen_weight.is_aligned),
        None if seen_bias is None else (*seen_bias.strides, seen_bias.is_aligned),
        x.dtype,
        out_dtype,
        reduction,
        program.native.cost,
        bytes_of_operands(shape, [(t.shape, t.element_size) for t in rest]),
        "tf32",
        False,
        device_facts(x.device),
        issuer=_issuer(),
    )


def _issuer() -> str:
    from torch._inductor import config

    return "graph" if config.triton.cudagraphs else "compiled_code"


class _Seen(NamedTuple):
    """The layout of a tensor. Assumes that its storage is aligned, as PyTorch allocates it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_size: int
    is_aligned: bool


def _seen(tensor: Tensor) -> _Seen | None:
    sizes = [_seen_size(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    *extents, offset = known
    dimensions, element_size = tensor.dim(), tensor.element_size()
    is_aligned = offset * element_size % ALIGNMENT == 0
    return _Seen(tuple(extents[:dimensions]), tuple(extents[dimensions:]), element_size, is_aligned)


def _seen_size(size: Any) -> int | None:
    """A size, or for a symbol its value in the call that is traced. Reading the hint makes no guard."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return found if isinstance(found, int) else None
