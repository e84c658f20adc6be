"""The fp32 suite's cases: its contenders run what they are named for, and their results are checked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_runs import CPU, parts_of
from torch import Tensor

import cutfuse
from bench import fp32_suite as suite
from bench.launches import CONTENDERS, FUSED, KEPT
from bench.workloads import WRONG_ABOVE, Reference, Run, Workload, relative_error
from cutfuse.precision import product_mode


def built(group: str, shape: str = "") -> Workload:
    """The first small case of a group, or with that shape."""
    cases = suite.fp32_suite(True, False, 0)
    return parts_of(next(case for case in cases if case.group == group and shape in case.shape))[0](CPU)


def test_kept_planes_are_those_of_the_same_weight() -> None:
    for workload in (built(suite.RESIDUAL), suite.build_product((4, 8, 8), None, CPU)):
        plain, kept = workload.fused(*workload.arguments), workload.extras[KEPT]().launch()
        assert torch.equal(plain, kept)
        assert relative_error(plain, workload.exact) < WRONG_ABOVE["fp32"]


@pytest.mark.parametrize("group", [suite.ROW_SUM, suite.RESIDUAL, suite.PRODUCT, suite.FORCED_PRODUCT])
def test_only_what_is_named_so_is_prepared(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(cutfuse.PreparedWeight, "check", lambda weight: used.append((weight.mode, product_mode())))
    workload = built(group)
    workload.fused(*workload.arguments)
    assert "prepared" not in workload.explain().call
    assert used == []
    kept = workload.extras[KEPT]()
    kept.launch()
    assert "prepared weight" in kept.explain().call
    mode = suite.FORCED if group == suite.FORCED_PRODUCT else product_mode()
    assert used == [(mode, mode)] * 2


def test_products_run_in_the_suites_mode_and_pytorchs_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def record(x: Tensor, weight: Tensor | cutfuse.PreparedWeight) -> Tensor:
        seen.append(product_mode())
        return x @ (weight.weight if isinstance(weight, cutfuse.PreparedWeight) else weight).t()

    monkeypatch.setattr(cutfuse, "linear", record)
    for workload in (built(suite.TRAINING), built(suite.FORCED_PRODUCT), built(suite.PRODUCT, "8x32x32")):
        workload.eager(*workload.arguments)
        workload.fused(*workload.arguments)
        if KEPT in workload.extras:
            workload.extras[KEPT]().launch()
    mode = product_mode()
    assert seen == [mode, suite.FORCED, suite.FORCED, mode, mode]


def test_a_workloads_own_call_of_a_contender_is_run() -> None:
    reference = Reference(lambda start, stop: torch.ones(stop - start, 2).double(), 2, 2)
    plain = Workload((), lambda: torch.ones(2, 2), lambda: torch.ones(2, 2), reference)
    own = Run(lambda: torch.ones(2, 2), reference)
    assert CONTENDERS[KEPT].run(plain) is None
    for name in (KEPT, FUSED):
        assert CONTENDERS[name].run(replace(plain, extras={name: lambda: own})) is own
