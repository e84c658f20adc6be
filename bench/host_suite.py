"""The host suite: what calls and stacks of layers take of PyTorch's time, on the host and as a whole.

Calls, layers and blocks are as users write them, in PyTorch and with cutfuse.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse
from bench.goals import MEAN, WORST, cases_with, over
from bench.launches import FUSED, PYTORCH, launch_case
from bench.suite import Case, Goal, Suite
from bench.tables import ratio_of, table_of, times_of
from bench.timing import HOST, TURNS, WHOLE, Effort
from bench.workloads import (
    PRECISIONS,
    Function,
    Range,
    Result,
    Shape,
    Workload,
    dimensions,
    drawn_shapes,
    exact_of,
    fused_linear_gelu,
    layer_tensors,
    linear_gelu,
    parameter_tensors,
    product_tensors,
    random_tensor,
    result_tensor,
    training_step,
    training_tensors,
)

# In one compiled function: what entering it costs, in which the two do not differ, is shared by so many.
LAYER_COUNT = 8


def repeated(layer: Callable[..., Tensor]) -> Function:
    """Of x and the weights and biases of layers: `layer` once with each of these."""

    def layers(x: Tensor, *parameters: Tensor) -> Tensor:
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, weight, bias)
        return x

    return layers


def single_tensor(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, N]`."""
    return [result_tensor(shape, precision, device, seed=1)]


def repeated_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and the weights and biases of `LAYER_COUNT` layers; K = N."""
    parameters = [parameter_tensors(shape, precision, device, seed=2 + 2 * index) for index in range(LAYER_COUNT)]
    return [layer_tensors(shape, precision, device)[0], *chain.from_iterable(parameters)]


class PlainBlock(nn.Module):
    """`x + down(gelu(up(norm(x))))` of x `[..., width]`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class FusedBlock(nn.Module):
    """The same with what follows each linear layer inside it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = cutfuse.nn.FusedLinear(width, hidden, epilogue=F.gelu)
        self.down = cutfuse.nn.FusedLinear(hidden, width, epilogue=lambda z, residual: residual + z)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)), x)


def build_stacks(
    count: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Sequential, nn.Sequential]:
    """`count` blocks in plain PyTorch, and `count` with cutfuse that share their parameters."""
    torch.manual_seed(0)
    with device:
        plain = nn.Sequential(*(PlainBlock(width, hidden) for _ in range(count))).to(dtype)
    with torch.device("meta"):
        fused = nn.Sequential(*(FusedBlock(width, hidden) for _ in range(count)))
    fused.load_state_dict(plain.state_dict(keep_vars=True), strict=True, assign=True)
    return plain, fused


@dataclass(frozen=True)
class Group:
    """Cases that are alike: their name, what PyTorch runs, and which time is taken.

    With `compiles`, both calls are of functions that torch.compile compiled.
    """

    name: str
    rival: str
    time: str = HOST
    needs_grad: bool = False
    compiles: bool = False


def workload_of(group: Group, pytorch: Function, cutfuse: Function, tensors: Sequence[Tensor]) -> Workload:
    """Both functions on the same tensors, compiled for these sizes where the group is; exact is PyTorch's in fp64."""
    own, other = (in_its_way(group, function) for function in (pytorch, cutfuse))
    return Workload(tuple(tensors), own, other, exact_of(pytorch, tensors))


def in_its_way(group: Group, function: Function) -> Function:
    """The function as the group calls it: compiled for these sizes, or as it is."""
    return torch.compile(function, fullgraph=True, dynamic=False) if group.compiles else function


NAMES = (PYTORCH, FUSED)
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
LAYERS = Group(f"{LAYER_COUNT} compiled layers with gelu", "torch.compile", compiles=True)
FORWARD = Group("blocks, forward", "eager", WHOLE)
TRAINING_BLOCKS = Group("blocks, training", "eager", WHOLE, needs_grad=True)
COMPILED_FORWARD = Group("compiled blocks, forward", "torch.compile", WHOLE, compiles=True)


def case_of(
    group: Group, shape: str, precision: str, build: Callable[[torch.device], Workload], variant: str = ""
) -> Case:
    """One shape of a group."""
    key, seconds = (group.name, variant, shape, precision), COMPILE_S if group.compiles else CALL_S
    return launch_case(key, build, NAMES, turn=group.time, seconds=seconds, needs_grad=group.needs_grad)


@dataclass(frozen=True)
class Pair:
    """A group's functions, PyTorch's and cutfuse's, of the same tensors. `axes`: how many of M, N, K these have."""

    group: Group
    pytorch: Function
    cutfuse: Function
    tensors: Callable[[Shape, str, torch.device], list[Tensor]]
    precisions: tuple[str, ...] = ("bf16",)
    axes: int = 3

    def build(self, shape: Shape, precision: str, device: torch.device) -> Workload:
        """Both on tensors of `shape` (M, N, K)."""
        return workload_of(self.group, self.pytorch, self.cutfuse, self.tensors(shape, precision, device))

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
    Pair(GELU, linear_gelu, fused_linear_gelu, layer_tensors),
    Pair(
        RESIDUAL,
        lambda x, weight, bias, residual: torch.relu(F.linear(x, weight, bias)) + residual,
        lambda x, weight, bias, residual: cutfuse.linear(
            x, weight, bias, epilogue=lambda z, r: torch.relu(z) + r, operands=(residual,)
        ),
        lambda *layer: [*layer_tensors(*layer), result_tensor(*layer)],
    ),
    Pair(
        ROW_SUM,
        lambda x, weight, bias: F.gelu(F.linear(x, weight, bias)).sum(-1),
        lambda x, weight, bias: cutfuse.linear(x, weight, bias, epilogue=lambda z: F.gelu(z), reduce="sum"),
        layer_tensors,
    ),
    Pair(BARE, BARE_LINEAR, FUSED_LINEAR, product_tensors, ("bf16", "fp16")),
    Pair(
        ONE_OP,
        lambda x: torch.sigmoid(x),
        lambda x: cutfuse.pointwise(torch.sigmoid, x),
        single_tensor,
        ANY_FLOAT,
        axes=2,
    ),
    Pair(
        THREE_OPS,
        lambda x, operand: torch.sigmoid(x) * operand + x,
        lambda x, operand: cutfuse.pointwise(lambda v, u: torch.sigmoid(v) * u + v, x, operand),
        lambda *layer: [*single_tensor(*layer), result_tensor(*layer)],
        ANY_FLOAT,
        axes=2,
    ),
    Pair(SUM, lambda x: torch.sum(x, 1), lambda x: cutfuse.sum(x, 1), single_tensor, ANY_FLOAT, axes=2),
    Pair(TRAINING, training_step(linear_gelu), training_step(fused_linear_gelu), training_tensors, ANY_FLOAT),
)
DRAWN_PAIRS = (
    Pair(DRAWN_GELU, linear_gelu, fused_linear_gelu, layer_tensors, ("fp32",)),
    Pair(DRAWN_BARE, BARE_LINEAR, FUSED_LINEAR, product_tensors, ("fp32",)),
)
LAYERS_PAIR = Pair(LAYERS, repeated(linear_gelu), repeated(fused_linear_gelu), repeated_tensors)


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

    def build(self, group: Group, device: torch.device) -> Workload:
        """Both stacks, with the same parameters, in bf16."""
        plain, fused = build_stacks(self.count, self.width, self.hidden, PRECISIONS["bf16"].dtype, device)
        x, gradient = (random_tensor((self.rows, self.width), "bf16", device, seed) for seed in (1, 2))
        wide = copy.deepcopy(plain).double()
        if not group.needs_grad:
            return Workload((x,), in_its_way(group, plain), in_its_way(group, fused), exact_of(wide, [x]))

        def step_of(stack: nn.Module) -> Function:
            parameters = tuple(stack.parameters())

            def step(x: Tensor, gradient: Tensor) -> Result:
                y = stack(x)
                return y, *torch.autograd.grad(y, parameters, gradient)

            return step

        return Workload((x, gradient), step_of(plain), step_of(fused), exact_of(step_of(wide), [x, gradient]))


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


EFFORT, QUICK_EFFORT = Effort(0.6, 30, 300), Effort(0.08, 10, 60)
SMALL_STACK, LARGE_STACK = (stack.label for stack in STACKS)


over_pytorch = over((FUSED,), (PYTORCH,))


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


cases_table = table_of("Every case", {"ratio": ratio_of(over_pytorch), **times_of({name: name for name in NAMES})})
SUITE = Suite(
    name="host",
    cases=host_suite,
    goals=GOALS,
    contenders=NAMES,
    tables=(cases_table,),
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
