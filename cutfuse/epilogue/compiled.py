"""Tracing inside torch.compile.

Dynamo traces the user's callable on a subclass of Tensor. Each operation on it is a call of `_record`, which Dynamo
runs while it traces and whose result it treats as a constant. Dynamo itself reads what the callable reads from outside,
and guards it: when a closure, a global or an attribute changes, the region is compiled again. All that a trace leaves
in the graph are empty tensors that nothing uses.

What Dynamo does by itself is found in the graph that it is making. It hands a call on a Tensor subclass to
`__torch_function__`, but not abs() (from torch 2.13 on) and not the functions of torch.nn.functional that
`torch.overrides` leaves out. What these give is a plain tensor, which has the shape of the stand-in and nothing else.
Where it comes back, an empty tensor, a mark, is made of it, and the graph tells of which node.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch

from cutfuse.epilogue.errors import EpilogueError, evaluated_while_compiling, refuse_list
from cutfuse.epilogue.expression import Expr, constant, refuse_captured
from cutfuse.epilogue.lower import check_length
from cutfuse.epilogue.trace import ONE_SCALAR, Epilogue, check_result, epilogue_called, symbolic_arguments
from cutfuse.epilogue.traced_tensor import (
    Modes,
    WithoutGradient,
    check_end,
    function_of_forward,
    record_call,
    refuse_custom_function,
)
from cutfuse.epilogue.types import INPUT_DTYPE, Autocast, InputDtype, ValueType, ValueTypes, under_autocast

_MARK = (0, 0)
_BUILTINS = {operator.abs: torch.abs}
_GRADIENTS = torch._C._set_grad_enabled
_INFERENCE = ("_enter_inference_mode", "_exit_inference_mode")
_AUTOCAST = ("_enter_autocast", "_exit_autocast")

_Value = Expr | WithoutGradient


class _Trace(threading.local):
    """The expressions of the trace under way. Their numbers start at 0, so that equal traces give equal graphs."""

    expressions: list[_Value]
    mark_count: int
    types: ValueTypes
    # when it began
    modes: Modes
    autocasts: tuple[Autocast | None, ...]
    functions: _Functions


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
        value.new_empty((number, *_MARK))
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
            found = _value_of_marked(number)
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
    _trace.types, _trace.modes, _trace.functions = types, Modes.now(), _Functions.now()
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
            found = record_call(function, given, named, _trace.modes, Modes.now())
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
    now = _Functions.now()
    if now.applied > _trace.functions.applied:
        refuse_custom_function(now.latest_since(_trace.functions))


class _Functions(NamedTuple):
    """The torch.autograd.Functions that Dynamo has applied, in all that it has traced so far."""

    applied: int
    traced: list[CodeType]  # of the Python functions that it has traced
    frames: list[CodeType]  # and of those that it is tracing, the innermost last

    @classmethod
    def now(cls) -> _Functions:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # takes 2 s to import outside of a compilation
        from torch._dynamo.variables.misc import AutogradFunctionContextVariable

        context = torch._guards.TracingContext.try_get()
        if context is None:  # called without Dynamo
            return cls(0, [], [])
        output = InstructionTranslator.current_tx().output
        made = output.side_effects.id_to_variable.values()
        count = sum(isinstance(item, AutogradFunctionContextVariable) for item in made)
        frames: list[CodeType] = []
        translator: Any = output.current_tx
        while translator is not None:
            frames.insert(0, translator.f_code)
            translator = getattr(translator, "parent", None)
        return cls(count, list(getattr(context, "traced_code", ())), frames)

    def latest_since(self, before: _Functions) -> type | None:
        """The class of one that was applied since; None where it is not found."""
        return function_of_forward([*self.traced[len(before.traced) :], *self.frames[len(before.frames) :]])


def _value_of_marked(number: int) -> _Value | None:
    """The value of the tensor of which the last mark of that number was made, or None where it does not come from
    stand-ins and numbers alone. A mark's shape is (its number, *_MARK), and a stand-in's (its number, 0).
    """
    values: dict[torch.fx.Node, _Value] = {}
    marked: torch.fx.Node | None = None
    modes, inference, autocasts = _trace.modes, 0, 0
    for node in _nodes_of_this_trace():
        if node.target == "new_empty":
            if _shape_of(node) == (number, *_MARK):
                (marked,) = node.all_input_nodes
            continue
        name = getattr(node.target, "__name__", "")
        if node.target is _GRADIENTS:
            modes = modes._replace(records_gradients=bool(node.args[0]))
        elif name in _INFERENCE:
            inference += 1 if name == _INFERENCE[0] and node.args[0] else -1 if name == _INFERENCE[1] else 0
        elif name in _AUTOCAST:
            autocasts += 1 if name == _AUTOCAST[0] else -1
        now = modes._replace(records_gradients=modes.records_gradients and not inference)
        found = _evaluate(node, values, now)
        if found is None:
            continue
        if autocasts and node.all_input_nodes:
            raise EpilogueError(
                f"the epilogue calls {name or node.target} in a torch.autocast of its own: enter torch.autocast around "
                "the call, or cast the values in the epilogue (.float(), .half())"
            )
        values[node] = found
    return None if marked is None else values.get(marked)


def _nodes_of_this_trace() -> list[torch.fx.Node]:
    """From the stand-in of z on, which a trace makes first."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # takes 2 s to import outside of a compilation

    nodes = list(InstructionTranslator.current_tx().output.graph.nodes)
    starts = [place for place, node in enumerate(nodes) if node.target is torch.empty and _shape_of(node) == (0, 0)]
    return nodes[starts[-1] :]


def _shape_of(node: torch.fx.Node) -> tuple[int, ...] | None:
    example = node.meta.get("example_value")
    return tuple(example.shape) if isinstance(example, torch.Tensor) else None


def _evaluate(node: torch.fx.Node, values: dict[torch.fx.Node, _Value], now: Modes) -> _Value | None:
    """The expression of a node, or None where it does not come from stand-ins and numbers alone."""
    if node.op not in ("call_function", "call_method"):
        return None
    if not node.all_input_nodes:
        return _evaluate_source(node)
    if any(item not in values for item in node.all_input_nodes):
        return None
    lookup: Callable[[torch.fx.Node], Any] = values.__getitem__
    arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lookup)
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    function = _BUILTINS.get(target, target)
    found = record_call(function, tuple(arguments), dict(keywords), _trace.modes, now)
    return found if isinstance(found, _Value) else None


def _evaluate_source(node: torch.fx.Node) -> _Value | None:
    """A stand-in, which is an empty tensor, or a tensor that was made of a number."""
    shape, expressions = _shape_of(node), _trace.expressions
    if node.target is torch.empty and shape is not None and shape[1:] == (0,) and shape[0] < len(expressions):
        return expressions[shape[0]]
    number = node.args[0] if node.args else None
    if shape == () and isinstance(number, bool | int | float) and getattr(node.target, "__name__", "") == "tensor":
        return constant(float(number), ValueType(node.meta["example_value"].dtype, is_scalar=True))
    return None
