"""How launches are timed and results compared with fp64, and that the host's time is in no figure of the device."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from bench_runs import LaunchClock

from bench import timing
from bench.timing import HOST, IN_A_ROW, TURNS, WHOLE, Effort, Turn, take_turn, time_in_turns, wait_for
from bench.workloads import Reference, product_rows, relative_error


def test_rounds_are_in_changing_order_and_the_first_ones_are_dropped() -> None:
    orders: list[str] = []

    def run_round(names: list[str]) -> dict[str, int]:
        orders.append("".join(names))
        return dict.fromkeys(names, len(orders))

    found = timing.in_rounds("abc", run_round, timing.Effort(1.0, 12, 12), seed=3)
    assert found == {name: list(range(timing.FIRST_ROUNDS_DROPPED + 1, len(orders) + 1)) for name in "abc"}
    assert len(orders) == timing.FIRST_ROUNDS_DROPPED + 12
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 1
    assert timing.in_rounds("", run_round, timing.Effort(1.0, 12, 12), seed=3) == {}


def test_each_launch_has_its_own_time() -> None:
    launches = {name: partial(float, us) for name, us in (("a", 10.0), ("b", 20.0))}
    found = timing.interleave(launches, LaunchClock(), timing.Effort(0.1, 12, 12), seed=3)
    assert {name: (own["median_us"], own["p90_us"], own["rounds"]) for name, own in found.items()} == {
        "a": (10.0, 10.0, 12),
        "b": (20.0, 20.0, 12),
    }


@pytest.mark.gpu
def test_cuda_clock_leaves_out_the_hosts_time() -> None:
    x = torch.ones(1024, device="cuda")

    def launch() -> None:
        time.sleep(1e-3)
        x.neg()

    found = timing.interleave({"slow host": launch}, timing.CudaClock(x.device), timing.Effort(0.1, 5, 5), seed=0)
    assert found["slow host"]["host_us"] > 1000
    assert found["slow host"]["median_us"] < 100


def test_percentiles_are_interpolated() -> None:
    assert timing.spread([4.0, 1.0, 3.0, 2.0])[0] == 2.5
    assert timing.spread([7.0]) == (7.0, 7.0, 7.0)
    assert timing.spread([0.0, 10.0]) == pytest.approx((5.0, 1.0, 9.0))


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


def interleaved(host: Host) -> timing.Times:
    launches = {"layer": lambda: None}
    return timing.interleave(launches, host, timing.Effort(0.1, 4, 4), seed=0)["layer"]


@pytest.mark.parametrize("slower", [[1000.0], [20.0, 20.0, 20.0, 20.0, 900.0, 20.0]], ids=["always", "once"])
def test_a_host_slower_than_expected_is_in_no_figure(slower: list[float]) -> None:
    found = interleaved(Host(*slower))
    assert found["p90_us"] == found["median_us"] == DEVICE_US
    assert (found["rounds"], found["late"]) == (4, 0)


def test_the_launches_of_a_round_are_queued_before_the_device_is_waited_for() -> None:
    """A device that rested between them would run at another clock than one that is busy."""
    done: list[str] = []

    class Clock(Host):
        def wait(self) -> None:
            done.append("wait")

    launches = {name: partial(done.append, name) for name in "abc"}
    timing.interleave(launches, Clock(20.0), timing.Effort(0.1, 4, 4), seed=0)
    rounds = "".join("|" if entry == "wait" else entry for entry in done).split("|")
    assert len([names for names in rounds if sorted(names) == ["a", "b", "c"]]) == 4 + timing.FIRST_ROUNDS_DROPPED


def test_the_backlog_is_doubled_until_the_host_is_done_in_time() -> None:
    host = Host(1000.0)
    backlogs = timing.Backlogs({"layer": 50.0}, host)
    for _ in range(2):
        assert backlogs.queue({"layer": lambda: None})["layer"].microseconds() == DEVICE_US
    assert host.backlogs == [100.0, 200.0, 400.0, 800.0, 1600.0, 1600.0]


def test_no_backlog_is_longer_than_the_longest_and_what_is_late_then_is_counted() -> None:
    host = Host(2 * timing.LONGEST_BACKLOG_US)
    found = interleaved(host)
    assert found["median_us"] == DEVICE_US + timing.LONGEST_BACKLOG_US
    assert (found["rounds"], found["late"]) == (4, 4)
    assert max(host.backlogs) == timing.LONGEST_BACKLOG_US


def test_rounds_fill_the_time_within_their_bounds_and_end_early_where_they_take_longer() -> None:
    for effort, count in (
        (timing.Effort(0.01, 2, 100), 10),
        (timing.Effort(0.01, 20, 100), 20),
        (timing.Effort(1.0, 1, 100), 100),
    ):
        assert len(list(effort.rounds_of(0.001, now=lambda: 0.0))) == count
    seconds = iter([0.0, 0.03])
    assert list(timing.Effort(0.01, 2, 100).rounds_of(0.001, now=lambda: next(seconds))) == [0, 1]


@pytest.mark.gpu
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


@pytest.mark.parametrize(
    ("turn", "microseconds", "log"),
    [
        (Turn(2, 3), 1.0, "a a now a a a now wait"),
        (Turn(2, 2, waits_inside=1), 2.0, "a a wait now a wait a wait now wait"),
        (Turn(1, 3, waits_inside=3), 2.0, "a wait now a a a wait now wait"),
    ],
    ids=[HOST, WHOLE, IN_A_ROW],
)
def test_a_turn_leaves_out_warm_calls_and_the_waits_that_are_not_inside(
    turn: Turn, microseconds: float, log: str
) -> None:
    machine = FakeMachine()
    assert take_turn(machine.call("a"), turn, machine.wait, machine.now) == microseconds
    assert machine.log == log.split()


@pytest.mark.parametrize("kind", [HOST, WHOLE, IN_A_ROW])
def test_a_turn_starts_and_ends_with_an_empty_queue(kind: str) -> None:
    machine = FakeMachine()
    calls = {name: machine.call(name) for name in "ab"}
    time_in_turns(calls, TURNS[kind], machine.wait, Effort(1.0, 5, 5), seed=0, now=machine.now)
    turn = TURNS[kind]
    assert machine.longest_queue == (turn.waits_inside or turn.warm_calls + turn.timed_calls)
    assert machine.queued == 0
    # The largest call had 19 launches, and a device queues about a thousand.
    assert 19 * (turn.warm_calls + turn.timed_calls) < 1000 / 2


def test_the_collector_is_off_meanwhile_and_on_again_whatever_happens() -> None:
    machine = FakeMachine()
    found = time_in_turns({"a": machine.call("a")}, TURNS[HOST], machine.wait, Effort(1.0, 2, 2), 0, machine.now)
    assert (found["a"]["median_us"], found["a"]["rounds"]) == (1.0, 2)
    assert machine.collecting == {False}
    assert gc.isenabled()

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        time_in_turns({"a": fail}, TURNS[HOST], machine.wait, Effort(1.0, 2, 2), 0, machine.now)
    assert gc.isenabled()


@pytest.mark.gpu
def test_the_device_counts_in_all_times_but_the_hosts() -> None:
    device = torch.device("cuda")
    wait = wait_for(device)

    def call() -> None:
        torch.cuda._sleep(2_000_000)  # at least 1 ms

    times = {
        kind: time_in_turns({"a": call}, TURNS[kind], wait, Effort(0.1, 3, 3), seed=0)["a"]["median_us"]
        for kind in (HOST, WHOLE, IN_A_ROW)
    }
    assert times[HOST] < 200
    assert min(times[WHOLE], times[IN_A_ROW]) > 800
