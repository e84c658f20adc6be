"""The command line's arguments. Nothing here imports torch, so that help is there at once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# Relative, as it is printed: the summaries that are committed.
SUMMARIES = Path(os.path.relpath(Path(__file__).parent / "results"))
# The reference run on an H200 is to fit into four minutes; the linear suite has 162 cases.
TIME_LIMITS = {"reference": 240.0, "linear": 540.0, "reduce": 240.0, "pointwise": 240.0, "fp32": 240.0}
# Suites with tables of their own.
REPORTS = {
    "accuracy": "bench.accuracy_report",
    "chains": "bench.chain_report",
    "fp32": "bench.fp32_report",
    "host": "bench.host_report",
    "models": "bench.model_report",
}


def add_common(command: argparse.ArgumentParser) -> None:
    """The options that every suite has."""
    command.add_argument("--quick", action="store_true", help="fewer cases and rounds, no max-autotune")
    command.add_argument(
        "--output",
        type=Path,
        metavar="NAME",
        help="write NAME.json and NAME.png; default: bench/raw/SUITE-DEVICE",
    )
    command.add_argument(
        "--filter", action="append", default=[], metavar="TEXT", help="only cases with TEXT in their title"
    )
    command.add_argument("--device", help="cuda or cpu; the default is cuda where there is one")
    command.add_argument("--rounds", type=int, help="exactly this many timed rounds for each case")
    command.add_argument(
        "--seed", type=int, default=0, help="of the launches' order, the accuracy suite's inputs, the chains"
    )
    command.add_argument("--commit", help="the code's commit, where it is not a git checkout")
    command.set_defaults(shard=None)


def add_accuracy(command: argparse.ArgumentParser) -> None:
    """The accuracy suite's options: its contenders are the precisions, and it takes seconds."""
    add_common(command)
    command.set_defaults(contenders=None)


def add_host(command: argparse.ArgumentParser) -> None:
    """The host suite's options: its contenders are PyTorch's call and cutfuse's, compiled where the line says so."""
    add_common(command)
    command.add_argument("--time-limit", type=float, metavar="SECONDS", help="default 240, and 30 with --quick")
    command.set_defaults(contenders=None)


def job_count(text: str) -> int:
    """A number of processes; raises ArgumentTypeError for what is none."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is 1 or more, not {text}")
    return int(text)


def add_continued(command: argparse.ArgumentParser, contenders: str) -> None:
    """The options of a suite that takes long: a run can be cut short, continued, and divided among machines."""
    add_common(command)
    command.add_argument("--list", action="store_true", help="print the cases' titles and run nothing")
    command.add_argument(
        "--shard", metavar="I/N", help="only every N-th case, from the I-th on; merge puts them together"
    )
    command.add_argument("--fresh", action="store_true", help="begin anew, instead of continuing the results file")
    command.add_argument("--retry", action="store_true", help="run those cases of the results file again that failed")
    command.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no case that would end later")
    command.add_argument("--contenders", help=f"comma-separated: {contenders}; default: all")
    command.add_argument(
        "--jobs", type=job_count, default=1, metavar="N", help="compile in N processes, which take turns to time a case"
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of cutfuse against PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    for suite, limit in TIME_LIMITS.items():
        command = commands.add_parser(suite, help=f"run the {suite} suite")
        add_common(command)
        command.add_argument("--time-limit", type=float, default=limit, metavar="SECONDS", help=f"default {limit:.0f}")
        command.add_argument("--contenders", help="comma-separated: mm,eager,compile,max-autotune,cutfuse,cutfuse-kept")
    add_accuracy(commands.add_parser("accuracy", help="fp32 products of every precision against fp64"))
    add_host(commands.add_parser("host", help="the host's time of a call, and stacks of layers from end to end"))
    add_continued(
        commands.add_parser("models", help="whole models through torch.compile, with cutfuse and without"),
        "eager,compile,compile-graphs,cutfuse,cutfuse-graphs",
    )
    add_continued(
        commands.add_parser("chains", help="chains of operations behind products, interpreted and specialized"),
        "mm,eager,compile,max-autotune,interpreted,specialized,pointwise,product",
    )
    render = commands.add_parser("render", help="the table and the PNG from a results file")
    render.add_argument("results", type=Path)
    render.add_argument("--markdown", action="store_true", help="print Markdown")
    render.add_argument(
        "--summary",
        action="store_true",
        help=f"print the documentation's short Markdown, of {', '.join(REPORTS)}",
    )
    render.add_argument(
        "--without", action="append", default=[], metavar="HEADING", help="leave this column out of the Markdown"
    )
    render.add_argument("--png", type=Path, help="where to draw; the default is beside the results file")
    summary = commands.add_parser("summarise", help="the part of a results file that is committed")
    summary.add_argument("results", type=Path)
    summary.add_argument("--output", type=Path, metavar="FOLDER", default=SUMMARIES, help="default: bench/results")
    merge = commands.add_parser("merge", help="one results file of several runs of the models or the chains suite")
    merge.add_argument("results", type=Path, nargs="+")
    merge.add_argument("--output", type=Path, metavar="NAME", help="default: bench/raw/SUITE-DEVICE-merged")
    return parser.parse_args(arguments)
