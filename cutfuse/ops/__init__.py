"""The operators `torch.ops.cutfuse.*` and what stands on them.

`composed` is plain PyTorch, `cuda` the kernels, `autograd` the gradients, `linear_plan` what computes a linear layer.
"""

from __future__ import annotations

import torch

from . import cpu, cuda, cuda_backward, fake, schema

_CUDA = {
    "linear": cuda.linear,
    "linear_reduce": cuda.linear_reduce,
    "product": cuda.product,
    "pointwise": cuda.pointwise,
    "reduce": cuda.reduce,
    "pointwise_backward": cuda_backward.pointwise_backward,
}

for _name, _kernel in _CUDA.items():
    schema.LIBRARY.impl(_name, _kernel, "CUDA")
    schema.LIBRARY.impl(_name, getattr(cpu, _name), "CPU")
    torch.library.register_fake(f"cutfuse::{_name}", getattr(fake, _name), lib=schema.LIBRARY)
