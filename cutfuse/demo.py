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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import cutfuse
from cutfuse import models, native
from cutfuse.compile.report import GREEN, RED, bar_characters, coloured, has_colours

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
        return self.seconds[1] / self.seconds[0] if self.seconds else math.nan


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
TIME_HEADINGS = ("time:\nPyTorch", "time:\ncutfuse", "ratio", BAR_HEADING)
OTHER_HEADINGS = ("model", "input", "precision", "path", "error:\nPyTorch", "error:\ncutfuse", "check")
HEADINGS = (*OTHER_HEADINGS[:-1], *TIME_HEADINGS, OTHER_HEADINGS[-1])
TEXT_HEADINGS = ("model", "input", "precision", "path", BAR_HEADING, "check")
# What a narrow terminal goes without, in this order.
DROPPABLE = (
    ("input",),
    ("path",),
    ("error:\nPyTorch", "error:\ncutfuse"),
    ("time:\nPyTorch", "time:\ncutfuse"),
    (BAR_HEADING,),
)
GAP = 2  # between two columns
PIPE_WIDTH = 100  # where neither a terminal nor COLUMNS says how wide the output is
OK, MISMATCH = "ok", "MISMATCH"


def bar(ratio: float, characters: str) -> str:
    """cutfuse's time as a part of PyTorch's, in BAR_WIDTH characters; a ">" behind it where it is longer.

    `characters`: for what is filled, and for the rest.
    """
    filled = min(BAR_WIDTH, max(1, round(BAR_WIDTH * ratio)))
    return characters[0] * filled + characters[1] * (BAR_WIDTH - filled) + (">" if ratio > 1.025 else "")


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def cells(result: Result, characters: str) -> dict[str, str]:
    """The texts of a row by the headings of their columns."""
    texts = (
        result.case.name,
        "x".join(map(str, result.case.shape)),
        result.precision.name,
        result.path,
        *(f"{error:.1e}" for error in result.errors),
        OK if result.matches else MISMATCH,
    )
    found = dict(zip(OTHER_HEADINGS, texts, strict=True))
    if result.seconds:
        times = (*map(format_seconds, result.seconds), f"{result.ratio:.2f}", bar(result.ratio, characters))
        found.update(zip(TIME_HEADINGS, times, strict=True))
    return found


class Layout(NamedTuple):
    """The table's rows, and the widths of the columns that are shown by their headings."""

    rows: list[dict[str, str]]
    widths: dict[str, int]
    dropped: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Names the columns that the width left no room for; empty if there are none."""
        names = ["bars" if heading == BAR_HEADING else heading.replace("\n", " ") for heading in self.dropped]
        return f"Columns left out, because the terminal is too narrow: {', '.join(names)}." if names else ""


def arrange(results: Sequence[Result], characters: str, width: int) -> Layout:
    """The table without the first of DROPPABLE, as few as have to go for it to be at most `width` wide."""
    rows = [cells(result, characters) for result in results]
    widths = {
        heading: max(map(len, [*heading.split("\n"), *(row[heading] for row in rows)]))
        for heading in HEADINGS
        if all(heading in row for row in rows)
    }
    dropped: list[str] = []
    for group in DROPPABLE:
        if sum(widths.values()) + GAP * (len(widths) - 1) <= width:
            break
        dropped += [heading for heading in group if widths.pop(heading, None) is not None]
    return Layout(rows, widths, tuple(dropped))


def format_table(results: Sequence[Result], layout: Layout, colours: bool) -> str:
    """The results as aligned columns: text to the left, numbers to the right."""

    def format_row(row: dict[str, str], styles: dict[str, str]) -> str:
        aligned = {
            heading: row[heading].ljust(width) if heading in TEXT_HEADINGS else row[heading].rjust(width)
            for heading, width in layout.widths.items()
        }
        texts = [coloured(text, styles.get(heading, "")) for heading, text in aligned.items()]
        return (GAP * " ").join(texts).rstrip()

    def styles_of(result: Result) -> dict[str, str]:
        faster = GREEN if result.ratio < 0.98 else ""
        return {"ratio": faster, BAR_HEADING: faster, "check": "" if result.matches else RED} if colours else {}

    first, second = ({heading: heading.rpartition("\n")[part] for heading in HEADINGS} for part in (0, 2))
    rule = (GAP * " ").join("-" * width for width in layout.widths.values())
    rows = [format_row(row, styles_of(result)) for result, row in zip(results, layout.rows, strict=True)]
    return "\n".join([format_row(first, {}), format_row(second, {}), rule, *rows])


def show_table(results: Sequence[Result]) -> None:
    """Prints the table as wide as the output is, and what its columns are. A terminal has colours too."""
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    layout = arrange(results, bar_characters(sys.stdout.encoding), width)
    print(format_table(results, layout, has_colours()))
    remarks = [
        "ratio: time of cutfuse over PyTorch, below 1 is faster." if "ratio" in layout.widths else "",
        "Errors are relative to fp64." if "error:\ncutfuse" in layout.widths else "",
        layout.remark,
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
