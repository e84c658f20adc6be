"""Turns on a device that processes share: one at a time, again inside, and free once a process has ended."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from bench import device_turns
from bench.device_turns import DeviceTurns, autotune_alone


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run."""
    found = tmp_path / "turns"
    found.mkdir()
    return found


def note_turns(path: Path, log: Path, ends_inside: bool) -> None:
    """A process: take a turn, and note its beginning and end."""
    with DeviceTurns(path).alone():
        with log.open("a") as file:
            file.write(f"{os.getpid()} begins\n")
        time.sleep(0.1)
        if ends_inside:
            os._exit(0)
        with log.open("a") as file:
            file.write(f"{os.getpid()} ends\n")


def run_processes(path: Path, log: Path, ends_inside: list[bool]) -> list[str]:
    """What the processes noted."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=note_turns, args=(path, log, ends)) for ends in ends_inside]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return log.read_text().splitlines()


def test_one_process_at_a_time_has_the_turn(path: Path, tmp_path: Path) -> None:
    lines = run_processes(path, tmp_path / "log", [False] * 4)
    assert [line.split()[1] for line in lines] == ["begins", "ends"] * 4
    assert all(begin.split()[0] == end.split()[0] for begin, end in zip(lines[::2], lines[1::2], strict=True))


def test_a_process_that_ends_in_its_turn_leaves_it_free(path: Path, tmp_path: Path) -> None:
    assert len(run_processes(path, tmp_path / "log", [True] * 3)) == 3


def test_a_turn_is_entered_again_inside_and_after_a_failure(path: Path) -> None:
    turns = DeviceTurns(path)
    with pytest.raises(ValueError, match="no"), turns.alone(), turns.alone():
        raise ValueError("no")
    assert turns.depth == 0
    with turns.alone():
        assert turns.depth == 1


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


def test_a_process_without_others_takes_no_turns() -> None:
    turns = DeviceTurns()
    with turns.preparing(), turns.timing(), turns.alone():
        assert turns.folder is None


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
