"""The models suite's results as tables: lines with verdicts, times, compilation, errors, and what was fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.cases import TARGET_DEVICE
from bench.format import MISSING, error, microseconds, ratio
from bench.host_report import limit_lines
from bench.model_cases import COMPILATION, ERRORS, PASSES, all_cases
from bench.model_contenders import (
    COMPILE,
    CONTENDERS,
    CUTFUSE,
    CUTFUSE_GRAPHS,
    EAGER,
    FASTER,
    FASTER_GRAPHS,
    OR,
)
from bench.model_suite import (
    COLD,
    ERROR,
    FIGURES,
    GPU,
    GRADIENT_ERROR,
    GRAPHS,
    MEAN,
    WALL,
    is_incomplete,
    ratio_of,
    verdict_of,
)
from bench.model_zoo import PACKAGES, remark_on
from bench.report import heading, note_lines
from bench.run_files import title_of
from bench.tables import Cell, Grid, TitledTable, grid_of, markdown_of, markdown_table, print_tables, rich_console

LEFT = ("line", "what", "figure", "contender", "over", "cases", "target", "model", "pass", "batch", "precision")
LEFT_OF_FUSION = ("model", "products, N x K", "fused", "program", "ended at", "reason", "cases")
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("line", "over", "contender", "eager ms", "cases", "ended at", "program")


def rival_label(rival: str) -> str:
    """A contender, or the faster one of several, as a table prints it."""
    labels = [CONTENDERS[name].label for name in rival.split(OR)]
    return labels[0] if len(labels) == 1 else f"faster of {' and '.join(labels)}"


def target_cell(line: dict[str, Any]) -> Cell:
    """The limit and the verdict."""
    limit = f"≤ {line['at_most']:g}" + (f", or {line['or_more']:g} s more" if line["or_more"] else "")
    verdict = verdict_of(line)
    if verdict is None:
        return Cell(limit)
    return Cell(f"{verdict} ({limit})", style="green" if verdict == "met" else "bold red")


def cases_cell(line: dict[str, Any]) -> Cell:
    """How many of the line's cases were measured, and what of them the ratio is."""
    counted = f"{line['cases']} of {line['expected']}"
    if line["measure"] == MEAN:
        return Cell(f"{counted}: {MEAN}")
    return Cell(f"{counted}: worst, {line['where']}" if line["where"] else counted)


def what_cell(line: dict[str, Any]) -> Cell:
    """The kind of cases that a line has."""
    load = f"{line['load']} batch" if line["load"] else ""
    return Cell(", ".join(part for part in (line["kind"], line["precision"], load) if part))


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """The lines; columns named in `without` are left out."""
    lines = results["lines"]
    columns = {
        "line": [Cell(str(line["line"])) for line in lines],
        "what": [what_cell(line) for line in lines],
        "figure": [Cell(FIGURES[line["figure"]]) for line in lines],
        "contender": [Cell(CONTENDERS[line["own"]].label) for line in lines],
        "over": [Cell(rival_label(line["rival"])) for line in lines],
        "cases": [cases_cell(line) for line in lines],
        "ratio": [Cell(ratio(line["ratio"]), style="bold") for line in lines],
        "target": [target_cell(line) for line in lines],
    }
    return grid_of(columns, without)


def failed_cell(entry: dict[str, Any] | None) -> Cell:
    """For a contender without a figure: a dash, or that it failed; notes say more."""
    if entry is None or "note" not in entry:
        return Cell(MISSING)
    return Cell(entry["note"].split(":")[0], style="bold red")


def times_cell(case: dict[str, Any], name: str) -> Cell:
    """A contender's milliseconds: of the device, and of the wall clock."""
    entry = case["contenders"].get(name)
    if entry is None or GPU not in entry:
        return failed_cell(entry)
    return Cell(" / ".join(microseconds(1e-3 * entry[figure]) for figure in (GPU, WALL)))


def quotients_cell(case: dict[str, Any], own: str, rival: str) -> Cell:
    """The ratios of both times."""
    found = [ratio_of({"own": own, "rival": rival, "figure": figure}, case) for figure in (GPU, WALL)]
    return Cell(MISSING if None in found else " / ".join(ratio(value) for value in found), style="bold")


def times_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """Every timed case."""
    cases = [case for case in results["cases"] if case["variant"] in PASSES]
    present = [name for name in CONTENDERS if any(name in case["contenders"] for case in cases)]
    columns = {
        "model": [Cell(case["group"]) for case in cases],
        "pass": [Cell(case["variant"]) for case in cases],
        "batch": [Cell(case["shape"].removeprefix("batch ")) for case in cases],
        "precision": [Cell(case["precision"]) for case in cases],
        **{f"{CONTENDERS[name].label} ms": [times_cell(case, name) for case in cases] for name in present},
        "cutfuse / faster of both": [quotients_cell(case, CUTFUSE.name, FASTER) for case in cases],
        "with CUDA graphs": [quotients_cell(case, CUTFUSE_GRAPHS.name, FASTER_GRAPHS) for case in cases],
        "products fused": [Cell(case.get("fused") or MISSING) for case in cases],
    }
    return grid_of(columns, without)


def figure_cell(case: dict[str, Any], name: str, figure: str, text: Callable[[float], str]) -> Cell:
    """One figure of a contender."""
    entry = case["contenders"].get(name)
    return Cell(text(entry[figure])) if entry and figure in entry else failed_cell(entry)


def compilation_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """Compile times and numbers of graphs."""
    cases = [case for case in results["cases"] if case["variant"] == COMPILATION]
    columns = {"model": [Cell(case["group"]) for case in cases]}
    for figure, text in ((COLD, "{:.1f} s".format), (GRAPHS, str)):
        for contender in (COMPILE, CUTFUSE):
            cells = [figure_cell(case, contender.name, figure, text) for case in cases]
            columns[f"{FIGURES[figure]}: {contender.label}"] = cells
    return grid_of(columns, without)


def errors_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """Errors against fp64, each with its ratio to eager's."""
    cases = [case for case in results["cases"] if case["variant"] == ERRORS]
    columns = {
        "model": [Cell(case["group"]) for case in cases],
        "precision": [Cell(case["precision"]) for case in cases],
    }
    for figure in (ERROR, GRADIENT_ERROR):
        for contender in (EAGER, COMPILE, CUTFUSE):
            cells = [figure_cell(case, contender.name, figure, error) for case in cases]
            columns[f"{FIGURES[figure]}: {contender.label}"] = cells
        about = {"own": CUTFUSE.name, "rival": EAGER.name, "figure": figure}
        columns[f"{FIGURES[figure]}: cutfuse / eager"] = [Cell(ratio(ratio_of(about, case))) for case in cases]
    return grid_of(columns, without)


def fusion_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """What became of every product of every model."""
    rows = results["fusion"]
    columns = {
        "model": [Cell(row["model"]) for row in rows],
        "products, N x K": [Cell("; ".join(row["layers"])) for row in rows],
        "fused": [Cell("yes" if row["fused"] else "no", style="green" if row["fused"] else "") for row in rows],
        "program": [Cell(row.get("program") or MISSING) for row in rows],
        "ended at": [Cell(row.get("ended_at") or MISSING) for row in rows],
        "reason": [Cell(row.get("reason") or MISSING) for row in rows],
        "cases": [Cell(row["cases"]) for row in rows],
    }
    return grid_of(columns, without)


TABLES = (
    TitledTable("Times in milliseconds: GPU / wall", times_table, LEFT),
    TitledTable("Compilation", compilation_table, LEFT),
    TitledTable("Relative errors against fp64", errors_table, LEFT),
    TitledTable("What became of each product", fusion_table, LEFT_OF_FUSION),
)


def explanations(results: dict[str, Any]) -> list[str]:
    """What the figures are."""
    settings = results["settings"]
    lines = [
        "GPU: the device's time of a call that is queued behind other work. Wall: from the call until its result is "
        "there. Medians; contenders in turns, in random order, weights and inputs shared.",
        "cutfuse / faster of both: over the faster of eager and torch.compile, each of the two times by itself; with "
        "CUDA graphs, over the faster of eager and torch.compile with them. Targets are over the same.",
        "A training step is the forward pass in train mode with the configuration's dropout, the backward pass and a "
        'fused AdamW. Parameters are of the precision\'s own type, without autocast; fp32 is at "highest", and '
        "convolutions are in fp32 too.",
        "One token: against a static cache of 2048 positions, which holds 2047. Language models give the logits of the "
        "last word, and in training their loss. The MLPs' small batch is 2048.",
        "Compile time: the first call of a small batch in bf16, without caches. Graphs: of the small model with five "
        "batch sizes. Errors: of a small batch in eval mode, of all gradients together.",
    ]
    # Of the cases, as those of a file may come from runs with more processes and with fewer.
    jobs = max((case.get("jobs", 1) for case in results["cases"]), default=1)
    if jobs > 1:
        others = f"up to {jobs - 1} other processes" if jobs > 2 else "at most one other process"
        lines.append(f"Compile times were measured while {others} compiled, those of both compilers alike.")
    if settings["quick"]:
        lines.append("A run of small models: less depth and width, and smaller batches.")
    if not results["machine"].get("capability"):
        lines.append("On a CPU both compilers call PyTorch's operations, as a C++ compiler would take minutes.")
    return lines


def missing_line(results: dict[str, Any]) -> list[str]:
    """How much of the suite the results hold, and which packages were not there."""
    whole = len(all_cases(results["settings"]["quick"]))
    lines = [f"Cases: {len(results['cases'])} of {whole}."]
    return lines + [remark_on(package) for package in PACKAGES if results["settings"][package] is None]


def graph_lines(results: dict[str, Any]) -> list[str]:
    """Where a contender with CUDA graphs ran without them."""
    found: dict[str, list[str]] = {}
    for case in results["cases"]:
        for name, entry in case["contenders"].items():
            if "without_graphs" in entry:
                found.setdefault(name, []).append(title_of(case))
    return [
        f"{CONTENDERS[name].label}: Inductor did without them in {'; '.join(titles)}." for name, titles in found.items()
    ]


def verdict_line(results: dict[str, Any]) -> str:
    """The verdicts in total."""
    if results["settings"]["quick"] and results["machine"]["device"] == TARGET_DEVICE:
        return "No verdict: the targets are those of the whole models."
    verdicts = Counter("incomplete" if is_incomplete(line) else line["verdict"] for line in results["lines"])
    del verdicts[None]
    if not verdicts:
        return f"No verdict: the targets are those of an {TARGET_DEVICE}."
    counts = ", ".join(f"{verdicts[name]} {name}" for name in ("met", "missed", "incomplete", "not measured"))
    return f"Targets: {counts}."


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the verdicts in total, failures, and what is missing."""
    return [
        *explanations(results),
        verdict_line(results),
        *note_lines(results["cases"]),
        *graph_lines(results),
        *missing_line(results),
        *limit_lines(results),
    ]


def summary(results: dict[str, Any]) -> str:
    """The lines and the remarks as Markdown."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results), LEFT), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """Every table without the columns of the headings in `without`, and the remarks."""
    tables = (TitledTable(heading(results), table, LEFT), *TABLES)
    return markdown_of(tables, results, remarks(results), without)


def show(results: dict[str, Any]) -> None:
    """Print the tables: with rich where it is installed."""
    console = rich_console()
    if console is None:
        print(markdown(results))
        return
    tables = (*TABLES, TitledTable(heading(results), table, LEFT))
    print_tables(console, tables, results, remarks(results), DROPPABLE)


def case_line(case: dict[str, Any]) -> str:
    """A finished case on one line, for the progress."""
    parts = [case["note"]] if case.get("note") else []
    for name, entry in case["contenders"].items():
        if GPU in entry:
            parts.append(f"{name} {times_cell(case, name).text} ms")
        elif "note" in entry:
            parts.append(f"{name} {entry['note']}")
        else:
            parts.append(f"{name} {', '.join(f'{value:.3g} {key}' for key, value in entry.items())}")
    return "; ".join(parts)
