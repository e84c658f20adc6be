"""The mlp suite: whole MLPs, forwards and in training, and what a step keeps, beside PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.chains import training
from bench.goals import MEAN, cases_with, over
from bench.launches import COMPILE, CONTENDERS, EAGER, FUSED, Steps, launch_case, memory_case, slow_compilers
from bench.suite import Case, Goal, Suite
from bench.tables import of, ratio_of, table_of, times_of
from bench.workloads import Range, Shape, Workload, dimensions, drawn_shapes, exact_of, random_tensor

FORWARD, TRAINING, MEMORY = "forward", "training step", "memory"
PYTORCH = (EAGER, COMPILE)
RECOMPUTED = "cutfuse, recomputed"
PRECISION = "bf16"
RANDOM_ROWS, RANDOM_SIZES, RANDOM_COUNT = Range(512, 32768), Range(256, 8192), 9
SMALL_SHAPES, SMALL_ROWS, SMALL_SIZES = ((16, 64, 32),), Range(4, 16), Range(16, 64)


def relu_squared(z: Tensor) -> Tensor:
    """Of transformers that were tuned for speed."""
    return F.relu(z).square()


@dataclass(frozen=True)
class Kind:
    """An MLP: its activation, whether it has a gate and biases, and its shapes: rows, the hidden width and the width.

    kept: the goal for what a step keeps, of eager's; step: for its time, of the faster of PyTorch's.
    """

    name: str
    activation: Callable[[Tensor], Tensor]
    has_gate: bool
    has_biases: bool
    shapes: tuple[Shape, ...]
    kept: float
    step: float

    def tensors(self, shape: Shape, device: torch.device) -> list[Tensor]:
        """x, the weights, the biases where there are some, and the gradient that arrives."""
        rows, hidden, width = shape
        first = 2 * hidden if self.has_gate else hidden
        x, grad = (random_tensor((rows, width), PRECISION, device, seed) for seed in (1, 2))
        w1 = random_tensor((first, width), PRECISION, device, 3).mul_(width**-0.5)
        w2 = random_tensor((width, hidden), PRECISION, device, 4).mul_(hidden**-0.5)
        biases = [random_tensor((size,), PRECISION, device, 5) for size in (first, width)] if self.has_biases else []
        return [x, w1, w2, *biases, grad]

    def eager(self, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, b2: Tensor | None = None) -> Tensor:
        """By PyTorch."""
        z = F.linear(x, w1, b1)
        if not self.has_gate:
            return F.linear(self.activation(z), w2, b2)
        gate, up = z.chunk(2, -1)
        return F.linear(self.activation(gate) * up, w2, b2)

    def fused(
        self,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        b1: Tensor | None = None,
        b2: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """As one node."""
        return cutfuse.mlp(x, w1, b1, w2, b2, activation=self.activation, gate=self.has_gate, recompute=recompute)

    def build(self, group: str, shape: Shape, device: torch.device) -> Workload:
        """What the contenders of a case run."""
        *tensors, grad = self.tensors(shape, device)
        if group == TRAINING:
            return training([*(tensor.requires_grad_() for tensor in tensors), grad], self.eager, self.fused)
        return Workload(tuple(tensors), self.eager, self.fused, exact_of(self.eager, tensors))

    def cases(self, shape: Shape, variant: str, with_memory: bool) -> Iterator[Case]:
        """Forwards, in training and of its memory."""
        label = dimensions(shape)
        for group in (FORWARD, TRAINING):
            build = partial(self.build, group, shape)
            names, needs_grad = (*PYTORCH, FUSED), group == TRAINING
            yield launch_case((group, variant, label, PRECISION), build, names, needs_grad=needs_grad)
        if with_memory:
            key = (MEMORY, variant, label, PRECISION)
            yield memory_case(key, partial(self.steps, shape), counts_result=False)  # which is no activation

    def steps(self, shape: Shape, device: torch.device) -> Steps:
        """Each contender's training step, of its memory."""
        *leaves, grad = self.tensors(shape, device)
        functions: dict[str, Callable[..., Tensor]] = {
            EAGER: self.eager,
            COMPILE: torch.compile(self.eager, fullgraph=True, dynamic=False),
            FUSED: self.fused,
            RECOMPUTED: partial(self.fused, recompute=True),
        }
        if device.type == "cpu":
            del functions[COMPILE]
        for leaf in leaves:
            leaf.requires_grad_()
        return {name: (partial(function, *leaves), leaves) for name, function in functions.items()}, grad


KINDS = (
    Kind("relu squared", relu_squared, False, False, ((16384, 3072, 768), (49152, 3072, 768)), 0.50, 0.95),
    Kind("gelu, biases", F.gelu, False, True, ((12608, 3072, 768), (4096, 16384, 4096)), 0.55, 0.96),
    Kind("SwiGLU", F.silu, True, False, ((8192, 14336, 4096), (4096, 8192, 2048)), 0.60, 0.96),
)


def mlp_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """The MLPs of `KINDS`, and as many of each at random as the seed draws; memory on a GPU's sizes alone."""
    for kind in KINDS:
        for shape in SMALL_SHAPES if small else kind.shapes[:1] if quick else kind.shapes:
            yield from kind.cases(shape, kind.name, not small)
    ranges = (SMALL_ROWS, SMALL_SIZES) if small else (RANDOM_ROWS, RANDOM_SIZES)
    count = len(KINDS) if small or quick else RANDOM_COUNT
    for number, shape in enumerate(drawn_shapes(count, *ranges, odd_ones=True, seed=seed)):
        kind = KINDS[number % len(KINDS)]
        yield from kind.cases(shape, f"{number} {kind.name}, drawn", not small)


# Over the faster of PyTorch's ways.
over_pytorch = over((FUSED,), PYTORCH)


def goals() -> Iterator[Goal]:
    """Of the named MLPs by their kinds, and of those that are drawn."""
    best = "the faster of eager and torch.compile"
    for kind in KINDS:
        steps, memory = (cases_with(group=group, variant=kind.name) for group in (TRAINING, MEMORY))
        yield Goal(f"{kind.name}, step", best, steps, over_pytorch, kind.step)
        for what, contender, at_most in (("kept", FUSED, kind.kept), ("kept, recomputed", RECOMPUTED, 0.30)):
            yield Goal(f"{kind.name}, {what}", EAGER, memory, over((contender,), (EAGER,), "kept_bytes"), at_most)
    for group in (FORWARD, TRAINING):
        drawn = cases_with(lambda case: case["variant"].endswith("drawn"), group=group)
        yield Goal(f"drawn, {group}", best, drawn, over_pytorch, None, MEAN)


MEMORY_COLUMNS = {
    f"{name}, {measure} MB": of(name, f"{measure}_bytes", lambda value: f"{value / 1e6:.0f}")
    for name in (EAGER, COMPILE, FUSED, RECOMPUTED)
    for measure in ("kept", "peak")
}
TIMES = times_of({name: CONTENDERS[name].label for name in (*PYTORCH, FUSED)})
SUITE = Suite(
    name="mlp",
    cases=mlp_cases,
    goals=tuple(goals()),
    contenders=(*PYTORCH, FUSED),
    left_out=slow_compilers,
    tables=(
        table_of("Times", {**TIMES, "over PyTorch": ratio_of(over_pytorch)}, cases_with(group=(FORWARD, TRAINING))),
        table_of("Memory of a step", MEMORY_COLUMNS, cases_with(group=MEMORY)),
    ),
    about=(
        "The device's time behind a queue of launches, contenders interleaved in random order; medians in "
        "microseconds. Shapes are rows, the hidden width and the width.",
        "Every result and gradient was compared with fp64 before. Memory is counted by PyTorch's allocator, what is "
        "kept without the parameters, x and the result.",
    ),
    time_limit_s=900.0,
)
