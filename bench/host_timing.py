"""What a call costs the host, and what it takes as a whole: contenders timed in turns, a few calls at a time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from bench.timing import FIRST_ROUNDS_DROPPED, Effort, Launch, percentile

HOST, WHOLE = "host", "whole"


@dataclass(frozen=True)
class Turn:
    """What a contender does when it is its turn: `warm_calls` that are not timed, then `timed_calls`.

    The device is waited for afterwards, so a turn begins with an empty queue. With `waits_inside` it is waited for
    before the timed calls and after each of them, within its time.
    """

    warm_calls: int
    timed_calls: int
    waits_inside: bool


# A device queues about a thousand launches, and the host waits from then on. The largest call that is timed by the host
# alone, a training step of fp32, had 19 launches: 12 of them stay far below.
TURNS = {
    HOST: Turn(warm_calls=2, timed_calls=10, waits_inside=False),
    WHOLE: Turn(warm_calls=1, timed_calls=2, waits_inside=True),
}


@dataclass(frozen=True)
class CallTime:
    """Microseconds of one call: the median and percentiles over turns, of each of which the mean counts."""

    median_us: float
    p10_us: float
    p90_us: float


@contextmanager
def without_collector() -> Iterator[None]:
    """The garbage collector is off meanwhile, as timeit has it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wait_for(device: torch.device) -> Callable[[], object]:
    """A function that returns when the device has done what the current stream holds."""
    # Cheaper for the host than torch.cuda.synchronize, which changes the device and back.
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


def take_turn(call: Launch, turn: Turn, wait: Callable[[], object], now: Callable[[], int]) -> float:
    """The mean time of a timed call in microseconds; `now` gives nanoseconds."""
    for _ in repeat(None, turn.warm_calls):
        call()
    timed = repeat(None, turn.timed_calls)
    if turn.waits_inside:
        wait()
        began = now()
        for _ in timed:
            call()
            wait()
        ended = now()
    else:
        began = now()
        for _ in timed:
            call()
        ended = now()
        wait()
    return 1e-3 * (ended - began) / turn.timed_calls


def time_in_turns(
    calls: Mapping[str, Launch],
    turn: Turn,
    wait: Callable[[], object],
    effort: Effort,
    seed: int,
    now: Callable[[], int] = time.perf_counter_ns,
) -> tuple[dict[str, CallTime], int]:
    """Give every call a turn in each round, in a new random order; the first rounds warm up, the others are counted."""
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    take = partial(take_turn, turn=turn, wait=wait, now=now)

    def run_round() -> None:
        names = list(calls)
        order.shuffle(names)
        for name in names:
            samples[name].append(take(calls[name]))

    with without_collector():
        for _ in range(FIRST_ROUNDS_DROPPED):
            before = now()
            run_round()
            round_seconds = 1e-9 * (now() - before)
        for values in samples.values():
            values.clear()
        wanted = effort.most_rounds if round_seconds == 0 else int(effort.seconds / round_seconds)
        rounds = min(max(wanted, effort.least_rounds), effort.most_rounds)
        for _ in range(rounds):
            run_round()
    times = {
        name: CallTime(*(percentile(values, fraction) for fraction in (0.5, 0.1, 0.9)))
        for name, values in samples.items()
    }
    return times, rounds
