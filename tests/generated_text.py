"""The text in the documentation's pages that is generated: tables of the benchmarks' results, the op table, sources.

A page has it between `<!-- generate: reference -->` and `<!-- end of generate -->`, each on a line of its own.
`python tests/documents.py` writes it anew, and `tests/test_docs.py` compares.
"""

from __future__ import annotations

import html
import inspect
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# `bench` is no part of the distribution; at the end, an installed cutfuse wins over the sources, which have no module.
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT), str(ROOT)]

import not_faster  # noqa: E402

from bench import accuracy_report, chain_report, fp32_report, gains, host_report, model_report, report  # noqa: E402
from bench.format import ratio  # noqa: E402
from bench.host_cases import WHOLE  # noqa: E402
from bench.model_cases import PASSES, all_cases, key_of  # noqa: E402
from bench.model_contenders import COMPILE, CUTFUSE, CUTFUSE_GRAPHS, FASTER  # noqa: E402
from bench.model_suite import GPU, WALL, ratio_of  # noqa: E402
from bench.report import committed  # noqa: E402
from bench.tables import Cell, Grid, markdown_table  # noqa: E402
from cutfuse import models, nn  # noqa: E402
from cutfuse.epilogue.refused import refused_functions  # noqa: E402
from cutfuse.epilogue.registry import describe_compositions, describe_op  # noqa: E402
from cutfuse.epilogue.table import op_table  # noqa: E402

REGION = re.compile(r"^<!-- generate: ([^\n]+) -->\n(.*?)^<!-- end of generate -->$", re.MULTILINE | re.DOTALL)
NOT_RUN = "source of the package"  # the mark of a block of Python that is not a program
FIRST = ("model", "case", "chain", "precision")  # of a table with ratios: the columns to begin with
RATIOS = ("ratio", "times as fast", "specialized", "share of ceiling", "with CUDA graphs")  # beside those of "a / b"


def ratios_third(grid: Grid) -> Grid:
    """A table whose third column and those behind it are its ratios, which a narrow page has to show."""
    headings, rows = grid
    ratios = [place for place, name in enumerate(headings) if " / " in name or name in RATIOS]
    if not ratios:
        return grid
    others = [place for place in range(len(headings)) if place not in ratios]
    others.sort(key=lambda place: FIRST.index(headings[place]) if headings[place] in FIRST else len(FIRST))
    order = [*others[:2], *ratios, *others[2:]]
    return [headings[place] for place in order], [[row[place] for place in order] for row in rows]


def lines_of(grid: Grid, left: Iterable[str]) -> str:
    """A table in Markdown."""
    return "\n".join(markdown_table(*ratios_third(grid), tuple(left)))


def reference_table(model: str = "") -> str:
    """The reference suite's table; of one model where `model` names it."""
    results = committed("reference")
    kept = [case for case in results["cases"] if model in ("", case["group"])]
    without = ("path", *(("case", "shape") if model else ()))
    return lines_of(report.table({**results, "cases": kept}, without), report.WORDS)


def fp32_grids() -> str:
    """The speed-ups by shape, each with its title."""
    found = fp32_report.grids(committed("fp32"))
    tables = {title: lines_of(grid, fp32_report.LEFT) for title, grid in found.items()}
    parts = [f"{title}, times as fast as cuBLAS in fp32:\n\n{lines}" for title, lines in tables.items()]
    return "\n\n".join([*parts, f"{fp32_report.OWN_CUBLAS}: cutfuse ran cuBLAS itself."])


def code(text: str) -> Cell:
    """A cell of code, with entities for what Markdown would take: in backticks it would show the backslash of a bar."""
    entities = {ord(character): f"&#{ord(character)};" for character in "|_*`"}
    return Cell(f"<code>{html.escape(text).translate(entities)}</code>" if text else "")


def functions_table() -> str:
    """The rows of the op table."""
    described = map(describe_op, op_table().ops)
    rows = [[code(op.spellings), code(op.formula), Cell(op.special)] for op in described]
    return lines_of((["function", "value", "special values"], rows), ("function", "value", "special values"))


def compositions_table() -> str:
    """The functions that are spelt with ops of the table."""
    rows = [[code(one.spellings), Cell(one.formula)] for one in describe_compositions()]
    return lines_of((["function", "computes"], rows), ("function", "computes"))


def refused_table() -> str:
    """The functions that the language lacks, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused_functions().items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    rows = [[Cell(reason), Cell(", ".join(names))] for reason, names in by_reason.items()]
    return lines_of((["why not", "functions"], rows), ("why not", "functions"))


def source(name: str) -> str:
    """The plain model and its drop-in, as they are in the package."""
    drop_in = getattr(nn, name)
    first_line = inspect.getsource(drop_in).splitlines()[0]
    methods = [getattr(drop_in, method) for method in ("forward", "_call") if hasattr(drop_in, method)]
    forward = "\n".join([first_line, *map(inspect.getsource, methods)]).rstrip()  # indented, as ruff formats pages too
    plain = inspect.getsource(getattr(models, name)).strip()
    plain_block, forward_block = (f"<!-- {NOT_RUN} -->\n```python\n{code}\n```" for code in (plain, forward))
    return f"{plain_block}\n\nThe drop-in's `forward`:\n\n{forward_block}"


def plot(name: str, *words: str, folder: str = "images") -> str:
    """A plot of `bench.figures`, for light and dark pages."""
    image = f"{folder}/{name}-{{}}.svg"
    return "\n".join(
        [
            "<picture>",
            f'  <source media="(prefers-color-scheme: dark)" srcset="{image.format("dark")}">',
            f'  <img alt="{" ".join(words)}" src="{image.format("light")}">',
            "</picture>",
        ]
    )


def is_failed(case: dict[str, Any]) -> bool:
    """Whether a contender of a case has a note in the place of figures."""
    return any("note" in entry for entry in case["contenders"].values())


def models_measured() -> str:
    """Which kinds of cases of the models suite were measured, and how many of each."""
    every = Counter((case.kind, case.precision) for case in all_cases(is_small=False))
    cases = [case for case in committed("models")["cases"] if not is_failed(case)]
    measured = Counter((case["variant"], case["precision"]) for case in cases)
    counts = [f"{' in '.join(kind)} ({measured[kind]} of {count})" for kind, count in every.items() if measured[kind]]
    found = {key_of(case) for case in cases}
    missing = [case.title for case in all_cases(is_small=False) if key_of(case.as_dict()) not in found]
    if not any(CUTFUSE_GRAPHS.name in case["contenders"] for case in cases):
        missing.append("CUDA graphs")
    return f"Cases measured: {', '.join(counts)}. Not measured so far: {'; '.join(missing) or 'nothing'}."


def under_floor() -> str:
    """How many times of the reference suite are under the floor, and how far at most."""
    cases = committed("reference")["cases"]
    times = [
        entry["median_us"] / case["floor_us"]
        for case in cases
        for entry in case["contenders"].values()
        if "median_us" in entry and case["floor_us"]
    ]
    under = [time for time in times if time < 1]
    return f"Of the {len(times)} times below, {len(under)} are under the floor, by at most {1 - min(under):.1%}."


def machine() -> str:
    """Where, when and of which commit the results of the pages are."""
    suites = ("reference", "fp32", "accuracy", "chains", "host", "models")
    return "\n".join(f"- {report.heading(committed(suite))}" for suite in suites)


def model_lines() -> str:
    """The lines of the models suite of which a case was measured."""
    results = committed("models")
    measured = [line for line in results["lines"] if line["cases"]]
    return lines_of(model_report.table({**results, "lines": measured}), model_report.LEFT)


def model_means() -> str:
    """What whole models take of the faster of eager and torch.compile: a row for each kind of cases."""
    cases = [case for case in committed("models")["cases"] if case["variant"] in PASSES]
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        kinds.setdefault((f"{case['variant']} in {case['precision']}", f"{case['load']} batch"), []).append(case)
    rows = []
    for (kind, load), own in kinds.items():
        row = [Cell(f"{kind}, {load}"), Cell(str(len(own)))]
        for figure in (GPU, WALL):
            about = {"own": CUTFUSE.name, "rival": FASTER, "figure": figure}
            found = [value for case in own if (value := ratio_of(about, case)) is not None]
            worst = f"{ratio(min(found))} to {ratio(max(found))}"
            row += [Cell(f"{ratio(statistics.geometric_mean(found))}, {worst}")]
        rows.append(row)
    return lines_of((["cases", "count", "GPU time: mean, least to worst", "wall time"], rows), ("cases",))


def compiled_lines() -> str:
    """What compiled layers and blocks take of torch.compile's time, by the host suite."""
    found = [line for line in committed("host")["lines"] if line["rival"] == COMPILE.label]
    return "\n".join(
        f"- {line['group']}, {line['where']}: {ratio(line['ratio'])} of torch.compile's time "
        f"({'host and device' if line['time'] == WHOLE else line['time']}, H200)."
        for line in found
    )


def ceilings() -> str:
    """The measured rates that the floor is made of."""
    found = committed("reference")["ceilings"]
    rows = [[Cell("memory, read and written by a copy"), Cell(f"{found['copy'] / 1e12:.2f} TB/s")]]
    rows.append([Cell("memory, read only"), Cell(f"{found['read'] / 1e12:.2f} TB/s")])
    for precision, rate in found["product"].items():
        rows.append([Cell(f"products, {precision}"), Cell(f"{rate / 1e12:.0f} TFLOP/s")])
    return lines_of((["of", "rate"], rows), ("of",))


GENERATORS: dict[str, Callable[..., str]] = {
    "reference": reference_table,
    "reference-heading": lambda: report.heading(committed("reference")),
    "reference-remarks": lambda: "\n".join(f"- {line}" for line in report.remarks(committed("reference"))),
    "fp32": lambda: lines_of(fp32_report.table(committed("fp32")), fp32_report.LEFT),
    "fp32-remarks": lambda: "\n".join(f"- {line}" for line in fp32_report.remarks(committed("fp32"))),
    "fp32-grids": fp32_grids,
    "chains": lambda: lines_of(chain_report.table(committed("chains")), chain_report.LEFT),
    "chains-remarks": lambda: "\n".join(f"- {line}" for line in chain_report.remarks(committed("chains"))),
    "chains-products": lambda: lines_of(chain_report.products_table(committed("chains")), chain_report.LEFT),
    "chains-others": lambda: lines_of(chain_report.others_table(committed("chains")), chain_report.LEFT),
    "chains-texts": lambda: lines_of(chain_report.chains_table(committed("chains")), chain_report.LEFT),
    "host": lambda: lines_of(host_report.table(committed("host")), host_report.LEFT),
    "host-remarks": lambda: "\n".join(f"- {line}" for line in host_report.remarks(committed("host"))),
    "gains": gains.sentence,
    "models": model_lines,
    "models-means": model_means,
    "compiled-lines": compiled_lines,
    "models-measured": models_measured,
    "models-times": lambda: lines_of(model_report.times_table(committed("models")), model_report.LEFT),
    "models-fusion": lambda: lines_of(model_report.fusion_table(committed("models")), model_report.LEFT_OF_FUSION),
    "models-remarks": lambda: "\n".join(f"- {line}" for line in model_report.remarks(committed("models"))),
    "trade-off": lambda: "\n".join(accuracy_report.trade_off_lines(committed("fp32"))),
    "accuracy": lambda: lines_of(accuracy_report.summary_table(committed("accuracy")), accuracy_report.LEFT),
    "accuracy-verdicts": lambda: "\n".join(
        f"- {line}" for line in accuracy_report.verdict_lines(committed("accuracy"))
    ),
    "functions": functions_table,
    "compositions": compositions_table,
    "refused": refused_table,
    "source": source,
    "plot": plot,
    "readme-plot": partial(plot, folder="docs/images"),
    "not-faster": not_faster.lines,
    "machine": machine,
    "under-floor": under_floor,
    "ceilings": ceilings,
}


def text_of(region: re.Match[str]) -> str:
    """A region with its text written anew; KeyError where nothing has its name."""
    name, *arguments = region[1].split()
    text = GENERATORS[name](*arguments).strip()
    return f"<!-- generate: {region[1]} -->\n\n{text}\n\n<!-- end of generate -->"


def fill(markdown: str) -> str:
    """A page with its generated text written anew."""
    return REGION.sub(text_of, markdown)
