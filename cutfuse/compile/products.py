"""Finds the matrix products of a graph by a weight that is one matrix, and what reduces the rows of one.

A reduction is one of the last dimension, or the cross entropy of a matrix of logits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int, statically_known_true

from ..arguments import KERNEL_DTYPES
from ..epilogue import Program
from ..epilogue.table import REDUCTIONS
from .nodes import any_example, is_call, name_of, named_arguments, tensor_of

_MATMULS = {"matmul", "mm", "__matmul__"}
_ADDITIONS = {"add", "__add__", "iadd", "add_"}


@dataclass(frozen=True)
class Product:
    """`x @ weight.T + bias`, with x `[..., K]` and weight `[N, K]`, or `[K, N]` where `is_transposed`.

    node: what gives the pre-activation. addend: what addmm adds to the product where that is no bias, with its factor.
    scale: addmm's factor of the product. part: where the pre-activation is a part of the columns, these; see `Part`.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    is_transposed: bool
    bias: fx.Node | None = None
    addend: tuple[fx.Node, float] | None = None
    scale: float = 1.0
    part: Part | None = None

    @property
    def inputs(self) -> list[fx.Node]:
        """x, the weight, and the bias if there is one."""
        return [self.x, self.weight, *([] if self.bias is None else [self.bias])]

    @property
    def is_plain(self) -> bool:
        """Whether it is `x @ weight.T`, with or without a bias."""
        return self.addend is None and self.scale == 1.0


@dataclass(frozen=True)
class Part:
    """Columns of a product that a model splits, as gates do: `a, b = linear(x).chunk(2, -1)`.

    A product of its own, with as many rows of the weight, gives them. whole: the product's node. siblings: the nodes
    that give the other parts, with their first column and how many they have.
    """

    whole: fx.Node
    start: int
    length: int
    siblings: tuple[tuple[fx.Node, int, int], ...]


def same(size: Any, other: Any) -> bool:
    """Whether two sizes are known to be equal. Adds no guard."""
    return bool(statically_known_true(size == other))


def same_shape(shape: torch.Size, other: torch.Size) -> bool:
    return len(shape) == len(other) and all(map(same, shape, other))


def is_row_major(example: Tensor, order: Sequence[int] | None = None) -> bool:
    """Whether a tensor is known to lie without gaps, its last dimension contiguous. order: of the dimensions, if other
    than theirs. Adds no guard."""
    stride: Any = 1
    for place in reversed(range(example.dim()) if order is None else order):
        size = example.shape[place]
        if not (same(size, 1) or same(example.stride(place), stride)):
            return False
        stride = stride * size
    return True


SPLITS = {"chunk", "split", "tensor_split"}


def find_parts(product: Product) -> list[Product]:
    """The parts of a product's columns, the last one first, if nothing reads the product but one split of them."""
    if not product.is_plain or len(product.node.users) != 1:
        return []
    (split,) = product.node.users
    if not is_call(split) or name_of(split) not in SPLITS or not _splits_columns(split, product.node):
        return []
    takes_items = all(item.target is operator.getitem and type(item.args[1]) is int for item in split.users)
    pieces = any_example(split)
    if not takes_items or not isinstance(pieces, tuple | list):
        return []
    lengths = [piece.shape[-1] for piece in pieces]
    if not all(map(is_concrete_int, lengths)):
        return []
    lengths = [int(length) for length in lengths]
    whole = tensor_of(product.node)
    if whole is None or not same(sum(lengths), whole.shape[-1]):  # tensor_split's indices may give columns twice
        return []
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    columns: dict[fx.Node, tuple[int, int]] = {}
    for item in split.users:
        place: Any = item.args[1]
        columns[item] = starts[place], lengths[place]
    if len(columns) < 2 or len(set(columns.values())) < len(columns):
        return []
    found = []
    for item, (start, length) in columns.items():
        siblings = tuple((other, *where) for other, where in columns.items() if other is not item)
        found.append(replace(product, node=item, part=Part(product.node, start, length, siblings)))
    return found[::-1]


def _splits_columns(split: fx.Node, source: fx.Node) -> bool:
    example = tensor_of(source)
    named = named_arguments(split, ("input", "sections", "dim"))
    dim = named.get("dim", 0)
    return example is not None and isinstance(dim, int) and dim % example.dim() == example.dim() - 1


def find_product(node: fx.Node) -> Product | None:
    """The product that a node computes, or None."""
    example = tensor_of(node)
    if not is_call(node) or example is None or not example.is_floating_point() or _is_stored_otherwise(node):
        return None
    name = name_of(node)
    if name == "linear" and node.op == "call_function":
        return _find_linear(node)
    if name in _MATMULS:
        named = named_arguments(node, ("input", "other"))
        return _checked(Product(node, named.get("input"), named.get("other", named.get("mat2")), True))  # type: ignore[arg-type]
    return _find_addmm(node) if name == "addmm" else None


def _is_stored_otherwise(node: fx.Node) -> bool:
    """Whether the result goes to a tensor that is given, or is not rounded to the type of the matrices."""
    most = 2 if name_of(node) in _MATMULS else 3  # one more is mm's and addmm's out_dtype
    return len(node.args) > most or any(node.kwargs.get(name) is not None for name in ("out", "out_dtype"))


def _find_linear(node: fx.Node) -> Product | None:
    named = named_arguments(node, ("input", "weight", "bias"))
    bias = named.get("bias")
    if bias is not None and not _is_row(bias, node):
        return None
    return _checked(Product(node, named.get("input"), named.get("weight"), False, bias))  # type: ignore[arg-type]


def _is_row(value: Any, product: fx.Node) -> bool:
    """Whether a value has the shape `[N]` of a bias: PyTorch broadcasts others, which no kernel does."""
    example, z = tensor_of(value), tensor_of(product)
    return example is not None and z is not None and example.dim() == 1 and same(example.shape[0], z.shape[-1])


def _find_addmm(node: fx.Node) -> Product | None:
    named = named_arguments(node, ("input", "mat1", "mat2"))
    added, beta, alpha = named.get("input"), named.get("beta", 1), named.get("alpha", 1)
    example = tensor_of(added)
    if example is None or not all(isinstance(item, int | float) for item in (alpha, beta)):
        return None
    if alpha == 0:  # then PyTorch may leave the product out: 0 * inf is none of its results
        return None
    if alpha == beta == 1 and _is_row(added, node):
        return _checked(Product(node, named.get("mat1"), named.get("mat2"), True, added))  # type: ignore[arg-type]
    if beta == 0:  # then PyTorch does not read it, and gives it a gradient of zeros
        if example.requires_grad:
            return None
        return _checked(Product(node, named.get("mat1"), named.get("mat2"), True, scale=float(alpha)))  # type: ignore[arg-type]
    return _checked(
        Product(node, named.get("mat1"), named.get("mat2"), True, None, (added, float(beta)), float(alpha))  # type: ignore[arg-type]
    )


def _checked(product: Product) -> Product | None:
    """The product if its inputs are matrices of one type that kernels read."""
    x, weight = tensor_of(product.x), tensor_of(product.weight)
    if x is None or weight is None or x.dim() < 2 or weight.dim() != 2:
        return None
    if not (x.is_floating_point() and weight.is_floating_point()) or x.device != weight.device:
        return None
    return product


def row_added_next(product: Product) -> fx.Node | None:
    """The node that adds a row `[N]` of the product's type to it, where nothing else reads a product without a bias.

    That is a bias that the model adds by itself, and the kernels add one for nothing.
    """
    if product.bias is not None or not product.is_plain or product.part or len(product.node.users) != 1:
        return None
    (user,) = product.node.users
    if not is_call(user) or name_of(user) not in _ADDITIONS or len(user.args) != 2 or user.kwargs:
        return None
    row = other_argument(user, product.node)
    z, example = tensor_of(product.node), tensor_of(row)
    if z is None or example is None or not _is_row(row, product.node):
        return None
    is_result = tensor_of(user) is not None and example.dtype == z.dtype and example.device == z.device
    return user if is_result and z.dtype in KERNEL_DTYPES else None


def other_argument(node: fx.Node, argument: fx.Node) -> Any:
    """Of a node with two arguments the one that is not `argument`."""
    return node.args[1] if node.args[0] is argument else node.args[0]


_REDUCTION_ARGUMENTS = {"input", "dim", "axis", "keepdim", "dtype"}
_REDUCTIONS = {name: name for name in REDUCTIONS} | {"max": "amax", "min": "amin"}


def reduction_of(node: fx.Node) -> tuple[str, bool] | None:
    """The reduction of the last dimension that a node computes, and whether it keeps the dimension."""
    name = _REDUCTIONS.get(name_of(node))
    if name is None or not is_call(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if not node.kwargs.keys() <= _REDUCTION_ARGUMENTS:
        return None
    source = tensor_of(node.args[0])
    named = named_arguments(node, ("input", "dim", "keepdim"))
    dim, keepdim = named.get("dim", named.get("axis")), named.get("keepdim", False)
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    if source is None or source.dim() < 1 or len(dims) != 1 or type(dims[0]) is not int or type(keepdim) is not bool:
        return None
    is_last = dims[0] % source.dim() == source.dim() - 1
    if not is_last or not source.is_floating_point():
        return None
    # Of equal largest elements PyTorch gives one the gradient where it gives indices, and shares it out in amax.
    if name_of(node) in ("max", "min") and source.requires_grad:
        return None
    return (name, keepdim) if _reduced_type_fits(node, source) else None


def _reduced_type_fits(node: fx.Node, source: Tensor) -> bool:
    """Whether the type of the result is one that a kernel stores."""
    dtype = node.kwargs.get("dtype") or source.dtype
    is_wider = dtype is not torch.float64 or source.dtype is torch.float64
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and is_wider and not same(source.shape[-1], 0)


_LOSS_ARGUMENTS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)
_LOSS_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(NamedTuple):
    """A call of F.cross_entropy with classes as targets, one for each row; what makes logits of a product.

    softcap, temperature: as of `cutfuse.linear_cross_entropy`, but 0 for no softcap.
    """

    target: fx.Node  # [M]
    ignore_index: int
    reduction: str
    label_smoothing: float
    softcap: float = 0.0
    temperature: float = 1.0


def cross_entropy_of(node: fx.Node) -> CrossEntropy | None:
    """The cross entropy that a node computes of a matrix of logits; None for weighted and other ones."""
    if not is_call(node) or name_of(node) != "cross_entropy" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    named = named_arguments(node, _LOSS_ARGUMENTS)
    logits, target = tensor_of(node.args[0]), tensor_of(named.get("target"))
    plain = all(named.get(name) is None for name in ("weight", "size_average", "reduce"))
    ignore_index, reduction = named.get("ignore_index", -100), named.get("reduction", "mean")
    smoothing = named.get("label_smoothing", 0.0)
    if not plain or reduction not in _LOSS_REDUCTIONS or type(smoothing) not in (int, float):
        return None
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return None
    if type(ignore_index) is not int or target.device != logits.device or same(logits.shape[-1], 0):
        return None
    return CrossEntropy(named["target"], ignore_index, reduction, float(smoothing))


def feeds_cross_entropy(node: fx.Node) -> bool:
    """Whether the one user of a value, or of what is computed of it alone, is a cross entropy."""
    while len(node.users) == 1:
        (node,) = node.users
        if cross_entropy_of(node) is not None:
            return True
    return False


def softcap_of(program: Program) -> tuple[float, float] | None:
    """The softcap, 0 for none, and the temperature of logits that a program computes of z; None for other programs.

    Such a program is `tanh(z * a) * b`, or `z * a`, with positive numbers.
    """
    inner = outer = 1.0
    is_capped, previous = False, "z"
    for instruction in program.instructions:
        match instruction.op, *instruction.arguments:
            case "tanh", source if not is_capped:
                is_capped, factor = True, 1.0
            case ("mul", source, float(factor)) | ("mul", float(factor), source):
                outer *= factor if is_capped else 1.0
                inner *= 1.0 if is_capped else factor
            case "div", source, float(factor):
                outer /= factor if is_capped else 1.0
                inner /= 1.0 if is_capped else factor
            case _:
                return None
        if source != previous or instruction.slot is not None or not 0.0 < factor < math.inf:
            return None
        previous = "prev"
    return (1.0 / inner if is_capped else 0.0), 1.0 / (inner * outer)
