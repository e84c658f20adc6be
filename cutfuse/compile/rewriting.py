"""Puts the operator of a region in the place of the nodes that it covers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from ..epilogue.program import arithmetic_dtype
from ..layer import schema
from .lifting import NORM_SCALE, Operand, inverse, is_row_slice, permutation_of
from .nodes import any_example, called, example_of, name_of, named_arguments, set_example, tensor_of
from .products import Part, Product, same, same_shape
from .regions import Region

_SYMBOL = -1  # the size of a dimension that a view gets by itself


class UnfitError(Exception):
    """What was emitted does not give what the graph has; the message says what differs."""


class Emit(Protocol):
    """Puts a call of a function, or of a Tensor's method by its name, into a graph, with its example."""

    def __call__(self, target: Any, *arguments: Any, **keywords: Any) -> fx.Node: ...


@contextlib.contextmanager
def emitting(graph: fx.Graph, place: fx.Node) -> Iterator[Emit]:
    """A context that gives what puts calls before a node. A failure within it leaves the graph as it was."""
    emitted: list[fx.Node] = []

    def emit(target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        call = graph.call_method if isinstance(target, str) else graph.call_function
        emitted.append(node := call(target, arguments, keywords))
        set_example(node, called(node, *fx.node.map_arg((arguments, keywords), any_example)))
        return node

    try:
        with graph.inserting_before(place), fake_mode_of(place), torch.no_grad():
            yield emit
    except Exception:
        for node in reversed(emitted):
            graph.erase_node(node)
        raise


class Rewriter:
    """Emits regions into one graph. A region that fails leaves the graph as it was."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.replaced: dict[fx.Node, fx.Node] = {}

    def rewrite(self, region: Region) -> None:
        """Replaces a region's nodes. Raises UnfitError, or what PyTorch raises, where the result would differ."""
        part = region.product.part
        siblings: list[tuple[fx.Node, fx.Node]] = []
        with emitting(self.graph, region.out) as emit:
            y = _Emission(self, emit).emit(region)
            _check_result(y, region.out)
            if part is not None:
                siblings = self._emit_siblings(region.product, part)
        y.meta = {**y.meta, **region.out.meta}
        region.out.replace_all_uses_with(y)
        self.replaced[region.out] = y
        for node, sibling in siblings:
            node.meta = {**node.meta, **sibling.meta}
            sibling.replace_all_uses_with(node)
            self.replaced[sibling] = node
        self._erase([region.out, *reversed(region.cone), *(sibling for _, sibling in siblings)])
        if part is not None:
            self._erase([*part.whole.users, part.whole])

    def _emit_siblings(self, product: Product, part: Part) -> list[tuple[fx.Node, fx.Node]]:
        """The other parts of a product as products of their own, each with the node that it is to replace."""
        with emitting(self.graph, part.whole) as emit:
            emission = _Emission(self, emit)
            found = [(emission.product(product, start, length), sibling) for sibling, start, length in part.siblings]
            for node, sibling in found:
                _check_result(node, sibling, any_strides=True)
        return found

    def _erase(self, nodes: list[fx.Node]) -> None:
        for node in nodes:  # in-place nodes are no dead code to FX
            if not node.users:
                self.graph.erase_node(node)

    def current(self, node: Any) -> Any:
        """The node that stands for another one by now."""
        while node in self.replaced:
            node = self.replaced[node]
        return node


class _Emission:
    """The nodes of one region, with their examples."""

    def __init__(self, rewriter: Rewriter, emit: Emit) -> None:
        self.rewriter = rewriter
        self._call = emit

    def emit(self, region: Region) -> fx.Node:
        product = region.product
        x: fx.Node = self.rewriter.current(product.x)
        for view in region.rows_before:
            x = self._view(view, x, _columns(x))
        part = product.part
        weight, bias = self._parameters(product, *((None, None) if part is None else (part.start, part.length)))
        if region.cross_entropy is not None:
            target, *rest = region.cross_entropy
            target = self.rewriter.current(target)
            return self._call(schema.layer_cross_entropy, x, weight, bias, target, *rest, region.out_dtype)
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
            y = self._view(view, y)
        return y

    def product(self, product: Product, start: int, length: int) -> fx.Node:
        """PyTorch's own product of some columns."""
        x = self.rewriter.current(product.x)
        return self._call(torch._C._nn.linear, x, *self._parameters(product, start, length))

    def _parameters(self, product: Product, start: int | None, length: int | None) -> tuple[fx.Node, fx.Node | None]:
        """The weight as `[N, K]` and the bias, of some columns of the product or of all."""
        weight, bias = self.rewriter.current(product.weight), self.rewriter.current(product.bias)
        if product.is_transposed:
            weight = self._call("t", weight)
        if start is None:
            return weight, bias
        weight = self._call("narrow", weight, 0, start, length)
        return weight, None if bias is None else self._call("narrow", bias, 0, start, length)

    def _operand(self, operand: Operand) -> fx.Node:
        source: fx.Node = self.rewriter.current(operand.source)
        if operand.part:
            return self._norm_row(source, operand.part)
        example = tensor_of(source)
        if not operand.axes or example is None or example.dim() == 0:
            return source
        for _ in range(len(operand.axes) - example.dim()):
            source = self._call("unsqueeze", source, 0)
        return self._call("permute", source, *inverse(operand.axes))

    def _norm_row(self, norm: fx.Node, part: str) -> fx.Node:
        """The row by which a batch norm in evaluation multiplies, or the one that it adds."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        named = {name: self.rewriter.current(node) for name, node in named_arguments(norm, names).items()}
        variance = self._call("to", named["running_var"], arithmetic_dtype(example_of(norm)))
        scale = self._call(torch.rsqrt, self._call(torch.add, variance, named.get("eps", 1e-5)))
        if named.get("weight") is not None:
            scale = self._call(torch.mul, scale, named["weight"])
        if part == NORM_SCALE:
            return scale
        shift = self._call(torch.neg, self._call(torch.mul, scale, named["running_mean"]))
        return shift if named.get("bias") is None else self._call(torch.add, shift, named["bias"])

    def _view(self, view: fx.Node, source: fx.Node, columns: int | None = None) -> fx.Node:
        """The view of rows, of another matrix of as many rows. columns: how many x has, -1 for a symbol's; None: as
        many."""
        if permutation_of(view) is not None:
            return self._call(name_of(view), source, *view.args[1:], **view.kwargs)
        if is_row_slice(view):
            return self._call(operator.getitem, source, view.args[1])
        example = example_of(view)
        leading, last = example.shape[:-1], example.shape[-1] if columns is None else columns
        if last == _SYMBOL and 0 in leading:
            raise UnfitError("its input has no elements, and its inner size is not known at compile time")
        if all(map(is_concrete_int, (*leading, last))):
            shape = [int(size) for size in (*leading, last)]
            found = tensor_of(source)
            if columns is None and found is not None and found.is_contiguous():  # a result, which is to be no view
                return self._call(torch.ops.aten._unsafe_view.default, source, shape)
            return self._call("reshape", source, shape)
        return self._dynamic_view(view, source, columns)

    def _dynamic_view(self, view: fx.Node, source: fx.Node, columns: int | None) -> fx.Node:
        """A view with sizes that are symbols, by the arguments of the view that there was."""
        arguments: Any = view.args[1:]
        name = "reshape" if name_of(view) == "view" else name_of(view)  # of x, whose strides may be others
        if name == "reshape":
            sizes = self._sizes(arguments)
            arguments = sizes if columns is None else (*sizes[:-1], columns)
            if list(arguments).count(-1) > 1:
                raise UnfitError("the product's inner size is not known at compile time")
        try:
            y = self._call(name, source, *arguments, **view.kwargs)
        except (RuntimeError, IndexError) as error:
            raise UnfitError(f"{name_of(view)} of the product's input fails: {error}".split("\n")[0]) from None
        found, example = tensor_of(y), tensor_of(view)
        if found is None or example is None or not same_shape(found.shape[:-1], example.shape[:-1]):
            raise UnfitError(f"{name_of(view)} of the product's input gives other rows")
        return y

    def _sizes(self, given: Any) -> Any:
        """The sizes of a view: its arguments, the items of one, or those of a node that gives them all."""
        if len(given) != 1:
            return given
        if isinstance(given[0], tuple | list):
            return given[0]
        sizes = any_example(given[0]) if isinstance(given[0], fx.Node) else None
        if not isinstance(sizes, tuple | list):
            return given
        return [self._call(operator.getitem, given[0], index) for index in range(len(sizes))]


def _columns(node: fx.Node) -> int:
    """How many columns a matrix has, or _SYMBOL."""
    size = example_of(node).shape[-1]
    return int(size) if is_concrete_int(size) else _SYMBOL


@contextlib.contextmanager
def fake_mode_of(node: fx.Node) -> Iterator[None]:
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
