"""The cases of every suite: shapes, precisions, the least work that each needs, and the targets it is held to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import workloads
from bench.ceilings import Work
from bench.workloads import PRECISIONS, Chain, Workload

# Targets are stated for this card and the full sizes; elsewhere the verdict column stays empty.
TARGET_DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class Target:
    """cutfuse's time over that of `against` ("compile": the faster torch.compile, or "mm") is to be `at_most`."""

    against: str
    at_most: float


AT_PAR = Target("compile", 1.02)
NEAR_PRODUCT = Target("mm", 1.06)


@dataclass(frozen=True)
class Case:
    """One row of the table. `build` makes the tensors on a device; nothing is allocated before.

    `contenders`: which of the run's take part, all by default. `effort`: the share of a case's time that it is given.
    """

    group: str
    variant: str
    shape: str
    precision: str
    work: Work
    build: Callable[[torch.device], Workload]
    targets: tuple[Target, ...] = ()
    contenders: tuple[str, ...] | None = None
    effort: float = 1.0

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        return " ".join(part for part in (self.group, self.variant, self.shape, self.precision) if part)


Shape = tuple[int, ...]


def product_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product whose whole result is written."""
    (m, k), n = shape, arguments[1]
    return Work((m * k + n * k) * element, m * n * element, 2 * m * n * k)


def product_row_sum_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """A product of which only one number a row is written."""
    (m, k), n = shape, arguments[1]
    return Work((m * k + n * k) * element, m * element, 2 * m * n * k)


def affine_row_sum_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """Row sums of a product that is only scaled need two matrix-vector products: memory, no arithmetic to speak of."""
    (m, k), n = shape, arguments[1]
    return Work((m * k + n * k) * element, m * element)


def stream_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """One read and one write of each element."""
    del arguments
    return Work(math.prod(shape) * element, math.prod(shape) * element)


def reduce_work(shape: Shape, arguments: tuple[Any, ...], element: int) -> Work:
    """One read of each element, the dimension `arguments[0]` written as one."""
    return Work(math.prod(shape) * element, math.prod(shape) // shape[arguments[0]] * element)


@dataclass(frozen=True)
class Model:
    """A reference model: x's shape and the constructor's arguments at both sizes, and what follows its product."""

    name: str
    full: tuple[Shape, tuple[Any, ...]]
    small: tuple[Shape, tuple[Any, ...]]
    tail: Callable[[Tensor], Tensor]
    work: Callable[[Shape, tuple[Any, ...], int], Work]
    precisions: tuple[str, ...]
    targets: dict[str, tuple[Target, ...]] = field(default_factory=dict)

    def targets_at(self, precision: str) -> tuple[Target, ...]:
        """The targets at `precision`: at par with torch.compile, unless one of its own asks for more."""
        own = self.targets.get(precision, ())
        return own if any(target.against == "compile" for target in own) else (AT_PAR, *own)


ALL_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
NO_PRODUCT_PRECISIONS = ("fp32", "bf16", "fp16")
MODELS = (
    Model(
        "LinearSigmoidSum",
        full=((128, 32768), (32768, 32768)),
        small=((32, 1024), (1024, 1024)),
        tail=lambda z: torch.sigmoid(z).sum(1, keepdim=True),
        work=product_row_sum_work,
        precisions=ALL_PRECISIONS,
        targets={"bf16": (NEAR_PRODUCT,)},
    ),
    Model(
        "Sigmoid",
        full=((4096, 393216), ()),
        small=((256, 8192), ()),
        tail=torch.sigmoid,
        work=stream_work,
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmDivideSumScale",
        full=((1024, 8192), (8192, 8192, 1.5)),
        small=((128, 512), (512, 512, 1.5)),
        tail=lambda z: (z / 2).sum(1, keepdim=True) * 1.5,
        work=affine_row_sum_work,
        precisions=ALL_PRECISIONS,
        targets={"fp32": (Target("compile", 1 / 15),), "bf16": (Target("compile", 1 / 3),)},
    ),
    Model(
        "SumReduction",
        full=((128, 4096, 4095), (1,)),
        small=((8, 512, 511), (1,)),
        tail=lambda x: x.sum(1, keepdim=True),
        work=reduce_work,
        precisions=NO_PRODUCT_PRECISIONS,
    ),
    Model(
        "GemmSigmoidScaleResidual",
        full=((1024, 8192), (8192, 8192, 2.0)),
        small=((128, 512), (512, 512, 2.0)),
        tail=lambda z: torch.sigmoid(z) * 2.0 + z,
        work=product_work,
        precisions=ALL_PRECISIONS,
        targets={"bf16": (NEAR_PRODUCT,)},
    ),
)

CHAINS = (
    Chain("none"),
    Chain("relu", torch.relu),
    Chain("z+2*sigmoid(z)", lambda z: z + 2.0 * torch.sigmoid(z)),
    Chain("six ops", lambda z: torch.tanh((F.silu(z) * 1.5).clamp(-1.0, 2.0)) * 0.5 + 0.25),
    Chain("relu*0.5+residual", lambda z, r: torch.relu(z) * 0.5 + r, ("matrix",)),
    Chain("sum of z+2*sigmoid(z)", lambda z: z + 2.0 * torch.sigmoid(z), reduce="sum"),
)
LINEAR_SHAPES = (  # M x N x K
    (1024, 8192, 8192),
    (128, 32768, 32768),
    (4096, 4096, 4096),
    (4096, 16384, 4096),
    (2048, 2048, 2048),
    (8192, 1024, 1024),
    (512, 4096, 4096),
    (1024, 4096, 1024),
    (256, 8192, 8192),
)
LINEAR_SMALL = ((256, 512, 512), (64, 1024, 1024))
LINEAR_QUICK = ((1024, 8192, 8192), (2048, 2048, 2048), (512, 4096, 4096))

REDUCE_SHAPES = (  # shape, dimension, reduction, prologue, precisions
    ((128, 4096, 4095), 1, "sum", None, ("fp32", "bf16")),
    ((1048576, 128), 1, "sum", None, ("fp32", "bf16")),
    ((4194304, 33), 1, "sum", None, ("bf16",)),
    ((8192, 8192), 1, "sum", None, ("fp32", "bf16")),
    ((8192, 8192), 0, "sum", None, ("fp32", "bf16")),
    ((3, 16777216, 7), 1, "sum", None, ("fp32",)),
    ((8192, 8192), 1, "amax", None, ("fp32",)),
    ((8192, 8192), 1, "logsumexp", None, ("fp32", "bf16")),
    ((8192, 8192), 1, "mean", torch.sigmoid, ("fp32", "bf16")),
)
REDUCE_SMALL = (
    ((16, 256, 255), 1, "sum", None, ("fp32", "bf16")),
    ((4096, 33), 1, "sum", None, ("bf16",)),
    ((512, 512), 0, "sum", None, ("fp32",)),
    ((512, 512), 1, "logsumexp", None, ("fp32",)),
    ((512, 512), 1, "mean", torch.sigmoid, ("fp32",)),
)

POINTWISE_CHAINS = (
    Chain("sigmoid", torch.sigmoid),
    Chain("six ops", CHAINS[3].function),
    Chain("relu*0.5+residual", CHAINS[4].function, ("matrix",)),
    Chain("gelu(x)*scale+shift", lambda x, scale, shift: F.gelu(x) * scale + shift, ("row vector", "row vector")),
)
POINTWISE_SHAPES = ((4096, 393216), (8192, 8192), (1024, 8192))
POINTWISE_SMALL = ((256, 4096), (63, 1001))


def random_tensor(shape: Shape, precision: str, device: torch.device, seed: int) -> Tensor:
    """Normal values. Zeros would run up to 13% faster on an H200: they toggle fewer bits, which saves power."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=PRECISIONS[precision].dtype, device=device, generator=generator)


def element_size(precision: str) -> int:
    """Bytes of one element."""
    return PRECISIONS[precision].dtype.itemsize


def dimensions(shape: Shape) -> str:
    """A shape as the table prints it."""
    return "x".join(str(size) for size in shape)


def build_reference(
    model: Model, shape: Shape, arguments: tuple[Any, ...], precision: str, device: torch.device
) -> Workload:
    """A reference model at one size and precision."""
    torch.manual_seed(0)
    x = random_tensor(shape, precision, device, seed=1)
    return workloads.reference_model(model.name, arguments, model.tail, x, device)


def reference_cases(small: bool, quick: bool) -> Iterator[Case]:
    """The reference models. fp16, for which no target of its own is stated, comes last: it loses compilers first."""
    del quick
    for precision in ("fp32", "bf16", "tf32", "fp16"):
        for model in MODELS:
            if precision not in model.precisions or (small and precision == "tf32"):
                continue
            shape, arguments = model.small if small else model.full
            printed = (shape[0], arguments[1], shape[1]) if len(arguments) > 1 else shape
            yield Case(
                model.name,
                "",
                dimensions(printed),
                precision,
                model.work(shape, arguments, element_size(precision)),
                partial(build_reference, model, shape, arguments, precision),
                model.targets_at(precision),
            )


def operand_tensors(chain: Chain, shape: Shape, precision: str, device: torch.device) -> tuple[Tensor, ...]:
    """The chain's operands for a result of `shape`."""
    shapes = [shape if kind == "matrix" else shape[-1:] for kind in chain.operands]
    return tuple(random_tensor(shape, precision, device, seed=10 + index) for index, shape in enumerate(shapes))


def build_linear(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """A product of `shape` (M, N, K) with `chain` behind it; the weight is scaled so that z is about normal."""
    m, n, k = shape
    x = random_tensor((m, k), precision, device, seed=1)
    weight = random_tensor((n, k), precision, device, seed=2).mul_(k**-0.5)
    bias = random_tensor((n,), precision, device, seed=3)
    return workloads.linear(x, weight, bias, operand_tensors(chain, (m, n), precision, device), chain)


def linear_cases(small: bool, quick: bool) -> Iterator[Case]:
    """Products of the shapes above with each chain behind them; quick: three shapes, three chains, bf16."""
    shapes = LINEAR_SMALL if small else LINEAR_QUICK if quick else LINEAR_SHAPES
    precisions = ("bf16", "fp16", "fp32") if small else ("bf16", "fp16", "tf32")
    chains = (CHAINS[0], CHAINS[3], CHAINS[5]) if quick else CHAINS
    for shape, precision, chain in itertools.product(shapes, precisions[:1] if quick else precisions, chains):
        m, n, k = shape
        element = element_size(precision)
        read = (m * k + n * k + n + len(chain.operands) * m * n) * element
        work = Work(read, (m if chain.reduce else m * n) * element, 2 * m * n * k)
        build = partial(build_linear, shape, chain, precision)
        yield Case("linear", chain.label, dimensions(shape), precision, work, build)


def build_reduce(
    shape: Shape, dim: int, op: str, prologue: Callable[[Tensor], Tensor] | None, precision: str, device: torch.device
) -> Workload:
    """A reduction of normal values of `shape`."""
    return workloads.reduction(random_tensor(shape, precision, device, seed=1), dim, op, prologue)


def reduce_cases(small: bool, quick: bool) -> Iterator[Case]:
    """Reductions of one tensor; quick: the first precision of each."""
    for shape, dim, op, prologue, precisions in REDUCE_SMALL if small else REDUCE_SHAPES:
        for precision in precisions[:1] if quick else precisions:
            variant = f"dim {dim}" if prologue is None else f"dim {dim} of {prologue.__name__}"
            work = reduce_work(shape, (dim,), element_size(precision))
            build = partial(build_reduce, shape, dim, op, prologue, precision)
            yield Case(op, variant, dimensions(shape), precision, work, build)


def build_pointwise(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """`chain` over normal values of `shape`."""
    x = random_tensor(shape, precision, device, seed=1)
    return workloads.pointwise(x, operand_tensors(chain, shape, precision, device), chain)


def pointwise_cases(small: bool, quick: bool) -> Iterator[Case]:
    """One read and one write of each element; quick: bf16 only."""
    shapes = POINTWISE_SMALL if small else POINTWISE_SHAPES
    precisions = ("bf16",) if quick else NO_PRODUCT_PRECISIONS
    for shape, precision, chain in itertools.product(shapes, precisions, POINTWISE_CHAINS):
        matrix_bytes = math.prod(shape) * element_size(precision)
        work = Work((1 + chain.operands.count("matrix")) * matrix_bytes, matrix_bytes)
        build = partial(build_pointwise, shape, chain, precision)
        yield Case("pointwise", chain.label, dimensions(shape), precision, work, build)
