"""Batch invariance on a GPU: rows have the same bits alone, in whole batches and in batches that are cut anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generators import REDUCTIONS
from gpu_tensors import captured
from torch import Tensor

import cutfuse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SEEDS = range(16)
ROWS = (8192, 4097, 1000, 129, 64, 9)
PRECISIONS = {
    "float32 highest": torch.float32,
    "float32 high": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CHAINS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "gelu": F.gelu,
    "residual": lambda z, r: torch.relu(z) + r,
    "gate, row": lambda z, r, s: torch.sigmoid(z) * r + s,
}


@pytest.fixture(params=PRECISIONS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.set_float32_matmul_precision("high" if request.param == "float32 high" else "highest")
    return PRECISIONS[request.param]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def cuts(draw: random.Random, rows: int) -> Iterator[slice]:
    """Batches: single rows, a few small ones, and the whole cut at three places."""
    for first in {0, rows - 1, draw.randrange(rows), draw.randrange(rows)}:
        yield slice(first, first + 1)
    for count in (2, 7, 16, 64, 65, 128, 300):
        if count < rows:
            first = draw.randrange(rows - count + 1)
            yield slice(first, first + count)
    places = sorted({0, rows, *(draw.randrange(rows) for _ in range(3))})
    yield from (slice(*ends) for ends in itertools.pairwise(places))


def assert_rows_are_equal(call: Callable[[slice], Tensor], rows: int, draw: random.Random) -> None:
    with torch.no_grad(), cutfuse.batch_invariant():
        whole = call(slice(0, rows))
        assert not whole.isnan().any()
        for part in cuts(draw, rows):
            alone = call(part)
            same = torch.equal(alone, whole[part])
            assert same, f"rows {part} of {rows}: {(alone != whole[part]).sum()} of {alone.numel()} elements differ"


def drawn_layer(draw: random.Random, dtype: torch.dtype) -> tuple[int, int, int]:
    n = draw.choice([8, 64, 200, 768, 1000, 2048, 4096, 8 * draw.randint(1, 500)])
    k = draw.choice([8, 64, 200, 1000, 2864, 4096, 11008, 8 * draw.randint(1, 1000)])
    return draw.choice(ROWS), n, k


@pytest.mark.parametrize("seed", SEEDS)
def test_linear(dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    rows, n, k = drawn_layer(draw, dtype)
    chain = draw.choice(list(CHAINS.values()))
    reduction = draw.choice([None, None, *REDUCTIONS])
    by_columns = reduction is None and dtype.itemsize == 2 and draw.random() < 0.3
    x = randn(rows, k, dtype=dtype)
    weight = randn(k, n, dtype=dtype).t() if by_columns else randn(n, k, dtype=dtype)
    bias = randn(n, dtype=dtype) if draw.random() < 0.5 else None
    count = 0 if chain is None or chain is F.gelu else chain.__code__.co_argcount - 1
    operands = [randn(rows, n, dtype=dtype), randn(n, dtype=dtype)][:count]

    def call(part: slice) -> Tensor:
        own = [t[part] if t.dim() == 2 else t for t in operands]
        return cutfuse.linear(x[part], weight, bias, epilogue=chain, operands=own, reduce=reduction)

    assert_rows_are_equal(call, rows, draw)
    part = slice(0, min(rows, 64))
    with torch.no_grad(), cutfuse.batch_invariant():
        torch.testing.assert_close(call(part), plainly(call, part), rtol=3e-2, atol=3e-2 * k**0.5)


def plainly(call: Callable[[slice], Tensor], part: slice) -> Tensor:
    """The same call outside of the mode."""
    with cutfuse.batch_invariant(False):
        return call(part)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("n", [64, 1024, 4096, 32000])
def test_row_reductions(dtype: torch.dtype, reduction: str, n: int) -> None:
    draw = random.Random(n)
    x, weight = randn(4097, 512, dtype=dtype), randn(n, 512, dtype=dtype)
    assert_rows_are_equal(
        lambda part: cutfuse.linear(x[part], weight, epilogue=torch.tanh, reduce=reduction), 4097, draw
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_unaligned_rows_and_layouts_of_x(dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    rows, n, k = 300, 512, 264
    stored = randn(rows, k + 1, dtype=dtype)
    x = draw.choice([stored[:, :k], stored[:, 1:], randn(k, rows, dtype=dtype).t()])
    weight = randn(n, k, dtype=dtype)
    assert_rows_are_equal(lambda part: cutfuse.linear(x[part], weight, epilogue=F.gelu), rows, draw)


def test_fp32_columns_that_are_no_vectors() -> None:
    draw = random.Random(0)
    x, weight, bias = (randn(*shape, dtype=torch.float32) for shape in ((1000, 515), (131, 515), (131,)))
    assert_rows_are_equal(lambda part: cutfuse.linear(x[part], weight, bias, epilogue=F.gelu), 1000, draw)


def test_rows_beside_others_of_any_size_in_fp32() -> None:
    """The guard of the default mode looks at all rows: large and tiny numbers in others would change the scheme."""
    x, weight = randn(256, 512, dtype=torch.float32), randn(1024, 512, dtype=torch.float32)
    beside = x.clone()
    beside[1:] *= torch.logspace(-35, 35, 512, device=DEVICE)
    with cutfuse.batch_invariant():
        expected = cutfuse.linear(x, weight, epilogue=torch.tanh)[0]
        assert torch.equal(cutfuse.linear(beside, weight, epilogue=torch.tanh)[0], expected)


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("columns", [1, 7, 64, 333, 1000, 4096, 65536])
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16])
def test_reduce(op: str, columns: int, element: torch.dtype) -> None:
    draw = random.Random(columns)
    rows = 1000 if columns > 4096 else 5000
    x, r = randn(rows, columns, dtype=element), randn(rows, columns, dtype=torch.float32)
    scale = randn(columns, dtype=torch.float32)
    calls: list[Callable[[slice], Tensor]] = [
        lambda part: cutfuse.reduce(x[part], 1, op),
        lambda part: cutfuse.reduce(x.t().contiguous()[:, part], 0, op),
        lambda part: cutfuse.reduce(x[part], 1, op, prologue=lambda z, r: torch.tanh(z) * r, operands=(r[part],)),
        lambda part: cutfuse.reduce(x[part], 1, op, prologue=torch.mul, operands=(r[part],)),
        lambda part: cutfuse.reduce(x[part], 1, op, prologue=torch.mul, operands=(scale,)),
    ]
    for call in calls:
        assert_rows_are_equal(call, rows, draw)


@pytest.mark.parametrize("has_gate", [False, True])
def test_mlp(dtype: torch.dtype, has_gate: bool) -> None:
    layer = cutfuse.nn.MLP(512, 1024, gate=has_gate, device=DEVICE, dtype=dtype)
    x = randn(1000, 512, dtype=dtype)
    assert_rows_are_equal(lambda part: layer(x[part]), 1000, random.Random(2))


def test_head(dtype: torch.dtype) -> None:
    x, weight = randn(1000, 512, dtype=dtype), randn(32000, 512, dtype=dtype)
    target = torch.randint(0, 32000, (1000,), device=DEVICE)
    options: dict[str, Any] = {"reduction": "none"}
    calls: list[Callable[[slice], Tensor]] = [
        lambda part: cutfuse.linear_cross_entropy(x[part], weight, target[part], **options),
        lambda part: cutfuse.linear_cross_entropy(x[part], weight, target[part], label_smoothing=0.1, **options),
        lambda part: cutfuse.linear_logprob(x[part], weight, target[part]),
    ]
    for call in calls:
        assert_rows_are_equal(call, 1000, random.Random(3))


@pytest.mark.parametrize("n", [1024, 131])
@pytest.mark.parametrize("reduction", [None, "sum", "logsumexp"])
def test_forward_passes_of_training(dtype: torch.dtype, reduction: str | None, n: int) -> None:
    if n % 8 and not (dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"):
        pytest.skip("only fp32 products on CUDA cores store rows of any length")
    x, weight = randn(1000, 512, dtype=dtype), randn(n, 512, dtype=dtype).requires_grad_()

    def call(part: slice) -> Tensor:
        with torch.enable_grad():
            y = cutfuse.linear(x[part], weight, epilogue=F.gelu, reduce=reduction)
            y.sum().backward()
        return y.detach()

    assert_rows_are_equal(call, 1000, random.Random(4))
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_graph_keeps_the_mode() -> None:
    x, weight = randn(64, 512, dtype=torch.bfloat16), randn(1024, 512, dtype=torch.bfloat16)
    with cutfuse.batch_invariant(), torch.no_grad():
        expected = torch.cat([cutfuse.linear(row, weight, epilogue=F.gelu) for row in x.split(1)])
        graph, y = captured(lambda: cutfuse.linear(x, weight, epilogue=F.gelu))
    graph.replay()
    assert torch.equal(y, expected)
