"""torch.compile's decorators with the types that PyTorch's own lack."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def assume_constant_result(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.assume_constant_result`: Dynamo runs `function` while it traces, and its result is a constant."""
    marked: Callable[_P, _R] = torch.compiler.assume_constant_result(function)
    return marked


def disable(function: Callable[_P, _R], reason: str | None = None) -> Callable[_P, _R]:
    """`torch.compiler.disable`: Dynamo does not trace `function`, and gives the reason where that is an error."""
    disabled: Callable[_P, _R] = torch.compiler.disable(function, reason=reason)
    return disabled


def disable_because(reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator that is `disable` with this reason."""
    return functools.partial(disable, reason=reason)


def is_tracing() -> bool:
    """Whether torch.compile traces: Dynamo, or AOTAutograd, of which `torch.compiler.is_compiling` does not know."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
