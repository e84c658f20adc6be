"""Products for the tests of what is launched for a linear layer, and what is explained of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program
from cutfuse.layer import linear_plan, prepared
from cutfuse.layer.call_plans import given_to, linear_call
from cutfuse.layer.planner import LinearArguments

IDENTITY = Program.parse("operands=0")


def inputs(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)


def dtype_of(kernel: str) -> torch.dtype:
    """Of the tensors that a kernel reads, by its name."""
    parts = kernel.split("_")
    name = parts[1] if parts[0] == "sm90" else parts[-1]
    names = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "f16": torch.float16, "float16": torch.float16}
    return names.get(name, torch.float32)


def out_dtype_of(kernel: str) -> torch.dtype:
    """Of what it stores."""
    return torch.float32 if "_f32_" in kernel else dtype_of(kernel)


def reduction_of(kernel: str) -> str:
    """One that it computes."""
    return "sum" if "_rows_" in kernel else "none"


def placed(matrix: Tensor, kernel: str, is_weight: bool, offset: int = 0, gap: int = 0) -> Tensor:
    """The same values by rows or columns, as the kernel reads them; between the lines, and before the first, is NaN."""
    reads_columns = "_tn_" in kernel or ("_nn_" in kernel and is_weight)
    lines = matrix.t() if reads_columns else matrix
    count, length = lines.shape
    memory = matrix.new_full((offset + count * (length + gap),), torch.nan)
    view = memory.as_strided((count, length), (length + gap, 1), offset)
    view.copy_(lines)
    return view.t() if reads_columns else view


def arguments_of(x: Tensor, weight: Tensor, reduction: str = "none", **options: Any) -> LinearArguments:
    given = {"bias": None, "operands": (), "program": IDENTITY, "out_dtype": x.dtype, **options}
    return LinearArguments(x, weight, reduction=reduction, **given)


def run_plan(plan: native.LinearPlan, arguments: LinearArguments) -> Any:
    """What a layer gives by this plan: its result, and behind it z where that is stored."""
    return linear_call(plan, arguments).run(*given_to(arguments))


def explain(
    x: Tensor, weight: Tensor, mode: str, reduction: str = "none", kept: prepared.Planes | None = None, **options: Any
) -> tuple[str | None, list[str]]:
    """The kernel, None where none runs, and what is said beside."""
    with cutfuse.precision(mode):
        explained = linear_plan.explain_fused(arguments_of(x, weight, reduction, **options), kept)
    steps, reasons = explained.steps, explained.reasons
    assert (explained.workspace_bytes > 0) <= bool(steps)
    return (steps[0], [*steps[1:], *reasons]) if steps else (None, reasons)
