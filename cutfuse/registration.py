"""Registers what computes the operators `torch.ops.cutfuse.*`."""

from __future__ import annotations

import torch

from .direct import operators
from .ops import cpu, cuda, cuda_backward, fake, schema

_CUDA = {
    "linear": operators.linear,
    "linear_reduce": operators.linear_reduce,
    "product": cuda.product,
    "pointwise": cuda.pointwise,
    "reduce": cuda.reduce,
    "pointwise_backward": cuda_backward.pointwise_backward,
}

for _name, _kernel in _CUDA.items():
    schema.LIBRARY.impl(_name, _kernel, "CUDA")
    schema.LIBRARY.impl(_name, getattr(cpu, _name), "CPU")
    torch.library.register_fake(f"cutfuse::{_name}", getattr(fake, _name), lib=schema.LIBRARY)
