"""The random suite: what its layers are drawn from, and that both sides of every call give the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bench_runs import CPU, measured, run

from bench import random_suite as suite
from bench.__main__ import main
from bench.goals import MEAN, WORST, lines_of
from bench.host_run import Group
from bench.random_suite import CHAINS, FORWARD, LIMITS, ROW_SUM, TRAINING, Layer, random_cases
from bench.suite import Case, suite_of

pytestmark = pytest.mark.usefixtures("one_thread")


def layer_of(case: Case) -> tuple[Group, Layer]:
    """The group and the layer of a case."""
    group, _, build = case.prepare.args  # type: ignore[attr-defined]
    return group, build.func.__self__


def test_layers_are_of_every_kind_in_each_group() -> None:
    cases = list(random_cases(False, False, 3))
    assert Counter(case.group for case in cases) == {group.name: 60 for group in LIMITS}
    assert Counter(case.precision for case in cases) == {"bf16": 45, "fp16": 45, "fp32": 90}
    for group in LIMITS:
        layers = [layer for own, layer in map(layer_of, cases) if own == group]
        assert set(Counter(layer.chain.name for layer in layers).values()) == {4}
        for trait in ("has_bias", "is_3d", "transposed"):
            assert {getattr(layer, trait) for layer in layers} == {True, False}
        assert {layer.operand_grads for layer in layers} == ({True, False} if group == TRAINING else {False})
        m, n, k = zip(*(layer.shape for layer in layers), strict=True)
        assert 1 <= min(m) < 64 < max(m) <= 4096
        assert 128 <= min(n + k) < 512 < max(n + k) <= 4096
    kinds = Counter(tuple(operand.kind for operand in chain.operands) for chain in CHAINS)
    assert kinds == dict.fromkeys([(), ("full",), ("row",), ("column",), ("scalar",)], 3)


def test_a_seed_draws_layers_of_its_own_and_always_the_same() -> None:
    titles = {seed: [case.title for case in random_cases(False, False, seed)] for seed in (0, 1)}
    assert titles[0] == [case.title for case in random_cases(False, False, 0)]
    assert not set(titles[0]) & set(titles[1])


def test_every_group_has_a_mean_and_a_worst_in_16_bits_and_in_fp32() -> None:
    nothing_measured = {
        "suite": "random",
        "machine": {"device": "cpu"},
        "settings": {"small": False, "quick": False, "seed": 5},
        "cases": [],
    }
    lines = lines_of(nothing_measured)
    assert [(line.goal.what, line.goal.limit) for line in lines if line.goal.measure == MEAN] == [
        ("forward, 16 bits", 0.40),
        ("forward, fp32", 0.40),
        ("forward with a row sum, 16 bits", 0.60),
        ("forward with a row sum, fp32", 0.65),
        ("training step, 16 bits", 0.70),
        ("training step, fp32", 0.75),
    ]
    assert [line.goal.limit for line in lines if line.goal.measure == WORST] == [1.05] * 6
    assert {line.expected for line in lines} == {30}


@pytest.mark.parametrize("group", LIMITS, ids=lambda group: group.name)
def test_both_calls_give_the_exact_result(group: Group) -> None:
    cases = [case for case in random_cases(True, False, 1) if case.group == group.name]
    for case in cases:
        entries = measured(case)["contenders"]
        assert all("note" not in entry for entry in entries.values()), (case.title, entries)
    layers = [layer_of(case)[1] for case in cases]
    assert {layer.chain for layer in layers} == set(CHAINS)


def test_results_have_the_shapes_of_the_layer() -> None:
    chain = next(chain for chain in CHAINS if chain.name == "gelu, column, z")
    layer = Layer((12, 24, 16), chain, has_bias=True, is_3d=True, transposed=True, operand_grads=True)
    assert layer.build(FORWARD, "fp32", CPU).cutfuse().shape == (4, 3, 24)
    assert layer.build(ROW_SUM, "fp32", CPU).cutfuse().shape == (4, 3)
    shapes = [tuple(part.shape) for part in layer.build(TRAINING, "fp32", CPU).cutfuse()]
    assert shapes == [(4, 3, 24), (4, 3, 16), (16, 24), (24,), (4, 3, 1)]
    plain = Layer((12, 24, 16), chain, has_bias=False, is_3d=False, transposed=False, operand_grads=False)
    shapes = [tuple(part.shape) for part in plain.build(TRAINING, "fp32", CPU).cutfuse()]
    assert shapes == [(12, 24), (12, 16), (24, 16)]


def test_the_command_runs_the_layers_of_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run("random", tmp_path / "run", "--seed", "7", "--filter", "row sum", "--filter", "fp32")
    assert (status, len(found["cases"]), found["settings"]["seed"]) == (0, 15, 7)
    assert "forward with a row sum, fp32" in capsys.readouterr().out
    assert suite_of("random") is suite.SUITE


def test_a_suite_without_committed_results_says_so() -> None:
    with pytest.raises(SystemExit, match="cannot report: random has no committed results: run it"):
        main(["report", "random"])
