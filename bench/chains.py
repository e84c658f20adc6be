"""Chains as text, of which every contender gets one Python function: written by hand, and drawn at random.

A draw is tame enough that every contender computes it without large errors. It keeps an interval that holds the chain's
value while z and the operands lie within `NORMAL`, and takes an operation only where it changes something, where the
value stays small and varies, and where errors do not grow much.

Then what contenders run: tensors, the calls with a chain behind or before them, and their results in fp64.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.launches import COMPILE, MODES, POINTWISE, PRODUCT, in_mode
from bench.workloads import (
    PRECISIONS,
    REDUCTIONS,
    Function,
    Run,
    Shape,
    Workload,
    exact_of,
    fused_linear_gelu,
    linear_gelu,
    product_reference,
    product_tensors,
    random_tensor,
    training_step,
    training_tensors,
)
from cutfuse.epilogue import op_table
from cutfuse.epilogue.table import Op

FULL, ROW, COLUMN, SCALAR = "full", "row", "column", "scalar"
FP32 = torch.float32


@dataclass(frozen=True)
class Operand:
    """A tensor beside z `[M, N]`: of the same shape, a row `[N]`, a column `[M, 1]` or a scalar `[]`.

    One that is mixed has another type: fp32 behind a product of 16 bits, and bf16 behind one of 32.
    """

    kind: str
    is_mixed: bool = False

    @property
    def label(self) -> str:
        """As results have it."""
        return self.kind + " mixed" * self.is_mixed

    def shape(self, m: int, n: int) -> Shape:
        """Its shape beside z."""
        return {FULL: (m, n), ROW: (n,), COLUMN: (m, 1), SCALAR: ()}[self.kind]

    def precision(self, product: str) -> str:
        """The precision that names its type, behind a product of precision `product`."""
        if not self.is_mixed:
            return product
        return "bf16" if PRECISIONS[product].dtype == FP32 else "fp32"


@dataclass(frozen=True)
class Chain:
    """What follows a product: the lines of a function of z and the operands a, b, c, and a reduction of each row.

    `ops`: how many operations it has, without casts and the reduction.
    """

    name: str
    ops: int
    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    reduce: str | None = None

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """The function: of z and the operands."""
        parameters = ", ".join(["z", *"abc"[: len(self.operands)]])
        source = f"def chain({parameters}):\n" + "".join(f"    {line}\n" for line in self.lines)
        file = f"<chain {self.name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
        namespace: dict[str, Any] = {"torch": torch, "F": F, "__name__": __name__}
        exec(compile(source, file, "exec"), namespace)
        return namespace["chain"]

    @property
    def has_full(self) -> bool:
        """Whether an operand is as large as the result."""
        return any(operand.kind == FULL for operand in self.operands)

    @property
    def text(self) -> str:
        """Its lines as tables print them."""
        return "; ".join(self.lines).replace("torch.", "").replace("F.", "")


GELU_WRITTEN_OUT = (
    "u = 0.7978845608 * (z + 0.044715 * z * z * z)",
    "y = 0.5 * z * (1.0 + torch.tanh(u))",
)
ROWS_AND_FULL = (Operand(ROW), Operand(ROW), Operand(FULL))
HAND_WRITTEN = (
    Chain("relu", 1, (), ("return torch.relu(z)",)),
    Chain("residual", 1, (Operand(FULL),), ("return z + a",)),
    Chain("column scale", 1, (Operand(COLUMN),), ("return z * a",)),
    Chain("temperature", 1, (Operand(SCALAR),), ("return z * a",), "logsumexp"),
    Chain("gelu, column, z", 3, (Operand(COLUMN),), ("return F.gelu(z) * a + z",)),
    Chain("affine, residual", 3, ROWS_AND_FULL, ("return z * a + b + c",)),
    Chain("gelu, z", 3, (), ("return F.gelu(z * 2) + z",), "sum"),
    Chain("silu, scale in fp32", 3, (Operand(ROW, is_mixed=True),), ("return (F.silu(z) * a + z).to(z.dtype)",)),
    Chain("highway", 6, (Operand(FULL),), ("s = torch.sigmoid(z)", "return torch.tanh(s * a + (1 - s) * z)")),
    Chain("squash", 6, (), ("v = torch.tanh(torch.clamp(F.silu(z) * 0.5, -1.0, 1.0))", "return v + 0.1 + z")),
    Chain("gelu written out", 12, ROWS_AND_FULL, (*GELU_WRITTEN_OUT, "return y * a + b + c")),
    Chain("gelu written out, relu", 12, (), (*GELU_WRITTEN_OUT, "return torch.relu(y * 1.5 + 0.25)"), "sum"),
)
# Of what is no product: six Light ops of ops.def, and two Special ones besides.
LIGHT_LINES = ("v = torch.relu(z * 1.5 + 0.25)", "v = torch.minimum(v, a) * 0.75")
LIGHT = Chain("six Light ops", 6, (Operand(FULL),), (*LIGHT_LINES, "return F.hardswish(v)"))
LIGHT_ALONE = Chain(
    "six Light ops",
    6,
    (),
    ("v = F.leaky_relu(z * 1.5 + 0.25, 0.1)", "v = torch.clamp(v, -4.0, 4.0) * 0.75", "return F.hardswish(v)"),
)
SPECIAL = Chain(
    "six Light ops, two Special",
    8,
    (Operand(FULL),),
    (*LIGHT_LINES, "v = F.hardswish(v)", "return F.silu(torch.sigmoid(v))"),
)


# Operations without jumps, and without the long functions that few chains have.
UNARY = (
    *("abs", "square", "relu", "relu6", "leaky_relu", "clamp", "hardtanh", "hardsigmoid", "hardswish"),
    *("exp", "exp2", "expm1", "log1p", "sqrt", "sin", "cos", "tanh", "erf", "sigmoid", "logsigmoid", "silu", "mish"),
    *("gelu", "gelu_tanh", "softplus", "softsign", "elu", "selu", "celu"),
)
WITH_OPERAND = ("add", "sub", "mul", "mul", "maximum", "minimum")
# Of z and a function of z: the larger of the two may be z itself, and a difference may be nothing but rounding.
WITH_Z = ("add", "mul")
WITH_NUMBER = ("add", "sub", "mul")
NUMBERS = (0.25, 0.5, 0.75, 1.25, 1.5)
PARAMETERS = {"clamp": "min=-2.0, max=3.0", "leaky_relu": "negative_slope=0.1"}

Interval = tuple[float, float]
NORMAL: Interval = (-6.0, 6.0)  # holds all but two in 10**9 of normal values
LARGEST, NARROWEST = 40.0, 0.5
# How much an operation may make of its argument's error, both relative to the width of their intervals.
STEEPEST = 8.0
LEAST_CHANGE = 0.1  # by an operation: relu of what is positive is none
POINTS = 1001


@dataclass(frozen=True)
class Draw:
    """What a drawn chain has to have."""

    ops: int
    operands: tuple[Operand, ...] = ()
    reduce: str | None = None


MIXED_FULL, MIXED_ROW = Operand(FULL, is_mixed=True), Operand(ROW, is_mixed=True)
DRAWS = (
    Draw(1, (Operand(ROW),), "amax"),
    Draw(3, (), "amax"),
    Draw(3, (Operand(FULL),)),
    Draw(3, (Operand(COLUMN), Operand(ROW), Operand(FULL))),
    Draw(6),
    Draw(6, (), "logsumexp"),
    Draw(6, (MIXED_FULL,)),
    Draw(6, (Operand(SCALAR), Operand(ROW), Operand(COLUMN)), "sum"),
    Draw(6, (Operand(COLUMN), Operand(ROW), Operand(FULL))),
    Draw(12),
    Draw(12, (Operand(COLUMN),)),
    Draw(12, (Operand(FULL), MIXED_ROW, Operand(SCALAR))),
)


def spelling(op: Op, arguments: Sequence[str]) -> str:
    """An operation as a user writes it."""
    if op.infix:
        return f" {op.infix} ".join(arguments)
    literals = [f"{name}={value!r}" for name, value in op.literals]
    given = [*arguments, *literals, *([PARAMETERS[op.name]] if op.name in PARAMETERS else [])]
    return f"{op.path.replace('torch.nn.functional', 'F')}({', '.join(given)})"


def evaluator(op: Op) -> Callable[..., torch.Tensor]:
    """The operation as `spelling` has it, of tensors."""
    names = "abc"[: op.arity]
    scope = {"torch": torch, "F": torch.nn.functional}
    return eval(f"lambda {', '.join(names)}: {spelling(op, names)}", scope)


def image(op: Op, interval: Interval) -> Interval | None:
    """The values of a unary operation over an interval; None where it is not tame there."""
    low, high = interval
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    y = evaluator(op)(x)
    if not y.isfinite().all():
        return None
    least, most = y.min().item(), y.max().item()
    slope = (y.diff() / x.diff()).abs().max().item()
    if (
        (y - x).abs().max() < LEAST_CHANGE
        or not is_tame((least, most))
        or slope * (high - low) > STEEPEST * (most - least)
    ):
        return None
    return least, most


def combined(op: Op, interval: Interval, other: Interval) -> Interval | None:
    """The values of a binary operation over two intervals: its extremes are at their ends."""
    pairs = [torch.tensor(ends, dtype=torch.float64) for ends in (interval, other)]
    y = evaluator(op)(pairs[0][:, None], pairs[1][None, :])
    found = y.min().item(), y.max().item()
    return found if is_tame(found) else None


def is_tame(interval: Interval) -> bool:
    """Whether values stay small, and vary."""
    low, high = interval
    return max(abs(low), abs(high)) <= LARGEST and high - low >= NARROWEST


def steps_of(draw: Draw, generator: random.Random) -> Iterator[str]:
    """The operations of a drawn chain, each of v, the one before, and the first of z."""
    interval, waiting, value = NORMAL, list("abc"[: len(draw.operands)]), "z"
    for left in range(draw.ops, 0, -1):
        found, taken = None, ""
        while found is None:
            choice = generator.random()
            taken = waiting[0] if choice < len(waiting) / left else ""
            # z and a number, or itself, would be a poor beginning.
            is_unary = not taken and (value == "z" or choice < 0.7)
            names = UNARY if is_unary else WITH_OPERAND if taken else WITH_NUMBER if choice < 0.85 else WITH_Z
            op = op_table().op(generator.choice(names))
            if is_unary:
                text, found = spelling(op, (value,)), image(op, interval)
                continue
            other, values = taken or "z", NORMAL
            if names is WITH_NUMBER:
                number = generator.choice(NUMBERS)
                other, values = str(number), (number, number)
            text, found = spelling(op, (value, other)), combined(op, interval, values)
        interval, value = found, "v"
        waiting = waiting[1:] if taken else waiting
        yield text


def drawn_chain(name: str, draw: Draw, generator: random.Random) -> Chain:
    """A chain of operations at random. One with a mixed operand ends with a cast, as a layer of a model does."""
    lines = [f"v = {text}" for text in steps_of(draw, generator)]
    is_mixed = any(operand.is_mixed for operand in draw.operands)
    return Chain(name, draw.ops, draw.operands, (*lines, f"return v{'.to(z.dtype)' * is_mixed}"), draw.reduce)


def drawn_chains(seed: int) -> list[Chain]:
    """One for each of `DRAWS`, always the same ones for a seed."""
    generator = random.Random(seed)
    return [drawn_chain(f"drawn-{place:02}", draw, generator) for place, draw in enumerate(DRAWS, 1)]


def operands_of(chain: Chain, m: int, n: int, precision: str, device: torch.device) -> tuple[Tensor, ...]:
    """The chain's operands beside z `[M, N]`."""
    return tuple(
        random_tensor(operand.shape(m, n), operand.precision(precision), device, seed=10 + index)
        for index, operand in enumerate(chain.operands)
    )


def finished(chain: Chain, y: Tensor) -> Tensor:
    """The chain's reduction of what its function gives."""
    return y if chain.reduce is None else REDUCTIONS[chain.reduce](y, -1)


def linear(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """A product of `shape` (M, N, K) with the chain behind it; the weight is scaled so that z is about normal."""
    m, n, _ = shape
    x, weight = product_tensors(shape, precision, device)
    operands = operands_of(chain, m, n, precision, device)

    def eager(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return finished(chain, chain.function(F.linear(x, weight), *operands))

    def fused(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, epilogue=chain.function, operands=operands, reduce=chain.reduce)

    def chain_alone() -> Run:
        z = torch.mm(x, weight.t())
        call = in_mode("now", lambda: cutfuse.pointwise(chain.function, z, *operands))
        return Run(call, exact_of(chain.function, (z, *operands)))

    def product_alone() -> Run:
        return Run(lambda: cutfuse.linear(x, weight), product_reference(x, weight))

    tensors = (x, weight, *operands)
    return Workload(
        arguments=tensors,
        eager=eager,
        fused=fused,
        exact=exact_of(eager, tensors),
        product=(x, weight),
        extras={POINTWISE: chain_alone, PRODUCT: product_alone},
    )


def pointwise(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """`cutfuse.pointwise` of the chain over x of `shape`."""
    x, *operands = random_tensor(shape, precision, device, seed=1), *operands_of(chain, *shape, precision, device)
    fused = partial(cutfuse.pointwise, chain.function)
    return Workload((x, *operands), chain.function, fused, exact_of(chain.function, (x, *operands)))


def reduction(shape: Shape, dim: int, op: str, chain: Chain, precision: str, device: torch.device) -> Workload:
    """`cutfuse.reduce` over a dimension of x with the chain before it."""
    x = random_tensor(shape, precision, device, seed=1)

    def eager(x: Tensor) -> Tensor:
        return REDUCTIONS[op](chain.function(x), dim)

    def fused(x: Tensor) -> Tensor:
        return cutfuse.reduce(x, dim, op, prologue=chain.function)

    return Workload((x,), eager, fused, exact_of(eager, (x,)))


@torch.enable_grad()
def gradient_call(function: Function, x: Tensor, arriving: Tensor) -> Callable[[], Tensor]:
    """The gradient of x alone: the forward pass is run here, once."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, arriving, retain_graph=True)[0]


def backward(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """The backward pass of `cutfuse.pointwise` of the chain, which has no operand."""
    x, arriving = (random_tensor(shape, precision, device, seed) for seed in (1, 2))

    fused = partial(cutfuse.pointwise, chain.function)

    def gradient(x: Tensor, arriving: Tensor) -> Tensor:
        return gradient_call(chain.function, x, arriving)()

    exact = exact_of(gradient, (x, arriving))

    def run_in(mode: str) -> Run:
        """The forward pass is in the mode too."""
        return Run(in_mode(mode, in_mode(mode, gradient_call)(fused, x, arriving)), exact)

    extras = {name: partial(run_in, mode) for name, mode in MODES.items()}
    return Workload((), gradient_call(chain.function, x, arriving), fused, exact, extras=extras)


def training(tensors: Sequence[Tensor], layer: Function, fused_layer: Function) -> Workload:
    """A layer forwards and backwards. `tensors`: the layer's, which need gradients, and the gradient that arrives."""
    arguments, eager = tuple(tensors), training_step(layer)
    exact = exact_of(eager, tensors)

    def compiled() -> Run:
        """It is the layer that is compiled: the compiler frees the graph of a step."""
        step = training_step(torch.compile(layer, fullgraph=True, dynamic=False))
        return Run(partial(step, *arguments), exact)

    return Workload(arguments, eager, training_step(fused_layer), exact, extras={COMPILE: compiled})


def training_of_gelu(shape: Shape, precision: str, device: torch.device) -> Workload:
    """A linear layer and gelu."""
    tensors = training_tensors(shape, precision, device)
    return training(tensors, linear_gelu, fused_linear_gelu)
