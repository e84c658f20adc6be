"""The loop over a suite's cases: what fits into the time, what failed, and what a case took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from bench.progress import Progress
from bench.runner import one_line

Figures = dict[str, Any]


class AnyCase(Protocol):
    """What the loop has to know of a case."""

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        ...

    def as_dict(self) -> Figures:
        """What its figures begin with."""
        ...


CaseT = TypeVar("CaseT", bound=AnyCase)


def run_cases(
    cases: Sequence[CaseT],
    measure: Callable[[CaseT], Figures],
    fits: Callable[[CaseT], bool],
    after: Callable[[CaseT, float], None],
    progress: Progress,
    on_case: Callable[[Figures], None],
    line_of: Callable[[Figures], str] | None = None,
) -> list[str]:
    """Measure those of `cases` that fit, handing each one's figures to `on_case`; returns the others' titles.

    `after` is told how many seconds a case took, and makes room for the next one. `line_of` says on one line what came
    out of a case.
    """
    left_out = []
    for case in cases:
        if not fits(case):
            left_out.append(case.title)
            continue
        progress.begin(case.title)
        before = time.perf_counter()
        figures = case.as_dict()
        try:
            figures.update(measure(case))
        except Exception as error:  # Out of memory while building, say: later cases may still fit.
            figures.update(contenders={}, note=f"failed: {one_line(error)}")
        figures["seconds"] = time.perf_counter() - before
        on_case(figures)
        progress.finish({**figures, "summary": line_of(figures)} if line_of else figures)
        after(case, figures["seconds"])
    return left_out


def go_on_after(title: str, free: Callable[[], None]) -> None:
    """Make room for the next case; exits where a kernel's fault has cost the process its device."""
    try:
        free()
    except RuntimeError as error:
        raise SystemExit(
            f"the device is lost after {title}: {one_line(error)}. The same command goes on with the next case."
        ) from error
