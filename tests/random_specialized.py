"""Compares kernels that interpret random programs with kernels that have them compiled in, bit by bit: for a GPU.

`python tests/random_specialized.py COUNT [SEED] [--jobs N]` takes the programs of COUNT seeds from SEED on, each in a
pointwise kernel, in one of a linear layer, in one of a reduction and in one of derivatives; with --in-turn each in one
of the four. `python tests/random_specialized.py 1 SEED` runs one of the seeds that it prints again. The exit status is
1 where any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

import torch
from generators import FLOATS, REDUCTIONS
from gpu_tensors import randn
from interpreted_and_compiled import (
    DEVICE,
    SPECIAL,
    assert_same_gradients,
    assert_same_layer,
    assert_same_pointwise,
    assert_same_reduction,
    kernels_for,
    layer,
    with_special_values,
)
from random_programs import OPERANDS, make_program, recipe_of

from cutfuse import native
from cutfuse.epilogue import Program

MOST_PROGRAMS = 400  # of a process, which keeps all kernels that it has loaded
SHOWN = 10
SHAPE = (200, 264)

Compare = Callable[[int], bool]
Check = Callable[[Program, int], None]


class Outcome(NamedTuple):
    """Of some programs: how many gave the same bits, how many no kernel interprets, and what failed by its seed."""

    same: int
    left_out: int
    failures: dict[int, str]


def compare(seed: int) -> bool:
    """Whether kernels interpret the program of this seed. Raises AssertionError where they give other bits."""
    return compare_in(checks(), seed)


def compare_in_turn(seed: int) -> bool:
    """The same in one of the kernels. Types and directions have turns of 3 and 2 seeds."""
    return compare_in([checks()[seed // 6 % len(checks())]], seed)


def checks() -> list[Check]:
    return [check_pointwise, check_layer, check_reduction, check_gradients]


def compare_in(chosen: Sequence[Check], seed: int) -> bool:
    program = make_program(recipe_of(seed))
    if not program.native.is_interpreted:
        return False
    for check in chosen:
        native.core.forget_calls()  # whose plans hold what was compiled before
        native.core.forget_specializations()
        check(program, seed)
    return True


def check_pointwise(program: Program, seed: int) -> None:
    """At special values among others."""
    x, *operands = (randn(*SHAPE, dtype=dtype_of(seed), seed=place) for place in range(1 + OPERANDS))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, device=DEVICE)[:, None]
    assert_same_pointwise(program, x, operands)


def check_layer(program: Program, seed: int) -> None:
    """In the kernel that is fastest for it."""
    operands = [randn(*SHAPE, seed=1 + place) for place in range(OPERANDS)]
    arguments = layer(program, operands, dtype_of(seed), shape=SHAPE)
    assert_same_layer(arguments, kernels_for(arguments)[:1])


def check_gradients(program: Program, seed: int) -> None:
    """At special values among others. A program without a gradient runs forwards."""
    wanted = [k for k in range(1 + OPERANDS) if k in program.inputs_with_gradient]
    if not wanted:
        check_pointwise(program, seed)
        return
    grad, x, *operands = with_special_values(2 + OPERANDS, SHAPE, dtype_of(seed))
    assert_same_gradients(program, grad, x, operands, wanted, column_sum=seed % 2 == 1)


def check_reduction(program: Program, seed: int) -> None:
    """Runs a mere factor, which sums are multiplied by, as it is."""
    if program.native.scaling is not None:
        check_pointwise(program, seed)
        return
    x, *operands = (randn(*SHAPE, dtype=dtype_of(seed), seed=place) for place in range(1 + OPERANDS))
    assert_same_reduction(program, x, operands, REDUCTIONS[seed // 24 % len(REDUCTIONS)], -1 - seed % 2)


def dtype_of(seed: int) -> torch.dtype:
    return FLOATS[seed % len(FLOATS)]


def compare_all(compare: Compare, seeds: range) -> Outcome:
    interpreted, failures = [], {}
    for seed in seeds:
        try:
            interpreted.append(compare(seed))
        except Exception as error:
            failures[seed] = f"{type(error).__name__}: {error}"
    return Outcome(sum(interpreted), len(interpreted) - sum(interpreted), failures)


def shares_of(seeds: range, jobs: int) -> list[range]:
    """One for each process: `jobs` at least, where there are so many seeds."""
    size = min(MOST_PROGRAMS, -(-len(seeds) // jobs))
    return [seeds[start : start + size] for start in range(0, len(seeds), size)]


def run_share(compare: Compare, seeds: range) -> Outcome:
    """In a process of its own, which may die."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            return process.submit(compare_all, compare, seeds).result()
    except BrokenProcessPool:
        return Outcome(0, 0, {seeds.start: f"the process of seeds {seeds.start} to {seeds[-1]} died"})


def run_shares(compare: Compare, shares: Sequence[range], jobs: int) -> Iterator[Outcome]:
    """`jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda seeds: run_share(compare, seeds), shares)


def total_of(outcomes: Iterable[Outcome]) -> Outcome:
    same, left_out, failures = 0, 0, {}
    for outcome in outcomes:
        same += outcome.same
        left_out += outcome.left_out
        failures |= outcome.failures
    return Outcome(same, left_out, failures)


def summary_of(total: Outcome) -> str:
    """One line."""
    text = f"{total.same} programs with the same bits, {total.left_out} that no kernel interprets, "
    if not total.failures:
        return text + "0 failed"
    seeds = sorted(total.failures)
    ending = ", ..." if len(seeds) > SHOWN else ""
    return f"{text}{len(seeds)} failed, of seeds {', '.join(map(str, seeds[:SHOWN]))}{ending}"


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare both tiers' bits for random programs.")
    parser.add_argument("count", type=at_least_one, metavar="COUNT")
    parser.add_argument("seed", type=int, nargs="?", default=0, metavar="SEED", help="the first; 0 unless given")
    parser.add_argument("--jobs", type=at_least_one, default=1, metavar="N", help="compare in N processes at a time")
    parser.add_argument("--in-turn", action="store_true", help="compare each program in one of the kernels, not in all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], by: Compare | None = None) -> int:
    options = read_arguments(arguments)
    by = by or (compare_in_turn if options.in_turn else compare)
    os.environ.setdefault("CUDA_CACHE_DISABLE", "1")  # the driver's cache is for kernels that are needed again
    seeds = range(options.seed, options.seed + options.count)
    total = total_of(run_shares(by, shares_of(seeds, options.jobs), options.jobs))
    for seed in sorted(total.failures)[:SHOWN]:
        print(f"seed {seed}: {total.failures[seed]}", file=sys.stderr)
    print(summary_of(total))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
