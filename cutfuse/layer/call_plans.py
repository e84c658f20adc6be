"""Plans of calls: what csrc/call runs for tensors of these layouts, now and in later calls with the same key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..epilogue import Program
from ..invariance import is_batch_invariant
from ..native import address_of
from .layouts import (
    MergedLayout,
    dtype_codes,
    elementwise_layout,
    gradient_layout,
    multiprocessors,
    on_device,
    reduction_codes,
    reduction_layout,
    shapes_and_strides,
)
from .linear_plan import cublas_linear, matrices_of, multiplies_otherwise, plan_call, require_kernel
from .planner import LinearArguments, plan_of
from .prepared import Planes
from .specialize import (
    Epilogues,
    Matrix,
    are_requested,
    find_alone,
    find_epilogues,
    request,
)
from .training_step import IDENTITY

if TYPE_CHECKING:
    from .._C import CallFunction, CallKey, CallPlan, LinearPlan, PointwiseProblem, ReduceProblem, Specialization


Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Of memory in fp32 or the gradient's type, bytes of workspace, and the result.
GradientSum = tuple["ReduceProblem", int, Result]
# The derivative with respect to x (0) or operand k - 1 (k) as it is stored, and how it is summed.
GradientOutput = tuple[int, Result, GradientSum | None]
# The partial sums' layout, and how they are summed.
ColumnSum = tuple[Result, GradientSum]


class Planned(NamedTuple):
    """The plan of a call, and the program in the kernels that it launches."""

    call: CallPlan
    epilogues: Epilogues

    def run(self, tensors: Sequence[Tensor], first_operand: int) -> Any:
        """The result for the tensors of the call, or for others that are laid out alike."""
        request(self.epilogues)
        device = tensors[0].device.index
        with on_device(device):
            return native.core.run_call(self.call, list(tensors), first_operand, device or 0)

    def keep(self, function: CallFunction, given: tuple[Any, ...], number: int, key: CallKey) -> None:
        """Has later calls like this one run the plan, once its epilogues are requested. key: this call's, before the
        plan was made."""
        if are_requested(self.epilogues):  # a call that is captured in a graph asks for none; a later one does
            native.core.remember_call(function, given, number, key, self.call)


def general() -> Planned:
    """The plan of calls that take the general path every time."""
    return Planned(native.core.general_call(), [])


def remember(
    function: CallFunction,
    given: tuple[Any, ...],
    number_of: Callable[[], int | None],
    make_plan: Callable[[], Planned | None],
    tensors: tuple[Sequence[Tensor], int] | None = None,
) -> Any:
    """Makes the plan of a call that has a key, runs it on `tensors`, and adds it to the table, unless its key has
    changed meanwhile. Gives the result; None where there is no plan.

    It can change because another thread sets the process's precision or the default type. tensors: as `Planned.run`
    takes them, or None where nothing is to run.
    """
    default_dtype = torch.get_default_dtype()
    number = number_of()
    key = None if number is None else native.core.call_key(function, given, number)
    if number is None or key is None or torch.get_default_dtype() is not default_dtype:
        return None
    planned = make_plan()
    if planned is None:
        return None
    if tensors is None:
        request(planned.epilogues)
    y = None if tensors is None else planned.run(*tensors)
    planned.keep(function, given, number, key)
    return y


def _result_of(y: Tensor) -> Result:
    return tuple(y.shape), y.stride(), y.dtype


def plan_linear_call(
    arguments: LinearArguments,
    kept: Planes | None = None,
    captured_mode: str = "",
    shape: Sequence[int] | None = None,
    is_bias_apart: bool = False,
) -> Planned:
    """The plan of a layer, whose tensors are x, weight, bias if there is one, operands and `kept`, if there are planes.

    Its result is y, or (y, z) where z is stored, both contiguous and of `shape`; of the matrix's or vector's for None.
    captured_mode: the precision of a forward pass. is_bias_apart: PyTorch would round the product of the call's own x
    before it adds the bias, and so multiplies its rows.
    """
    plan = plan_call(arguments, kept, captured_mode)
    return linear_call(plan, arguments, kept is not None, captured_mode, shape, is_bias_apart)


def linear_call(
    plan: LinearPlan,
    arguments: LinearArguments,
    has_planes: bool = False,
    captured_mode: str = "",
    shape: Sequence[int] | None = None,
    is_bias_apart: bool = False,
) -> Planned:
    """The call that a layer's plan is of. has_planes: of the weight, which the plan may read."""
    if arguments.batch_invariant:
        require_kernel(plan, arguments)
    matrices = matrices_of(arguments)
    epilogues = find_epilogues(plan, arguments.x.device.index or 0, arguments.program, matrices)
    shape = plan.output_shape if shape is None else shape
    multiply = z = None
    if plan.is_fused:
        z = contiguous_result(shape, arguments.x.dtype) if arguments.stores_pre_activation else None
    elif is_bias_apart or multiplies_otherwise(arguments.x, captured_mode):
        multiply = functools.partial(cublas_linear, captured_mode=captured_mode)
    call = native.core.linear_call(
        plan,
        arguments.program.native,
        matrices,
        epilogues,
        contiguous_result(shape, arguments.out_dtype),
        has_planes,
        multiply,
        z,
    )
    return Planned(call, epilogues)


def given_to(arguments: LinearArguments, kept: Planes | None = None) -> tuple[list[Tensor], int]:
    """What `Planned.run` takes of a layer's tensors."""
    x, weight, bias, operands, *_ = arguments
    product = [x, weight] if bias is None else [x, weight, bias]
    return [*product, *operands, *([] if kept is None else [kept.memory])], len(product)


def plan_joined_call(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Planned | None:
    """None where no kernel takes the weights."""
    plan = plan_of(x, weights, biases)
    return None if plan is None else joined_call(plan, x, weights, biases)


def joined_call(plan: LinearPlan, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Planned:
    """Of a fused plan."""
    columns = sum(weight.shape[0] for weight in weights)
    result = (x.shape[0], columns), (columns, 1), x.dtype
    return Planned(native.core.joined_call(plan, [bias is not None for bias in biases], result), [])


def lay_out_pointwise(
    x: Tensor, operands: Sequence[Tensor], program: Program, y: Tensor
) -> tuple[PointwiseProblem, Epilogues] | None:
    """A call with a result like y, which may be on the meta device, as one launch takes it, and the program in its
    kernel; None where one launch does not do."""
    tensors = (x, *operands)
    layout = elementwise_layout(y.stride(), *shapes_and_strides(tensors), y.shape)
    if layout is None:
        return None
    of_x, *others = _matrices(tensors, layout.strides)
    # With a result at address 0, which counts as aligned, as all memory that PyTorch allocates is.
    problem = native.core.PointwiseProblem(program.native, layout.extents, of_x, others, dtype_codes()[y.dtype])
    return problem, find_alone(problem, x.device.index or 0)


def plan_pointwise_call(x: Tensor, operands: Sequence[Tensor], program: Program, y: Tensor) -> Planned | None:
    """y: as the result is to be, on any device. None where one launch does not do."""
    found = lay_out_pointwise(x, operands, program, y)
    if found is None:
        return None
    problem, epilogues = found
    return Planned(native.core.pointwise_call(problem, _result_of(y), _only(epilogues)), epilogues)


def lay_out_reduction(
    x: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    reduction: str,
    dims: tuple[int, ...],
    out_dtype: torch.dtype,
) -> tuple[ReduceProblem, Epilogues, int] | None:
    """The same of a reduction, and the bytes of workspace that it needs."""
    tensors = (x, *operands)
    layout = reduction_layout(*shapes_and_strides(tensors), dims)
    if layout is None:
        return None
    of_x, *others = _matrices(tensors, layout.strides)
    extents, codes, code = layout.extents, dtype_codes(), reduction_codes()[reduction]
    are_rows = extents[2] == 1 and of_x[3] == 1  # in one piece: of others, the columns are shared out
    invariant = are_rows and is_batch_invariant()
    problem = native.core.ReduceProblem(program.native, extents, of_x, others, code, codes[out_dtype], invariant)
    workspace = 0 if invariant else reduction_workspace(extents, codes[x.dtype], code, x.device)
    return problem, find_alone(problem, x.device.index or 0), workspace


def plan_reduce_call(
    x: Tensor, operands: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...], y: Tensor
) -> Planned | None:
    """y: as the result is to be, on any device. None where one launch does not do."""
    found = lay_out_reduction(x, operands, program, reduction, dims, y.dtype)
    if found is None:
        return None
    problem, epilogues, workspace = found
    return Planned(native.core.reduce_call(problem, _result_of(y), workspace, _only(epilogues)), epilogues)


def _only(epilogues: Epilogues) -> Specialization | None:
    """Of a call with one kernel."""
    return epilogues[0] if epilogues else None


@functools.lru_cache(maxsize=4096)
def reduction_workspace(extents: tuple[int, ...], dtype: int, reduction: int, device: torch.device) -> int:
    """The bytes of workspace that a reduction with two kernel launches needs."""
    return native.core.reduce_workspace(extents, dtype, reduction, multiprocessors(device.index))


class RowResults(NamedTuple):
    """Of a reduction behind a program, over the columns of a layout: its results and, for "amax" and "amin", how many
    elements of a row equal its result. Both are in fp32, a number for each row."""

    layout: MergedLayout
    reduction: str
    tensors: Sequence[Tensor]


def plan_backward_call(
    tensors: Sequence[Tensor],
    program: Program,
    wanted: Sequence[int],
    inputs: Sequence[Tensor],
    sums_columns: bool,
    rows: RowResults | None = None,
    is_accurate: bool = False,
    in_place: Sequence[int] = (),
) -> Planned | None:
    """The plan of the gradients of `inputs`, x and the operands; None where the tensors have no common layout.

    tensors: the gradient, x and the operands as they are read, which are `inputs` or copies. What no launch sums to an
    input's shape is fp32 in x's shape. sums_columns: of a contiguous x. is_accurate: the program compares its value
    with a reduction's result. in_place: of which inputs the gradient is stored where they lie.
    """
    core = native.core
    x, device = tensors[1], tensors[1].device
    dense = torch.empty_like(x, device="meta")
    layout = None if rows is None else rows.layout
    if layout is None or sums_columns:
        layout = gradient_layout(dense, tensors, sums_columns=sums_columns)
    if layout is None:
        return None
    like_dense = tuple(dense.shape), dense.stride(), torch.float32
    gradients = [
        (*like_dense[:2], t.dtype) if t.shape == dense.shape else contiguous_result(t.shape, t.dtype)
        for t in (inputs[k] for k in wanted)
    ]
    stored = gradient_outputs(like_dense, wanted, [inputs[k].shape for k in wanted], gradients, device)
    of_grad, of_x, *others = _matrices(tensors, layout.strides)
    reduction = 0 if rows is None else reduction_codes()[rows.reduction]
    derivatives, outputs = as_given(stored)
    problem = core.PointwiseBackwardProblem(
        program.native, layout.extents, of_grad, of_x, others, derivatives, sums_columns, reduction, is_accurate
    )
    epilogues = [] if is_accurate or rows is not None else find_alone(problem, device.index or 0)
    sums = None
    if sums_columns:
        _, row_count, columns = layout.extents
        blocks = core.pointwise_backward_row_blocks(row_count, columns)
        sums = column_sum(blocks, columns, torch.float32, ((columns,), (1,), x.dtype), device)
    return Planned(core.backward_call(problem, outputs, sums, _only(epilogues), list(in_place)), epilogues)


def gradient_outputs(
    dense: Result,
    wanted: Sequence[int],
    shapes: Sequence[Sequence[int]],
    gradients: Sequence[Result],
    device: torch.device,
) -> list[GradientOutput]:
    """What the kernel of the gradients stores, in the shape and layout of `dense`, which is fp32 where it is summed.

    shapes: what `wanted` inputs, x (0) and operands (k - 1 for k), have, and broadcast to dense's. gradients: of them,
    contiguous. What one launch does not sum is stored in dense's shape.
    """
    sizes, strides, _ = dense
    fp32 = dtype_codes()[torch.float32]
    found: list[GradientOutput] = []
    for k, shape, gradient in zip(wanted, shapes, gradients, strict=True):
        if tuple(shape) == sizes:
            found.append((k, gradient, None))
            continue
        aligned = (1,) * (len(sizes) - len(shape)) + tuple(shape)
        dims = tuple([d for d, size in enumerate(aligned) if size != sizes[d]])
        layout = reduction_layout((sizes,), (strides,), dims) if dims else None
        total = None
        if layout is not None and layout.result_order is None:
            outer, reduced, inner = layout.strides[0]
            total = gradient_sum(layout.extents, (0, fp32, outer, reduced, inner), gradient, device)
        found.append((k, dense, total))
    return found


def as_given(outputs: Sequence[GradientOutput]) -> tuple[list[tuple[int, int, int]], list[tuple[Result, Any]]]:
    """As the native problem takes them, without addresses, and as its call does."""
    codes = dtype_codes()
    return [(k, 0, codes[result[2]]) for k, result, _ in outputs], [given[1:] for given in outputs]


def contiguous_result(shape: Sequence[int], dtype: torch.dtype) -> Result:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(shape), tuple(reversed(strides)), dtype


def gradient_sum(extents: tuple[int, ...], x: Matrix, result: Result, device: torch.device) -> GradientSum:
    """The sum of a tensor over the middle extent, as the native module takes it."""
    code = reduction_codes()["sum"]
    problem = native.core.ReduceProblem(IDENTITY.native, extents, x, [], code, dtype_codes()[result[2]])
    return problem, reduction_workspace(extents, x[1], code, device), result


def column_sum(rows: int, columns: int, dtype: torch.dtype, result: Result, device: torch.device) -> ColumnSum:
    """The sum over the rows of a matrix of this type, as the native module takes it."""
    partials = (rows, columns), (columns, 1), torch.float32
    return partials, gradient_sum((1, rows, columns), (0, dtype_codes()[dtype], 0, columns, 1), result, device)


def _matrices(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Matrix]:
    codes = dtype_codes()
    return [
        (address_of(t), codes[t.dtype], outer, row, column)
        for t, (outer, row, column) in zip(tensors, strides, strict=True)
    ]
