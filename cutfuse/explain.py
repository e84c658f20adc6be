"""What a call would run, and why: the dispatcher's own decisions, printed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from .epilogue import Program
from .linear import LinearCall, for_operators, is_plain, linear
from .ops import autograd, schema, switch
from .ops.fused import KEEPS, explain_fused
from .ops.linear_plan import LinearArguments
from .ops.planes import Planes
from .pointwise import PointwiseCall, pointwise
from .precision import product_mode
from .prepare import PreparedWeight
from .reduce import ReduceCall, reduce

Call = LinearCall | PointwiseCall | ReduceCall


@dataclass(frozen=True)
class Explanation:
    """What a call would run.

    path: "fused" (one kernel for the product and what follows), "unfused" (the product through cuBLAS, then one
    kernel), "matrix-vector" (no product), "kernel" (no product in the call) or "composed" (PyTorch's own operations).
    steps: what runs, in order. reasons: why nothing faster does. program: what the kernels interpret.
    bytes, flops: what the call has to read and write at least, and its multiplications and additions in products.
    """

    call: str
    path: str
    steps: tuple[str, ...]
    reasons: tuple[str, ...]
    program: Program
    bytes: int
    flops: int

    def __str__(self) -> str:
        lines = [self.call, f"  path       {self.path}"]
        lines += _listed("runs", self.steps)
        lines += _listed("because", self.reasons)
        lines += _listed("program", self.program.pretty().splitlines())
        lines.append("  compiles   nothing: the program is data, which kernels that are built already interpret")
        lines.append(f"  at least   {_quantity(self.bytes, 'B')} moved, {_quantity(self.flops, 'FLOP')} in products")
        return "\n".join(lines)

    __repr__ = __str__


class _Observed(BaseException):
    """Carries a call out of the function that would have run it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """What a call would run and why, without running it; print the result.

    Takes a function of cutfuse or a module of `cutfuse.nn` and the arguments of its call: `explain(module, x)`,
    `explain(cutfuse.linear, x, w, epilogue=torch.relu)`. Or the arguments alone, of `linear` (a tensor, then a weight),
    `reduce` (a tensor, then a dimension) or `pointwise` (a function, then a tensor).

    Raises what the call raises; TypeError where it is no call of cutfuse.
    """
    function, arguments = _find_function(args, kwargs)
    _check_signature(function, arguments, kwargs)
    try:
        with switch.observed_by(_stop):
            function(*arguments, **kwargs)
    except _Observed as observed:
        return _explain(observed.call)
    raise TypeError(
        "cutfuse.explain: the call does not come to a kernel of cutfuse: PyTorch's own operations compute it"
    )


def _stop(call: Call) -> NoReturn:
    raise _Observed(call)


def _find_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    first = args[0] if args else None
    if isinstance(first, torch.nn.Module) or getattr(first, "__module__", "").startswith("cutfuse."):
        from_cutfuse = not isinstance(first, torch.nn.Module) or type(first).__module__.startswith("cutfuse.nn")
        if from_cutfuse and callable(first) and not hasattr(first, "program"):
            return first, args[1:]
    if callable(first) and not isinstance(first, Tensor):
        return pointwise, args
    second = args[1] if len(args) > 1 else kwargs.get("weight")
    return (linear if isinstance(second, Tensor | PreparedWeight) else reduce), args


def _check_signature(function: Callable[..., Any], arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(*arguments, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"cutfuse.explain: {error} in a call of {name}; write explain(module, x), "
            "explain(cutfuse.linear, x, weight), explain(x, weight), explain(x, dim) or explain(fn, x)"
        ) from None


def _explain(call: Call) -> Explanation:
    if isinstance(call, LinearCall):
        return _explain_linear(call)
    program = call.epilogue.program if isinstance(call, PointwiseCall) else call.prologue.program
    inputs = [call.x, *call.operands]
    if isinstance(call, PointwiseCall):
        header = f"pointwise of {_described('x', call.x)}"
        kernel, stored = "pointwise kernel: one read, one write", call.x.numel()
    else:
        header = f"{call.op} of {_described('x', call.x)} over {_dims(call.dims)}"
        kernel = f"reduction kernel ({call.op}), one read; a second, small one where blocks share a result"
        stored = math.prod(size for d, size in enumerate(call.x.shape) if d not in call.dims)
    composed = call.composed_because
    backward = ["backward: pointwise_backward kernel"] if autograd.needs_gradient(*inputs) and not composed else []
    return Explanation(
        call=header,
        path="composed" if composed else "kernel",
        steps=("PyTorch's own operations",) if composed else (kernel, *backward),
        reasons=(composed,) if composed else (),
        program=program,
        bytes=_bytes(inputs) + stored * call.out_dtype.itemsize,
        flops=0,
    )


def _explain_linear(call: LinearCall) -> Explanation:
    rows, depth = call.x.shape
    columns = call.weight.shape[0]
    inputs = [t for t in (call.x, call.weight, call.bias, *call.operands) if t is not None]
    weight = "weight" if call.prepared is None else "prepared weight"
    described = [_described("x", call.x), _described(weight, call.weight)]
    described += [_described(f"operand {k}", t) for k, t in enumerate(call.operands)]
    reduced = "" if call.reduction == "none" else f", {call.reduction} over the last dimension"
    path, steps, reasons = _linear_path(call)
    stored = rows if reduced else rows * columns
    products = 2 * (rows + columns) * depth if path == "matrix-vector" else 2 * rows * columns * depth
    return Explanation(
        call=f"linear of {', '.join(described)}{' with bias' if call.bias is not None else ''}{reduced}",
        path=path,
        steps=tuple(steps),
        reasons=(*reasons, *_about_planes(call, reasons)),
        program=call.epilogue.program,
        bytes=_bytes(inputs) + stored * call.out_dtype.itemsize,
        flops=products,
    )


def _about_planes(call: LinearCall, reasons: list[str]) -> list[str]:
    """Why those of a prepared weight are of no use, where `reasons` does not say that they are of one."""
    prepared = call.prepared
    if prepared is None or KEEPS in reasons:
        return []
    if prepared.without_planes:
        return [f"the prepared weight has no planes: {prepared.without_planes}"]
    return [f'the weight is prepared for "{prepared.mode}", and its planes are of no use here']


def _linear_path(call: LinearCall) -> tuple[str, list[str], list[str]]:
    composed = call.composed_because
    if call.matrix_vector is not None:
        kernel = "PyTorch's own operations" if composed else "reduction kernels"
        steps = [f"weighted sum of weight over N: {kernel}", f"its product with x: {kernel}"]
        affine = "the epilogue is affine and summed over N, so no matrix product is needed"
        return "matrix-vector", steps, [affine, *([composed] if composed else [])]
    if is_plain(call):
        return "composed", ["torch.nn.functional.linear"], ["nothing follows the linear layer"]
    if composed:
        return "composed", ["torch.nn.functional.linear", "PyTorch's own operations"], [composed]
    after = "pointwise kernel, in place" if call.reduction == "none" else f"reduction kernel ({call.reduction})"
    product = "cuBLAS: torch.addmm" if call.bias is not None else "cuBLAS: torch.mm"
    inputs = (call.x, call.weight, call.bias, *call.operands)
    if autograd.needs_gradient(*inputs):
        forced = autograd.is_forced(call.x)
        products = f'products in precision "{product_mode()}"' if forced else "torch.mm"
        product = f'product in precision "{product_mode()}"' if forced else product
        backward = f"backward: pointwise_backward kernel (with the bias gradient's sum), {products} for x and weight"
        reasons = ["gradients need the pre-activation"]
        if forced and KEEPS in _explain_product(call, Program.parse(schema.IDENTITY), "none", call.x.dtype)[1]:
            reasons.append(KEEPS)
        return "unfused", [product, after.removesuffix(", in place"), backward], reasons
    name, reasons = _explain_product(call, call.epilogue.program, call.reduction, call.out_dtype)
    return ("unfused", [product, after], reasons) if name is None else ("fused", [name], reasons)


def _explain_product(
    call: LinearCall, program: Program, reduction: str, out_dtype: torch.dtype
) -> tuple[str | None, list[str]]:
    operands = call.operands if program.operand_count else []
    arguments = LinearArguments(call.x, call.weight, call.bias, operands, program, reduction, out_dtype)
    _, planes, plan = for_operators(call)
    return explain_fused(arguments, None if planes is None else Planes(plan, planes))


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _dims(dims: tuple[int, ...]) -> str:
    return f"dim {dims[0]}" if len(dims) == 1 else f"dims {dims}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    """What reading each tensor once moves; broadcast dimensions count once."""
    total = 0
    for t in tensors:
        elements = math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride != 0 or size == 0)
        total += elements * t.element_size()
    return total


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    return [f"  {title if k == 0 else '':10} {line}" for k, line in enumerate(lines)]


def _quantity(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError
