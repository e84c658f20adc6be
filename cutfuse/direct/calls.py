"""The direct path of the public functions: a call with the same key as an earlier one runs in one C++ function.

`connect` passes that function (csrc/call) what it needs of PyTorch. After a call on the general path,
`remember_linear`, `remember_pointwise` and `remember_reduce` make the plan for later calls with the same key.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native
from ..epilogue import Epilogue
from ..epilogue.program import Operation
from ..epilogue.resolve import recognised
from ..epilogue.types import type_of
from ..gradients.elementwise import needs_gradient
from ..planning.linear_plan import LinearArguments
from ..precision import _INHERITED, _context_mode, module_variables
from .call_plans import plan_linear, plan_pointwise, plan_reduce
from .training import adds_bias_apart, plan_training

if TYPE_CHECKING:
    from .._C import CallFunction, CallPlan
    from .._C import call_linear as call_linear
    from .._C import call_pointwise as call_pointwise
    from .._C import call_reduce as call_reduce
    from .recorded import Replay
else:
    try:
        from .._C import call_linear, call_pointwise, call_reduce
    except ImportError:  # the general path raises an ImportError that tells what to do
        call_linear = call_pointwise = call_reduce = lambda *given: None

CUDA = 2  # DLPack's numbers
CPU = 1


def connect() -> None:
    """Passes PyTorch's functions to the native module. Raises AttributeError if this PyTorch lacks one."""
    native.core.connect_calls(torch_functions())


def torch_functions(device_type: int = CUDA, *, has_exchange_api: bool = True) -> dict[str, Any]:
    """The functions of PyTorch that a direct call needs, by name. Inductor's code uses the private ones of them too."""
    core = torch._C
    guards: Any = core._dynamo.guards
    exchange_api = getattr(Tensor, "__dlpack_c_exchange_api__", None) if has_exchange_api else None  # torch 2.10
    on_cuda = device_type == CUDA
    return {
        "tensor_type": Tensor,
        "parameter_type": nn.Parameter,
        "exchange_api": exchange_api,
        "device_type": device_type,
        "dtype_words": _dtype_words(),
        "function_modes": core._len_torch_function_stack,
        "dispatch_modes": core._len_torch_dispatch_stack,
        "functorch": core._functorch.peek_interpreter_stack,
        "profiler": core._autograd._profiler_enabled,
        "tracing": core._get_tracing_state,
        "autocast": torch.is_autocast_enabled,
        "device_name": "cuda" if on_cuda else "cpu",
        "forward_ad": vars(forward_ad),
        "grad_enabled": torch.is_grad_enabled,
        "is_neg": Tensor.is_neg,
        "default_dtype": torch.get_default_dtype,
        # A PyTorch without CUDA has no CUDA tensors either, so the answer does not matter.
        "current_device": getattr(core, "_cuda_getDevice", _first) if on_cuda else _first,
        "current_stream": getattr(core, "_cuda_getCurrentRawStream", _first) if on_cuda else _first,
        "empty_strided": guards._empty_strided_cuda if on_cuda else guards._empty_strided_cpu,
        "linear": F.linear,
        "bytes_dtype": torch.uint8,
        "context_mode": _context_mode,
        "inherited_mode": _INHERITED,
        "process": module_variables(),
        "allows_tf32": _tf32_getter(),
        "is_capturing": getattr(core, "_cuda_isCurrentStreamCapturing", _no) if on_cuda else _no,
    }


def _first(*_: Any) -> int:
    return 0


def _no() -> bool:
    return False


def _dtype_words() -> dict[torch.dtype, int]:
    """Types by their code and bits in DLPack, packed into a word."""
    floating, bfloat = 2, 4
    bits = {torch.float16: 16, torch.float32: 32, torch.float64: 64}
    return {torch.bfloat16: bfloat << 8 | 16, **{dtype: floating << 8 | size for dtype, size in bits.items()}}


def _tf32_getter() -> Any:
    """A function that returns PyTorch's setting for fp32 products: "tf32" or True if they may run in tf32."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9
    return torch._C._get_cublas_allow_tf32 if getter is None else functools.partial(getter, "cuda", "matmul")


def remember_linear(
    given: tuple[Any, ...],
    arguments: LinearArguments,
    epilogue: Epilogue,
    y: Tensor,
    is_general: bool,
) -> None:
    """Remembers a call of `linear` with the result y. given: the call's arguments. arguments: those of its operator.

    is_general: whether all calls with this key take the general path.
    """
    tensors = tensors_of(given[4])
    is_apart = adds_bias_apart(given[0], given[2])

    def make_plan() -> CallPlan | None:
        if is_general:
            return native.core.general_call()
        if needs_gradient(*given[:3], *tensors):
            return native.core.general_call() if is_apart else plan_training(given[:3], tensors, arguments, y)
        return plan_linear(arguments, y, is_apart)

    number_of = functools.partial(_number_of, given[3], given[4], given[0], epilogue)
    remember(native.core.CallFunction.linear, given, number_of, make_plan)


def remember_plain_linear(given: tuple[Any, ...], epilogue: Epilogue, is_plain: Callable[[], bool]) -> None:
    """Remembers a call that PyTorch's own linear layer computes, if `is_plain` says so in the key's precision too."""

    def make_plan() -> CallPlan | None:
        return native.core.product_call() if is_plain() else None

    number_of = functools.partial(_number_of, given[3], given[4], given[0], epilogue)
    remember(native.core.CallFunction.linear, given, number_of, make_plan)


def has_number(given: tuple[Any, ...], epilogue: Epilogue) -> bool:
    """Whether calls of `linear` like this one can be remembered."""
    return _number_of(given[3], given[4], given[0], epilogue) is not None


def remember_steps(given: tuple[Any, ...], epilogue: Epilogue, replay: Replay | None) -> None:
    """Remembers a call of `linear` that takes several operations. replay: makes them; None where nothing can."""

    def make_plan() -> CallPlan:
        return native.core.general_call() if replay is None else native.core.function_call(replay)

    number_of = functools.partial(_number_of, given[3], given[4], given[0], epilogue)
    remember(native.core.CallFunction.linear, given, number_of, make_plan)


def remember_operation(given: tuple[Any, ...], epilogue: Epilogue, operation: Operation) -> None:
    """Remembers a call that PyTorch's own linear layer and one function compute."""

    def make_plan() -> CallPlan:
        return native.core.operation_call(operation.function, list(operation.arguments))

    number_of = functools.partial(_number_of, given[3], given[4], given[0], epilogue)
    remember(native.core.CallFunction.linear, given, number_of, make_plan)


def remember_pointwise(
    given: tuple[Any, ...],
    x: Tensor,
    operands: Sequence[Tensor],
    epilogue: Epilogue,
    y: Tensor,
    is_general: bool,
) -> None:
    """Remembers a call of `pointwise`. x and operands: the arguments of its operator."""
    tensors = (given[1], *tensors_of(given[2]))
    is_general = is_general or not same_memory(tensors, (x, *operands))

    def make_plan() -> CallPlan | None:
        return native.core.general_call() if is_general else plan_pointwise(x, operands, epilogue.program, y)

    number_of = functools.partial(_number_of, given[0], given[2], given[1], epilogue)
    remember(native.core.CallFunction.pointwise, given, number_of, make_plan)


def remember_reduce(
    given: tuple[Any, ...],
    x: Tensor,
    operands: Sequence[Tensor],
    epilogue: Epilogue,
    reduction: str,
    dims: tuple[int, ...],
    y: Tensor,
    is_general: bool,
) -> None:
    """Remembers a call of `reduce`. x and operands: the arguments of its operator."""
    tensors = (given[0], *tensors_of(given[5]))
    is_general = is_general or not same_memory(tensors, (x, *operands))

    def make_plan() -> CallPlan | None:
        if is_general:
            return native.core.general_call()
        return plan_reduce(x, operands, epilogue.program, reduction, dims, y)

    number_of = functools.partial(_number_of, given[4], given[5], given[0], epilogue)
    remember(native.core.CallFunction.reduce, given, number_of, make_plan)


def remember(
    function: CallFunction,
    given: tuple[Any, ...],
    number_of: Callable[[], int | None],
    make_plan: Callable[[], CallPlan | None],
) -> None:
    """Makes the plan of a call and adds it to the table, unless its key has changed meanwhile.

    It can change because another thread sets the process's precision or the default type.
    """
    core = native.core
    number = number_of()
    key = None if number is None else core.call_key(function, given, number)
    if number is None or key is None or number_of() != number:
        return
    plan = make_plan()
    if plan is not None:
        core.remember_call(function, given, number, key, plan)


def tensors_of(operands: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple(operand for operand in operands if isinstance(operand, Tensor))


def _number_of(function: Any, operands: Sequence[Any], x: Tensor, epilogue: Epilogue) -> int | None:
    """The number that stands for the callable in keys. None if it has none, or if its trace has changed since."""
    tensors = tensors_of(operands)
    numbers = tuple([None if isinstance(operand, Tensor) else operand for operand in operands])
    types = tuple([type_of(tensor) for tensor in (x, *tensors)])
    found = recognised(function, numbers if len(tensors) < len(numbers) else (), types)
    return found[0] if found is not None and found[1] is epilogue else None


def same_memory(given: Sequence[Tensor | None], presented: Sequence[Tensor | None]) -> bool:
    """Whether the operator's arguments are the call's own tensors or views of them, and not casts or copies."""
    for tensor, view in zip(given, presented, strict=True):
        if tensor is None or view is None:
            if tensor is not view:
                return False
        elif not tensor.numel() or tensor.data_ptr() != view.data_ptr() or tensor.dtype != view.dtype:
            return False
    return True


if sys.modules.get("cutfuse._C") is not None:
    connect()
