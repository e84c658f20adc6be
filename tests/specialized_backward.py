"""Kernels of derivatives with a program compiled in: their PTX, run on the CPU as a GPU would launch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ptx_parser import Function, find_kernel
from specialized_kernels import operand_types
from specialized_pointwise import Memory
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

# Masks behind masks, tangents that overflow and underflow before them, sums of masked and other tangents.
MASKS = (
    "operands=1; mul z 1e-30; mul prev 1e-30; relu prev; div prev 0.0",
    "operands=1; relu z; log prev; mul prev r0",
    "operands=1; mul z 3e38; mul prev 10.0; clamp prev -1.0 1.0; mul prev r0; relu6 prev",
    "operands=1; relu z -> s0; neg z; relu prev; add prev s0; reciprocal prev",
    "operands=1; clamp z -1.0 1.0 -> s0; mul z r0; add prev s0; maximum prev r0; sub s0 prev",
    "operands=1; copy r0 -> s0; gt z r0; mul prev z; sub prev r0; where prev z s0; abs prev",
    "operands=1; mul z r0 -> s0; relu prev -> s1; clamp s0 -1.0 1.0; add prev s1",
    "operands=1; maximum z r0 -> s0; clamp_min z z; add prev s0; atan prev",
    "operands=1; clamp_min z z; reciprocal prev; mul prev r0",
    "operands=1; relu z -> s0; mul prev 2.0; add prev s0; relu prev; sqrt prev; mul prev 0.0; reciprocal prev",
)


def backward_text(
    program: Program,
    x: torch.dtype,
    operands: Sequence[Tensor] = (),
    wanted: Sequence[int] = (0,),
    column_sum: bool = False,
) -> str:
    name = str(x).removeprefix("torch.")
    template = module().kernel_template(f"pointwise_backward_{'columns_' if column_sum else ''}{name}")
    assert template
    native = program.native.without_chain
    return module().specialize_kernel(template, native, operand_types(operands), derivatives=list(wanted))


@dataclass(frozen=True)
class Gradients:
    """The gradient of each wanted input, and the partial sums of x's columns, `[row_blocks, columns]`."""

    of: list[Tensor]
    partials: Tensor | None


class SpecializedBackward:
    """A specialized kernel. `run` gives its results for x `[rows, columns]`, or with an outer dimension before them."""

    def __init__(self, text: str, wanted: Sequence[int] = (0,), column_sum: bool = False) -> None:
        self.text = text
        self.wanted = wanted
        self.column_sum = column_sum
        self.function: Function = find_kernel(text, "pointwise_backward_")

    def run(
        self,
        program: Program,
        grad: Tensor,
        x: Tensor,
        operands: Sequence[Tensor] = (),
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> Gradients:
        """dtypes: of the gradients; that of x if they are not given."""
        extents = [1] * (3 - x.dim()) + list(x.shape)
        memory = Memory(self.text)
        grad_matrix, x_matrix, *matrices = [memory.add_tensor(item, extents) for item in (grad, x, *operands)]
        kinds = list(dtypes or [x.dtype] * len(self.wanted))
        places = [memory.add_result(x.shape, dtype) for dtype in kinds]
        types = operand_types([torch.empty(0, dtype=dtype) for dtype in kinds])
        outputs = list(zip(self.wanted, places, types, strict=True))
        problem = module().PointwiseBackwardProblem(
            program.native, extents, grad_matrix, x_matrix, matrices, outputs, self.column_sum
        )
        assert problem.kernel, "the launch would interpret the program"
        sums, partials = (), 0
        if self.column_sum:
            sums = (module().pointwise_backward_row_blocks(*x.shape), x.shape[1])
            partials = memory.add_result(sums, torch.float32)
        launch = module().pointwise_backward_parameters(problem, partials)
        memory.launch(self.function, *launch, first=places[0] if places else partials)
        gradients = [memory.result(place, x.shape, dtype) for place, dtype in zip(places, kinds, strict=True)]
        return Gradients(gradients, memory.result(partials, sums, torch.float32) if self.column_sum else None)
