"""What sees each of PyTorch's operations, or changes it, for tests of calls within it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def check(y: Tensor, expected: Tensor) -> None:
    assert (y.shape, y.dtype, type(y)) == (expected.shape, expected.dtype, type(expected))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def profiled() -> Any:
    return torch.autograd.profiler.profile()
