"""Keeps the attention that eager code runs, where a traced model asks for a slower one.

Eager models look at their mask, and pass none, or `is_causal`, to attention where that is the same. A traced model has
no values to look at, so it passes the mask, which flash attention does not take. It also repeats keys and values that
heads share. Both are undone where the graph proves that the attention is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._pytree import tree_map

from .layouts import are_alike, examples_behind
from .nodes import (
    any_example,
    called,
    find_epochs,
    is_call,
    may_write,
    memory_of,
    name_of,
    named_arguments,
    set_example,
    tensor_of,
    why_changed,
)
from .products import same, same_shape
from .rewriting import Emit, UnfitError, emitting

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MOST_ELEMENTS = 1 << 26  # of a mask that is computed at compilation: 8192 x 8192
# Functions, methods and operators that make masks: the same bits on every device, nothing written, nothing random.
_OF_SHAPES = {"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"}  # they read no values
_PURE = _OF_SHAPES | {
    *("arange", "ones", "zeros", "full", "eye", "scalar_tensor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "bitwise_and", "bitwise_or", "bitwise_not"),
    *("logical_and", "logical_or", "logical_not", "add", "sub", "mul", "neg", "abs", "floordiv", "floor_divide"),
    *("where", "masked_fill", "tril", "triu", "diff", "cumsum", "to", "bool", "int", "long", "float", "half"),
    *("bfloat16", "type", "type_as", "getitem", "view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze"),
    *("transpose", "permute", "flatten", "unflatten", "repeat", "contiguous", "clone", "cat", "stack"),
}
# What repeats heads, from its result back to `[batch, kept heads, length, width]`.
_REPEATING = (("reshape", "view", "flatten"), ("expand",), ("getitem", "unsqueeze"))


def keep_attention(graph: fx.Graph, written: Mapping[Any, float], warn: Callable[[Exception], None]) -> bool:
    """Rewrites the attention of a graph. Gives whether any was.

    written: the memory that this graph, or one around it, writes to; see `last_writes`.
    warn: called with an error, which leaves the attention as it was.
    """
    constants, epochs = _Constants(written), find_epochs(graph)
    is_changed = False
    for place, node in enumerate(list(graph.nodes)):
        if not is_call(node) or name_of(node) != "scaled_dot_product_attention":
            continue
        try:
            given = named_arguments(node, _PARAMETERS)
            unmasked = _without_mask(given, constants)
            wanted = _with_shared_heads(unmasked, epochs, epochs[node])
            if why_changed(node, [wanted["key"], wanted["value"]], place, written):  # the repeated ones are copies
                wanted = unmasked
            is_changed |= wanted != given and _replace(graph, node, wanted)
        except Exception as error:
            warn(error)
    return is_changed


def _without_mask(given: dict[str, Any], constants: _Constants) -> dict[str, Any]:
    """The arguments of attention without a mask that hides nothing, or that is what `is_causal` means."""
    mask, query, key = given.get("attn_mask"), tensor_of(given.get("query")), tensor_of(given.get("key"))
    if not isinstance(mask, fx.Node) or query is None or key is None or given.get("is_causal", False) is not False:
        return given
    is_causal = constants.is_causal(mask, (query.shape[-2], key.shape[-2]))
    return given if is_causal is None else {**given, "attn_mask": None, "is_causal": is_causal}


def _with_shared_heads(given: dict[str, Any], epochs: Mapping[fx.Node, int], epoch: int) -> dict[str, Any]:
    """The arguments with keys and values as they are before they are repeated for the heads that share them."""
    query, mask = tensor_of(given.get("query")), tensor_of(given.get("attn_mask"))
    if query is None or query.dim() != 4 or given.get("enable_gqa", False) is not False:
        return given
    key, value = (_shared(given.get(name), query.shape[1], epochs, epoch) for name in ("key", "value"))
    if key is None or value is None or any_example(key).shape[1] != any_example(value).shape[1]:
        return given
    wanted = {**given, "key": key, "value": value, "enable_gqa": True}
    dropout, is_causal = given.get("dropout_p", 0.0), given.get("is_causal", False)
    if same(query.shape[-2], 1):
        is_of_all_heads = mask is None or all(same(size, 1) for size in mask.shape[:-1][-2:])
        return wanted if is_of_all_heads and is_causal is False and dropout == 0 else given
    chooses_kernels = any(name_of(node) == "_sdpa_kernel" for node in key.graph.nodes)  # its choice is not on here
    is_taken = mask is None and not chooses_kernels and _takes_shared_heads(query, key, value, dropout, is_causal)
    return wanted if is_taken else given


def _shared(node: Any, heads: Any, epochs: Mapping[fx.Node, int], epoch: int) -> fx.Node | None:
    """The `[batch, kept heads, length, width]` that a node repeats head by head; None if it does not give as many, or
    if something may be written in between: the node is a copy."""
    chain = [node]
    for names in _REPEATING:
        last = chain[-1]
        if not isinstance(last, fx.Node) or not last.args or epochs.get(last) != epoch or name_of(last) not in names:
            return None
        chain.append(last.args[0])
    shapes = [example.shape for step in chain if (example := tensor_of(step)) is not None]
    if [len(shape) for shape in shapes] != [4, 5, 5, 4]:
        return None
    (batch, kept, *rest), count = shapes[-1], shapes[1][2]
    if not all(map(is_concrete_int, (kept, count))) or not same(kept * count, heads):
        return None
    steps = (batch, kept * count, *rest), (batch, kept, count, *rest), (batch, kept, 1, *rest)
    is_repeated = all(map(same_shape, shapes, map(torch.Size, steps)))
    return chain[-1] if is_repeated and _keeps_order(chain[-2]) else None


def _keeps_order(node: fx.Node) -> bool:
    """Whether an index is of slices, new dimensions and integers: data, lists, tuples and ranges take any order."""
    index: Any = node.args[1] if len(node.args) > 1 else None
    kinds = slice | int | EllipsisType | None
    return all(isinstance(item, kinds) for item in (index if isinstance(index, tuple) else (index,)))


def _takes_shared_heads(query: Tensor, key: fx.Node, value: fx.Node, dropout: float, is_causal: bool) -> bool:
    """Whether flash attention runs with heads that share keys and values. Without it PyTorch would decompose it."""
    keys, values = tensor_of(key), tensor_of(value)
    if query.device.type != "cuda" or keys is None or values is None:
        return False
    parameters = torch.backends.cuda.SDPAParams(query, keys, values, None, dropout, is_causal, True)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _replace(graph: fx.Graph, node: fx.Node, wanted: dict[str, Any]) -> bool:
    """Puts attention with other arguments in a node's place, unless what reads it needs what it had."""
    try:
        with emitting(graph, node) as call:
            new = _emit(call, node, wanted)
            example, before = tensor_of(new), tensor_of(node)
            behind = _changed_behind(graph, node, example, before)
    except UnfitError:
        return False
    new.meta = dict(node.meta)
    set_example(new, _differentiated(example, before))
    for changed, found in behind.items():
        set_example(changed, _differentiated(found, any_example(changed)))
    node.replace_all_uses_with(new)
    _erase_unused(node)
    return True


def _changed_behind(
    graph: fx.Graph, node: fx.Node, example: Tensor | None, before: Tensor | None
) -> dict[fx.Node, Any]:
    """The examples that change behind a node whose own does. Raises UnfitError where something needs the former one."""
    if example is None or before is None or not same_shape(example.shape, before.shape):
        raise UnfitError("it has another shape")
    if example.dtype != before.dtype:  # by an autocast of the graph, which is not on here
        raise UnfitError("it has another type")
    behind = {} if are_alike(example, before) else examples_behind(graph, {node: example})
    if behind is None:
        raise UnfitError("what reads it needs the strides that it had")
    return behind


def _emit(call: Emit, node: fx.Node, wanted: dict[str, Any]) -> fx.Node:
    """The nodes of the attention. One query of each head becomes several of each head that is kept: no kernel with a
    mask takes shared heads."""
    query, key = tensor_of(wanted["query"]), tensor_of(wanted["key"])
    if not wanted.get("enable_gqa") or query is None or key is None or not same(query.shape[-2], 1):
        return call(node.target, **wanted)
    kept = key.shape[1]
    rows = call("unflatten", call("squeeze", wanted["query"], 2), 1, (kept, query.shape[1] // kept))
    found = call(node.target, **{**wanted, "query": rows, "enable_gqa": False})
    return call("unsqueeze", call("flatten", found, 1, 2), 2)


def _differentiated(found: Any, before: Any) -> Any:
    """An example that is differentiated as the one before was: those of views are made without gradients."""
    return tree_map(
        lambda new, old: new.requires_grad_(old.requires_grad) if isinstance(new, Tensor) else new, found, before
    )


def _erase_unused(node: fx.Node) -> None:
    """Takes out a node that nothing reads, and what was there for it alone."""
    stack = {node: None}
    while stack:
        found, _ = stack.popitem()
        if is_call(found) and not found.users and not may_write(found):
            stack.update(dict.fromkeys(found.all_input_nodes))
            found.graph.erase_node(found)


def _any_value(node: fx.Node) -> Tensor | None:
    """A tensor of a node's shape and type, of zeros."""
    example = tensor_of(node)
    if example is None or not all(map(is_concrete_int, example.shape)):
        return None
    return torch.zeros((), dtype=example.dtype).expand(example.shape)


class _Constants:
    """The values of a graph that are the same in every call.

    written: the memory that something writes to, whose values are none.
    """

    def __init__(self, written: Mapping[Any, float]) -> None:
        self.written = written
        self.values: dict[fx.Node, Tensor | None] = {}

    def is_causal(self, mask: fx.Node, lengths: tuple[Any, Any]) -> bool | None:
        """Whether a mask of so many queries and keys is that of `is_causal`; None if it hides anything else."""
        while name_of(mask) == "expand" and isinstance(mask.args[0], fx.Node):
            mask = mask.args[0]  # which may be by symbols
        with unset_fake_temporarily(), no_python_dispatcher(), torch.no_grad(), torch.device("cpu"):
            value = self._value(mask)
            if value is None:
                return None
            is_seen, is_hidden = (value, ~value) if value.dtype == torch.bool else (value == 0, value == -math.inf)
            if is_seen.all():
                return False
            rows, columns = lengths
            if not is_concrete_int(rows) or not is_concrete_int(columns) or value.shape[-2:] != (rows, columns):
                return None
            lower = torch.ones(rows, columns, dtype=torch.bool).tril()  # flash attention aligns others at the last key
            return True if rows == columns and (is_seen == lower).all() and (is_hidden != lower).all() else None

    def _value(self, node: fx.Node) -> Tensor | None:
        if node not in self.values:
            self.values[node] = self._computed(node)
        return self.values[node]

    def _computed(self, node: fx.Node) -> Tensor | None:
        example = tensor_of(node)
        name = name_of(node).strip("_")
        if example is None or not is_call(node) or name not in _PURE or may_write(node):
            return None
        if not all(map(is_concrete_int, example.shape)) or example.numel() > _MOST_ELEMENTS:
            return None
        given = {
            source: _any_value(source) if name in _OF_SHAPES and source is node.args[0] else self._value(source)
            for source in node.all_input_nodes
        }
        if memory_of(example) in self.written or any(value is None for value in given.values()):
            return None

        def on_cpu(argument: Any) -> Any:
            return torch.device("cpu") if isinstance(argument, torch.device) else given.get(argument, argument)

        args, keywords = fx.node.map_aggregate((node.args, node.kwargs), on_cpu)
        with suppress(Exception):
            value = called(node, args, keywords)
            return value if value.shape == example.shape and value.dtype == example.dtype else None
        return None
