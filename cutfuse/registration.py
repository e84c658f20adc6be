"""Registers what computes the operators `torch.ops.cutfuse.*`."""

from __future__ import annotations

import hashlib

import torch
import torch.compiler.config

from .compile.composites import layer, layer_cross_entropy
from .direct import operators
from .ops import cpu, cuda, cuda_backward, fake, schema

_CUDA = {
    "linear": operators.linear,
    "linear_reduce": operators.linear_reduce,
    "linear_with_pre_activation": cuda.linear_with_pre_activation,
    "product": cuda.product,
    "pointwise": cuda.pointwise,
    "reduce": cuda.reduce,
    "pointwise_backward": cuda_backward.pointwise_backward,
}

for _name, _kernel in _CUDA.items():
    schema.LIBRARY.impl(_name, _kernel, "CUDA")
    schema.LIBRARY.impl(_name, getattr(cpu, _name), "CPU")
    torch.library.register_fake(f"cutfuse::{_name}", getattr(fake, _name), lib=schema.LIBRARY)

schema.LIBRARY.impl("layer", layer, "CompositeImplicitAutograd")
schema.LIBRARY.impl("layer_cross_entropy", layer_cross_entropy, "CompositeImplicitAutograd")


def cache_tag() -> str:
    """What compiled code on disk depends on besides the graph: how the operators are called."""
    return f"cutfuse-{hashlib.sha256(repr(schema.SCHEMAS).encode()).hexdigest()[:16]}"


# torch.compile keeps compiled code on disk, and its key has the operators' names only. Code that was compiled by a
# version of cutfuse whose operators have other arguments would fail. A tag of the user's stays.
torch.compiler.config.cache_key_tag += cache_tag()
