"""The cases of the host and random suites: every call's two sides compute the same, and what is drawn."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from bench_runs import CPU, parts_of
from torch import Tensor

import cutfuse
from bench import host_suite as suite
from bench import workloads
from bench.__main__ import main
from bench.host_suite import Group, build_stacks
from bench.random_suite import CHAINS, LIMITS, NEW_CHAIN, TRAINING, Layer, random_cases
from bench.suite import Case
from bench.workloads import WRONG_ABOVE, Workload, errors_of

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (6, 24, 16)


def group_of(case: Case) -> Group:
    """The group of a case."""
    groups = [*vars(suite).values(), *LIMITS]
    return next(own for own in groups if isinstance(own, Group) and own.name == case.group)


def build_of(case: Case) -> Workload:
    """The workload of a case."""
    return parts_of(case)[0](CPU)


def compiling_cases() -> list[Case]:
    """Those that small runs go without, at small sizes."""
    stack = suite.Stack(2, 16, 32, 5)
    blocks = suite.case_of(
        suite.COMPILED_FORWARD, stack.label, "bf16", lambda device: stack.build(suite.COMPILED_FORWARD, device)
    )
    return [*suite.LAYERS_PAIR.cases([(4, 16, 16)]), blocks]


@pytest.mark.parametrize(
    "case",
    [*suite.host_suite(small=True, quick=False), *compiling_cases()],
    ids=lambda case: case.title,
)
def test_both_calls_give_the_exact_result(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    with torch.set_grad_enabled(case.needs_grad):
        built = build_of(case)
        assert {part.dtype for part in workloads.parts_of(built.exact)} == {torch.float64}
        for call in (built.eager, built.fused):
            for _ in range(2):  # a call leaves nothing behind
                assert max(errors_of(call(*built.arguments), built.exact)) < WRONG_ABOVE[case.precision]


def test_every_group_is_measured() -> None:
    groups = {value for value in vars(suite).values() if isinstance(value, Group)}
    for quick in (False, True):
        cases = list(suite.host_suite(small=False, quick=quick))
        assert {group_of(case) for case in cases} == groups
    small = {group_of(case) for case in suite.host_suite(small=True, quick=False)}
    assert {group for group in groups if not group.compiles} == small


def test_cases_compile_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    for case in [*suite.host_suite(small=True, quick=False), *compiling_cases()]:
        compiled.clear()
        build_of(case)
        assert len(compiled) == 2 * group_of(case).compiles


def test_drawn_shapes_are_always_the_same_and_spread_over_their_range() -> None:
    rows, sizes = workloads.Range(1, 4096), workloads.Range(256, 8192)
    shapes = workloads.drawn_shapes(400, rows, sizes, odd_ones=True)
    assert workloads.drawn_shapes(3, rows, sizes, odd_ones=True) == shapes[:3]
    assert shapes[0] == (52, 2496, 2576)  # figures of two commits are of the same shapes
    m, n, k = zip(*shapes, strict=True)
    assert min(m) >= 1
    assert max(m) <= 4096
    assert min(n + k) >= 256
    assert max(n + k) <= 8192
    assert 0.4 < sum(value < 64 for value in m) / len(m) < 0.6  # the middle of 1 to 4096, by logarithms
    aligned = [all(size % workloads.ALIGNED == 0 for size in shape[1:]) for shape in shapes]
    assert all(aligned[index] for index in range(400) if index % 4 != 3)
    assert sum(aligned[3::4]) < 10
    assert all(
        size % workloads.ALIGNED == 0
        for shape in workloads.drawn_shapes(100, rows, workloads.Range(64, 1024), odd_ones=False)
        for size in shape[1:]
    )


def test_the_lambda_is_new_on_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def record(x: Tensor, weight: Tensor, bias: Tensor, *, epilogue: object, **_: object) -> Tensor:
        seen.append(epilogue)
        return x

    monkeypatch.setattr(cutfuse, "linear", record)
    tensors = suite.layer_tensors(SHAPE, "bf16", CPU)
    for _ in range(2):
        suite.fused_linear_gelu(*tensors)
    assert seen[0] is not seen[1]


def test_a_training_step_gives_gradients_of_its_own_tensors() -> None:
    step = suite.training_step(suite.linear_gelu)
    x, weight, bias, gradient = suite.training_tensors(SHAPE, "fp32", CPU)
    y, *gradients = step(x, weight, bias, gradient)
    assert [tuple(part.shape) for part in (y, *gradients)] == [(6, 24), (6, 16), (24, 16), (24,)]
    assert x.grad is None
    y = F.gelu(F.linear(x, weight, bias))
    for own, expected in zip(gradients, torch.autograd.grad(y, (x, weight, bias), gradient), strict=True):
        torch.testing.assert_close(own, expected)


def test_stacks_share_their_parameters() -> None:
    plain, fused = build_stacks(2, 8, 16, torch.float32, CPU)
    pairs = list(zip(plain.parameters(), fused.parameters(), strict=True))
    assert len(pairs) == 12
    assert all(own is other and own.requires_grad for own, other in pairs)


# The random suite, whose layers are drawn.


def layer_of(case: Case) -> Layer:
    """The layer of a case of the random suite."""
    return parts_of(case)[0].func.__self__  # type: ignore[attr-defined]


def test_layers_are_of_every_kind_in_each_group() -> None:
    drawn = list(random_cases(False, False, 3))
    new = [case for case in drawn if case.group == NEW_CHAIN.name]
    assert {case.precision for case in new} == {"bf16", "fp16", "fp32"}
    assert len({case.prepare.args[0].chain.function.__code__.co_code for case in new}) > len(new) / 2  # type: ignore[attr-defined]
    cases = [case for case in drawn if case not in new]
    assert Counter(case.group for case in cases) == {group.name: 60 for group in LIMITS}
    assert Counter(case.precision for case in cases) == {"bf16": 45, "fp16": 45, "fp32": 90}
    for group in LIMITS:
        layers = [layer_of(case) for case in cases if group_of(case) == group]
        assert set(Counter(layer.chain.name for layer in layers).values()) == {4}
        for trait in ("has_bias", "is_3d", "transposed"):
            assert {getattr(layer, trait) for layer in layers} == {True, False}
        assert {layer.operand_grads for layer in layers} == ({True, False} if group == TRAINING else {False})
        m, n, k = zip(*(layer.shape for layer in layers), strict=True)
        assert 1 <= min(m) < 64 < max(m) <= 4096
        assert 128 <= min(n + k) < 512 < max(n + k) <= 4096
    kinds = Counter(tuple(operand.kind for operand in chain.operands) for chain in CHAINS)
    assert kinds == dict.fromkeys([(), ("full",), ("row",), ("column",), ("scalar",)], 3)


def test_a_suite_without_committed_results_says_so() -> None:
    with pytest.raises(SystemExit, match="cannot report: random has no committed results: run it"):
        main(["report", "random"])
