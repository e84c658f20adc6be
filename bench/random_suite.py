"""The random suite: layers drawn anew for each seed, forwards, with a row sum and in training, beside eager."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.chains import COLUMN, DRAWS, FULL, ROW, SCALAR, Chain, Operand, drawn_chain
from bench.goals import MEAN, WORST, cases_with, over, value_of
from bench.host_suite import (
    EFFORT,
    NAMES,
    QUICK_EFFORT,
    Group,
    case_of,
    cases_table,
    over_pytorch,
    workload_of,
)
from bench.launches import FUSED, PYTORCH
from bench.suite import Case, Figures, Goal, Session, Suite
from bench.timing import IN_A_ROW, TURNS, Launch, spread_of_turns, wait_for
from bench.workloads import (
    Function,
    Range,
    Shape,
    Workload,
    dimensions,
    drawn_shapes,
    note_wrong,
    parameter_tensors,
    random_tensor,
    relative_error,
    training_step,
)

FORWARD = Group("forward", "eager", IN_A_ROW)
ROW_SUM = Group("forward with a row sum", "eager", IN_A_ROW)
TRAINING = Group("training step", "eager", IN_A_ROW, needs_grad=True)
PRECISIONS = {"16 bits": ("bf16", "fp16"), "fp32": ("fp32",)}
NEW_CHAIN = Group("a new chain until its epilogue is compiled", "eager", IN_A_ROW)
MOST_GFLOP = 40.0  # of a new chain's product
NEW_CALLS, MOST_ROUNDS = 10, 50
LIMITS = {FORWARD: (0.40, 0.40), ROW_SUM: (0.60, 0.65), TRAINING: (0.70, 0.75)}  # of the mean, by PRECISIONS
WORST_AT_MOST = 1.05

ROWS, SIZES = Range(1, 4096), Range(128, 4096)  # M; N and K
SMALL_ROWS, SMALL_SIZES = Range(1, 16), Range(16, 64)
# With positive operands and arriving gradients, neither sums of rows nor the gradients of what is broadcast cancel to
# nothing, of which the relative error would say nothing.
CHAINS = (
    Chain("gelu", 1, (), ("return F.gelu(z)",)),
    Chain("scaled silu", 2, (), ("return F.silu(z * 1.5)",)),
    Chain("softplus, tanh, z", 3, (), ("return torch.tanh(F.softplus(z)) * z",)),
    Chain("residual", 1, (Operand(FULL),), ("return z + a",)),
    Chain("gelu, residual", 2, (Operand(FULL),), ("return F.gelu(z) + a",)),
    Chain("gate", 2, (Operand(FULL),), ("return torch.sigmoid(z) * a",)),
    Chain("shifted relu", 2, (Operand(ROW),), ("return torch.relu(z + a)",)),
    Chain("gelu, row scale", 2, (Operand(ROW),), ("return F.gelu(z) * a",)),
    Chain("silu, row scale, z", 3, (Operand(ROW),), ("return F.silu(z) * a + z",)),
    Chain("shifted gelu", 2, (Operand(COLUMN),), ("return F.gelu(z + a)",)),
    Chain("sigmoid, column scale", 2, (Operand(COLUMN),), ("return torch.sigmoid(z) * a",)),
    Chain("gelu, column, z", 3, (Operand(COLUMN),), ("return F.gelu(z) * a + z",)),
    Chain("shift", 1, (Operand(SCALAR),), ("return z + a",)),
    Chain("silu, scalar scale", 2, (Operand(SCALAR),), ("return F.silu(z) * a",)),
    Chain("square, scalar, z", 3, (Operand(SCALAR),), ("return z * z * a + z",)),
)


@dataclass(frozen=True)
class Layer:
    """A linear layer of `shape` (M, N, K) with a chain behind it; x is `[M, K]` or `[B, M / B, K]`.

    transposed: the weight is the transpose of a contiguous `[K, N]`. operand_grads: operands need gradients too, where
    those of x, weight and bias are taken.
    """

    shape: Shape
    chain: Chain
    has_bias: bool
    is_3d: bool
    transposed: bool
    operand_grads: bool

    @property
    def label(self) -> str:
        """What is particular about it, as results have it."""
        traits = {"bias": self.has_bias, "3-D": self.is_3d, "weight.T": self.transposed}
        traits["operand's gradient"] = self.operand_grads
        return ", ".join([self.chain.name, *(name for name, has in traits.items() if has)])

    def tensors(self, precision: str, device: torch.device) -> list[Tensor]:
        """x, the weight as it is stored, the bias where there is one, and the operands."""
        m, n, k = self.shape
        batch = next(count for count in (8, 4, 2, 1) if m % count == 0)
        leading = (batch, m // batch) if self.is_3d else (m,)
        weight, bias = parameter_tensors(self.shape, precision, device, seed=2)
        found = [random_tensor((*leading, k), precision, device, seed=1)]
        found.append(weight.t().contiguous() if self.transposed else weight)
        found += [bias] * self.has_bias
        for operand in self.chain.operands:
            shape = operand.shape(m, n)
            tensor = random_tensor(shape, operand.precision(precision), device, seed=10).abs_().add_(0.5)
            found.append(tensor.reshape(*leading, shape[-1]) if len(shape) == 2 else tensor)
        return found

    def given(
        self, x: Tensor, weight: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Of `tensors`: x, the weight, the bias or None, and the operands."""
        bias, operands = (others[0], others[1:]) if self.has_bias else (None, others)
        return x, weight.t() if self.transposed else weight, bias, operands

    def eager(self, *tensors: Tensor, reduce: str | None = None) -> Tensor:
        """By PyTorch; reduce: "sum" of each row, or None."""
        x, weight, bias, operands = self.given(*tensors)
        y = self.chain.function(F.linear(x, weight, bias), *operands)
        return y.sum(-1) if reduce else y

    def fused(self, *tensors: Tensor, reduce: str | None = None) -> Tensor:
        """By cutfuse."""
        x, weight, bias, operands = self.given(*tensors)
        return cutfuse.linear(x, weight, bias, epilogue=self.chain.function, operands=operands, reduce=reduce)

    def build(self, group: Group, precision: str, device: torch.device) -> Workload:
        """Both ways, and PyTorch's in fp64."""
        reduce = "sum" if group == ROW_SUM else None
        functions: list[Function] = [partial(own, reduce=reduce) for own in (self.eager, self.fused)]
        tensors = self.tensors(precision, device)
        if group.needs_grad:
            count = len(tensors) if self.operand_grads else 2 + self.has_bias
            for tensor in tensors[:count]:
                tensor.requires_grad_()
            gradient = random_tensor((*tensors[0].shape[:-1], self.shape[1]), precision, device, seed=4).abs_()
            tensors.append(gradient)
            functions = [training_step(function, count) for function in functions]
        return workload_of(group, *functions, tensors)


def drawn_layers(group: Group, count: int, rows: Range, sizes: Range, seed: int) -> list[Layer]:
    """Layers of a group at random, the same ones for a seed; each chain has as many of them, give or take one."""
    generator = random.Random(seed)
    layers = []
    for place, shape in enumerate(drawn_shapes(count, rows, sizes, odd_ones=True, seed=seed)):
        if place % len(CHAINS) == 0:
            chains = generator.sample(CHAINS, len(CHAINS))
        chain = chains[place % len(CHAINS)]
        has_bias, is_3d, transposed, operand_grads = (generator.random() < 0.5 for _ in range(4))
        operand_grads &= group.needs_grad and bool(chain.operands)
        layers.append(Layer(shape, chain, has_bias, is_3d, transposed, operand_grads))
    return layers


def time_new(layer: Layer, precision: str, session: Session) -> Figures:
    """The first call of a layer whose chain nobody has called, and calls in a row until it is compiled; beside eager's
    before and after. issued_us: without waiting for the device. first_us: the host's, of the first call."""
    wait, tensors = wait_for(session.device), layer.tensors(precision, session.device)

    def in_a_row(call: Launch, count: int = NEW_CALLS) -> tuple[float, float]:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        issued = time.perf_counter()
        wait()
        return 1e6 * (issued - began) / count, 1e6 * (time.perf_counter() - began) / count

    def figures_of(rounds: list[tuple[float, float]]) -> Figures:
        host, whole = zip(*rounds, strict=True)
        return {**spread_of_turns(whole), "issued_us": statistics.median(host)}

    eager, fused = partial(layer.eager, *tensors), partial(layer.fused, *tensors)
    exact = layer.eager(*(tensor.double() for tensor in tensors))
    eager()
    of_eager = [in_a_row(eager) for _ in range(4)]
    first, _ = in_a_row(fused, 1)
    of_fused = [in_a_row(fused)]
    while len(of_fused) < MOST_ROUNDS and is_compiling():
        of_fused.append(in_a_row(fused))
    of_eager += [in_a_row(eager) for _ in range(4)]
    entry: Figures = {**figures_of(of_fused), "first_us": first}
    note_wrong(entry, relative_error(fused(), exact), precision)
    return {"contenders": {PYTORCH: figures_of(of_eager), FUSED: entry}}


def is_compiling() -> bool:
    """Whether an epilogue is being compiled in the background."""
    try:
        cutfuse.wait(0)
    except TimeoutError:
        return True
    return False


def new_chains(count: int, rows: Range, sizes: Range, seed: int) -> Iterator[Case]:
    """Layers with chains of operations at random, which no other case has."""
    generator = random.Random(f"new chains {seed}")
    draws = [draw for draw in DRAWS if draw.ops > 1 and not draw.reduce]
    for number, shape in enumerate(drawn_shapes(count, rows, sizes, odd_ones=False, seed=seed)):
        chain = drawn_chain(f"new-{number:02}", draws[number % len(draws)], generator)
        layer = Layer(shape, chain, number % 2 == 0, number % 3 == 0, False, False)
        precision = ("bf16", "fp32", "fp16", "fp32")[number % 4]
        if 2e-9 * shape[0] * shape[1] * shape[2] <= MOST_GFLOP:
            timed = partial(time_new, layer, precision)
            yield Case(NEW_CHAIN.name, layer.label, dimensions(shape), precision, timed)


def random_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Other layers for each group and precision; 16 bits are bf16 and fp16 in turn. New chains come first."""
    ranges = (SMALL_ROWS, SMALL_SIZES) if small else (ROWS, SIZES)
    count = len(CHAINS) if small or quick else 2 * len(CHAINS)
    yield from new_chains(count, *ranges, seed)
    kinds = list(product(LIMITS, PRECISIONS.values()))
    for place, (group, precisions) in enumerate(kinds):
        for number, layer in enumerate(drawn_layers(group, count, *ranges, seed=len(kinds) * seed + place)):
            precision = precisions[number % len(precisions)]
            build = partial(layer.build, group, precision)
            yield case_of(group, dimensions(layer.shape), precision, build, f"{number:02} {layer.label}")


def goals() -> Iterator[Goal]:
    """The mean and the worst of each group, in 16 bits and in fp32; and of new chains."""
    covers = cases_with(group=NEW_CHAIN.name)
    host = over((FUSED,), (PYTORCH,), "issued_us")
    yield Goal(f"{NEW_CHAIN.name}, on the host", NEW_CHAIN.rival, covers, host, 1.0)
    yield Goal(NEW_CHAIN.name, NEW_CHAIN.rival, covers, over_pytorch, 1.3)
    first = value_of(FUSED, "first_us", 1e3)
    yield Goal("the first call of a new chain", "", covers, first, 2.0, MEAN, unit=" ms")
    for group, limits in LIMITS.items():
        for (bits, precisions), limit in zip(PRECISIONS.items(), limits, strict=True):
            covers = cases_with(group=group.name, precision=precisions)
            for measure, at_most in ((MEAN, limit), (WORST, WORST_AT_MOST)):
                yield Goal(f"{group.name}, {bits}", group.rival, covers, over_pytorch, at_most, measure)


SUITE = Suite(
    name="random",
    cases=random_cases,
    goals=tuple(goals()),
    contenders=NAMES,
    tables=(cases_table,),
    about=(
        f"The whole time of {TURNS[IN_A_ROW].timed_calls} calls in a row until the device is done with the last one, "
        "over their number and over eager's; medians in microseconds, the two taking turns in random order, kernels "
        "compiled before.",
        f"M of {ROWS.least} to {ROWS.most}, N and K of {SIZES.least} to {SIZES.most}; {len(CHAINS)} chains with no "
        "operand, or one as large as the result, a row, a column or a scalar; drawn by the seed.",
        f"New chains are of random operations, behind products of at most {MOST_GFLOP:.0f} GFLOP: the first call, "
        f"and then {NEW_CALLS} calls in a row until the epilogue is compiled.",
    ),
    effort=EFFORT,
    quick_effort=QUICK_EFFORT,
    time_limit_s=540.0,
)
