"""Checks of random calls and models by their seeds: those of an ordinary run, a fresh one after another, or one again.

With `--random-minutes` a test draws fresh seeds for so long and goes on behind faults, and with `--random-seed` it has
one of the seeds that it printed. Each seed is printed before it is checked: what ends the process is the last one's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class RandomRun:
    """What a test did."""

    name: str
    seeds: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}: {self.seeds} seeds, {len(self.faults)} faults"


RANDOM_RUNS = pytest.StashKey[list[RandomRun]]()


def is_ordinary(config: pytest.Config) -> bool:
    """Whether no option asks for other seeds than a test's own."""
    return not config.getoption("--random-minutes") and config.getoption("--random-seed") is None


def check_seeds(
    request: pytest.FixtureRequest, name: str, seeds: Iterable[int], check: Callable[[int], str], share: float = 1.0
) -> None:
    """Fails where `check` says what is wrong with a seed, or raises.

    seeds: those of an ordinary run. share: of the minutes of a longer one.
    """
    config, run = request.config, RandomRun(name)
    chosen = seeds if is_ordinary(config) else _printed(request, name, _fresh_seeds(config, share))
    for seed in chosen:
        run.seeds += 1
        try:
            found = check(seed)
        except Exception as error:
            if is_ordinary(config):
                raise
            found = f"{type(error).__name__}: {error}"
        if found:
            run.faults.append(f"--random-seed {seed}\n{found}\n")
        if "CUDA error" in found:
            break  # nothing more can run in this process
    if not is_ordinary(config):
        config.stash[RANDOM_RUNS].append(run)
    assert not run.faults, "\n".join(run.faults)


def _fresh_seeds(config: pytest.Config, share: float) -> Iterator[int]:
    only = config.getoption("--random-seed")
    if only is not None:
        yield only
        return
    end = time.monotonic() + 60 * config.getoption("--random-minutes") * share
    while time.monotonic() < end:
        yield random.getrandbits(32)


def _printed(request: pytest.FixtureRequest, name: str, seeds: Iterator[int]) -> Iterator[int]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    for seed in seeds:
        with capture.global_and_fixture_disabled():
            print(f"\n{name}: seed {seed}", end="", file=sys.stderr, flush=True)
        yield seed


def report(terminal: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the tests of a longer run did, at its end."""
    runs = config.stash[RANDOM_RUNS]
    if not runs:
        return
    terminal.section("random seeds")
    for run in runs:
        terminal.write_line(str(run))
    seeds, faults = sum(run.seeds for run in runs), sum(len(run.faults) for run in runs)
    terminal.write_line(f"{seeds} seeds, {faults} faults, PyTorch {torch.__version__}")
