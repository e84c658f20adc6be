"""Checks of what users pass, and its normal form: what the operators can rely on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import native
from .epilogue import Epilogue, EpilogueError, Program, resolve
from .epilogue.expression import apply, constant, topological
from .epilogue.expression import operand as operand_leaf
from .epilogue.resolve import check_operands
from .ops import switch
from .ops.composed import REDUCTIONS

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Number = int | float


def check_tensor(function: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"cutfuse.{function}: {name} has to be a tensor, got {type(value).__name__}")


def check_floating(function: str, name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"cutfuse.{function}: {name} has to be of a floating-point type, got {dtype}")


def check_reduction(function: str, name: Any) -> None:
    if name not in REDUCTIONS:
        choices = ", ".join(repr(choice) for choice in REDUCTIONS)
        raise ValueError(f"cutfuse.{function}: unknown reduction {name!r}; choose one of {choices}")


def resolve_out_dtype(
    function: str, requested: torch.dtype | None, x_dtype: torch.dtype, operands: Sequence
) -> torch.dtype:
    """The requested type, or what PyTorch promotes x and the operands with dimensions to."""
    if requested is not None:
        check_floating(function, "out_dtype", requested)
        return requested
    dtype = x_dtype
    for operand in operands:
        if isinstance(operand, Tensor) and operand.dim() > 0:
            dtype = torch.promote_types(dtype, operand.dtype)
    return dtype


def split_operands(
    function: str, operands: Any, device: torch.device
) -> tuple[tuple[Number | None, ...], list[Tensor]]:
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
        if operand.is_complex():
            raise TypeError(f"cutfuse.{function}: operand {index} is complex ({operand.dtype}); epilogues are real")
        if operand.device != device:
            operand = _move_scalar(function, index, operand, device)
        numbers.append(None)
        tensors.append(operand)
    return tuple(numbers), tensors


def _to_number(function: str, index: int, operand: Any) -> Number:
    if isinstance(operand, (int, float, torch.SymInt, torch.SymFloat)):
        return operand
    if getattr(operand, "ndim", None) == 0 and hasattr(operand, "item"):
        return operand.item()
    raise TypeError(f"cutfuse.{function}: operand {index} has to be a tensor or a number, got {type(operand).__name__}")


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


def resolve_epilogue(function: str, epilogue: Any, numbers: tuple[Number | None, ...], tensor_count: int) -> Epilogue:
    """The traced epilogue of z and the tensor operands, numbers bound. None is the identity."""
    if epilogue is not None and not callable(epilogue):
        kind = type(epilogue).__name__
        raise TypeError(f"cutfuse.{function}: the epilogue has to be a callable or a cutfuse.Epilogue, got {kind}")
    if epilogue is None and numbers:
        raise EpilogueError(f"cutfuse.{function}: there are operands, but no function that takes them")
    if tensor_count == len(numbers):
        return resolve(epilogue, tensor_count)
    if isinstance(epilogue, Epilogue):
        check_operands(epilogue, len(numbers))
        # In hexadecimal -0.0 is not 0.0, and torch.compile takes a float that changes for a constant.
        return _substitute(epilogue.text, tuple([None if n is None else float(n).hex() for n in numbers]), tensor_count)
    return resolve(_bind(epilogue, numbers), tensor_count)


def _bind(fn: Callable[..., Any], numbers: tuple[Number | None, ...]) -> Callable[..., Any]:
    """`fn` with its operands that are numbers in place."""

    def bound(z: Any, *tensors: Any) -> Any:
        taken = 0
        operands = []
        for number in numbers:
            operands.append(tensors[taken] if number is None else number)
            taken += number is None
        return fn(z, *operands)

    return bound


@torch.compiler.assume_constant_result
def _substitute(program: str, numbers: tuple[str | None, ...], tensor_count: int) -> Epilogue:
    """The epilogue of a program with its operands that are numbers in place."""
    return _substitute_once(program, numbers, tensor_count)


@functools.lru_cache(maxsize=256)
def _substitute_once(program: str, numbers: tuple[str | None, ...], tensor_count: int) -> Epilogue:
    tensors = iter(range(tensor_count))
    leaves = [operand_leaf(next(tensors)) if digits is None else constant(float.fromhex(digits)) for digits in numbers]
    values: dict[int, Any] = {}
    expression = Program.parse(program).expression
    for node in topological(expression):
        if node.op is not None:
            values[id(node)] = apply(node.op, tuple(values[id(a)] for a in node.arguments), node.parameters)
        else:
            values[id(node)] = leaves[int(node.leaf[1:])] if node.leaf.startswith("r") else node
    return Epilogue.from_expression(values[id(expression)], tensor_count)


def _is_transformed() -> bool:
    """Whether a tensor may be a dual number or a functorch wrapper, whose memory says nothing of its derivatives."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def why_composed(x: Tensor, dtypes: Sequence[torch.dtype]) -> str:
    """Why the kernels do not take x on its device; empty where they do. `dtypes`: of all that is read."""
    if not torch.compiler.is_compiling() and _is_transformed():
        return "forward-mode derivatives and torch.func transforms run through PyTorch's own operations"
    if switch.everywhere:
        return ""
    if x.device.type != "cuda":
        return f"x is on {x.device.type}; kernels are for CUDA devices"
    if torch.float64 in dtypes:
        return "float64; kernels compute in fp32"
    if x.dtype not in KERNEL_DTYPES:
        return f"x is {x.dtype}; kernels read float32, float16 and bfloat16"
    return "" if native.serves(x.device) else "this build has no CUDA kernels for this device"


def to_kernel_dtype(tensor: Tensor) -> Tensor:
    """Masks, integers and the rarer types as fp32, which is what the arithmetic is in."""
    if tensor.dtype in KERNEL_DTYPES or (switch.everywhere and tensor.dtype == torch.float64):
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


def to_floating(function: str, x: Tensor) -> Tensor:
    """Integers and booleans as the default floating-point type, as PyTorch's own elementwise functions take them."""
    if x.is_complex():
        raise TypeError(f"cutfuse.{function}: x is complex ({x.dtype}); cutfuse computes with real numbers")
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def broadcast_shape(function: str, x: Tensor, operands: Sequence[Tensor]) -> torch.Size:
    if all(t.shape == x.shape or t.dim() == 0 for t in operands):
        return x.shape  # torch.broadcast_shapes takes 15 us of host time
    try:
        return torch.broadcast_shapes(x.shape, *(t.shape for t in operands))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in operands)
        raise ValueError(
            f"cutfuse.{function}: operands of shape {shapes} do not broadcast with x's {tuple(x.shape)}"
        ) from None


def normalise_dims(function: str, dim: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Ascending dimensions from 0; all of them for None and for an empty tuple, as in PyTorch."""
    given = range(rank) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    dims = []
    for d in given or range(rank):
        if not isinstance(d, int) or not -max(rank, 1) <= d < max(rank, 1):
            raise IndexError(f"cutfuse.{function}: dim {d!r} is out of range for {rank} dimensions")
        dims.append(d % rank if rank else d)
    if len(set(dims)) != len(dims):
        raise ValueError(f"cutfuse.{function}: dim {dim!r} names a dimension twice")
    return tuple(sorted(dims)) if rank else ()
