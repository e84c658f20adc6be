"""Every suite that is a list of cases, by the name that the command line gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.cases import Case, linear_cases, pointwise_cases, reduce_cases, reference_cases
from bench.fp32_cases import fp32_cases

SUITES: dict[str, Callable[[bool, bool], Iterator[Case]]] = {
    "reference": reference_cases,
    "linear": linear_cases,
    "reduce": reduce_cases,
    "pointwise": pointwise_cases,
    "fp32": fp32_cases,
}


def select(suite: str, *, small: bool, quick: bool, filters: list[str]) -> list[Case]:
    """The cases of `suite` whose title holds every one of `filters`, case ignored."""
    cases = SUITES[suite](small, quick)
    return [case for case in cases if all(text.lower() in case.title.lower() for text in filters)]
