"""The chains suite's commands: list its cases, run them or go on with a run, and merge the runs of several machines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench import chain_suite, machine, report
from bench.ceilings import ceilings_for
from bench.chain_cases import UNTIMED, Case, select
from bench.chain_contenders import COMPILERS, chosen
from bench.chain_jobs import run_jobs
from bench.chain_report import case_line
from bench.chain_run import Options
from bench.jobs import OnCase
from bench.progress import Progress
from bench.run_files import Plan, RunFiles, shard_of
from bench.runner import Budget, compile_something

FILES = RunFiles("chains", ("small", "quick", "seed", "contenders", "seconds_per_case", "rounds"))


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that the command line names, or a GPU where there is one."""
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def selected(options: argparse.Namespace, is_small: bool) -> list[Case]:
    """The cases that the command line chooses; exits where there is none."""
    cases = select(is_small, options.quick, options.seed, options.filter, shard_of(options.shard))
    if not cases:
        raise SystemExit(f"no case of chains holds {' and '.join(options.filter)} in its title in this shard")
    return cases


def list_cases(options: argparse.Namespace) -> int:
    """Print the titles of the cases, of a GPU's sizes unless another device is named."""
    for case in selected(options, options.device == "cpu"):
        print(f"{case.title}{', max-autotune' if case.is_autotuned else ''}")
    return 0


def plan(options: argparse.Namespace) -> Plan[Case, Options]:
    """What to run; exits with the reason where the command line is wrong."""
    device = device_of(options)
    is_small = device.type != "cuda"
    try:
        contenders = chosen(options.contenders, not is_small, options.quick)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    effort = chain_suite.effort_of(is_small or options.quick, options.rounds)
    facts = machine.facts(device, options.commit)
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "suite": FILES.suite,
        "machine": facts,
        "settings": chain_suite.settings(is_small, options.quick, contenders, effort, options.seed),
        "lines": [],
        "chains": [],
        "cases": [],
        "left_out": [],
    }
    results["settings"]["jobs"] = options.jobs
    limit = chain_suite.TIME_LIMIT_S if options.time_limit is None else options.time_limit
    own = Options(device, contenders, effort, ceilings_for(str(facts["device"])), options.seed)
    return Plan(selected(options, is_small), own, limit, results)


def run(plan: Plan[Case, Options], path: Path, *, fresh: bool, retry: bool) -> None:
    """Run the cases that the results file at `path` does not have yet, and write it after each."""
    options = plan.options
    budget = Budget(plan.time_limit_s)

    def measure_here(cases: list[Case], on_case: OnCase, progress: Progress) -> list[str]:
        if any(case.build for case in cases) and set(COMPILERS).intersection(options.contenders):
            compile_something(options.device, progress)
        return chain_suite.run_suite(cases, options, budget, progress, on_case, case_line)

    def measure(cases: list[Case], on_case: OnCase, progress: Progress) -> list[str]:
        jobs = plan.results["settings"]["jobs"]
        if jobs == 1:
            return measure_here(cases, on_case, progress)
        calls = [case for case in cases if case.group not in UNTIMED]
        limit = plan.time_limit_s - budget.elapsed()
        left_out = run_jobs(calls, jobs, plan.results, options, limit, progress, on_case, case_line)
        return [*left_out, *measure_here([case for case in cases if case.group in UNTIMED], on_case, progress)]

    FILES.go_on(plan.results, plan.cases, path, measure, chain_suite.complete, fresh=fresh, retry=retry)


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of several; exits with the reason where they do not go together."""
    return FILES.merge(runs, chain_suite.complete)
