"""Plans for layers in graphs of torch.compile, whose tensors have sizes and strides and no values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from .device import device_facts, dtype_codes
from .joined import plan_joined
from .linear_plan import ALIGNMENT, LinearArguments, MatrixLayout, bytes_of_operands, plan_layouts
from .specialize import Matrix, cost_when_specialized

if TYPE_CHECKING:
    from .._C import LinearPlan

UNKNOWN_SIZES = "its sizes are not known at compile time"


def plan_traced(arguments: LinearArguments, precision: str) -> LinearPlan | None:
    """The plan of a layer of examples, without values: of compiled code.

    x may have more than two dimensions. For symbolic sizes the plan takes those of the call that is traced; None if one
    is unknown.
    """
    x, weight, bias, operands, program, reduction, out_dtype, *_ = arguments
    tensors = [_seen(tensor) for tensor in (x, weight, *([] if bias is None else [bias]), *operands)]
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors):
        return None
    seen_x, seen_weight, *rest = known
    seen_x = _as_matrix(seen_x)
    seen_bias = None if bias is None else rest.pop(0)
    shape = seen_x.shape[0], seen_weight.shape[0]
    return plan_layouts(
        (*seen_x.shape, *seen_x.strides, seen_x.is_aligned),
        (*seen_weight.shape, *seen_weight.strides, seen_weight.is_aligned),
        None if seen_bias is None else (*seen_bias.strides, seen_bias.is_aligned),
        x.dtype,
        out_dtype,
        reduction,
        program.native.cost,
        cost_when_specialized(program, x.dtype, out_dtype),
        program.native.generated_cost,
        *bytes_of_operands(
            shape, x.dtype, [(_matrix_shape(seen), t.dtype) for seen, t in zip(rest, operands, strict=True)]
        ),
        precision,
        False,
        device_facts(x.device),
        issuer=_issuer(),
    )


def plan_traced_joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> LinearPlan | None:
    """The plan of the products of x `[..., K]` with several weights, in compiled code; None where no kernel takes them,
    or a size is not known. Nor is there one for code in C++, whose operators are called with lists of tensors alone."""
    if _issuer() == "compiled_cpp":
        return None
    seen_x, *seen = [_seen(tensor) for tensor in (x, *weights)]
    known = [weight for weight in seen if weight is not None]
    seen_biases = [_seen(bias) for bias in biases if bias is not None]
    if seen_x is None or len(known) < len(seen):
        return None
    if any(bias is None or bias.strides != (1,) or not bias.is_aligned for bias in seen_biases):
        return None
    return plan_joined(_layout_of(_as_matrix(seen_x)), list(map(_layout_of, known)), x.dtype, x.device, _issuer())


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
        seen = _seen(tensor)
        assert seen is not None, "a layer with a plan has sizes"
        (rows, columns), strides = _as_matrix(seen)[:2]
        row, column = (stride if size > 1 else 0 for size, stride in zip((rows, columns), strides, strict=True))
        found.append((0, codes[tensor.dtype], 0, row, column))
    return found


class _Seen(NamedTuple):
    """The layout of a tensor. Assumes that its storage is aligned, as PyTorch allocates it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_aligned: bool


def _layout_of(seen: _Seen) -> MatrixLayout:
    (rows, columns), (row_stride, column_stride) = seen.shape, seen.strides
    return rows, columns, row_stride, column_stride, seen.is_aligned


def lies_in_rows(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix of contiguous rows, its leading dimensions taken together, without a copy."""
    seen = _seen(tensor)
    if seen is None or len(seen.shape) < 2:
        return False
    return (seen.strides[-1] == 1 or seen.shape[-1] == 1) and _is_regular(seen)


def _as_matrix(seen: _Seen) -> _Seen:
    """Rows in one dimension: copied where the strides of the others do not allow that."""
    if len(seen.shape) == 2:
        return seen
    *leading, columns = seen.shape
    strides = (seen.strides[-2], seen.strides[-1]) if _is_regular(seen) else (columns, 1)
    return seen._replace(shape=(math.prod(leading), columns), strides=strides)


def _is_regular(seen: _Seen) -> bool:
    """Whether the leading dimensions are one with one stride."""
    *leading, _ = seen.shape
    return all(
        stride == seen.strides[-2] * math.prod(leading[place + 1 :]) or size == 1
        for place, (size, stride) in enumerate(zip(leading, seen.strides, strict=False))
    )


def _matrix_shape(seen: _Seen) -> tuple[int, ...]:
    return (math.prod(seen.shape[:-1]), seen.shape[-1]) if seen.shape else ()


def _seen(tensor: Tensor) -> _Seen | None:
    sizes = [seen_size(size) for size in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    *extents, offset = known
    dimensions = tensor.dim()
    is_aligned = offset * tensor.element_size() % ALIGNMENT == 0
    return _Seen(tuple(extents[:dimensions]), tuple(extents[dimensions:]), is_aligned)


def seen_size(size: Any) -> int | None:
    """A size, or for a symbol its value in the call that is traced. Reading the hint makes no guard."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return found if isinstance(found, int) else None
