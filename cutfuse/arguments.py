"""Checks of what users pass, and its normal form: what the operators can rely on."""

from __future__ import annotations

import difflib
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import dynamo, native
from .epilogue import Epilogue, resolve
from .epilogue.errors import EpilogueError, OperandCountError, counted, evaluated_while_compiling, refuse
from .epilogue.resolve import Number, Numbers
from .epilogue.table import REDUCTIONS
from .epilogue.trace import check_arity, refuse_class
from .epilogue.traced_tensor import TracedTensor
from .epilogue.types import Autocast, ValueTypes, asking, autocast_on, probe

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOATING_DTYPES = (torch.float64, *KERNEL_DTYPES)  # of products and results
_PLAIN = Tensor, torch.nn.Parameter, type(None)  # classes of what wraps no tensor
_EPILOGUE_NAMES = {"pointwise": "function", "reduce": "prologue"}  # what these call the argument
_OPERANDS_OF = {
    "pointwise": "the operands of pointwise(fn, x, *operands)",
    "nn.FusedLinear": "the operands of forward(x, *operands)",
}


def check_tensor(function: str, name: str, value: Any) -> None:
    if isinstance(value, Tensor) and type(value) is not TracedTensor:
        if value.is_nested or value.layout is not torch.strided:
            check_layout(function, name, value)
        return
    if isinstance(value, torch.fx.Proxy):
        raise TypeError(
            f"cutfuse.{function}: {name} is a torch.fx.Proxy, and an epilogue cannot be an argument in its graph: use "
            "torch.export or torch.compile, or call cutfuse in a module that the Tracer's is_leaf_module keeps whole"
        )
    if type(value) is TracedTensor:
        raise EpilogueError(
            f"an epilogue calls cutfuse.{function}, which takes no symbolic values: apply it after the epilogue's call"
        )
    raise TypeError(f"cutfuse.{function}: {name} has to be a tensor, got {type(value).__name__}{_instead_of(value)}")


def _instead_of(value: Any) -> str:
    """What to pass in place of a value that is no tensor."""
    if isinstance(value, torch.nn.Module):
        return "; pass its parameters, such as layer.weight and layer.bias"
    if callable(value):
        return "; a function is the first argument of pointwise, epilogue= of linear and prologue= of reduce"
    if isinstance(value, tuple | list) and any(isinstance(item, Tensor) for item in value):
        return "; pass the tensors inside one by one"
    return (
        "; make a tensor of it, by torch.as_tensor" if hasattr(value, "__len__") and not isinstance(value, str) else ""
    )


def check_layout(function: str, name: str, tensor: Tensor) -> None:
    """Raises TypeError for a tensor whose elements are not at strides in memory."""
    if tensor.is_nested:
        raise TypeError(f"cutfuse.{function}: {name} is a nested tensor; call with the dense tensors inside of it")
    if tensor.layout is not torch.strided:
        raise TypeError(f"cutfuse.{function}: {name} has layout {tensor.layout}; make it dense with .to_dense()")


def check_real(function: str, name: str, tensor: Tensor) -> None:
    """Raises TypeError for complex and quantized tensors."""
    if tensor.is_complex():
        raise TypeError(f"cutfuse.{function}: {name} is complex ({tensor.dtype}); cutfuse computes with real numbers")
    check_not_quantized(function, name, tensor)


def check_not_quantized(function: str, name: str, tensor: Tensor) -> None:
    if tensor.is_quantized:
        raise TypeError(f"cutfuse.{function}: {name} is quantized ({tensor.dtype}); dequantize it with .dequantize()")


def refuse_type(function: str, name: str, expected: str, value: Any) -> NoReturn:
    raise TypeError(f"cutfuse.{function}: {name} has to be {expected}, got {value!r} of type {type(value).__name__}")


def check_dtype(function: str, name: str, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        refuse_type(function, name, "a torch.dtype such as torch.float16", dtype)


def check_floating(function: str, name: str, dtype: Any) -> None:
    check_dtype(function, name, dtype)
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"cutfuse.{function}: {name} has to be float64, float32, bfloat16 or float16, got {dtype}")


def check_layer(function: str, x: Any, weight: Any, bias: Any) -> None:
    """Raises where x `[..., K]`, weight `[N, K]` and bias `[N]` do not fit or are on several devices."""
    check_tensor(function, "x", x)
    check_tensor(function, "weight", weight)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cutfuse.{function}: x has to be [..., K] and weight [N, K], got shapes {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if weight.device != x.device:
        check_device(function, x, "weight", weight)
    if bias is None:
        return
    check_tensor(function, "bias", bias)
    if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
        raise ValueError(
            f"cutfuse.{function}: bias has to be [N] for a weight [N, K], got shapes {tuple(bias.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias.device != x.device:
        check_device(function, x, "bias", bias)


def check_device(function: str, x: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"cutfuse.{function}: x is on {x.device} and {name} on {tensor.device}; move one to the other")


def check_one_type(function: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises TypeError for another type than a product has, and where weight or bias are not of x's."""
    if x.dtype not in FLOATING_DTYPES:
        check_floating(function, "x", x.dtype)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        types = f"x {x.dtype}, weight {weight.dtype}" + ("" if bias is None else f", bias {bias.dtype}")
        raise TypeError(
            f"cutfuse.{function}: x, weight and bias have to be of one type, got {types}; cast them or use autocast"
        )


def check_reduction(function: str, name: Any) -> None:
    if not isinstance(name, str) or name not in REDUCTIONS:
        if not REDUCTIONS:
            native.module()  # the table is empty where the module is missing: the ImportError says what to do
        choices = ", ".join(repr(choice) for choice in REDUCTIONS)
        close = difflib.get_close_matches(str(getattr(name, "__name__", name)).lower(), REDUCTIONS, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"cutfuse.{function}: unknown reduction {name!r}; choose one of {choices}{meant}")


def check_epilogue(function: str, epilogue: Any) -> None:
    name = _EPILOGUE_NAMES.get(function, "epilogue")
    if epilogue is not None and not callable(epilogue):
        kind = type(epilogue).__name__
        raise TypeError(
            f"cutfuse.{function}: the {name} has to be a callable or a cutfuse.Epilogue, got {kind} {epilogue!r}"
        )
    if isinstance(epilogue, type):
        refuse_class(f"cutfuse.{function}: the {name}", epilogue)


def check_flag(function: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse_type(function, name, "True or False", value)


def resolve_out_dtype(
    function: str, requested: torch.dtype | None, x: Tensor, epilogue: Epilogue, reduction: str | None = None
) -> torch.dtype:
    """The requested type, or the one that PyTorch gives. x: what the epilogue takes, or a tensor of its type."""
    if requested is not None:
        check_floating(function, "out_dtype", requested)
        return requested
    dtype = epilogue.dtype or x.dtype
    return dtype if reduction is None else _reduced_dtype(function, reduction, (dtype, autocast_on(x.device.type)))


@evaluated_while_compiling
def _reduced_dtype(function: str, reduction: str, given: tuple[torch.dtype, Autocast | None]) -> torch.dtype:
    """given: the type of what is reduced, and the autocast; in a tuple, as Dynamo hands a NamedTuple over empty."""
    return _find_reduced_dtype(function, reduction, *given, torch.get_default_dtype())


@functools.lru_cache(maxsize=64)
def _find_reduced_dtype(
    function: str, reduction: str, dtype: torch.dtype, autocast: Autocast | None, default_dtype: torch.dtype
) -> torch.dtype:
    # The default dtype is what logsumexp of a mask is of.
    try:
        with asking(autocast):
            return REDUCTIONS[reduction](probe((1, 1), dtype, autocast), 1).dtype
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise TypeError(
            f"cutfuse.{function}: PyTorch has no {reduction} of {dtype} ({reason}); name a floating-point out_dtype, "
            "or convert before with .float()"
        ) from None


def split_operands(function: str, operands: Any, device: torch.device) -> tuple[Numbers, list[Tensor]]:
    """Numbers by position (None where a tensor stands), and the tensors.

    A tensor without dimensions may be on the CPU whatever the device, as in PyTorch.
    """
    if not isinstance(operands, (tuple, list)):
        raise TypeError(
            f"cutfuse.{function}: operands has to be a tuple of tensors and numbers, got {type(operands).__name__}; "
            "write operands=(r,) for a single one"
        )
    numbers: list[Number | None] = []
    tensors: list[Tensor] = []
    for index, operand in enumerate(operands):
        if not isinstance(operand, Tensor):
            numbers.append(_to_number(function, index, operand))
            continue
        if operand.is_nested or operand.layout is not torch.strided:
            check_layout(function, f"operand {index}", operand)
        if not operand.is_floating_point():
            check_real(function, f"operand {index}", operand)
        if operand.device != device:
            operand = _move_scalar(function, index, operand, device)
        numbers.append(None)
        tensors.append(operand)
    return tuple(numbers), tensors


def _to_number(function: str, index: int, operand: Any) -> Number:
    if isinstance(operand, (int, float)):
        return operand
    if isinstance(operand, (torch.SymInt, torch.SymFloat)):
        return operand  # type: ignore[return-value]  # it stands for a number, and does what one does
    if getattr(operand, "ndim", None) == 0 and hasattr(operand, "item"):
        value = operand.item()
        if isinstance(value, (int, float)):
            return value
    kind = type(operand).__name__
    hint = "; cutfuse computes with real numbers" if isinstance(operand, complex) else _instead_of(operand)
    raise TypeError(f"cutfuse.{function}: operand {index} has to be a tensor or a number, got {kind}{hint}")


def _move_scalar(function: str, index: int, operand: Tensor, device: torch.device) -> Tensor:
    if operand.dim() > 0 or operand.device.type != "cpu":
        raise ValueError(
            f"cutfuse.{function}: operand {index} is on {operand.device} but the input is on {device}; move it there "
            "(only tensors without dimensions may stay on the CPU)"
        )
    if operand.requires_grad or torch.compiler.is_compiling():
        return operand.to(device)
    # A fill takes the value as a kernel argument: no copy from pageable memory, and CUDA graphs capture it.
    return torch.full((), operand.item(), dtype=operand.dtype, device=device)


def resolve_epilogue(function: str, epilogue: Any, numbers: Numbers, types: ValueTypes) -> Epilogue:
    """The traced epilogue, numbers bound. `types`: of z and the tensor operands. None is the identity."""
    check_epilogue(function, epilogue)
    name = _EPILOGUE_NAMES.get(function, "epilogue")
    if epilogue is None:
        if numbers:
            count = counted(len(numbers), "operand")
            refuse(f"cutfuse.{function}: {count}, but no {name} that takes any; pass {name}=", OperandCountError)
        return resolve(None)
    try:
        return _resolve(epilogue, numbers, types)
    except OperandCountError as error:
        operands = _OPERANDS_OF.get(function, "operands=")
        raise OperandCountError(f"cutfuse.{function}: {error}; make its parameters and {operands} agree") from None


def _resolve(epilogue: Any, numbers: Numbers, types: ValueTypes) -> Epilogue:
    tensor_count = len(types) - 1
    if tensor_count == len(numbers):
        return resolve(epilogue, tensor_count, types)
    try:
        return resolve(epilogue, tensor_count, types, numbers)
    except TypeError as error:
        if not isinstance(epilogue, Epilogue):
            check_arity(epilogue, len(numbers), error)
        raise


def _is_transformed() -> bool:
    """Whether a tensor may be a dual number or a functorch wrapper, whose memory says nothing of its derivatives.

    Dynamo reads the level of dual numbers as it traces, and guards it; so it does with functorch's stack.
    """
    return forward_ad._current_level >= 0 or _is_below_functorch()


@dynamo.assume_constant_result
def _is_below_functorch() -> bool:
    """Also while Dynamo traces: it enters the transforms of the code that it traces."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@dynamo.assume_constant_result
def _is_exported_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def why_transformed() -> str:
    """Why PyTorch's own operations run, whatever the tensors are: what transforms them knows no operators of cutfuse.

    Empty where nothing does.
    """
    if _is_transformed():
        return "forward-mode derivatives and torch.func transforms run through PyTorch's own operations"
    if (torch.compiler.is_compiling() or torch._C._is_tracing()) and _is_exported_to_onnx():
        return "ONNX has PyTorch's own operations, and no operators of cutfuse"
    return ""


def why_composed(x: Tensor, arithmetic: torch.dtype) -> str:
    """Why the kernels do not take x on its device; empty where they do. `arithmetic`: the type to compute in."""
    transformed_because = why_transformed()
    if transformed_because or native.operators_everywhere:
        return transformed_because
    if x.device.type != "cuda" and not native.serves(x.device):
        return f"x is on {x.device.type}; {native.why_unserved(x.device)}"
    if arithmetic is torch.float64:
        return "float64; kernels compute in fp32"
    if x.dtype not in KERNEL_DTYPES:
        return f"x is {x.dtype}; kernels read float32, float16 and bfloat16"
    return "" if native.serves(x.device) else native.why_unserved(x.device)


def why_wrapped(tensors: Sequence[Tensor | None], operands: Sequence[Tensor]) -> str:
    """Why PyTorch's own operations run, whatever the device, of a call in which a tensor wraps others; empty where none
    does. `tensors`: x or, of a linear layer, x, weight and bias. No operator knows what such a tensor, a DTensor or a
    quantized weight for example, does with an operation.
    """
    for given in (tensors, operands):
        for tensor in given:
            if type(tensor) not in _PLAIN:
                return _name_wrapper(tensors, operands)
    return ""


def _name_wrapper(tensors: Sequence[Tensor | None], operands: Sequence[Tensor]) -> str:
    """The same, of a call in which a tensor is of another class than PyTorch's own."""
    names = ["x", "weight", "bias"][: len(tensors)] + [f"operand {k}" for k in range(len(operands))]
    for name, tensor in zip(names, (*tensors, *operands), strict=True):
        if tensor is not None and is_wrapper(type(tensor)):
            return described_wrapper(name, tensor)
    return ""


def described_wrapper(name: str, tensor: Tensor) -> str:
    kind = type(tensor).__name__
    return f"{name} is a {kind}, a tensor that wraps others, which computes operations in its own way"


@dynamo.assume_constant_result
def is_wrapper(kind: type[Tensor]) -> bool:
    """Whether a class of tensors computes PyTorch's operations itself. Those that compilers trace with do not count."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(
        kind, (FakeTensor, FunctionalTensor)
    )


def why_compiled(is_needed: bool = True) -> str:
    """Why a call in compiled code is PyTorch's own operations; empty where it is not, or not `is_needed`.

    torch.compile makes one kernel of them and of what stands around them, and differentiates them.
    """
    if not is_needed or native.operators_everywhere or not torch.compiler.is_compiling():
        return ""
    return "torch.compile fuses it with the operations around it"


def to_kernel_dtype(tensor: Tensor) -> Tensor:
    """Masks, integers and the rarer types as fp32, which is what the arithmetic is in."""
    if tensor.dtype in KERNEL_DTYPES or (native.operators_everywhere and tensor.dtype == torch.float64):
        return tensor
    return tensor.to(torch.float32)


def rows_of(x: Tensor) -> int:
    """How many rows `[..., K]` has."""
    return math.prod(x.shape[:-1])


def kernel_out_dtype(out_dtype: torch.dtype, x_dtype: torch.dtype) -> torch.dtype:
    """The type in which an operator stores a result that is cast to `out_dtype` afterwards."""
    if out_dtype in KERNEL_DTYPES or x_dtype == torch.float64:
        return out_dtype
    return torch.float32


def casts_result(out_dtype: torch.dtype, x_dtype: torch.dtype) -> bool:
    """Whether a result is cast behind its operator."""
    return kernel_out_dtype(out_dtype, x_dtype) != out_dtype


def to_floating(function: str, x: Tensor) -> Tensor:
    """Integers and booleans as the default floating-point type, as PyTorch's own elementwise functions take them."""
    if x.is_floating_point():
        return x
    check_real(function, "x", x)
    return x.to(torch.get_default_dtype())


def is_size(size: int, other: int) -> bool:
    """`size == other`, of symbols whether that is known without a guard."""
    # Dynamo takes symbols for integers.
    if torch.compiler.is_dynamo_compiling() or isinstance(size, torch.SymInt) or isinstance(other, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy, which takes 1 s

        return statically_known_true(size == other)
    return size == other


def is_shape(shape: torch.Size, other: torch.Size) -> bool:
    """`shape == other`, of symbols as `is_size` has it."""
    return len(shape) == len(other) and all(map(is_size, shape, other))


def broadcast_shape(function: str, x: Tensor, operands: Sequence[Tensor]) -> torch.Size:
    if all(t.dim() == 0 or is_shape(t.shape, x.shape) for t in operands):
        return x.shape  # torch.broadcast_shapes takes 15 us of host time
    try:
        shape: torch.Size = torch.broadcast_shapes(x.shape, *(t.shape for t in operands))
        return shape
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in operands)
        raise ValueError(
            f"cutfuse.{function}: operands of shape {shapes} do not broadcast with x's {tuple(x.shape)}"
        ) from None


def normalise_dims(function: str, dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Ascending dimensions from 0; all of them for None and for an empty tuple, as in PyTorch."""
    if dim is None:
        return tuple(range(rank))
    given = dim if isinstance(dim, (tuple, list, range)) else (dim,)
    dims = [_normalise_dim(function, d, rank) for d in given]
    if len(set(dims)) != len(dims):
        raise ValueError(f"cutfuse.{function}: dim {dim!r} names a dimension twice")
    return tuple(sorted(dims)) if rank and dims else tuple(range(rank))


def _normalise_dim(function: str, dim: Any, rank: int) -> int:
    """A dimension from 0; a tensor without dimensions has dimension 0 here, as in PyTorch."""
    index: int = dim if type(dim) is int else _to_index(function, dim)
    size = max(rank, 1)
    if not -size <= index < size:
        raise IndexError(f"cutfuse.{function}: dim {index} is out of range for {rank} dimensions")
    return index % size


def _to_index(function: str, dim: Any) -> int:
    """An integer of any type, such as NumPy's, as Python's."""
    is_boolean = isinstance(dim, bool) or getattr(dim, "dtype", None) == torch.bool
    try:
        if not is_boolean:
            return operator.index(dim)
    except TypeError:
        pass
    refuse_type(function, "dim", "an integer, a tuple of integers or None", dim)
