"""The operators' fake implementations: shapes, strides and types of results, without values, for tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layouts import kept_sizes


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
    shape = (x.shape[0], weight.shape[0]) if reduction == "none" else (x.shape[0],)
    return x.new_empty(shape, dtype=out_dtype)


def linear_with_pre_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    out_dtype: torch.dtype,
    *prepared: Any,
) -> tuple[Tensor, Tensor]:
    shape = x.shape[0], weight.shape[0]
    return x.new_empty(shape, dtype=out_dtype), x.new_empty(shape)


def product(a: Tensor, b: Tensor, mode: str, issuer: str = "call") -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def joined(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return x.new_empty((x.shape[0], sum(weight.shape[0] for weight in weights)))


def pointwise(x: Tensor, operands: Sequence[Tensor], program: str, out_dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=out_dtype)


def reduce(
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    dims: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(kept_sizes(x.shape, dims), dtype=out_dtype)


def pointwise_backward(
    grad: Tensor,
    x: Tensor,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    result: Tensor | None,
    wanted: Sequence[int],
    sums_columns: bool,
) -> list[Tensor]:
    tensors = (x, *operands)
    outputs = [torch.empty_like(x) if k == 0 else tensors[k].new_empty(tensors[k].shape) for k in wanted]
    if sums_columns:
        outputs.append(x.new_empty(x.shape[-1:]))
    return outputs


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that many elements of a type are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
