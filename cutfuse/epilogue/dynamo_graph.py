"""What Dynamo does by itself in a trace, found in the graph that it is making: values, and functions that it applied.

Dynamo hands a call on a Tensor subclass to `__torch_function__`, but not abs() (from torch 2.13 on) and not the
functions of torch.nn.functional that `torch.overrides` leaves out. What these give is a plain tensor, which has the
shape of the stand-in and nothing else. Where it comes back, an empty tensor, a mark, is made
of it, and the graph tells of which node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, constant
from cutfuse.epilogue.modes import Modes, WithoutGradient, function_of_forward, record_call
from cutfuse.epilogue.traced_tensor import evaluate_call
from cutfuse.epilogue.types import ValueType

MARK = (0, 0)
_BUILTINS = {operator.abs: torch.abs}


_GRADIENTS = torch._C._set_grad_enabled
_INFERENCE = ("_enter_inference_mode", "_exit_inference_mode")
_AUTOCAST = ("_enter_autocast", "_exit_autocast")

_Value = Expr | WithoutGradient


class Functions(NamedTuple):
    """The torch.autograd.Functions that Dynamo has applied, in all that it has traced so far."""

    applied: int
    traced: list[CodeType]  # of the Python functions that it has traced
    frames: list[CodeType]  # and of those that it is tracing, the innermost last

    @classmethod
    def now(cls) -> Functions:
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

    def latest_since(self, before: Functions) -> type | None:
        """The class of one that was applied since; None where it is not found."""
        return function_of_forward([*self.traced[len(before.traced) :], *self.frames[len(before.frames) :]])


def value_of_marked(number: int, expressions: Sequence[_Value], start: Modes) -> _Value | None:
    """The value of the tensor of which the last mark of that number was made, or None where it does not come from
    stand-ins and numbers alone. A mark's shape is (its number, *MARK), and a stand-in's (its number, 0).

    start: the modes when the trace began.
    """
    values: dict[torch.fx.Node, _Value] = {}
    marked: torch.fx.Node | None = None
    modes, inference, autocasts = start, 0, 0
    for node in _nodes_of_this_trace():
        if node.target == "new_empty":
            if _shape_of(node) == (number, *MARK):
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
        found = _evaluate(node, values, expressions, start, now)
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


def _evaluate(
    node: torch.fx.Node, values: dict[torch.fx.Node, _Value], expressions: Sequence[_Value], start: Modes, now: Modes
) -> _Value | None:
    """The expression of a node, or None where it does not come from stand-ins and numbers alone."""
    if node.op not in ("call_function", "call_method"):
        return None
    if not node.all_input_nodes:
        return _evaluate_source(node, expressions)
    if any(item not in values for item in node.all_input_nodes):
        return None
    lookup: Callable[[torch.fx.Node], Any] = values.__getitem__
    arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lookup)
    target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
    function = _BUILTINS.get(target, target)
    found = record_call(evaluate_call, function, tuple(arguments), dict(keywords), start, now)
    return found if isinstance(found, _Value) else None


def _evaluate_source(node: torch.fx.Node, expressions: Sequence[_Value]) -> _Value | None:
    """A stand-in, which is an empty tensor, or a tensor that was made of a number."""
    shape = _shape_of(node)
    if node.target is torch.empty and shape is not None and shape[1:] == (0,) and shape[0] < len(expressions):
        return expressions[shape[0]]
    number = node.args[0] if node.args else None
    if shape == () and isinstance(number, bool | int | float) and getattr(node.target, "__name__", "") == "tensor":
        return constant(float(number), ValueType(node.meta["example_value"].dtype, is_scalar=True))
    return None
