"""Calls that take several of PyTorch's and cutfuse's operations, as one function of their tensors.

A call is run once with each operation written down, and written out as straight-line code. Calls with its key run that:
what Python decided between the operations depends on the key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops import schema
from . import operators

Replay = Callable[..., Tensor]

# What computes an operator on the devices that direct calls serve, without PyTorch's dispatcher.
_UNDISPATCHED: dict[Any, Callable[..., Any]] = {
    schema.linear: operators.linear,
    schema.linear_reduce: operators.linear_reduce,
    schema.pointwise: operators.pointwise,
    schema.reduce: operators.reduce,
}

# They give their argument itself where it is as they would make it.
_MAY_CHANGE_NOTHING = {Tensor.to, Tensor.float, Tensor.contiguous}


def record(function: Callable[..., Tensor], given: Sequence[Tensor | None]) -> tuple[Tensor, Replay | None]:
    """`function(*given)`, and a function that makes its operations again on tensors that are laid out alike.

    That one is None where what was made cannot be written out: of a tensor that came from elsewhere, or in place.
    """
    recorder = _Recorder(given)
    with recorder:
        y = function(*given)
    return y, recorder.replay(y)


class _UnrecordableError(Exception):
    """An operation that cannot be made again."""


class _Recorder(TorchFunctionMode):
    """Writes down the operations that give tensors, as lines of code."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._parameters = [f"t{k}" for k in range(len(given))]
        # The tensors too: what is freed gives its identity away.
        self._tensors = {id(t): (f"t{k}", t) for k, t in enumerate(given) if t is not None}
        self._given = set(self._tensors)
        self._constants: dict[str, Any] = {}
        self._lines: list[str] = []
        self._is_recordable = True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self._is_recordable and isinstance(result, Tensor):
            try:
                self._add(function, args, kwargs, result)
            except _UnrecordableError:
                self._is_recordable = False
        return result

    def replay(self, y: Tensor) -> Replay | None:
        found = self._tensors.get(id(y))
        if not self._is_recordable or found is None or id(y) in self._given:
            return None
        source = "\n    ".join([f"def replay({', '.join(self._parameters)}):", *self._lines, f"return {found[0]}"])
        scope = dict(self._constants)
        exec(source, scope)  # of names and numbers made here
        replay: Replay = scope["replay"]
        return replay

    def _add(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        if id(result) in self._tensors:
            if function not in _MAY_CHANGE_NOTHING:  # an operation in place
                raise _UnrecordableError
            return
        called = self._constant(_UNDISPATCHED.get(function, function))
        arguments = [self._expression(value) for value in args]
        arguments += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
        name = f"t{len(self._parameters) + len(self._lines)}"
        self._lines.append(f"{name} = {called}({', '.join(arguments)})")
        self._tensors[id(result)] = name, result

    def _expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in self._tensors:
                raise _UnrecordableError
            return self._tensors[id(value)][0]
        if type(value) in (list, tuple):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name
