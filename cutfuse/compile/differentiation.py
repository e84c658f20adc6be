"""What autograd has to find of a region as it finds it of the nodes that the region replaces."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..epilogue import Program
from .nodes import is_call, may_write, tensor_of, works_in_place


def last_writes(graph: fx.Graph, outside: Iterable[Any] = ()) -> dict[Any, float]:
    """The place in the graph of the last node that may write to a memory, by what `memory_of` gives of it.

    outside: the memory that the graph around the body of a checkpoint writes to, which may be behind the body.
    """
    found = dict.fromkeys(outside, math.inf)
    for place, node in enumerate(graph.nodes):
        for memory in _memories(_written(node)):
            found[memory] = max(place, found.get(memory, -1))
    return found


def _memories(nodes: Iterable[fx.Node]) -> list[Any]:
    return [memory_of(example) for node in nodes if (example := tensor_of(node)) is not None]


def _written(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node may write to."""
    if not is_call(node) or not may_write(node):
        return []
    bodies = [getattr(node.graph.owning_module, str(given.target), None) for given in node.all_input_nodes]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    if graphs:  # of a higher-order operator, whose inputs have the same examples inside
        inside = {memory for graph in graphs for memory in last_writes(graph)}
        return [given for given in node.all_input_nodes if not inside.isdisjoint(_memories([given]))]
    if works_in_place(node) and node.kwargs.get("out") is None and node.args and isinstance(node.args[0], fx.Node):
        return [node.args[0]]
    return node.all_input_nodes  # of torch._foreach_mul_ the tensors of its lists


def memory_of(example: Tensor) -> Any:
    """What two tensors have in common that are views of the same memory."""
    return example.untyped_storage()._cdata if example.layout is torch.strided else id(example)


def why_changed(out: fx.Node, inputs: Sequence[fx.Node], place: int, writes: Mapping[Any, float]) -> str:
    """Which of a layer's inputs is written behind `place`, where out needs a gradient; empty if none is.

    The layer keeps its inputs for the backward pass, and PyTorch keeps some: not a residual that is added.
    """
    example = tensor_of(out)
    if example is None or not example.requires_grad:
        return ""
    for node in inputs:
        given = tensor_of(node)
        if given is not None and writes.get(memory_of(given), -1) > place:
            return f"{node.name} is written before the backward pass reads it"
    return ""


def why_undifferentiable(out: fx.Node, inputs: Sequence[fx.Node], operands: Sequence[fx.Node], program: Program) -> str:
    """Why a layer's result would need a gradient, and out needs none; empty if it would not. inputs: of the product."""
    example = tensor_of(out)
    if example is None or example.requires_grad or not example.is_floating_point():
        return ""
    if not any(map(needs_gradient, (*inputs, *operands))):
        return ""
    reached = program.inputs_with_gradient
    has_gradient = 0 in reached and any(map(needs_gradient, inputs))
    has_gradient |= any(k + 1 in reached and needs_gradient(node) for k, node in enumerate(operands))
    # Where the nodes have a derivative and their result needs no gradient, gradients are off.
    return "" if has_gradient else "its result has no gradient, and an operator's would"


def needs_gradient(node: fx.Node) -> bool:
    example = tensor_of(node)
    return example is not None and example.requires_grad
