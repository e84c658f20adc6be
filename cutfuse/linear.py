"""A linear layer and what follows it, in one kernel where one takes it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import profiler
from torch.utils.checkpoint import checkpoint

from . import arguments, composed, native
from .composed import PyTorchCall
from .epilogue import Epilogue, EpilogueError
from .epilogue.eager import without_last_rounding
from .epilogue.errors import OperandCountError
from .epilogue.program import Operation, arithmetic_dtype
from .epilogue.types import types_of
from .invariance import is_batch_invariant, may_be_batch_invariant, require
from .layer import autograd, calls
from .layer.autograd import needs_gradient
from .layer.call_plans import Planned, general, plan_linear_call
from .layer.calls import record
from .layer.eager import never, plan_eager_call
from .layer.layouts import aligned_rows
from .layer.planner import LinearArguments
from .layer.prepared import UNPREPARED, Prepared
from .layer.training import adds_bias_apart, multiplies_at_once, plan_training_call
from .layer.training_step import is_traced
from .matrix_vector import MatrixVector, affine_reduce, find_matrix_vector, is_sooner
from .precision import autocast_dtype
from .prepare import PreparedWeight, is_exporting
from .pytorch_operation import find_pytorch_operation
from .rounding import is_eager
from .rounding import process as rounding_mode

_OPTIONS = ("epilogue", "operands", "reduce", "keepdim", "out_dtype")  # of a call, in their order


EAGER = 'with rounding="eager" PyTorch\'s own operations may run'


class LinearCall(NamedTuple):
    """A call in normal form: what runs, and what `explain` describes."""

    x: Tensor  # [M, K]
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    operands: list[Tensor]  # each broadcasts against [M, N]
    epilogue: Epilogue
    reduction: str  # "none" or a reduction's name
    out_dtype: torch.dtype
    composed_because: str  # why PyTorch's own operations run; empty where the operators do
    operation: Operation | None  # PyTorch's, which is the epilogue
    matrix_vector: MatrixVector | None
    prepared: PreparedWeight | None  # the weight's, if it was given as one
    recompute: bool = False
    batch_invariant: bool = False


def linear(
    x: Tensor,
    weight: Tensor | PreparedWeight,
    bias: Tensor | None = None,
    *,
    epilogue: Callable[..., Tensor] | Epilogue | None = None,
    operands: Sequence[Tensor | float] = (),
    reduce: str | None = None,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
    rounding: str | None = None,
) -> Tensor:
    """`reduce(epilogue(x @ weight.T + bias, *operands))`, fused into the matrix product where a kernel takes it.

    Args:
        x: `[..., K]` in fp64, fp32, bf16 or fp16, on any device and of any strides.
        weight: `[N, K]`, of x's type and on its device, or what `cutfuse.prepare` made of it.
        bias: `[N]`, likewise, or None.
        epilogue: a function of the pre-activation `z` and the operands, such as `lambda z, r: torch.relu(z) + r`, or a
            `cutfuse.Epilogue`. It is traced once for what it reads, on symbolic values, and computed in fp32 (fp64 for
            fp64).
        operands: numbers, as many as needed, and at most four tensors that broadcast against `[..., N]`.
        reduce: "sum", "mean", "amax", "amin" or "logsumexp" over the last dimension, or None.
        keepdim: keep the reduced dimension, of size 1. No effect without `reduce`.
        out_dtype: fp64, fp32, bf16 or fp16; what PyTorch promotes x and the operands to by default.
        recompute: keep x, weight, bias and operands for the backward pass, but not the pre-activation `[..., N]`,
            which one more product computes again there. In compiled functions torch.compile decides what is kept.
        rounding: "eager" for the bits of PyTorch's own operations, "once" for fp32 with one rounding, and None for what
            `cutfuse.rounding` says.

    Returns:
        `[..., N]`, or with `reduce` `[...]` or `[..., 1]`.

    Raises:
        ValueError: shapes, devices, a reduction or a rounding that do not fit.
        TypeError: types that do not fit.
        EpilogueError: an epilogue that cannot be traced, exceeds a program's limits or takes other operands. With
            rounding="eager" PyTorch runs those that cannot be traced.
        RuntimeError: a prepared weight that has changed since.
    """
    given = x, weight, bias, epilogue, operands, reduce, keepdim, out_dtype
    if torch.compiler.is_dynamo_compiling():
        return _linear_generally(given, is_eager(rounding), recompute=recompute)
    if rounding is not None and is_eager(rounding) != is_eager(None):
        with rounding_mode.of_call(is_eager(rounding)):
            options: dict[str, Any] = dict(zip(_OPTIONS, given[3:], strict=True))
            return linear(x, weight, bias, **options, recompute=recompute)
    if profiler._is_profiler_enabled:  # 4 ns; a call of the function that asks PyTorch takes 48 ns
        with profiler.record_function("cutfuse.linear"):
            return _linear_generally(given, is_eager(None), recompute=recompute)
    y: Tensor | None = calls.call_linear(*given) if recompute is False else None
    if y is None or y is NotImplemented:
        return _linear_generally(given, is_eager(None), remember=y is NotImplemented, recompute=recompute)
    return y


def linear_once(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    epilogue: Callable[..., Tensor] | Epilogue | None = None,
    operands: Sequence[Tensor] = (),
    reduce: str | None = None,
    out_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> Tensor:
    """`linear` as a part of other functions, whose results round once. A direct call asks less than in `linear`."""
    is_compiling = torch.compiler.is_dynamo_compiling()
    if not (is_compiling or recompute or profiler._is_profiler_enabled or rounding_mode.holds()):
        y: Tensor | None = calls.call_linear(x, weight, bias, epilogue, operands, reduce, False, out_dtype)
        if y is not None and y is not NotImplemented:
            return y
    options: dict[str, Any] = {"epilogue": epilogue, "operands": operands, "reduce": reduce, "out_dtype": out_dtype}
    return linear(x, weight, bias, **options, recompute=recompute, rounding="once")


def _linear_eagerly(given: tuple[Any, ...], remember: bool, recompute: bool) -> Tensor:
    """Any call with `rounding="eager"`. remember: a kernel may compute it, and the next ones like it."""
    require(EAGER)
    try:
        y = _run_eager_kernel(given) if remember else None
    except OperandCountError:
        raise
    except EpilogueError:  # PyTorch runs what cannot be traced
        y = None
    if y is not None:
        return y
    x, weight, bias, epilogue, operands, reduce, keepdim, out_dtype = given
    arguments.check_flag("linear", "keepdim", keepdim)
    arguments.check_flag("linear", "recompute", recompute)
    _, weight = _unwrap(weight)
    arguments.check_layer("linear", x, weight, bias)
    if autocast_dtype(x.device.type) is None:
        arguments.check_one_type("linear", x, weight, bias)
    arguments.split_operands("linear", operands, x.device)
    if reduce is not None:
        arguments.check_reduction("linear", reduce)
    if out_dtype is not None:
        arguments.check_floating("linear", "out_dtype", out_dtype)
    given = x, weight, bias, epilogue, operands, reduce, keepdim, out_dtype
    if recompute and _can_checkpoint():
        again: Tensor = checkpoint(composed.linear_eagerly, *given, use_reentrant=False, preserve_rng_state=True)
        return again
    return composed.linear_eagerly(*given)


def _run_eager_kernel(given: tuple[Any, ...]) -> Tensor | None:
    """The result by a plan that the next calls like this one run directly; None where PyTorch is to compute it."""
    x, _, bias, _, operands, *_ = given
    call = normalise_linear(*given)
    found = _eager_call(given, call)
    planned: Planned | None = never()
    if isinstance(found, LinearCall):
        planned = plan_eager_call(operator_of(found), _shape_of_result(x, call, keepdim=False))
    if planned is None:
        return None
    # Unless another thread has changed the process's mode before the key was taken.
    calls.remember_linear(given, call.epilogue, lambda: planned if is_eager(None) else None)
    if planned is never():
        return None
    tensors = [t for t in (x, call.weight, bias) if t is not None]
    y: Tensor = planned.run([*tensors, *calls.tensors_of(operands)], len(tensors))
    return y


def _eager_call(given: tuple[Any, ...], call: LinearCall) -> LinearCall | str:
    """What a kernel computes of a call with `rounding="eager"`, or why PyTorch's own operations do.

    call: the same call that rounds once.
    """
    x, _, bias, epilogue, operands, *_ = given
    tensors = (x, call.weight, bias, *calls.tensors_of(operands))
    if call.composed_because:
        return call.composed_because
    if needs_gradient(*tensors):
        return "its gradients are those of PyTorch's operations"
    if call.x.dtype not in (torch.float16, torch.bfloat16):
        return f"kernels add products of {call.x.dtype} in another order"
    if call.reduction != "none":
        return f"kernels compute {call.reduction} in another order"
    if autocast_dtype(x.device.type) is not None:
        return "autocast casts what it takes"
    if x.dim() > 2 and not x.is_contiguous():
        return "x has more than two dimensions and is not contiguous"
    if _takes_steps(call, tensors):
        return "its tensors are cast or copied first"
    if any(not t.is_contiguous() and 0 not in t.stride() for t in calls.tensors_of(operands)):
        return "an operand is not contiguous, whose order of dimensions PyTorch may give the result"
    numbers, own = arguments.split_operands("linear", operands, x.device)
    first, *others = types_of(x, *own)
    try:
        rounded = arguments.resolve_epilogue("linear", epilogue, numbers, (first._replace(rounds=True), *others))
        root = without_last_rounding(rounded.expression, call.out_dtype)
        found = Epilogue.from_expression(root, len(own), is_eager=True)
    except EpilogueError as error:
        return str(error)
    return call._replace(epilogue=found) if found.program.instructions else "nothing follows the linear layer"


def _linear_generally(
    given: tuple[Any, ...], is_eager: bool, *, remember: bool = False, recompute: bool = False
) -> Tensor:
    """Any call, with every check. `remember`: the next one like it is to run directly."""
    if is_eager:
        return _linear_eagerly(given, remember, recompute)
    x, _, bias, _, operands, _, keepdim, _ = given
    call = normalise_linear(*given, recompute=recompute)
    y = _run_as_planned(given, call) if remember else None
    if y is not None:
        return y
    if call.operation is not None:
        # Of the tensors as they are given, as in a direct call: every call rounds and lays out its results alike.
        return call.operation(F.linear(x, call.weight, bias), calls.tensors_of(operands))
    return _shaped(run_linear(call), x, call, keepdim)


def _run_as_planned(given: tuple[Any, ...], call: LinearCall) -> Tensor | None:
    """The result by a plan that the next calls like this one run directly; None where the call has none."""
    x, weight, bias, _, operands, _, keepdim, _ = given
    tensors = (x, weight, bias, *calls.tensors_of(operands))
    make_plan: Callable[[], Planned]
    if is_plain(call):
        make_plan = _plan_product
    elif call.operation is not None:
        make_plan = functools.partial(calls.plan_operation, call.operation)
    elif not _takes_steps(call, tensors):
        make_plan = functools.partial(_plan_layer, call, keepdim, tensors)
    elif _is_recorded(given, call, tensors):
        y, replay = record(functools.partial(_run_given, call, keepdim), tensors)
        calls.remember_linear(given, call.epilogue, functools.partial(calls.plan_steps, replay, tensors))
        return y
    else:
        make_plan = general
    present = [t for t in tensors if t is not None], 2 if bias is None else 3
    return calls.remember_linear(given, call.epilogue, make_plan, present)


def _is_recorded(given: tuple[Any, ...], call: LinearCall, tensors: Sequence[Tensor | None]) -> bool:
    """Whether the operations that a call takes are written down, for the next calls like it."""
    # A number in the memory of a CPU is copied to the device anew.
    are_there = all(t is None or (t.numel() and t.device == call.x.device) for t in tensors)
    return are_there and not needs_gradient(*tensors) and calls.has_number(given, call.epilogue)


def _takes_steps(call: LinearCall, tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call takes more than one operator on the tensors that it is given."""
    casts_result = arguments.casts_result(call.out_dtype, call.x.dtype)
    is_one = not call.composed_because and call.matrix_vector is None and not casts_result
    return not (is_one and calls.same_memory(tensors, (call.x, call.weight, call.bias, *call.operands)))


def _run_given(
    call: LinearCall, keepdim: bool, x: Tensor, weight: Tensor, bias: Tensor | None, *operands: Tensor
) -> Tensor:
    """A call with these tensors in the place of those that it was prepared with."""
    rows, matrices = _as_matrices(
        x,
        operands,
        weight.shape[0],
        is_composed=bool(call.composed_because),
        is_invariant=may_be_batch_invariant(),
    )
    call = call._replace(x=rows, weight=weight, bias=bias, operands=matrices)
    return _shaped(run_linear(call), x, call, keepdim)


def _as_matrices(
    x: Tensor, operands: Sequence[Tensor], columns: int, *, is_composed: bool, is_invariant: bool
) -> tuple[Tensor, list[Tensor]]:
    """x as `[M, K]`, and operands that broadcast against `[M, columns]`, in types that the kernels read."""
    matrices = [to_matrix(index, t, x.shape[:-1], columns) for index, t in enumerate(operands)]
    if not is_composed:
        matrices = [arguments.to_kernel_dtype(t) for t in matrices]
    rows = x if x.dim() == 2 else x.reshape(arguments.rows_of(x), x.shape[-1])
    return aligned_rows(rows) if is_invariant else rows, matrices


def _shaped(y: Tensor, x: Tensor, call: LinearCall, keepdim: bool) -> Tensor:
    """What `run_linear` gives, in the shape that x, as it was given, asks for."""
    return y if call.reduction == "none" and x.dim() == 2 else y.reshape(_shape_of_result(x, call, keepdim))


def _shape_of_result(x: Tensor, call: LinearCall, keepdim: bool) -> Sequence[int]:
    leading = x.shape[:-1]
    if call.reduction != "none":
        return (*leading, 1) if keepdim else leading
    return (*leading, call.weight.shape[0])


def _plan_product() -> Planned:
    return Planned(native.core.product_call(), [])


def _plan_layer(call: LinearCall, keepdim: bool, tensors: Sequence[Any]) -> Planned:
    """Of one operator. tensors: x, weight, bias and the operands that are tensors, as they are given."""
    x, weight, bias, *operands = tensors
    arguments, shape = operator_of(call), _shape_of_result(x, call, keepdim)
    if needs_gradient(*tensors):
        return plan_training_call(x, weight, bias, operands, arguments, shape)
    return plan_linear_call(arguments, shape=shape, is_bias_apart=adds_bias_apart(x, bias))


def operator_of(call: LinearCall) -> LinearArguments:
    """What the operator is given, and the planner."""
    return LinearArguments(
        call.x,
        call.weight,
        call.bias,
        call.operands,
        call.epilogue.program,
        call.reduction,
        call.out_dtype,
        batch_invariant=call.batch_invariant,
    )


def normalise_linear(
    x: Tensor,
    weight: Tensor | PreparedWeight,
    bias: Tensor | None = None,
    epilogue: Callable[..., Tensor] | Epilogue | None = None,
    operands: Sequence[Tensor | float] = (),
    reduce: str | None = None,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    recompute: bool = False,
) -> LinearCall:
    """Checks a call of `linear` and decides its path; computes nothing but casts and copies that the path needs."""
    arguments.check_flag("linear", "keepdim", keepdim)
    arguments.check_flag("linear", "recompute", recompute)
    prepared, weight = _unwrap(weight)
    arguments.check_layer("linear", x, weight, bias)
    if reduce is not None:
        arguments.check_reduction("linear", reduce)
    numbers, tensors = arguments.split_operands("linear", operands, x.device)
    columns = weight.shape[0]
    x, weight, bias = autocast_inputs(x, weight, bias)
    arguments.check_one_type("linear", x, weight, bias)
    resolved = arguments.resolve_epilogue("linear", epilogue, numbers, types_of(x, *tensors))
    out_dtype = arguments.resolve_out_dtype("linear", out_dtype, x, resolved, reduce)
    wrapped_because = arguments.why_wrapped((x, weight, bias), tensors)
    composed_because = wrapped_because or arguments.why_composed(x, arithmetic_dtype(x, tensors))
    is_invariant = may_be_batch_invariant()
    if torch.compiler.is_compiling() and not (composed_because or prepared or autograd.is_forced(x) or is_invariant):
        composed_because = arguments.why_compiled(needs_gradient(x, weight, bias, *tensors))
    given = x, tensors
    x, tensors = _as_matrices(x, tensors, columns, is_composed=bool(composed_because), is_invariant=is_invariant)
    # What a weight that wraps others computes may be products alone.
    # The steps of that form depend on the number of rows.
    has_form = reduce is not None and not (wrapped_because or is_invariant)
    matrix_vector = find_matrix_vector(resolved, reduce, tensors, columns) if has_form else None
    if matrix_vector is not None and not composed_because and not is_sooner(matrix_vector, x, weight, bias):
        matrix_vector = None
    operation = None
    if not composed_because and not recompute and not is_invariant and not torch.compiler.is_compiling():
        operator = LinearArguments(x, weight, bias, tensors, resolved.program, reduce or "none", out_dtype)
        operation, composed_because = find_pytorch_operation(operator, *given) or (None, "")
    return LinearCall(
        x=x,
        weight=weight,
        bias=bias,
        operands=tensors,
        epilogue=resolved,
        reduction=reduce or "none",
        out_dtype=out_dtype,
        composed_because=composed_because,
        operation=operation,
        matrix_vector=matrix_vector,
        prepared=prepared,
        recompute=recompute,
        batch_invariant=is_invariant and is_batch_invariant(),
    )


def describe_linear(
    x: Tensor,
    weight: Tensor | PreparedWeight,
    bias: Tensor | None = None,
    *,
    rounding: str | None = None,
    **options: Any,
) -> LinearCall | PyTorchCall:
    """A call of `linear`, for `explain`."""
    if not is_eager(rounding):
        return normalise_linear(x, weight, bias, **options)
    operands = options.get("operands", ())
    found: LinearCall | str
    try:
        call = normalise_linear(x, weight, bias, **options)
        found = _eager_call((x, weight, bias, options.get("epilogue"), operands), call)
    except OperandCountError:
        raise
    except EpilogueError as error:
        found = str(error)
    if isinstance(found, LinearCall):
        return found
    weight = _unwrap(weight)[1]
    tensors = [t for t in (x, weight, bias, *calls.tensors_of(operands)) if t is not None]
    flops = 2 * x.numel() * weight.shape[0]
    return PyTorchCall("linear", tensors, found, flops=flops, bits=f"PyTorch's own, by its operations: {found}")


def describe_unfused(
    x: Tensor, weight: Tensor | PreparedWeight, bias: Tensor | None, because: str, operands: Sequence[Any] = ()
) -> PyTorchCall:
    """A layer of which PyTorch computes the product and what follows, for `explain`. Checked as in `linear`."""
    layer = normalise_linear(x, weight, bias)
    tensors = [t for t in (x, layer.weight, bias, *operands) if isinstance(t, Tensor)]
    return PyTorchCall("linear", tensors, because, flops=2 * x.numel() * layer.weight.shape[0])


def _unwrap(weight: Tensor | PreparedWeight) -> tuple[PreparedWeight | None, Tensor]:
    """The prepared weight, if it is one, and the weight itself."""
    if not isinstance(weight, PreparedWeight):
        return None, weight
    if not torch.compiler.is_compiling():  # the operators check it where they run
        weight.check()
    return weight, weight.weight


def for_operators(call: LinearCall) -> Prepared:
    """What the operators take of a prepared weight: nothing where autocast has cast it."""
    prepared = call.prepared
    if prepared is None or prepared.weight is not call.weight:
        return UNPREPARED
    # An exported program, which may be loaded elsewhere, has the weight alone.
    return UNPREPARED if is_exporting() else prepared.for_operators


def run_linear(call: LinearCall) -> Tensor:
    """`[M, N]`, or `[M]` with a reduction. Not of a call that is PyTorch's operation."""
    x, weight, bias, operands, epilogue, reduction, out_dtype, composed_because, _, matrix_vector, _, recompute, _ = (
        call
    )
    require(composed_because)
    if matrix_vector is not None:
        kernel_dtype = arguments.kernel_out_dtype(out_dtype, x.dtype)
        uses_operators = not composed_because
        y = affine_reduce(x, weight, bias, operands, matrix_vector, reduction, uses_operators, kernel_dtype)
        return y.to(out_dtype)
    if is_plain(call):
        return F.linear(x, weight, bias)
    if not composed_because:
        kernel_dtype = arguments.kernel_out_dtype(out_dtype, x.dtype)
        program = epilogue.program.text
        y = autograd.linear(x, weight, bias, operands, program, reduction, kernel_dtype, for_operators(call), recompute)
        return y if kernel_dtype == out_dtype else y.to(out_dtype)
    if recompute and _can_checkpoint():
        again: Tensor = checkpoint(_run_composed, call, use_reentrant=False, preserve_rng_state=False)
        return again
    return _run_composed(call)


def _run_composed(call: LinearCall) -> Tensor:
    x, weight, bias, operands, epilogue, reduction, out_dtype, *_ = call
    return composed.linear(x, weight, bias, operands, epilogue.program, reduction, out_dtype)


def _can_checkpoint() -> bool:
    """Not in compiled functions, where torch.compile decides what is kept, nor below transforms of torch.func, which
    know no hooks of saved tensors."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is None


def is_plain(call: LinearCall) -> bool:
    """Whether it is PyTorch's own linear layer: not where `cutfuse.precision` forces it otherwise.

    No property of the call: Dynamo of PyTorch 2.8 and 2.9 takes what a NamedTuple's property gives for a tensor.
    """
    empty = len(call.epilogue.program.instructions) == 0
    if not empty or call.reduction != "none" or call.out_dtype != call.x.dtype:
        return False
    if may_be_batch_invariant() and not call.composed_because:
        return False
    # A compiled plain layer stays PyTorch's: function transforms that it meets only then see through no operator.
    if call.composed_because or torch.compiler.is_compiling() or not autograd.is_forced(call.x):
        return True
    # In training, as the direct path has it, unless its products are of parts of the numbers.
    x, weight, bias = call.x, call.weight, call.bias
    given = LinearArguments(x, weight, bias, (), call.epilogue.program, "none", call.out_dtype)
    return needs_gradient(x, weight, bias) and not is_traced(x, weight) and multiplies_at_once(given)


def autocast_inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """A product's inputs in the types that autocast gives them; as they are outside of it."""
    cast = autocast_dtype(x.device.type)
    if cast is None:
        return x, weight, bias
    return _autocast(x, cast), _autocast(weight, cast), None if bias is None else _autocast(bias, cast)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts a product's inputs: every floating-point type but fp64."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def to_matrix(index: int, operand: Tensor, leading: torch.Size, columns: int) -> Tensor:
    """An operand of `[..., N]` as a matrix that broadcasts against `[M, N]`."""
    if operand.dim() <= 1:
        if operand.dim() == 1 and not _broadcasts(operand.shape[0], columns):
            _refuse_operand(index, operand, leading, columns)
        return operand.reshape(1, -1)
    *outer, last = operand.shape
    extra = len(outer) - len(leading)
    aligned = (1,) * -extra + tuple(outer[max(extra, 0) :])
    fits = all(arguments.is_size(size, 1) for size in outer[: max(extra, 0)]) and _broadcasts(last, columns)
    if not fits or not all(_broadcasts(size, target) for size, target in zip(aligned, leading, strict=True)):
        _refuse_operand(index, operand, leading, columns)
    # Not Size.numel(), which makes a number of the symbol that a size may be, and so a graph for each batch.
    if all(arguments.is_size(size, target) for size, target in zip(aligned, leading, strict=True)):
        rows = math.prod(leading)
    elif all(arguments.is_size(size, 1) for size in outer):
        rows = 1
    else:
        operand = operand.reshape(*aligned, last).expand(*leading, last)
        rows = math.prod(leading)
    return operand if operand.dim() == 2 and operand.shape[0] == rows else operand.reshape(rows, last)


def _broadcasts(size: int, target: int) -> bool:
    """Two comparisons, as `size in (1, target)` would be one guard on both, which PyTorch warns about.

    A symbol is compared with the target first: whether it is 1 may be unknown, as of rows that data select.
    """
    return arguments.is_size(size, 1) or size == target or size == 1


def _refuse_operand(index: int, operand: Tensor, leading: torch.Size, columns: int) -> None:
    raise ValueError(
        f"cutfuse.linear: operand {index} of shape {tuple(operand.shape)} does not broadcast against the result's "
        f"{(*leading, columns)}; numbers, [N], [..., 1] and [..., N] do"
    )
