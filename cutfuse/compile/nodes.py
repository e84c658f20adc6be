"""Reads the nodes of Dynamo's graph: what each calls, gives and writes, and what may not be moved.

The graph is not functional: nodes write to tensors, and enter and leave modes such as autocast and no_grad. Such a node
begins a new epoch. A region moves its product to where its last node stands, so all of its nodes have to belong to one
epoch, and autograd has to find of the region what it finds of the nodes that the region replaces.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..epilogue import Program
from ..epilogue.calls import is_known
from ..epilogue.traced_tensor import is_operator

EXAMPLES = ("example_value", "val")  # where Dynamo and AOTAutograd put the example of what a node gives
_IN_PLACE_NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE_OPERATORS = {getattr(operator, f"i{name}"): getattr(operator, f"__{name}__") for name in _IN_PLACE_NAMES}
# Dunder methods that write, as Dynamo may spell them.
_WRITING_DUNDERS = {"__setitem__", "__set__", "__delitem__", *(f"__i{name}__" for name in _IN_PLACE_NAMES)}
# Namespaces whose functions change what later nodes run in, or communicate.
_STATEFUL_NAMESPACES = ("torch.cuda", "torch.xpu", "torch.accelerator", "torch.distributed", "torch.random")
# How Dynamo writes an attribute of a local value: of the model itself where a graph begins in its forward method.
_OF_LOCAL = re.compile(r"L\['\w+'\]\.(?!_orig_mod\b|__)\w")
# A module of PyTorch's whose functions have the names of others: its reductions take a mask.
_NAMESAKES = "torch.masked"
_OPERATORS = ("_operator", "operator")
_PYTHONS_MODULES = (*_OPERATORS, "math", "builtins")
DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
# Functions with these in their names write statistics in training, whatever their schemas say.
_TRAINABLE_NORMS = ("batch_norm", "instance_norm")


def any_example(node: fx.Node) -> Any:
    """The example of what a node gives: a tensor, a number, or several of them; None where there is none."""
    return next((node.meta[key] for key in EXAMPLES if key in node.meta), None)


def set_example(node: fx.Node, example: Any) -> None:
    node.meta[next((key for key in EXAMPLES if key in node.meta), EXAMPLES[0])] = example


def tensor_of(node: Any) -> Tensor | None:
    """The example of what a node gives, if that is one tensor."""
    example = any_example(node) if isinstance(node, fx.Node) else None
    return example if isinstance(example, Tensor) else None


def example_of(node: Any) -> Tensor:
    """The example of a node that is known to give a tensor."""
    example = tensor_of(node)
    assert example is not None
    return example


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What the function or method of a node gives for these arguments."""
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def name_of(node: fx.Node) -> str:
    """The name of what a node calls, without PyTorch's namespaces. Another library's "linear" is none of PyTorch's."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).removeprefix("aten::")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name).removeprefix("aten::")
    if isinstance(target, str):
        return target
    module, name = str(getattr(target, "__module__", None) or ""), str(getattr(target, "__name__", target))
    if module in _OPERATORS:  # whose `and_` and `or_` write to nothing
        return name.removesuffix("_")
    return name if _is_pytorchs(module) and not module.startswith(_NAMESAKES) else f"{module}.{name}"


def _is_pytorchs(module: str) -> bool:
    """Whether a module is PyTorch's or one of those of Python that Dynamo's graphs call."""
    return not module or module in _PYTHONS_MODULES or module == "torch" or module.startswith("torch.")


def function_of(node: fx.Node) -> Callable[..., Any] | None:
    """The function that a node calls, out of place where it works in place. None if there is no such function."""
    if node.op == "call_method":
        name = str(node.target)
        return getattr(torch.Tensor, name[:-1] if _ends_in_place(name) else name, None)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]  # the node calls it
    if target in _IN_PLACE_OPERATORS:
        return _IN_PLACE_OPERATORS[target]  # type: ignore[no-any-return]
    name = name_of(node)
    if not _ends_in_place(name) or isinstance(target, torch._ops.OpOverload):
        return target
    found = next((getattr(home, name[:-1]) for home in (torch, F) if hasattr(home, name[:-1])), None)
    # F.elu_ has parameters where F.elu has `inplace`.
    return None if _place_of_inplace(found) < len(node.args) else found


def _ends_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def works_in_place(node: fx.Node) -> bool:
    """Whether a node writes to its first argument and gives that."""
    if node.target in _IN_PLACE_OPERATORS:
        return True
    name = name_of(node)
    if "." in name or "::" in name:  # another library's may write to any of its arguments
        return False
    return _ends_in_place(name) or _is_set(node.kwargs.get("inplace")) or _is_inplace_activation(node)


def _is_set(flag: Any) -> bool:
    """Whether an argument is true, or may be."""
    return isinstance(flag, fx.Node) or bool(flag)


def _is_inplace_activation(node: fx.Node) -> bool:
    """An activation of torch.nn.functional whose argument `inplace`, by position, is true."""
    function: Any = node.target
    if node.op != "call_function" or getattr(function, "__module__", "") != "torch.nn.functional":
        return False
    place = _place_of_inplace(function)
    return place < len(node.args) and _is_set(node.args[place])


def _place_of_inplace(function: Any) -> int:
    """The place of a Python function's parameter `inplace`; behind all where it has none."""
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else sys.maxsize


def may_write(node: fx.Node) -> bool:
    """Whether a node may change a tensor, or the modes in which later nodes run.

    What is not known to do neither counts as if it did: functions from outside of PyTorch, and private ones.
    """
    if not is_call(node):
        return node.op == "call_module"
    if _renormalises(node) or (any(part in name_of(node) for part in _TRAINABLE_NORMS) and not is_evaluated_norm(node)):
        return True
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = name_of(node)
    if works_in_place(node) or node.kwargs.get("out") is not None or name in _WRITING_DUNDERS or name == "setitem":
        return True
    if node.op == "call_method" or (name.startswith("__") and name.endswith("__")):
        return False
    module = str(getattr(target, "__module__", None) or "")
    return not _is_pytorchs(module) or name.startswith("_") or module.startswith(_STATEFUL_NAMESPACES)


def _renormalises(node: fx.Node) -> bool:
    """Whether an embedding writes to its weight: rows longer than `max_norm`, where that is given."""
    if node.target not in (F.embedding, F.embedding_bag):  # those of torch and ATen have no max_norm
        return False
    named = named_arguments(node, ("input", "weight", "padding_idx", "max_norm"))  # or offsets in the third place
    return named.get("max_norm") is not None


def is_evaluated_norm(node: fx.Node) -> bool:
    """Whether a batch_norm or instance_norm takes its statistics, and does not change them."""
    named = named_arguments(node, ("input", "running_mean", "running_var", "weight", "bias", "training"))
    flag = named.get("training", node.kwargs.get("use_input_stats", name_of(node) == "instance_norm"))
    return flag is False


def named_arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a node by these names of its positional parameters."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def module_of(node: fx.Node) -> str:
    """The path of the module that a node comes from, such as "layers.0.fc1"; the node's own name outside of any."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    # Of a method, as a module's own compile() makes one of the model, Dynamo names the object that it belongs to.
    paths = [str(path).replace("].__self__", "]") for path, _ in stack.values()]
    root, path = paths[0], paths[-1]
    if path.startswith((f"{root}.", f"{root}[")) and not _OF_LOCAL.match(root):
        path = path.removeprefix(root)
    path = re.sub(r"\[['\"]?([^\]'\"]+)['\"]?\]", r".\1", re.sub(r"^[LG]\[[^\]]*\]", "", path))
    return re.sub(r"\.?\b(_modules|_orig_mod)\.|^\.+", ".", path).strip(".") or node.name


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


# Known functions that may give their argument itself, or a view of it.
_MAY_ALIAS = {
    *("contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "positive", "pos", "real"),
    *("conj", "conj_physical", "resolve_conj", "resolve_neg", "rrelu", "expand_as"),
    *DROPOUTS,
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


class Schedule:
    """What the searches of one graph share.

    order: the place of each node. epochs: see `find_epochs`. writes: see `last_writes`. taken: the nodes of regions so
    far.
    """

    def __init__(self, graph: fx.Graph, writes: dict[Any, float]) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.epochs = find_epochs(graph)
        self.writes = writes
        self.taken: set[fx.Node] = set()
