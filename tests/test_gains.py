"""The README's table and chart: whom cutfuse helps, and by how much."""

from __future__ import annotations

from typing import Any

import pytest

from bench import gains
from bench.results import committed


def test_whole_models_are_compared_with_the_faster_of_eager_and_torch_compile() -> None:
    found = {gain.name: gain.times for gain in gains.gains()}
    times: dict[tuple[str, str], list[float]] = {}
    for case in committed("models")["cases"]:
        if (case["variant"], case["precision"]) in gains.NAMES:
            eager, compiled, own = (case["contenders"][name]["gpu_us"] for name in ("eager", "compile", "cutfuse"))
            times.setdefault((case["variant"], case["precision"]), []).append(min(eager, compiled) / own)
    for kind, values in times.items():
        assert found[gains.NAMES[kind]] == pytest.approx(values)


def test_the_table_says_what_gains_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [gains.Gain("a", [0.5, 2.0]), gains.Gain("b", [2.0, 8.0]), gains.Gain("c", [0.5, 0.5])]
    monkeypatch.setattr(gains, "gains", lambda: kinds)
    assert gains.table().splitlines()[2:5] == [
        "| b | **4.00** | 2.00 to 8.00 | faster |",
        "| a | **1.00** | 0.50 to 2.00 | nothing gained |",
        "| c | **0.50** | 0.50 to 0.50 | slower |",
    ]


def test_layers_are_compared_with_the_fastest_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, Any] = {suite: committed(suite) for suite in gains.SUITES}
    before = {gain.name: gain.mean for gain in gains.gains()}
    for case in [case for suite in ("fp32", "chains") for case in results[suite]["cases"]]:
        case["contenders"].get("eager", {}).update(median_us=1e-3)
    monkeypatch.setattr(gains, "committed", results.__getitem__)
    after = {gain.name: gain.mean for gain in gains.gains()}
    assert {name for name in before if after[name] != before[name]} == {"layers in bf16 and fp16"}
