"""torch.compile's decorators with the types that PyTorch's own lack."""

from __future__ import annotations

import functools
import threading
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


class _NotCompiling:
    """A context in which what torch.compile made runs as the function that it was given, in all threads.

    PyTorch has one stance for them all, so that threads count how many of them are inside.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._stance = torch.compiler.set_stance("force_eager")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._stance.__exit__(None, None, None)


# Around what is given symbolic values: Dynamo would trace how these compute, warn about the functions of C in that, and
# leave code of the user's uncompiled from then on.
NOT_COMPILING = _NotCompiling()


def is_tracing() -> bool:
    """Whether torch.compile traces: Dynamo, or AOTAutograd, of which `torch.compiler.is_compiling` does not know."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
