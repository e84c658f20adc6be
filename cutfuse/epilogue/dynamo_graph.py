"""Values of a trace that Dynamo computed by itself, found in the graph that it is making.

Dynamo hands a call on a Tensor subclass to `__torch_function__`, but not abs() (from torch 2.13 on) and not the
functions of torch.nn.functional that `torch.overrides` leaves out. What these give is a plain tensor, which has the
shape of the stand-in and nothing else. Where it comes back, an empty tensor, a mark, is made
of it, and the graph tells of which node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cutfuse.epilogue.expression import Expr, constant
from cutfuse.epilogue.traced_tensor import evaluate_call
from cutfuse.epilogue.types import ValueType

MARK = (0, 0)
_BUILTINS = {operator.abs: torch.abs}


def value_of_marked(number: int, expressions: Sequence[Expr]) -> Expr | None:
    """The value of the tensor of which the last mark of that number was made, or None where it does not come from
    stand-ins and numbers alone. A mark's shape is (its number, *MARK), and a stand-in's (its number, 0)."""
    values: dict[torch.fx.Node, Expr] = {}
    marked: torch.fx.Node | None = None
    for node in _nodes_of_this_trace():
        if node.target == "new_empty":
            if _shape_of(node) == (number, *MARK):
                (marked,) = node.all_input_nodes
            continue
        found = _evaluate(node, values, expressions)
        if found is not None:
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


def _evaluate(node: torch.fx.Node, values: dict[torch.fx.Node, Expr], expressions: Sequence[Expr]) -> Expr | None:
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
    found = evaluate_call(_BUILTINS.get(target, target), tuple(arguments), dict(keywords))
    return found if isinstance(found, Expr) else None


def _evaluate_source(node: torch.fx.Node, expressions: Sequence[Expr]) -> Expr | None:
    """A stand-in, which is an empty tensor, or a tensor that was made of a number."""
    shape = _shape_of(node)
    if node.target is torch.empty and shape is not None and shape[1:] == (0,) and shape[0] < len(expressions):
        return expressions[shape[0]]
    number = node.args[0] if node.args else None
    if shape == () and isinstance(number, bool | int | float) and getattr(node.target, "__name__", "") == "tensor":
        return constant(float(number), ValueType(node.meta["example_value"].dtype, is_scalar=True))
    return None
