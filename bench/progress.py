"""Progress on the terminal: a bar where rich and a terminal are there, otherwise a line for each case."""

from __future__ import annotations

import sys
from typing import Any

from bench.format import microseconds


class Progress:
    """Lines; the base of the bar. Use as a context manager."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def begin(self, title: str) -> None:
        """A case starts."""
        print(f"[{self.done + 1}/{self.total}] {title}", flush=True)

    def stage(self, text: str) -> None:
        """What is being done to the case."""

    def finish(self, figures: dict[str, Any]) -> None:
        """A case is done."""
        self.done += 1
        print(f"    {summary(figures)}", flush=True)


class BarProgress(Progress):
    """rich's progress bar, with the stage in its description."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self.title = ""
        self.bar = RichProgress(
            MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}")
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.update(self.task, description="")
        self.bar.stop()

    def begin(self, title: str) -> None:
        self.title = title
        self.stage("building")

    def stage(self, text: str) -> None:
        self.bar.update(self.task, description=f"{self.title}: {text}")

    def finish(self, figures: dict[str, Any]) -> None:
        self.done += 1
        self.bar.console.print(f"{self.title}: {summary(figures)}", highlight=False, markup=False)
        self.bar.advance(self.task)


def summary(figures: dict[str, Any]) -> str:
    """One line on a finished case: its `summary` where a suite gives one, or the medians."""
    if "summary" in figures:
        return f"{figures['summary']} ({figures['seconds']:.1f} s)"
    parts = [
        f"{name} {microseconds(entry.get('median_us'))} us" if "median_us" in entry else f"{name} {entry['note']}"
        for name, entry in figures["contenders"].items()
    ]
    if figures.get("note"):
        parts.append(figures["note"])
    return f"{', '.join(parts)} ({figures['seconds']:.1f} s)"


def progress_for(total: int) -> Progress:
    """A bar on a terminal with rich, lines otherwise."""
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return Progress(total)
    return BarProgress(total) if sys.stdout.isatty() else Progress(total)
