"""The kernels' side of the binding, emulated in PyTorch on CPU memory through the same raw pointers and strides.

It lets a machine without a GPU check what `cutfuse.ops.cuda` lays out, allocates and launches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program, evaluate

DTYPES = {code: getattr(torch, name) for name, code in native.module().dtypes().items()}
REDUCTIONS = {0: "none", **{code: name for name, code in native.module().reductions().items()}}
ROW_BLOCKS = 3


def view(address: int, dtype: int, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The memory at an address as a strided tensor."""
    element = DTYPES[dtype].itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (span * element)).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).as_strided(sizes, strides)


def matrix(fields: tuple[int, ...], extents: Sequence[int]) -> Tensor:
    address, dtype, *strides = fields
    return view(address, dtype, extents, strides).float()


def contiguous(address: int, dtype: int, sizes: Sequence[int]) -> Tensor:
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return view(address, dtype, sizes, strides)


class EmulatedProgram:
    """Stands for the native program, and still knows the Python one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.cost = self.generated_cost = float(len(program.instructions))
        self.is_interpreted = True
        self.without_chain = self


class EmulatedCore:
    """The functions that `cutfuse.ops` calls. `launches` has the name and extents of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(native.module(), name)

    def pointwise_kernel(self, program, extents, x, operands, out, out_dtype) -> str:
        return ""

    def pointwise(self, stream, program, extents, x, operands, out, out_dtype, specialization) -> None:
        self.launches.append(("pointwise", extents))
        y = evaluate(program.program, matrix(x, extents), [matrix(item, extents) for item in operands])
        contiguous(out, out_dtype, extents).copy_(y)

    def launch_after_product(self, plan, stream, z, result, workspace, program, operands, epilogues) -> None:
        m, n, _ = plan.product_shape
        dtype = plan.input
        if isinstance(plan.launches[-1], native.module().PointwisePass):
            self.pointwise(stream, program, (1, m, n), (z, dtype, 0, n, 1), operands, result, plan.output, None)
            return
        turned = [(address, code, row, column, 0) for address, code, _, row, column in operands]
        x = (z, dtype, n, 1, 0)
        self.reduce(stream, program, (m, n, 1), x, turned, int(plan.reduction), result, plan.output, int(n > 2), None)

    def reduce_workspace(self, extents, dtype, reduction, multiprocessors) -> int:
        return 16 if extents[1] > 2 else 0

    def reduce_kernel(self, program, extents, x, operands, reduction) -> str:
        return ""

    def reduce(
        self, stream, program, extents, x, operands, reduction, out, out_dtype, workspace, specialization
    ) -> None:
        self.launches.append(("reduce", extents))
        assert (workspace != 0) == (extents[1] > 2)
        y = evaluate(program.program, matrix(x, extents), [matrix(item, extents) for item in operands])
        outer, _, inner = extents
        contiguous(out, out_dtype, (outer, inner)).copy_(getattr(torch, REDUCTIONS[reduction])(y, dim=1))

    def pointwise_backward_row_blocks(self, rows: int, columns: int) -> int:
        return ROW_BLOCKS

    def pointwise_backward_kernel(self, program, extents, grad, x, operands, outputs, column_sum) -> str:
        return ""

    def pointwise_backward(
        self,
        stream,
        program,
        extents,
        grad,
        x,
        operands,
        outputs,
        partials,
        reduction,
        row_result,
        tie_count,
        specialization,
        is_accurate,
    ) -> None:
        name = REDUCTIONS[reduction]
        self.launches.append((f"backward {name}", extents))
        leaves = [matrix(item, extents).clone().requires_grad_() for item in (x, *operands)]
        with torch.enable_grad():
            y = evaluate(program.program, leaves[0], leaves[1:])
        weight = matrix(grad, extents)
        if name != "none":
            result = contiguous(row_result, 0, (*extents[:2], 1))
            if name == "logsumexp":
                weight = weight * torch.exp(y.detach() - result)
            else:
                weight = weight * (y.detach() == result) / contiguous(tie_count, 0, (*extents[:2], 1))
        kwargs = {"allow_unused": True, "materialize_grads": True}
        tangents = torch.autograd.grad(y, leaves, weight.expand(extents), **kwargs)
        for wrt, address, dtype in outputs:
            contiguous(address, dtype, extents).copy_(tangents[wrt])
        if partials:
            assert extents[0] == 1
            sums = contiguous(partials, 0, (ROW_BLOCKS, extents[2])).zero_()
            for block in range(ROW_BLOCKS):
                sums[block] = tangents[0][0, block::ROW_BLOCKS].sum(0)
