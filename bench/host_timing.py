"""What a call costs the host, and what it takes as a whole: contenders timed in turns, a few calls at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from bench.timing import Effort, Launch, in_rounds, spread, without_collector

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
    """Give every call its turns, and say of how many rounds their times are."""
    take = {name: partial(take_turn, call, turn, wait, now) for name, call in calls.items()}
    with without_collector():
        samples = in_rounds(take, effort, seed, now=lambda: 1e-9 * now())
    return {name: CallTime(*spread(values)) for name, values in samples.items()}, len(next(iter(samples.values()), ()))
