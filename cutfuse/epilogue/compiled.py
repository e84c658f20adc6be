"""Tracing inside torch.compile.

Dynamo traces the user's callable on a subclass of Tensor. Each operation on it is a call of `_record`, which Dynamo
runs while it traces and whose result it treats as a constant. Dynamo itself reads what the callable reads from outside,
and guards it: when a closure, a global or an attribute changes, the region is compiled again. All that a trace leaves
in the graph are empty tensors that nothing uses.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cutfuse.epilogue.dynamo_graph import MARK, Functions, value_of_marked
from cutfuse.epilogue.errors import EpilogueError, evaluated_while_compiling
from cutfuse.epilogue.expression import Expr, refuse_captured
from cutfuse.epilogue.lower import check_length
from cutfuse.epilogue.modes import Modes, WithoutGradient, check_end, record_call, refuse_custom_function
from cutfuse.epilogue.probes import Autocast
from cutfuse.epilogue.symbolic import refuse_list
from cutfuse.epilogue.trace import ONE_SCALAR, Epilogue, check_result, epilogue_called, symbolic_arguments
from cutfuse.epilogue.traced_tensor import evaluate_call
from cutfuse.epilogue.types import INPUT_DTYPE, InputDtype, ValueTypes, under_autocast


class _Trace(threading.local):
    """The expressions of the trace under way. Their numbers start at 0, so that equal traces give equal graphs."""

    expressions: list[Expr | WithoutGradient]
    mark_count: int
    types: ValueTypes
    # when it began
    modes: Modes
    autocasts: tuple[Autocast | None, ...]
    functions: Functions


_trace = _Trace()


class StandIn(torch.Tensor):
    """A traced tensor as Dynamo sees it. Its first size is the number of an expression."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = tuple([_encode(value) for value in args])
            named = tuple([(name, _encode(value)) for name, value in kwargs.items()]) if kwargs else ()
            kind, content = _record(function, given, named)
            return _stand_in(content) if kind == "expression" else content


def trace(fn: Callable[..., Any], types: ValueTypes) -> Epilogue:
    """Traced by Dynamo: the Epilogue of a callable, as a constant."""
    count = _start(types)
    result = fn(*[_stand_in(number) for number in range(count)])
    with torch._C.DisableTorchFunctionSubclass():
        encoded = _encode(result) if isinstance(result, torch.Tensor) else None
    return _finish(encoded, len(result) if isinstance(result, (tuple, list)) else 1, count - 1)


@evaluated_while_compiling
def for_types(name: str, types: ValueTypes) -> Epilogue:
    """The epilogue of that name for these types, as a constant."""
    return epilogue_called(name).for_types(types)


def _stand_in(number: int) -> StandIn:
    return torch.empty((number, 0), device="cpu").as_subclass(StandIn)


def _encode(value: Any) -> Any:
    """An argument as a constant for `_record`. Dynamo may hold a number as a symbol, of which `hex` and `index` make a
    guarded constant."""
    if isinstance(value, StandIn):
        return "expression", value.size(0)
    if isinstance(value, torch.Tensor):
        # Dynamo's graph tells from this node which tensor it is: others may have the same shape.
        number = _next_mark()
        value.new_empty((number, *MARK))
        return "tensor", number, tuple(value.shape)
    if isinstance(value, bool):
        return value
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, int):
        return operator.index(value)
    if isinstance(value, InputDtype):
        return "input_dtype", None
    if isinstance(value, (list, tuple)):  # Dynamo of torch 2.8 has no list | tuple here
        return "list", any([isinstance(item, torch.Tensor) for item in value])
    if isinstance(value, torch.dtype):  # Dynamo of torch 2.13 compares types of two below, and fails
        return value
    if type(value).__module__ == "numpy":  # torch 2.8 itself fails where such a value has to be a constant
        torch._dynamo.graph_break(msg="cutfuse: numbers of NumPy are no constants in an epilogue; use Python numbers")
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    match value:
        case "tensor", number, shape:
            found = value_of_marked(number, _trace.expressions, _trace.modes)
            return refuse_captured(f"of shape {shape}") if found is None else found
        case "expression", number:
            return _trace.expressions[number]
        case "float", digits:
            return float.fromhex(digits)
        case "input_dtype", _:
            return INPUT_DTYPE
        case "list", True:
            refuse_list("a function")
    return []


@evaluated_while_compiling
def _start(types: ValueTypes) -> int:
    _trace.expressions, _trace.mark_count = [*symbolic_arguments(types)], 0
    _trace.types, _trace.modes, _trace.functions = types, Modes.now(), Functions.now()
    with under_autocast(types, watched=True) as _trace.autocasts:
        return len(_trace.expressions)


@evaluated_while_compiling
def _next_mark() -> int:
    _trace.mark_count += 1
    return _trace.mark_count - 1


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """A context for a further part of the trace under way."""
    with under_autocast(_trace.types, at_start=_trace.autocasts):
        yield


@evaluated_while_compiling
def _record(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        with _going_on():
            given = tuple(map(_decode, arguments))
            named = {name: _decode(value) for name, value in keywords}
            found = record_call(evaluate_call, function, given, named, _trace.modes, Modes.now())
    except EpilogueError:
        _refuse_applied_function()  # the error may be of the function's body
        raise
    if not isinstance(found, Expr | WithoutGradient):
        return "value", found
    if isinstance(found, Expr):
        check_length(found)  # not only at the end: Dynamo takes 10 ms for each operation of a loop
    _trace.expressions.append(found)
    return "expression", len(_trace.expressions) - 1


@evaluated_while_compiling
def _finish(result: tuple[str, Any] | None, value_count: int, operand_count: int) -> Epilogue:
    _refuse_applied_function()
    check_end(_trace.modes, Modes.now())
    if value_count != 1:
        check_result((None,) * value_count)
    if result is None:
        raise EpilogueError(f"the epilogue returns something that does not depend on its arguments: {ONE_SCALAR}")
    with _going_on():
        expression = check_result(_decode(result))
    return Epilogue.from_expression(expression, operand_count)


def _refuse_applied_function() -> None:
    """Dynamo traces the forward of a torch.autograd.Function in place of the Function, as no stand-in needs a gradient;
    of that a trace sees nothing else."""
    now = Functions.now()
    if now.applied > _trace.functions.applied:
        refuse_custom_function(now.latest_since(_trace.functions))
