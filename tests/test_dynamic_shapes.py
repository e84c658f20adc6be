"""A batch size that changes makes no graph of its own: no more of them than PyTorch's own operations make."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cutfuse
from cutfuse.native import use_operators_everywhere

# Raised by PyTorch itself: when Dynamo meets an autograd.Function, and when export is imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]

W = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
BATCHES = (4, 5, 6, 9)  # 6 is the width of the result too

# What an operand's shape is for [batch, 3, 6]; -1 is the batch.
OPERANDS = {
    "full": (-1, 3, 6),
    "column": (-1, 3, 1),
    "outer": (-1, 1, 6),
    "outer_column": (-1, 1, 1),
    "inner": (1, 3, 6),
    "matrix": (3, 6),
    "inner_column": (3, 1),
    "row": (6,),
    "scalar": (),
}

# (cutfuse's call, PyTorch's own, the last dimension of x)
Call = Callable[[Tensor, Tensor], Tensor]
CALLS: dict[str, tuple[Call, Call, int]] = {
    "linear": (
        lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,)),
        lambda x, r: torch.tanh(F.linear(x, W)) * r,
        7,
    ),
    "linear_logsumexp": (
        lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,), reduce="logsumexp"),
        lambda x, r: torch.logsumexp(torch.tanh(F.linear(x, W)) * r, -1),
        7,
    ),
    "matrix_vector": (
        lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: z * 2 + r, operands=(r,), reduce="mean", keepdim=True),
        lambda x, r: (F.linear(x, W) * 2 + r).mean(-1, keepdim=True),
        7,
    ),
    "pointwise": (
        lambda x, r: cutfuse.pointwise(lambda z, r: torch.sigmoid(z) * r, x, r),
        lambda x, r: torch.sigmoid(x) * r,
        6,
    ),
    "reduce_batch": (
        lambda x, r: cutfuse.reduce(x, (0, 2), "sum", prologue=lambda z, r: torch.sigmoid(z) * r, operands=(r,)),
        lambda x, r: (torch.sigmoid(x) * r).sum((0, 2)),
        6,
    ),
    "reduce_rows": (
        lambda x, r: cutfuse.reduce(x, 2, "amax", prologue=lambda z, r: torch.sigmoid(z) * r, operands=(r,)),
        lambda x, r: (torch.sigmoid(x) * r).amax(2),
        6,
    ),
}


class Model(nn.Module):
    """torch.export takes modules only."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.call(x, r)


def inputs(operand: str, batch: int, width: int) -> tuple[Tensor, Tensor]:
    shape = [batch if size == -1 else size for size in OPERANDS[operand]]
    return torch.randn(batch, 3, width), torch.randn(shape)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_batch_stays_a_symbol(name: str, operand: str, path: str) -> None:
    """Under fake tensors alone, without Dynamo; export raises where a size declared dynamic becomes a number."""
    call, reference, width = CALLS[name]
    batch = torch.export.Dim("batch")
    dynamic = {"x": {0: batch}, "r": {0: batch} if OPERANDS[operand][:1] == (-1,) else {}}
    exported = torch.export.export(Model(call), inputs(operand, 5, width), dynamic_shapes=dynamic, strict=False)
    for size in BATCHES:
        x, r = inputs(operand, size, width)
        torch.testing.assert_close(exported.module()(x, r), reference(x, r))


def count_graphs(call: Call, operand: str, width: int, mark: bool) -> int:
    """How many graphs the forward passes of all batch sizes took; checks the values and runs backwards."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for size in BATCHES:
        tensors = [t.requires_grad_() for t in inputs(operand, size, width)]
        for t in tensors if mark else ():
            if t.dim() == 3 and t.shape[0] == size:
                torch._dynamo.mark_dynamic(t, 0)
        y = compiled(*tensors)
        torch.testing.assert_close(y, call(*tensors))
        y.sum().backward()
    torch._dynamo.reset()
    return counter.frame_count


@functools.lru_cache(maxsize=len(CALLS) * 3)
def count_pytorchs_graphs(name: str, operand: str, mark: bool) -> int:
    _, reference, width = CALLS[name]
    return count_graphs(reference, operand, width, mark)


@pytest.mark.parametrize(
    ("name", "operand", "mark"),
    [
        *[(name, "full", mark) for name in CALLS for mark in (False, True)],
        *[(name, "row", False) for name in ("linear", "matrix_vector")],
    ],
)
def test_batches_make_as_many_graphs_as_pytorchs(name: str, operand: str, mark: bool, path: str) -> None:
    call, _, width = CALLS[name]
    graphs = count_graphs(call, operand, width, mark)
    assert graphs == count_pytorchs_graphs(name, operand, mark) == (1 if mark else 2)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("operand", ["full", "column", "inner", "row"])
@pytest.mark.parametrize("name", CALLS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_rows_that_depends_on_data(name: str, operand: str, exported: bool) -> None:
    """Whether such a number is 1 is unknown, and asking for it ends a graph."""
    call, reference, width = CALLS[name]

    def selected(x: Tensor, r: Tensor, mask: Tensor, call: Call) -> Tensor:
        rows = mask.nonzero().squeeze(1)
        return call(x[rows], r[rows] if OPERANDS[operand][:1] == (-1,) else r)

    x, r = inputs(operand, 9, width)
    masks = [torch.arange(9) < count for count in (4, 1, 7)]

    class Selecting(nn.Module):
        def forward(self, x: Tensor, r: Tensor, mask: Tensor) -> Tensor:
            return selected(x, r, mask, call)

    torch._dynamo.reset()
    with use_operators_everywhere():
        if exported:
            compiled = torch.export.export(Selecting(), (x, r, masks[0]), strict=False).module()
        else:
            compiled = torch.compile(Selecting(), backend="aot_eager", fullgraph=True)
        found = [compiled(x, r, mask) for mask in masks]
    torch.testing.assert_close(found, [selected(x, r, mask, reference) for mask in masks])
    torch._dynamo.reset()
