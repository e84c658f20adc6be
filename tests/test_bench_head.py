"""The head suite: its reference, contenders that run out of memory, and its goals, tables and plot of given figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_runs import CPU, measured, results_of
from torch import Tensor

from bench import head_suite as suite
from bench.goals import MEAN, MET, MISSED, lines_of, tables_of
from bench.head_suite import FORWARD, HEADS, LARGE, LIGER, LOSSES, TRAINING, Head, head_cases
from bench.launches import COMPILE, EAGER, FUSED
from bench.suite import Case, Figures

pytestmark = pytest.mark.usefixtures("one_thread")


def small_case(name: str, variant: str) -> Case:
    (case,) = (case for case in head_cases(True, False, 0) if (case.group, case.variant) == (name, variant))
    return case


def test_the_reference_is_the_loss_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head("", 30, 8, softcap=5.0)
    x, weight, target = head.tensors(40, "fp32", CPU)
    assert (target == suite.IGNORED).sum() == 2
    monkeypatch.setattr(suite, "CHUNK_ELEMENTS", 7 * 30)
    found = head.exact(*(tensor.requires_grad_() for tensor in (x, weight)), target)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight)]
    loss = head.loss(*wide, target)
    torch.testing.assert_close(found, (loss.detach(), *torch.autograd.grad(loss, wide)))


@pytest.mark.parametrize("later", [False, True])
def test_a_contender_without_memory_leaves_the_others(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or when it is timed and the others hold memory too."""
    calls: list[None] = []

    def build(head: Head) -> suite.Loss:
        def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            calls.append(None)
            if not later or len(calls) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB.")
            return head.loss(x, weight, target)

        return loss

    monkeypatch.setitem(LOSSES, EAGER, build)
    entries = measured(small_case("plain", TRAINING), EAGER, FUSED)["contenders"]
    assert entries[EAGER]["note"] == "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 16 GiB."
    assert "median_us" not in entries[EAGER]
    assert entries[FUSED]["median_us"] > 0


def test_a_package_that_is_missing_is_noted() -> None:
    entry = measured(small_case("plain", FORWARD), LIGER)["contenders"][LIGER]
    assert entry["note"].startswith("failed: ModuleNotFound")


def figures(case: Case, **microseconds: float) -> Figures:
    names = {"eager": EAGER, "compiled": COMPILE, "fused": FUSED, "large": LARGE}
    memory = {EAGER: 9e9, COMPILE: 4e9, FUSED: 0.9e9, LARGE: 2e9}
    entries = {
        names[name]: {"median_us": value, "peak_bytes": memory[names[name]], "extra_bytes": 0.3e9, "error": 1e-5}
        for name, value in microseconds.items()
    }
    return {**case.as_dict(), "contenders": entries}


def of_all() -> dict[str, Any]:
    cases = [case for case in head_cases(False, False, 0) if case.group == HEADS[0].name]
    times = {FORWARD: (30e3, 15e3, 11e3, 11.2e3), TRAINING: (150e3, 50e3, 45e3, 38e3)}
    names = ("eager", "compiled", "fused", "large")
    return results_of("head", [figures(case, **dict(zip(names, times[case.variant], strict=True))) for case in cases])


def test_the_goals() -> None:
    lines = {(line.goal.what, line.goal.measure): line for line in lines_of(of_all()) if line.cells}
    own = "Llama 3, 8192 tokens"
    assert [lines[f"{own}, {what}", "worst"].value for what in ("forward", "step", "step, logits kept")] == [
        11.0,
        45.0,
        38.0,
    ]
    assert [lines[f"{own}, {what}", "worst"].verdict for what in ("forward", "step", "step, logits kept")] == [
        *(MET, MET),
        MISSED,
    ]
    assert lines[f"{own}, step, extra memory", "worst"].value == 0.3
    assert lines["every case", MEAN].value == pytest.approx((11 / 15 * 38 / 50) ** 0.5)
    step = lines["steps of 8192 tokens", "worst"]
    assert (step.value, step.expected) == (38 / 50, len(HEADS))
    assert lines["steps of 8192 tokens, peak memory", "worst"].value == 0.225


def test_tables_and_plot_have_every_case() -> None:
    results = of_all()
    tables = {table.title: table for table in tables_of(results)}
    assert tables["Peak of memory in GB, with the gradients"].columns["torch.compile"] == ["4"] * 8
    assert set(tables["Times in microseconds"].columns["cutfuse / fastest other"]) == {"0.73", "0.76"}
    pytest.importorskip("matplotlib")
    from bench.plots import head, head_points

    points = head_points(results, HEADS[0].name, "median_us", 1e3)["cutfuse"]
    assert sorted(points) == [(tokens, 45.0) for tokens in (1024, 2048, 8192, 16384)]
    figure = head(results)
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes[-2:]] == ["ms", "GB"]
