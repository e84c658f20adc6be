"""The operators' names and signatures in PyTorch's dispatcher.

All are functional and private: they have no autograd of their own (`autograd.py` gives it to them), so that a call
costs the dispatcher and nothing else. `program` is a program's text form. Operands broadcast against `x`, or against
`[M, N]`; types are those that the kernels take, or any on a CPU.

`snapshot`, `planes` and `plan` are of a weight that was prepared (prepared.py): an operator raises RuntimeError where
the weight is not what it was.

`product` is `a @ b.T` of fp32 matrices of any strides, in a precision that a forward captured (empty: what holds when
it runs).

`pointwise_backward` gives for each of `wanted` (0 for x, k for operand k - 1) grad * weight * d program / d it, summed
to its shape. `grad` broadcasts against x, and so does `result`, the fp32 values of the reduction: with "amax" and
"amin" the weight is a share of the ties, with "logsumexp" the softmax, with "none" one. With `column_sum` the last
output is x's gradient summed over all but its last dimension, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

IDENTITY = "operands=0"  # the program that does nothing
LIBRARY = torch.library.Library("cutfuse", "DEF")

_SCHEMAS = (
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str program, ScalarType out_dtype, "
    "Tensor? snapshot=None, Tensor? planes=None, int plan=0) -> Tensor",
    "linear_reduce(Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str program, str reduction, "
    "ScalarType out_dtype, Tensor? snapshot=None, Tensor? planes=None, int plan=0) -> Tensor",
    "product(Tensor a, Tensor b, str mode) -> Tensor",
    "pointwise(Tensor x, Tensor[] operands, str program, ScalarType out_dtype) -> Tensor",
    "reduce(Tensor x, Tensor[] operands, str program, str reduction, int[] dims, ScalarType out_dtype) -> Tensor",
    "pointwise_backward(Tensor grad, Tensor x, Tensor[] operands, str program, str reduction, Tensor? result, "
    "int[] wanted, bool column_sum) -> Tensor[]",
)

for _schema in _SCHEMAS:
    LIBRARY.define(_schema)

linear: Callable[..., Tensor] = torch.ops.cutfuse.linear.default
product: Callable[[Tensor, Tensor, str], Tensor] = torch.ops.cutfuse.product.default
linear_reduce: Callable[..., Tensor] = torch.ops.cutfuse.linear_reduce.default
pointwise: Callable[..., Tensor] = torch.ops.cutfuse.pointwise.default
reduce: Callable[..., Tensor] = torch.ops.cutfuse.reduce.default
pointwise_backward: Callable[..., list[Tensor]] = torch.ops.cutfuse.pointwise_backward.default
