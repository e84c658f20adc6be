"""Calls that take several of PyTorch's and cutfuse's operations, as one function of their tensors.

A call is run once with each operation written down, and written out as straight-line code. Calls with its key run that:
what Python decided between the operations depends on the key alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..ops import cuda, schema

Replay = Callable[..., Tensor]

# What computes an operator on the devices that direct calls serve, without PyTorch's dispatcher.
_UNDISPATCHED: dict[Any, Callable[..., Any]] = {
    schema.linear: cuda.linear,
    schema.linear_reduce: cuda.linear_reduce,
    schema.pointwise: cuda.pointwise,
    schema.reduce: cuda.reduce,
}

# They give their argument itself where it is as they would make it.
_MAY_CHANGE_NOTHING = {Tensor.to, Tensor.float, Tensor.contiguous}


def record(function: Callable[..., Tensor], given: Sequence[Tensor | None]) -> tuple[Tensor, Replay | None]:
    """`function(*given)`, and a function that makes its operations again on tensors that are laid out alike.

    That one is None where what was made cannot be written out: of a tensor that came from elsewhere, or in place.
    """
    # One tensor in two places is told apart, as calls laid out alike may have two tensors there.
    told_apart = [t if all(t is not other for other in given[:k]) else _alias(t) for k, t in enumerate(given)]
    recorder = _Recorder(told_apart)
    with recorder:
        y = function(*told_apart)
    return y, recorder.replay(y)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Of names and numbers made here. Records that differ in sizes alone share it: they are constants."""
    return compile(source, "<cutfuse>", "exec")


def _alias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


class _UnrecordableError(Exception):
    """An operation that cannot be made again."""


class _Recorder(TorchFunctionMode):
    """Writes down the operations that give tensors, as lines of code."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._parameters = [f"t{k}" for k in range(len(given))]
        # Weakly: an operation's result is freed as early as it is without a record.
        self._names: Any = WeakTensorKeyDictionary()
        for name, tensor in zip(self._parameters, given, strict=True):
            if tensor is not None:
                self._names[tensor] = name
        self._constants: dict[str, Any] = {}
        self._lines: list[str] = []
        self._last_lines: dict[str, int] = {}  # of each result, the line that reads it last
        self._is_recordable = True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if result is None:  # it writes something
            self._is_recordable = False
        if self._is_recordable and isinstance(result, Tensor):
            try:
                self._add(function, args, kwargs, result)
            except _UnrecordableError:
                self._is_recordable = False
        return result

    def replay(self, y: Tensor) -> Replay | None:
        result = self._names.get(y)
        if not self._is_recordable or result not in self._last_lines:
            return None
        del self._last_lines[result]
        lines = list(self._lines)
        for name, k in self._last_lines.items():
            lines[k] += f"; del {name}"
        source = "\n    ".join([f"def replay({', '.join(self._parameters)}):", *lines, f"return {result}"])
        scope = dict(self._constants)
        exec(_compiled(source), scope)
        replay: Replay = scope["replay"]
        return replay

    def _add(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        if result in self._names:
            if function not in _MAY_CHANGE_NOTHING:  # an operation in place
                raise _UnrecordableError
            return
        called = self._constant(_UNDISPATCHED.get(function, function))
        arguments = [self._expression(value) for value in args]
        arguments += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
        name = f"t{len(self._parameters) + len(self._lines)}"
        self._last_lines[name] = len(self._lines)
        self._lines.append(f"{name} = {called}({', '.join(arguments)})")
        self._names[result] = name

    def _expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            name: str | None = self._names.get(value)
            if name is None:
                raise _UnrecordableError
            if name in self._last_lines:
                self._last_lines[name] = len(self._lines)
            return name
        if type(value) in (list, tuple):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name
