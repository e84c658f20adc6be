"""Results files of long suites, which a later run continues, and which are merged from the runs of several shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from bench import report
from bench.case_loop import CaseT, Figures
from bench.progress import Progress, progress_for

# What has to be the same of two runs whose cases are put side by side.
MACHINE = ("device", "commit", "cutfuse", "cutfuse_kernels", "torch", "cuda", "triton")

Results = dict[str, Any]
T = TypeVar("T")


def key_of(figures: dict[str, Any]) -> tuple[str, ...]:
    """What tells a case's figures from another's."""
    return tuple(figures[name] for name in ("group", "variant", "shape", "precision"))


def title_of(figures: dict[str, Any]) -> str:
    """A case's title, of its figures."""
    return " ".join(part for part in key_of(figures) if part)


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts, counted from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "1/4"; raises ValueError for what is no part."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        index, count = (int(number) for number in found.groups()) if found else (0, 0)
        if not 1 <= index <= count:
            raise ValueError(f"a shard is written as 1/4 or 4/4, not {text}")
        return cls(index, count)

    def of(self, cases: Sequence[T]) -> list[T]:
        """Its cases: every `count`-th, so that each part has some of each kind."""
        return list(cases[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class RunFiles:
    """The results files of one suite. `settings`: what has to be the same of two runs, beside the machine."""

    suite: str
    settings: tuple[str, ...]

    def difference(self, results: Results, other: Results) -> str:
        """Why two runs are not to be put together; empty where they are alike."""
        if results["suite"] != self.suite or other["suite"] != self.suite:
            return f"the suites are {results['suite']} and {other['suite']}, and only runs of {self.suite} go together"
        for part, names in (("machine", MACHINE), ("settings", self.settings)):
            for name in names:
                one, two = results[part].get(name), other[part].get(name)
                if one != two:
                    return f"{name} is {one} in one and {two} in the other"
        commit = results["machine"]["commit"]
        if commit is None or " " in commit:
            return f"the commit is {commit or 'unknown'}, so that the code may differ"
        return ""

    def finished_cases(self, results: Results, earlier: Results, retry: bool) -> list[dict[str, Any]]:
        """The cases of an earlier run that need not be run again; with `retry`, without those that failed.

        Raises ValueError where that run was of something else.
        """
        reason = self.difference(earlier, results)
        if reason:
            raise ValueError(reason)
        return [case for case in earlier["cases"] if not (retry and report.has_failed(case))]

    def merged(self, runs: Sequence[Results]) -> Results:
        """All cases of several runs; one that several runs have is taken from the first in which it did not fail.

        Raises ValueError where the runs differ in more than their cases.
        """
        first = runs[0]
        for other in runs[1:]:
            reason = self.difference(first, other)
            if reason:
                raise ValueError(reason)
        cases: dict[tuple[str, ...], dict[str, Any]] = {}
        for case in (case for run in runs for case in run["cases"]):
            known = cases.get(key_of(case))
            if known is None or (report.has_failed(known) and not report.has_failed(case)):
                cases[key_of(case)] = case
        left_out = dict.fromkeys(title for run in runs for title in run["left_out"])
        measured = {title_of(case) for case in cases.values()}
        return {
            **first,
            "cases": list(cases.values()),
            "left_out": [title for title in left_out if title not in measured],
            "seconds": sum(run.get("seconds", 0.0) for run in runs),
        }

    def take_up(self, results: Results, path: Path, retry: bool) -> None:
        """Put the cases of an earlier run into `results`, where there is one; exits where it was of something else."""
        if not path.exists():
            return
        try:
            earlier = report.load(path)
            results["cases"] = self.finished_cases(report.tidy(results), earlier, retry)
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"cannot continue {path}: {error}. Give --fresh to begin anew, or --output for another file."
            ) from error
        print(f"Continuing {path}, which has {len(results['cases'])} cases.")

    def go_on(
        self,
        results: Results,
        cases: Sequence[CaseT],
        path: Path,
        run: Callable[[list[CaseT], Callable[[Figures], None], Progress], list[str]],
        complete: Callable[[Results], None],
        *,
        fresh: bool,
        retry: bool,
    ) -> None:
        """Run those of `cases` that the results file at `path` does not have yet, and write it after each.

        `run` hands each case's figures on and returns what it left out; `complete` adds what follows from the cases.
        """
        if not fresh:
            self.take_up(results, path, retry)
        done = {key_of(case) for case in results["cases"]}
        wanted = [case for case in cases if key_of(case.as_dict()) not in done]

        def on_case(figures: Figures) -> None:
            results["cases"].append(figures)
            complete(results)
            report.save(results, path)  # After each case, so that a run that is cut short keeps what it measured.

        complete(results)
        with progress_for(len(wanted)) as progress:
            results["left_out"] = run(wanted, on_case, progress) if wanted else []

    def merge(self, runs: Sequence[Results], complete: Callable[[Results], None]) -> Results:
        """One run of several, to which `complete` adds what follows from the cases; exits where they do not fit."""
        try:
            results = self.merged(runs)
        except ValueError as error:
            raise SystemExit(f"cannot merge: {error}") from error
        complete(results)
        return results


class AnyOptions(Protocol):
    """How cases are measured, of which every suite has its own."""

    @property
    def device(self) -> torch.device:
        """Where."""
        ...


OptionsT = TypeVar("OptionsT", bound=AnyOptions)


@dataclass(frozen=True)
class Plan(Generic[CaseT, OptionsT]):
    """What a command line asks for, and the results file's content before the first case."""

    cases: list[CaseT]
    options: OptionsT
    time_limit_s: float
    results: Results

    @property
    def is_cuda(self) -> bool:
        """Whether it is for a GPU."""
        return self.options.device.type == "cuda"


def shard_of(text: str | None) -> Shard:
    """The shard that the command line names, or the whole; exits where it names none."""
    try:
        return Shard.parse(text) if text else Shard()
    except ValueError as error:
        raise SystemExit(str(error)) from error
