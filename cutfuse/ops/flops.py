"""How many operations `torch.utils.flop_counter.FlopCounterMode` counts for a fused operator: those of its products.

They are PyTorch's own counts of the same products: 2 * M * N * K. What follows a product counts nothing there either.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"


def layer(x: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    """Of a product of x `[M, K]` and weight `[N, K]`."""
    return 2 * math.prod(x) * weight[0]


def layers(x: torch.Size, weights: Sequence[torch.Size], *_: Any, **__: Any) -> int:
    """Of the products of one x with several weights."""
    return sum(layer(x, weight) for weight in weights)


def logit_statistics(x: torch.Size, weight: torch.Size, *given: Any, **_: Any) -> int:
    """Of a head's forward pass: the logsumexp's product, one for the mean behind a softcap, and the entropy's."""
    softcap, _, wants_mean, wants_entropy = given[2:6]
    return layer(x, weight) * (1 + bool(wants_mean and softcap) + bool(wants_entropy))


def logit_gradients(_: Any, __: Any, x: torch.Size, weight: torch.Size, *given: Any, **___: Any) -> int:
    """Of a head's backward pass: the product of the logits, and those of the gradients of x and weight as needed."""
    needs_x, needs_weight, _ = given[-1]
    return layer(x, weight) * (1 + bool(needs_x) + bool(needs_weight))


FORMULAS: dict[str, Callable[..., int]] = {
    "linear": layer,
    "linear_reduce": layer,
    "linear_with_pre_activation": layer,
    "product": layer,
    "joined": layers,
    "logit_statistics": logit_statistics,
    "logit_gradients": logit_gradients,
}


def register() -> None:
    """Registers the formulas with PyTorch's counter, now or when it is imported.

    cutfuse does not import it, as it imports Triton, which takes 0.2 s.
    """
    if COUNTER in sys.modules:
        _add_to(importlib.import_module(COUNTER))
    else:
        sys.meta_path.insert(0, _Finder())


def _add_to(counter: ModuleType) -> None:
    for name, formula in FORMULAS.items():
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
