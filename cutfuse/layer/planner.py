"""Requests to the planner (csrc/plan), of tensors with memory and of those that compiled code is traced with, and the
plans that it returns, which are kept.

A plan names the alternative that was chosen, gives the reason against each other one, and lists the kernel launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..native import DeviceFacts, address_of
from ..precision import GUARDED, product_mode
from .layouts import ALIGNMENT, device_facts, dtype_codes, reduction_codes, times_of
from .specialize import Matrix, cost_when_specialized

if TYPE_CHECKING:
    from .._C import Alternative, LinearPlan


MOST_WEIGHTS = 3  # weights of one kernel
UNKNOWN_SIZES = "its sizes are not known at compile time"

Shape = tuple[int, ...]
MatrixLayout = tuple[int, int, int, int, bool]  # rows, columns, their strides, whether it is aligned
VectorLayout = tuple[int, bool]


class LinearArguments(NamedTuple):
    """The arguments of `reduce(program(x @ weight.T + bias, operands))`, with x `[M, K]` and weight `[N, K]`.

    `reduction` is "none" or a reduction's name; the result is `[M, N]`, or `[M]` with a reduction.
    `stores_pre_activation`: `x @ weight.T + bias` is a second result, of x's type. `issuer`: the name of the Issuer, by
    which the planner knows what the launches take of the host. `batch_invariant`: a row has the same bits
    however many rows x has.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    operands: Sequence[Tensor]
    program: Program
    reduction: str
    out_dtype: torch.dtype
    stores_pre_activation: bool = False
    issuer: str = "call"
    batch_invariant: bool = False


def precision_of(arguments: LinearArguments, captured_mode: str = "") -> str:
    """The product's precision as the planner names it. 16-bit products have only one, which is named "tf32" too.

    Where rows are not to depend on each other, split6 stands for "guarded", which looks at all of them.
    """
    if arguments.x.dtype != torch.float32:
        return "tf32"
    mode = product_mode(captured_mode)
    return "split6" if arguments.batch_invariant and mode == GUARDED else mode


class Request(NamedTuple):
    """All that a plan depends on: the native LinearRequest, with the names of its enumerations.

    epilogue_cost, specialized_cost, generated_cost: what the program takes that kernels interpret, what they have
    compiled in (`cost_when_specialized`), and in a kernel that torch.compile generates. operand_bytes: what the
    epilogue reads for each element of the output, from operands that are full matrices; others are read once and stay
    in cache. fetched_bytes: of these, what a kernel's copy engine may bring, which is one matrix in the product's type.
    issuer: who launches the kernels. joined_rows: of several weights, which are `weight` together. times: the card by
    whose table it is predicted; empty for the first one.
    """

    x: MatrixLayout
    weight: MatrixLayout
    bias: VectorLayout | None
    input: int
    output: int
    reduction: int
    epilogue_cost: float
    specialized_cost: float | None
    generated_cost: float
    operand_bytes: int
    fetched_bytes: int
    precision: str
    device: DeviceFacts
    weight_has_planes: bool = False
    issuer: str = "call"
    stores_pre_activation: bool = False
    joined_rows: tuple[int, ...] = ()
    batch_invariant: bool = False
    times: str = ""


@functools.lru_cache(maxsize=4096)
def plan(request: Request, only: str = "") -> LinearPlan:
    """`only`: the name of an alternative that has to be chosen; ValueError where it cannot run."""
    core, given = native.core, request._asdict()
    given["precision"] = getattr(core.Precision, request.precision)
    given["issuer"] = getattr(core.Issuer, request.issuer)
    return core.plan_linear(core.LinearRequest(**given), only)


class Layout(NamedTuple):
    """Of a tensor, in the numbers of the call that is planned."""

    shape: Shape
    strides: Shape
    is_aligned: bool

    @property
    def as_matrix(self) -> Layout:
        """Leading dimensions in one: copied where their strides do not allow that."""
        if len(self.shape) == 2:
            return self
        *leading, columns = self.shape
        strides = (self.strides[-2], self.strides[-1]) if self.is_regular else (columns, 1)
        return self._replace(shape=(math.prod(leading), columns), strides=strides)

    @property
    def is_regular(self) -> bool:
        """Whether the leading dimensions are one with one stride."""
        *leading, _ = self.shape
        return all(
            stride == self.strides[-2] * math.prod(leading[place + 1 :]) or size == 1
            for place, (size, stride) in enumerate(zip(leading, self.strides, strict=False))
        )

    @property
    def of_matrix(self) -> MatrixLayout:
        return *self.shape, *self.strides, self.is_aligned  # type: ignore[return-value]  # of two dimensions


def turned(matrix: MatrixLayout) -> MatrixLayout:
    """Of the transpose."""
    rows, columns, row_stride, column_stride, is_aligned = matrix
    return columns, rows, column_stride, row_stride, is_aligned


def layout_of(tensor: Tensor) -> Layout:
    """Of a tensor with memory."""
    return Layout(tuple(tensor.shape), tensor.stride(), address_of(tensor) % ALIGNMENT == 0)


def traced_layout(tensor: Tensor) -> Layout | None:
    """Of an example without values, whose storage is taken to be aligned, as PyTorch allocates it: of compiled code.

    For symbolic sizes those of the call that is traced; None if one is unknown.
    """
    sizes = [seen_size(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    *extents, offset = known
    dimensions = tensor.dim()
    is_aligned = offset * tensor.element_size() % ALIGNMENT == 0
    return Layout(tuple(extents[:dimensions]), tuple(extents[dimensions:]), is_aligned)


def plan_linear(arguments: LinearArguments, precision: str, has_planes: bool = False, only: str = "") -> LinearPlan:
    """The plan for these arguments, from a cache whose key is everything that a plan depends on.

    `has_planes`: whether the weight has been split before. `only`: the name of an alternative that has to be chosen.

    Raises:
        ValueError: `only` cannot run, or the bias does not fit.
    """
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(
            f"cutfuse: the bias has to be {x.dtype} of shape {tuple(weight.shape[:1])}, got {bias.dtype} of shape "
            f"{tuple(bias.shape)}"
        )
    found = _request(arguments, precision, layout_of)
    assert found is not None  # what has memory has sizes
    return plan(found._replace(weight_has_planes=has_planes), only)


def plan_traced(arguments: LinearArguments, precision: str) -> LinearPlan | None:
    """The plan of a layer of examples, without values, in compiled code; None if a size is unknown.

    x may have more than two dimensions.
    """
    found = _request(arguments._replace(issuer=_issuer(), stores_pre_activation=False), precision, traced_layout)
    return None if found is None else plan(found)


def _request(arguments: LinearArguments, precision: str, lay_out: Callable[[Tensor], Layout | None]) -> Request | None:
    """None where a tensor has no layout."""
    x, weight, bias, operands, program, *_ = arguments
    layouts = [lay_out(tensor) for tensor in (x, weight, *operands, *([] if bias is None else [bias]))]
    known = [layout for layout in layouts if layout is not None]
    if len(known) < len(layouts):
        return None
    of_x, of_weight, *others = known
    of_x = of_x.as_matrix
    of_bias = None if bias is None else others.pop()
    shape = of_x.shape[0], of_weight.shape[0]
    matrices = [
        t.dtype
        for own, t in zip(others, operands, strict=True)
        if own.shape and (math.prod(own.shape[:-1]), own.shape[-1]) == shape and min(shape) > 1
    ]
    codes = dtype_codes()
    return Request(
        x=of_x.of_matrix,
        weight=of_weight.of_matrix,
        bias=None if of_bias is None else (of_bias.strides[0], of_bias.is_aligned),
        input=codes[x.dtype],
        output=codes[arguments.out_dtype],
        reduction=reduction_codes()[arguments.reduction],
        epilogue_cost=program.native.cost,
        specialized_cost=cost_when_specialized(program, x.dtype, arguments.out_dtype),
        generated_cost=program.native.generated_cost,
        operand_bytes=sum(dtype.itemsize for dtype in matrices),
        fetched_bytes=x.dtype.itemsize if x.dtype in matrices else 0,
        precision=precision,
        device=device_facts(x.device),
        issuer=arguments.issuer,
        stores_pre_activation=arguments.stores_pre_activation,
        batch_invariant=arguments.batch_invariant,
        times=times_of(x.device),
    )


def decisive(kernels: Sequence[Alternative]) -> Sequence[Alternative]:
    """Of a plan's kernels, all of which are rejected, those whose reasons count.

    That is the fastest of those that could run, and would take longer than cuBLAS; where none could, all.
    """
    slower = [kernel for kernel in kernels if kernel.microseconds > 0.0]
    return [min(slower, key=lambda kernel: kernel.microseconds)] if slower else kernels


def why_no_kernels(device: torch.device) -> str:
    """Why no fused kernel runs on `device`; empty if they do run there."""
    if device.type != "cuda":
        return f"fused products run on CUDA devices, not on {device.type}"
    return native.core.why_no_kernels(device_facts(device))


def first_scheme(precision: str) -> int:
    """The scheme by which a weight is split for products in `precision`, unless the guard chooses another."""
    return int(native.core.first_scheme(native.core.Precision.__members__[precision]))


def plan_joined(
    x: MatrixLayout,
    weights: Sequence[MatrixLayout],
    dtype: torch.dtype,
    device: torch.device,
    issuer: str = "call",
    only: str = "",
) -> LinearPlan | None:
    """The plan of the products of one x with several weights, side by side in one result; None where no kernel could
    read the weights.

    Where the products are small, one kernel for all of them fills the device that each of them leaves idle, as for the
    queries, keys and values of an attention layer. The weights stay where they lie: the kernel has a descriptor of
    each.
    """
    first = weights[0]
    are_like_first = all(weight[1:4] == first[1:4] and weight[0] > 0 for weight in weights)
    if len(weights) > MOST_WEIGHTS or dtype.itemsize != 2 or not are_like_first:
        return None
    rows = tuple(weight[0] for weight in weights)
    together = sum(rows), *first[1:4], all(weight[4] for weight in weights)
    return plan(_request_product(x, together, dtype, device, "tf32", issuer)._replace(joined_rows=rows), only)


def plan_product(
    a: MatrixLayout, b: MatrixLayout, dtype: torch.dtype, device: torch.device, precision: str, issuer: str
) -> LinearPlan:
    """The plan of `a @ b.T`, of matrices of one type."""
    return plan(_request_product(a, b, dtype, device, precision, issuer))


def _request_product(
    x: MatrixLayout, weight: MatrixLayout, dtype: torch.dtype, device: torch.device, precision: str, issuer: str
) -> Request:
    code = dtype_codes()[dtype]
    return Request(
        x=x,
        weight=weight,
        bias=None,
        input=code,
        output=code,
        reduction=reduction_codes()["none"],
        epilogue_cost=0.0,
        specialized_cost=0.0,
        generated_cost=0.0,
        operand_bytes=0,
        fetched_bytes=0,
        precision=precision,
        device=device_facts(device),
        issuer=issuer,
        times=times_of(device),
    )


def plan_of(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> LinearPlan | None:
    """The plan of the fastest kernel for these tensors; None where no kernel takes them.

    Whether one kernel is faster than a product for each weight was decided when the operator was put into a graph.
    """
    given_biases = [bias for bias in biases if bias is not None]
    if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in (*weights, *given_biases)):
        return None
    if not all(_is_read(bias, weight) for bias, weight in zip(biases, weights, strict=True)):
        return None
    given = layout_of(x).of_matrix, [layout_of(weight).of_matrix for weight in weights], x.dtype, x.device
    found = plan_joined(*given)
    if found is None or found.is_fused:
        return found
    best = found.alternatives[0]
    return None if found.ruled_out or best.rejection else plan_joined(*given, only=best.name)


def _is_read(bias: Tensor | None, weight: Tensor) -> bool:
    """Whether a kernel reads a bias: one number for each row of the weight, in one piece."""
    return bias is None or (bias.shape == weight.shape[:1] and bias.stride(0) == 1 and layout_of(bias).is_aligned)


def plan_traced_joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> LinearPlan | None:
    """The plan of the products of x `[..., K]` with several weights, in compiled code; None where no kernel takes them,
    or a size is not known. Nor is there one for code in C++, whose operators are called with lists of tensors alone."""
    if _issuer() == "compiled_cpp":
        return None
    of_x, *of_weights = [traced_layout(tensor) for tensor in (x, *weights)]
    known = [layout.of_matrix for layout in of_weights if layout is not None]
    of_biases = [traced_layout(bias) for bias in biases if bias is not None]
    if of_x is None or len(known) < len(of_weights):
        return None
    if any(bias is None or bias.strides != (1,) or not bias.is_aligned for bias in of_biases):
        return None
    return plan_joined(of_x.as_matrix.of_matrix, known, x.dtype, x.device, _issuer())


def composed_joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], 1)


def compare_traced_passes(
    x: Tensor,
    z: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    out_dtype: torch.dtype,
    trained: Sequence[bool],
    sums_columns: bool,
) -> tuple[float, float] | str:
    """The microseconds of a 16-bit layer's training step, with kernels of ours behind its product z and with
    torch.compile's; or why there are none to compare.

    operands: matrices of z's size count as read, backwards if a derivative depends on them, and as written if they are
    `trained`. sums_columns: for a bias.
    """
    core = native.core
    elsewhere = core.why_no_kernels(device_facts(z.device))
    if elsewhere:
        return elsewhere
    elements, columns, depth = seen_elements(z), seen_size(z.shape[-1]), seen_size(x.shape[-1])
    if elements is None or not columns or depth is None:
        return UNKNOWN_SIZES
    sizes = [t.element_size() if seen_elements(t) == elements else 0 for t in operands]
    read = z.element_size() + sum(sizes)
    written = z.element_size() + sum(size for size, is_trained in zip(sizes, trained, strict=True) if is_trained)
    again = z.element_size() + sum(sizes[k] for k in program.operands_in_derivatives)
    forward, backward = read + out_dtype.itemsize, again + out_dtype.itemsize + written
    *_, multiprocessors = device_facts(z.device)
    return core.compare_passes(
        elements // columns,
        columns,
        depth,
        forward,
        backward,
        program.native,
        sums_columns,
        multiprocessors,
        core.Issuer.__members__[_issuer()],
    )


def seen_elements(tensor: Tensor) -> int | None:
    """How many a tensor has in the call that is traced; None where that is not known."""
    sizes = [seen_size(size) for size in tensor.shape]
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _issuer() -> str:
    from torch._inductor import config

    if config.triton.cudagraphs:
        return "graph"
    return "compiled_cpp" if config.cpp_wrapper else "compiled_code"


def traced_matrices(arguments: LinearArguments) -> list[Matrix]:
    """The operands of a layer that has a plan, as the native module takes them, with no address yet."""
    codes = dtype_codes()
    found = []
    for tensor in arguments.operands:
        layout = traced_layout(tensor)
        assert layout is not None, "a layer with a plan has sizes"
        (rows, columns), strides, _ = layout.as_matrix
        row, column = (stride if size > 1 else 0 for size, stride in zip((rows, columns), strides, strict=True))
        found.append((0, codes[tensor.dtype], 0, row, column))
    return found


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix of contiguous rows, its leading dimensions taken together, without a copy."""
    layout = traced_layout(tensor)
    if layout is None or len(layout.shape) < 2:
        return False
    return (layout.strides[-1] == 1 or layout.shape[-1] == 1) and layout.is_regular


def seen_size(size: Any) -> int | None:
    """A size, or for a symbol its value in the call that is traced. Reading the hint makes no guard."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return found if isinstance(found, int) else None
