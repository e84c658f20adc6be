"""The public functions' calls that run in one C++ function (csrc/call), because one with the same key ran before.

`connect` passes that function what it needs of PyTorch. `remember_linear` and `remember_mlp` make the plan of a call
and of later ones with the same key; `remember_pass` does after a call in Python. A call of `linear` that takes several
of PyTorch's and cutfuse's operations is run once with each operation written down, and written out as straight-line
code: what Python decided between the operations depends on the key alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .. import invariance, native, precision, rounding
from ..epilogue import Epilogue
from ..epilogue.program import Operation
from ..epilogue.resolve import identity, recognised
from ..epilogue.types import type_of
from . import cuda, schema
from .call_plans import Planned, general, remember

if TYPE_CHECKING:
    from .._C import CallFunction

call_linear = native.direct_call("call_linear")
call_mlp = native.direct_call("call_mlp")
call_pointwise = native.direct_call("call_pointwise")
call_reduce = native.direct_call("call_reduce")

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
        "context_mode": precision._context_mode,
        "inherited_mode": precision._INHERITED,
        "process": precision.module_variables(),
        "context_invariance": invariance.process.context,
        "invariance": vars(invariance.process),
        "context_rounding": rounding.process.context,
        "rounding": vars(rounding.process),
        "allows_tf32": _tf32_getter(),
        "is_capturing": getattr(core, "_cuda_isCurrentStreamCapturing", _no) if on_cuda else _no,
        "copy": functools.partial(Tensor.clone, memory_format=torch.contiguous_format),
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
    epilogue: Epilogue,
    make_plan: Callable[[], Planned | None],
    tensors: tuple[Sequence[Tensor], int] | None = None,
) -> Tensor | None:
    """As `remember` of a call of `linear`. given: the call's arguments."""
    number_of = functools.partial(_number_of, given[3], given[4], given[0], epilogue)
    y: Tensor | None = remember(native.core.CallFunction.linear, given, number_of, make_plan, tensors)
    return y


def has_number(given: tuple[Any, ...], epilogue: Epilogue) -> bool:
    """Whether calls of `linear` like this one can be remembered."""
    return _number_of(given[3], given[4], given[0], epilogue) is not None


def plan_operation(operation: Operation) -> Planned:
    """The plan of a call of `linear` that PyTorch's own linear layer and one function compute."""
    return Planned(native.core.operation_call(operation.function, list(operation.arguments)), [])


def plan_steps(replay: Replay | None, tensors: Sequence[Tensor | None]) -> Planned:
    """The plan of a call that takes several operations. replay: makes them of its tensors; None where nothing can."""
    if replay is None:
        return general()
    return Planned(native.core.function_call(replay, [tensor is not None for tensor in tensors]), [])


def remember_mlp(
    given: tuple[Any, ...], epilogue: Epilogue | None, make_function: Callable[[], Replay]
) -> Tensor | None:
    """As `remember` of a call of `mlp`. given: as `call_mlp` takes them. epilogue: the hidden layer's; None for the
    identity. make_function: gives what computes the result of the call's tensors, and holds nothing that may change.
    """
    hidden, has_gate, _, *tensors = given
    x = tensors[0]
    resolved = identity(0) if epilogue is None else epilogue
    number_of = functools.partial(_number_of, hidden, [x] * has_gate, x, resolved)
    run = [t for t in tensors if t is not None], 0
    y: Tensor | None = remember(
        native.core.CallFunction.mlp, given, number_of, lambda: plan_steps(make_function(), tensors), run
    )
    return y


def remember_pass(
    function: CallFunction,
    given: tuple[Any, ...],
    called: tuple[Any, Tensor, Sequence[Any]],
    epilogue: Epilogue,
    presented: Sequence[Tensor],
    plan: Callable[[], Planned | None],
    is_general: bool,
) -> None:
    """Remembers a call of `pointwise` or `reduce`. called: its callable, x and operands. presented: the tensors of its
    operator, of which that is the `plan`; is_general: the call is more than the operator."""
    fn, x, operands = called
    is_general = is_general or not same_memory((x, *tensors_of(operands)), presented)
    number_of = functools.partial(_number_of, fn, operands, x, epilogue)
    remember(function, given, number_of, lambda: (None if is_general else plan()) or general())


def tensors_of(operands: Sequence[Any]) -> tuple[Tensor, ...]:
    return tuple([operand for operand in operands if isinstance(operand, Tensor)])


def _number_of(function: Any, operands: Sequence[Any], x: Tensor, epilogue: Epilogue) -> int | None:
    """The number that stands for the callable in keys. None if it has none, or if its trace has changed since."""
    numbers = tuple([None if isinstance(operand, Tensor) else operand for operand in operands])
    types = tuple([type_of(given) for given in (x, *operands) if isinstance(given, Tensor)])
    found = recognised(function, numbers if len(types) <= len(numbers) else (), types)
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


Replay = Callable[..., Tensor]

# What computes an operator on the devices that direct calls serve, without PyTorch's dispatcher.
_UNDISPATCHED: dict[Any, Callable[..., Any]] = {
    schema.linear: cuda.linear,
    schema.pointwise: cuda.pointwise,
    schema.reduce: cuda.reduce,
}

# They give their argument itself where it is as they would make it.
_MAY_CHANGE_NOTHING = {Tensor.to, Tensor.float, Tensor.contiguous}


def record(function: Callable[..., Tensor], given: Sequence[Tensor | None]) -> tuple[Tensor, Replay | None]:
    """`function(*given)`, and a function that makes its operations again on tensors that are laid out alike.

    That one is None where what was made cannot be written out: of a tensor that came from elsewhere, or in place.
    """
    # One tensor in two places is told apart, as calls laid out alike may have two tensors there.
    told_apart = [t if all(t is not other for other in given[:k]) else _alias(t) for k, t in enumerate(given)]
    recorder = _Recorder(told_apart)
    with recorder:
        y = function(*told_apart)
    return y, recorder.replay(y)


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Of names and numbers made here. Records that differ in sizes alone share it: they are constants."""
    return compile(source, "<cutfuse>", "exec")


def _alias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


class _UnrecordableError(Exception):
    """An operation that cannot be made again."""


class _Recorder(TorchFunctionMode):
    """Writes down the operations that give tensors, as lines of code."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._parameters = [f"t{k}" for k in range(len(given))]
        # Weakly: an operation's result is freed as early as it is without a record.
        self._names: Any = WeakTensorKeyDictionary()
        for name, tensor in zip(self._parameters, given, strict=True):
            if tensor is not None:
                self._names[tensor] = name
        self._constants: dict[str, Any] = {}
        self._lines: list[str] = []
        self._last_lines: dict[str, int] = {}  # of each result, the line that reads it last
        self._is_recordable = True

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if result is None:  # it writes something
            self._is_recordable = False
        if self._is_recordable and isinstance(result, Tensor):
            try:
                self._add(function, args, kwargs, result)
            except _UnrecordableError:
                self._is_recordable = False
        return result

    def replay(self, y: Tensor) -> Replay | None:
        result = self._names.get(y)
        if not self._is_recordable or result not in self._last_lines:
            return None
        del self._last_lines[result]
        lines = list(self._lines)
        for name, k in self._last_lines.items():
            lines[k] += f"; del {name}"
        source = "\n    ".join([f"def replay({', '.join(self._parameters)}):", *lines, f"return {result}"])
        scope = dict(self._constants)
        exec(_compiled(source), scope)
        replay: Replay = scope["replay"]
        return replay

    def _add(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor) -> None:
        if result in self._names:
            if function not in _MAY_CHANGE_NOTHING:  # an operation in place
                raise _UnrecordableError
            return
        called = self._constant(_UNDISPATCHED.get(function, function))
        arguments = [self._expression(value) for value in args]
        arguments += [f"{name}={self._expression(value)}" for name, value in kwargs.items()]
        name = f"t{len(self._parameters) + len(self._lines)}"
        self._last_lines[name] = len(self._lines)
        self._lines.append(f"{name} = {called}({', '.join(arguments)})")
        self._names[result] = name

    def _expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            name: str | None = self._names.get(value)
            if name is None:
                raise _UnrecordableError
            if name in self._last_lines:
                self._last_lines[name] = len(self._lines)
            return name
        if type(value) in (list, tuple):
            items = "".join(f"{self._expression(item)}, " for item in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name


if sys.modules.get("cutfuse._C") is not None:
    connect()
