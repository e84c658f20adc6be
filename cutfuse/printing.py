"""Printing to a pipe whose reader may leave early, as `head` does, and what an output can show."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def bar_characters(encoding: str | None) -> str:
    """Blocks where the output can show them."""
    try:
        "█░".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#."
    return "█░"


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines. Exits with 1 and no traceback if nothing reads standard output any more."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it exits: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
