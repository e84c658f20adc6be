"""The device's time of a call of a model, and the time until the caller has its result: contenders in turns."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.host_timing import without_collector
from bench.timing import Backlogs, Clock, Effort, Launch, spread

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


def device_turn(name: str, call: Call, clock: Clock, backlogs: Backlogs) -> float:
    """The device's microseconds of one call that is queued behind other work; called again where that was too short."""
    while True:
        call.before()
        queued = clock.start(call.run, backlogs[name])
        clock.wait()
        if backlogs.covers(name, queued):
            return queued.microseconds()


def time_models(
    calls: Mapping[str, Call], host_us: Mapping[str, float], clock: Clock, effort: Effort, seed: int
) -> tuple[dict[str, CallTimes], int]:
    """Both times of every call once in each round, in a new random order; and the number of rounds that count.

    `host_us` is what `warm_up` gave: the device is kept busy for twice as long while a call is issued, at first.
    """
    order = random.Random(seed)
    backlogs = Backlogs(host_us)
    device: dict[str, list[float]] = {name: [] for name in calls}
    whole: dict[str, list[float]] = {name: [] for name in calls}

    def run_round() -> float:
        gc.collect()  # The collector is off within a round, and a model's results may hold cycles with tensors in them.
        began = time.perf_counter()
        names = list(calls)
        order.shuffle(names)
        for name in names:
            device[name].append(device_turn(name, calls[name], clock, backlogs))
            whole[name].append(wall_turn(calls[name], clock)[1])
        return time.perf_counter() - began

    gc.collect()
    gc.freeze()
    try:
        with without_collector():
            round_seconds = run_round()
            for values in (*device.values(), *whole.values()):
                values.clear()
            backlogs.late.clear()
            for _ in effort.rounds_of(round_seconds):
                run_round()
    finally:
        gc.unfreeze()
    times = {name: _times_of(device[name], whole[name], backlogs.late[name]) for name in calls}
    return times, len(next(iter(device.values())))


def _times_of(device: list[float], whole: list[float], late: int) -> CallTimes:
    (gpu_us, *gpu_range), (wall_us, *wall_range) = spread(device), spread(whole)
    return CallTimes(gpu_us, wall_us, tuple(gpu_range), tuple(wall_range), late)
