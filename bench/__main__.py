"""The command line: run a suite, render the results of one again, merge runs, or make the summary."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.command_line import REPORTS, parse

if TYPE_CHECKING:
    from bench.timing import Effort

# Relative, as it is printed: what a run writes, which git ignores.
RAW = Path(os.path.relpath(Path(__file__).parent / "raw"))
# A plot is a module's `write_png`, and what is added to its file's name.
PLOTS = {
    "accuracy": (("bench.accuracy_plot", ""),),
    "chains": (("bench.chain_plot", ""),),
    "fp32": (("bench.fp32_plot", ""), ("bench.accuracy_plot", "-error")),
    "host": (("bench.host_plot", ""),),
    "models": (("bench.model_plot", ""),),
}

# Suites whose runs are continued and merged: the module of their commands.
CONTINUED = {"models": "bench.model_command", "chains": "bench.chain_command"}


def prefer_installed_package() -> None:
    """Let an installed cutfuse win over the sources beside `bench`, which hold no compiled module.

    `python -m` puts the working directory first on the path.
    """
    root = str(Path(__file__).resolve().parent.parent)
    elsewhere = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != root]
    sys.path[:] = [*elsewhere, root]


def contender_names(options: argparse.Namespace, is_cuda: bool) -> tuple[str, ...]:
    """The contenders asked for, or the suite's: compilers only on a GPU, max-autotune only where it pays its time."""
    from bench.contenders import CONTENDERS

    if options.contenders:
        names = tuple(name.strip() for name in options.contenders.split(","))
        unknown = [name for name in names if name not in CONTENDERS]
        if unknown:
            raise SystemExit(f"unknown contenders {', '.join(unknown)}; choose from {', '.join(CONTENDERS)}")
        return tuple(name for name in CONTENDERS if name in names)
    left_out = set() if is_cuda else {"compile", "max-autotune"}
    if options.quick or options.command == "linear":
        left_out.add("max-autotune")
    if options.command != "fp32":
        left_out.add("cutfuse-kept")
    return tuple(name for name in CONTENDERS if name not in left_out)


def draw(results: dict[str, Any], source: Path, path: Path) -> None:
    """Write the suite's PNGs, or say why not. `source`: the results file, from which they can be drawn later."""
    for module, ending in PLOTS.get(results["suite"], (("bench.plot", ""),)):
        try:
            plot = importlib.import_module(module)
        except ModuleNotFoundError as error:  # The plot is an extra; the results file is enough to draw it elsewhere.
            print(f"No plot: {error.name} is missing. For the plot: pip install 'cutfuse[bench]', then")
            print(f"  python -m bench render {source}")
            return
        own = path.with_name(f"{path.stem}{ending}{path.suffix}")
        print(f"Plot: {own}" if plot.write_png(results, own) else f"No plot {own.name}: nothing was measured.")


def report_of(suite: str) -> Any:
    """The module that prints the suite's tables."""
    return importlib.import_module(REPORTS.get(suite, "bench.report"))


def default_output(options: argparse.Namespace, device_name: str) -> Path:
    """Where results go: a name for each suite and device, and another where only a part of the suite was asked for."""
    partial = options.quick or options.filter or options.contenders or options.rounds
    shard = ["shard", *options.shard.split("/")] if options.shard else []
    words = [options.command, *device_name.lower().split(), *(["partial"] if partial else []), *shard]
    return RAW / "-".join(words)


def settings_of(options: argparse.Namespace, names: tuple[str, ...], effort: Effort, is_cuda: bool) -> dict[str, Any]:
    """How the figures were measured, for the results file."""
    from bench.contenders.baselines import MAX_AUTOTUNE_MODE

    return {
        "contenders": list(names),
        "max_autotune_mode": MAX_AUTOTUNE_MODE,
        "quick": options.quick,
        "filter": options.filter,
        "time_limit_s": options.time_limit,
        "seed": options.seed,
        "seconds_per_case": effort.seconds,
        "rounds": [effort.least_rounds, effort.most_rounds],
        "cache": "flushed by a read before each launch" if is_cuda else "as the previous launch left it",
    }


def has_failures(results: dict[str, Any]) -> bool:
    """Whether a case could not be built, or a contender failed or gave a wrong result."""
    from bench.report import has_failed

    return any(has_failed(case) for case in results["cases"])


def results_file(options: argparse.Namespace, facts: dict[str, object], is_cuda: bool) -> Path:
    """Where a suite's results are written."""
    output = options.output or default_output(options, str(facts["device"]) if is_cuda else "cpu")
    # Not with_suffix: a name such as h200-2.11 has a dot of its own.
    return output.parent / f"{output.name.removesuffix('.json')}.json"


def effort_for(options: argparse.Namespace, is_cuda: bool) -> Effort:
    """How long to measure each case."""
    from bench.timing import Effort

    effort = Effort(0.2, 5, 20) if options.quick or not is_cuda else Effort()
    return Effort(effort.seconds, options.rounds, options.rounds) if options.rounds else effort


def warn_without_kernels(facts: dict[str, object], is_cuda: bool) -> None:
    """Say beforehand that the figures will not be those of cutfuse's kernels."""
    if is_cuda and not facts["cutfuse_kernels"]:
        print("Warning: this cutfuse has no CUDA kernels; its figures will be those of composed PyTorch operations.")


def finish(results: dict[str, Any], written: Path, began: float) -> None:
    """Print, write and draw a run's results; `began` is `time.perf_counter`'s."""
    from bench import report

    results["seconds"] = time.perf_counter() - began
    report_of(results["suite"]).show(results)
    print(f"Cases: {len(results['cases'])}, {results['seconds']:.0f} s.")
    report.save(results, written)
    print(f"Results: {written}")
    draw(results, written, written.with_suffix(".png"))


def run_host(options: argparse.Namespace) -> int:
    """Run the host suite; 1 where a contender failed or was wrong."""
    import torch

    from bench import host_cases, host_suite, machine, report
    from bench.progress import progress_for
    from bench.runner import Budget

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_cuda = device.type == "cuda"
    chosen = host_cases.select(small=not is_cuda, quick=options.quick, filters=options.filter)
    if not chosen:
        raise SystemExit(f"no case of host holds {' and '.join(options.filter)} in its title")
    facts = machine.facts(device, options.commit)
    warn_without_kernels(facts, is_cuda)
    written = results_file(options, facts, is_cuda)
    effort = host_suite.effort_of(options.quick, options.rounds)
    limit = host_suite.QUICK_TIME_LIMIT_S if options.quick else host_suite.TIME_LIMIT_S
    budget = Budget(limit if options.time_limit is None else options.time_limit)
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "suite": "host",
        "machine": facts,
        "settings": host_suite.settings(options.quick, options.filter, options.seed, effort, budget.limit_s),
        "lines": [],
        "cases": [],
        "left_out": [],
    }

    def on_case(figures: dict[str, Any]) -> None:
        results["cases"].append(figures)
        results["lines"] = host_suite.judge(results["cases"], str(facts["device"]), options.quick)
        report.save(results, written)  # After each case, so that a run that is cut short keeps what it measured.

    began = time.perf_counter()
    with progress_for(len(chosen)) as progress:
        results["left_out"] = host_suite.run_suite(chosen, device, effort, options.seed, budget, progress, on_case)
    finish(results, written, began)
    return 1 if has_failures(results) else 0


def run_continued(options: argparse.Namespace) -> int:
    """Run a suite of `CONTINUED`, or go on with it; 1 where a contender failed or was wrong."""
    command = importlib.import_module(CONTINUED[options.command])
    if options.list:
        return int(command.list_cases(options))
    plan = command.plan(options)
    facts = plan.results["machine"]
    warn_without_kernels(facts, plan.is_cuda)
    written = results_file(options, facts, plan.is_cuda)
    began = time.perf_counter()
    command.run(plan, written, fresh=options.fresh, retry=options.retry)
    finish(plan.results, written, began)
    return 1 if has_failures(plan.results) else 0


def merge(options: argparse.Namespace) -> int:
    """Put several runs of a suite of `CONTINUED` into one file, and print and draw it."""
    from bench import report

    runs = [load(path, "merge") for path in options.results]
    suite = runs[0]["suite"]
    if suite not in CONTINUED:
        raise SystemExit(f"cannot merge: the suite is {suite}, and only runs of {' or '.join(CONTINUED)} go together")
    results = importlib.import_module(CONTINUED[suite]).merge(runs)
    device = results["machine"]["device"].lower().split()
    output = options.output or RAW / "-".join([results["suite"], *device, "merged"])
    written = output.parent / f"{output.name.removesuffix('.json')}.json"
    report_of(results["suite"]).show(results)
    report.save(results, written)
    print(f"Results: {written}")
    draw(results, written, written.with_suffix(".png"))
    return 0


def run_accuracy(options: argparse.Namespace) -> int:
    """Run the accuracy suite; 1 where a contender failed or the contract is missed."""
    import torch

    from bench import accuracy_suite, machine, report
    from bench.progress import progress_for

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_cuda = device.type == "cuda"
    chosen = accuracy_suite.cases(small=not is_cuda, quick=options.quick, filters=options.filter)
    if not chosen:
        raise SystemExit(f"no case of accuracy holds {' and '.join(options.filter)} in its title")
    effort = effort_for(options, is_cuda)
    facts = machine.facts(device, options.commit)
    written = results_file(options, facts, is_cuda)
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "suite": "accuracy",
        "machine": facts,
        "settings": {"quick": options.quick, "filter": options.filter, "seed": options.seed},
        "cases": [],
        "trade_off": None,
        "verdicts": [],
    }

    def on_case(figures: dict[str, Any]) -> None:
        results["cases"].append(figures)
        report.save(results, written)  # After each case, so that a run that is cut short keeps what it measured.

    began = time.perf_counter()
    with progress_for(len(chosen) + 1) as progress:
        results["trade_off"] = accuracy_suite.run_suite(
            chosen, device, not is_cuda, effort, options.seed, progress, on_case
        )
    if facts["cutfuse_kernels"] and facts.get("capability") == "9.0":
        results["verdicts"] = accuracy_suite.judge(results["cases"])
    finish(results, written, began)
    missed = any(not verdict["met"] for verdict in results["verdicts"])
    return 1 if missed or has_failures({"cases": [*results["cases"], results["trade_off"]]}) else 0


def empty_results(
    options: argparse.Namespace, facts: dict[str, object], names: tuple[str, ...], effort: Effort, is_cuda: bool
) -> dict[str, Any]:
    """What `run` fills in."""
    from bench import report

    results = {
        "schema": report.SCHEMA,
        "suite": options.command,
        "machine": facts,
        "settings": settings_of(options, names, effort, is_cuda),
        "ceilings": None,
        "cases": [],
        "left_out": [],
    }
    if options.command != "fp32":
        return results
    from bench.fp32_cases import MODE

    return {**results, "settings": {**results["settings"], "mode": MODE}, "lines": [], "trade_off": None}


def run(options: argparse.Namespace) -> int:
    """Run a suite; 1 where a contender failed or was wrong."""
    import torch

    from bench import accuracy_suite, fp32_suite, machine, report, suites
    from bench.progress import progress_for
    from bench.runner import Options, run_suite

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    is_cuda = device.type == "cuda"
    chosen = suites.select(options.command, small=not is_cuda, quick=options.quick, filters=options.filter)
    if not chosen:
        raise SystemExit(f"no case of {options.command} holds {' and '.join(options.filter)} in its title")
    effort = effort_for(options, is_cuda)
    names = contender_names(options, is_cuda)
    facts = machine.facts(device, options.commit)
    warn_without_kernels(facts, is_cuda)
    results = empty_results(options, facts, names, effort, is_cuda)
    written = results_file(options, facts, is_cuda)
    is_fp32 = options.command == "fp32"

    def on_case(figures: dict[str, Any]) -> None:
        results["cases"].append(figures)
        if is_fp32:
            results["lines"] = fp32_suite.judge(results["cases"], str(facts["device"]))
        report.save(results, written)  # After each case, so that a run that is cut short keeps what it measured.

    began = time.perf_counter()
    with progress_for(len(chosen) + is_fp32) as progress:
        run_options = Options(device, names, effort, options.time_limit, options.seed)
        ceilings, results["left_out"] = run_suite(chosen, run_options, str(facts["device"]), progress, on_case)
        if is_fp32:
            results["trade_off"] = accuracy_suite.run_trade_off(device, not is_cuda, effort, options.seed, progress)
    results["ceilings"] = ceilings.as_dict() if ceilings else None
    finish(results, written, began)
    trade_off = [results["trade_off"]] if is_fp32 else []
    return 1 if has_failures({"cases": [*results["cases"], *trade_off]}) else 0


def load(path: Path, command: str) -> dict[str, Any]:
    """Read the results that a command was given, or exit with the reason why not."""
    from bench import report

    try:
        return report.load(path)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot {command}: {error}") from error


def summarise(options: argparse.Namespace) -> int:
    """Write the part of a results file that the tables and plots are made of."""
    from bench.summarise import summarise

    results = load(options.results, "summarise")
    written = options.output / options.results.name
    try:
        sizes = summarise(results, written)
    except ValueError as error:
        raise SystemExit(f"cannot summarise: {error}") from error
    for path, size in sizes.items():
        print(f"Summary: {path}, {size / 1000:.0f} kB")
    return 0


def render(options: argparse.Namespace) -> int:
    """Print the table of a results file, and draw its PNG unless Markdown was asked for."""
    results = load(options.results, "render")
    form = report_of(results["suite"])
    if options.summary:
        if results["suite"] not in REPORTS:
            raise SystemExit(f"cannot render: only {', '.join(REPORTS)} have a summary, not {results['suite']}")
        print(form.summary(results))
    elif options.markdown:
        print(form.markdown(results, tuple(options.without)))
    else:
        form.show(results)
    if options.png or not (options.markdown or options.summary):
        draw(results, options.results, options.png or options.results.with_suffix(".png"))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    options = parse(arguments)
    commands = {
        "render": render,
        "summarise": summarise,
        "merge": merge,
        "accuracy": run_accuracy,
        "host": run_host,
        **dict.fromkeys(CONTINUED, run_continued),
    }
    return commands.get(options.command, run)(options)


if __name__ == "__main__":
    prefer_installed_package()
    sys.exit(main())
