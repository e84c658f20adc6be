"""Figures of the models suite as a run would give them, for the tests of its verdicts, tables and plot."""

from __future__ import annotations

from typing import Any

import torch

from bench import machine, model_suite, report
from bench.cases import TARGET_DEVICE
from bench.model_cases import COMPILATION, ERRORS, Case, all_cases
from bench.model_contenders import CONTENDERS, CUTFUSE, CUTFUSE_GRAPHS

Figures = dict[str, Any]
COMMIT = "0123456789abcdef" * 2 + "01234567"
# cutfuse's figure over the other's, unless a test says otherwise: less than every target.
RATIO = 0.4
OURS = (CUTFUSE.name, CUTFUSE_GRAPHS.name)
PRODUCTS = [
    {
        "module": "blocks.*.mlp.fc1",
        "m": 197,
        "n": 3072,
        "k": 768,
        "dtype": "bfloat16",
        "fused": True,
        "program": "gelu(z)",
        "ended_at": "linear",
        "reason": "a product begins",
        "count": 12,
    },
    {
        "module": "blocks.*.attn.qkv",
        "m": 197,
        "n": 2304,
        "k": 768,
        "dtype": "bfloat16",
        "fused": False,
        "program": "",
        "ended_at": "reshape",
        "reason": "nothing follows the product",
        "count": 12,
    },
]


def entry_of(case: Case, name: str, ratio: float) -> Figures:
    """A contender's figures: PyTorch's, or cutfuse's at `ratio` times as much."""
    share = ratio if name in OURS else 1.0
    if case.kind == COMPILATION:
        return {"graphs": 2, "cold_s": 20.0 * share}
    if case.kind == ERRORS:
        gradients = {} if case.model.batches.training is None else {"gradient_error": 4e-3 * share}
        return {"error": 2e-3 * share, **gradients}
    times = {"gpu_us": 5000.0 * share, "wall_us": 5200.0 * share}
    return {**times, "gpu_range_us": [4900.0, 5100.0], "wall_range_us": [5100.0, 5300.0]}


def names_of(case: Case) -> list[str]:
    """Whose figures a case has."""
    if case.kind == COMPILATION:
        return ["compile", "cutfuse"]
    return ["eager", "compile", "cutfuse"] if case.kind == ERRORS else list(CONTENDERS)


def figures_of(case: Case, ratio: float = RATIO) -> Figures:
    """A case's figures."""
    contenders = {name: entry_of(case, name, ratio) for name in names_of(case)}
    figures: Figures = {**case.as_dict(), "contenders": contenders, "seconds": 2.0}
    if case.kind not in (COMPILATION, ERRORS):
        figures.update(products=[dict(row) for row in PRODUCTS], fused="12 of 24", rounds=20)
    return figures


def full_cases(is_small: bool = False) -> list[Figures]:
    """Every case of the suite, of the whole models or of the small ones."""
    return [figures_of(case) for case in all_cases(is_small)]


def results_of(cases: list[Figures], device: str = TARGET_DEVICE, quick: bool = False) -> Figures:
    """A results file's content."""
    settings = model_suite.settings(quick, tuple(CONTENDERS.values()), model_suite.effort_of(quick, None), 0)
    results: Figures = {
        "schema": report.SCHEMA,
        "suite": "models",
        "machine": {**machine.facts(torch.device("cpu"), COMMIT), "device": device},
        "settings": {**settings, "timm": "1.0.31", "transformers": "5.23.0"},
        "lines": [],
        "cases": cases,
        "fusion": [],
        "left_out": [],
        "seconds": 100.0,
    }
    model_suite.complete(results)
    return results
