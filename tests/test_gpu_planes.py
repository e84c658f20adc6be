"""Prepared weights on a GPU: never stale, freed in time, in streams, graphs and compiled code; the guard in replays."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from plane_cases import SEEN, UNSEEN, Change
from plane_inputs import DEVICE, LARGE, SPLIT_MODES, draw, normal, wild
from torch import Tensor

import cutfuse
from cutfuse.layer.linear_launch import KEEPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("guarded_products")]

Weight = Tensor | cutfuse.PreparedWeight

ROWS, COLUMNS, DEPTH = 512, 2048, 2048


def sigmoid_of(x: Tensor, weight: Weight, mode: str = "split3") -> Tensor:
    with cutfuse.precision(mode):
        return cutfuse.linear(x, weight, epilogue=torch.sigmoid)


def takes_planes(x: Tensor, weight: Weight, mode: str = "split3") -> bool:
    with cutfuse.precision(mode):
        return KEEPS in cutfuse.explain(x, weight, epilogue=torch.sigmoid).steps


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


@pytest.mark.parametrize("mode", ["split3", "split6", "guarded"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_same_bits_as_of_the_weight(mode: str, transposed: bool) -> None:
    x, weight, _ = draw(*LARGE)
    weight = weight.t().contiguous().t() if transposed else weight
    prepared = cutfuse.prepare(weight, mode)
    assert takes_planes(x, prepared, mode)
    assert not takes_planes(x, weight, mode)
    for _ in range(2):
        assert torch.equal(sigmoid_of(x, prepared, mode), sigmoid_of(x, weight, mode))


@pytest.mark.parametrize("mode", ["ieee", "tf32", "split6"])
def test_other_modes_take_the_weight_itself(mode: str) -> None:
    x, weight, _ = draw(*LARGE)
    prepared = cutfuse.prepare(weight, "split3")
    assert not takes_planes(x, prepared, mode)
    assert torch.equal(sigmoid_of(x, prepared, mode), sigmoid_of(x, weight, mode))


def test_other_types_have_no_planes() -> None:
    x, weight, _ = (t.bfloat16() for t in draw(*LARGE))
    prepared = cutfuse.prepare(weight)
    assert prepared.nbytes == 0
    assert torch.equal(sigmoid_of(x, prepared), sigmoid_of(x, weight))


def make_layer() -> cutfuse.nn.FusedLinear:
    return cutfuse.nn.FusedLinear(DEPTH, COLUMNS, bias=False, epilogue=torch.sigmoid, device=DEVICE)


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_every_change_of_the_weight_is_refused(change: Change) -> None:
    x, layer = normal(ROWS, DEPTH), make_layer()
    with cutfuse.precision("split3"), torch.no_grad():
        before = layer.prepare()(x)
        with torch.enable_grad():
            change(layer)
        with pytest.raises(RuntimeError, match="call prepare"):
            layer(x)
        after = layer.prepare()(x)
        assert torch.equal(after, sigmoid_of(x, layer.weight))
    assert not torch.equal(after, before), "the case changes nothing"


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_seen_is_there_after_preparing_again(change: Change) -> None:
    x, layer = normal(ROWS, DEPTH), make_layer()
    with cutfuse.precision("split3"), torch.no_grad():
        before = layer.prepare()(x)
        with torch.enable_grad():
            change(layer)
        after = layer.prepare()(x)
        assert torch.equal(after, sigmoid_of(x, layer.weight))
    assert not torch.equal(after, before), "the case changes nothing"


@pytest.mark.general_path("prepared weights")
def test_a_module_on_the_cpu_that_moves() -> None:
    layer = make_layer().to("cpu").prepare()
    layer.to(DEVICE)
    x = normal(ROWS, DEPTH)
    with torch.no_grad(), pytest.raises(RuntimeError, match="call prepare"):
        layer(x)
    with torch.no_grad(), cutfuse.precision("split3"):
        assert takes_planes(x, layer.prepare()._weight())
        other = copy.deepcopy(layer)
        assert other._prepared.nbytes == layer._prepared.nbytes > 0
        assert torch.equal(other(x), layer(x))


def test_gradients_are_those_of_the_weight() -> None:
    x, weight, bias = (t.requires_grad_() for t in draw(*LARGE))
    prepared = cutfuse.prepare(weight)
    results = []
    for each in (prepared, weight):
        y = cutfuse.linear(x, each, bias, epilogue=torch.sigmoid)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))))
    explanation = cutfuse.explain(x, prepared, bias, epilogue=torch.sigmoid)
    assert KEEPS in (*explanation.steps, *explanation.reasons)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="written in place"):
        cutfuse.linear(x, prepared, bias, epilogue=torch.sigmoid)


def test_memory_comes_back_with_the_object() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    sigmoid_of(x, weight)  # allocates what stays
    gc.collect()
    before = torch.cuda.memory_allocated()
    prepared = cutfuse.prepare(weight)
    assert weight.nbytes <= prepared.nbytes <= 1.05 * weight.nbytes
    assert torch.cuda.memory_allocated() >= before + prepared.nbytes
    sigmoid_of(x, prepared)
    del prepared
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_planes_are_there_for_every_stream() -> None:
    """The weight comes late on a side stream, on which it is prepared; another stream uses the planes at once."""
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    expected = sigmoid_of(x, weight)
    late = torch.zeros_like(weight)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        late.copy_(weight)
        prepared = cutfuse.prepare(late, "split3")
    with torch.cuda.stream(second):
        y = sigmoid_of(x, prepared)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_planes_in_use_on_another_stream_are_not_given_out() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    expected = sigmoid_of(x, weight)
    prepared = cutfuse.prepare(weight, "split3")
    planes, nbytes = prepared.for_operators.planes.data_ptr(), prepared.nbytes
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # a second: collecting garbage may take tens of milliseconds
        y = sigmoid_of(x, prepared)
        done.record()
    del prepared
    gc.collect()
    others = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    assert not done.query()
    assert all(other.data_ptr() != planes for other in others)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_a_graph_reads_the_planes_that_it_captured() -> None:
    """Of the weight as it was prepared, and of x as it is replayed; a graph without planes follows the weight."""
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    original, prepared = weight.clone(), cutfuse.prepare(weight, "split3")
    kept_graph, kept = captured_on(torch.cuda.Stream(), lambda: sigmoid_of(x, prepared))
    own_graph, own = captured_on(torch.cuda.Stream(), lambda: sigmoid_of(x, weight))
    for seed in (5, 6):
        weight.copy_(normal(COLUMNS, DEPTH, seed=seed))
        x.copy_(normal(ROWS, DEPTH, seed=seed))
        for graph, y, expected in ((kept_graph, kept, original), (own_graph, own, weight)):
            y.zero_()
            graph.replay()
            assert torch.equal(y, sigmoid_of(x, expected))


@pytest.mark.general_path("prepared weights")
def test_a_capture_is_no_place_to_prepare() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    prepared = cutfuse.prepare(weight, "split3")
    expected = sigmoid_of(x, prepared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            cutfuse.prepare(weight)
        y = sigmoid_of(x, prepared)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.general_path("compiled code alone calls the module")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of the first one in a process
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(mode: str | None) -> None:
    torch._dynamo.reset()
    x, layer = normal(1024, DEPTH), make_layer().eval().requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        layer.prepare()
        expected = torch.sigmoid(torch.nn.functional.linear(x.double(), layer.weight.double()))
        for _ in range(4):
            torch.testing.assert_close(compiled(x).double(), expected, rtol=0, atol=1e-5)
        layer.weight.neg_()
    if mode is None:  # CUDA graphs check nothing when they are replayed
        with pytest.raises(RuntimeError, match="written in place"):
            compiled(x)
    torch._dynamo.reset()


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
    assert not torch.equal(expected["split3"], expected["split6"])
    prepared = cutfuse.prepare(weight)
    assert prepared.nbytes > 0
    for each in (weight, prepared, prepared):
        assert torch.equal(cutfuse.linear(x, each), expected["split6"])
    assert torch.equal(cutfuse.linear(x, cutfuse.prepare(weight, "split3")), expected["split6"])
