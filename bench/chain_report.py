"""The chains suite's results as tables: lines with verdicts, products, what has no product, and the chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import TARGET_DEVICE
from bench.chain_cases import LINEAR, UNTIMED, all_cases
from bench.chain_contenders import AUTOTUNE, COMPILE, INTERPRETED, LABELS, MM, NAMES, SPECIALIZED
from bench.chain_suite import SECONDS, SHARE, median, share_of_ceiling
from bench.format import MISSING, microseconds, ratio
from bench.host_report import limit_lines, verdict_line
from bench.host_suite import MEAN
from bench.report import heading, note_lines
from bench.run_files import title_of
from bench.tables import Cell, Grid, TitledTable, grid_of, markdown_of, markdown_table, print_tables, rich_console

LEFT = ("line", "what", "over", "cases", "target", "case", "chain", "shape", "precision", "operands", "reduce", "text")
# What a narrow terminal goes without, the first soonest.
DROPPABLE = ("line", "operands", "product alone us", "pointwise alone us", "eager us", "max-autotune us", "cases")


def value_text(line: dict[str, Any], value: float | None) -> str:
    """A line's value or limit in its unit."""
    if value is None:
        return MISSING
    return f"{value:.3g} s" if line["unit"] == SECONDS else ratio(value)


def target_cell(line: dict[str, Any]) -> Cell:
    """The limit and the verdict."""
    limit = f"{'≥' if line['unit'] == SHARE else '≤'} {value_text(line, line['limit'])}"
    if line["verdict"] is None:
        return Cell(limit)
    return Cell(f"{line['verdict']} ({limit})", style="green" if line["verdict"] == "met" else "bold red")


def cases_cell(line: dict[str, Any]) -> Cell:
    """How many of the line's cases were measured, and what of them the value is."""
    counted = f"{line['cases']} of {line['expected']}"
    if line["measure"] == MEAN:
        return Cell(f"{counted}: {MEAN}")
    return Cell(f"{counted}: worst, {line['where']}" if line["where"] and line["cases"] > 1 else counted)


def over_cell(line: dict[str, Any]) -> Cell:
    """What the time is compared with."""
    return Cell(f"share of the {line['against']}" if line["unit"] == SHARE else line["against"] or MISSING)


def table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """The lines; columns named in `without` are left out."""
    lines = results["lines"]
    columns = {
        "line": [Cell(str(line["line"])) for line in lines],
        "what": [Cell(line["what"]) for line in lines],
        "over": [over_cell(line) for line in lines],
        "cases": [cases_cell(line) for line in lines],
        "specialized": [Cell(value_text(line, line["value"]), style="bold") for line in lines],
        "target": [target_cell(line) for line in lines],
    }
    return grid_of(columns, without)


def time_cell(case: dict[str, Any], name: str) -> Cell:
    """A contender's median, or that it failed; notes say more."""
    entry = case["contenders"].get(name, {})
    if "note" in entry:
        return Cell(entry["note"].split(":")[0], style="bold red")
    return Cell(microseconds(entry.get("median_us")), style="bold" if name == SPECIALIZED else "")


def time_columns(cases: Sequence[dict[str, Any]]) -> dict[str, list[Cell]]:
    """A column for each contender that a case has."""
    present = [name for name in NAMES if any(name in case["contenders"] for case in cases)]
    return {f"{LABELS[name]} us": [time_cell(case, name) for case in cases] for name in present}


def fastest_compiled(case: dict[str, Any]) -> float | None:
    """The time of the best of torch.compile's modes."""
    return min((time for name in (COMPILE, AUTOTUNE) if (time := median(case, name)) is not None), default=None)


def quotient(case: dict[str, Any], own: str, base: float | None) -> float | None:
    """A contender's time over another."""
    time = median(case, own)
    return None if time is None or base is None else time / base


def products_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """Every product with a chain behind it."""
    cases = [case for case in results["cases"] if case["group"] == LINEAR]
    operands = {chain["name"]: chain["operands"] for chain in results["chains"]}
    columns = {
        "shape": [Cell(case["shape"]) for case in cases],
        "precision": [Cell(case["precision"]) for case in cases],
        "chain": [Cell(case["variant"]) for case in cases],
        "operands": [Cell(operands[case["variant"]] or MISSING) for case in cases],
        **time_columns(cases),
    }
    for name in (INTERPRETED, SPECIALIZED):
        values = [quotient(case, name, fastest_compiled(case)) for case in cases]
        columns[f"{name} / compiled"] = [Cell(ratio(value)) for value in values]
    columns["specialized / mm"] = [Cell(ratio(quotient(case, SPECIALIZED, median(case, MM)))) for case in cases]
    return grid_of(columns, without)


def others_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """Every case that is timed and no product with a chain."""
    cases = [case for case in results["cases"] if case["group"] not in (LINEAR, *UNTIMED)]
    columns = {
        "case": [Cell(case["group"]) for case in cases],
        "chain": [Cell(case["variant"]) for case in cases],
        "shape": [Cell(case["shape"]) for case in cases],
        "precision": [Cell(case["precision"]) for case in cases],
        **time_columns(cases),
        # Of a training step no ceiling is known.
        "share of ceiling": [Cell(ratio(share_of_ceiling(case) or None)) for case in cases],
        "specialized / compiled": [Cell(ratio(quotient(case, SPECIALIZED, fastest_compiled(case)))) for case in cases],
    }
    return grid_of(columns, without)


def chains_table(results: dict[str, Any], without: tuple[str, ...] = ()) -> Grid:
    """What the chains' names stand for."""
    chains = results["chains"]
    columns = {
        "chain": [Cell(chain["name"]) for chain in chains],
        "ops": [Cell(str(chain["ops"])) for chain in chains],
        "operands": [Cell(chain["operands"] or MISSING) for chain in chains],
        "reduce": [Cell(chain["reduce"] or MISSING) for chain in chains],
        "text": [Cell(chain["text"]) for chain in chains],
    }
    return grid_of(columns, without)


TIMES = (
    TitledTable("Chains behind products", products_table, LEFT),
    TitledTable("Without a chain behind a product", others_table, LEFT),
)
CHAINS = TitledTable("The chains: z is the product, a, b, c are the operands", chains_table, LEFT)


def explanations(results: dict[str, Any]) -> list[str]:
    """What the figures are."""
    lines = [
        "The device's time, from a cold cache: medians in microseconds, contenders interleaved in random order within "
        "a case. Every result was compared with fp64 before, cutfuse's a second time over memory filled with NaN.",
        'Products have no bias; fp32 is at "highest" and tf32 at "high". Compiled: the faster of torch.compile and, '
        "where it was run, max-autotune.",
        "specialized: compiled for the chain before it is timed. interpreted: the same call with specialization off.",
        "pointwise alone: `cutfuse.pointwise` of the chain over `[M, N]`, without its reduction. product alone: "
        "`cutfuse.linear` without an epilogue. Operands' bytes are counted at the ceiling of a copy.",
        "Until a chain runs specialized: from its first call in a process that has run another chain interpreted; cold "
        "without any cache of compiled kernels, the second process with the first one's. Medians of processes.",
        "Memory: beyond parameters and input, of a step of pre-norm MLP blocks; kept between the passes with "
        "`recompute` in the layer before gelu.",
    ]
    if results["settings"]["quick"]:
        lines.append("A quick run: the beginning of the draw, without max-autotune.")
    if results["settings"]["small"]:
        lines.append("A run of small sizes, as on a CPU, where torch.compile is left out.")
    return lines


def missing_line(results: dict[str, Any]) -> str:
    """How much of the suite the results hold."""
    small, quick, seed = (results["settings"][name] for name in ("small", "quick", "seed"))
    return f"Cases: {len(results['cases'])} of {len(all_cases(small, quick, seed))}, drawn with seed {seed}."


def warning_lines(results: dict[str, Any]) -> list[str]:
    """What cutfuse warned of, each once with its cases: a chain that is left to the interpreter, say."""
    found: dict[str, list[str]] = {}
    for case in results["cases"]:
        for warned in {entry["warned"] for entry in case["contenders"].values() if "warned" in entry}:
            found.setdefault(warned, []).append(title_of(case))
    return [f"cutfuse warned: {text} ({'; '.join(titles)})." for text, titles in found.items()]


def remarks(results: dict[str, Any]) -> list[str]:
    """What the figures are, the verdicts in total, failures, and what is missing."""
    settings = results["settings"]
    is_part = results["machine"]["device"] == TARGET_DEVICE and (settings["quick"] or settings["small"])
    verdicts = "No verdict: the targets are those of the whole draw." if is_part else verdict_line(results)
    notes = [*note_lines(results["cases"]), *warning_lines(results)]
    return [*explanations(results), verdicts, *notes, missing_line(results), *limit_lines(results)]


def summary(results: dict[str, Any]) -> str:
    """The lines and the remarks as Markdown."""
    lines = [f"**{heading(results)}**", "", *markdown_table(*table(results), LEFT), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(results))])


def markdown(results: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """Every table without the columns of the headings in `without`, and the remarks."""
    tables = (TitledTable(heading(results), table, LEFT), *TIMES, CHAINS)
    return markdown_of(tables, results, remarks(results), without)


def show(results: dict[str, Any]) -> None:
    """Print the tables: with rich where it is installed, and then without the chains, which are long."""
    console = rich_console()
    if console is None:
        print(markdown(results))
        return
    tables = (*TIMES, TitledTable(heading(results), table, LEFT))
    print_tables(console, tables, results, remarks(results), DROPPABLE)


def case_line(case: dict[str, Any]) -> str:
    """A finished case on one line, for the progress."""
    parts = [case["note"]] if case.get("note") else []
    for name, entry in case["contenders"].items():
        if "wait_s" in entry:
            parts.append(f"{name} {value_text({'unit': SECONDS}, entry['wait_s'])}")
        elif "peak_bytes" in entry:
            parts.append(f"{name} {entry['kept_bytes'] / 1e6:.1f} MB kept, peak {entry['peak_bytes'] / 1e6:.1f} MB")
        elif "median_us" in entry:
            parts.append(f"{name} {microseconds(entry['median_us'])} us")
        else:
            parts.append(f"{name} {entry['note']}")
    return "; ".join(parts)
