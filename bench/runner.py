"""Runs the cases of a suite: what fits into the time, in one process or in several that share the device.

Compiling takes a case longer than timing it, and keeps one core busy: with --jobs cases are prepared side by side, and
timed one at a time. Each process is the same command with cases of its own and a results file of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from bench import machine, results
from bench.suite import Case, Figures, Results, Session, Suite, key_of, shard_of, suite_of, title_of
from bench.tables import note_on, one_line, summary
from bench.timing import DeviceTurns, Effort, autotune_alone, give_back
from bench.workloads import PRECISIONS


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
    """Free what a case allocated, and what torch.compile keeps: its limit is eight graphs for one function.

    CUDA graphs too, which PyTorch 2.8 keeps when its compilers are reset.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees and device.type == "cuda":
        torch.cuda.synchronize(device)
        trees.reset_cudagraph_trees()
    torch._dynamo.reset()
    give_back(device)


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


def chosen_cases(suite: Suite, options: argparse.Namespace, is_small: bool) -> list[Case]:
    """The cases that the command line names by their titles and its shard; exits where there is none."""
    shard = re.fullmatch(r"(\d+)/(\d+)", options.shard or "1/1")
    index, count = (int(number) for number in shard.groups()) if shard else (0, 0)
    if not 1 <= index <= count:
        raise SystemExit(f"a shard is written as 1/4 or 4/4, not {options.shard}")
    texts = [text.lower() for text in options.filter]
    every = suite.cases(is_small, options.quick, options.seed)
    found = [case for case in every if all(text in case.title.lower() for text in texts)]
    missing = {case.package for case in found if case.package and not machine.installed_version(case.package)}
    for package in sorted(missing):
        print(f"{package} is not installed: cases that need it are left out.")
    found = shard_of([case for case in found if case.package not in missing], index, count)
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
    effort = suite.quick_effort if options.quick or not is_cuda else suite.effort
    if options.rounds:
        effort = Effort(effort.seconds, options.rounds, options.rounds)
    contenders = suite.chosen(is_cuda, options.quick)
    if options.contenders is not None:
        wanted = [name.strip() for name in options.contenders.split(",")]
        unknown = [name for name in wanted if name not in suite.contenders]
        if unknown:
            raise SystemExit(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(suite.contenders)}")
        contenders = tuple(name for name in suite.contenders if name in wanted)
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
    if not options.fresh:
        take_up(plan, path, options.retry)
    if plan.wanted:
        (run_cases if options.jobs == 1 else run_jobs)(plan, options, path)
    results.complete(plan.results)
    results.save(plan.results, path)


def run_cases(plan: Plan, options: argparse.Namespace, path: Path) -> None:
    """Measure those of the plan's cases that fit into its time, in this process, one of several that share the device.

    Exits where a kernel's fault has cost the process its device.
    """
    cases, session = plan.wanted, plan.session
    if options.turns:
        autotune_alone(session.turns)
        processors = len(os.sched_getaffinity(0))  # fewer than the machine's where several runs share it
        torch._inductor.config.compile_threads = max(1, processors // options.beside)
    if plan.suite.compiles and session.device.type == "cuda":
        # Something small: the first compilation also starts the compiler's processes, which is no case's cost.
        try:
            torch.compile(torch.nn.functional.softplus)(torch.ones(64, device=session.device))
        except Exception as error:  # Without a C++ compiler, say: each case then shows it.
            print(f"torch.compile does not work here: {one_line(error)}")
    for place, case in enumerate(cases, start=1):
        if not plan.budget.fits(case):
            plan.results["left_out"].append(case.title)
            continue
        print(f"[{place}/{len(cases)}] {case.title}", flush=True)
        before = time.perf_counter()
        figures = figures_of(case, session)
        figures["seconds"] = time.perf_counter() - before
        plan.results["cases"].append(figures)
        results.save(plan.results, path)  # After each case, so that a run that is cut short keeps what it measured.
        print(f"    {summary(figures)}", flush=True)
        try:
            release(session.device)
        except RuntimeError as error:
            raise SystemExit(
                f"the device is lost after {case.title}: {one_line(error)}. The same command goes on behind it."
            ) from error
        plan.budget.note(case, time.perf_counter() - before)


POLL_S = 1.0


@dataclass
class Job:
    """A process, its cases, and the files in which it finds them and leaves their figures."""

    cases: list[Case]
    stem: Path
    process: subprocess.Popen[bytes] | None = None
    done_before: int = -1  # of its cases, when it was started

    @property
    def part(self) -> Results:
        """What it has measured so far."""
        path = self.stem.with_suffix(".json")
        return results.load(path) if path.exists() else {"cases": [], "left_out": []}

    @property
    def missing(self) -> list[Case]:
        """Its cases that have no figures and were not left out."""
        part = self.part
        known = {*map(title_of, part["cases"]), *part["left_out"]}
        return [case for case in self.cases if case.title not in known]

    def start(self, plan: Plan, options: argparse.Namespace) -> None:
        """Start the process, or start it again behind the case at which it ended."""
        self.done_before = len(self.part["cases"])
        titles = self.stem.with_suffix(".txt")
        titles.write_text("\n".join(case.title for case in self.cases), encoding="utf-8")
        valued = {name: getattr(options, name) for name in ("rounds", "contenders", "device", "seed", "commit")}
        valued |= {"titles": titles, "turns": self.stem.parent, "beside": options.jobs, "output": self.stem}
        valued |= {"time-limit": plan.budget.left()}
        given = [f"--{name}={value}" for name, value in valued.items() if value is not None]
        quick = ["--quick"] if options.quick else []
        self.process = subprocess.Popen([sys.executable, "-m", "bench", options.command, *quick, *given])

    def ended(self, plan: Plan, options: argparse.Namespace) -> bool:
        """Whether it is done with its cases. One that ended at a case is started again, and the case has failed."""
        status = None if self.process is None else self.process.poll()
        if status is None or not self.missing:
            return status is not None
        part = self.part
        if status not in (0, 1):  # 1: it has noted the case that has cost it the device
            note = f"failed: the process ended with status {status}"
            part = {**plan.results, **part}
            part["cases"] = [*part["cases"], {**self.missing[0].as_dict(), "contenders": {}, "note": note}]
            results.save(part, self.stem.with_suffix(".json"))
        if len(part["cases"]) == self.done_before:
            raise SystemExit(f"a process of --jobs ended with status {status} before its first case")
        self.start(plan, options)
        return False


def run_jobs(plan: Plan, options: argparse.Namespace, path: Path) -> None:
    """Run the cases in `--jobs` processes, and write what they measured to `path` as they go."""
    wanted = plan.wanted
    before = plan.results["cases"]
    with tempfile.TemporaryDirectory(prefix="cutfuse-bench-") as folder:
        shards = [shard_of(wanted, place, options.jobs) for place in range(1, options.jobs + 1)]
        jobs = [Job(cases, Path(folder) / f"job-{place}") for place, cases in enumerate(shards) if cases]

        def gather() -> None:
            parts = [job.part for job in jobs]
            plan.results["cases"] = [*before, *(case for part in parts for case in part["cases"])]
            plan.results["left_out"] = [title for part in parts for title in part["left_out"]]
            results.save(plan.results, path)

        try:
            for job in jobs:
                job.start(plan, options)
            running = jobs
            while running:
                time.sleep(POLL_S)
                running = [job for job in running if not job.ended(plan, options)]
                gather()
        finally:
            for job in jobs:
                if job.process:
                    job.process.terminate()
                    job.process.wait()
            gather()
