"""Memory of a training step of a stack of blocks: its peak, and what the forward pass keeps for the backward pass.

Counted without the parameters and the stack's input, from what is allocated before the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import cutfuse
from bench.mlp_blocks import build_stacks
from bench.suite import Figures, Session, Turn
from bench.workloads import Shape

EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK = "eager", "cutfuse", "cutfuse, recomputed"
BLOCKS = 12
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Meter:
    """PyTorch's own counters of a device's memory, in bytes."""

    device: torch.device

    def allocated(self) -> int:
        """What tensors hold, once the device has done its work."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most that tensors held since."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def stacks_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Sequential]:
    """The same blocks in plain PyTorch, with cutfuse, and with cutfuse where gelu's input is computed again."""
    _, hidden, width = shape
    plain, fused = build_stacks(BLOCKS, width, hidden, dtype, device)
    _, recomputed = build_stacks(BLOCKS, width, hidden, dtype, device)
    for block in recomputed:
        block.up.recompute = True
    return {EAGER_STACK: plain, FUSED_STACK: fused, RECOMPUTED_STACK: recomputed}


def step_bytes(stack: nn.Sequential, x: Tensor, grad: Tensor, meter: Meter) -> dict[str, int]:
    """What a step has kept after its forward pass, and its peak."""
    before = meter.allocated()
    meter.restart_peak()
    y = stack(x)
    kept = meter.allocated() - before
    torch.autograd.grad(y, (x, *stack.parameters()), grad)
    return {"kept_bytes": kept, "peak_bytes": meter.peak() - before}


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, meter: Meter) -> Figures:
    """The figures of every stack for `shape`: rows, the hidden width and the width."""
    found = {}
    with torch.enable_grad():
        x = torch.randn(shape[0], shape[2], device=device, dtype=dtype).requires_grad_()
        grad = torch.randn_like(x)
        for name, stack in stacks_of(shape, dtype, device).items():
            for _ in range(WARM_UP_STEPS):
                step_bytes(stack, x, grad, meter)
            cutfuse.wait()  # for kernels that are compiled in the background
            found[name] = step_bytes(stack, x, grad, meter)
    return {"contenders": found}


def prepare(shape: Shape, session: Session) -> Turn:
    """What measures a case in bf16, with PyTorch's own counters of a GPU."""
    return partial(measure, shape, torch.bfloat16, session.device, Meter(session.device))
