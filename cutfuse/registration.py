"""Registers what computes the operators `torch.ops.cutfuse.*`, and how many operations PyTorch counts for them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.compiler.config
from torch._decomp import register_decomposition

from .compile.layer import layer, layer_cross_entropy
from .layer import cpu, cuda, fake, inductor, schema

_NAMES = [inductor.name_of(operator) for operator in inductor.UNDISPATCHED]
_CUDA: dict[str, Callable[..., Any]] = {name: getattr(cuda, name) for name in _NAMES}
_CPU: dict[str, Callable[..., Any]] = {name: getattr(cpu, name) for name in _NAMES}
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


COUNTER = "torch.utils.flop_counter"  # of FlopCounterMode, which counts a fused operator by its products


def count_product(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """As PyTorch counts a product of x `[M, K]` and weight `[N, K]`. What follows one counts nothing there either."""
    return 2 * math.prod(x) * weight[0]


def count_products(x: torch.Size, weights: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    """Of the products of one x with several weights."""
    return sum(count_product(x, weight) for weight in weights)


def count_kept(x: torch.Size, weight: torch.Size, statistics: Sequence[torch.Size]) -> int:
    """Of the product of the logits that a head keeps, a part of the vocabulary in each row of the last of these."""
    return min(2 * math.prod(statistics[-1]) * x[1], count_product(x, weight))


def count_logit_statistics(
    x: torch.Size, weight: torch.Size, *given: Any, out_shape: Sequence[torch.Size], **_: Any
) -> int:
    """Of a head's forward pass: the logsumexp's product; without the logits that are kept, one for the mean behind a
    softcap, and the entropy's."""
    softcap, _, wants_mean, wants_entropy = given[2:6]
    product, others = count_product(x, weight), bool(wants_mean and softcap) + bool(wants_entropy)
    return product + others * (product - count_kept(x, weight, out_shape))


def count_logit_gradients(
    _: Any, statistics: Sequence[torch.Size], x: torch.Size, weight: torch.Size, *given: Any, **__: Any
) -> int:
    """Of a head's backward pass: the product of the logits that were not kept, and those of the gradients of x and
    weight as needed."""
    needs_x, needs_weight, _ = given[-1]
    product = count_product(x, weight)
    return product * (1 + bool(needs_x) + bool(needs_weight)) - count_kept(x, weight, statistics)


FLOPS: dict[str, Callable[..., int]] = {
    "linear": count_product,
    "linear_with_pre_activation": count_product,
    "product": count_product,
    "joined": count_products,
    "logit_statistics": count_logit_statistics,
    "logit_gradients": count_logit_gradients,
}


def register_flops() -> None:
    """Registers the formulas with PyTorch's counter, now or when it is imported.

    cutfuse does not import it, as it imports Triton, which takes 0.2 s.
    """
    if COUNTER in sys.modules:
        _add_to(importlib.import_module(COUNTER))
    else:
        sys.meta_path.insert(0, _Finder())


def _add_to(counter: ModuleType) -> None:
    for name, formula in FLOPS.items():
        counter.register_flop_formula(getattr(torch.ops.cutfuse, name))(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the counter by the other finders, and has the formulas added whenever its module is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != COUNTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add_to(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# What the dispatcher calls, by its keys.
DISPATCHED: dict[str, dict[str, Callable[..., Any]]] = {
    key: {name: none_as_empty(name, function) for name, function in functions.items()}
    for key, functions in (("CUDA", _CUDA), ("CPU", _CPU), ("CompositeImplicitAutograd", _COMPOSITE))
}

for _key, _functions in DISPATCHED.items():
    for _name, _function in _functions.items():
        schema.LIBRARY.impl(_name, _function, _key)

for _name in _NAMES:
    _fake = inductor.registered_with_inductor(getattr(fake, _name))
    torch.library.register_fake(f"cutfuse::{_name}", _fake, lib=schema.LIBRARY)


# Exported programs with operators in them go to where cutfuse is not by PyTorch's operations: those of a CPU, on every
# device. PyTorch's exporter to ONNX looks for decompositions here. Compilers do not: they ask for those that they name.
for _name in [name for name in _NAMES if name != "pointwise_backward"]:
    _operator = getattr(torch.ops.cutfuse, _name).default
    register_decomposition(_operator)(_CPU[_name])
    # Without it PyTorch would run the decomposition for the shapes of results, where sizes are symbols.
    register_decomposition(_operator, type="meta")(getattr(fake, _name))

for _device, _functions in (("cuda", _CUDA), ("cpu", _CPU)):
    inductor.expose(_functions, _device)

register_flops()


def cache_tag() -> str:
    """What compiled code on disk depends on besides the graph: how operators are called, and how Inductor is mended."""
    called = schema.SCHEMAS, _NAMES, "viewed memory"
    return f"cutfuse-{hashlib.sha256(repr(called).encode()).hexdigest()[:16]}"


# torch.compile keeps compiled code on disk, and its key has the operators' names only. Code that was compiled by a
# version of cutfuse whose operators have other arguments would fail. A tag of the user's stays.
torch.compiler.config.cache_key_tag += cache_tag()
