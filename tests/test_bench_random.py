"""The random suite: what its layers are drawn from, and that both sides of every call give the same."""

from __future__ import annotations

from collections import Counter

import pytest
from bench_runs import measured

from bench.__main__ import main
from bench.host_suite import Group
from bench.random_suite import CHAINS, LIMITS, TRAINING, Layer, random_cases
from bench.suite import Case

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


@pytest.mark.parametrize("group", LIMITS, ids=lambda group: group.name)
def test_both_calls_give_the_exact_result(group: Group) -> None:
    cases = [case for case in random_cases(True, False, 1) if case.group == group.name]
    for case in cases:
        entries = measured(case)["contenders"]
        assert all("note" not in entry for entry in entries.values()), (case.title, entries)
    layers = [layer_of(case)[1] for case in cases]
    assert {layer.chain for layer in layers} == set(CHAINS)


def test_a_suite_without_committed_results_says_so() -> None:
    with pytest.raises(SystemExit, match="cannot report: random has no committed results: run it"):
        main(["report", "random"])
