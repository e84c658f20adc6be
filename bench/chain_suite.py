"""The chains suite: a stratified draw of products with chains behind them, and a few of what else is fused.

How long it takes until chains run specialized is measured in processes: `python -m bench.chain_suite COUNT`. Everything
else that a first call pays for is paid before: the context, the kernels' module, and a plan.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cutfuse
from bench import chains
from bench.chains import (
    DRAWS,
    HAND_WRITTEN,
    LIGHT,
    LIGHT_ALONE,
    SPECIAL,
    Chain,
    drawn_chain,
    drawn_chains,
    operands_of,
)
from bench.goals import MEAN, WORST, Chosen, cases_with, figure_of, over, quotient, value_of
from bench.host_suite import build_stacks
from bench.launches import (
    AUTOTUNE,
    COMPILE,
    COMPILERS,
    CONTENDERS,
    EAGER,
    INTERPRETED,
    LONGEST_WAIT_S,
    MM,
    POINTWISE,
    PRODUCT,
    SPECIALIZED,
    Steps,
    in_mode,
    launch_case,
    memory_case,
    slow_compilers,
)
from bench.suite import Case, Figures, Goal, Results, Suite
from bench.tables import MISSING, Table, ratio_of, table_of, times_of
from bench.timing import wait_for
from bench.workloads import Shape, Work, dimensions, element_size, product_tensors

EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK = "eager", "cutfuse", "cutfuse, recomputed"
BLOCKS = 12


def stacks_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Sequential]:
    """The same blocks in plain PyTorch, with cutfuse, and with cutfuse where gelu's input is computed again."""
    _, hidden, width = shape
    plain, fused = build_stacks(BLOCKS, width, hidden, dtype, device)
    _, recomputed = build_stacks(BLOCKS, width, hidden, dtype, device)
    for block in recomputed:
        block.up.recompute = True
    return {EAGER_STACK: plain, FUSED_STACK: fused, RECOMPUTED_STACK: recomputed}


def stack_steps(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Steps:
    """Training steps of every stack for `shape`: rows, the hidden width and the width."""
    x = torch.randn(shape[0], shape[2], device=device, dtype=dtype).requires_grad_()
    stacks = stacks_of(shape, dtype, device)
    steps = {name: (partial(stack, x), (x, *stack.parameters())) for name, stack in stacks.items()}
    return steps, torch.randn_like(x)


START_SHAPE = (4096, 4096, 4096)
COLD, SECOND = "cold", "second process"
REPETITIONS = 3
PROCESS_TIMEOUT_S = 180.0
SEED = 2026  # of chains that no other case has
FIRST_CHAIN = "squash"  # interpreted, before the clock starts
# One operation behind a product may be PyTorch's own kernel, which is never specialized. The first one is of six.
LONG_DRAWS = sorted((draw for draw in DRAWS if draw.ops > 1), key=lambda draw: (draw.ops != 6, bool(draw.reduce)))


def new_chains(count: int) -> list[Chain]:
    """Chains of three to twelve operations, and of every kind of operand."""
    generator = random.Random(SEED)
    return [drawn_chain(f"start-{place:02}", LONG_DRAWS[place % len(LONG_DRAWS)], generator) for place in range(count)]


def measure_start(count: int, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Seconds until `count` chains behind a product run specialized, and how many kernels then do.

    Of one chain it is the first call's time, which waits for the kernel; several are called once each, and waited for.
    """
    wait = wait_for(device)
    x, weight = product_tensors(shape, "bf16", device)
    chains = new_chains(count)
    first = next(chain for chain in HAND_WRITTEN if chain.name == FIRST_CHAIN)
    operands = {chain.name: operands_of(chain, *shape[:2], "bf16", device) for chain in (first, *chains)}

    def call(chain: Chain) -> None:
        cutfuse.linear(x, weight, epilogue=chain.function, operands=operands[chain.name], reduce=chain.reduce)

    in_mode("off", call)(first)
    wait()
    mode = "now" if count == 1 else "background"
    began = time.perf_counter()
    for chain in chains:
        in_mode(mode, call)(chain)
    ready = 0 if count == 1 else cutfuse.wait(LONGEST_WAIT_S)
    wait()
    seconds = time.perf_counter() - began
    return {"wait_s": seconds, "kernels": ready or cutfuse.wait(LONGEST_WAIT_S)}


def start_command(count: int) -> list[str]:
    """The command line of a process that prints what `measure_start` gives."""
    return [sys.executable, "-m", "bench.chain_suite", str(count)]


def run_process(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a fresh process prints as its last line, whose caches are in `folder`.

    Raises RuntimeError with the end of its errors where it fails.
    """
    # In this process's order: the installed cutfuse before the sources.
    paths = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)
    # The driver's compiled kernels, and cutfuse's own.
    caches = {"CUDA_CACHE_PATH": str(folder / "driver"), "XDG_CACHE_HOME": str(folder / "user")}
    environment = {**os.environ, **caches, "PYTHONPATH": paths}
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, cwd=folder, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"a process ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_start(count: int) -> Figures:
    """The figures of a case: in processes without a cache, and for one chain in processes that find one."""
    found: dict[str, list[dict[str, Any]]] = {COLD: []}
    for _ in range(REPETITIONS if count == 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            found[COLD].append(run_process(start_command(count), Path(folder)))
            if count == 1:
                found.setdefault(SECOND, []).append(run_process(start_command(count), Path(folder)))
    contenders: dict[str, Figures] = {}
    for name, own in found.items():
        fewest = min(one["kernels"] for one in own)
        contenders[name] = {"wait_s": statistics.median(one["wait_s"] for one in own), "kernels": fewest}
        if fewest < count:
            contenders[name] = {"note": f"failed: {fewest} of {count} chains ran specialized"}
    return {"contenders": contenders}


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
    build = partial(chains.linear, shape, chain, precision)
    autotune = (AUTOTUNE,) if is_autotuned else ()
    contenders = (MM, EAGER, COMPILE, *CUTFUSE, *extras, *autotune)
    key = (LINEAR, chain.name, dimensions(shape), precision)
    moved = operand_bytes(chain, shape, precision)
    about = {"full": True} if chain.has_full else {}
    return launch_case(key, build, contenders, Work(0, moved) if moved else None, about=about)


def chains_of(seed: int) -> tuple[Chain, ...]:
    """Those written by hand, and those that the seed draws."""
    return (*HAND_WRITTEN, *drawn_chains(seed))


def drawn_pairs(
    shapes: Sequence[Shape], quotas: dict[str, int], chains: Sequence[Chain], generator: random.Random
) -> Iterator[tuple[Shape, str, Chain]]:
    """Shapes, precisions and chains: each of the first two together `quotas` times, with other chains.

    Of those the one is taken whose features were chosen least: every beginning of the sequence is spread evenly.
    """
    used: Counter[Hashable] = Counter()  # of each feature, how many were chosen
    taken: set[tuple[Shape, str, str]] = set()
    for turn in range(max(quotas.values())):
        pairs = [(shape, precision) for precision, quota in quotas.items() if turn < quota for shape in shapes]
        generator.shuffle(pairs)
        for shape, precision in pairs:

            def features(chain: Chain, shape: Shape = shape, precision: str = precision) -> list[Hashable]:
                strata = {
                    "ops": chain.ops,
                    "operands": len(chain.operands),
                    "full": chain.has_full,
                    "reduce": chain.reduce,
                }
                spread = [(other, *stratum) for stratum in strata.items() for other in (shape, precision)]
                # The chain itself counts as much as all of its strata.
                return [*spread, *((chain.name, again) for again in range(len(spread))), (shape, chain.name)]

            free = [chain for chain in chains if (shape, precision, chain.name) not in taken]
            order = generator.sample(range(len(free)), len(free))  # at random where several are alike
            chain = free[min(order, key=lambda place: sum(used[feature] for feature in features(free[place])))]
            used.update(features(chain))
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
            build: Any = partial(chains.pointwise, shape, chain, precision)
            yield launch_case((STREAM, chain.name, printed, precision), build, everyone, Work(2 * size, size))
        for precision in ("bf16", "fp32"):
            size = element_size(precision) * shape[0] * shape[1]
            build = partial(chains.backward, shape, LIGHT_ALONE, precision)
            key = (BACKWARD, LIGHT_ALONE.name, printed, precision)
            yield launch_case(key, build, (EAGER, *CUTFUSE), Work(2 * size, size))
            for op, dim in REDUCTIONS:
                build = partial(chains.reduction, shape, dim, op, LIGHT_ALONE, precision)
                work = Work(size, element_size(precision) * shape[1 - dim])
                yield launch_case((REDUCE, f"{op} of dim {dim}", printed, precision), build, everyone, work)


@lru_cache(maxsize=8)
def all_cases(small: bool, quick: bool, seed: int) -> tuple[Case, ...]:
    """In the order in which they are run. Small and quick runs are without memory and the start of processes."""
    cases = [*stream_cases(small, quick)]
    for shape in (SMALL_TRAINING if small else TRAINING_SHAPES)[: 1 if quick else None]:
        build = partial(chains.training_of_gelu, shape, "bf16")
        key = (TRAINING, "layer, gelu", dimensions(shape), "bf16")
        cases.append(launch_case(key, build, (EAGER, COMPILE, *CUTFUSE), needs_grad=True))
    cases += linear_cases(small, quick, seed)
    if not small and not quick:
        for shape in MEMORY_SHAPES:
            cases.append(memory_case((MEMORY, STACK, dimensions(shape), "bf16"), partial(stack_steps, shape)))
        for variant, count in ((ONE_CHAIN, 1), (MODEL, MODEL_CHAINS)):
            key = (START, variant, dimensions(START_SHAPE), "bf16")
            cases.append(Case(*key, lambda _, count=count: partial(run_start, count), seconds=START_S))
    return tuple(cases)


NAMES = (MM, EAGER, *COMPILERS, INTERPRETED, SPECIALIZED, POINTWISE, PRODUCT)


def sizes_of(case: Figures) -> tuple[int, int, int]:
    """M, N, K of a product's case."""
    m, n, k = map(int, case["shape"].split("x"))
    return m, n, k


def is_large(case: Figures) -> bool:
    """Whether the product is large enough to run at the device's full rate."""
    return gflop(sizes_of(case)) >= LARGE_GFLOP


# The specialized kernel's time over the best of torch.compile's modes, and over the bare product.
over_fastest, over_mm = over((SPECIALIZED,), COMPILERS), over((SPECIALIZED,), (MM,))


def over_product_or_chain(case: Figures) -> float | None:
    """Over the longer of the bare product and the chain alone."""
    product, chain = figure_of(case, MM), figure_of(case, POINTWISE)
    bound = None if product is None or chain is None else max(product, chain)
    return quotient(figure_of(case, SPECIALIZED), bound)


def over_product_and_operands(name: str, case: Figures) -> float | None:
    """Over a product, and reading the operands at the copy ceiling."""
    product, reading = figure_of(case, name), case.get("floor_us", 0.0)  # without operands there is nothing to read
    bound = None if product is None or reading is None else product + reading
    return quotient(figure_of(case, SPECIALIZED), bound)


def goals_of_products() -> Iterator[Goal]:
    """The limits on chains behind products."""
    best, bound = "best torch.compile", "mm or the chain alone"
    with_mm, with_product = (partial(over_product_and_operands, name) for name in (MM, PRODUCT))
    bytes_too, guarded = "mm, operands' bytes", "product, operands' bytes"
    tensor_cores = (*SIXTEEN_BITS, "tf32")

    def products(precisions: Sequence[str], holds: Chosen) -> Chosen:
        return cases_with(holds, group=LINEAR, precision=precisions)

    large = products(SIXTEEN_BITS, is_large)
    yield Goal("16-bit, ≥ 40 GFLOP", best, large, over_fastest, 0.90, MEAN)
    yield Goal("16-bit, ≥ 40 GFLOP", best, large, over_fastest, 1.02, WORST)
    small = products(SIXTEEN_BITS, lambda case: not is_large(case))
    yield Goal("16-bit, smaller", best, small, over_fastest, 1.0, MEAN)
    without = products(tensor_cores, lambda case: is_large(case) and not case.get("full"))
    for limit, measure in ((1.08, MEAN), (1.25, WORST)):
        what = "16-bit, tf32, ≥ 40 GFLOP, no full operand"
        yield Goal(what, bound, without, over_product_or_chain, limit, measure)
    full = products(tensor_cores, lambda case: is_large(case) and "full" in case)
    yield Goal("16-bit, tf32, ≥ 40 GFLOP, full operand", bytes_too, full, with_mm, 1.10, MEAN)
    full = products(tensor_cores, lambda case: not is_large(case) and "full" in case)
    yield Goal("16-bit, tf32, smaller, full operand", bytes_too, full, with_mm, 1.30, MEAN)
    deep = products(("fp32",), lambda case: sizes_of(case)[2] >= 4096)
    yield Goal("fp32, K ≥ 4096", guarded, deep, with_product, 1.04, MEAN)
    shallow = products(("fp32",), lambda case: sizes_of(case)[2] < 4096)
    yield Goal("fp32, smaller K", guarded, shallow, with_product, 1.20, MEAN)


def other_goals() -> Iterator[Goal]:
    """The limits on what has no product, as shares of what memory allows; on training steps, memory and the start."""

    def share_of_ceiling(case: Figures) -> float | None:
        return quotient(case.get("floor_us"), figure_of(case, SPECIALIZED))

    for what, ceiling, chosen, limit in (
        (LIGHT.name, "copy", cases_with(group=STREAM, variant=LIGHT.name), 0.95),
        (f"{SPECIAL.name}, bf16", "copy", cases_with(group=STREAM, variant=SPECIAL.name), 0.80),
        (f"backward of {LIGHT.name}", "copy", cases_with(group=BACKWARD), 0.92),
        (f"{LIGHT.name}, reduced, fp32", "read", cases_with(group=REDUCE, precision="fp32"), 0.92),
        (f"{LIGHT.name}, reduced, bf16", "read", cases_with(group=REDUCE, precision="bf16"), 0.82),
    ):
        yield Goal(what, f"{ceiling} ceiling", chosen, share_of_ceiling, limit, is_least=True)
    for shape, limit in (("12608x3072x768", 0.94), ("4096x8192x8192", 0.99)):
        chosen, value = cases_with(group=TRAINING, shape=shape), over((SPECIALIZED,), (EAGER, COMPILE))
        yield Goal(f"training step, {shape}", "best of PyTorch", chosen, value, limit)
    for what, variant, contender, limit in (
        ("a chain runs specialized, cold", ONE_CHAIN, COLD, 0.5),
        ("a chain runs specialized, second process", ONE_CHAIN, SECOND, 0.02),
        (f"{MODEL} run specialized, cold", MODEL, COLD, 5.0),
    ):
        chosen = cases_with(group=START, variant=variant)
        yield Goal(what, "", chosen, value_of(contender, "wait_s"), limit, unit=" s")
    for what, contender, name, limit in (
        ("peak memory", FUSED_STACK, "peak_bytes", 1.0),
        ("kept for backward, recomputed", RECOMPUTED_STACK, "kept_bytes", 0.75),
    ):
        value = over((contender,), (EAGER_STACK,), name)
        yield Goal(f"{what}, 12 blocks", "eager", cases_with(group=MEMORY), value, limit)


def times_table(title: str, covers: Chosen) -> Callable[[Results], Table]:
    """Makes a table of cases with their ratios and the times of each contender."""
    ratios = {"specialized / compiled": ratio_of(over_fastest), "specialized / mm": ratio_of(over_mm)}
    return table_of(title, {**ratios, **times_of({name: CONTENDERS[name].label for name in NAMES})}, covers)


def chains_table(results: Results) -> Table:
    """What the chains' names stand for."""
    chains = chains_of(results["settings"]["seed"])
    columns = {
        "chain": [chain.name for chain in chains],
        "ops": [str(chain.ops) for chain in chains],
        "text": [chain.text for chain in chains],
        "operands": [", ".join(operand.label for operand in chain.operands) or MISSING for chain in chains],
        "reduce": [chain.reduce or MISSING for chain in chains],
    }
    return Table("The chains: z is the product, a, b, c are the operands", columns)


SUITE = Suite(
    name="chains",
    cases=all_cases,
    goals=(*goals_of_products(), *other_goals()),
    contenders=NAMES,
    left_out=slow_compilers,
    tables=(
        times_table("Chains behind products", cases_with(group=LINEAR)),
        times_table("Without a chain behind a product", lambda case: case["group"] not in (LINEAR, *UNTIMED)),
        chains_table,
    ),
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
    plots=("chains",),
    time_limit_s=540.0,
)

if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps(measure_start(int(sys.argv[1]), START_SHAPE, torch.device("cuda"))))
