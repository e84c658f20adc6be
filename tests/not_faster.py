"""What the committed results have that is not faster with cutfuse: the list in docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from bench import chain_suite, model_suite, reference
from bench.chain_suite import LARGE_GFLOP, LINEAR, SIXTEEN_BITS
from bench.goals import MISSED, lines_of
from bench.model_run import CUTFUSE, CUTFUSE_GRAPHS, FASTER, FASTER_GRAPHS, Contender
from bench.model_suite import PASSES
from bench.results import committed, committed_suites
from bench.suite import Figures
from bench.tables import ratio

PRODUCT_MODELS = ("LinearSigmoidSum", "GemmSigmoidScaleResidual")
LONG_K = 4096  # from here on the product is most of the time
LEAST = 1.005  # what a table shows as more than 1.00


def lines() -> str:
    """The list."""
    return "\n".join(f"- {line}" for line in _lines())


def _lines() -> Iterator[str]:
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
        f"{len(cases)} cases take {_range(over_mm)} of the time of `torch.mm` alone ({_mean(over_mm)}), and "
        f"{_range(over_compile)} of torch.compile's ({_mean(over_compile)})."
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
    for figure in (model_suite.GPU, model_suite.WALL):
        count, worst = _slower(cases, partial(model_suite.over, own, rivals, figure), _model_title)
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
    mean = statistics.geometric_mean([value for value in values if value is not None])
    return f"{ratio(mean)} in the geometric mean"
