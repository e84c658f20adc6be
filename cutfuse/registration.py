"""Registers what computes the operators `torch.ops.cutfuse.*`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config

from .compile.composites import layer, layer_cross_entropy
from .direct import operators
from .ops import cpu, cuda, fake, inductor, schema

_CUDA: dict[str, Callable[..., Any]] = {
    "linear": operators.linear,
    "linear_reduce": operators.linear_reduce,
    "linear_with_pre_activation": cuda.linear_with_pre_activation,
    "product": cuda.product,
    "joined": operators.joined,
    "pointwise": operators.pointwise,
    "reduce": operators.reduce,
    "pointwise_backward": operators.pointwise_backward,
}

_CPU: dict[str, Callable[..., Any]] = {name: getattr(cpu, name) for name in _CUDA}

for _name, _kernel in _CUDA.items():
    schema.LIBRARY.impl(_name, _kernel, "CUDA")
    schema.LIBRARY.impl(_name, _CPU[_name], "CPU")
    torch.library.register_fake(f"cutfuse::{_name}", getattr(fake, _name), lib=schema.LIBRARY)

schema.LIBRARY.impl("layer", layer, "CompositeImplicitAutograd")
schema.LIBRARY.impl("layer_cross_entropy", layer_cross_entropy, "CompositeImplicitAutograd")


for _device, _functions in (("cuda", _CUDA), ("cpu", _CPU)):
    inductor.expose(_functions, _device)


def cache_tag() -> str:
    """What compiled code on disk depends on besides the graph: how the operators are called."""
    called = schema.SCHEMAS, [inductor.name_of(operator) for operator in inductor.UNDISPATCHED]
    return f"cutfuse-{hashlib.sha256(repr(called).encode()).hexdigest()[:16]}"


# torch.compile keeps compiled code on disk, and its key has the operators' names only. Code that was compiled by a
# version of cutfuse whose operators have other arguments would fail. A tag of the user's stays.
torch.compiler.config.cache_key_tag += cache_tag()
