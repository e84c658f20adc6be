"""What users' type checkers make of calls of cutfuse: `make lint` checks this file, and nothing runs it.

Lines that are wrong have a `type: ignore`, which mypy reports where there is no such error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import assert_type

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Expr, Program
from cutfuse.explain import Explanation


def scaled(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) * 0.5 + r


def functions(x: Tensor, w: Tensor, b: Tensor) -> None:
    assert_type(cutfuse.linear(x, w), Tensor)
    assert_type(cutfuse.linear(x, w, b, epilogue=scaled, operands=(x,), out_dtype=torch.float16), Tensor)
    assert_type(cutfuse.linear(x, w, epilogue=lambda z: z + 2.0 * torch.sigmoid(z), reduce="sum", keepdim=True), Tensor)
    assert_type(cutfuse.linear(x, w, epilogue=torch.sigmoid, operands=[1.5, 2]), Tensor)
    assert_type(cutfuse.pointwise(scaled, x, 2.0, out_dtype=torch.bfloat16), Tensor)
    assert_type(cutfuse.reduce(x, (0, 1), "logsumexp", prologue=torch.exp), Tensor)
    assert_type(cutfuse.reduce(x, None), Tensor)
    assert_type(cutfuse.sum(x, -1, keepdim=True), Tensor)
    assert_type(cutfuse.sigmoid(x), Tensor)
    assert_type(cutfuse.explain(cutfuse.linear, x, w), Explanation)
    assert_type(cutfuse.get_precision(), str | None)
    prepared = cutfuse.prepare(w, "split3")
    assert_type(prepared.nbytes, int)
    assert_type(cutfuse.linear(x, prepared, b), Tensor)
    with cutfuse.precision("ieee"):
        cutfuse.set_precision(None)


def wrong_functions(x: Tensor, w: Tensor) -> None:
    cutfuse.linear(x)  # type: ignore[call-arg]
    cutfuse.linear(x, w, 1.0)  # type: ignore[arg-type]
    cutfuse.linear(x, w, epilogue=2.0)  # type: ignore[arg-type]
    cutfuse.linear(x, w, epilogue=len)  # type: ignore[arg-type]
    cutfuse.linear(x, w, operands=2.0)  # type: ignore[arg-type]
    cutfuse.linear(x, w, reduce=torch.sum)  # type: ignore[arg-type]
    cutfuse.linear(x, w, out_dtype="float16")  # type: ignore[arg-type]
    cutfuse.pointwise(x, torch.relu)  # type: ignore[arg-type]
    cutfuse.reduce(x, 0.5)  # type: ignore[arg-type]
    cutfuse.precision(3)  # type: ignore[arg-type]


def epilogues(x: Tensor) -> None:
    epilogue = cutfuse.Epilogue(scaled)
    assert_type(epilogue, cutfuse.Epilogue)
    assert_type(epilogue(x, x), Tensor)
    assert_type(epilogue.program, Program)
    assert_type(epilogue.operand_count, int)
    assert_type(cutfuse.Epilogue.from_expression(cutfuse.epilogue.input() * 2 + 1), cutfuse.Epilogue)
    assert_type(cutfuse.epilogue.operand(0), Expr)
    callables: list[Callable[..., Tensor]] = [epilogue, scaled]
    cutfuse.pointwise(callables[0], x, x)
    cutfuse.Epilogue(2.0)  # type: ignore[arg-type]
    epilogue(1.0)  # type: ignore[arg-type]


def modules(x: Tensor) -> None:
    fused = cutfuse.nn.FusedLinear(4, 8, epilogue=scaled, reduce="mean", dtype=torch.float16)
    assert_type(fused.reduce, str | None)
    assert_type(cutfuse.nn.FusedLinear(4, 8).forward(x, x, 2.0), Tensor)
    assert_type(cutfuse.nn.LinearSigmoidSum(4, 8).forward(x), Tensor)
    assert_type(cutfuse.nn.GemmDivideSumScale(4, 8, 1.5).forward(x), Tensor)
    assert_type(cutfuse.nn.GemmSigmoidScaleResidual(4, 8, 2.0).forward(x), Tensor)
    assert_type(cutfuse.nn.Sigmoid().forward(x), Tensor)
    assert_type(cutfuse.nn.SumReduction(1).forward(x), Tensor)
    cutfuse.nn.FusedLinear("4", 8)  # type: ignore[arg-type]
    cutfuse.nn.FusedLinear(4, 8, epilogue="relu")  # type: ignore[arg-type]
    cutfuse.nn.SumReduction(dim="1")  # type: ignore[arg-type]


def native_module() -> None:
    """Its functions have the types of the stub, where an untyped module would take everything."""
    assert_type(native.core.reductions(), dict[str, int])
    assert_type([row.name for row in native.core.op_table()], list[str])
    native.core.pointwise_backward_row_blocks("1", 2)  # type: ignore[arg-type]
    native.core.pointwise_backward_row_blocks(1)  # type: ignore[call-arg]
    native.core.absent()  # type: ignore[attr-defined]
