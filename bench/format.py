"""How figures are written: three to four significant digits, and a dash for what was not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MISSING = "-"


def microseconds(value: float | None) -> str:
    """A time in microseconds."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(value_us: float) -> str:
    """A time with its unit, for a plot's label."""
    return f"{value_us / 1000:.2f} ms" if value_us >= 1000 else f"{microseconds(value_us)} µs"


def ratio(value: float | None) -> str:
    """A ratio of two times; small ones need the third digit (1/15 is 0.067, 1/3 is 0.333)."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value >= 0.5 else f"{value:.3f}"


def error(value: float | None) -> str:
    """A relative error."""
    return MISSING if value is None else f"{value:.1e}"


def figure(entry: dict[str, Any] | None, name: str, text: Callable[[Any], str]) -> str:
    """One figure of a contender; a dash where there is none, or that the contender failed, of which notes say more."""
    if entry is None:
        return MISSING
    if name in entry:
        return text(entry[name])
    return entry["note"].split(":")[0] if "note" in entry else MISSING


def one_line(error: BaseException) -> str:
    """An exception as a note in a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def note_on(error: BaseException) -> dict[str, Any]:
    """The figures of a contender that failed, or of a case: one failure must not lose the others' figures."""
    return {"note": f"failed: {one_line(error)}"}


# What is shown of a contender's figures on a line: the first of these that there is.
SHOWN: dict[str, Callable[[Any], str]] = {
    "median_us": lambda value: f"{microseconds(value)} us",
    "gpu_us": lambda value: f"{microseconds(value)} us",
    "error": error,
    "frobenius": error,
    "cold_s": lambda value: f"{value:.1f} s",
    "wait_s": lambda value: f"{value:.3g} s",
    "peak_bytes": lambda value: f"{value / 1e6:.1f} MB",
    "note": str,
}


def summary(figures: dict[str, Any]) -> str:
    """One line on a finished case."""
    parts = []
    for name, entry in figures["contenders"].items():
        shown = next((text(entry[key]) for key, text in SHOWN.items() if key in entry), "")
        host = f" (host {microseconds(entry['host_us'])})" if "host_us" in entry else ""
        parts.append(f"{name} {shown}{host}")
    if figures.get("note"):
        parts.append(figures["note"])
    return f"{', '.join(parts)} ({figures['seconds']:.1f} s)"
