"""How the host suite takes times, on a clock that the calls and the waits move."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from bench.host_run import HOST, IN_A_ROW, TURNS, WHOLE, Turn, take_turn, time_in_turns, wait_for
from bench.timing import FIRST_ROUNDS_DROPPED, Effort


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
    assert take_turn(machine.call("a"), Turn(2, 3), machine.wait, machine.now) == 1.0
    assert machine.log == ["a", "a", "now", "a", "a", "a", "now", "wait"]


def test_a_whole_turn_waits_before_its_time_and_after_each_call_within_it() -> None:
    machine = FakeMachine()
    assert take_turn(machine.call("a"), Turn(2, 2, waits_inside=1), machine.wait, machine.now) == 2.0
    assert machine.log == ["a", "a", "wait", "now", "a", "wait", "a", "wait", "now", "wait"]


def test_calls_in_a_row_are_waited_for_once_within_their_time() -> None:
    machine = FakeMachine()
    assert take_turn(machine.call("a"), Turn(1, 3, waits_inside=3), machine.wait, machine.now) == 2.0
    assert machine.log == ["a", "wait", "now", "a", "a", "a", "wait", "now", "wait"]


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


def test_contenders_take_turns_in_changing_order_and_first_rounds_are_dropped() -> None:
    machine = FakeMachine()
    slow_at_first = iter([50_000] * 3 * FIRST_ROUNDS_DROPPED)
    steady = machine.call("a", 1000)

    def warming() -> None:
        machine.time += next(slow_at_first, 0)
        steady()

    calls = {"a": warming, "b": machine.call("b", 2000), "c": machine.call("c", 3000)}
    found, rounds_timed = time_in_turns(calls, Turn(1, 2), machine.wait, Effort(1.0, 12, 12), seed=3, now=machine.now)
    assert {name: time.median_us for name, time in found.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert {(time.p10_us, time.p90_us) for time in found.values()} == {(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)}
    turns = [name for name in machine.log if name in calls]
    assert turns == [name for name in turns[::3] for _ in range(3)]
    rounds = [tuple(turns[start : start + 9 : 3]) for start in range(0, len(turns), 9)]
    assert len(rounds) == FIRST_ROUNDS_DROPPED + rounds_timed == FIRST_ROUNDS_DROPPED + 12
    assert all(sorted(round_) == ["a", "b", "c"] for round_ in rounds)
    assert len(set(rounds)) > 1


def test_the_median_is_over_turns() -> None:
    machine = FakeMachine()
    costs = iter([0] * FIRST_ROUNDS_DROPPED + [1000, 1000, 1000, 90_000, 5000])

    def call() -> None:
        machine.time += next(costs)

    found, _ = time_in_turns({"a": call}, Turn(0, 1), machine.wait, Effort(1.0, 5, 5), seed=0, now=machine.now)
    assert found["a"].median_us == 1.0
    assert found["a"].p90_us > 5.0


def test_rounds_fill_the_time_within_their_bounds() -> None:
    def rounds(effort: Effort) -> int:
        machine = FakeMachine()
        turn = Turn(0, 1, waits_inside=1)  # a round takes 2 us
        return time_in_turns({"a": machine.call("a")}, turn, machine.wait, effort, 0, machine.now)[1]

    assert rounds(Effort(2e-5, 1, 100)) == 10
    assert rounds(Effort(2e-5, 20, 100)) == 20
    assert rounds(Effort(1.0, 1, 100)) == 100


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
def test_the_device_counts_in_all_times_but_the_hosts() -> None:
    device = torch.device("cuda")
    wait = wait_for(device)

    def call() -> None:
        torch.cuda._sleep(2_000_000)  # at least 1 ms

    times = {
        kind: time_in_turns({"a": call}, TURNS[kind], wait, Effort(0.1, 3, 3), seed=0)[0]["a"].median_us
        for kind in (HOST, WHOLE, IN_A_ROW)
    }
    assert times[HOST] < 200
    assert min(times[WHOLE], times[IN_A_ROW]) > 800
