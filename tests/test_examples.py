"""The scripts of examples/ run as they stand; each checks its own results."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_python

EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.skipif(not EXAMPLES, reason="the examples are only in the source tree")
def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) == 6


def run(path: Path, *options: str) -> None:
    # Threads of small models wait where the machine is busy.
    assert run_python("-W", "error", str(path), *options, folder=path.parent, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    run(path)


@pytest.mark.skipif(not EXAMPLES, reason="the examples are only in the source tree")
def test_a_wider_model_learns_as_well() -> None:
    run(EXAMPLES[0].with_name("train_mlp.py"), "--width", "512", "--rows", "512", "--steps", "15")
