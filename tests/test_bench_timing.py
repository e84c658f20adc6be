"""How launches are timed and results compared with fp64, and that the host's time is in no figure of the device."""

from __future__ import annotations

import gc
import math
import multiprocessing
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import LaunchClock
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from bench import device_turns, model_timing, timing
from bench.accuracy import relative_error
from bench.device_turns import DeviceTurns, autotune_alone
from bench.host_timing import HOST, TURNS, WHOLE, Turn, take_turn, time_in_turns, wait_for
from bench.timing import FIRST_ROUNDS_DROPPED, Effort
from bench.workloads import Reference, product_rows


def test_interleaving_times_each_once_a_round_in_changing_order() -> None:
    clock = LaunchClock()
    launched: list[str] = []

    def launch(name: str, elapsed: float) -> timing.Launch:
        def run() -> float:
            launched.append(name)
            return elapsed

        return run

    names = {"a": 10.0, "b": 20.0, "c": 30.0}
    launches = {name: launch(name, elapsed) for name, elapsed in names.items()}
    timings = timing.interleave(launches, clock, timing.Effort(0.1, 12, 12), seed=3)
    assert {name: found.median_us for name, found in timings.items()} == names
    assert all(found.rounds == 12 for found in timings.values())
    rounds = [tuple(launched[-3 * index - 3 : len(launched) - 3 * index]) for index in range(12)]
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.gpu
@pytest.mark.no_path("times an operation of PyTorch's")
def test_cuda_clock_leaves_out_the_hosts_time() -> None:
    x = torch.ones(1024, device="cuda")

    def launch() -> None:
        time.sleep(1e-3)
        x.neg()

    found = timing.interleave({"slow host": launch}, timing.CudaClock(x.device), timing.Effort(0.1, 5, 5), seed=0)
    assert found["slow host"].host_us > 1000
    assert found["slow host"].median_us < 100


def test_relative_error_covers_every_row_and_never_passes_nan() -> None:
    expected = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(6, 2)
    reference = Reference(lambda start, stop: expected[start:stop], rows=6, elements_per_row=1 << 25)
    assert reference.step == 2
    assert relative_error(expected.float(), reference) == 0
    off = expected.float()
    off[5, 1] += 3
    assert relative_error(off, reference) == pytest.approx(3 / expected.norm().item())
    off[2, 0] = math.nan
    assert relative_error(off, reference) == math.inf
    with pytest.raises(ValueError, match=r"shape \(5, 2\)"):
        relative_error(expected[:5].float(), reference)


def test_product_reference_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 7), torch.randn(11, 7), torch.randn(11)
    expected = x[1:4].double() @ weight.double().t() + bias.double()
    monkeypatch.setattr("bench.workloads.CHUNK_ELEMENTS", 21)
    torch.testing.assert_close(product_rows(x, weight, bias, 1, 4), expected, rtol=1e-14, atol=1e-14)


DEVICE_US = 40.0


class Host:
    """A clock for launches of DEVICE_US, each of which the host issues in the next of `microseconds`."""

    def __init__(self, *microseconds: float) -> None:
        self._microseconds = chain(microseconds, repeat(microseconds[-1]))
        self.backlogs: list[float] = []

    def start(self, launch: timing.Launch, backlog_us: float) -> timing.Queued:
        launch()
        self.backlogs.append(backlog_us)
        late = max(next(self._microseconds) - backlog_us, 0.0)
        return timing.Queued(lambda: DEVICE_US + late, in_time=late == 0)

    def wait(self) -> None:
        pass


def interleaved(host: Host) -> timing.Timing:
    launches = {"layer": lambda: None}
    return timing.interleave(launches, host, timing.Effort(0.1, 4, 4), seed=0)["layer"]


def timed_model(host: Host) -> model_timing.CallTimes:
    times, _ = model_timing.time_models(
        {"model": model_timing.Call(lambda: None)}, {"model": 50.0}, host, timing.Effort(0.01, 4, 4), seed=0
    )
    return times["model"]


@pytest.mark.parametrize("slower", [[1000.0], [20.0, 20.0, 20.0, 20.0, 900.0, 20.0]], ids=["always", "once"])
def test_a_host_slower_than_expected_is_in_no_figure(slower: list[float]) -> None:
    found = interleaved(Host(*slower))
    assert found.p90_us == found.median_us == DEVICE_US
    assert (found.rounds, found.late) == (4, 0)
    model = timed_model(Host(*slower))
    assert model.gpu_us == model.gpu_range_us[1] == DEVICE_US
    assert model.late == 0


def test_no_backlog_is_longer_than_the_longest_and_what_is_late_then_is_counted() -> None:
    host = Host(2 * timing.LONGEST_BACKLOG_US)
    found = interleaved(host)
    assert found.median_us == DEVICE_US + timing.LONGEST_BACKLOG_US
    assert (found.rounds, found.late) == (4, 4)
    assert max(host.backlogs) == timing.LONGEST_BACKLOG_US
    found = timed_model(Host(2 * timing.LONGEST_BACKLOG_US))
    assert found.gpu_us == DEVICE_US + timing.LONGEST_BACKLOG_US
    assert found.late == 4


def test_rounds_that_take_longer_than_expected_end_early() -> None:
    effort = timing.Effort(0.01, 2, 100)
    assert len(list(effort.rounds_of(0.001))) == 10
    counts = []
    for count in effort.rounds_of(0.001):
        counts.append(count)
        time.sleep(0.015)
    assert counts == [0, 1]


@pytest.mark.gpu
@pytest.mark.no_path("times operations of PyTorch's")
def test_the_clock_of_a_gpu_knows_whether_the_device_waited() -> None:
    x = torch.ones(1024, device="cuda")
    clock = timing.CudaClock(x.device)

    def launch() -> None:
        time.sleep(5e-3)
        x.neg()

    for backlog_us, in_time in ((30.0, False), (50_000.0, True)):
        queued = clock.start(launch, backlog_us)
        clock.wait()
        assert queued.in_time is in_time
        assert (queued.microseconds() < 1000) is in_time


class FakeMachine:
    """A clock in nanoseconds; calls cost the host 1000 of them, waits as many for each call that is queued."""

    def __init__(self) -> None:
        self.time = 0
        self.queued = 0
        self.longest_queue = 0
        self.log: list[str] = []
        self.collecting: set[bool] = set()

    def call(self, name: str, cost: int = 1000) -> Callable[[], None]:
        def run() -> None:
            self.time += cost
            self.queued += 1
            self.longest_queue = max(self.longest_queue, self.queued)
            self.log.append(name)
            self.collecting.add(gc.isenabled())

        return run

    def wait(self) -> None:
        self.time += 1000 * self.queued
        self.queued = 0
        self.log.append("wait")

    def now(self) -> int:
        self.log.append("now")
        return self.time


def test_a_host_turn_leaves_out_warm_calls_and_every_wait() -> None:
    machine = FakeMachine()
    assert take_turn(machine.call("a"), Turn(2, 3, waits_inside=False), machine.wait, machine.now) == 1.0
    assert machine.log == ["a", "a", "now", "a", "a", "a", "now", "wait"]


def test_a_whole_turn_waits_before_its_time_and_after_each_call_within_it() -> None:
    machine = FakeMachine()
    assert take_turn(machine.call("a"), Turn(2, 2, waits_inside=True), machine.wait, machine.now) == 2.0
    assert machine.log == ["a", "a", "wait", "now", "a", "wait", "a", "wait", "now"]


def test_contenders_take_turns_in_changing_order_and_first_rounds_are_dropped() -> None:
    machine = FakeMachine()
    slow_at_first = iter([50_000] * 3 * FIRST_ROUNDS_DROPPED)
    steady = machine.call("a", 1000)

    def warming() -> None:
        machine.time += next(slow_at_first, 0)
        steady()

    calls = {"a": warming, "b": machine.call("b", 2000), "c": machine.call("c", 3000)}
    found, rounds_timed = time_in_turns(
        calls, Turn(1, 2, False), machine.wait, Effort(1.0, 12, 12), seed=3, now=machine.now
    )
    assert {name: time.median_us for name, time in found.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert {(time.p10_us, time.p90_us) for time in found.values()} == {(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)}
    turns = [name for name in machine.log if name in calls]
    assert turns == [name for name in turns[::3] for _ in range(3)]
    rounds = [tuple(turns[start : start + 9 : 3]) for start in range(0, len(turns), 9)]
    assert len(rounds) == FIRST_ROUNDS_DROPPED + rounds_timed == FIRST_ROUNDS_DROPPED + 12
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1


def test_the_collector_is_off_meanwhile_and_on_again_whatever_happens() -> None:
    machine = FakeMachine()
    time_in_turns({"a": machine.call("a")}, TURNS[HOST], machine.wait, Effort(1.0, 2, 2), 0, machine.now)
    assert machine.collecting == {False}
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        time_in_turns({"a": fail}, TURNS[HOST], machine.wait, Effort(1.0, 2, 2), 0, machine.now)
    assert gc.isenabled()
    gc.disable()
    try:
        time_in_turns({"a": machine.call("a")}, TURNS[HOST], machine.wait, Effort(1.0, 2, 2), 0, machine.now)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.no_path("calls nothing of cutfuse")
@pytest.mark.gpu
def test_the_device_counts_in_whole_times_alone() -> None:
    device = torch.device("cuda")
    wait = wait_for(device)

    def call() -> None:
        torch.cuda._sleep(2_000_000)  # at least 1 ms

    times = {
        kind: time_in_turns({"a": call}, TURNS[kind], wait, Effort(0.1, 3, 3), seed=0)[0]["a"].median_us
        for kind in (HOST, WHOLE)
    }
    assert times[HOST] < 200
    assert times[WHOLE] > 800


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run."""
    found = tmp_path / "turns"
    found.mkdir()
    return found


def prepare_and_time(path: Path, log: Path, place: int) -> None:
    """A process: prepare and time two cases, and note when."""
    turns = DeviceTurns(path)

    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{text} {place}\n")

    for _ in range(2):
        with turns.preparing():
            note("prepares")
            time.sleep(0.05)
            note("prepared")
        with turns.timing():
            note("times")
            time.sleep(0.05)
            note("timed")


def test_no_process_prepares_or_times_a_case_while_another_times_one(path: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=prepare_and_time, args=(path, log, place)) for place in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    preparing, together = 0, 0
    lines = log.read_text().splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        word, place = line.split()
        preparing += {"prepares": 1, "prepared": -1}.get(word, 0)
        together = max(together, preparing)
        if word == "times":
            assert preparing == 0
            assert after == f"timed {place}"
    assert together > 1
    assert len(lines) == 3 * 8


def test_variants_of_kernels_are_timed_in_a_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = DeviceTurns(path)
    seen: list[Any] = []

    def benchmark(self: Any, *arguments: Any, **keywords: Any) -> str:
        seen.append((self, arguments, keywords, turns.depth))
        return "times"

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", CachingAutotuner.benchmark_all_configs)
    monkeypatch.setattr(device_turns, "_benchmark", benchmark)
    autotune_alone(turns)
    autotuner = object.__new__(CachingAutotuner)
    assert autotuner.benchmark_all_configs(1, stream=2) == "times"
    assert seen == [(autotuner, (1,), {"stream": 2}, 1)]
