"""Verdicts: a goal is met up to its limit and missed beyond, of whole lines on the target device only."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench_runs import results_of

from bench import SUITES, accuracy_suite, chain_suite, fp32_suite, gains, goals, model_suite, results
from bench.goals import (
    INCOMPLETE,
    MEAN,
    MET,
    MISSED,
    NOT_MEASURED,
    TARGET_DEVICE,
    WORST,
    judged,
    lines_of,
    share_of_error,
)
from bench.launches import FUSED, KEPT, SPECIALIZED
from bench.suite import Figures, Goal, suite_of

COMMITTED = sorted((Path(__file__).resolve().parents[1] / "bench" / "results").glob("*.json"))


def case(value: float, shape: str = "1x1", group: str = "a group", **contenders: Any) -> Figures:
    """A case with a value, or with contenders' medians."""
    entries = {name.replace("_", "-"): {"median_us": us} for name, us in contenders.items()}
    key = {"group": group, "variant": "", "shape": shape, "precision": "bf16"}
    return {**key, "value": value, "contenders": entries}


def goal(limit: float | None, measure: str = WORST, **more: Any) -> Goal:
    """A goal on the values of a group."""
    return Goal(
        "what", "other", lambda own: own["group"] == "a group", lambda own: own["value"], limit, measure, **more
    )


@pytest.mark.parametrize(
    ("own", "values", "verdict"),
    [
        (goal(0.9), [0.5, 0.9], MET),
        (goal(0.9), [0.5, 0.901], MISSED),
        (goal(0.9, is_least=True), [0.9, 2.0], MET),
        (goal(0.9, is_least=True), [0.899, 2.0], MISSED),
        (goal(0.9, MEAN), [0.45, 1.8], MET),
        (goal(0.9, MEAN), [0.45, 1.81], MISSED),
        (goal(0.0), [0.0, 0.0], MET),
        (goal(0.0), [0.0, 1e-30], MISSED),
        (goal(2.0), [math.inf, 1.0], MISSED),
        (goal(None), [5.0, 1.0], None),
    ],
)
def test_a_goal_is_met_up_to_its_limit(own: Goal, values: list[float], verdict: str | None) -> None:
    assert judged(own, [*map(case, values), case(9.0, group="another")], 2, True).verdict == verdict
    assert judged(own, list(map(case, values)), 2, False).verdict is None


def test_the_worst_case_is_that_furthest_beyond_its_own_limit() -> None:
    """A lower one that is allowed more does not hide it."""
    own = goal(1.0, is_least=True, allowed=lambda found: 0.98 if found["shape"] == "noise" else 1.0)
    line = judged(own, [case(0.985, "noise"), case(0.99, "1x2")], 2, True)
    assert (line.verdict, line.value, line.where) == (MISSED, 0.99, "1x2, bf16")
    assert judged(own, [case(0.985, "noise")], 1, True).verdict == MET


def test_a_line_of_which_cases_are_missing_is_incomplete() -> None:
    line = judged(goal(1.0), [case(0.5)], 2, True)
    assert (line.verdict, line.value, line.counted) == (INCOMPLETE, 0.5, "worst of 1 of 2")
    assert judged(goal(1.0), [], 2, True).verdict == NOT_MEASURED
    assert judged(goal(1.0, MEAN), [case(0.5), case(0.5)], 2, True).counted == "mean of 2"


@pytest.mark.parametrize("suite", SUITES)
def test_there_are_verdicts_on_whole_runs_on_the_target_device_only(suite: str) -> None:
    def verdicts(device: str = TARGET_DEVICE, **settings: Any) -> set[str | None]:
        return {
            line.verdict for line in lines_of(results_of(suite, [], device, **settings)) if line.goal.limit is not None
        }

    assert verdicts() == {NOT_MEASURED}
    assert verdicts("some other card") == verdicts(small=True) == {None}
    assert verdicts(quick=True) == ({NOT_MEASURED} if suite_of(suite).judges_quick else {None})


@pytest.mark.parametrize("suite", results.committed_suites())
def test_every_goal_has_cases_and_is_measured_by_the_committed_results(suite: str) -> None:
    found = results.committed(suite)
    lines = lines_of(found)
    assert all(line.expected == len(line.cells) > 0 for line in lines)
    assert all((line.verdict in (MET, MISSED)) == (line.goal.limit is not None) for line in lines)
    counts = Counter(line.verdict for line in lines if line.verdict)
    assert f"{counts[MET]} met, {counts[MISSED]} missed, 0 incomplete, 0 not measured." in goals.verdict_line(found)
    table = goals.lines_table(found)
    assert list(table.columns)[2] == "ratio"
    assert all(own.rows for own in goals.tables_of(found)[1:])  # summaries are without empty fields
    assert sum(text.startswith("missed (") for text in table.columns["target"]) == counts[MISSED]


def test_ratios_are_of_what_was_measured() -> None:
    """Those of the committed results are in docs/performance.md, which test_docs.py compares."""
    own = case(0, max_autotune=180, mm=160, specialized=90)
    assert chain_suite.over_fastest(own) == 0.5
    assert chain_suite.over_product_and_operands("mm", {**own, "floor_us": None}) is None
    assert chain_suite.over_product_or_chain(own) is None
    own["contenders"][SPECIALIZED] = {"note": "wrong"}
    assert chain_suite.over_fastest(own) is None


def test_cutfuses_error_may_be_eagers_and_one_rounding() -> None:
    own = case(0, eager=1, cutfuse=1)
    own["contenders"]["eager"]["error"] = 1e-3
    for error, is_met in ((0.9e-3 + 2**-8, True), (1.1e-3 + 2**-8, False)):
        own["contenders"]["cutfuse"]["error"] = error
        assert ((share_of_error(own, "cutfuse", "eager") or 0) <= 1) is is_met


def test_cublas_may_be_noise_only_where_cutfuse_ran_it() -> None:
    own = case(0, group=fp32_suite.PRODUCT, mm=98.5, cutfuse=100.0, cutfuse_kept=20.0)
    assert (fp32_suite.speed_up(FUSED, own), fp32_suite.speed_up(KEPT, own)) == (0.985, 4.925)
    worst = next(found for found in fp32_suite.GOALS if found.covers(own) and found.measure == WORST)
    assert judged(worst, [own], 1, True).verdict == MISSED
    for path in ("unfused: cuBLAS: torch.mm", "composed: torch.nn.functional.linear"):
        own["contenders"][FUSED]["path"] = path
        assert judged(worst, [own], 1, True).verdict == MET
    assert not fp32_suite.ran_cublas(KEPT, own)


def test_a_compilation_may_take_a_second_more_or_a_tenth() -> None:
    (own,) = (found for found in model_suite.GOALS if found.what == "compile time")

    def verdict(compile_s: float, cutfuse_s: float) -> str | None:
        entries = {"compile": {"cold_s": compile_s}, "cutfuse": {"cold_s": cutfuse_s}}
        about = {**case(0), "variant": "compilation", "load": "small", "contenders": entries}
        return judged(own, [about], 1, True).verdict

    assert [verdict(2.0, 2.99), verdict(2.0, 3.01), verdict(40.0, 43.9), verdict(40.0, 44.1)] == [MET, MISSED] * 2


def accuracy_case(ratios: list[float | None], integers: float | None = None) -> Figures:
    """A product's case with these ratios, and "guarded" with an error on integers."""
    variant = "normal" if integers is None else "integers below 2^11"
    own = {"group": "product", "variant": variant, "shape": "1024x2048x64", "precision": "fp32"}
    entries = {} if integers is None else {accuracy_suite.GUARDED: {"largest": integers}}
    return {**own, "ratios": dict(zip(accuracy_suite.MEASURES, ratios, strict=True)), "contenders": entries}


def test_the_contract_is_judged_over_all_measures() -> None:
    def verdicts(*cases: Figures) -> list[str | None]:
        return [judged(own, cases, 1, True).verdict for own in accuracy_suite.goals_of("product")]

    assert verdicts(accuracy_case([0.4, 0.5, 2.05]))[:2] == [MET, MET]
    assert verdicts(accuracy_case([0.4, 0.5, 2.11]))[:2] == [MET, MISSED]
    assert verdicts(accuracy_case([0.81, 0.8, 0.8]))[:2] == [MISSED, MET]
    assert verdicts(accuracy_case([0.5, 0.5, None]))[:2] == [MISSED, MISSED]  # JSON's infinity
    assert verdicts(accuracy_case([1, 1, 1], integers=0.0))[2] == MET
    assert verdicts(accuracy_case([1, 1, 1], integers=1e-12))[2] == MISSED
    assert accuracy_suite.mean_ratio(accuracy_case([0.0, 1.0, 1.0])) == pytest.approx(
        accuracy_suite.LEAST_RATIO ** (1 / 3)
    )


def test_the_table_says_what_gains_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [gains.Gain("a", [0.5, 2.0]), gains.Gain("b", [2.0, 8.0]), gains.Gain("c", [0.5, 0.5])]
    monkeypatch.setattr(gains, "gains", lambda: kinds)
    assert gains.table().splitlines()[2:5] == [
        "| b | **4.00** | 2.00 to 8.00 | faster |",
        "| a | **1.00** | 0.50 to 2.00 | nothing gained |",
        "| c | **0.50** | 0.50 to 0.50 | slower |",
    ]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_what_is_committed_is_small(path: Path) -> None:
    assert path.stat().st_size <= results.LARGEST_BYTES


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    own = results_of("reference", [case(0, "x" * results.LARGEST_BYTES)])
    with pytest.raises(ValueError, match="at most 50000 are committed"):
        results.summarise(own, tmp_path / "reference.json")
    assert not list(tmp_path.iterdir())


def test_a_summary_has_what_was_fused_in_a_file_of_its_own(tmp_path: Path) -> None:
    product = {"module": "fc", "m": 8, "n": 64, "k": 16, "dtype": "bfloat16", "fused": False, "program": ""}
    rows = [{**product, "ended_at": "softmax", "reason": "not in the language", "count": 12}]
    own = results_of("models", [{**case(0), "variant": "forward", "load": "small", "products": rows}])
    results.summarise(own, tmp_path / "models.json")
    assert "products" not in (tmp_path / "models.json").read_text()
    summary = results.load(tmp_path / "models.json")
    assert model_suite.fusion_table(summary) == model_suite.fusion_table(own)
    assert summary["fusion"][0]["layers"] == ["12 x fc 64x16"]


def test_failures_warnings_and_what_was_left_out_are_told() -> None:
    first, second = case(0, "1x2", specialized=1.0), case(0, "1x3")
    first["contenders"][SPECIALIZED] = {"note": "wrong: relative error 5.0e-01 against fp64", "warned": "old driver"}
    second["note"] = "failed: OutOfMemoryError: of 3 GB"
    own = {**results_of("host", [first, second], "some other card"), "left_out": ["a case", "another"]}
    lines = goals.remarks(own)
    assert "specialized wrong: relative error 5.0e-01 against fp64 (a group 1x2 bf16)." in lines
    assert "cutfuse warned: old driver (a group 1x2 bf16)." in lines
    assert "failed: OutOfMemoryError: of 3 GB (a group 1x3 bf16)." in lines
    assert "Cases left out by the time limit: a case; another." in lines


@pytest.mark.parametrize("suite", results.committed_suites())
def test_plots_are_of_the_committed_results_and_none_of_nothing(suite: str) -> None:
    pytest.importorskip("matplotlib")
    from bench import plots

    found = results.committed(suite)
    for name in suite_of(suite).plots:
        svg = plots.render(plots.PLOTS[name], found, plots.INKS["dark"])
        assert goals.heading(found) in svg  # digits of its versions too, which are no coordinates
        assert plots.INKS["dark"] in svg
        assert plots.PLOTS[name]({**found, "cases": []}) is None


def test_a_plot_is_of_each_committed_suite_and_of_the_readme() -> None:
    plots = pytest.importorskip("bench.plots")
    assert {suite for _, suite in plots.documented()} <= set(results.committed_suites())
    assert {name for name, _ in plots.documented()} >= {"gains", "reference"}
    assert goals.heading(results.committed("models")) in plots.render(plots.gains, {}, plots.INKS["light"])


def test_the_panel_of_goals_has_a_bar_a_mark_and_dots_for_each() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from bench import plots

    axes = Figure().subplots()
    lines = [judged(goal(0.9), [case(0.5), case(0.95)], 2, True), judged(goal(None, MEAN), [case(0.5)], 1, True)]
    plots.draw_bars(axes, list(map(plots.bar_of, lines)), "a title")
    assert [patch.get_width() for patch in axes.patches] == [0.95, 0.5]
    assert [text.get_text() for text in axes.texts] == ["0.95, missed", "0.50"]
    assert [list(mark.get_xdata()) for mark in axes.lines if mark.get_linewidth() == 1.6] == [[0.9, 0.9]]
    assert [len(mark.get_xdata()) for mark in axes.lines if mark.get_marker() == "."] == [2, 1]


def test_a_heat_map_labels_every_cell_and_hatches_those_of_cublas() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from bench import plots

    axes = Figure().subplots()
    plots.draw_grid(axes, {(1, "2x2"): (5.0, False), (1, "4x2"): (1.25, True)}, "a title")
    assert Counter(text.get_text() for text in axes.texts) == {"5.00": 1, "1.25": 1}
    assert [patch.get_hatch() for patch in axes.patches] == [None, "////"]
    slow, equal, fast = (plots.SPEED_UPS(plots.SCALE(value)) for value in (0.5, 1.0, 2.0))
    assert slow[2] > slow[0]
    assert equal[:3] == pytest.approx((1, 1, 1), abs=0.02)
    assert fast[0] > fast[2]
