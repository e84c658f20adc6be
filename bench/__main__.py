"""The command line: run a suite, report its results, merge runs, and draw the documentation's plots."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench import SUITES

# Relative, as they are printed: what a run writes, which git ignores, and the summaries that are committed.
RAW, SUMMARIES = (Path(os.path.relpath(Path(__file__).parent / name)) for name in ("raw", "results"))


def prefer_installed_package() -> None:
    """Let an installed cutfuse win over the sources beside `bench`, which hold no compiled module.

    `python -m` puts the working directory first on the path.
    """
    root = str(Path(__file__).resolve().parent.parent)
    elsewhere = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != root]
    sys.path[:] = [*elsewhere, root]


def job_count(text: str) -> int:
    """A number of processes; raises ArgumentTypeError for what is none."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is 1 or more, not {text}")
    return int(text)


def add_suite(command: argparse.ArgumentParser) -> None:
    """The options of a run, which can be cut short, continued, and divided among processes and machines."""
    add = command.add_argument
    add("--quick", action="store_true", help="fewer cases, fewer rounds, no max-autotune")
    add("--filter", action="append", default=[], metavar="TEXT", help="only cases with TEXT in their title")
    add("--list", action="store_true", help="print the cases' titles and run nothing")
    add("--output", type=Path, metavar="NAME", help="write NAME.json and NAME.png; default: bench/raw/SUITE-DEVICE")
    add("--fresh", action="store_true", help="begin anew, instead of continuing the results file")
    add("--retry", action="store_true", help="run those cases of the results file again that failed")
    add("--time-limit", type=float, metavar="SECONDS", help="begin no case that would end later; default: the suite's")
    add("--jobs", type=job_count, default=1, metavar="N", help="compile in N processes, which time one case at a time")
    add("--shard", metavar="I/N", help="only the I-th of N parts of the cases; merge puts them together")
    add("--device", help="cuda or cpu; the default is cuda where there is one")
    add("--contenders", help="comma-separated; default: the suite's")
    add("--rounds", type=int, help="exactly this many timed rounds for each case")
    add("--seed", type=int, default=0, help="of the launches' order, of inputs, and of the chains that are drawn")
    add("--commit", help="the code's commit, where it is not a git checkout")
    # What a process of --jobs is given: its cases, the locks, and how many processes there are.
    add("--titles", type=Path, help=argparse.SUPPRESS)
    add("--turns", type=Path, help=argparse.SUPPRESS)
    add("--beside", type=int, default=1, help=argparse.SUPPRESS)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's arguments. Nothing here imports torch, so that help is there at once."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of cutfuse against PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    for suite, (_, about) in SUITES.items():
        add_suite(commands.add_parser(suite, help=f"run the suite: {about}"))
    report = commands.add_parser("report", help="the tables of results, and their plots")
    report.add_argument("results", help="a results file, or a suite, for its committed results")
    report.add_argument("--markdown", action="store_true", help="print Markdown, and draw nothing")
    report.add_argument("--short", action="store_true", help="the goals without the rows")
    report.add_argument("--png", type=Path, help="where to draw; the default is beside the results file")
    summary = commands.add_parser("summarise", help="the part of a results file that is committed")
    summary.add_argument("results", type=Path)
    summary.add_argument("--output", type=Path, metavar="FOLDER", default=SUMMARIES, help="default: bench/results")
    merge = commands.add_parser("merge", help="one results file of several runs of a suite")
    merge.add_argument("results", type=Path, nargs="+")
    merge.add_argument("--output", type=Path, metavar="NAME", help="default: bench/raw/SUITE-DEVICE-merged")
    refit = commands.add_parser("refit", help="fit the planner's table of a device to its samples, and judge the fit")
    refit.add_argument("samples", type=Path, nargs="?", help="a file of bench/samples; default: every one")
    refit.add_argument("--terms", action="store_true", help="also what each term of the predictions is worth: a minute")
    commands.add_parser("figures", help="the documentation's plots, of the committed results")
    return parser.parse_args(arguments)


def results_path(output: Path | None, *words: str) -> Path:
    """Where results are written: the output that was named, or a name of words."""
    output = output or RAW / "-".join(word.lower().replace(" ", "-").replace("/", "-") for word in words if word)
    # Not with_suffix: a name such as h200-2.11 has a dot of its own.
    return output.parent / f"{output.name.removesuffix('.json')}.json"


def default_words(options: argparse.Namespace, device_name: str) -> list[str]:
    """A name for each suite and device, and another where only a part of the suite was asked for."""
    shard = f"shard {options.shard}" if options.shard else ""
    return [options.command, device_name, "partial" if is_partial(options) else "", shard]


def is_partial(options: argparse.Namespace) -> bool:
    """Whether less was asked for than the suite has, a shard aside."""
    return bool(options.quick or options.filter or options.contenders or options.rounds)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the suite's PNGs, or say why not."""
    from bench.suite import suite_of

    names = suite_of(results["suite"]).plots
    if not names:
        return
    try:
        from bench.plots import PLOTS
    except ImportError:  # The plot is an extra; the results file is enough to draw it elsewhere.
        print(f"No plot: matplotlib is missing. Later: python -m bench report {path.with_suffix('.json').name}")
        return
    for name in names:
        figure = PLOTS[name](results)
        own = path if name == results["suite"] else path.with_name(f"{path.stem}-{name}{path.suffix}")
        if figure:
            figure.savefig(own, dpi=110)
        print(f"Plot: {own}" if figure else f"No plot {own.name}: nothing was measured.")


def present(results: dict[str, Any], png: Path, is_short: bool = False) -> None:
    """Print the tables and draw the plots of results."""
    from bench import goals, tables

    tables.show(goals.tables_of(results, is_short), goals.remarks(results))
    draw(results, png)


def run(options: argparse.Namespace) -> int:
    """Run a suite, or go on with it; 1 where a contender failed or was wrong, or a goal was missed."""
    from bench import results as files
    from bench import runner
    from bench.goals import MISSED, lines_of
    from bench.suite import suite_of

    if options.list:
        is_small = runner.device_of(options).type != "cuda" and options.device == "cpu"
        for case in runner.chosen_cases(suite_of(options.command), options, is_small):
            print(case.title)
        return 0
    plan = runner.plan(options)
    results, facts = plan.results, plan.results["machine"]
    is_cuda = plan.session.device.type == "cuda"
    if is_cuda and not facts["cutfuse_kernels"]:
        print("Warning: this cutfuse has no CUDA kernels; its figures will be those of composed PyTorch operations.")
    path = results_path(options.output, *default_words(options, str(facts["device"]) if is_cuda else "cpu"))
    began = time.perf_counter()
    runner.run(plan, options, path)
    results["seconds"] = time.perf_counter() - began
    files.save(results, path)
    if not options.turns:
        present(results, path.with_suffix(".png"))
        print(f"Results: {path}, {len(results['cases'])} cases, {results['seconds']:.0f} s.")
        if is_cuda and not is_partial(options) and not options.shard:
            print(*plan.suite.finish(results), sep="\n")
    misses = plan.suite.is_contract and any(line.verdict == MISSED for line in lines_of(results))
    return 1 if misses or any(map(files.has_failed, results["cases"])) else 0


def report(options: argparse.Namespace) -> None:
    """Print the tables of results, and draw their plots unless Markdown was asked for."""
    from bench import goals as form
    from bench import results as files

    path = Path(options.results)
    if options.results in SUITES:
        results, path = files.committed(options.results), RAW / f"{options.results}.json"
    else:
        results = files.load(path)
    if options.markdown:
        print(form.as_markdown(results, options.short))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        present(results, options.png or path.with_suffix(".png"), options.short)


def merge(options: argparse.Namespace) -> None:
    """Put several runs of a suite into one file, and print and draw it."""
    from bench import results as files

    results = files.merged([files.load(path) for path in options.results])
    path = results_path(options.output, results["suite"], results["machine"]["device"], "merged")
    files.save(results, path)
    print(f"Results: {path}")
    present(results, path.with_suffix(".png"))


def summarise(options: argparse.Namespace) -> None:
    """Write the part of a results file that the tables and plots are made of."""
    from bench import results as files

    for path, size in files.summarise(files.load(options.results), options.output / options.results.name).items():
        print(f"Summary: {path}, {size / 1000:.0f} kB")


def figures(options: argparse.Namespace) -> None:
    """Write the documentation's plots."""
    from bench.plots import write

    del options
    write()


def refit(options: argparse.Namespace) -> None:
    """Write the tables of samples, and print what the choice by them loses."""
    from bench import fit, tables

    for path in [options.samples] if options.samples else sorted(fit.SAMPLES.glob("*.json")):
        samples = fit.Samples.load(path)
        found = fit.held_out_tables(samples)
        found += [fit.terms_table(samples)] if options.terms else []
        tables.show(found, [f"Table: {fit.write_table(samples)}. Build the module again to plan by it."])


def main(arguments: list[str] | None = None) -> int:
    """The entry point; returns the exit status, and exits with the reason where results cannot be used."""
    options = parse(arguments)
    if options.command in SUITES:
        return run(options)
    commands = {"report": report, "merge": merge, "summarise": summarise, "figures": figures, "refit": refit}
    try:
        commands[options.command](options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot {options.command}: {error}") from error
    return 0


if __name__ == "__main__":
    prefer_installed_package()
    sys.exit(main())
