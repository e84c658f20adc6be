"""Timing contenders in rounds of random order: launches, models, and calls as the host sees them.

Device times are from a cold cache, without the host's time in them. Processes that share a device take turns on it.
"""

from __future__ import annotations

import fcntl
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

Launch = Callable[[], object]
Now = Callable[[], float]  # seconds
T = TypeVar("T")
# Of a contender, as results hold them, in microseconds. median_us: of the device for one launch, or of a call as its
# turn is timed. host_us: of the host to queue a launch. gpu_us, wall_us: of a model's call on the device, and until its
# result is there. p10_us, p90_us, gpu_range_us, wall_range_us: the 10th and the 90th percentile. late: of how many of
# the `rounds` the host's time may be a part of the device's.
Times = dict[str, Any]

WARM_UP_LAUNCHES = 3
FIRST_ROUNDS_DROPPED = 2
# Spin cycles for a microsecond of backlog: at least the clock of today's cards, so that the spin is not too short.
CYCLES_PER_US = 2000
SHORTEST_BACKLOG_US = 30.0
# An eager forward pass of 24 layers takes the host 20 ms; a longer spin would cost more than it shows.
LONGEST_BACKLOG_US = 60_000.0
QUANTILES = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)


@dataclass(frozen=True)
class Effort:
    """How long to measure: about `seconds` for all contenders of a case together, within the bounds on rounds."""

    seconds: float = 1.0
    least_rounds: int = 10
    most_rounds: int = 100

    def scaled(self, share: float) -> Effort:
        """`share` of the time, within the same bounds."""
        return replace(self, seconds=share * self.seconds)

    def rounds_of(self, round_seconds: float, now: Now = time.perf_counter) -> Iterator[int]:
        """The rounds to run, of about `round_seconds` each; no more when they take twice as long as they are to."""
        began = now()
        wanted = int(self.seconds / round_seconds) if round_seconds else self.most_rounds
        for count in range(min(max(wanted, self.least_rounds), self.most_rounds)):
            if count >= self.least_rounds and now() - began > 2 * self.seconds:
                return
            yield count


@dataclass(frozen=True)
class Queued:
    """A launch that was queued: `microseconds` gives the device's once `Clock.wait` has returned.

    `in_time`: the device was still busy with the backlog when the host had issued the launch. Where it was not, the
    device may have waited for the host, whose time is then in the figure.
    """

    microseconds: Callable[[], float]
    in_time: bool = True


class HostClock:
    """Times a launch on the CPU, where a call returns when its work is done; caches are left as they are."""

    def start(self, launch: Launch, backlog_us: float) -> Queued:
        """Run `launch` at once; where a device works behind the host's back, queue it behind `backlog_us` of work."""
        del backlog_us
        before = time.perf_counter()
        launch()
        elapsed = 1e6 * (time.perf_counter() - before)
        return Queued(lambda: elapsed)

    def wait(self) -> None:
        """Nothing is ever outstanding."""


class CudaClock:
    """Times a launch by CUDA events around it, behind a read of a buffer past the L2 cache and a spinning kernel.

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


Clock = HostClock | CudaClock


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the 10th and the 90th percentile, interpolated between neighbours."""
    found: list[float] = torch.tensor(values, dtype=torch.float64).quantile(QUANTILES).tolist()
    return found[0], found[1], found[2]


def spread_of_turns(values: Sequence[float]) -> Times:
    """The figures of a time that was taken in each round."""
    return dict(zip(("median_us", "p10_us", "p90_us"), spread(values), strict=True))


def give_back(device: torch.device) -> None:
    """Free what nobody holds any more, for other cases and other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


def in_rounds(
    names: Iterable[str],
    run_round: Callable[[list[str]], Mapping[str, T]],
    effort: Effort,
    seed: int,
    dropped: int = FIRST_ROUNDS_DROPPED,
    between: Callable[[], object] = lambda: None,
    now: Now = time.perf_counter,
) -> dict[str, list[T]]:
    """What a round gives for each name, of rounds that are each in a new random order; the first ones warm up.

    `between` is called before each round.
    """
    order = random.Random(seed)
    samples: dict[str, list[T]] = {name: [] for name in names}
    if not samples:
        return {}

    def take() -> float:
        between()
        began = now()
        for name, sample in run_round(order.sample(list(samples), len(samples))).items():
            samples[name].append(sample)
        return now() - began

    round_seconds = [take() for _ in range(dropped)][-1]
    for _ in effort.rounds_of(round_seconds, now):
        take()
    return {name: values[dropped:] for name, values in samples.items()}


def host_time_us(launch: Launch, clock: Clock) -> float:
    """The host's time to queue one warm launch on an idle device, the median of three."""
    times = []
    for _ in range(WARM_UP_LAUNCHES + 3):
        clock.wait()
        before = time.perf_counter()
        launch()
        times.append(1e6 * (time.perf_counter() - before))
    clock.wait()
    return statistics.median(times[WARM_UP_LAUNCHES:])


class Backlogs:
    """For how many microseconds the device is kept busy while each launch is issued, so that it does not wait for it.

    At first twice the host's time; twice as long each time that this was too short, because the host takes longer now
    and then.
    """

    def __init__(self, host_us: Mapping[str, float], clock: Clock) -> None:
        self._clock = clock
        self._us = {name: self._within(2 * us) for name, us in host_us.items()}

    def queue(self, launches: Mapping[str, Launch], before: Callable[[], object] = lambda: None) -> dict[str, Queued]:
        """Queue launches at once, and again those for which the device waited; `before` is called each time."""
        found: dict[str, Queued] = {}
        names = list(launches)
        while names:
            before()
            found |= {name: self._clock.start(launches[name], self._us[name]) for name in names}
            self._clock.wait()
            names = [name for name in names if not self._covers(name, found[name])]
        return found

    def _covers(self, name: str, queued: Queued) -> bool:
        """Whether a time counts: it does where it was in time, and where no longer backlog is taken."""
        if queued.in_time or self._us[name] == LONGEST_BACKLOG_US:
            return True
        self._us[name] = self._within(2 * self._us[name])
        return False

    @staticmethod
    def _within(us: float) -> float:
        return min(max(us, SHORTEST_BACKLOG_US), LONGEST_BACKLOG_US)


def counted(samples: Sequence[Queued]) -> Times:
    """How many rounds there were, and in how many the host's time may be a part, as no backlog was longer."""
    return {"rounds": len(samples), "late": sum(not sample.in_time for sample in samples)}


def interleave(launches: Mapping[str, Launch], clock: Clock, effort: Effort, seed: int) -> dict[str, Times]:
    """Time every launch once a round, all of them queued at once, so that the device does not rest between them.

    A launch for which the device waited is timed again at the end of the round.
    """
    host = {name: host_time_us(launch, clock) for name, launch in launches.items()}
    backlogs = Backlogs(host, clock)

    def run_round(names: list[str]) -> dict[str, Queued]:
        return backlogs.queue({name: launches[name] for name in names})

    samples = in_rounds(launches, run_round, effort, seed)
    return {
        name: {**spread_of_turns([one.microseconds() for one in own]), "host_us": host[name], **counted(own)}
        for name, own in samples.items()
    }


# The second call with CUDA graphs captures them, and the third is the first that replays.
WARM_UP_CALLS = 4


@dataclass(frozen=True)
class Call:
    """`before` is done before each `run` and is in no time."""

    run: Launch
    before: Callable[[], None] = lambda: None


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
) -> dict[str, Times]:
    """Both times of every call once in each round, in a new random order.

    `host_us` is what `warm_up` gave: the device is kept busy for twice as long while a call is issued, at first.
    """
    backlogs = Backlogs(host_us, clock)

    def run_round(names: list[str]) -> dict[str, tuple[Queued, float]]:
        found = {}
        for name in names:
            queued = backlogs.queue({name: calls[name].run}, calls[name].before)[name]
            found[name] = queued, wall_turn(calls[name], clock)[1]
        return found

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
        own = {"gpu_us": gpu_us, "wall_us": wall_us, "gpu_range_us": gpu_range, "wall_range_us": wall_range}
        times[name] = {**own, **counted(queued)}
    return times


HOST, WHOLE, IN_A_ROW = "host", "whole", "in a row"


@dataclass(frozen=True)
class Turn:
    """What a contender does when it is its turn: `warm_calls` that are not timed, then `timed_calls`.

    The device is waited for afterwards, so a turn begins with an empty queue. waits_inside: of how many timed calls the
    device is waited for within their time, and before them too; 0 leaves its time out.
    """

    warm_calls: int
    timed_calls: int
    waits_inside: int = 0


# A device queues about a thousand launches, and the host waits from then on. The largest call that is timed by the host
# alone, a training step of fp32, had 19 launches: 12 of them stay far below.
TURNS = {
    HOST: Turn(warm_calls=2, timed_calls=10),
    WHOLE: Turn(warm_calls=1, timed_calls=2, waits_inside=1),
    IN_A_ROW: Turn(warm_calls=2, timed_calls=20, waits_inside=20),
}


def wait_for(device: torch.device) -> Callable[[], object]:
    """A function that returns when the device has done what the current stream holds."""
    # Cheaper for the host than torch.cuda.synchronize, which changes the device and back.
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


def take_turn(call: Launch, turn: Turn, wait: Callable[[], object], now: Callable[[], int]) -> float:
    """The mean time of a timed call in microseconds; `now` gives nanoseconds."""
    for _ in repeat(None, turn.warm_calls):
        call()
    if turn.waits_inside:
        wait()
    in_a_row = turn.waits_inside or turn.timed_calls
    began = now()
    for _ in repeat(None, turn.timed_calls // in_a_row):
        for _ in repeat(None, in_a_row):
            call()
        if turn.waits_inside:
            wait()
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
) -> dict[str, Times]:
    """Give every call its turns."""

    def run_round(names: list[str]) -> dict[str, float]:
        return {name: take_turn(calls[name], turn, wait, now) for name in names}

    with without_collector():
        samples = in_rounds(calls, run_round, effort, seed, now=lambda: 1e-9 * now())
    return {name: {**spread_of_turns(values), "rounds": len(values)} for name, values in samples.items()}


_benchmark = CachingAutotuner.benchmark_all_configs


class DeviceTurns:
    """Locks of the processes that are given the same folder; a process that ends leaves them free. None: no others."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.depth = 0

    @contextmanager
    def _held(self, name: str, kind: int) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        with (self.folder / name).open("a") as file:  # whose lock ends when it is closed
            fcntl.flock(file, kind)
            yield

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Within it no process times a case. It waits behind those that wait to time one."""
        with ExitStack() as device:
            with self._held("gate", fcntl.LOCK_EX):
                device.enter_context(self._held("device", fcntl.LOCK_SH))
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Within it no other process uses the device."""
        with self._held("gate", fcntl.LOCK_EX), self._held("device", fcntl.LOCK_EX):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process is within it. May be entered again inside."""
        self.depth += 1
        try:
            if self.depth > 1:
                yield
                return
            with self._held("alone", fcntl.LOCK_EX):
                yield
        finally:
            self.depth -= 1


def autotune_alone(turns: DeviceTurns) -> None:
    """From now on this process times the variants of Triton kernels in its turns, among which Inductor chooses by that.

    Where other processes use the device meanwhile, a slower one may win: a norm of MLP-Mixer-B took 174 us in place of
    55, which is 8% of the model's training step.
    """

    def benchmark_in_turn(self: CachingAutotuner, *arguments: Any, **keywords: Any) -> Any:
        with turns.alone():
            return _benchmark(self, *arguments, **keywords)

    CachingAutotuner.benchmark_all_configs = benchmark_in_turn  # type: ignore[method-assign]
