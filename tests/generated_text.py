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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# `bench` is no part of the distribution; at the end, an installed cutfuse wins over the sources, which have no module.
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT), str(ROOT)]

from bench import accuracy_suite, chain_suite, gains, model_suite, reference  # noqa: E402
from bench import goals as report  # noqa: E402
from bench.chain_suite import LARGE_GFLOP, LINEAR, SIXTEEN_BITS  # noqa: E402
from bench.goals import MISSED, lines_of  # noqa: E402
from bench.model_suite import (  # noqa: E402
    COMPILE,
    CUTFUSE,
    CUTFUSE_GRAPHS,
    FASTER,
    FASTER_GRAPHS,
    GPU,
    PASSES,
    WALL,
    Contender,
    over,
)
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
PRODUCT_MODELS = ("LinearSigmoidSum", "GemmSigmoidScaleResidual")
LONG_K = 4096  # from here on the product is most of the time
LEAST = 1.005  # what a table shows as more than 1.00


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
        columns[title] = [f"{_mean(own)}, {_range(own)}" for own in ratios]
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


def not_faster() -> str:
    """What the committed results have that is not faster with cutfuse."""
    return "\n".join(f"- {line}" for line in _not_faster_lines())


def _not_faster_lines() -> Iterator[str]:
    products = [case for case in committed("chains")["cases"] if _is_sixteen_bit_product(case)]
    yield _reference_line(committed("reference"))
    yield _chains_line(products)
    yield _long_k_line(products)
    yield _host_line(committed("host"))
    yield _models_line(committed("models"), CUTFUSE, FASTER)
    yield _models_line(committed("models"), CUTFUSE_GRAPHS, FASTER_GRAPHS)
    missed = {suite: _missed(committed(suite)) for suite in committed_suites()}
    listed = ", ".join(f"{count} of {suite}" for suite, count in missed.items() if count)
    yield f'Targets that are "missed" in the tables above: {listed or "none"}.'


def _reference_line(results: Figures) -> str:
    """How long the 16-bit layers of the reference suite take over torch.compile."""
    cases = [case for case in results["cases"] if case["group"] in PRODUCT_MODELS]
    found = [reference.over_compiled(case) for case in cases if case["precision"] in SIXTEEN_BITS]
    names = " and ".join(f"`{name}`" for name in PRODUCT_MODELS)
    return f"{names} of the reference suite take {_range(found)} of torch.compile's time in 16 bits."


def _is_sixteen_bit_product(case: Figures) -> bool:
    return case["group"] == LINEAR and case["precision"] in SIXTEEN_BITS


def _chains_line(products: Sequence[Figures]) -> str:
    """How many chains behind 16-bit products take longer than the best of torch.compile, and the worst."""
    large = [case for case in products if chain_suite.is_large(case)]
    small = [case for case in products if not chain_suite.is_large(case)]
    (of_large, worst), (of_small, worst_small) = (
        _slower(cases, chain_suite.over_fastest, _chain_title) for cases in (large, small)
    )
    return (
        f"Chains behind 16-bit products take longer than the best of torch.compile in {of_large} cases of "
        f"{LARGE_GFLOP:.0f} GFLOP and more ({worst}), and in {of_small} smaller ones ({worst_small})."
    )


def _long_k_line(products: Sequence[Figures]) -> str:
    """What layers take whose product is most of the time."""
    cases = [case for case in products if chain_suite.sizes_of(case)[2] >= LONG_K]
    over_mm = list(map(chain_suite.over_mm, cases))
    over_compile = list(map(chain_suite.over_fastest, cases))
    return (
        f"Where K of such a product is {LONG_K} or more, the product is most of the time, and there is less to gain: "
        f"{len(cases)} cases take {_range(over_mm)} of the time of `torch.mm` alone ({_mean(over_mm)} in the geometric "
        f"mean), and {_range(over_compile)} of torch.compile's ({_mean(over_compile)} in the geometric mean)."
    )


def _host_line(results: Figures) -> str:
    """The lines of the host suite that are above 1."""
    listed = [
        f"{line.goal.what} at {line.where}: {ratio(line.value)} of {line.goal.against}"
        for line in lines_of(results)
        if line.where and line.value is not None and line.value >= LEAST
    ]
    return f"Calls that take longer than PyTorch's at the worst shape of their line: {'; '.join(listed) or 'none'}."


def _models_line(results: Figures, own: Contender, rivals: Sequence[Contender]) -> str:
    """How many whole models take longer than the rival, by the device's time and by the wall clock."""
    cases = [case for case in results["cases"] if case["variant"] in PASSES]
    parts = []
    for figure in (GPU, WALL):
        count, worst = _slower(cases, partial(over, own, rivals, figure), _model_title)
        parts.append(f"in {count} cases by {model_suite.FIGURES[figure]} ({worst})")
    labels = " and ".join(rival.label for rival in rivals)
    return f"Whole models take longer than with the faster of {labels} {', and '.join(parts)}."


def _slower(
    cases: Iterable[Figures], value: Callable[[Figures], float | None], title: Callable[[Figures], str]
) -> tuple[str, str]:
    """How many cases have a ratio above 1, of how many; and the worst."""
    found = [(measured, title(case)) for case in cases if (measured := value(case)) is not None]
    worst, where = max(found)
    return f"{sum(measured >= LEAST for measured, _ in found)} of {len(found)}", f"at worst {ratio(worst)}: {where}"


def _chain_title(case: Figures) -> str:
    return f"{case['variant']}, {case['shape']}, {case['precision']}"


def _model_title(case: Figures) -> str:
    return f"{case['group']}, {case['shape']}, {case['precision']}"


def _missed(results: Figures) -> int:
    """How many of a suite's targets were missed."""
    return sum(line.verdict == MISSED for line in lines_of(results))


def _range(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{ratio(min(found))} to {ratio(max(found))}"


def _mean(values: Iterable[float | None]) -> str:
    return ratio(statistics.geometric_mean([value for value in values if value is not None]))


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
    "not-faster": not_faster,
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
