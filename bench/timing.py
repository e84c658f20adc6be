"""Timing contenders launch by launch, in random order, from a cold cache, without the host's time in the figures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Launch = Callable[[], object]

WARM_UP_LAUNCHES = 3
FIRST_ROUNDS_DROPPED = 2
# Spin cycles for a microsecond of backlog: at least the clock of today's cards, so that the spin is not too short.
CYCLES_PER_US = 2000


@dataclass(frozen=True)
class Effort:
    """How long to measure: about `seconds` for all contenders of a case together, within the bounds on rounds."""

    seconds: float = 1.0
    least_rounds: int = 10
    most_rounds: int = 100

    def scaled(self, share: float) -> Effort:
        """`share` of the time, within the same bounds."""
        return replace(self, seconds=share * self.seconds)


@dataclass(frozen=True)
class Timing:
    """Microseconds: of the device for one launch (median, percentiles), of the host to queue it (median)."""

    median_us: float
    p10_us: float
    p90_us: float
    host_us: float
    rounds: int


class Clock(Protocol):
    """Times one launch on one kind of device."""

    def start(self, launch: Launch, backlog_us: float) -> Callable[[], float]:
        """Queue the launch behind `backlog_us` of other work; call the result after `wait` for its microseconds."""
        ...

    def wait(self) -> None:
        """Return when the device has done all that was queued."""
        ...


class HostClock:
    """For the CPU, where a call returns when its work is done. Caches are left as the contenders leave them."""

    def start(self, launch: Launch, backlog_us: float) -> Callable[[], float]:
        """Run `launch` at once."""
        del backlog_us
        before = time.perf_counter()
        launch()
        elapsed = 1e6 * (time.perf_counter() - before)
        return lambda: elapsed

    def wait(self) -> None:
        """Nothing is ever outstanding."""


class CudaClock:
    """CUDA events around the launch, behind a read of a buffer past the L2 cache and a spinning kernel.

    The cache is flushed by reading, which leaves clean lines. Flushing by writing would leave up to an L2 of dirty
    ones, whose write-back (14 us on an H200) then falls into the timed kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush_bytes = max(4 * cache_bytes, 1 << 28)
        self.buffer = torch.ones(self.flush_bytes // 4, device=device)
        self.sink = torch.empty((), device=device)

    def start(self, launch: Launch, backlog_us: float) -> Callable[[], float]:
        """Queue flush, spin, event, launch, event: the device reaches the first event after the host is done."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.sum(self.buffer, dim=0, out=self.sink)
        torch.cuda._sleep(int(CYCLES_PER_US * backlog_us))
        first.record()
        launch()
        last.record()
        return lambda: 1e3 * first.elapsed_time(last)

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def percentile(values: list[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def host_time_us(launch: Launch, clock: Clock) -> float:
    """The host's time to queue one warm launch on an idle device, the median of three."""
    times = []
    for _ in range(WARM_UP_LAUNCHES + 3):
        clock.wait()
        before = time.perf_counter()
        launch()
        times.append(1e6 * (time.perf_counter() - before))
    clock.wait()
    return percentile(times[WARM_UP_LAUNCHES:], 0.5)


def interleave(launches: dict[str, Launch], clock: Clock, effort: Effort, seed: int) -> dict[str, Timing]:
    """Time every launch once a round, each round in a new random order."""
    order = random.Random(seed)
    host = {name: host_time_us(launch, clock) for name, launch in launches.items()}
    # Twice the host's time, so that the device is still busy when the launch and its last event are queued.
    backlog = {name: min(max(2 * us, 30.0), 2000.0) for name, us in host.items()}
    samples: dict[str, list[float]] = {name: [] for name in launches}

    def run_round(keep: bool) -> None:
        names = list(launches)
        order.shuffle(names)
        pending = [(name, clock.start(launches[name], backlog[name])) for name in names]
        clock.wait()
        for name, read in pending:
            elapsed = read()
            if keep:
                samples[name].append(elapsed)

    for _ in range(FIRST_ROUNDS_DROPPED):
        before = time.perf_counter()
        run_round(keep=False)
        round_seconds = time.perf_counter() - before
    rounds = min(max(int(effort.seconds / round_seconds), effort.least_rounds), effort.most_rounds)
    for _ in range(rounds):
        run_round(keep=True)
    return {
        name: Timing(percentile(values, 0.5), percentile(values, 0.1), percentile(values, 0.9), host[name], len(values))
        for name, values in samples.items()
    }
