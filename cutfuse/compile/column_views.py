"""What becomes of the nodes behind products whose results are columns of one matrix, and no longer matrices alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..layer.planner import seen_size
from .differentiation import last_writes, memory_of
from .epochs import computes_elements
from .nodes import is_call, name_of, tensor_of
from .products import same

# They give a view where there is one, and otherwise fail or copy.
_VIEWS = {
    *("view", "reshape", "unflatten", "flatten", "transpose", "permute", "unsqueeze", "squeeze", "expand", "narrow"),
    *("select", "movedim", "swapaxes", "getitem", "__getitem__", "chunk", "split", "contiguous", "to", "float", "half"),
    *("bfloat16", "type_as"),
}
# They give a result of its own, whatever the strides of what they read.
_READERS = {
    *("scaled_dot_product_attention", "matmul", "__matmul__", "bmm", "baddbmm", "mm", "linear", "addmm", "einsum"),
    *("cat", "stack", "softmax", "layer_norm", "rms_norm", "repeat_interleave", "index_copy", "index_copy_", "sum"),
    *("mean", "dropout"),
}
_EXAMPLES = ("example_value", "val")


def examples_behind(graph: fx.Graph, columns: Mapping[fx.Node, Tensor]) -> dict[fx.Node, Any] | None:
    """The examples of those nodes whose layout changes with that of the products; None where the products have to stay.

    They do where something writes to a product or a view of it, as two values may then be one or two memories, where
    the caller would be given a view or other strides than before, and where a node would fail or is not known to take
    any strides.
    columns: the products, with their results as columns of a matrix.
    """
    memories = {memory_of(example) for node in columns if (example := tensor_of(node)) is not None}
    if not memories.isdisjoint(last_writes(graph)):
        return None
    changed: dict[fx.Node, Any] = dict(columns)
    for node in graph.nodes:
        if node.op == "output":
            given = [tensor_of(found) for found in node.all_input_nodes]
            is_view = any(example is not None and memory_of(example) in memories for example in given)
            if is_view or not changed.keys().isdisjoint(node.all_input_nodes):
                return None
        if node in columns or changed.keys().isdisjoint(node.all_input_nodes):
            continue
        if not (is_call(node) and (name_of(node) in _VIEWS | _READERS or computes_elements(node))):
            return None
        if _reinterprets(node):  # a trial that fails would print PyTorch's traceback
            return None
        if _has_values_of_data(any_example(node)):  # of which evaluating it again would make others
            return None
        found = evaluated(node, changed)
        if found is None or (name_of(node) == "view" and not _is_view(found, changed.get(node.args[0]))):
            return None
        if not are_alike(found, any_example(node)):
            changed[node] = found
    return {node: example for node, example in changed.items() if node not in columns}


def _reinterprets(node: fx.Node) -> bool:
    """Whether it is the bytes of a tensor that a view is of."""
    given = (*node.args[1:], *node.kwargs.values())
    return name_of(node) == "view" and any(isinstance(value, torch.dtype) for value in given)


def _has_values_of_data(example: Any) -> bool:
    """Whether a size depends on the values of a tensor."""
    return any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf.shape) for leaf in tree_leaves(example))


def _is_view(found: Tensor, source: Any) -> bool:
    """Whether a tensor with the sizes and strides of `source` has such a view, in the call that is traced. An example
    with dimensions of size 1 may have one where no tensor does."""
    if not isinstance(source, Tensor):
        return True
    sizes, strides, wanted = (
        [seen_size(size) for size in values] for values in (source.shape, source.stride(), found.shape)
    )
    if None in (*sizes, *strides, *wanted):
        return False
    with unset_fake_temporarily(), no_python_dispatcher(), suppress(RuntimeError):
        torch.empty_strided(sizes, strides, device="meta").view(wanted)  # type: ignore[arg-type]
        return True
    return False


def evaluated(node: fx.Node, changed: Mapping[fx.Node, Any]) -> Any:
    """What a node gives for changed inputs; None where it fails."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: changed.get(given, any_example(given)))
    with suppress(Exception):
        return called(node, args, kwargs)
    return None


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What the function or method of a node gives for these arguments."""
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def emit(graph: fx.Graph, emitted: list[fx.Node], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call with its example, put into a graph and added to `emitted`. Raises ValueError where the call fails."""
    call = graph.call_method if isinstance(target, str) else graph.call_function
    node = call(target, args, kwargs)
    emitted.append(node)
    example = evaluated(node, {})
    if example is None:
        raise ValueError(f"{name_of(node)} fails for {', '.join(given.name for given in node.all_input_nodes)}")
    set_example(node, example)
    return node


def are_alike(found: Any, before: Any) -> bool:
    """Whether all tensors have the same shapes and strides, and all else is the same."""
    new, old = tree_leaves(found), tree_leaves(before)
    return len(new) == len(old) and all(map(_is_alike, new, old))


def _is_alike(found: Any, before: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(before, Tensor):
        return type(found) is type(before) and not isinstance(found, Tensor) and same(found, before)
    return found.dim() == before.dim() and all(
        map(same, (*found.shape, *found.stride()), (*before.shape, *before.stride()))
    )


def any_example(node: fx.Node) -> Any:
    return next((node.meta[key] for key in _EXAMPLES if key in node.meta), None)


def set_example(node: fx.Node, example: Any) -> None:
    node.meta[next((key for key in _EXAMPLES if key in node.meta), _EXAMPLES[0])] = example
