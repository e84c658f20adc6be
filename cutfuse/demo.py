"""`python -m cutfuse.demo`: the five reference models through cutfuse and PyTorch, checked against fp64, and timed
where kernels run.

Runs the full sizes on a GPU with enough memory and small ones elsewhere. Exits with 1 when cutfuse's error is above
PyTorch's by more than one rounding of the output type. `python -m bench` measures by stricter rules.
"""

from __future__ import annotations

import argparse
import copy
import math
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import cutfuse
from cutfuse import models, native
from cutfuse.compile.report import GREEN, PIPE_WIDTH, RED, bar_characters, coloured, has_colours

# LinearSigmoidSum in fp64 and Sigmoid's three matrices each take about 25 GiB at full size.
FULL_SIZE_BYTES = 32 * 2**30
# Elements of a slice of rows that is evaluated in fp64 at a time: 1 GiB.
REFERENCE_SLICE = 2**27


@dataclass(frozen=True)
class Case:
    """A reference model: its name in `cutfuse.nn` and `cutfuse.models`, constructor arguments and input shape."""

    name: str
    arguments: tuple[int | float, ...]
    shape: tuple[int, ...]

    @property
    def has_product(self) -> bool:
        return len(self.arguments) > 1


FULL_SIZE = (
    Case("LinearSigmoidSum", (32768, 32768), (128, 32768)),
    Case("Sigmoid", (), (4096, 393216)),
    Case("GemmDivideSumScale", (8192, 8192, 1.5), (1024, 8192)),
    Case("SumReduction", (1,), (128, 4096, 4095)),
    Case("GemmSigmoidScaleResidual", (8192, 8192, 2.0), (1024, 8192)),
)
SMALL_SIZE = (
    Case("LinearSigmoidSum", (2048, 2048), (64, 2048)),
    Case("Sigmoid", (), (512, 8192)),
    Case("GemmDivideSumScale", (1024, 1024, 1.5), (256, 1024)),
    Case("SumReduction", (1,), (16, 512, 511)),
    Case("GemmSigmoidScaleResidual", (1024, 1024, 2.0), (256, 1024)),
)


@dataclass(frozen=True)
class Precision:
    name: str
    dtype: torch.dtype
    matmul: str = "highest"  # for torch.set_float32_matmul_precision


FLOAT32 = Precision("fp32", torch.float32)
TENSOR_FLOAT32 = Precision("tf32", torch.float32, "high")
BFLOAT16 = Precision("bf16", torch.bfloat16)


@dataclass(frozen=True)
class Result:
    """Relative errors against fp64 (Frobenius norms) and median seconds a call, of PyTorch and of cutfuse.

    path: which way cutfuse takes, as `cutfuse.explain` names it. seconds: None where no kernel of cutfuse runs.
    """

    case: Case
    precision: Precision
    path: str
    errors: tuple[float, float]
    seconds: tuple[float, float] | None

    @property
    def matches(self) -> bool:
        """False for a NaN error too."""
        one_rounding = torch.finfo(self.precision.dtype).eps / 2
        return self.errors[1] <= self.errors[0] + one_rounding

    @property
    def ratio(self) -> float:
        """NaN without times."""
        return self.times[1] / self.times[0]

    @property
    def times(self) -> tuple[float, float]:
        return self.seconds or (math.nan, math.nan)


def measure_errors(model: nn.Module, x: Tensor, outputs: Sequence[Tensor]) -> list[float]:
    """The relative errors of `outputs`, each the model's output for `x`, against the model in fp64."""
    reference = copy.deepcopy(model).double()
    widest = max(tensor[0].numel() for tensor in (x, *outputs))
    rows = max(1, REFERENCE_SLICE // widest)
    squared_errors = torch.zeros(len(outputs), dtype=torch.float64)
    squared_norm = 0.0
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        expected = reference(x[part].double())
        squared_norm += expected.square().sum().item()
        for index, output in enumerate(outputs):
            squared_errors[index] += (output[part].double() - expected).square().sum().item()
    return (squared_errors / squared_norm).sqrt().tolist()


def time_calls(calls: Sequence[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """The median seconds of each call on a GPU: 20 samples of 10 calls, the contenders taking turns."""

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(20):
        for call, times in zip(calls, samples, strict=True):
            start = now()
            for _ in range(10):
                call()
            times.append((now() - start) / 10)
    return [statistics.median(times) for times in samples]


@torch.inference_mode()
def run_case(case: Case, precision: Precision, device: torch.device) -> Result:
    """Builds the plain and the fused model with the same weights, checks both against fp64, and times them."""
    torch.set_float32_matmul_precision(precision.matmul)
    torch.manual_seed(0)
    with device:
        plain = getattr(models, case.name)(*case.arguments).to(precision.dtype)
        fused = getattr(cutfuse.nn, case.name)(*case.arguments).to(precision.dtype)
        x = torch.randn(case.shape, dtype=precision.dtype)
    fused.load_state_dict(plain.state_dict(), strict=True)
    plain_error, fused_error = measure_errors(plain, x, (plain(x), fused(x)))
    seconds = None
    if cutfuse.is_available(device):
        plain_seconds, fused_seconds = time_calls((lambda: plain(x), lambda: fused(x)), device)
        seconds = plain_seconds, fused_seconds
    path = cutfuse.explain(fused, x).path
    return Result(case, precision, path, (plain_error, fused_error), seconds)


def describe(device: torch.device, cases: Sequence[Case]) -> str:
    """What is about to run, and on what, in two lines."""
    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if on_gpu else f"the CPU ({torch.get_num_threads()} threads)"
    size = "full size" if cases is FULL_SIZE else "small size"
    kernels = cutfuse.is_available(device)
    runs = "cutfuse's kernels run" if kernels else "PyTorch's operations run, so nothing is timed"
    because = f": {kernels.reason}" if kernels.reason else ""
    return f"cutfuse {cutfuse.__version__}, torch {torch.__version__}, {size} on {machine}\n{runs}{because}"


def choose_precisions(case: Case, device: torch.device) -> list[Precision]:
    if device.type == "cuda" and case.has_product:
        return [FLOAT32, TENSOR_FLOAT32, BFLOAT16]
    return [FLOAT32, BFLOAT16]


def parse_device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """A device that is there. Exits with a message otherwise."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            parser.error(f"--device {name}: choose cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where PyTorch is built without CUDA
        parser.error(f"--device {name}: {str(error).splitlines()[0]}")
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutfuse.demo", description=__doc__.partition(": ")[2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--small", action="store_true", help="small sizes on a GPU too")
    options = parser.parse_args(arguments)
    native.require_module()
    device = parse_device(parser, options.device)

    is_large = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= FULL_SIZE_BYTES
    cases = FULL_SIZE if is_large and not options.small else SMALL_SIZE
    print(describe(device, cases))
    runs = [(case, precision) for case in cases for precision in choose_precisions(case, device)]
    results = []
    for number, (case, precision) in enumerate(runs, 1):
        print(f"[{number}/{len(runs)}] {case.name} {precision.name}", file=sys.stderr, flush=True)
        results.append(run_case(case, precision, device))
        if device.type == "cuda":
            torch.cuda.empty_cache()

    show_table(results)
    mismatches = [result for result in results if not result.matches]
    if mismatches:
        print(f"{len(mismatches)} of {len(results)} outputs are less accurate than PyTorch's")
        return 1
    print(f"all {len(results)} outputs are as accurate as PyTorch's, to one rounding\n")
    print(next_steps(bool(cutfuse.is_available(device))))
    return 0


BAR_WIDTH = 20
BAR_HEADING = "time against PyTorch's\n(full bar: PyTorch)"
GAP = 2  # between two columns
OK, MISMATCH = "ok", "MISMATCH"


def bar(ratio: float, characters: str) -> str:
    """cutfuse's time as a part of PyTorch's, in BAR_WIDTH characters; a ">" behind it where it is longer.

    `characters`: for what is filled, and for the rest.
    """
    filled = min(BAR_WIDTH, max(1, round(BAR_WIDTH * ratio)))
    return characters[0] * filled + characters[1] * (BAR_WIDTH - filled) + (">" if ratio > 1.025 else "")


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


class Column(NamedTuple):
    """A column of the table: text to the left, or numbers to the right.

    cell: its text, of a result and the characters of bars. step: the first step of those in which a narrow terminal
    goes without columns that goes without this one, or 0. is_timed: only where there are times.
    """

    heading: str
    cell: Callable[[Result, str], str]
    step: int = 0
    is_text: bool = False
    is_timed: bool = False

    @property
    def name(self) -> str:
        return "bars" if self.heading == BAR_HEADING else self.heading.replace("\n", " ")


COLUMNS = (
    Column("model", lambda result, _: result.case.name, is_text=True),
    Column("input", lambda result, _: "x".join(map(str, result.case.shape)), 1, is_text=True),
    Column("precision", lambda result, _: result.precision.name, is_text=True),
    Column("path", lambda result, _: result.path, 2, is_text=True),
    Column("error:\nPyTorch", lambda result, _: f"{result.errors[0]:.1e}", 3),
    Column("error:\ncutfuse", lambda result, _: f"{result.errors[1]:.1e}", 3),
    Column("time:\nPyTorch", lambda result, _: format_seconds(result.times[0]), 4, is_timed=True),
    Column("time:\ncutfuse", lambda result, _: format_seconds(result.times[1]), 4, is_timed=True),
    Column("ratio", lambda result, _: f"{result.ratio:.2f}", is_timed=True),
    Column(BAR_HEADING, lambda result, characters: bar(result.ratio, characters), 5, is_text=True, is_timed=True),
    Column("check", lambda result, _: OK if result.matches else MISMATCH, is_text=True),
)


def arrange(results: Sequence[Result], characters: str, width: int) -> tuple[dict[Column, int], list[Column]]:
    """The columns that are shown, with their widths, and those that are left out, as few as have to be for the table to
    be at most `width` wide."""
    shown = {
        column: max(map(len, [*column.heading.split("\n"), *(column.cell(result, characters) for result in results)]))
        for column in COLUMNS
        if not column.is_timed or all(result.seconds for result in results)
    }
    dropped: list[Column] = []
    for step in range(1, max(column.step for column in COLUMNS) + 1):
        if sum(shown.values()) + GAP * (len(shown) - 1) > width:
            dropped += [column for column in shown if column.step == step]
            shown = {column: size for column, size in shown.items() if column.step != step}
    return shown, dropped


def format_table(results: Sequence[Result], shown: dict[Column, int], characters: str, colours: bool) -> str:
    """The results as aligned columns."""

    def format_row(texts: Iterable[str], styles: dict[str, str]) -> str:
        aligned = [
            coloured(text.ljust(width) if column.is_text else text.rjust(width), styles.get(column.heading, ""))
            for (column, width), text in zip(shown.items(), texts, strict=True)
        ]
        return (GAP * " ").join(aligned).rstrip()

    def styles_of(result: Result) -> dict[str, str]:
        faster = GREEN if result.ratio < 0.98 else ""
        return {"ratio": faster, BAR_HEADING: faster, "check": "" if result.matches else RED} if colours else {}

    head = [format_row((column.heading.rpartition("\n")[part] for column in shown), {}) for part in (0, 2)]
    rule = (GAP * " ").join("-" * width for width in shown.values())
    rows = [format_row((column.cell(result, characters) for column in shown), styles_of(result)) for result in results]
    return "\n".join([*head, rule, *rows])


def show_table(results: Sequence[Result]) -> None:
    """Prints the table as wide as the output is, and what its columns are. A terminal has colours too."""
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    characters = bar_characters(sys.stdout.encoding)
    shown, dropped = arrange(results, characters, width)
    print(format_table(results, shown, characters, has_colours()))
    names, left_out = [column.name for column in shown], ", ".join(column.name for column in dropped)
    remarks = [
        "ratio: time of cutfuse over PyTorch, below 1 is faster." if "ratio" in names else "",
        "Errors are relative to fp64." if "error: cutfuse" in names else "",
        f"Columns left out, because the terminal is too narrow: {left_out}." if dropped else "",
    ]
    print(textwrap.fill(" ".join(filter(None, remarks)), width))


def next_steps(has_kernels: bool) -> str:
    """What to go on with, most useful first, at most 80 columns wide."""
    steps = [
        ("python -m cutfuse.epilogue", "the functions that an epilogue may use"),
        ("python -m cutfuse.report", "build and settings, for a bug report"),
    ]
    if has_kernels:
        steps.insert(0, ("python -m bench reference --quick", "in a clone: beside torch.compile"))
    width = max(len(command) for command, _ in steps)
    lines = [
        "Try next an epilogue of your own, and ask which kernels run, and why:",
        "  y = cutfuse.linear(x, weight, bias, epilogue=lambda z: z * torch.sigmoid(z))",
        "  print(cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce='sum'))",
        *(f"  {command.ljust(width)}   # {purpose}" for command, purpose in steps),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
