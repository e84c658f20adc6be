"""Shared cases and the one measure of error: cutfuse against fp64, with eager PyTorch's own error as the bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp")

# Chains that cover operators, functions, methods and operands: name, function, number of operands.
EPILOGUES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "sigmoid": (torch.sigmoid, 0),
    "residual": (lambda z, r: torch.sigmoid(z) * 2 + r, 1),
    "gelu_gate": (lambda z, r: F.gelu(z) * r.sigmoid(), 1),
    "six_ops": (lambda z: torch.tanh((F.silu(z) * 0.5).clamp(-1, 1) - 0.25) + z.abs(), 0),
    "where": (lambda z, r: torch.where(z > r, z, 0.1 * z), 1),
    "two_operands": (lambda z, a, b: (z - a) * torch.rsqrt(b * b + 1.0), 2),
    "four_operands": (lambda z, a, b, c, d: (z * a + b) * torch.tanh(c) - d / 3, 4),
}


class Way(NamedTuple):
    """A way of a call, of those that the fixture `way` has: its device, and the type of its tensors."""

    device: str
    dtype: torch.dtype


# Of kernels: how the fixture is asked for them, with fp32 in both of PyTorch's precisions.
GPU_WAYS = (*(("kernels", dtype, "highest") for dtype in FLOATS), ("kernels", torch.float32, "high"))

# How a matrix of the same values can lie in memory. Each takes a contiguous [R, C].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "strided": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius error relative to the exact values' norm; infinite where NaN or infinities are not the same."""
    actual = actual.double()
    special = ~exact.isfinite()
    if not torch.equal(special, ~actual.isfinite()):
        return float("inf")
    if not torch.equal(exact[special].nan_to_num(nan=7.0), actual[special].nan_to_num(nan=7.0)):
        return float("inf")
    difference = (actual - exact).masked_fill(special, 0.0)
    scale = exact.masked_fill(special, 0.0).norm().item()
    return difference.norm().item() / scale if scale else difference.norm().item()


def assert_no_worse(actual: Tensor, eager: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """`actual` is as near to `exact` as `eager` is, plus one rounding of its type; `slack` is a factor for chance."""
    assert actual.shape == exact.shape
    rounding = torch.finfo(actual.dtype).eps / 2
    error, allowed = relative_error(actual, exact), (relative_error(eager, exact) + rounding) * slack
    assert error <= allowed, f"error {error:.3g}, eager PyTorch's with one rounding {allowed:.3g}"


def slack_for(dtype: torch.dtype) -> float:
    """How much above eager's an error may be by chance: in fp32 both are a few roundings, in different orders."""
    return 2.0 if dtype == torch.float32 else 1.1


def make_inputs(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K] that gives products near one, and a bias [N]."""
    torch.manual_seed(rows * 7 + columns * 3 + depth)
    scale = depth**-0.5 if depth else 1.0
    return (
        torch.randn(rows, depth, dtype=dtype, device=device),
        torch.randn(columns, depth, dtype=dtype, device=device) * scale,
        torch.randn(columns, dtype=dtype, device=device),
    )


def operands_for(count: int, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """One operand of each kind, in this order: matrix, row, column, scalar."""
    shapes = ((rows, columns), (columns,), (rows, 1), ())
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes[:count]]


def eager_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor] | None,
    operands: Sequence[Tensor | float],
    reduce: str | None = None,
    keepdim: bool = False,
) -> Tensor:
    """What PyTorch computes, op by op, in the tensors' own types."""
    z = F.linear(x, weight, bias)
    y = z if epilogue is None else epilogue(z, *operands)
    return y if reduce is None else eager_reduce(y, -1, reduce, keepdim)


def assert_linear(
    actual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor],
    operands: Sequence[Tensor] = (),
    reduce: str | None = None,
    slack: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> None:
    """A layer's result has the type of eager PyTorch's, or out_dtype, and is as near to that in fp64 as eager's is."""
    eager = eager_linear(x, weight, bias, epilogue, operands, reduce)
    eager = eager if out_dtype is None else eager.to(out_dtype)
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands), reduce)
    assert actual.dtype == eager.dtype
    assert_no_worse(actual, eager, exact, slack)


def eager_reduce(x: Tensor, dim: int | tuple[int, ...], op: str, keepdim: bool = False) -> Tensor:
    return getattr(torch, op)(x, dim=dim, keepdim=keepdim)


def to_double(*tensors: Tensor | float | None) -> list[Tensor | float | None]:
    """Masks stay what they are."""
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


@contextlib.contextmanager
def saved_tensors() -> Iterator[dict[int, Tensor]]:
    """What autograd keeps for the backward passes of calls within it, by the addresses of the memory."""
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
