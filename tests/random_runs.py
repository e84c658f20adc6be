"""Checks of random calls and models by their seeds: those of an ordinary run, a fresh one after another, or one again.

With `--random-minutes` a test draws fresh seeds for so long and goes on behind faults, and with `--random-seed` it has
one of the seeds that it printed. Each seed is printed before it is checked: what ends the process is the last one's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

PROPERTY = "random seeds"  # of a test, which its report carries from a process of pytest-xdist


def is_ordinary(config: pytest.Config) -> bool:
    """Whether no option asks for other seeds than a test's own."""
    return not config.getoption("--random-minutes") and config.getoption("--random-seed") is None


def check_seeds(
    request: pytest.FixtureRequest, name: str, seeds: Iterable[int], check: Callable[[int], str], share: float = 1.0
) -> None:
    """Fails where `check` says what is wrong with a seed, or raises.

    seeds: those of an ordinary run. share: of the minutes of a longer one.
    """
    config, count = request.config, 0
    faults: list[str] = []
    chosen = seeds if is_ordinary(config) else _printed(request, name, _fresh_seeds(config, share), faults)
    for seed in chosen:
        count += 1
        try:
            found = check(seed)
        except Exception as error:
            if is_ordinary(config):
                raise
            found = f"{type(error).__name__}: {error}"
        if found:
            faults.append(f"--random-seed {seed}\n{found}\n")
        if "CUDA error" in found:
            break  # nothing more can run in this process
    if not is_ordinary(config):
        request.node.user_properties.append((PROPERTY, (name, count, len(faults))))
    assert not faults, "\n".join(faults)


def _fresh_seeds(config: pytest.Config, share: float) -> Iterator[int]:
    only = config.getoption("--random-seed")
    if only is not None:
        yield only
        return
    end = time.monotonic() + 60 * config.getoption("--random-minutes") * share
    while time.monotonic() < end:
        yield random.getrandbits(32)


def _printed(request: pytest.FixtureRequest, name: str, seeds: Iterator[int], faults: list[str]) -> Iterator[int]:
    """The seeds, each with the count of faults before it, which so outlives a run that is ended early."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    for seed in seeds:
        with capture.global_and_fixture_disabled():
            print(f"\n{name}: seed {seed}, {len(faults)} faults before", end="", file=sys.stderr, flush=True)
        yield seed


def report(terminal: pytest.TerminalReporter) -> None:
    """What the tests of a longer run did, at its end."""
    reports = [each for group in terminal.stats.values() for each in group if getattr(each, "when", "") == "call"]
    runs = [value for each in reports for name, value in each.user_properties if name == PROPERTY]
    if not runs:
        return
    terminal.section("random seeds")
    for name, seeds, faults in runs:
        terminal.write_line(f"{name}: {seeds} seeds, {faults} faults")
    seeds, faults = (sum(counts) for counts in list(zip(*runs, strict=True))[1:])
    terminal.write_line(f"{seeds} seeds, {faults} faults, PyTorch {torch.__version__}")
