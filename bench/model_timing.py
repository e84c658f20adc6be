"""The device's time of a call of a model, and the time until the caller has its result: contenders in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.timing import Backlogs, Clock, Effort, Launch, Queued, in_rounds, late_of, spread, without_collector

# The second call with CUDA graphs captures them, and the third is the first that replays.
WARM_UP_CALLS = 4


def nothing() -> None:
    """For calls before which nothing has to be done."""


@dataclass(frozen=True)
class Call:
    """`before` is done before each `run` and is in no time."""

    run: Launch
    before: Callable[[], None] = nothing


@dataclass(frozen=True)
class CallTimes:
    """Microseconds of the device, and from the call until its result is there: medians, 10th and 90th percentiles.

    late: of how many of the device's times the host's may be a part.
    """

    gpu_us: float
    wall_us: float
    gpu_range_us: tuple[float, float]
    wall_range_us: tuple[float, float]
    late: int


def wall_turn(call: Call, clock: Clock) -> tuple[float, float]:
    """One call on an idle device, in microseconds: until it is issued, and until it is done."""
    call.before()
    clock.wait()
    began = time.perf_counter_ns()
    call.run()
    issued = time.perf_counter_ns()
    clock.wait()
    return 1e-3 * (issued - began), 1e-3 * (time.perf_counter_ns() - began)


def warm_up(call: Call, clock: Clock) -> float:
    """Call until nothing is compiled or captured any more; the microseconds that the host then takes to issue it."""
    host_us = 0.0
    for _ in range(WARM_UP_CALLS):
        host_us, _ = wall_turn(call, clock)
    return host_us


def time_models(
    calls: Mapping[str, Call], host_us: Mapping[str, float], clock: Clock, effort: Effort, seed: int
) -> tuple[dict[str, CallTimes], int]:
    """Both times of every call once in each round, in a new random order; and the number of rounds that count.

    `host_us` is what `warm_up` gave: the device is kept busy for twice as long while a call is issued, at first.
    """
    backlogs = Backlogs(host_us)

    def device_turn(name: str) -> Queued:
        """A call that is queued behind other work; called again where that was too short."""
        while True:
            calls[name].before()
            queued = backlogs.start(name, clock, calls[name].run)
            clock.wait()
            if backlogs.covers(name, queued):
                return queued

    def run_round(names: list[str]) -> dict[str, tuple[Queued, float]]:
        return {name: (device_turn(name), wall_turn(calls[name], clock)[1]) for name in names}

    gc.collect()
    gc.freeze()
    try:
        with without_collector():
            # The collector is off within a round, and a model's results may hold cycles with tensors in them.
            samples = in_rounds(calls, run_round, effort, seed, dropped=1, between=gc.collect)
    finally:
        gc.unfreeze()
    times = {}
    for name, values in samples.items():
        queued, whole = zip(*values, strict=True)
        gpu_us, *gpu_range = spread([one.microseconds() for one in queued])
        wall_us, *wall_range = spread(whole)
        times[name] = CallTimes(gpu_us, wall_us, tuple(gpu_range), tuple(wall_range), late_of(queued))
    return times, len(next(iter(samples.values())))
