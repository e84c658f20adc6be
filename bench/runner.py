"""Runs the cases of a suite: what fits into the time, in one process or in several that share the device."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from bench import machine, results
from bench.device_turns import DeviceTurns, autotune_alone
from bench.suite import Case, Figures, Results, Session, Shard, Suite, key_of, suite_of
from bench.tables import note_on, one_line, summary
from bench.timing import give_back
from bench.workloads import PRECISIONS

OnCase = Callable[[Figures], None]


@dataclass
class Budget:
    """The time of a run, and how long cases took beside what was guessed."""

    limit_s: float
    began: float = field(default_factory=time.perf_counter)
    shares: list[float] = field(default_factory=list)

    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.perf_counter() - self.began)

    def fits(self, case: Case) -> bool:
        """Whether the case is expected to end within the limit."""
        return case.seconds * (median(self.shares) if self.shares else 1.0) <= self.left()

    def note(self, case: Case, seconds: float) -> None:
        """Remember what a case took."""
        self.shares.append(seconds / case.seconds)


def release(device: torch.device) -> None:
    """Free what a case allocated, and what torch.compile keeps: its limit is eight graphs for one function."""
    torch._dynamo.reset()
    give_back(device)


def start_compiler(device: torch.device) -> None:
    """Compile something small: the first compilation also starts the compiler's processes, which is no case's cost."""
    try:
        torch.compile(torch.nn.functional.softplus)(torch.ones(64, device=device))
    except Exception as error:  # Without a C++ compiler, say: each case then shows it.
        print(f"torch.compile does not work here: {one_line(error)}")


def quick_compilers(device: torch.device) -> AbstractContextManager[object]:
    """On a CPU, Inductor calls PyTorch's operations meanwhile, where PyTorch has that setting.

    It would have a C++ compiler take seconds for each graph, and a CPU's times are not what the suites are for.
    """
    setting = "fallback_by_default"
    if device.type == "cpu" and hasattr(torch._inductor.config, setting):
        return torch._inductor.config.patch({setting: True})
    return nullcontext()


def figures_of(case: Case, session: Session) -> Figures:
    """Prepare a case beside other processes' cases, and time it alone, both in its precision."""
    try:
        precision = PRECISIONS[case.precision].active()
        with precision, torch.set_grad_enabled(case.needs_grad), quick_compilers(session.device):
            with session.turns.preparing():
                found = case.prepare(session)
            if callable(found):
                with session.turns.timing():
                    found = found()
    except Exception as error:  # Out of memory while building, say: later cases may still fit.
        found = {"contenders": {}, **note_on(error)}
    return {**case.as_dict(), **found}


def run_cases(suite: Suite, cases: Sequence[Case], session: Session, budget: Budget, on_case: OnCase) -> list[str]:
    """Measure those of `cases` that fit, handing each one's figures to `on_case`; returns the others' titles.

    Exits where a kernel's fault has cost the process its device.
    """
    left_out = []
    make_room = suite.release or release
    for place, case in enumerate(cases, start=1):
        if not budget.fits(case):
            left_out.append(case.title)
            continue
        print(f"[{place}/{len(cases)}] {case.title}", flush=True)
        before = time.perf_counter()
        figures = figures_of(case, session)
        figures["seconds"] = time.perf_counter() - before
        on_case(figures)
        print(f"    {summary(figures)}", flush=True)
        try:
            make_room(session.device)
        except RuntimeError as error:
            raise SystemExit(
                f"the device is lost after {case.title}: {one_line(error)}. The same command goes on behind it."
            ) from error
        budget.note(case, time.perf_counter() - before)
    return left_out


@dataclass(frozen=True)
class Plan:
    """What a command line asks for, and the results file's content before the first case."""

    suite: Suite
    cases: list[Case]
    session: Session
    budget: Budget
    results: Results

    @property
    def wanted(self) -> list[Case]:
        """The cases that the results do not have yet."""
        done = {key_of(case) for case in self.results["cases"]}
        return [case for case in self.cases if key_of(case.as_dict()) not in done]


def chosen_contenders(suite: Suite, names: str | None, is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """Those that a comma-separated list names, or the suite's; exits for a name that there is not."""
    if names is None:
        return suite.chosen(is_cuda, is_quick)
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in suite.contenders]
    if unknown:
        raise SystemExit(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(suite.contenders)}")
    return tuple(name for name in suite.contenders if name in wanted)


def chosen_cases(suite: Suite, options: argparse.Namespace, is_small: bool) -> list[Case]:
    """The cases that the command line names by their titles and its shard; exits where there is none."""
    try:
        shard = Shard.parse(options.shard) if options.shard else Shard()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    texts = [text.lower() for text in options.filter]
    every = suite.cases(is_small, options.quick, options.seed)
    found = [case for case in every if all(text in case.title.lower() for text in texts)]
    missing = {case.package for case in found if case.package and not machine.installed_version(case.package)}
    for package in sorted(missing):
        print(f"{package} is not installed: cases that need it are left out.")
    found = shard.of([case for case in found if case.package not in missing])
    if options.titles:  # Those that the first of several processes has dealt to this one.
        titles = set(options.titles.read_text(encoding="utf-8").splitlines())
        found = [case for case in found if case.title in titles]
    if not found:
        raise SystemExit(f"no case of {suite.name} holds {' and '.join(options.filter)} in its title in this shard")
    return found


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that the command line names, or a GPU where there is one."""
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def plan(options: argparse.Namespace) -> Plan:
    """What to run; exits with the reason where the command line is wrong."""
    suite = suite_of(options.command)
    device = device_of(options)
    is_cuda = device.type == "cuda"
    effort = suite.effort_of(options.quick or not is_cuda, options.rounds)
    contenders = chosen_contenders(suite, options.contenders, is_cuda, options.quick)
    content: Results = {
        "schema": results.SCHEMA,
        "suite": suite.name,
        "machine": machine.facts(device, options.commit),
        "settings": {
            "small": not is_cuda,
            "quick": options.quick,
            "seed": options.seed,
            "contenders": list(contenders),
            "seconds_per_case": effort.seconds,
            "rounds": [effort.least_rounds, effort.most_rounds],
            "jobs": options.jobs,
        },
        "cases": [],
        "left_out": [],
    }
    cases = chosen_cases(suite, options, not is_cuda)
    session = Session(device, contenders, effort, options.seed, turns=DeviceTurns(options.turns), beside=options.beside)
    limit = suite.time_limit_s if options.time_limit is None else options.time_limit
    return Plan(suite, cases, session, Budget(limit), content)


def take_up(plan: Plan, path: Path, retry: bool) -> None:
    """Take the cases of an earlier run, where there is one; exits where it was of something else.

    With `retry`, those that failed are run again.
    """
    if not path.exists():
        return
    try:
        earlier = results.load(path)
        results.check_alike(earlier, results.tidy(plan.results))
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"cannot continue {path}: {error}. Give --fresh to begin anew, or --output for another file."
        ) from error
    plan.results["cases"] = [case for case in earlier["cases"] if not (retry and results.has_failed(case))]
    print(f"Continuing {path}, which has {len(plan.results['cases'])} cases.")


def run(plan: Plan, options: argparse.Namespace, path: Path) -> None:
    """Run the cases that the results file at `path` does not have yet, and write it after each."""
    from bench.jobs import run_jobs

    if not options.fresh:
        take_up(plan, path, options.retry)
    if plan.wanted:
        (run_here if options.jobs == 1 else run_jobs)(plan, options, path)
    results.complete(plan.results)
    results.save(plan.results, path)


def run_here(plan: Plan, options: argparse.Namespace, path: Path) -> None:
    """Run in this process, which may be one of several that share the device."""
    if options.turns:
        autotune_alone(plan.session.turns)
        torch._inductor.config.compile_threads = max(1, processors() // options.beside)
    if plan.suite.compiles and plan.session.device.type == "cuda":
        start_compiler(plan.session.device)

    def on_case(figures: Figures) -> None:
        plan.results["cases"].append(figures)
        results.save(plan.results, path)  # After each case, so that a run that is cut short keeps what it measured.

    plan.results["left_out"] = run_cases(plan.suite, plan.wanted, plan.session, plan.budget, on_case)


def processors() -> int:
    """How many this process may run on, which are fewer than the machine's where several runs share it."""
    return len(os.sched_getaffinity(0))
