"""The operators on CUDA tensors.

A call like one before runs in one C++ function (csrc/call); an operator's key has the number of its program in place of
a callable's. Any other is planned, run by the same function, and kept for calls like it. What no plan expresses takes
several, or copies. Workspaces are PyTorch's, and nothing synchronises, so that CUDA graphs can capture every operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import composed, native
from ..epilogue import Epilogue, EpilogueError, Program, operand
from ..epilogue.reads import remember
from ..epilogue.table import GRADIENTS
from ..invariance import is_batch_invariant
from ..precision import SPLIT_MODES, product_mode
from . import schema
from .call_plans import (
    Planned,
    RowResults,
    general,
    given_to,
    plan_backward_call,
    plan_joined_call,
    plan_linear_call,
    plan_pointwise_call,
    plan_reduce_call,
)
from .layouts import MergedLayout, ReductionLayout, reduction_layout, reduction_runs, shapes_and_strides
from .linear_plan import cublas_linear
from .planner import LinearArguments, composed_joined
from .prepared import planes_of
from .training_step import product_arguments, storing

if TYPE_CHECKING:
    from .._C import CallFunction

call_backward_operator = native.direct_call("call_backward_operator")
call_joined_operator = native.direct_call("call_joined_operator")
call_linear_operator = native.direct_call("call_linear_operator")
call_pointwise_operator = native.direct_call("call_pointwise_operator")
call_reduce_operator = native.direct_call("call_reduce_operator")

NO_PLANES = 0, None  # scheme and memory of a weight that has none


def takes(x: Tensor) -> bool:
    """Whether the functions here may be called with x in place of the operators, whose dispatcher takes the host 10 us:
    not where a mode, a transform or a profiler watches what is dispatched."""
    core = torch._C
    if not x.is_cuda or core._len_torch_dispatch_stack() or core._len_torch_function_stack():
        return False
    return core._functorch.peek_interpreter_stack() is None and not core._autograd._profiler_enabled()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    *prepared: Any,
) -> Tensor:
    kept = planes_of(weight, *prepared)
    given = x, weight, bias, operands, _number_of(program), reduction, out_dtype, *(kept or NO_PLANES)
    y: Tensor | None = call_linear_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    arguments = LinearArguments(
        x,
        weight,
        bias,
        operands,
        Program.parse(program),
        reduction,
        out_dtype,
        batch_invariant=is_batch_invariant(),
    )
    if not _has_result(arguments):
        return composed.linear(*arguments[:7])
    function, is_kept = native.core.CallFunction.linear_operator, y is NotImplemented
    made: Tensor = _plan_and_run(
        function, given, given_to(arguments, kept), is_kept, lambda: plan_linear_call(arguments, kept)
    )
    return made


def linear_with_pre_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    *prepared: Any,
) -> tuple[Tensor, Tensor]:
    kept = planes_of(weight, *prepared)
    number = _number_of(f"pre-activation beside {program}")
    given = x, weight, bias, operands, number, "none", out_dtype, *(kept or NO_PLANES)
    both: tuple[Tensor, Tensor] | None = call_linear_operator(*given)
    if both is not None and both is not NotImplemented:
        return both
    parsed, invariant = Program.parse(program), is_batch_invariant()
    arguments = LinearArguments(x, weight, bias, operands, parsed, "none", out_dtype, batch_invariant=invariant)
    if not _has_result(arguments):
        z = F.linear(x, weight, bias)
        return composed.after_product(z, operands, arguments.program, "none", out_dtype), z
    function, is_kept = native.core.CallFunction.linear_operator, both is NotImplemented
    made: tuple[Tensor, Tensor] = _plan_and_run(
        function, given, given_to(arguments, kept), is_kept, lambda: plan_linear_call(storing(arguments), kept)
    )
    return made


def product(a: Tensor, b: Tensor, mode: str, issuer: str = "call") -> Tensor:
    mode = product_mode(mode) if a.dtype == torch.float32 else ""
    if mode and mode not in SPLIT_MODES:
        return cublas_linear(a, b, None, mode)
    given = a, b, None, (), _number_of(f"product of a {issuer} in {mode}"), "none", a.dtype, *NO_PLANES
    y: Tensor | None = call_linear_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    arguments = product_arguments(a, b, issuer)
    if not _has_result(arguments):
        return cublas_linear(a, b, None, mode)
    function, is_kept = native.core.CallFunction.linear_operator, y is NotImplemented
    made: Tensor = _plan_and_run(
        function, given, given_to(arguments), is_kept, lambda: plan_linear_call(arguments, captured_mode=mode)
    )
    return made


def _has_result(arguments: LinearArguments) -> bool:
    """Whether the result of a layer has elements, so that there is something to launch."""
    return arguments.x.shape[0] > 0 and arguments.weight.shape[0] > 0


def joined(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    if is_batch_invariant():  # whose kernels are chosen for each weight
        products = [linear(x, *own, [], schema.IDENTITY, "none", x.dtype) for own in zip(weights, biases, strict=True)]
        return torch.cat(products, 1)
    given = x, weights, biases
    y: Tensor | None = call_joined_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    tensors = [x, *weights, *(bias for bias in biases if bias is not None)]
    function, is_kept = native.core.CallFunction.joined_operator, y is NotImplemented and _have_elements(x, *weights)
    made: Tensor | None = _plan_and_run(function, given, (tensors, 1), is_kept, lambda: plan_joined_call(*given))
    return composed_joined(*given) if made is None else made


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    given = x, operands, _number_of(program), out_dtype
    y: Tensor | None = call_pointwise_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    if not x.numel():
        return torch.empty_like(x, dtype=out_dtype)

    def make_plan() -> Planned | None:
        like = torch.empty_like(x, dtype=out_dtype, device="meta")
        return plan_pointwise_call(x, operands, Program.parse(program), like)

    function = native.core.CallFunction.pointwise_operator
    made: Tensor | None = _plan_and_run(function, given, ((x, *operands), 1), y is NotImplemented, make_plan)
    if made is not None:
        return made
    first, *others = [torch.empty_like(x, dtype=t.dtype).copy_(t) for t in (x, *operands)]  # of one dimension together
    return pointwise(first, others, program, out_dtype)


def reduce(
    x: Tensor, operands: Sequence[Tensor], program: str, reduction: str, dims: Sequence[int], out_dtype: torch.dtype
) -> Tensor:
    given = x, operands, _number_of(program), reduction, dims, out_dtype
    y: Tensor | None = call_reduce_operator(*given)
    if y is not None and y is not NotImplemented:
        return y
    tensors, parsed, dims = (x, *operands), Program.parse(program), tuple(dims)
    if not x.numel():
        return composed.reduce(x, operands, parsed, reduction, dims, out_dtype)

    def make_plan() -> Planned | None:
        layout = reduction_layout(*shapes_and_strides(tensors), dims)
        if layout is None:
            return None
        return plan_reduce_call(x, operands, parsed, reduction, dims, _result_like(layout, out_dtype))

    function = native.core.CallFunction.reduce_operator
    made: Tensor | None = _plan_and_run(function, given, (tensors, 1), y is NotImplemented, make_plan)
    return _reduce_in_steps(tensors, parsed, reduction, dims, out_dtype) if made is None else made


def _result_like(layout: ReductionLayout, dtype: torch.dtype) -> Tensor:
    """A reduction's result, without memory: its dimensions lie in the order of (outer, inner)."""
    if layout.result_order is None:
        return torch.empty(layout.result_shape, dtype=dtype, device="meta")
    y = torch.empty(layout.result_sizes, dtype=dtype, device="meta")
    return y.permute(layout.result_order).reshape(layout.result_shape)


def _reduce_in_steps(
    tensors: Sequence[Tensor], program: Program, reduction: str, dims: tuple[int, ...], out_dtype: torch.dtype
) -> Tensor:
    """Reduces layouts that do not fit one kernel launch.

    Reduced dimensions that cannot be merged into one are reduced one after another. Where they can be, the kept
    dimensions or the operands are what does not fit, and all tensors are copied once.
    """
    x, *operands = tensors
    *rest, first = reduction_runs(tuple(x.shape), x.stride(), dims)
    if not rest:
        x, *operands = _dense_copies(tensors)
        return reduce(x, operands, program.text, reduction, dims, out_dtype)
    partial = reduce(x, operands, program.text, reduction, first, torch.float32)
    kept = [d for d in range(x.dim()) if d not in first]
    return reduce(partial, (), schema.IDENTITY, reduction, [kept.index(d) for run in rest for d in run], out_dtype)


def _dense_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the layout of the first tensor, which is itself copied only if its memory has gaps or overlaps."""
    x = tensors[0]
    if torch.empty_like(x, device="meta").stride() != x.stride():
        x = x.clone(memory_format=torch.contiguous_format)
    return [x, *(torch.empty_like(x, dtype=t.dtype).copy_(t) for t in tensors[1:])]


def pointwise_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: Sequence[int],
    sums_columns: bool,
    in_place: Sequence[int] = (),
) -> list[Tensor]:
    """in_place: of which inputs, dense and of the gradient's type, the gradient may take the memory: x, or the last
    one wanted. Not of the operator, which writes to none of its arguments."""
    number = _number_of(f"{program} in place of {in_place}" if in_place else program)
    given = grad, x, operands, number, wanted, sums_columns
    found: list[Tensor] | None = call_backward_operator(*given) if result is None else None
    if found is not None and found is not NotImplemented:
        return found
    if not x.numel():
        zeros = [torch.zeros_like((x, *operands)[k]) for k in wanted]
        return [*zeros, x.new_zeros(x.shape[-1:])] if sums_columns else zeros
    if result is not None:
        return _backward_of_reduction(grad, x, operands, program, reduction, result, wanted, sums_columns)
    kept = given if found is NotImplemented else None
    parsed = Program.parse(program)
    return _differentiate(grad, x, operands, parsed, wanted, sums_columns, kept, in_place=in_place)


_rows_of_ones: dict[Hashable, Tensor] = {}
_ROWS_LIMIT = 64


def row_of_ones(x: Tensor) -> Tensor:
    """`[1, N]` of the type of x `[M, N]`, which nobody may write to: a gradient that kernels read by vectors.

    There is one for each stream, in whose order it is written once and read. A capture makes its own, as its graph's
    memory has nothing in it until that is replayed.
    """
    stream = 0
    if x.is_cuda:
        if torch._C._cuda_isCurrentStreamCapturing():
            return x.new_ones(1, x.shape[1])
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    key = stream, x.device, x.dtype, x.shape[1]
    found = _rows_of_ones.get(key)
    return remember(_rows_of_ones, key, x.new_ones(1, x.shape[1]), _ROWS_LIMIT) if found is None else found


def _differentiate(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: Program,
    wanted: Sequence[int],
    sums_columns: bool,
    given: tuple[Any, ...] | None = None,
    rows: RowResults | None = None,
    is_accurate: bool = False,
    in_place: Sequence[int] = (),
) -> list[Tensor]:
    """The gradients by one kernel. given: the call's arguments, where later calls are to run its plan."""
    core, inputs = native.core, (x, *operands)
    function = core.CallFunction.backward_operator
    key = None if given is None else core.call_key(function, given, 0)
    if sums_columns:
        x = x.contiguous()  # rows and columns must not be merged or swapped: the sum is over rows
    tensors: list[Tensor] = [grad, x, *operands]
    planned = plan_backward_call(tensors, program, wanted, inputs, sums_columns, rows, is_accurate, in_place)
    is_whole = planned is not None and x is inputs[0]
    if planned is None:
        tensors = [torch.empty_like(x, dtype=t.dtype).copy_(t) for t in tensors]  # of one dimension together
        planned = plan_backward_call(tensors, program, wanted, inputs, sums_columns, rows, is_accurate)
        assert planned is not None
    stored: list[Tensor] = planned.run([*tensors, *(() if rows is None else rows.tensors)], 2)
    is_whole = is_whole and all(t.shape == inputs[k].shape for k, t in zip(wanted, stored, strict=False))
    if given is not None and key is not None:
        (planned if is_whole else general()).keep(function, given, 0, key)
    gradients = [_sum_to(t, inputs[k]) for k, t in zip(wanted, stored, strict=False)]
    return [*gradients, *stored[len(wanted) :]]


def _sum_to(tangent: Tensor, operand: Tensor) -> Tensor:
    """An operand's gradient of what is stored in x's shape, where the plan does not sum it."""
    if tangent.shape == operand.shape:
        return tangent
    shape = (1,) * (tangent.dim() - operand.dim()) + tuple(operand.shape)
    dims = tuple(d for d, size in enumerate(shape) if size != tangent.shape[d])
    if not dims:
        return tangent.to(operand.dtype).view(operand.shape)
    return reduce(tangent, (), schema.IDENTITY, "sum", dims, operand.dtype).view(operand.shape)


def _backward_of_reduction(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor,
    wanted: Sequence[int],
    sums_columns: bool,
) -> list[Tensor]:
    """Of a program behind which a reduction gave `result`."""
    parsed = Program.parse(program)
    ties = _count_ties(x, operands, program, result) if GRADIENTS[reduction] == "ties" else None
    rows = [result.contiguous(), *([] if ties is None else [ties])]
    given = grad, x, [*operands, *rows], _number_of(f"{reduction} of {program}"), wanted, sums_columns
    found: list[Tensor] | None = call_backward_operator(*given)
    if found is not None and found is not NotImplemented:
        return found
    layout = _rows_layout(grad, x, operands, result)
    if layout is not None and (not sums_columns or layout.extents == (1, *x.shape)):  # column sums keep x's rows
        results = RowResults(layout, reduction, rows)
        kept = given if found is NotImplemented else None
        return _differentiate(grad, x, operands, parsed, wanted, sums_columns, kept, results)
    if ties is not None:
        grad = grad.float() / ties
    through = _through_reduction(program, reduction)
    if through is None:  # the program has no room for one more operand: compute the factor in memory
        y = pointwise(x, operands, program, torch.float32)
        weight = y == result if GRADIENTS[reduction] == "ties" else torch.exp(y - result)
        return _differentiate(grad * weight, x, operands, parsed, wanted, sums_columns)
    return _differentiate(grad, x, (*operands, result), through, wanted, sums_columns, is_accurate=True)


@functools.lru_cache(maxsize=1024)
def _through_reduction(program: str, reduction: str) -> Program | None:
    """A program whose derivative is that of the given one times that of the reduction.

    It takes the reduction's result as one more operand; None if it exceeds a limit of programs then. The kernel
    multiplies by a reduction's derivative itself only where the reduced dimension is the last one in memory.
    """
    if GRADIENTS[reduction] == "ties":
        return _with_result(program, lambda value, result: torch.where(value == result, value, 0.0))
    return _with_result(program, lambda value, result: torch.exp(value - result))


@functools.lru_cache(maxsize=1024)
def _equals_result(program: str) -> Program | None:
    """A program that returns 1 where `program`'s value equals an extra operand, else 0; None as above."""
    return _with_result(program, lambda value, result: value == result)


def _with_result(program: str, combine: Callable[[Any, Any], Any]) -> Program | None:
    """`combine` of a program's value and one more operand; None where that exceeds a limit of programs."""
    parsed = Program.parse(program)
    try:
        combined = combine(parsed.expression, operand(parsed.operand_count))
        return Epilogue.from_expression(combined, parsed.operand_count + 1).program
    except EpilogueError:
        return None


def _count_ties(x: Tensor, operands: Sequence[Tensor], program: str, result: Tensor) -> Tensor:
    """How many elements of each reduction equal its result, in fp32 and in result's shape."""
    dims = tuple(d for d in range(x.dim()) if result.shape[d] != x.shape[d])
    equals = _equals_result(program)
    if equals is None:
        x, operands, equals = pointwise(x, operands, program, torch.float32), (), _equals_result(schema.IDENTITY)
    assert equals is not None  # the identity has room for one more operand
    if not dims:
        return pointwise(x, (*operands, result), equals.text, torch.float32)
    return reduce(x, (*operands, result), equals.text, "sum", dims, torch.float32).view(result.shape)


def _rows_layout(grad: Tensor, x: Tensor, operands: Sequence[Tensor], result: Tensor) -> MergedLayout | None:
    """The layout with rows outside and reduced columns inside, or None if a tensor's memory has another order."""
    dims = tuple(d for d in range(x.dim()) if result.shape[d] != x.shape[d])
    dense = torch.empty_like(x, device="meta")
    found = reduction_layout(*shapes_and_strides((dense, grad, x, *operands)), dims)
    if found is None or found.extents[2] != 1 or found.result_order is not None:
        return None
    rows, columns, _ = found.extents
    return MergedLayout((1, rows, columns), tuple((0, own[0], own[1]) for own in found.strides[1:]))


def _plan_and_run(
    function: CallFunction,
    given: tuple[Any, ...],
    tensors: tuple[Sequence[Tensor], int],
    is_kept: bool,
    make_plan: Callable[[], Planned | None],
) -> Any:
    """The result of a call; None where no plan expresses it.

    tensors: the call's, and which of them is the first operand. is_kept: later calls like this one are to run its plan.
    """
    key = native.core.call_key(function, given, 0) if is_kept else None
    planned = make_plan()
    result = None if planned is None else planned.run(*tensors)
    if key is not None:
        (planned or general()).keep(function, given, 0, key)
    return result


def _have_elements(*tensors: Tensor) -> bool:
    return all(t.numel() for t in tensors)


@functools.lru_cache(maxsize=4096)
def _number_of(program: str) -> int:
    return native.core.new_callable_number()
