"""Why a call takes the general path: asked of PyTorch, of the call's arguments and of the library's own decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import cutfuse
from cutfuse import native
from cutfuse.arguments import kernel_out_dtype
from cutfuse.epilogue.resolve import IDENTITY
from cutfuse.layer import calls
from cutfuse.layer.autograd import needs_gradient
from cutfuse.layer.layouts import elementwise_layout, reduction_layout, shapes_and_strides
from cutfuse.layer.planner import LinearArguments
from cutfuse.layer.training_step import hands_gradient_on
from cutfuse.linear import LinearCall, normalise_linear
from cutfuse.pointwise import normalise_pointwise
from cutfuse.reduce import normalise_reduce

core = native.module()
MOST_OPERANDS = 4  # of a program, tensors and numbers together in a key


@dataclass(frozen=True)
class Call:
    """A call of a public function. given: the arguments, as `call_linear` and its like take them."""

    function: str  # "linear", "pointwise" or "reduce"
    given: tuple[Any, ...]

    def make(self) -> Tensor:
        """Calls the public function."""
        if self.function == "pointwise":
            fn, x, operands, out_dtype = self.given
            return cutfuse.pointwise(fn, x, *operands, out_dtype=out_dtype)
        if self.function == "reduce":
            *given, operands, out_dtype = self.given
            return cutfuse.reduce(*given, operands=operands, out_dtype=out_dtype)
        return cutfuse.linear(*self.given[:3], **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `linear`."""
        return dict(zip(("epilogue", "operands", "reduce", "keepdim", "out_dtype"), self.given[3:], strict=True))

    @property
    def callable(self) -> Any:
        return self.given[{"linear": 3, "pointwise": 0, "reduce": 4}[self.function]]

    @property
    def operands(self) -> Any:
        return self.given[{"linear": 4, "pointwise": 2, "reduce": 5}[self.function]]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What has to be a tensor: x, and the weight and the bias of a layer, which is None where there is none."""
        return {"linear": self.given[:3], "pointwise": self.given[1:2], "reduce": self.given[:1]}[self.function]

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All tensors of the call, in the native module's order."""
        return (*(t for t in self.inputs if t is not None), *calls.tensors_of(self.operands))

    @property
    def has_key(self) -> bool:
        """Whether the native module has a key for the call, whatever the callable."""
        return core.call_key(getattr(core.CallFunction, self.function), self.given, IDENTITY) is not None

    def __str__(self) -> str:
        shown = [describe(value) for value in (*self.inputs, *self.operands)]
        rest = [value for value in self.given if value is not self.operands and not isinstance(value, Tensor)]
        return f"cutfuse.{self.function}({', '.join(shown)}) with {rest}"


def describe(value: Any) -> str:
    """A tensor by what its key has; anything else by its repr."""
    if not isinstance(value, Tensor):
        return repr(value)
    grad = ", requires_grad" if value.requires_grad else ""
    return f"{type(value).__name__}{list(value.shape)} {value.stride()} {value.dtype} {value.device}{grad}"


def why_general(call: Call, answer: Any, y: Tensor) -> str:
    """Why a call is not direct; empty where nothing is known that keeps it from being so.

    answer: the native module's once the call was made and no epilogue is being compiled: None or NotImplemented.
    y: the call's result.
    """
    if not call.has_key:
        return why_watched(call) or _why_without_key(call)
    if answer is NotImplemented:
        return _why_unknown(call)
    device = call.inputs[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return f"x is on {device}, which is not the current device"
    if answer is None and is_captured():
        return "a call that is captured waits for its epilogue to be compiled"
    return {"linear": _why_linear_is_marked, "pointwise": _why_pointwise_is_marked, "reduce": _why_reduce_is_marked}[
        call.function
    ](call, y)


def is_captured() -> bool:
    """Whether calls are captured in a graph at this moment."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def why_watched(call: Call) -> str:
    """Who is to see each of PyTorch's operations, or changes them."""
    torch_has = calls.torch_functions()
    found = {
        "a function mode": torch_has["function_modes"]() != 0,
        "a dispatch mode": torch_has["dispatch_modes"]() != 0,
        "a transform of torch.func": torch_has["functorch"]() is not None,
        "forward-mode derivatives": torch_has["forward_ad"]["_current_level"] >= 0,
        "a profiler": torch_has["profiler"](),
        "a tracer": torch_has["tracing"]() is not None,
        "autocast": isinstance(call.inputs[0], Tensor) and torch_has["autocast"](call.inputs[0].device.type),
    }
    return ", ".join(f"{name} is active" for name, is_active in found.items() if is_active)


def _why_without_key(call: Call) -> str:
    """What of the arguments has no key."""
    for tensor in (*call.inputs, *call.operands):
        if isinstance(tensor, (Tensor, cutfuse.PreparedWeight)) and type(tensor) not in (Tensor, nn.Parameter):
            return f"{type(tensor).__name__} is no plain tensor"
    if any(tensor.is_neg() for tensor in call.tensors):
        return "a tensor is negated whenever it is read"
    if len(call.operands) > MOST_OPERANDS:
        return f"there are more than {MOST_OPERANDS} operands"
    reduces = call.function == "linear" and call.options["reduce"] is not None
    if needs_gradient(*call.tensors) and (reduces or call.function != "linear"):
        return "a gradient is wanted of what is no linear layer alone"
    return ""


def _why_unknown(call: Call) -> str:
    """Why a call that was made is not remembered."""
    if is_captured():
        return "the first call of its kind is captured in a graph"
    if call.function != "linear" and not call.inputs[0].is_floating_point():
        return "x is not floating-point, so that it is cast before, or PyTorch reduces it"
    return ""


def _reduce_call(call: Call) -> Any:
    *given, operands, out_dtype = call.given
    return normalise_reduce(*given, operands=operands, out_dtype=out_dtype)


def _why_call_is_marked(call: Call, found: Any, presented: tuple[Tensor | None, ...]) -> str:
    """What every function looks at. found: the call in normal form. presented: the tensors of its operator."""
    if found.composed_because:
        return f"it is PyTorch's own operations: {found.composed_because}"
    if kernel_out_dtype(found.out_dtype, found.x.dtype) != found.out_dtype:
        return f"the result is cast to {found.out_dtype}"
    given = (*call.inputs, *calls.tensors_of(call.operands))
    return "" if calls.same_memory(given, presented) else "a tensor is empty, or is cast or copied before"


def _why_linear_is_marked(call: Call, y: Tensor) -> str:
    found = normalise_linear(*call.given[:3], **call.options)
    why = _why_call_is_marked(call, found, (found.x, found.weight, found.bias, *found.operands))
    arguments = _arguments_of(found)
    if needs_gradient(*call.tensors):
        return why or _why_training_is_marked(call, arguments, y)
    if why or found.matrix_vector is not None:  # then its operations are written down
        empty_or_elsewhere = any(not t.numel() or t.device != found.x.device for t in call.tensors)
        return "a tensor is empty, or a number on a CPU" if empty_or_elsewhere else ""
    return ""


def _arguments_of(found: LinearCall) -> LinearArguments:
    program = found.epilogue.program
    return LinearArguments(found.x, found.weight, found.bias, found.operands, program, found.reduction, found.out_dtype)


def _why_training_is_marked(call: Call, arguments: LinearArguments, y: Tensor) -> str:
    wanted = [k for k, operand in enumerate(calls.tensors_of(call.operands)) if operand.requires_grad]
    reached = arguments.program.inputs_with_gradient
    if 0 not in reached or any(k + 1 not in reached for k in wanted):
        return "the result does not depend on what a gradient is wanted of"
    given = calls.tensors_of(call.operands)
    if any(t.numel() != matrix.numel() for t, matrix in zip(given, arguments.operands, strict=True)):
        return "an operand is broadcast already"
    if hands_gradient_on(arguments) and any(given[k].shape != y.shape for k in wanted):
        return "the gradient that is handed on is not in the operand's shape"
    return ""


def _why_pointwise_is_marked(call: Call, y: Tensor) -> str:
    fn, x, operands, out_dtype = call.given
    found = normalise_pointwise(fn, x, *operands, out_dtype=out_dtype)
    tensors = (found.x, *found.operands)
    why = _why_call_is_marked(call, found, tensors)
    if why:
        return why
    has_layout = elementwise_layout(y.stride(), *shapes_and_strides(tensors), tuple(y.shape)) is not None
    return "" if has_layout else "the tensors have no common layout of three dimensions"


def _why_reduce_is_marked(call: Call, y: Tensor) -> str:
    found = _reduce_call(call)
    tensors = (found.x, *found.operands)
    why = _why_call_is_marked(call, found, tensors)
    if why:
        return why
    layout = reduction_layout(*shapes_and_strides(tensors), found.dims)
    return "" if layout is not None else "the tensors have no common layout of three dimensions"
