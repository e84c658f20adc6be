"""The fp32 suite: its verdicts can fail, and its contenders run what they are named for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fp32_figures import CUBLAS, FUSED, Figures, changed, full_cases
from torch import Tensor

import cutfuse
from bench import fp32_cases as suite
from bench import fp32_suite, runner
from bench.accuracy import WRONG_ABOVE, relative_error
from bench.cases import TARGET_DEVICE, Case
from bench.contenders import CONTENDERS
from bench.suites import select
from bench.timing import Effort
from bench.workloads import Reference, Workload
from cutfuse.precision import product_mode

CPU = torch.device("cpu")
OTHER_DEVICE = "some other card"


def verdicts(cases: list[Figures], device: str = TARGET_DEVICE) -> dict[tuple[int, str, str], str | None]:
    return {
        (line["line"], line["contender"], line["measure"]): line["verdict"] for line in fp32_suite.judge(cases, device)
    }


def test_the_full_suite_has_every_cell_and_line() -> None:
    cases = list(suite.fp32_cases(small=False, quick=False))
    groups = Counter(case.group for case in cases)
    assert groups.pop(suite.PRODUCT) == 45
    assert groups.pop(suite.SKINNY) == 28
    assert set(groups.values()) == {1}
    assert {"128x1024x8192", "8192x8192x8192"} <= {case.shape for case in cases if case.group == suite.PRODUCT}
    assert {"1x4096x8192", "64x8192x8192"} <= {case.shape for case in cases if case.group == suite.SKINNY}
    assert [case.group for case in cases[:2]] == [suite.RESIDUAL, suite.ROW_SUM]  # while there is time to compile
    for goal in fp32_suite.GOALS:
        for case in cases:
            if case.group == goal.group:
                assert {goal.contender, *goal.rivals} <= set(case.contenders or ())
    assert {name for case in cases for name in case.contenders or ()} <= set(CONTENDERS)


def test_all_lines_are_met_at_five_times_as_fast_on_the_target_device_only() -> None:
    found = verdicts(full_cases())
    assert len(found) == len(fp32_suite.GOALS) == 12
    assert set(found.values()) == {"met"}
    assert set(verdicts(full_cases(), OTHER_DEVICE).values()) == {None}


@pytest.mark.parametrize("goal", [goal for goal in fp32_suite.GOALS if not goal.measure])
def test_a_single_case_is_held_to_its_own_number_against_the_fastest_rival(goal: fp32_suite.Goal) -> None:
    (case,) = [case for case in suite.fp32_cases(small=False, quick=False) if case.group == goal.group]
    key = (goal.line, goal.contender, "")
    slower, enough = (100.0 / (goal.at_least + step) for step in (-0.01, 0.01))
    assert verdicts(changed(goal.group, case.shape, {goal.contender: slower}))[key] == "missed"
    assert verdicts(changed(goal.group, case.shape, {goal.contender: enough}))[key] == "met"
    others = {other: verdict for other, verdict in verdicts(full_cases()).items() if other != key}
    found = verdicts(changed(goal.group, case.shape, {goal.contender: slower}))
    assert {other: found[other] for other in others} == others
    for rival in goal.rivals:
        assert verdicts(changed(goal.group, case.shape, {goal.contender: enough, rival: 99.0}))[key] == "missed"


def test_geometric_mean_of_the_grid() -> None:
    key = (4, suite.PLAIN, fp32_suite.MEAN)

    def times(case: Case) -> tuple[dict[str, float], str]:
        return {suite.PLAIN: 100.0 / (7.0 if case.shape.startswith("128x") else 3.0)}, FUSED

    # 9 cells of 7 and 36 of 3: 3 * (7 / 3) ** 0.2 = 3.55, while their arithmetic mean is 3.8.
    (line,) = [line for line in fp32_suite.judge(full_cases(times), TARGET_DEVICE) if key == line_key(line)]
    assert line["speed_up"] == pytest.approx(3 * (7 / 3) ** 0.2)
    assert (line["verdict"], line["cells"], line["where"]) == ("met", 45, "")
    slower = full_cases(lambda case: ({suite.PLAIN: times(case)[0][suite.PLAIN] * 1.02}, FUSED))
    assert verdicts(slower)[key] == "missed"
    assert verdicts(slower)[4, suite.KEPT, fp32_suite.MEAN] == "met"


def line_key(line: Figures) -> tuple[int, str, str]:
    return line["line"], line["contender"], line["measure"]


@pytest.mark.parametrize(
    ("number", "group", "contender", "shape"),
    [
        (4, suite.PRODUCT, suite.PLAIN, "128x1024x4096"),
        (4, suite.PRODUCT, suite.KEPT, "128x1024x4096"),
        (5, suite.SKINNY, suite.PLAIN, "2x4096x8192"),
    ],
)
def test_the_worst_cell_may_be_noise_only_where_cublas_ran(number: int, group: str, contender: str, shape: str) -> None:
    def worst(speed: float, path: str) -> tuple[str, str]:
        cases = changed(group, shape, {contender: 100.0 / speed}, path)
        (line,) = [
            line
            for line in fp32_suite.judge(cases, TARGET_DEVICE)
            if line_key(line) == (number, contender, fp32_suite.WORST)
        ]
        assert line["speed_up"] == pytest.approx(speed)
        return line["verdict"], line["where"]

    assert worst(1.001, FUSED) == ("met", shape)
    assert worst(0.985, FUSED) == ("missed", shape)
    assert worst(0.985, CUBLAS) == ("met", shape)
    assert worst(0.975, CUBLAS) == ("missed", shape)
    assert worst(0.985, "composed: torch.nn.functional.linear") == ("met", shape)


def test_a_cell_below_its_limit_is_not_hidden_by_a_lower_one_that_is_noise() -> None:
    def times(case: Case) -> tuple[dict[str, float], str]:
        slow = {"1x4096x4096": ({suite.PLAIN: 100 / 0.985}, CUBLAS), "2x4096x4096": ({suite.PLAIN: 100 / 0.99}, FUSED)}
        return slow.get(case.shape, ({}, FUSED))

    (line,) = [line for line in fp32_suite.judge(full_cases(times), TARGET_DEVICE) if line["group"] == suite.SKINNY]
    assert (line["verdict"], line["where"]) == ("missed", "2x4096x4096")


def test_kept_planes_have_a_path_of_their_own() -> None:
    (case,) = [entry for entry in full_cases() if (entry["group"], entry["shape"]) == (suite.PRODUCT, "128x1024x1024")]
    case["path"] = CUBLAS
    assert fp32_suite.ran_cublas(case, suite.PLAIN)
    assert not fp32_suite.ran_cublas(case, suite.KEPT)


def test_what_lacks_a_rival_a_cell_or_a_contender_is_not_measured() -> None:
    whole = full_cases()
    for case in whole:
        case["contenders"].pop("max-autotune", None)
        if case["shape"] == "4x8192x8192":
            case["contenders"][suite.PLAIN] = {"note": "failed: RuntimeError: no memory"}
    partial = [case for case in whole if case["shape"] != "8192x8192x8192"]
    found = verdicts(partial)
    missing = {key for key, verdict in found.items() if verdict == "not measured"}
    assert missing == {key for key in found if key[0] in (1, 2, 3, 4, 5)}
    (first, *_) = fp32_suite.judge(partial, TARGET_DEVICE)
    assert first["speed_up"] == 5.0  # against what was measured
    assert set(verdicts([]).values()) == {"not measured"}


def test_kept_planes_are_those_of_the_same_weight() -> None:
    model = next(case for case in suite.model_cases(small=True, quick=False) if case.group == suite.RESIDUAL)
    for workload in (model.build(CPU), suite.build_product((4, 8, 8), suite.MODE, True, CPU)):
        assert workload.kept is not None
        plain, kept = workload.fused(*workload.arguments), workload.kept.fused(*workload.kept.arguments)
        assert torch.equal(plain, kept)
        assert relative_error(plain, workload.reference) < WRONG_ABOVE["fp32"]
    assert suite.build_product((4, 8, 8), suite.MODE, False, CPU).kept is None


@pytest.mark.parametrize("group", [suite.ROW_SUM, suite.RESIDUAL, suite.PRODUCT, suite.FORCED_PRODUCT])
def test_only_what_is_named_so_is_prepared(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, str]] = []
    monkeypatch.setattr(cutfuse.PreparedWeight, "check", lambda weight: used.append((weight.mode, product_mode())))
    workload = next(case for case in suite.fp32_cases(small=True, quick=False) if case.group == group).build(CPU)
    workload.fused(*workload.arguments)
    assert "prepared" not in workload.explain().call
    assert used == []
    assert workload.kept is not None
    workload.kept.fused(*workload.kept.arguments)
    assert "prepared weight" in workload.kept.explain().call
    mode = suite.FORCED if group == suite.FORCED_PRODUCT else suite.MODE or product_mode()
    assert used == [(mode, mode)] * 2


def test_products_run_in_the_suites_mode_and_pytorchs_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def record(x: Tensor, weight: Tensor | cutfuse.PreparedWeight) -> Tensor:
        seen.append(product_mode())
        return x @ (weight.weight if isinstance(weight, cutfuse.PreparedWeight) else weight).t()

    monkeypatch.setattr(cutfuse, "linear", record)
    for case in suite.fp32_cases(small=True, quick=False):
        if case.group in (suite.FORCED_PRODUCT, suite.TRAINING) or case.shape == "8x32x32":
            workload = case.build(CPU)
            for each in filter(None, (workload, workload.kept)):
                each.eager(*each.arguments)
                each.fused(*each.arguments)
    mode = suite.MODE or product_mode()
    assert seen == [mode, suite.FORCED, suite.FORCED, mode, mode]


def test_the_training_step_is_checked_in_all_its_results() -> None:
    workload = suite.build_training((32, 64, 64), CPU)
    for step in (workload.eager, workload.fused):
        y, dx, dw = step(*workload.arguments)
        assert (y.shape, dx.shape, dw.shape) == ((32, 64), (32, 64), (64, 64))
        assert relative_error(workload.collect((y, dx, dw)), workload.reference) < 1e-6
        for wrong in ((1.01 * y, dx, dw), (y, 1.01 * dx, dw), (y, dx, 1.01 * dw)):
            assert relative_error(workload.collect(wrong), workload.reference) > 10 * WRONG_ABOVE["fp32"]


def test_stacked_reference_is_the_same_in_pieces() -> None:
    torch.manual_seed(0)
    pairs = [(torch.randn(3, 5), torch.randn(7, 5)), (torch.randn(4, 2), torch.randn(7, 2))]
    whole = torch.cat([a.double() @ b.double().t() for a, b in pairs])
    for step in (1, 2, 5, 7):
        pieces = [suite.stacked_rows(pairs, start, min(start + step, 7)) for start in range(0, 7, step)]
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-14, atol=1e-14)


def test_kept_planes_are_run_where_the_case_has_them() -> None:
    calls: list[str] = []

    def workload(name: str, kept: Workload | None = None) -> Workload:
        call = lambda *_: calls.append(name) or torch.ones(2, 2)  # noqa: E731
        reference = Reference(lambda start, stop: torch.ones(stop - start, 2).double(), 2, 2)
        return Workload((torch.ones(2, 2),), call, call, lambda: None, reference, kept=kept)

    contender = CONTENDERS[suite.KEPT]
    assert contender.prepare(workload("plain")) is None
    run = contender.prepare(workload("plain", workload("kept")))
    assert run is not None
    run.launch()
    assert calls == ["kept"]


def test_time_is_held_back_only_for_cases_that_compile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def record(case: Case, options: Any, clock: Any, budget: Any, cases_left: int, progress: Any) -> Figures:
        held.append(cases_left)
        return {"path": None, "reasons": [], "contenders": {}}

    monkeypatch.setattr(runner, "run_case", record)
    cases = select("fp32", small=True, quick=False, filters=[])
    options = runner.Options(CPU, (suite.PLAIN,), Effort(), 100.0)
    runner.run_suite(cases, options, OTHER_DEVICE, runner.Progress(len(cases)), lambda _: None)
    assert held[:3] == [1, 0, 0]  # the models; nothing else has the contenders of the training step
