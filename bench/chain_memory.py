"""Memory of a training step of a stack of blocks: its peak, and what the forward pass keeps for the backward pass.

Counted without the parameters and the stack's input, from what is allocated before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import cutfuse
from bench.host_calls import build_stacks
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


Forward = Callable[[], Tensor]


def step_bytes(forward: Forward, leaves: Sequence[Tensor], grad: Tensor, meter: Meter) -> dict[str, int]:
    """What a step has kept after its forward pass, and its peak. `leaves` need gradients, and `grad` arrives."""
    before = meter.allocated()
    meter.restart_peak()
    y = forward()
    kept = meter.allocated() - before
    torch.autograd.grad(y, leaves, grad)
    return {"kept_bytes": kept, "peak_bytes": meter.peak() - before}


def measure(steps: Mapping[str, tuple[Forward, Sequence[Tensor]]], grad: Tensor, meter: Meter) -> Figures:
    """The figures of every contender's step once it is warm, of forward passes and their leaves."""
    found = {}
    for name, (forward, leaves) in steps.items():
        for _ in range(WARM_UP_STEPS):
            step_bytes(forward, leaves, grad, meter)
        cutfuse.wait()  # for kernels that are compiled in the background
        found[name] = step_bytes(forward, leaves, grad, meter)
    return {"contenders": found}


def measure_stacks(shape: Shape, dtype: torch.dtype, device: torch.device, meter: Meter) -> Figures:
    """The figures of every stack for `shape`: rows, the hidden width and the width."""
    x = torch.randn(shape[0], shape[2], device=device, dtype=dtype).requires_grad_()
    stacks = stacks_of(shape, dtype, device)
    steps = {name: (partial(stack, x), (x, *stack.parameters())) for name, stack in stacks.items()}
    return measure(steps, torch.randn_like(x), meter)


def prepare(shape: Shape, session: Session) -> Turn:
    """What measures the stacks in bf16, with PyTorch's own counters of a GPU."""
    return partial(measure_stacks, shape, torch.bfloat16, session.device, Meter(session.device))
