"""Registers what computes the operators `torch.ops.cutfuse.*`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.compiler.config
from torch._decomp import register_decomposition

from .compile.layer import layer, layer_cross_entropy
from .direct import operators
from .ops import cpu, cuda, fake, flops, inductor, schema

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

_COMPOSITE: dict[str, Callable[..., Any]] = {"layer": layer, "layer_cross_entropy": layer_cross_entropy}


def none_as_empty(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which computes the operator `name`, for a dispatcher that may give it None for an empty list.

    The packages that AOTInductor makes do. The dispatcher gives every argument by its position, the lists among them.
    """
    operator: torch._ops.OpOverload = getattr(torch.ops.cutfuse, name).default
    given_lists = [k for k, given in enumerate(operator._schema.arguments) if isinstance(given.type, torch.ListType)]
    if not given_lists:
        return function

    @functools.wraps(function)
    def dispatched(*given: Any) -> Any:
        for k in given_lists:
            if given[k] is None:
                given = (*given[:k], [], *given[k + 1 :])
        return function(*given)

    return dispatched


# What the dispatcher calls, by its keys.
DISPATCHED: dict[str, dict[str, Callable[..., Any]]] = {
    key: {name: none_as_empty(name, function) for name, function in functions.items()}
    for key, functions in (("CUDA", _CUDA), ("CPU", _CPU), ("CompositeImplicitAutograd", _COMPOSITE))
}

for _key, _functions in DISPATCHED.items():
    for _name, _function in _functions.items():
        schema.LIBRARY.impl(_name, _function, _key)

for _name in _CUDA:
    _fake = inductor.registered_with_inductor(getattr(fake, _name))
    torch.library.register_fake(f"cutfuse::{_name}", _fake, lib=schema.LIBRARY)


# Exported programs with operators in them go to where cutfuse is not by PyTorch's operations: those of a CPU, on every
# device. PyTorch's exporter to ONNX looks for decompositions here. Compilers do not: they ask for those that they name.
for _name in ("linear", "linear_reduce", "linear_with_pre_activation", "product", "joined", "pointwise", "reduce"):
    _operator = getattr(torch.ops.cutfuse, _name).default
    register_decomposition(_operator)(_CPU[_name])
    # Without it PyTorch would run the decomposition for the shapes of results, where sizes are symbols.
    register_decomposition(_operator, type="meta")(getattr(fake, _name))

for _device, _functions in (("cuda", _CUDA), ("cpu", _CPU)):
    inductor.expose(_functions, _device)

flops.register()


def cache_tag() -> str:
    """What compiled code on disk depends on besides the graph: how operators are called, and how Inductor is mended."""
    called = schema.SCHEMAS, [inductor.name_of(operator) for operator in inductor.UNDISPATCHED], "viewed memory"
    return f"cutfuse-{hashlib.sha256(repr(called).encode()).hexdigest()[:16]}"


# torch.compile keeps compiled code on disk, and its key has the operators' names only. Code that was compiled by a
# version of cutfuse whose operators have other arguments would fail. A tag of the user's stays.
torch.compiler.config.cache_key_tag += cache_tag()
