"""The chains suite: a stratified draw of products with chains behind them, and a few of what else is fused."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch

from bench import chain_memory, chain_start
from bench import chain_workloads as workloads
from bench.ceilings import Work
from bench.chain_memory import EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK
from bench.chain_start import COLD, SECOND
from bench.chains import HAND_WRITTEN, LIGHT, LIGHT_ALONE, SPECIAL, Chain, drawn_chains
from bench.contenders import (
    AUTOTUNE,
    COMPILE,
    COMPILERS,
    CONTENDERS,
    EAGER,
    FUSED,
    INTERPRETED,
    KEPT,
    MM,
    POINTWISE,
    PRODUCT,
    SPECIALIZED,
    slow_compilers,
)
from bench.format import MISSING, ratio
from bench.goals import MEAN, WORST, fastest, figure_of, median, quotient
from bench.launches import launch_case
from bench.suite import Case, Figures, Goal, Results, Suite
from bench.tables import Table, filled, times_columns
from bench.workloads import Shape, dimensions, element_size

LINEAR, STREAM, BACKWARD, REDUCE, TRAINING = "linear", "pointwise", "backward", "reduce", "training"
MEMORY, START = "memory", "start"
UNTIMED = (MEMORY, START)  # that are not times of calls
CUTFUSE = (INTERPRETED, SPECIALIZED)

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
ONE_CHAIN, MODEL_CHAINS = "one chain", 30
MODEL = f"{MODEL_CHAINS} chains"
START_S = 120.0  # a first guess of what a case of processes takes


def gflop(shape: Shape) -> float:
    """10**9 operations of a product of `shape` (M, N, K)."""
    m, n, k = shape
    return 2e-9 * m * n * k


def operand_bytes(chain: Chain, shape: Shape, precision: str) -> int:
    """The bytes of all operands."""
    counts = [torch.Size(operand.shape(*shape[:2])).numel() for operand in chain.operands]
    sizes = [element_size(operand.precision(precision)) for operand in chain.operands]
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def linear_case(shape: Shape, chain: Chain, precision: str, is_autotuned: bool) -> Case:
    """A product with a chain behind it, and with what bounds it where a target names that.

    Its least work is to read the operands, at the rate of a copy.
    """
    extras: tuple[str, ...] = ()
    if precision == "fp32":
        extras = (PRODUCT,)
    elif gflop(shape) >= LARGE_GFLOP and not chain.has_full:
        extras = (POINTWISE,)
    build = partial(workloads.linear, shape, chain, precision, extras)
    autotune = (AUTOTUNE,) if is_autotuned else ()
    contenders = (MM, EAGER, COMPILE, *CUTFUSE, *extras, *autotune)
    key = (LINEAR, chain.name, dimensions(shape), precision)
    moved = operand_bytes(chain, shape, precision)
    return launch_case(
        key, build, contenders, Work(0, moved) if moved else None, about={"full": True} if chain.has_full else None
    )


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


def linear_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """The draw; quick: its beginning. max-autotune has part in the first ones of 16 bits of a whole one."""
    shapes, quotas = (SMALL_SHAPES, SMALL_QUOTAS) if small else (SHAPES, QUOTAS)
    autotuned = 0 if quick or small else AUTOTUNED
    drawn = drawn_pairs(shapes, quotas, chains_of(seed), random.Random(seed))
    for shape, precision, chain in islice(drawn, QUICK if quick else None):
        is_autotuned = precision in SIXTEEN_BITS and autotuned > 0
        autotuned -= is_autotuned
        yield linear_case(shape, chain, precision, is_autotuned)


def stream_cases(small: bool, quick: bool) -> Iterator[Case]:
    """What has no product: pointwise chains, their backward pass, and chains before a reduction.

    Backward passes are not compiled, as the compiler frees their graph.
    """
    shapes = (SMALL_STREAMS if small else STREAM_SHAPES)[: 1 if quick else None]
    everyone = (EAGER, COMPILE, *CUTFUSE)
    for shape in shapes:
        printed = dimensions(shape)
        for chain, precision in ((LIGHT, "bf16"), (LIGHT, "fp16"), (LIGHT, "fp32"), (SPECIAL, "bf16")):
            size = element_size(precision) * shape[0] * shape[1]
            build: Any = partial(workloads.pointwise, shape, chain, precision)
            yield launch_case((STREAM, chain.name, printed, precision), build, everyone, Work(2 * size, size))
        for precision in ("bf16", "fp32"):
            size = element_size(precision) * shape[0] * shape[1]
            build = partial(workloads.backward, shape, LIGHT_ALONE, precision)
            key = (BACKWARD, LIGHT_ALONE.name, printed, precision)
            yield launch_case(key, build, (EAGER, *CUTFUSE), Work(2 * size, size))
            for op, dim in REDUCTIONS:
                build = partial(workloads.reduction, shape, dim, op, LIGHT_ALONE, precision)
                work = Work(size, element_size(precision) * shape[1 - dim])
                yield launch_case((REDUCE, f"{op} of dim {dim}", printed, precision), build, everyone, work)


def training_cases(small: bool, quick: bool) -> Iterator[Case]:
    """A training step of a linear layer and gelu."""
    for shape in (SMALL_TRAINING if small else TRAINING_SHAPES)[: 1 if quick else None]:
        build = partial(workloads.training_of_gelu, shape, "bf16")
        key = (TRAINING, "layer, gelu", dimensions(shape), "bf16")
        yield launch_case(key, build, (EAGER, COMPILE, *CUTFUSE))


def untimed_cases() -> Iterator[Case]:
    """The memory of a training step, and the start of processes."""
    for shape in MEMORY_SHAPES:
        yield Case(MEMORY, STACK, dimensions(shape), "bf16", partial(chain_memory.prepare, shape))
    for variant, count in ((ONE_CHAIN, 1), (MODEL, MODEL_CHAINS)):
        prepare = partial(chain_start.prepare, count)
        yield Case(START, variant, dimensions(chain_start.SHAPE), "bf16", prepare, seconds=START_S)


@lru_cache(maxsize=8)
def all_cases(small: bool, quick: bool, seed: int) -> tuple[Case, ...]:
    """In the order in which they are run. Small and quick runs are without memory and the start of processes."""
    fixed = (*stream_cases(small, quick), *training_cases(small, quick))
    return (*fixed, *linear_cases(small, quick, seed), *(() if small or quick else untimed_cases()))


NAMES = tuple(name for name in CONTENDERS if name not in (FUSED, KEPT))
Value = Callable[[Figures], float | None]
Chosen = Callable[[Figures], bool]


def sizes_of(case: Figures) -> tuple[int, int, int]:
    """M, N, K of a product's case."""
    m, n, k = map(int, case["shape"].split("x"))
    return m, n, k


def is_large(case: Figures) -> bool:
    """Whether the product is large enough to run at the device's full rate."""
    return gflop(sizes_of(case)) >= LARGE_GFLOP


def has_full(case: Figures) -> bool:
    """Whether an operand is as large as the result."""
    return bool(case.get("full"))


def over(case: Figures, base: float | None) -> float | None:
    """The specialized kernel's time over another."""
    return quotient(median(case, SPECIALIZED), base)


def over_fastest(case: Figures, names: Sequence[str] = COMPILERS) -> float | None:
    """Over the fastest of others: by default the best of torch.compile's modes."""
    return over(case, fastest(case, names))


def over_product_or_chain(case: Figures) -> float | None:
    """Over the longer of the bare product and the chain alone."""
    product, chain = median(case, MM), median(case, POINTWISE)
    return None if product is None or chain is None else over(case, max(product, chain))


def over_product_and_operands(name: str, case: Figures) -> float | None:
    """Over a product, and reading the operands at the copy ceiling."""
    product, reading = median(case, name), case.get("floor_us", 0.0)  # without operands there is nothing to read
    return None if product is None or reading is None else over(case, product + reading)


def share_of_ceiling(case: Figures) -> float | None:
    """The least time of the case's traffic over the specialized kernel's."""
    return quotient(case.get("floor_us"), median(case, SPECIALIZED))


def over_eager_bytes(name: str, figure: str, case: Figures) -> float | None:
    """A stack's bytes over those of the same blocks in plain PyTorch."""
    return quotient(*(figure_of(case, stack, figure) for stack in (name, EAGER_STACK)))


def goal(
    group: str, what: str, against: str, value: Value, limit: float, chosen: Chosen, measure: str = WORST, **more: Any
) -> Goal:
    """A limit on the cases of a group that are chosen."""
    return Goal(what, against, lambda case: case["group"] == group and chosen(case), value, limit, measure, **more)


def every(case: Figures) -> bool:
    """Chooses every case."""
    del case
    return True


def of_precisions(precisions: Sequence[str], also: Chosen = every) -> Chosen:
    """Cases in one of the precisions that are `also` something else."""
    return lambda case: case["precision"] in precisions and also(case)


def goals_of_products() -> tuple[Goal, ...]:
    """The limits on chains behind products."""
    best, bound = "best torch.compile", "mm or the chain alone"
    large_16 = of_precisions(SIXTEEN_BITS, is_large)
    small_16 = of_precisions(SIXTEEN_BITS, lambda case: not is_large(case))
    tensor_cores = (*SIXTEEN_BITS, "tf32")
    without = of_precisions(tensor_cores, lambda case: is_large(case) and not has_full(case))
    large_full = of_precisions(tensor_cores, lambda case: is_large(case) and has_full(case))
    small_full = of_precisions(tensor_cores, lambda case: not is_large(case) and has_full(case))
    deep = of_precisions(("fp32",), lambda case: sizes_of(case)[2] >= 4096)
    shallow = of_precisions(("fp32",), lambda case: sizes_of(case)[2] < 4096)
    with_mm, with_product = (partial(over_product_and_operands, name) for name in (MM, PRODUCT))
    bytes_too, guarded = "mm, operands' bytes", "product, operands' bytes"
    no_full = "16-bit, tf32, ≥ 40 GFLOP, no full operand"
    large_full_name = "16-bit, tf32, ≥ 40 GFLOP, full operand"
    return (
        goal(LINEAR, "16-bit, ≥ 40 GFLOP", best, over_fastest, 0.90, large_16, MEAN),
        goal(LINEAR, "16-bit, ≥ 40 GFLOP", best, over_fastest, 1.02, large_16),
        goal(LINEAR, "16-bit, smaller", best, over_fastest, 1.0, small_16, MEAN),
        goal(LINEAR, no_full, bound, over_product_or_chain, 1.08, without, MEAN),
        goal(LINEAR, no_full, bound, over_product_or_chain, 1.25, without),
        goal(LINEAR, large_full_name, bytes_too, with_mm, 1.10, large_full, MEAN),
        goal(LINEAR, "16-bit, tf32, smaller, full operand", bytes_too, with_mm, 1.30, small_full, MEAN),
        goal(LINEAR, "fp32, K ≥ 4096", guarded, with_product, 1.04, deep, MEAN),
        goal(LINEAR, "fp32, smaller K", guarded, with_product, 1.20, shallow, MEAN),
    )


def share_goal(group: str, what: str, ceiling: str, limit: float, chosen: Chosen = every) -> Goal:
    """A limit on the share of what the memory allows."""
    return goal(group, what, f"{ceiling} ceiling", share_of_ceiling, limit, chosen, is_least=True)


def seconds_goal(what: str, name: str, limit: float, variant: str) -> Goal:
    """A limit on the time until chains run specialized."""
    return goal(
        START,
        what,
        "",
        lambda case: figure_of(case, name, "wait_s"),
        limit,
        lambda case: case["variant"] == variant,
        unit=" s",
    )


def training_goal(shape: str, limit: float) -> Goal:
    """A limit on a training step."""
    value = partial(over_fastest, names=(EAGER, COMPILE))
    what = f"training step, {shape}"
    return goal(TRAINING, what, "best of PyTorch", value, limit, lambda case: case["shape"] == shape)


def memory_goal(what: str, name: str, figure: str, limit: float) -> Goal:
    """A limit on the memory of a training step."""
    value = partial(over_eager_bytes, name, figure)
    return goal(MEMORY, f"{what}, 12 blocks", "eager", value, limit, every)


GOALS = (
    *goals_of_products(),
    share_goal(STREAM, LIGHT.name, "copy", 0.95, lambda case: case["variant"] == LIGHT.name),
    share_goal(STREAM, f"{SPECIAL.name}, bf16", "copy", 0.80, lambda case: case["variant"] == SPECIAL.name),
    share_goal(BACKWARD, f"backward of {LIGHT.name}", "copy", 0.92),
    share_goal(REDUCE, f"{LIGHT.name}, reduced, fp32", "read", 0.92, of_precisions(("fp32",))),
    share_goal(REDUCE, f"{LIGHT.name}, reduced, bf16", "read", 0.82, of_precisions(("bf16",))),
    training_goal("12608x3072x768", 0.94),
    training_goal("4096x8192x8192", 0.99),
    seconds_goal("a chain runs specialized, cold", COLD, 0.5, ONE_CHAIN),
    seconds_goal("a chain runs specialized, second process", SECOND, 0.02, ONE_CHAIN),
    seconds_goal(f"{MODEL} run specialized, cold", COLD, 5.0, MODEL),
    memory_goal("peak memory", FUSED_STACK, "peak_bytes", 1.0),
    memory_goal("kept for backward, recomputed", RECOMPUTED_STACK, "kept_bytes", 0.75),
)


def times_table(title: str, cases: Sequence[Figures]) -> Table:
    """Cases with their ratios and the times of each contender."""
    columns = {
        "chain": [f"{case['group']}: {case['variant']}" for case in cases],
        "shape": [case["shape"] for case in cases],
        "specialized / compiled": [ratio(over_fastest(case)) for case in cases],
        "specialized / mm": [ratio(over(case, median(case, MM))) for case in cases],
        "precision": [case["precision"] for case in cases],
        **times_columns(cases, {name: CONTENDERS[name].label for name in NAMES}),
    }
    return Table(title, filled(columns))


def chains_table(results: Results) -> Table:
    """What the chains' names stand for."""
    chains = [chain.as_dict() for chain in chains_of(results["settings"]["seed"])]
    columns = {
        "chain": [chain["name"] for chain in chains],
        "ops": [str(chain["ops"]) for chain in chains],
        "text": [chain["text"] for chain in chains],
        "operands": [chain["operands"] or MISSING for chain in chains],
        "reduce": [chain["reduce"] or MISSING for chain in chains],
    }
    return Table("The chains: z is the product, a, b, c are the operands", columns)


def tables(results: Results) -> list[Table]:
    """Every timed case, and the chains."""
    cases = [case for case in results["cases"] if case["group"] not in UNTIMED]
    products = [case for case in cases if case["group"] == LINEAR]
    others = [case for case in cases if case["group"] != LINEAR]
    return [
        times_table("Chains behind products", products),
        times_table("Without a chain behind a product", others),
        chains_table(results),
    ]


SUITE = Suite(
    name="chains",
    cases=all_cases,
    goals=GOALS,
    contenders=NAMES,
    left_out=slow_compilers,
    tables=tables,
    about=[
        "The device's time, from a cold cache: medians in microseconds, contenders interleaved in random order within "
        "a case. Every result was compared with fp64 before, cutfuse's a second time over memory filled with NaN.",
        'Products have no bias; fp32 is at "highest" and tf32 at "high". Compiled: the faster of torch.compile and, '
        "where it was run, max-autotune.",
        "specialized, of which the ratios are: compiled for the chain before it is timed. interpreted: the same call "
        "with specialization off.",
        "mm or the chain alone: the longer; the latter is `cutfuse.pointwise` over `[M, N]` without its reduction. The "
        "product alone is `cutfuse.linear` without an epilogue. A full operand is as large as the result.",
        "Operands' bytes are counted at the ceiling of a copy, and ratios to a ceiling are shares of it.",
        "Until a chain runs specialized: from its first call in a process that has run another chain interpreted; cold "
        "without any cache of compiled kernels, the second process with the first one's. Medians of processes.",
        "Training step: a linear layer and gelu in bf16. Memory: of a step of pre-norm MLP blocks, beyond parameters "
        "and input; kept between the passes with `recompute` in the layer before gelu.",
    ],
    plots={"chains": "bench.chain_plot:draw"},
    time_limit_s=540.0,
)
