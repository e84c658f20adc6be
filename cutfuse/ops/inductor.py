"""Decomposes a linear operator for Inductor, where PyTorch's operations are predicted to be faster.

If cuBLAS's product is faster than a fused kernel, Inductor is given the product and the epilogue in PyTorch's
operations, because it compiles the epilogue and the operations around it into one kernel. If a fused kernel is faster,
the operator stays. It also stays in fp32, whose precision is chosen when the operator runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed, dynamo
from ..epilogue import Program
from ..planning.linear_plan import LinearArguments
from ..planning.traced import plan_traced
from . import schema


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
    plan = plan_traced(arguments, "tf32")
    return plan is None or plan.is_fused
