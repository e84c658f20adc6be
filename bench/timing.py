"""Timing contenders launch by launch, in random order, from a cold cache, without the host's time in the figures."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

Launch = Callable[[], object]

WARM_UP_LAUNCHES = 3
FIRST_ROUNDS_DROPPED = 2
# Spin cycles for a microsecond of backlog: at least the clock of today's cards, so that the spin is not too short.
CYCLES_PER_US = 2000
SHORTEST_BACKLOG_US = 30.0
# An eager forward pass of 24 layers takes the host 20 ms; a longer spin would cost more than it shows.
LONGEST_BACKLOG_US = 60_000.0


@dataclass(frozen=True)
class Effort:
    """How long to measure: about `seconds` for all contenders of a case together, within the bounds on rounds."""

    seconds: float = 1.0
    least_rounds: int = 10
    most_rounds: int = 100

    def scaled(self, share: float) -> Effort:
        """`share` of the time, within the same bounds."""
        return replace(self, seconds=share * self.seconds)

    def rounds_of(self, round_seconds: float) -> Iterator[int]:
        """The rounds to run, of about `round_seconds` each; no more when they take twice as long as they are to."""
        began = time.perf_counter()
        for count in range(min(max(int(self.seconds / round_seconds), self.least_rounds), self.most_rounds)):
            if count >= self.least_rounds and time.perf_counter() - began > 2 * self.seconds:
                return
            yield count


@dataclass(frozen=True)
class Timing:
    """Microseconds: of the device for one launch (median, percentiles), of the host to queue it (median).

    late: of how many of the `rounds` the host's time may be a part.
    """

    median_us: float
    p10_us: float
    p90_us: float
    host_us: float
    rounds: int
    late: int = 0


@dataclass(frozen=True)
class Queued:
    """A launch that was queued: `microseconds` gives the device's once `Clock.wait` has returned.

    `in_time`: the device was still busy with the backlog when the host had issued the launch. Where it was not, the
    device may have waited for the host, whose time is then in the figure.
    """

    microseconds: Callable[[], float]
    in_time: bool = True


class Clock(Protocol):
    """Times one launch on one kind of device."""

    def start(self, launch: Launch, backlog_us: float) -> Queued:
        """Queue the launch behind `backlog_us` of other work."""
        ...

    def wait(self) -> None:
        """Return when the device has done all that was queued."""
        ...


class HostClock:
    """For the CPU, where a call returns when its work is done. Caches are left as the contenders leave them."""

    def start(self, launch: Launch, backlog_us: float) -> Queued:
        """Run `launch` at once."""
        del backlog_us
        before = time.perf_counter()
        launch()
        elapsed = 1e6 * (time.perf_counter() - before)
        return Queued(lambda: elapsed)

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

    def start(self, launch: Launch, backlog_us: float) -> Queued:
        """Queue flush, spin, event, launch, event, and ask whether the device has reached the first event already."""
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.sum(self.buffer, dim=0, out=self.sink)
        torch.cuda._sleep(int(CYCLES_PER_US * backlog_us))
        first.record()
        launch()
        last.record()
        return Queued(lambda: 1e3 * first.elapsed_time(last), in_time=not first.query())

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


def spread(values: list[float]) -> tuple[float, float, float]:
    """The median, the 10th and the 90th percentile."""
    return percentile(values, 0.5), percentile(values, 0.1), percentile(values, 0.9)


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


class Backlogs:
    """For how many microseconds the device is kept busy while each launch is issued, so that it does not wait for it.

    At first twice the host's time; twice as long each time that this was too short, because the host takes longer now
    and then. `late` counts the times that were taken though the longest was too short.
    """

    def __init__(self, host_us: Mapping[str, float]) -> None:
        self.late: Counter[str] = Counter()
        self._us = {name: self._within(2 * us) for name, us in host_us.items()}

    def __getitem__(self, name: str) -> float:
        return self._us[name]

    def covers(self, name: str, queued: Queued) -> bool:
        """Whether a time counts: it does where it was in time, and where no longer backlog is taken."""
        if queued.in_time:
            return True
        if self._us[name] == LONGEST_BACKLOG_US:
            self.late[name] += 1
            return True
        self._us[name] = self._within(2 * self._us[name])
        return False

    @staticmethod
    def _within(us: float) -> float:
        return min(max(us, SHORTEST_BACKLOG_US), LONGEST_BACKLOG_US)


def interleave(launches: Mapping[str, Launch], clock: Clock, effort: Effort, seed: int) -> dict[str, Timing]:
    """Time every launch once a round, each round in a new random order.

    A launch for which the device waited is timed again at the end of the round.
    """
    order = random.Random(seed)
    host = {name: host_time_us(launch, clock) for name, launch in launches.items()}
    backlogs = Backlogs(host)
    samples: dict[str, list[float]] = {name: [] for name in launches}

    def run_round(keep: bool) -> None:
        names = list(launches)
        order.shuffle(names)
        while names:
            pending = [(name, clock.start(launches[name], backlogs[name])) for name in names]
            clock.wait()
            names = [name for name, queued in pending if not backlogs.covers(name, queued)]
            for name, queued in pending:
                if keep and name not in names:
                    samples[name].append(queued.microseconds())

    for _ in range(FIRST_ROUNDS_DROPPED):
        before = time.perf_counter()
        run_round(keep=False)
        round_seconds = time.perf_counter() - before
    backlogs.late.clear()
    for _ in effort.rounds_of(round_seconds):
        run_round(keep=True)
    return {
        name: Timing(*spread(values), host[name], len(values), backlogs.late[name]) for name, values in samples.items()
    }
