"""What a suite is: its cases, how each is measured, the goals that it is held to, its tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from bench import SUITES
from bench.tables import KEY, Table
from bench.timing import Clock, CudaClock, DeviceTurns, Effort, HostClock

Figures = dict[str, Any]  # of one case, as JSON holds them
Results = dict[str, Any]  # a results file's content
Turn = Callable[[], Figures]
EFFORT, QUICK_EFFORT = Effort(), Effort(0.2, 5, 20)


def key_of(figures: Figures) -> tuple[str, ...]:
    """What tells a case's figures from another's."""
    return tuple(figures.get(name, "") for name in KEY)


def title_of(figures: Figures) -> str:
    """A case's title, of its figures."""
    return " ".join(part for part in key_of(figures) if part)


@dataclass(frozen=True)
class Session:
    """How cases are measured in this process, one of `beside`. `contenders`: the names of those that take part."""

    device: torch.device
    contenders: tuple[str, ...]
    effort: Effort
    seed: int = 0
    turns: DeviceTurns = field(default_factory=DeviceTurns)
    beside: int = 1

    @cached_property
    def clock(self) -> Clock:
        """The device's clock."""
        return CudaClock(self.device) if self.device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Case:
    """One row of a suite's results.

    `prepare` does all that needs no quiet device, such as compiling; what it returns times the case, or it returns the
    figures where nothing of the case is timed in turns. `seconds` is a first guess of what it takes. `about`: fields of
    the figures beside its key. `package` has to be installed for it, or is empty. needs_grad: whether autograd is on.
    """

    group: str
    variant: str
    shape: str
    precision: str
    prepare: Callable[[Session], Turn | Figures]
    seconds: float = 2.0
    about: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    needs_grad: bool = False

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        return title_of(self.as_dict())

    def as_dict(self) -> Figures:
        """What its figures begin with."""
        return {**{name: getattr(self, name) for name in KEY}, **self.about}


def shard_of(cases: Sequence[Case], index: int, count: int) -> list[Case]:
    """Part `index`, counted from 1, of `count` parts that take about as long, in the order of the cases."""
    by_time = sorted(cases, key=lambda case: case.seconds, reverse=True)
    chosen = {case.title for case in by_time[index - 1 :: count]}
    return [case for case in cases if case.title in chosen]


@dataclass(frozen=True)
class Goal:
    """A line of a suite's table: a value of those cases that it `covers` is to be within `limit`, where there is one.

    measure: of the cases, the geometric mean or the worst. is_least: the value is to be at least the limit. allowed:
    a case's own limit, in place of `limit`. unit: behind the value, where it is no ratio.
    """

    what: str
    against: str
    covers: Callable[[Figures], bool]
    value: Callable[[Figures], float | None]
    limit: float | None
    measure: str = "worst"
    is_least: bool = False
    allowed: Callable[[Figures], float] | None = None
    unit: str = ""


@dataclass(frozen=True)
class Suite:
    """One suite.

    cases: of whether they are small, whether they are few, and the seed. left_out: those of `contenders` that take no
    part by default, of whether the device is a GPU and whether the run is quick. judges_quick: whether a quick run is
    held to the goals. tables: what makes its tables of rows, of results. about: what the figures are, and notes: of
    results, what is to be said of them besides. plots: their names in `bench.plots`, which is imported to draw alone,
    as matplotlib may be missing. derived: fields of a results file that are made of the cases. is_contract: a run in
    which a goal is missed has failed. finish: of the results of a whole run on a GPU, what it writes besides; gives
    lines to print.
    """

    name: str
    cases: Callable[[bool, bool, int], Iterable[Case]]
    goals: Sequence[Goal]
    contenders: tuple[str, ...]
    tables: Sequence[Callable[[Results], Table]]
    about: Sequence[str]
    time_limit_s: float
    left_out: Callable[[bool, bool], Sequence[str]] = lambda is_cuda, is_quick: ()
    notes: Callable[[Results], list[str]] = lambda results: []
    plots: tuple[str, ...] = ()
    effort: Effort = EFFORT
    quick_effort: Effort = QUICK_EFFORT
    judges_quick: bool = False
    compiles: bool = True
    is_contract: bool = False
    derived: Callable[[Results], Results] = lambda results: {}
    finish: Callable[[Results], Sequence[str]] = lambda results: ()

    def chosen(self, is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
        """The contenders that take part by default."""
        left_out = self.left_out(is_cuda, is_quick)
        return tuple(name for name in self.contenders if name not in left_out)

    def cases_of(self, results: Results) -> list[Case]:
        """All cases of the kind of run that the results are of."""
        settings = results["settings"]
        return list(self.cases(settings["small"], settings["quick"], settings["seed"]))


def suite_of(name: str) -> Suite:
    """The suite of that name."""
    suite: Suite = import_module(SUITES[name][0]).SUITE
    return suite
