"""What is printed of a case when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.format import error, microseconds

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
        parts.append(f"{name} {shown}")
    if figures.get("note"):
        parts.append(figures["note"])
    return f"{', '.join(parts)} ({figures['seconds']:.1f} s)"
