"""Kept planes on a GPU: never stale, dropped in time, in streams and graphs; and the guard in replays."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from plane_cases import CHANGES, Change
from plane_inputs import DEVICE, LARGE, SPLIT_MODES, draw, normal, wild
from torch import Tensor, nn

import cutfuse
from cutfuse.ops import planes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("guarded_products")]

ROWS, COLUMNS, DEPTH = 512, 2048, 2048


def sigmoid_of(x: Tensor, weight: Tensor) -> Tensor:
    """By split3."""
    with cutfuse.precision("split3"):
        return cutfuse.linear(x, weight, epilogue=torch.sigmoid)


def warm(x: Tensor, weight: Tensor) -> Tensor:
    """The result of three calls, after which the weight's planes are kept and have been used."""
    first = sigmoid_of(x, weight)
    assert cutfuse.plane_memory() == 0
    second = sigmoid_of(x, weight)
    kept = cutfuse.plane_memory()
    assert kept >= weight.nbytes, "nothing is kept"
    third = sigmoid_of(x, weight)
    assert cutfuse.plane_memory() == kept
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    return third


def captured_on(stream: torch.cuda.Stream, call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the call and its result, after three calls that are not captured."""
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, y


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_the_weight_is_seen(change: Change, with_gradient: bool) -> None:
    x = normal(ROWS, DEPTH)
    layer = nn.Linear(DEPTH, COLUMNS, bias=False, device=DEVICE)
    with torch.set_grad_enabled(with_gradient):
        before = warm(x, layer.weight)
        with torch.enable_grad():
            change(layer)
        after = sigmoid_of(x, layer.weight)
        cutfuse.forget_planes()
        fresh = sigmoid_of(x, layer.weight)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, before), "the case changes nothing"


def test_forget_planes_sees_what_no_version_counts() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    before = warm(x, weight)
    weight.data.neg_()
    cutfuse.forget_planes()
    assert cutfuse.plane_memory() == 0
    after = sigmoid_of(x, weight)
    assert torch.equal(after, sigmoid_of(x, weight.clone()))
    assert not torch.equal(after, before)


def test_inference_tensors_keep_nothing() -> None:
    with torch.inference_mode():
        x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
        for _ in range(4):
            weight.neg_()  # no version counts it
            assert torch.equal(sigmoid_of(x, weight), sigmoid_of(x, weight.clone()))
    assert cutfuse.plane_memory() == 0


def test_memory_comes_back_with_the_weight() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    sigmoid_of(x, weight)  # allocates what stays
    del weight
    gc.collect()
    before = torch.cuda.memory_allocated()
    weight = normal(COLUMNS, DEPTH)
    warm(x, weight)
    kept = cutfuse.plane_memory()
    assert weight.nbytes <= kept <= 1.05 * weight.nbytes
    assert torch.cuda.memory_allocated() >= before + weight.nbytes + kept
    del weight
    gc.collect()
    assert cutfuse.plane_memory() == 0
    assert torch.cuda.memory_allocated() == before


def test_no_plane_memory_gives_the_same_bits() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    expected = warm(x, weight)
    fraction = planes._fraction
    try:
        cutfuse.set_plane_memory(0)
        for _ in range(3):
            assert torch.equal(sigmoid_of(x, weight), expected)
            assert cutfuse.plane_memory() == 0
    finally:
        cutfuse.set_plane_memory(fraction)


def test_every_stream_has_planes_of_its_own() -> None:
    """The side stream's split comes late: a product on another stream that took its planes would be too early."""
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    expected = sigmoid_of(x, weight.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        results = [sigmoid_of(x, weight) for _ in range(3)]
    kept = cutfuse.plane_memory()
    assert kept > 0
    results += [sigmoid_of(x, weight) for _ in range(3)]
    assert cutfuse.plane_memory() == 2 * kept
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


def test_graph_follows_changes_of_the_weight() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    stream = torch.cuda.Stream()
    graph, y = captured_on(stream, lambda: sigmoid_of(x, weight))
    kept = cutfuse.plane_memory()
    assert kept > 0, "there was nothing that the graph could have used by mistake"
    for seed in (5, 6, 7):
        weight.copy_(normal(COLUMNS, DEPTH, seed=seed))
        x.copy_(normal(ROWS, DEPTH, seed=seed))
        y.zero_()
        graph.replay()
        assert torch.equal(y, sigmoid_of(x, weight))
        assert torch.equal(y, sigmoid_of(x, weight.clone()))


def test_captures_keep_nothing() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    sigmoid_of(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = [sigmoid_of(x, weight) for _ in range(3)]
    assert cutfuse.plane_memory() == 0
    graph.replay()
    assert all(torch.equal(each, sigmoid_of(x, weight)) for each in y)


@pytest.mark.parametrize("reduction", [None, "sum", "logsumexp"])
def test_guard_decides_in_every_replay(reduction: str | None) -> None:
    """One graph holds both plans; what x holds when it is replayed picks one, to the bit."""
    benign, weight, bias = draw(*LARGE)
    inputs = {"split3": benign, "split6": wild(benign)}
    x = benign.clone()

    def call(mode: str | None) -> Tensor:
        with cutfuse.precision(mode):
            return cutfuse.linear(x, weight, bias, epilogue=torch.relu, reduce=reduction)

    graph, y = captured_on(torch.cuda.Stream(), lambda: call(None))
    for plan in ("split3", "split6", "split3", "split6", "split6", "split3"):
        x.copy_(inputs[plan])
        y.zero_()
        graph.replay()
        expected = {mode: call(mode) for mode in SPLIT_MODES}
        other = next(mode for mode in SPLIT_MODES if mode != plan)
        assert torch.equal(y, expected[plan])
        assert not torch.equal(y, expected[other])
        assert torch.equal(y, call(None))


def test_guard_watches_the_weight_too() -> None:
    """Once with planes that are made, then with kept ones: their flags are kept with them."""
    x, weight, _ = draw(*LARGE)
    weight = wild(weight)
    expected = {}
    for mode in SPLIT_MODES:
        with cutfuse.precision(mode):
            expected[mode] = cutfuse.linear(x, weight)
    cutfuse.forget_planes()
    assert not torch.equal(expected["split3"], expected["split6"])
    for _ in range(4):
        assert torch.equal(cutfuse.linear(x, weight), expected["split6"])
    assert cutfuse.plane_memory() > 0


def test_explain_says_whether_planes_are_kept() -> None:
    x, weight, _ = draw(*LARGE)

    def says(text: str) -> bool:
        return any(text in reason for reason in cutfuse.explain(x, weight, epilogue=torch.sigmoid).reasons)

    assert says("the weight is split ")
    cutfuse.linear(x, weight, epilogue=torch.sigmoid)
    assert says("the weight's planes are kept")
    assert cutfuse.plane_memory() == 0  # explaining runs nothing
    cutfuse.linear(x, weight, epilogue=torch.sigmoid)
    assert says("the weight's planes are kept")
    weight.neg_()
    assert says("the weight is split ")
