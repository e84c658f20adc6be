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
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# `bench` is no part of the distribution; at the end, an installed cutfuse wins over the sources, which have no module.
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT), str(ROOT)]

import not_faster  # noqa: E402

from bench import accuracy_suite, gains, reference, report  # noqa: E402
from bench.goals import lines_of  # noqa: E402
from bench.model_run import COMPILE, CUTFUSE, FASTER  # noqa: E402
from bench.model_suite import GPU, PASSES, WALL, over  # noqa: E402
from bench.results import committed, committed_suites  # noqa: E402
from bench.suite import Figures  # noqa: E402
from bench.tables import Table, ratio  # noqa: E402
from bench.workloads import CEILINGS  # noqa: E402
from cutfuse import models, nn  # noqa: E402
from cutfuse.epilogue.errors import refused_functions  # noqa: E402
from cutfuse.epilogue.table import (  # noqa: E402
    describe_compositions,
    describe_op,
    op_table,
)

REGION = re.compile(r"^<!-- generate: ([^\n]+) -->\n(.*?)^<!-- end of generate -->$", re.MULTILINE | re.DOTALL)
NOT_RUN = "source of the package"  # the mark of a block of Python that is not a program


def of_model(model: str) -> str:
    """The reference suite's times of one model."""
    results = committed("reference")
    kept = [case for case in results["cases"] if case["group"] == model]
    columns = dict(reference.times_table({**results, "cases": kept}).columns)
    return Table("", {name: columns[name] for name in columns if name not in ("group", "shape")}).markdown()


def code(text: str) -> str:
    """A cell of code, with entities for what Markdown would take: in backticks it would show the backslash of a bar."""
    entities = {ord(character): f"&#{ord(character)};" for character in "|_*`"}
    return f"<code>{html.escape(text).translate(entities)}</code>" if text else ""


def functions_table() -> str:
    """The rows of the op table."""
    ops = list(map(describe_op, op_table().ops))
    columns = {
        "function": [code(op.spellings) for op in ops],
        "value": [code(op.formula) for op in ops],
        "special values": [op.special for op in ops],
    }
    return Table("", columns).markdown()


def compositions_table() -> str:
    """The functions that are spelt with ops of the table."""
    found = list(describe_compositions())
    columns = {"function": [code(one.spellings) for one in found], "computes": [one.formula for one in found]}
    return Table("", columns).markdown()


def refused_table() -> str:
    """The functions that the language lacks, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refused_functions().items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    names = [", ".join(found) for found in by_reason.values()]
    return Table("", {"why not": list(by_reason), "functions": names}).markdown()


def source(name: str) -> str:
    """The plain model and its drop-in, as they are in the package."""
    drop_in = getattr(nn, name)
    own, forward = map(inspect.getsource, (drop_in, drop_in.forward))
    plain = inspect.getsource(getattr(models, name)).strip()
    plain_block, drop_in_block = (
        f"<!-- {NOT_RUN} -->\n```python\n{code}\n```" for code in (plain, f"{own}\n{forward}".rstrip())
    )
    return f"{plain_block}\n\nThe drop-in, and the `forward` of its base `DropIn`:\n\n{drop_in_block}"


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


def goals(suite: str) -> str:
    """A suite's goals with their verdicts."""
    return report.lines_table(committed(suite), is_short=True).markdown()


def remarks(suite: str) -> str:
    """What a suite's figures are, and its verdicts in total."""
    return "\n".join(f"- {line}" for line in report.remarks(committed(suite)))


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
    return f"Of the {len(times)} times, {len(under)} are under the floor, by at most {1 - min(under):.1%}."


def machine() -> str:
    """Where, when and of which commit the results of the pages are."""
    return "\n".join(f"- {report.heading(committed(suite))}" for suite in committed_suites())


def model_means() -> str:
    """What whole models take of the faster of eager and torch.compile: a row for each kind of cases."""
    kinds: dict[str, list[Figures]] = {}
    for case in committed("models")["cases"]:
        if case["variant"] in PASSES:
            kinds.setdefault(f"{case['variant']} in {case['precision']}, {case['load']} batch", []).append(case)
    columns: dict[str, list[str]] = {"cases": list(kinds), "count": [str(len(own)) for own in kinds.values()]}
    for name, title in ((GPU, "GPU time: mean, least to worst"), (WALL, "wall time")):
        ratios = [[over(CUTFUSE, FASTER, name, case) for case in own] for own in kinds.values()]
        found = [[value for value in own if value is not None] for own in ratios]
        columns[title] = [
            f"{ratio(statistics.geometric_mean(own))}, {ratio(min(own))} to {ratio(max(own))}" for own in found
        ]
    return Table("", columns).markdown()


def compiled_lines() -> str:
    """What compiled layers and blocks take of torch.compile's time, by the host suite."""
    found = [line for line in lines_of(committed("host")) if line.goal.against == COMPILE.label]
    return "\n".join(f"- {line.goal.what}: {ratio(line.value)} of torch.compile's time, on an H200." for line in found)


def ceilings() -> str:
    """The measured rates that the floor is made of."""
    (found,) = CEILINGS
    rates = {
        "memory, read and written by a copy": f"{found.copy / 1e12:.2f} TB/s",
        "memory, read only": f"{found.read / 1e12:.2f} TB/s",
        **{f"products, {precision}": f"{rate / 1e12:.0f} TFLOP/s" for precision, rate in found.product.items()},
    }
    return Table("", {"of": list(rates), "rate": list(rates.values())}).markdown()


GENERATORS: dict[str, Callable[..., str]] = {
    "goals": goals,
    "gains": gains.table,
    "models-means": model_means,
    "compiled-lines": compiled_lines,
    "readme-plot": partial(plot, folder="docs/images"),
    "remarks": remarks,
    "reference": of_model,
    "trade-off": lambda: accuracy_suite.trade_off_table(committed("fp32")).markdown(),
    "accuracy": lambda: accuracy_suite.distributions_table(committed("accuracy")).markdown(),
    "functions": functions_table,
    "compositions": compositions_table,
    "refused": refused_table,
    "source": source,
    "plot": plot,
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
