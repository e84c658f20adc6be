"""How launches are timed and results compared with fp64, and that the host's time is in no figure of the device."""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from bench_runs import LaunchClock

from bench import model_timing, timing
from bench.accuracy import relative_error
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
    timed_model(host)
    assert host.backlogs[:5] == [100.0, 200.0, 400.0, 800.0, 1600.0]
    assert set(host.backlogs[5:]) == {1600.0}


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
