"""The operators' names and signatures in PyTorch's dispatcher; those of a head are in `cutfuse/head.py`.

All operators are functional and private. All but the composites have no autograd formula in the dispatcher, which
would cost host time in every call; `autograd` differentiates them. `program` is the text form of a
program. Operands broadcast against `x`, or against `[M, N]`. Types are those that the kernels support; on a CPU any
type works.

`snapshot`, `planes` and `scheme` belong to a prepared weight (prepared.py). An operator raises RuntimeError if
the weight has changed since it was prepared.

`linear` returns `[M, N]`, or `[M]` with a reduction that is not "none".

`linear_with_pre_activation` returns `[M, N]` twice: the result, and `x @ weight.T + bias` in x's type, at which a
backward pass differentiates the program. The program has instructions.

`layer` and `layer_cross_entropy` are what torch.compile's backend puts into a graph (compile/layer.py): composites of
the others, with their gradients, for x `[..., K]` and operands that broadcast against `[..., N]`.

`joined` is `x @ weight.T + bias` for several weights of one K, side by side: `[M, sum of N]`, in 16 bits.

`product` is `a @ b.T` of matrices of any strides. In fp32 it has the precision that the forward pass has captured, or
if that is empty the one that holds when the operator runs; in 16 bits it is planned for a training step that waits for
the host.

`pointwise_backward` returns, for each index in `wanted` (0 for x, k for operand k - 1), the gradient
`grad * weight * d program / d input`, summed to the input's shape. `grad` and `result`, the fp32 values of the
reduction, broadcast against x. The weight is the reduction's derivative: 1 over the number of ties for "amax" and
"amin", the softmax for "logsumexp", and 1 for "none". With `sums_columns`, the last output is x's gradient,
summed over all dimensions but the last and rounded once, to x's type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

IDENTITY = "operands=0"  # the program without instructions
LIBRARY = torch.library.Library("cutfuse", "DEF")

SCHEMAS = (
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str program, str reduction, "
    "ScalarType out_dtype, Tensor? snapshot=None, Tensor? planes=None, int scheme=0) -> Tensor",
    "linear_with_pre_activation(Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str program, "
    "ScalarType out_dtype, Tensor? snapshot=None, Tensor? planes=None, int scheme=0) -> (Tensor, Tensor)",
    "layer(Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str program, str reduction, bool keepdim, "
    "ScalarType out_dtype) -> Tensor",
    "layer_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, str reduction, "
    "float label_smoothing, float softcap, float temperature, ScalarType out_dtype) -> Tensor",
    "product(Tensor a, Tensor b, str mode, str issuer='call') -> Tensor",
    "joined(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor",
    "pointwise(Tensor x, Tensor[] operands, str program, ScalarType out_dtype) -> Tensor",
    "reduce(Tensor x, Tensor[] operands, str program, str reduction, int[] dims, ScalarType out_dtype) -> Tensor",
    "pointwise_backward(Tensor grad, Tensor x, Tensor[] operands, str program, str reduction, Tensor? result, "
    "int[] wanted, bool sums_columns) -> Tensor[]",
)

for _schema in SCHEMAS:
    LIBRARY.define(_schema)

linear: Callable[..., Tensor] = torch.ops.cutfuse.linear.default
product: Callable[..., Tensor] = torch.ops.cutfuse.product.default
joined: Callable[..., Tensor] = torch.ops.cutfuse.joined.default
linear_with_pre_activation: Callable[..., tuple[Tensor, Tensor]] = torch.ops.cutfuse.linear_with_pre_activation.default
pointwise: Callable[..., Tensor] = torch.ops.cutfuse.pointwise.default
reduce: Callable[..., Tensor] = torch.ops.cutfuse.reduce.default
layer: Callable[..., Tensor] = torch.ops.cutfuse.layer.default
layer_cross_entropy: Callable[..., Tensor] = torch.ops.cutfuse.layer_cross_entropy.default
pointwise_backward: Callable[..., list[Tensor]] = torch.ops.cutfuse.pointwise_backward.default
