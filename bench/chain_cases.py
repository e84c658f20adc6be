"""The chains suite's cases: a stratified draw of products with chains behind them, and a few of what else is fused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from bench import chain_workloads as workloads
from bench.cases import Shape, dimensions, element_size
from bench.ceilings import Work
from bench.chain_contenders import AUTOTUNE, COMPILE, CUTFUSE, EAGER, MM, POINTWISE, PRODUCT
from bench.chain_drawing import drawn_chains
from bench.chain_functions import HAND_WRITTEN, LIGHT, LIGHT_ALONE, SPECIAL, Chain
from bench.chain_workloads import ChainWorkload
from bench.run_files import Shard, title_of

LINEAR, STREAM, BACKWARD, REDUCE, TRAINING = "linear", "pointwise", "backward", "reduce", "training"
MEMORY, START = "memory", "start"
UNTIMED = (MEMORY, START)  # measured in the first process, behind all others

SHAPES: tuple[Shape, ...] = (
    *((4096, 11008, 4096), (12608, 3072, 768), (1536, 6144, 2560), (1024, 8192, 8192), (8192, 8192, 1024)),
    *((16384, 4096, 4096), (2048, 2304, 768), (777, 3080, 1160), (96, 14336, 5120)),
)
SMALL_SHAPES: tuple[Shape, ...] = ((8, 24, 16), (5, 17, 40))
# How many chains each shape has in each precision.
QUOTAS = {"bf16": 4, "fp16": 3, "tf32": 3, "fp32": 3}
SMALL_QUOTAS = {"bf16": 6, "fp32": 6}
SIXTEEN_BITS = ("bf16", "fp16")
AUTOTUNED, QUICK = 24, 16
LARGE_GFLOP = 40.0

STREAM_SHAPES, SMALL_STREAMS = ((8192, 8192), (4096, 11008)), ((16, 24),)
REDUCTIONS = (("sum", 1), ("sum", 0), ("amax", 1))
TRAINING_SHAPES, SMALL_TRAINING = ((12608, 3072, 768), (4096, 8192, 8192)), ((8, 24, 16),)
# Rows, hidden width and width of the blocks that a training step's memory is measured of.
MEMORY_SHAPES = ((12608, 3072, 768), (16384, 4096, 1024), (3152, 1536, 384))
STACK = "12 blocks"
START_SHAPE = (4096, 4096, 4096)
NO_WORK = Work(0, 0)
ONE_CHAIN, MODEL_CHAINS = "one chain", 30
MODEL = f"{MODEL_CHAINS} chains"


@dataclass(frozen=True)
class Case:
    """One row. `build` makes the tensors on a device; nothing is allocated before.

    `work`: what it moves at the least; of a product, its operands alone. `has_full`: one of them is as large as z.
    """

    group: str
    variant: str
    size: Shape
    precision: str
    contenders: tuple[str, ...] = ()
    build: Callable[[torch.device], ChainWorkload] | None = None
    work: Work = NO_WORK
    has_full: bool = False

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        return title_of(self.as_dict())

    @property
    def is_autotuned(self) -> bool:
        """Whether max-autotune takes part, which takes longer than all the others together."""
        return AUTOTUNE in self.contenders

    def as_dict(self) -> dict[str, Any]:
        """What its figures begin with."""
        shape = dimensions(self.size)
        own = {"group": self.group, "variant": self.variant, "shape": shape, "precision": self.precision}
        return {**own, "full": True} if self.has_full else own


def gflop(shape: Shape) -> float:
    """10**9 operations of a product of `shape` (M, N, K)."""
    m, n, k = shape
    return 2e-9 * m * n * k


def operand_bytes(chain: Chain, shape: Shape, precision: str) -> int:
    """The bytes of all operands."""
    counts = [torch.Size(operand.shape(*shape[:2])).numel() for operand in chain.operands]
    sizes = [element_size(operand.precision(precision)) for operand in chain.operands]
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def linear_case(shape: Shape, chain: Chain, precision: str) -> Case:
    """A product with a chain behind it, and with what bounds it where a target names that."""
    extras: tuple[str, ...] = ()
    if precision == "fp32":
        extras = (PRODUCT,)
    elif gflop(shape) >= LARGE_GFLOP and not chain.has_full:
        extras = (POINTWISE,)
    build = partial(workloads.linear, shape, chain, precision, extras, (POINTWISE, PRODUCT))
    contenders = (MM, EAGER, COMPILE, *CUTFUSE, *extras)
    work = Work(operand_bytes(chain, shape, precision), 0)
    return Case(LINEAR, chain.name, shape, precision, contenders, build, work, chain.has_full)


def chains_of(seed: int) -> tuple[Chain, ...]:
    """Those written by hand, and those that the seed draws."""
    return (*HAND_WRITTEN, *drawn_chains(seed))


def strata(chain: Chain) -> list[tuple[str, Hashable]]:
    """What cases of a chain are to be spread over."""
    return [("ops", chain.ops), ("operands", len(chain.operands)), ("full", chain.has_full), ("reduce", chain.reduce)]


class Balance:
    """Chooses among candidates that whose features were chosen least, so that every stratum has its share."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        self.used: Counter[Hashable] = Counter()

    def choose(self, candidates: Sequence[Any], features_of: Callable[[Any], Sequence[Hashable]]) -> Any:
        """One of the candidates; at random where several are alike."""
        order = self.generator.sample(range(len(candidates)), len(candidates))
        best = min(order, key=lambda place: sum(self.used[feature] for feature in features_of(candidates[place])))
        self.used.update(features_of(candidates[best]))
        return candidates[best]


def drawn_pairs(
    shapes: Sequence[Shape], quotas: dict[str, int], chains: Sequence[Chain], generator: random.Random
) -> Iterator[tuple[Shape, str, Chain]]:
    """Shapes, precisions and chains: each of the first two together `quotas` times, with other chains.

    Every beginning of the sequence is spread as evenly as it can be.
    """
    balance = Balance(generator)
    taken: set[tuple[Shape, str, str]] = set()
    for turn in range(max(quotas.values())):
        pairs = [(shape, precision) for precision, quota in quotas.items() if turn < quota for shape in shapes]
        generator.shuffle(pairs)
        for shape, precision in pairs:

            def features(chain: Chain, shape: Shape = shape, precision: str = precision) -> list[Hashable]:
                spread = [(other, *stratum) for stratum in strata(chain) for other in (shape, precision)]
                # The chain itself counts as much as all of its strata.
                return [*spread, *((chain.name, again) for again in range(len(spread))), (shape, chain.name)]

            free = [chain for chain in chains if (shape, precision, chain.name) not in taken]
            chain = balance.choose(free, features)
            taken.add((shape, precision, chain.name))
            yield shape, precision, chain


def with_autotuning(drawn: Sequence[tuple[Shape, str, Chain]], count: int, generator: random.Random) -> set[int]:
    """The places of those of 16 bits that max-autotune takes part in."""
    balance = Balance(generator)
    free = [place for place, (_, precision, _) in enumerate(drawn) if precision in SIXTEEN_BITS]
    found: set[int] = set()

    def features(place: int) -> list[Hashable]:
        shape, precision, chain = drawn[place]
        return [("shape", shape), ("shape again", shape), precision, *strata(chain)]

    while free and len(found) < count:
        place = balance.choose(free, features)
        free.remove(place)
        found.add(place)
    return found


def linear_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """The draw; quick: its beginning, in which max-autotune has no part."""
    generator = random.Random(seed)
    shapes, quotas = (SMALL_SHAPES, SMALL_QUOTAS) if small else (SHAPES, QUOTAS)
    drawn = list(drawn_pairs(shapes, quotas, chains_of(seed), generator))
    autotuned = with_autotuning(drawn, AUTOTUNED, generator)
    for place, (shape, precision, chain) in enumerate(drawn[: QUICK if quick else len(drawn)]):
        case = linear_case(shape, chain, precision)
        is_autotuned = place in autotuned and not (quick or small)
        yield replace(case, contenders=(*case.contenders, AUTOTUNE)) if is_autotuned else case


def stream_case(group: str, variant: str, shape: Shape, precision: str, build: Any, work: Work) -> Case:
    """What reads and writes tensors of `shape`; backward passes are not compiled, as the compiler frees their graph."""
    contenders = (EAGER, *CUTFUSE) if group == BACKWARD else (EAGER, COMPILE, *CUTFUSE)
    return Case(group, variant, shape, precision, contenders, build, work)


def stream_cases(small: bool, quick: bool) -> Iterator[Case]:
    """What has no product: pointwise chains, their backward pass, and chains before a reduction."""
    shapes = (SMALL_STREAMS if small else STREAM_SHAPES)[: 1 if quick else None]
    for shape in shapes:
        for chain, precision in ((LIGHT, "bf16"), (LIGHT, "fp16"), (LIGHT, "fp32"), (SPECIAL, "bf16")):
            size = element_size(precision) * shape[0] * shape[1]
            build = partial(workloads.pointwise, shape, chain, precision)
            work = Work(2 * size, size)
            yield stream_case(STREAM, chain.name, shape, precision, build, work)
        for precision in ("bf16", "fp32"):
            size = element_size(precision) * shape[0] * shape[1]
            build = partial(workloads.backward, shape, LIGHT_ALONE, precision)
            yield stream_case(BACKWARD, LIGHT_ALONE.name, shape, precision, build, Work(2 * size, size))
            for op, dim in REDUCTIONS:
                build = partial(workloads.reduction, shape, dim, op, LIGHT_ALONE, precision)
                work = Work(size, element_size(precision) * shape[1 - dim])
                yield stream_case(REDUCE, f"{op} of dim {dim}", shape, precision, build, work)


def training_cases(small: bool, quick: bool) -> Iterator[Case]:
    """A training step of a linear layer and gelu."""
    for shape in (SMALL_TRAINING if small else TRAINING_SHAPES)[: 1 if quick else None]:
        build = partial(workloads.training, shape, COMPILE, "bf16")
        yield Case(TRAINING, "layer, gelu", shape, "bf16", (EAGER, COMPILE, *CUTFUSE), build)


@lru_cache(maxsize=8)
def all_cases(small: bool, quick: bool, seed: int) -> tuple[Case, ...]:
    """In the order in which they are run. Small and quick runs are without memory and the start of processes."""
    untimed = [Case(MEMORY, STACK, shape, "bf16") for shape in MEMORY_SHAPES]
    untimed += [Case(START, variant, START_SHAPE, "bf16") for variant in (ONE_CHAIN, MODEL)]
    fixed = (*stream_cases(small, quick), *training_cases(small, quick))
    return (*fixed, *linear_cases(small, quick, seed), *(() if small or quick else untimed))


def select(small: bool, quick: bool, seed: int, filters: Sequence[str], shard: Shard) -> list[Case]:
    """The shard of the cases whose title holds all of `filters`, case ignored."""
    wanted = [
        case for case in all_cases(small, quick, seed) if all(text.lower() in case.title.lower() for text in filters)
    ]
    return shard.of(wanted)
