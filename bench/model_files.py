"""Results files of the models suite that are continued, or merged from the runs of several shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.model_cases import key_of, title_of
from bench.report import has_failed

SUITE = "models"
# What has to be the same of two runs whose cases are put side by side.
MACHINE = ("device", "commit", "cutfuse", "cutfuse_kernels", "torch", "cuda", "triton")
SETTINGS = ("quick", "seed", "contenders", "seconds_per_case", "rounds", "timm", "transformers")


def difference(results: dict[str, Any], other: dict[str, Any]) -> str:
    """Why two runs are not to be put together; empty where they are alike."""
    if results["suite"] != SUITE or other["suite"] != SUITE:
        return f"the suites are {results['suite']} and {other['suite']}, and only runs of {SUITE} go together"
    for part, names in (("machine", MACHINE), ("settings", SETTINGS)):
        for name in names:
            one, two = results[part].get(name), other[part].get(name)
            if one != two:
                return f"{name} is {one} in one and {two} in the other"
    commit = results["machine"]["commit"]
    if commit is None or " " in commit:
        return f"the commit is {commit or 'unknown'}, so that the code may differ"
    return ""


def finished_cases(results: dict[str, Any], earlier: dict[str, Any], retry: bool) -> list[dict[str, Any]]:
    """The cases of an earlier run that need not be run again; with `retry`, without those that failed.

    Raises ValueError where that run was of something else.
    """
    reason = difference(earlier, results)
    if reason:
        raise ValueError(reason)
    return [case for case in earlier["cases"] if not (retry and has_failed(case))]


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All cases of several runs; one that several runs have is taken from the first in which it did not fail.

    Raises ValueError where the runs differ in more than their cases.
    """
    first = runs[0]
    for other in runs[1:]:
        reason = difference(first, other)
        if reason:
            raise ValueError(reason)
    cases: dict[tuple[str, ...], dict[str, Any]] = {}
    for case in (case for run in runs for case in run["cases"]):
        known = cases.get(key_of(case))
        if known is None or (has_failed(known) and not has_failed(case)):
            cases[key_of(case)] = case
    left_out = dict.fromkeys(title for run in runs for title in run["left_out"])
    measured = {title_of(case) for case in cases.values()}
    return {
        **first,
        "cases": list(cases.values()),
        "left_out": [title for title in left_out if title not in measured],
        "seconds": sum(run.get("seconds", 0.0) for run in runs),
    }
