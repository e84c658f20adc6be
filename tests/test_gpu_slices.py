"""fp32 products whose K is cut into slices, because there are fewer tiles than multiprocessors, on a GPU."""

from __future__ import annotations

import pytest
import torch
from generators import assert_no_worse, eager_linear, make_inputs, to_double
from plane_inputs import SLACK
from torch import Tensor

import cutfuse

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_at_highest")]

# Rows, columns, depth: whole tiles; parts of tiles and of blocks, and a last slice that is shorter; many slices of one
# tile; a weight that the copy engine does not take.
SHAPES = ((128, 1024, 8192), (257, 520, 4100), (16, 64, 32768), (100, 384, 5001))
MODES = ("guarded", "split3", "split6")


def sliced(x: Tensor, weight: Tensor, bias: Tensor | None = None, reduce: str | None = None) -> Tensor:
    """What three calls agree on; at least the first product is sliced where its mode is forced."""
    results = [cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduce) for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0]


@pytest.mark.parametrize("reduce", [None, "sum", "logsumexp"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_add_up(shape: tuple[int, int, int], mode: str, reduce: str | None) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, "cuda")
    with cutfuse.precision(mode):
        explanation = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce=reduce)
        assert mode == "guarded" or "slices of K" in explanation.steps[0]
        actual = sliced(x, weight, bias, reduce)
    eager = eager_linear(x, weight, bias, torch.sigmoid, (), reduce)
    exact = eager_linear(*to_double(x, weight, bias), torch.sigmoid, (), reduce)
    assert_no_worse(actual, eager, exact, slack=SLACK)


@pytest.mark.parametrize("mode", MODES)
def test_integers_are_exact(mode: str) -> None:
    x, weight = (torch.randint(-40, 41, (rows, 8192), device="cuda").float() for rows in (130, 260))
    with cutfuse.precision(mode):
        actual = cutfuse.linear(x, weight)
    assert torch.equal(actual.double(), x.double() @ weight.double().t())


@pytest.mark.parametrize("mode", ["guarded", "split6"])
@pytest.mark.parametrize("k", [3, 4000, 8191])
def test_what_is_not_finite_comes_out_of_any_slice(k: int, mode: str) -> None:
    x, weight, _ = make_inputs(130, 260, 8192, torch.float32, "cuda")
    inf, nan = float("inf"), float("nan")
    x[5, k], x[7, 8191 - k], weight[9, k], weight[200, 0] = inf, -inf, nan, inf
    with cutfuse.precision(mode):
        actual = cutfuse.linear(x, weight)
    expected = torch.nn.functional.linear(x, weight)
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(same(actual), same(expected))


def test_a_graph_replays_slices() -> None:
    x, weight, bias = make_inputs(128, 1024, 8192, torch.float32, "cuda")
    with cutfuse.precision("guarded"):
        expected = sliced(x, weight, bias)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=stream):
            y = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
