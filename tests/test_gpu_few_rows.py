"""Fewer rows of x than a tile of 64 has, on a GPU: the copy engine brings those alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from fused_products import run_plan
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Program
from cutfuse.layer.call_plans import joined_call
from cutfuse.layer.planner import LinearArguments, layout_of, plan_joined, plan_linear

pytestmark = pytest.mark.gpu

ROWS = (1, 7, 8, 9, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
GELU = Program.parse("operands=0; gelu z")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def kernels(
    x: Tensor, weight: Tensor, reduction: str, out_dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Those with tiles of 64 rows, and what runs each."""
    arguments = LinearArguments(x, weight, None, [], GELU, reduction, out_dtype)
    for way in plan_linear(arguments, "tf32").alternatives[:-1]:
        if "_64x" in way.name and not way.rejection:
            yield way.name, functools.partial(run_plan, plan_linear(arguments, "tf32", only=way.name), arguments)


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize(
    ("reduction", "by_columns", "dtype"),
    [
        *(("none", False, dtype) for dtype in DTYPES),
        *(("none", True, dtype) for dtype in DTYPES[:2]),  # fp32 has no such kernel
        *(("sum", False, dtype) for dtype in DTYPES),
    ],
    ids=str,
)
def test_rows_that_are_not_brought_are_in_no_result(
    dtype: torch.dtype, reduction: str, by_columns: bool, mode: str
) -> None:
    """Behind a product of the same kernel whose x is NaN, which leaves NaN in shared memory."""
    n, k = 328, 1032
    weight = random(n, k, dtype=dtype)
    weight = weight.t().contiguous().t() if by_columns else weight
    out_dtypes = {dtype, torch.float32} if reduction == "none" and not by_columns else {dtype}
    ran = set()
    with cutfuse.specialization(mode):
        for m, out_dtype in ((m, out_dtype) for m in ROWS for out_dtype in out_dtypes):
            x = random(m, k, dtype=dtype)
            z = F.gelu(x.double() @ weight.double().t())
            exact = z if reduction == "none" else z.sum(-1)
            spoiling = dict(
                kernels(torch.full((64, k), torch.nan, device="cuda", dtype=dtype), weight, reduction, out_dtype)
            )
            for name, run in kernels(x, weight, reduction, out_dtype):
                assert spoiling[name]().isnan().all()
                y = run()
                bound = 0.02 * exact.abs().clamp(min=exact.abs().mean())
                assert ((y.double() - exact).abs() <= bound).all(), (name, m)
                ran.add(name)
    assert ran


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_joined_weights(dtype: torch.dtype) -> None:
    weights = [random(n, 264, dtype=dtype) for n in (256, 128)]
    for m in ROWS:
        x = random(m, 264, dtype=dtype)
        spoiled = torch.full((64, 264), torch.nan, device="cuda", dtype=dtype)
        exact = torch.cat([x.double() @ weight.double().t() for weight in weights], -1)
        layouts = [layout_of(weight).of_matrix for weight in weights], dtype, x.device
        for way in plan_joined(layout_of(x).of_matrix, *layouts).alternatives[:-1]:
            for given in (spoiled, x):
                planned = plan_joined(layout_of(given).of_matrix, *layouts, only=way.name)
                y: Tensor = joined_call(planned, given, weights, [None, None]).run([given, *weights], 1)
            assert ((y.double() - exact).abs() <= 0.02 * exact.abs().clamp(min=exact.abs().mean())).all(), (way.name, m)


def graph_of(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Twenty launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for _ in range(20)]
    del kept
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / 20


def test_few_rows_take_no_longer_than_a_tile_of_them() -> None:
    """An H200 took 16.1 us for 8x8192x2048 and 12.2 for 64 rows while the copy engine filled tiles with zeros."""
    weight = random(8192, 2048, dtype=torch.bfloat16)
    name = "sm90_bf16_64x64x128_1x1_pingpong"
    with cutfuse.specialization("now"):
        runs = {
            m: dict(kernels(random(m, 2048, dtype=torch.bfloat16), weight, "none", torch.bfloat16))[name]
            for m in (8, 64)
        }
        graphs = {m: graph_of(run) for m, run in runs.items()}
        # The least of many, in turns: other tests may use the device.
        times = {m: min(microseconds(graphs[m]) for _ in range(30)) for m in runs}
    assert times[8] < 1.12 * times[64]
