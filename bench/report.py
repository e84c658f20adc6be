"""Results as a table on the terminal (rich or plain), as Markdown, and as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.format import MISSING, error, microseconds, ratio
from bench.tables import Cell, markdown_table, print_fitting, print_lines, rich_console
from bench.workloads import PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA = 1
RESULTS = Path(__file__).resolve().parent / "results"
LABELS = {"mm": "torch.mm", "compile": "torch.compile"}
MOST_TITLES = 8  # A note on more cases than this gives their number only.
WORDS = ("case", "variant", "shape", "precision", "path", "target")  # columns of text, aligned left
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("path", "error eager", "error cutfuse", "floor us", "max-autotune us", "torch.mm us", "eager us", "target")


def tidy(value: Any, digits: int = 6) -> Any:
    """Numbers cut to `digits` for JSON, and null for infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: tidy(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tidy(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def save(results: dict[str, Any], path: Path) -> None:
    """Write results as JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tidy(results), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def part_path(path: Path, field: str) -> Path:
    """Where a summary has a field that is in a file of its own."""
    return path.with_name(f"{path.stem}-{field}{path.suffix}")


def load(path: Path) -> dict[str, Any]:
    """Read results, with the fields that are in files of their own.

    Raises ValueError for a file that `bench` did not write, and OSError where one is missing.
    """
    results = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ValueError(f"{path} holds no results of this benchmark (schema {SCHEMA})")
    for field in results.pop("parts", ()):
        results |= json.loads(part_path(path, field).read_text(encoding="utf-8"))
    return results


def committed(suite: str) -> dict[str, Any]:
    """A suite's committed results, of which the documentation's tables and plots are made."""
    return load(RESULTS / f"{suite}-nvidia-h200.json")


def ordered(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases with each group's and shape's together, in the order in which they were run, then by precision."""
    places = list(dict.fromkeys((case["group"], case["shape"]) for case in results["cases"]))
    precisions = list(PRECISIONS)
    return sorted(
        results["cases"],
        key=lambda case: (places.index((case["group"], case["shape"])), precisions.index(case["precision"])),
    )


def time_cell(entry: dict[str, Any] | None, style: str = "") -> Cell:
    """A contender's median, with its percentiles below."""
    if entry is None:
        return Cell(MISSING)
    if "median_us" not in entry:
        failed = not entry["note"].startswith("left out")
        return Cell(entry["note"].split(":")[0] if failed else MISSING, style="bold red" if failed else "")
    percentiles = f"{microseconds(entry['p10_us'])}-{microseconds(entry['p90_us'])}"
    return Cell(microseconds(entry["median_us"]), percentiles, style)


def error_cell(case: dict[str, Any], name: str) -> Cell:
    """A contender's error against fp64, marked where cutfuse's is above eager's."""
    above = name == "cutfuse" and case["accurate"] is False
    text = error(case["contenders"].get(name, {}).get("error"))
    return Cell(f"{text} above" if above else text, style="bold red" if above else "")


def target_cell(case: dict[str, Any]) -> Cell:
    """The verdicts, each with its limit."""
    if not case["targets"]:
        return Cell(MISSING)
    parts = [f"{target['verdict']} (≤ {ratio(target['at_most'])} {target['against']})" for target in case["targets"]]
    missed = any(target["verdict"] != "met" for target in case["targets"])
    return Cell("; ".join(parts), style="bold red" if missed else "green")


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> tuple[list[str], list[list[Cell]]]:
    """The headings, and the cells of every case; columns that are empty or named in `without` are left out."""
    cases = ordered(results)
    names = [name for name in results["settings"]["contenders"] if any(name in case["contenders"] for case in cases)]
    columns: dict[str, list[Cell]] = {
        "case": [Cell(case["group"]) for case in cases],
        "variant": [Cell(case["variant"] or MISSING) for case in cases],
        "shape": [Cell(case["shape"]) for case in cases],
        "precision": [Cell(case["precision"]) for case in cases],
        "floor us": [Cell(microseconds(case["floor_us"])) for case in cases],
    }
    for name in names:
        style = "bold" if name == "cutfuse" else ""
        columns[f"{LABELS.get(name, name)} us"] = [time_cell(case["contenders"].get(name), style) for case in cases]
    for rival in ("compile", "mm"):
        columns[f"cutfuse / {LABELS[rival]}"] = [Cell(ratio(case["ratios"].get(rival))) for case in cases]
    for name in ("eager", "cutfuse"):
        columns[f"error {name}"] = [error_cell(case, name) for case in cases]
    columns["path"] = [Cell(textwrap.shorten(case.get("path") or MISSING, 60)) for case in cases]
    columns["target"] = [target_cell(case) for case in cases]
    if {case["group"] for case in cases} == {results["suite"]}:
        del columns["case"]  # It would say the suite's name in every row.
    filled = {name: cells for name, cells in columns.items() if any(cell.text != MISSING for cell in cells)}
    kept = {name: cells for name, cells in filled.items() if name not in without}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def heading(results: dict[str, Any]) -> str:
    """What was run where."""
    machine = results["machine"]
    versions = [f"torch {machine['torch']}"]
    versions += [f"{name} {machine[key]}" for name, key in (("CUDA", "cuda"), ("driver", "driver")) if machine.get(key)]
    commit, _, changes = (machine.get("commit") or "unknown").partition(" ")
    versions += [f"cutfuse {machine['cutfuse']}", f"commit {commit[:12]} {changes}".rstrip()]
    return f"{results['suite']} on {machine['device']} ({', '.join(versions)}), {machine['date']}"


def remarks(results: dict[str, Any]) -> list[str]:
    """What the table's reader must know besides: verdicts in total, failures, and what was left out."""
    lines = ["Times are medians in microseconds; errors are relative, against fp64."]
    contenders = results["settings"]["contenders"]
    if "compile" in contenders and "max-autotune" in contenders:
        lines.append("cutfuse / torch.compile takes the faster of torch.compile and max-autotune.")
    verdicts = Counter(target["verdict"] for case in results["cases"] for target in case["targets"])
    if verdicts:
        counts = ", ".join(f"{verdicts.get(name, 0)} {name}" for name in ("met", "missed", "not measured"))
        lines.append(f"Targets: {counts}.")
    judged = [case["accurate"] for case in results["cases"] if case["accurate"] is not None]
    if judged:
        lines.append(
            f"Accuracy: cutfuse's error is within eager's plus one rounding in {sum(judged)} of {len(judged)} cases."
        )
    if results["machine"].get("capability") and not results["machine"]["cutfuse_kernels"]:
        lines.append("cutfuse has no CUDA kernels in this build: its figures are those of composed PyTorch operations.")
    lines += note_lines(results["cases"])
    if results["left_out"]:
        lines.append(f"Cases left out by the time limit: {'; '.join(results['left_out'])}.")
    return lines


def note_lines(cases: list[dict[str, Any]]) -> list[str]:
    """Notes on contenders and cases, each once with the cases that it is on."""
    found: dict[str, list[str]] = {}
    for case in cases:
        parts = (case["group"], case.get("variant"), case["shape"], case["precision"])
        title = " ".join(part for part in parts if part)
        notes = [f"{name} {entry['note']}" for name, entry in case["contenders"].items() if "note" in entry]
        for note in [*notes, *([case["note"]] if case.get("note") else [])]:
            found.setdefault(note, []).append(title)
    return [
        f"{note} ({'; '.join(titles) if len(titles) <= MOST_TITLES else f'{len(titles)} cases'})."
        for note, titles in found.items()
    ]


def has_failed(case: dict[str, Any]) -> bool:
    """Whether a case could not be built, or one of its contenders failed or gave a wrong result."""
    entries = (case, *case["contenders"].values())
    return any(entry.get("note", "").startswith(("failed", "wrong")) for entry in entries)


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """The table and the remarks as Markdown, medians only, without the columns of the headings in `without`."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results, without), WORDS)]
    return "\n".join([*lines, "", *(f"- {line}" for line in remarks(results))])


def plain(results: dict[str, Any]) -> str:
    """The table as aligned text, percentiles in brackets."""
    headings, rows = table(results)
    texts = [[f"{cell.text} [{cell.detail}]" if cell.detail else cell.text for cell in row] for row in rows]
    widths = [max(len(line[index]) for line in [headings, *texts]) for index in range(len(headings))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in texts]
    title = "  ".join(text.ljust(width) for text, width in zip(headings, widths, strict=True))
    return "\n".join([heading(results), "", title, *lines, "", *remarks(results)])


def show(results: dict[str, Any]) -> None:
    """Print the table: with rich where it is installed."""
    console = rich_console()
    if console is None:
        print(plain(results))
    else:
        show_rich(results, console)


def rich_table(results: dict[str, Any], dropped: tuple[str, ...]) -> Table:
    """The table for rich: percentiles below the medians, a line between shapes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings, rows = table(results, dropped)
    grid = Table(title=heading(results), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in headings:
        title = name.replace("/ ", "/\n").replace(" us", "\nus").replace("error ", "error\n")
        width = 26 if name == "path" else None
        grid.add_column(title, justify="left" if name in WORDS else "right", no_wrap=name != "path", max_width=width)
    previous = None
    for case, row in zip(ordered(results), rows, strict=True):
        if previous not in (None, (case["group"], case["shape"])):
            grid.add_section()
        previous = (case["group"], case["shape"])
        cells = []
        for cell in row:
            text = Text(cell.text.replace("; ", "\n"), style=cell.style)
            if cell.detail:
                text.append(f"\n{cell.detail}", style="dim not bold")
            cells.append(text)
        grid.add_row(*cells)
    return grid


def show_rich(results: dict[str, Any], console: Console) -> None:
    """The table on a rich console, without its last columns of `DROPPABLE` where they do not fit, and the remarks."""
    present = table(results)[0]
    droppable = [name for name in DROPPABLE if name in present]
    dropped = print_fitting(console, lambda without: rich_table(results, without), droppable)
    print_lines(console, [*remarks(results), *dropped])
