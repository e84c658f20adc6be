"""On a GPU: kernels start before the previous one ends, read what it writes, and write nothing that it still reads."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fused_products import run_plan
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue, Program
from cutfuse.layer import cuda
from cutfuse.layer.call_plans import joined_call
from cutfuse.layer.planner import LinearArguments, layout_of, plan_joined, plan_linear
from cutfuse.precision import GUARDED

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PRODUCTS = native.module().gemm_kernels()
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
FACTORS = (1.0, -0.5, 2.0)  # exact in every type, so that PyTorch and this library round alike
RUNS, REPLAYS, CAPTURED = 200, 50, 4
SCALE = Program.parse("operands=1; mul z r0")
CHAIN = Epilogue(lambda z, row, column, full: torch.tanh(z * row) + torch.sigmoid(z + column) * full, 3).program

Run = Callable[[Sequence[Tensor]], Tensor]


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def joined(kernel: str) -> tuple[list[Tensor], Run]:
    """What a kernel of several weights reads, and a call of it: for any tensors of the same shapes."""
    dtype, widths = DTYPES[kernel.split("_")[1]], (256, 128, 384)
    sources = [randn(200, 1032, dtype=dtype), *(randn(n, 1032, dtype=dtype) for n in widths)]
    sources += [randn(n, dtype=dtype) for n in widths]
    layouts = [layout_of(source).of_matrix for source in sources[:4]]
    plan = plan_joined(layouts[0], layouts[1:], dtype, torch.device(DEVICE, 0), only=kernel)
    assert plan is not None

    def run(given: Sequence[Tensor]) -> Tensor:
        x, weights, biases = given[0], given[1:4], given[4:]
        result: Tensor = joined_call(plan, x, weights, biases).run([x, *weights, *biases], 1)
        return result

    return sources, run


def linear(kernel: str) -> tuple[list[Tensor], Run]:
    """As `joined`, of a kernel of one weight, whose program reads a row, a column and a matrix.

    Over planes, x and the weight are split by kernels before it.
    """
    dtype = DTYPES.get(kernel.split("_")[1], torch.float32)
    m, n, k = (8 if "_8x8x" in kernel else 200), 328, 1032
    x_by_columns, by_columns = "_tn_" in kernel, bool(re.search("_[nt]n_", kernel))
    odd = int("_split" in kernel)  # rows that the kernel cannot convert itself
    x_shape, weight_shape = (k, m) if x_by_columns else (m, k), (k, n) if by_columns else (n, k + odd)
    sources = [randn(*shape, dtype=dtype) for shape in (x_shape, weight_shape, (n,), (1, n), (m, 1), (m, n))]
    planes = re.findall("_(?:split|convert)([36])_", kernel)
    precision = f"split{planes[0]}" if planes else GUARDED if "_fp32_" in kernel else "tf32"

    def run(given: Sequence[Tensor]) -> Tensor:
        x, weight, bias, *operands = given
        arguments = LinearArguments(
            x.t() if x_by_columns else x,
            weight.t() if by_columns else weight[:, :k],
            bias,
            tuple(operands),
            CHAIN,
            "sum" if "_rows_" in kernel else "none",
            torch.float32 if re.search("_b?f16_f32_", kernel) else dtype,
        )
        result: Tensor = run_plan(plan_linear(arguments, precision, only=kernel), arguments)
        return result

    return sources, run


def stream_pointwise(x: Tensor, row: Tensor, column: Tensor, full: Tensor) -> Tensor:
    return cuda.pointwise(x, (row, column, full), CHAIN.text, x.dtype)


def stream_gradients(x: Tensor, row: Tensor, column: Tensor, full: Tensor, sums_columns: bool = False) -> Tensor:
    given = [row.expand_as(x), column.expand_as(x), full]
    return cuda.pointwise_backward(full, x, given, CHAIN.text, "none", None, [0], sums_columns)[-1]


def stream_columns(*given: Tensor) -> Tensor:
    return stream_gradients(*given, sums_columns=True)


def stream_rows_reduced(x: Tensor, row: Tensor, column: Tensor, full: Tensor, dim: int = 1) -> Tensor:
    return cuda.reduce(x, (row, column, full), CHAIN.text, "sum", (dim,), x.dtype)


def stream_columns_reduced(*given: Tensor) -> Tensor:
    return stream_rows_reduced(*given, dim=0)


STREAMING: dict[str, Callable[..., Tensor]] = {
    "pointwise": stream_pointwise,
    "pointwise_backward": stream_gradients,
    "pointwise_backward_columns": stream_columns,
    "row_reduce": stream_rows_reduced,
    "strided_reduce": stream_columns_reduced,
}


def streaming(kernel: str) -> tuple[list[Tensor], Run]:
    """As `joined`, of a kernel without a product, for any device: compiled in, it waits on those that launch early."""
    sources = [randn(*shape, dtype=torch.bfloat16) for shape in ((700, 1032), (1, 1032), (700, 1), (700, 1032))]
    return sources, lambda given: STREAMING[kernel](*given)


def case_of(kernel: str) -> tuple[list[Tensor], Run]:
    torch.manual_seed(0)
    if kernel in STREAMING:
        return streaming(kernel)
    return (joined if "_joined_" in kernel else linear)(kernel)


def scaled(source: Tensor, factor: Tensor, by_pytorch: bool) -> Tensor:
    """By a kernel of PyTorch's, or by one of this library's, which lets the next one start at once."""
    if by_pytorch:
        return source * factor.to(source.dtype)
    with cutfuse.specialization("off"):
        return cuda.pointwise(source, (factor.view([1] * source.dim()),), SCALE.text, source.dtype)


def series(run: Run, sources: Sequence[Tensor], factors: Sequence[Tensor], count: int, waits: bool) -> list[Tensor]:
    """Results of `run` for inputs that the kernels right before it write, each in its turn the last of them.

    Their memory is that of the inputs before, which the next kernels write while `run` may still read it.
    """
    results = []
    for i in range(count):
        given: list[Tensor | None] = [None] * len(sources)
        for j in range(len(sources)):
            place = (i + j) % len(sources)
            given[place] = scaled(sources[place], factors[i % len(factors)], by_pytorch=i % 2 == 0)
            if waits:
                torch.cuda.synchronize()
        results.append(run([tensor for tensor in given if tensor is not None]))
        if waits:
            torch.cuda.synchronize()
        del given
    return results


KERNELS = [*PRODUCTS, *STREAMING]


def check(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % len(expected)]), i


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_that_the_kernel_before_writes_and_the_next_overwrites(kernel: str, mode: str) -> None:
    sources, run = case_of(kernel)
    factors = [torch.tensor(factor, device=DEVICE) for factor in FACTORS]
    with cutfuse.specialization(mode):
        expected = series(run, sources, factors, len(FACTORS), waits=True)
        assert not torch.equal(expected[0], expected[1])
        torch.cuda._sleep(100_000_000)  # so that launches queue up behind it
        check(series(run, sources, factors, RUNS, waits=False), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_of_a_captured_kernel(kernel: str) -> None:
    sources, run = case_of(kernel)
    factors = [torch.tensor(factor, device=DEVICE) for factor in FACTORS]
    expected = series(run, sources, factors, len(FACTORS), waits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = series(run, sources, factors, CAPTURED, waits=False)
    for _ in range(REPLAYS):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        check(results, expected)


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData of the driver's."""

    _fields_ = (("ports", ctypes.c_ubyte * 2), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5))


PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def edge_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    get_edges: Any = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert get_edges(raw, None, None, None, ctypes.byref(count)) == 0
    starts, ends = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    edges = (EdgeData * count.value)()
    assert get_edges(raw, starts, ends, edges, ctypes.byref(count)) == 0
    return [edge.type for edge in edges]


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_launched_early(kernel: str, mode: str) -> None:
    """Of all nodes of a graph but the first, whose edge to the one before says so."""
    sources, run = case_of(kernel)
    one = torch.ones((), device=DEVICE)
    with cutfuse.specialization(mode):
        run(sources)
        scaled(sources[0], one, by_pytorch=False)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            given = [scaled(sources[0], one, by_pytorch=False), *sources[1:]]
            run(given)
    types = edge_types(graph)
    assert types
    assert set(types) == {PROGRAMMATIC}
