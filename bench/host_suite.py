"""The host suite: what calls and stacks of layers take of PyTorch's time, on the host and as a whole."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench import host_calls as calls
from bench.goals import MEAN, WORST, cases_with, over
from bench.host_calls import (
    CUTFUSE,
    PYTORCH,
    Calls,
    Function,
    Group,
    Result,
    build_stacks,
    calls_of,
    in_its_way,
    prepare,
)
from bench.suite import Case, Figures, Goal, Results, Suite
from bench.tables import Table, case_table, ratio_of, times_of
from bench.timing import HOST, TURNS, WHOLE, Effort
from bench.workloads import PRECISIONS, Shape, dimensions, random_tensor

COMPILE_S, CALL_S = 8.0, 1.0  # first guesses of what a case takes whose calls are compiled, and of any other

GELU = Group("linear and gelu", "linear, gelu")
RESIDUAL = Group("linear, relu, full operand", "linear, relu, add")
ROW_SUM = Group("linear, gelu, row sum", "linear, gelu, sum")
BARE = Group("bare linear", "F.linear")
ONE_OP = Group("pointwise of one op", "the op")
THREE_OPS = Group("pointwise of three ops", "the three ops")
SUM = Group("sum over a dimension", "torch.sum")
DRAWN_GELU = Group("linear and gelu of any size", "linear, gelu", WHOLE)
DRAWN_BARE = Group("bare linear of any size", "F.linear", WHOLE)
TRAINING = Group("training step of linear and gelu", "the same in eager", needs_grad=True)
LAYERS = Group(f"{calls.LAYERS} compiled layers with gelu", "torch.compile", compiles=True)
FORWARD = Group("blocks, forward", "eager", WHOLE)
TRAINING_BLOCKS = Group("blocks, training", "eager", WHOLE, needs_grad=True)
COMPILED_FORWARD = Group("compiled blocks, forward", "torch.compile", WHOLE, compiles=True)


def case_of(
    group: Group, shape: str, precision: str, build: Callable[[torch.device], Calls], variant: str = ""
) -> Case:
    """One shape of a group."""
    seconds = COMPILE_S if group.compiles else CALL_S
    own = partial(prepare, group, precision, build)
    return Case(group.name, variant, shape, precision, own, seconds, needs_grad=group.needs_grad)


@dataclass(frozen=True)
class Pair:
    """A group's functions, PyTorch's and cutfuse's, of the same tensors. `axes`: how many of M, N, K these have."""

    group: Group
    pytorch: Function
    cutfuse: Function
    tensors: Callable[[Shape, str, torch.device], list[Tensor]]
    precisions: tuple[str, ...] = ("bf16",)
    axes: int = 3

    def build(self, shape: Shape, precision: str, device: torch.device) -> Calls:
        """The calls on tensors of `shape` (M, N, K)."""
        return calls_of(self.group, self.pytorch, self.cutfuse, self.tensors(shape, precision, device))

    def cases(self, shapes: Sequence[Shape]) -> Iterator[Case]:
        """One for each shape and precision."""
        for precision in self.precisions:
            for shape in shapes:
                printed = dimensions(shape[: self.axes])
                yield case_of(self.group, printed, precision, partial(self.build, shape, precision))


ANY_FLOAT = ("bf16", "fp32")
# A frame of Python around each, as around the others.
BARE_LINEAR: Function = lambda x, weight: F.linear(x, weight)  # noqa: E731
FUSED_LINEAR: Function = lambda x, weight: cutfuse.linear(x, weight)  # noqa: E731
PAIRS = (
    Pair(GELU, calls.linear_gelu, calls.fused_linear_gelu, calls.layer_tensors),
    Pair(
        RESIDUAL,
        lambda x, weight, bias, residual: torch.relu(F.linear(x, weight, bias)) + residual,
        calls.fused_linear_residual,
        calls.residual_tensors,
    ),
    Pair(
        ROW_SUM,
        lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)).sum(-1),
        lambda x, weight, bias: cutfuse.linear(x, weight, bias, epilogue=lambda z: F.gelu(z), reduce="sum"),
        calls.layer_tensors,
    ),
    Pair(BARE, BARE_LINEAR, FUSED_LINEAR, calls.product_tensors, ("bf16", "fp16")),
    Pair(
        ONE_OP,
        lambda x: torch.sigmoid(x),
        lambda x: cutfuse.pointwise(torch.sigmoid, x),
        calls.single_tensor,
        ANY_FLOAT,
        axes=2,
    ),
    Pair(
        THREE_OPS,
        lambda x, operand: torch.sigmoid(x) * operand + x,
        calls.fused_three_ops,
        calls.elementwise_tensors,
        ANY_FLOAT,
        axes=2,
    ),
    Pair(SUM, lambda x: torch.sum(x, 1), lambda x: cutfuse.sum(x, 1), calls.single_tensor, ANY_FLOAT, axes=2),
    Pair(
        TRAINING,
        calls.training_step(calls.linear_gelu),
        calls.training_step(calls.fused_linear_gelu),
        calls.training_tensors,
        ANY_FLOAT,
    ),
)
DRAWN_PAIRS = (
    Pair(DRAWN_GELU, calls.linear_gelu, calls.fused_linear_gelu, calls.layer_tensors, ("fp32",)),
    Pair(DRAWN_BARE, BARE_LINEAR, FUSED_LINEAR, calls.product_tensors, ("fp32",)),
)
LAYERS_PAIR = Pair(
    LAYERS, calls.repeated(calls.linear_gelu), calls.repeated(calls.fused_linear_gelu), calls.repeated_tensors
)


@dataclass(frozen=True)
class Range:
    """Sizes to draw from, evenly by their logarithms: as many from 1 to 8 as from 512 to 4096."""

    least: int
    most: int

    def draw(self, generator: random.Random, multiple: int) -> int:
        """A size, rounded to `multiple`, by which `least` and `most` are to be divisible."""
        size = self.least * (self.most / self.least) ** generator.random()
        return max(round(size / multiple) * multiple, self.least)


SHAPE_SEED = 12
ALIGNED = 8  # elements: 16 bytes in bf16, which kernels need of N and K


def drawn_shapes(count: int, rows: Range, sizes: Range, odd_ones: bool, seed: int = SHAPE_SEED) -> list[Shape]:
    """M, N, K at random, the same ones for a seed. N and K are multiples of 8, but in every fourth with `odd_ones`."""
    generator = random.Random(seed)
    shapes = []
    for index in range(count):
        multiple = 1 if odd_ones and index % 4 == 3 else ALIGNED
        shapes.append((rows.draw(generator, 1), sizes.draw(generator, multiple), sizes.draw(generator, multiple)))
    return shapes


@dataclass(frozen=True)
class Stack:
    """Pre-norm MLP blocks on x `[rows, width]`."""

    count: int
    width: int
    hidden: int
    rows: int

    @property
    def label(self) -> str:
        """As the table prints it."""
        return f"{self.count} blocks {self.width}/{self.hidden}, {self.rows} rows"

    def build(self, group: Group, device: torch.device) -> Calls:
        """The calls of both stacks, with the same parameters, in bf16."""
        plain, fused = build_stacks(self.count, self.width, self.hidden, PRECISIONS["bf16"].dtype, device)
        x = random_tensor((self.rows, self.width), "bf16", device, seed=1)
        wide = copy.deepcopy(plain).double()
        if not group.needs_grad:
            pytorch, cutfuse = (in_its_way(group, stack) for stack in (plain, fused))
            return Calls(partial(pytorch, x), partial(cutfuse, x), lambda: wide(x.double()))
        gradient = random_tensor((self.rows, self.width), "bf16", device, seed=2)

        def step(stack: torch.nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], Result]:
            parameters = tuple(stack.parameters())

            def run() -> Result:
                y = stack(x)
                return y, *torch.autograd.grad(y, parameters, gradient)

            return run

        return Calls(step(plain, x, gradient), step(fused, x, gradient), step(wide, x.double(), gradient.double()))


STACKS = (Stack(12, 384, 1536, 197), Stack(12, 768, 3072, 1576))
DEVICE_BOUND_STACK = Stack(12, 768, 3072, 12608)


def host_suite(small: bool, quick: bool, seed: int = 0) -> Iterator[Case]:
    """The full suite, a quick one with the first shapes of each, or one that a CPU does in seconds.

    What compiles comes last, as it may not fit into the time; small runs go without.
    """
    del seed
    if small:
        drawn = drawn_shapes(4, Range(1, 16), Range(16, 64), odd_ones=True)
        layers: list[Shape] = [(8, 32, 16), *drawn[:1]]
        stacks, eager_stacks = (Stack(2, 16, 32, 5),), ()
    else:
        drawn = drawn_shapes(16 if quick else 40, Range(1, 4096), Range(256, 8192), odd_ones=True)
        layers = drawn_shapes(1 if quick else 3, Range(1, 512), Range(64, 1024), odd_ones=False)
        layers = [(197, 1536, 384), *([] if quick else [(32, 256, 256)]), *layers]
        stacks, eager_stacks = STACKS, (DEVICE_BOUND_STACK,)
    for pair in PAIRS:
        yield from pair.cases(layers)
    for pair, count in zip(DRAWN_PAIRS, (len(drawn), 2 if small else 4 if quick else 8), strict=True):
        yield from pair.cases(drawn[:count])
    for group in (FORWARD, TRAINING_BLOCKS):
        for stack in (*stacks, *eager_stacks):
            yield case_of(group, stack.label, "bf16", partial(stack.build, group))
    if not small:
        yield from LAYERS_PAIR.cases([(197, 384, 384), *([] if quick else [(32, 1024, 1024)])])
        for stack in stacks:
            yield case_of(COMPILED_FORWARD, stack.label, "bf16", partial(stack.build, COMPILED_FORWARD))


NAMES = (PYTORCH, CUTFUSE)
EFFORT, QUICK_EFFORT = Effort(0.6, 30, 300), Effort(0.08, 10, 60)
SMALL_STACK, LARGE_STACK = (stack.label for stack in STACKS)


over_pytorch = over((CUTFUSE,), (PYTORCH,))


def goal(group: Group, at_most: float | None, measure: str = WORST, precision: str = "", shape: str = "") -> Goal:
    """cutfuse's time over PyTorch's is to be `at_most`, in the group's cases of a precision and a shape."""
    covers = cases_with(group=group.name, precision=precision, shape=shape)
    what = ", ".join(part for part in (group.name, shape.removeprefix("12 blocks "), precision) if part)
    return Goal(f"{what} ({group.time})", group.rival, covers, over_pytorch, at_most, measure)


GOALS = (
    goal(GELU, 0.75),
    goal(RESIDUAL, 0.65),
    goal(ROW_SUM, 0.8),
    goal(BARE, 1.15),
    goal(ONE_OP, 1.5),
    goal(THREE_OPS, 0.7),
    goal(SUM, 1.5),
    goal(DRAWN_GELU, 1.0, MEAN, "fp32"),
    goal(DRAWN_GELU, 1.03, WORST, "fp32"),
    goal(DRAWN_BARE, None, MEAN, "fp32"),
    goal(DRAWN_BARE, None, WORST, "fp32"),
    goal(TRAINING, 0.9, precision="bf16"),
    goal(TRAINING, 1.0, precision="fp32"),
    goal(LAYERS, 1.1),
    goal(FORWARD, 0.65, precision="bf16", shape=SMALL_STACK),
    goal(TRAINING_BLOCKS, 0.9, precision="bf16", shape=SMALL_STACK),
    goal(FORWARD, 0.8, precision="bf16", shape=LARGE_STACK),
    goal(TRAINING_BLOCKS, 0.95, precision="bf16", shape=LARGE_STACK),
    goal(COMPILED_FORWARD, 1.02, precision="bf16", shape=SMALL_STACK),
    goal(COMPILED_FORWARD, 1.02, precision="bf16", shape=LARGE_STACK),
    goal(FORWARD, 0.95, precision="bf16", shape=DEVICE_BOUND_STACK.label),
    goal(TRAINING_BLOCKS, 0.95, precision="bf16", shape=DEVICE_BOUND_STACK.label),
)


def call_of(case: Figures) -> str:
    """A case's call."""
    return " ".join(filter(None, (case["group"], case.get("variant"))))


def cases_table(results: Results) -> Table:
    """Every case with both times."""
    columns = {
        "call": call_of,
        "shape": "shape",
        "ratio": ratio_of(over_pytorch),
        "precision": "precision",
        **times_of({name: name for name in NAMES}),
    }
    return case_table("Every case", results["cases"], columns)


SUITE = Suite(
    name="host",
    cases=lambda *kind: list(host_suite(*kind)),
    goals=GOALS,
    contenders=NAMES,
    tables=lambda results: [cases_table(results)],
    about=[
        f"host: the CPU's time to issue a call, of {TURNS[HOST].timed_calls} calls in a row from an empty queue on; "
        "the device is waited for outside of that time.",
        "whole: host and device, of one call until the device is done; waiting for it is inside.",
        "Medians in microseconds, the two taking turns in random order, garbage collector off, every cache warm.",
    ],
    plots=("host",),
    effort=EFFORT,
    quick_effort=QUICK_EFFORT,
    time_limit_s=240.0,
    judges_quick=True,
)
