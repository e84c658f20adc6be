"""Runs a suite's cases in several processes: they are prepared side by side, and timed one at a time.

Compiling takes a case longer than timing it, and keeps one core busy. Each process is the same command with cases of
its own and a results file of its own; `device_turns.py` keeps the device for one of them while it times a case.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench import results
from bench.runner import Plan
from bench.suite import Case, Results, Shard, title_of

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
        shards = [Shard(place, options.jobs).of(wanted) for place in range(1, options.jobs + 1)]
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
