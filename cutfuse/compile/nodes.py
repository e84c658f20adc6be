"""Reads the nodes of Dynamo's graph: what each calls, on what, and what it gives."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

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
# Functions with these in their names write statistics in training, whatever their schemas say.
_TRAINABLE_NORMS = ("batch_norm", "instance_norm")


def tensor_of(node: Any) -> Tensor | None:
    """The example of what a node gives, if that is one tensor."""
    if not isinstance(node, fx.Node):
        return None
    example = node.meta.get("example_value", node.meta.get("val"))
    return example if isinstance(example, Tensor) else None


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
