"""Puts the operator of a region in the place of the nodes that it covers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from ..ops import schema
from .lifting import NORM_SCALE, Operand
from .nodes import name_of, named_arguments, tensor_of
from .products import Product, same
from .region import Region


class UnfitError(Exception):
    """What was emitted does not give what the graph has; the message says what differs."""


class Rewriter:
    """Emits regions into one graph. A region that fails leaves the graph as it was."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.replaced: dict[fx.Node, fx.Node] = {}

    def rewrite(self, region: Region) -> None:
        """Replaces a region's nodes. Raises UnfitError, or what PyTorch raises, where the result would differ."""
        emitted: list[fx.Node] = []
        try:
            with self.graph.inserting_before(region.out), _fake_mode_of(region.out), torch.no_grad():
                y = _Emission(self, emitted).emit(region)
                siblings = [] if region.product.part is None else self._emit_siblings(region.product, emitted)
            _check_result(y, region.out)
            for node, sibling in siblings:
                _check_result(node, sibling, any_strides=True)
        except Exception:
            for node in reversed(emitted):
                self.graph.erase_node(node)
            raise
        y.meta = {**y.meta, **region.out.meta}
        region.out.replace_all_uses_with(y)
        self.replaced[region.out] = y
        for node, sibling in siblings:
            node.meta = {**node.meta, **sibling.meta}
            sibling.replace_all_uses_with(node)
            self.replaced[sibling] = node
        self._erase([region.out, *reversed(region.cone), *(sibling for _, sibling in siblings)])
        if region.product.part is not None:
            whole = region.product.part.whole
            self._erase([*whole.users, whole])

    def _erase(self, nodes: list[fx.Node]) -> None:
        for node in nodes:  # in-place nodes are no dead code to FX
            if not node.users:
                self.graph.erase_node(node)

    def _emit_siblings(self, product: Product, emitted: list[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """The other parts of a product as products of their own, each with the node that it is to replace."""
        assert product.part is not None
        with self.graph.inserting_before(product.part.whole):
            emission = _Emission(self, emitted)
            return [
                (emission.product(product, start, length), sibling) for sibling, start, length in product.part.siblings
            ]

    def current(self, node: Any) -> Any:
        """The node that stands for another one by now."""
        while node in self.replaced:
            node = self.replaced[node]
        return node


class _Emission:
    """The nodes of one region, with their examples."""

    def __init__(self, rewriter: Rewriter, emitted: list[fx.Node]) -> None:
        self.rewriter = rewriter
        self.emitted = emitted

    def emit(self, region: Region) -> fx.Node:
        product = region.product
        x: fx.Node = self.rewriter.current(product.x)
        for view in region.rows_before:
            x = self._view_of_x(view, x)
        part = product.part
        weight, bias = self._parameters(product, *((None, None) if part is None else (part.start, part.length)))
        y = self._call(
            schema.layer,
            x,
            weight,
            bias,
            [self._operand(operand) for operand in region.operands],
            region.epilogue.text,
            region.reduction,
            region.keepdim,
            region.out_dtype,
        )
        for view in region.rows_after:
            y = self._view(view, y, view.args[1:])
        return y

    def product(self, product: Product, start: int, length: int) -> fx.Node:
        """PyTorch's own product of some columns."""
        x = self.rewriter.current(product.x)
        return self._call(torch._C._nn.linear, x, *self._parameters(product, start, length))

    def _parameters(self, product: Product, start: int | None, length: int | None) -> tuple[fx.Node, fx.Node | None]:
        """The weight as `[N, K]` and the bias, of some columns of the product or of all."""
        weight, bias = self.rewriter.current(product.weight), self.rewriter.current(product.bias)
        if product.is_transposed:
            weight = self._call(torch.Tensor.t, weight)
        if start is None:
            return weight, bias
        weight = self._call(torch.Tensor.narrow, weight, 0, start, length)
        return weight, None if bias is None else self._call(torch.Tensor.narrow, bias, 0, start, length)

    def _operand(self, operand: Operand) -> fx.Node:
        source: fx.Node = self.rewriter.current(operand.source)
        return self._norm_row(source, operand.part) if operand.part else source

    def _norm_row(self, norm: fx.Node, part: str) -> fx.Node:
        """The row by which a batch norm in evaluation multiplies, or the one that it adds."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        named = {name: self.rewriter.current(node) for name, node in named_arguments(norm, names).items()}
        variance = self._call(torch.Tensor.float, named["running_var"])
        scale = self._call(torch.rsqrt, self._call(torch.add, variance, named.get("eps", 1e-5)))
        if named.get("weight") is not None:
            scale = self._call(torch.mul, scale, named["weight"])
        if part == NORM_SCALE:
            return scale
        shift = self._call(torch.neg, self._call(torch.mul, scale, named["running_mean"]))
        return shift if named.get("bias") is None else self._call(torch.add, shift, named["bias"])

    def _view_of_x(self, view: fx.Node, x: fx.Node) -> fx.Node:
        """The view of rows, of a matrix with as many rows and other columns."""
        if name_of(view) not in ("view", "reshape"):
            return self._view(view, x, view.args[1:])
        *leading, _ = self._sizes(view.args[1:])
        return self._view(view, x, (*leading, _last_size(x) if -1 in leading else -1))

    def _sizes(self, given: Any) -> Any:
        """The sizes of a view: its arguments, the items of one, or those of a node that gives them all."""
        if len(given) != 1:
            return given
        if isinstance(given[0], tuple | list):
            return given[0]
        sizes = _example(given[0]) if isinstance(given[0], fx.Node) else None
        if not isinstance(sizes, tuple | list):
            return given
        return [self._call(operator.getitem, given[0], index) for index in range(len(sizes))]

    def _view(self, view: fx.Node, source: fx.Node, arguments: tuple[Any, ...]) -> fx.Node:
        name = "reshape" if name_of(view) == "view" else name_of(view)  # as the strides of x may be others
        return self._call(getattr(torch.Tensor, name), source, *arguments, **view.kwargs)

    def _call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> fx.Node:
        if isinstance(function, type(torch.Tensor.t)):  # methods of Tensor
            node = self.rewriter.graph.call_method(function.__name__, arguments, keywords)
        else:
            node = self.rewriter.graph.call_function(function, arguments, keywords)
        self.emitted.append(node)
        given, named = fx.node.map_arg((arguments, keywords), _example)
        node.meta["example_value"] = function(*given, **named)
        return node


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _last_size(node: fx.Node) -> Any:
    example = tensor_of(node)
    assert example is not None
    if not is_concrete_int(example.shape[-1]):
        raise UnfitError("the product's inner size is not known at compile time")
    return int(example.shape[-1])


@contextlib.contextmanager
def _fake_mode_of(node: fx.Node) -> Iterator[None]:
    example: Any = tensor_of(node)
    mode = getattr(example, "fake_mode", None)
    with contextlib.nullcontext() if mode is None else mode:
        yield


def _check_result(emitted: fx.Node, expected: fx.Node, any_strides: bool = False) -> None:
    """Raises UnfitError where shape, type or strides of the new node differ from those of the one it replaces."""
    found, example = tensor_of(emitted), tensor_of(expected)
    if found is None or example is None:
        raise UnfitError("there is no example of the result")
    if found.dtype != example.dtype or found.device != example.device or found.dim() != example.dim():
        raise UnfitError(f"the result would be {_describe(found)}, and PyTorch's is {_describe(example)}")
    for size, other, stride, other_stride in zip(
        found.shape, example.shape, found.stride(), example.stride(), strict=True
    ):
        if not same(size, other) or not (any_strides or same(stride, other_stride) or same(size, 1)):
            raise UnfitError(f"the result would be {_describe(found)}, and PyTorch's is {_describe(example)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tuple(tensor.stride())} on {tensor.device}"
