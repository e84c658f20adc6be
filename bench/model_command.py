"""The models suite's commands: list its cases, run them or go on with a run, and merge the runs of several machines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench import machine, model_files, model_suite, report
from bench.jobs import OnCase
from bench.model_cases import Case, select
from bench.model_contenders import chosen
from bench.model_jobs import run_jobs
from bench.model_report import case_line
from bench.model_run import Options
from bench.model_zoo import remarks_on_missing
from bench.progress import Progress
from bench.run_files import Plan, shard_of
from bench.runner import Budget


def selected(options: argparse.Namespace, is_small: bool) -> list[Case]:
    """The cases that the command line chooses; exits where there is none."""
    cases = select(is_small=is_small, filters=options.filter, shard=shard_of(options.shard))
    if not cases:
        raise SystemExit(f"no case of models holds {' and '.join(options.filter)} in its title in this shard")
    return cases


def list_cases(options: argparse.Namespace) -> int:
    """Print the cases' titles, and which models cannot be built."""
    for line in (*(case.title for case in selected(options, options.quick)), *remarks_on_missing()):
        print(line)
    return 0


def plan(options: argparse.Namespace) -> Plan[Case, Options]:
    """What to run; exits with the reason where the command line is wrong."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_cuda = device.type == "cuda"
    is_small = options.quick or not is_cuda
    try:
        contenders = chosen(options.contenders, is_cuda)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    effort = model_suite.effort_of(is_small, options.rounds)
    compilations = model_suite.QUICK_COMPILATIONS if is_small else model_suite.COMPILATIONS
    limit = model_suite.TIME_LIMIT_S if options.time_limit is None else options.time_limit
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "suite": model_files.SUITE,
        "machine": machine.facts(device, options.commit),
        "settings": model_suite.settings(is_small, contenders, effort, options.seed),
        "lines": [],
        "cases": [],
        "fusion": [],
        "left_out": [],
    }
    results["settings"]["jobs"] = options.jobs
    cases = selected(options, is_small)
    return Plan(cases, Options(device, contenders, effort, options.seed, compilations), limit, results)


def run(plan: Plan[Case, Options], path: Path, *, fresh: bool, retry: bool) -> None:
    """Run the cases that the results file at `path` does not have yet, and write it after each."""
    for line in remarks_on_missing():
        print(line)
    options = plan.options

    def measure(cases: list[Case], on_case: OnCase, progress: Progress) -> list[str]:
        settings = plan.results["settings"]
        if settings["jobs"] > 1:
            jobs, is_small = settings["jobs"], settings["quick"]
            return run_jobs(cases, jobs, is_small, options, plan.time_limit_s, progress, on_case, case_line)
        model_suite.start_compiler(options.device)
        return model_suite.run_suite(cases, options, Budget(plan.time_limit_s), progress, on_case, case_line)

    model_files.FILES.go_on(plan.results, plan.cases, path, measure, model_suite.complete, fresh=fresh, retry=retry)


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of several; exits with the reason where they do not go together."""
    return model_files.FILES.merge(runs, model_suite.complete)
