"""Between which nodes of a graph the order may change.

Dynamo's graph is not functional: nodes write to tensors, and enter and leave modes such as autocast and no_grad. Such a
node begins a new epoch. A region moves its product to where its last node stands, so all of its nodes have to belong to
one epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..epilogue.calls import is_known
from ..epilogue.traced_tensor import is_operator
from .nodes import function_of, is_call, may_write, name_of, works_in_place

# Known functions that may give their argument itself, or a view of it.
_MAY_ALIAS = {
    *("contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "positive", "pos", "real"),
    *("conj", "conj_physical", "resolve_conj", "resolve_neg", "dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "rrelu", "expand_as"),
}
_PRODUCTS = {"linear", "matmul", "mm", "addmm", "__matmul__"}
_NESTING = ("_vmap", "_grad", "_jvp", "_add_batch_dim", "_remove_batch_dim", "_functionalize", "_wrap_for_grad")


def find_epochs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of each node's epoch. A node that begins one belongs to it."""
    epochs: dict[fx.Node, int] = {}
    epoch = 0
    for node in graph.nodes:
        if may_write(node) and not updates_fresh_value(node):
            epoch += 1
        epochs[node] = epoch
    return epochs


def updates_fresh_value(node: fx.Node) -> bool:
    """Whether a node updates in place what nothing else can see, so that the result is a value like any other."""
    first = node.args[0] if node.args else None
    if not works_in_place(node) or not isinstance(first, fx.Node) or node.kwargs.get("out") is not None:
        return False
    return len(first.users) == 1 and _allocates(first)


def _allocates(node: fx.Node) -> bool:
    """Whether a node's result is in memory of its own."""
    if not is_call(node) or name_of(node).rstrip("_") in _MAY_ALIAS or node.kwargs.get("out") is not None:
        return False
    if works_in_place(node):
        return updates_fresh_value(node)
    function: Any = function_of(node)
    return name_of(node) in _PRODUCTS or _is_known(function)


def computes_elements(node: fx.Node) -> bool:
    """Whether a node is one of the epilogue language's functions, which give a result of its own or their argument."""
    return is_call(node) and _is_known(function_of(node))


def _is_known(function: Any) -> bool:
    try:
        return is_known(function) or is_operator(function)
    except TypeError:  # not hashable
        return False


def uses_transforms(graph: fx.Graph) -> bool:
    """Whether a graph enters transforms of torch.func, inside of which tensors have hidden dimensions."""
    return any(is_call(node) and _is_transform(node) for node in graph.nodes)


def _is_transform(node: fx.Node) -> bool:
    name, target = name_of(node), node.target
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return name.startswith(_NESTING)
    # An autograd.Function is a call like any other, though it comes from the same modules.
    return name != "autograd_function_apply" and "functorch" in str(type(target).__module__)
