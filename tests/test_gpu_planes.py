"""Prepared weights on a GPU: never stale, freed in time, in streams, graphs and compiled code; the guard in replays."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from generators import EPILOGUES, LAYOUTS, REDUCTIONS, assert_linear, assert_no_worse, eager_linear, to_double
from gpu_tensors import DEVICE, LARGE, SLACK, SPLIT_MODES, captured, draw, normal, wild
from plane_cases import SEEN, UNSEEN
from torch import Tensor

import cutfuse
from cutfuse.layer.linear_plan import KEEPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("guarded_products")]

Weight = Tensor | cutfuse.PreparedWeight

ROWS, COLUMNS, DEPTH = 512, 2048, 2048


def sigmoid_of(x: Tensor, weight: Weight, mode: str = "split3") -> Tensor:
    with cutfuse.precision(mode):
        return cutfuse.linear(x, weight, epilogue=torch.sigmoid)


def takes_planes(x: Tensor, weight: Weight, mode: str = "split3") -> bool:
    with cutfuse.precision(mode):
        return KEEPS in cutfuse.explain(x, weight, epilogue=torch.sigmoid).steps


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


def make_layer() -> cutfuse.nn.FusedLinear:
    return cutfuse.nn.FusedLinear(DEPTH, COLUMNS, bias=False, epilogue=torch.sigmoid, device=DEVICE)


@pytest.mark.parametrize("name", [*SEEN, *UNSEEN])
def test_every_change_of_the_weight_is_refused_or_there_after_preparing_again(name: str) -> None:
    x, layer = normal(ROWS, DEPTH), make_layer()
    with cutfuse.precision("split3"), torch.no_grad():
        before = layer.prepare()(x)
        with torch.enable_grad():
            (SEEN | UNSEEN)[name](layer)
        if name in SEEN:
            with pytest.raises(RuntimeError, match="call prepare"):
                layer(x)
        after = layer.prepare()(x)
        assert torch.equal(after, sigmoid_of(x, layer.weight))
    assert not torch.equal(after, before), "the case changes nothing"


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


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is launched on the stream from here on begins at the end, or after a minute: if the host waits for it."""
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    wait, at_least = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2, 0  # CU_STREAM_WAIT_VALUE_GEQ
    assert wait(ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(gate.data_ptr()), 1, at_least) == 0
    timer = threading.Timer(60.0, gate.fill_, (1,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        gate.fill_(1)
        stream.synchronize()


def test_planes_in_use_on_another_stream_are_not_given_out() -> None:
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    expected = sigmoid_of(x, weight)
    prepared = cutfuse.prepare(weight, "split3")
    planes, nbytes = prepared.for_operators.planes.data_ptr(), prepared.nbytes
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with held(stream):
        with torch.cuda.stream(stream):
            y = sigmoid_of(x, prepared)
        del prepared
        gc.collect()
        others = [torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
        assert not stream.query()
        assert all(other.data_ptr() != planes for other in others)
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_a_graph_reads_the_planes_that_it_captured() -> None:
    """Of the weight as it was prepared, and of x as it is replayed; a graph without planes follows the weight."""
    x, weight, _ = draw(ROWS, COLUMNS, DEPTH)
    original, prepared = weight.clone(), cutfuse.prepare(weight, "split3")
    kept_graph, kept = captured(lambda: sigmoid_of(x, prepared))
    own_graph, own = captured(lambda: sigmoid_of(x, weight))
    for seed in (5, 6):
        weight.copy_(normal(COLUMNS, DEPTH, seed=seed))
        x.copy_(normal(ROWS, DEPTH, seed=seed))
        for graph, y, expected in ((kept_graph, kept, original), (own_graph, own, weight)):
            y.zero_()
            graph.replay()
            assert torch.equal(y, sigmoid_of(x, expected))


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

    graph, y = captured(lambda: call(None))
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


# Rows, columns, depth: single elements, parts of tiles and of blocks, one more than a whole number of each.
RAGGED = ((1, 4, 1), (3, 8, 5), (130, 260, 77), (257, 1000, 4097))


def seeds_of(shape: tuple[int, int, int]) -> Iterable[int]:
    """Of a few numbers the error is chance: many draws average out."""
    return range(0, 48, 3) if shape[0] < 10 else (0,)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_shapes(shape: tuple[int, int, int], mode: str) -> None:
    rows, columns, _ = shape
    epilogue = EPILOGUES["residual"][0]
    results: list[list[Tensor]] = [[], [], []]
    for seed in seeds_of(shape):
        x, weight, bias = draw(*shape, seed)
        residual = normal(rows, columns, seed=seed)
        with cutfuse.precision(mode):
            assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid).path == "fused"
            results[0].append(cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(residual,)))
        results[1].append(eager_linear(x, weight, bias, epilogue, (residual,)))
        results[2].append(eager_linear(*to_double(x, weight, bias), epilogue, to_double(residual)))
    assert_no_worse(*(torch.stack(each) for each in results), slack=SLACK)


MATRIX_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **LAYOUTS,
    # Rows, and columns, that start at every multiple of 4 bytes.
    "misaligned rows": lambda t: F.pad(t, (1, 2))[:, 1:-2],
    "transposed and misaligned": lambda t: F.pad(t.t(), (1, 2))[:, 1:-2].t(),
    # Neither rows nor columns are contiguous.
    "doubly strided": lambda t: t.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
}


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("of_weight", MATRIX_LAYOUTS)
@pytest.mark.parametrize("of_x", MATRIX_LAYOUTS)
def test_every_layout_gives_the_same_bits(of_x: str, of_weight: str, mode: str) -> None:
    x, weight, bias = draw(130, 260, 77)
    x_laid_out, weight_laid_out = MATRIX_LAYOUTS[of_x](x), MATRIX_LAYOUTS[of_weight](weight)
    assert torch.equal(x_laid_out, x)
    assert torch.equal(weight_laid_out, weight)
    with cutfuse.precision(mode):
        expected = cutfuse.linear(x, weight, bias)
        for _ in range(3):
            assert torch.equal(cutfuse.linear(x_laid_out, weight_laid_out, bias), expected)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert_no_worse(expected, F.linear(x, weight, bias), exact, slack=SLACK)


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t[:1].expand(t.shape),
    "columns": lambda t: t[:, :1].expand(t.shape),
    "one element": lambda t: t[:1, :1].expand(t.shape),
    "rows of a transpose": lambda t: t.t().contiguous().t()[:1].expand(t.shape),
}


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("of_weight", EXPANSIONS)
@pytest.mark.parametrize("of_x", EXPANSIONS)
def test_expanded_matrices(of_x: str, of_weight: str, mode: str) -> None:
    x, weight, bias = draw(130, 260, 77)
    x, weight = EXPANSIONS[of_x](x), EXPANSIONS[of_weight](weight)
    with cutfuse.precision(mode):
        expected = cutfuse.linear(x.contiguous(), weight.contiguous(), bias)
        assert torch.equal(cutfuse.linear(x, weight, bias), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("layout", [lambda b: F.pad(b, (1, 0))[1:], lambda b: b.repeat_interleave(2)[::2]])
def test_bias_of_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    x, weight, bias = draw(130, 260, 77)
    with cutfuse.precision("split3"):
        expected = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid)
        assert torch.equal(cutfuse.linear(x, weight, layout(bias), epilogue=torch.sigmoid), expected)
        same = bias[:1].expand(bias.shape)
        expected = cutfuse.linear(x, weight, same.contiguous(), epilogue=torch.sigmoid)
        assert torch.equal(cutfuse.linear(x, weight, same, epilogue=torch.sigmoid), expected)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("name", ["sigmoid", "residual", "gelu_gate", "four_operands"])
def test_every_reduction(name: str, reduction: str | None, mode: str) -> None:
    epilogue, count = EPILOGUES[name]
    rows, columns, depth = 300, 520, 200
    x, weight, bias = draw(rows, columns, depth)
    operands = [normal(*shape, seed=3) for shape in ((rows, columns), (columns,), (rows, 1), ())[:count]]

    def call() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)

    with cutfuse.precision(mode):
        explanation = cutfuse.explain(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
        assert explanation.path == "fused"
        assert f"sm90_{mode}" in explanation.steps[0].replace("convert", "split")
        runs = [call() for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert_linear(runs[0], x, weight, bias, epilogue, operands, reduction, SLACK)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("shape", [(77, 131, 61), (33, 257, 1023), (128, 1022, 512), (64, 1, 64)], ids=str)
def test_columns_that_are_no_multiple_of_four(shape: tuple[int, int, int], mode: str) -> None:
    """The result's rows would not start at multiples of 16 bytes: cuBLAS takes it, unless it is reduced."""
    x, weight, bias = draw(*shape)
    with cutfuse.precision("ieee"):
        expected = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid)
    with cutfuse.precision(mode):
        assert torch.equal(cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid), expected)
        assert torch.equal(cutfuse.linear(x, weight, bias), F.linear(x, weight, bias))
        reduced = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce="sum")
        assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid).path == "unfused"
        assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce="sum").path == "fused"
    assert_linear(reduced, x, weight, bias, torch.sigmoid, (), "sum", SLACK)


def test_explain_says_why_columns_do_not_fit() -> None:
    x, weight, bias = draw(128, 1022, 512)
    with cutfuse.precision("split3"):
        explanation = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid)
    assert any("N is 1022" in reason for reason in explanation.reasons), explanation


@pytest.mark.parametrize("mode", [None, *SPLIT_MODES])
@pytest.mark.parametrize("reduction", [None, "amax", "amin", "logsumexp"])
def test_a_bias_and_an_operand_that_are_not_finite(reduction: str | None, mode: str | None) -> None:
    """They say nothing about the operands' range: the plan, and with it all other results, stay to the bit."""
    x, weight, bias = draw(*LARGE)
    residual = normal(LARGE[0], LARGE[1], seed=3)
    inf, nan = float("inf"), float("nan")

    def call() -> Tensor:
        with cutfuse.precision(mode):
            return cutfuse.linear(x, weight, bias, epilogue=torch.add, operands=(residual,), reduce=reduction)

    clean = call()
    residual[2, 7], residual[3, 5], residual[1000, 0] = inf, -inf, nan
    if reduction is None:
        bias[5], bias[6], bias[4001] = inf, nan, -inf
    actual, expected = call(), eager_linear(x, weight, bias, torch.add, (residual,), reduction)
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(same(actual), same(expected))
    assert not expected.isfinite().all()
    untouched = expected.isfinite()
    if reduction is not None:
        untouched[[2, 3, 1000]] = False
    assert torch.equal(actual[untouched], clean[untouched])


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("shape", [(130, 520, 260), (256, 512, 1024)], ids=str)
def test_gradients(shape: tuple[int, int, int], reduction: str | None, mode: str) -> None:
    rows, columns, depth = shape
    x, weight, bias = draw(*shape)
    layer = cutfuse.nn.FusedLinear(depth, columns, epilogue=torch.sigmoid, reduce=reduction, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x.requires_grad_()
    grad = normal(rows, columns, seed=4) if reduction is None else normal(rows, seed=4)

    def gradients(mode: str, leaves_context: bool) -> tuple[Tensor, ...]:
        with cutfuse.precision(mode):
            y = layer(x)
            if not leaves_context:
                return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    actual, again, ieee = gradients(mode, False), gradients(mode, True), gradients("ieee", False)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    if reduction not in ("amax", "amin"):  # sums of one term may round alike
        assert not torch.equal(actual[0], ieee[0])
        assert not torch.equal(actual[1], ieee[1])
    references = []
    for dtype in (torch.float32, torch.float64):
        tensors = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = eager_linear(*tensors, torch.sigmoid, (), reduction)
        references.append(torch.autograd.grad(y, tensors, grad.to(dtype)))
    for found, eager, exact in zip(actual, *references, strict=True):
        assert_no_worse(found, eager, exact, slack=SLACK)


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_ieee_is_pytorchs_own_result(setting: str) -> None:
    x, weight, bias = draw(300, 520, 1000)
    grad = normal(300, 520, seed=4)
    with_gradient = [t.clone().requires_grad_() for t in (x, weight)]
    expected = F.linear(x, weight, bias), torch.mm(x, weight.t()), torch.mm(grad, weight), torch.mm(grad.t(), x)
    torch.set_float32_matmul_precision(setting)
    with cutfuse.precision("ieee"):
        found = [cutfuse.linear(x, weight, bias), cutfuse.linear(x, weight)]
        y = cutfuse.linear(*with_gradient)
    found += torch.autograd.grad(y, with_gradient, grad)
    assert torch.get_float32_matmul_precision() == setting
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(torch.mm(x, weight.t()), expected[1]) == (setting == "highest"), "the setting has no effect"
