"""On a GPU: graphs, streams, devices, memory, torch.compile, autocast, and what `explain` says."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from generators import REDUCTIONS
from gpu_tensors import captured
from torch import Tensor

import cutfuse

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MiB = 2**20


def make_inputs(
    rows: int = 129, columns: int = 264, depth: int = 72, dtype=torch.bfloat16, device=DEVICE
) -> list[Tensor]:
    shapes = ((rows, depth), (columns, depth), (columns,), (rows, columns))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


CALLS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,)),
    "linear of numbers": lambda x, w, b, r: cutfuse.linear(
        x, w, b, epilogue=lambda z, s: torch.tanh(z) * s, operands=(torch.tensor(0.5),)
    ),
    "linear without alignment": lambda x, w, b, r: cutfuse.linear(x[:, 1:], w[:, 1:], b, epilogue=torch.tanh),
    "matrix-vector": lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=lambda z: z / 2, reduce="sum"),
    "linear reduced behind cuBLAS": lambda x, w, b, r: cutfuse.linear(
        x.repeat(1, 114),  # a deep product, whose rows a kernel behind it reduces sooner
        w.repeat(1, 114),
        b,
        epilogue=lambda z, r: torch.tanh(z) * torch.sigmoid(r) + z,
        operands=(r,),
        reduce="sum",
    ),
    "pointwise": lambda x, w, b, r: cutfuse.pointwise(lambda z, b: torch.tanh(z) * b, r, b),
    "reduce": lambda x, w, b, r: cutfuse.reduce(r, 0, prologue=torch.tanh),
    **{
        f"linear {op}": lambda x, w, b, r, op=op: cutfuse.linear(x, w, b, epilogue=torch.tanh, reduce=op)
        for op in REDUCTIONS
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_graphs_capture_on_a_side_stream(name: str) -> None:
    call, inputs = CALLS[name], make_inputs()
    graph, y = captured(lambda: call(*inputs))
    for _ in range(3):
        for t, fresh in zip(inputs, make_inputs(), strict=True):
            t.copy_(fresh)
        y.zero_()
        graph.replay()
        assert torch.equal(y, call(*inputs))


@pytest.mark.parametrize("name", CALLS)
def test_side_streams_are_respected(name: str) -> None:
    """Inputs appear late on a side stream: a launch on any other stream reads them too early."""
    call, inputs = CALLS[name], make_inputs()
    expected = call(*inputs)
    late = [torch.zeros_like(t) for t in inputs]
    call(*late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for t, source in zip(late, inputs, strict=True):
            t.copy_(source)
        actual = call(*late)
    stream.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_another_device_than_the_current_one(name: str) -> None:
    call, inputs = CALLS[name], make_inputs()
    expected = call(*inputs)
    with torch.cuda.device(0):
        actual = call(*(t.to("cuda:1") for t in inputs))
        assert torch.cuda.current_device() == 0
    assert actual.device == torch.device("cuda", 1)
    assert torch.equal(actual.cpu(), expected.cpu())


def allocated_by(call: Callable[[], Tensor]) -> int:
    """Bytes at the peak beyond what was there, the result included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("rows", [1024, 4096])
def test_linear_sigmoid_sum_never_makes_a_large_matrix(rows: int) -> None:
    columns, depth = 32768, 1024
    module = cutfuse.nn.LinearSigmoidSum(depth, columns).to(DEVICE, torch.bfloat16)
    x = torch.randn(rows, depth, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        assert allocated_by(lambda: module(x)) <= 0.02 * rows * columns * 2


def test_unfused_epilogues_allocate_the_result_only() -> None:
    x, w, b, _ = make_inputs(1024, 4097, 63, torch.bfloat16)
    matrix = 1024 * 4097 * 2
    assert allocated_by(lambda: cutfuse.linear(x, w, b, epilogue=torch.tanh)) <= matrix + MiB


def test_reductions_allocate_little() -> None:
    x = torch.randn(8192, 8192, device=DEVICE)
    for dim in (0, 1):
        assert allocated_by(lambda d=dim: cutfuse.reduce(x, d)) <= 8 * MiB


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_compiles_to_one_graph(name: str, backend: str) -> None:
    """Inductor is given PyTorch's operations of so small a layer, which round z to its type."""
    torch._dynamo.reset()
    call, inputs = CALLS[name], make_inputs()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    expected = call(*inputs)
    rounding = torch.finfo(expected.dtype).eps / 16 * float(expected.abs().max())
    torch.testing.assert_close(compiled(*inputs), expected, rtol=2e-2, atol=rounding)
    leaves = [t.clone().requires_grad_() for t in inputs]
    kwargs = {"allow_unused": True, "materialize_grads": True}
    actual = torch.autograd.grad(compiled(*leaves).float().sum(), leaves, **kwargs)
    expected = torch.autograd.grad(call(*leaves).float().sum(), leaves, **kwargs)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("sizes", "stays"), [((8192, 4096, 4096), True), ((96, 1024, 16384), False), ((197, 1536, 384), True)]
)
def test_compiled_code_has_the_faster_one(sizes: tuple[int, int, int], stays: bool) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    m, n, k = sizes
    x, w, b, _ = make_inputs(m, n, k, torch.bfloat16)
    compiled = torch.compile(lambda x, w, b: cutfuse.linear(x, w * 0.1, b, epilogue=torch.tanh), fullgraph=True)
    with torch.no_grad():
        y, (code,) = run_and_get_code(compiled, x, w, b)
    assert ("torch.ops.cutfuse.on_cuda.linear(" in code) == stays
    torch.testing.assert_close(y, torch.tanh(F.linear(x, w * 0.1, b)), rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_training_is_the_compilers() -> None:
    from torch._inductor.utils import run_fw_bw_and_get_code

    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in make_inputs(dtype=torch.bfloat16)[:3]]

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = cutfuse.linear(x, w, b, epilogue=torch.tanh)
        return cutfuse.pointwise(torch.sigmoid, y).sum()

    compiled = torch.compile(call, fullgraph=True)
    _, codes = run_fw_bw_and_get_code(lambda: compiled(*leaves))
    assert len(codes) == 2
    assert not any("torch.ops.cutfuse" in code for code in codes)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # PyTorch's own, while it imports Inductor
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "fn",
    [lambda z: F.relu(z) ** 2, lambda z: torch.exp(z / 20), F.softplus, torch.log1p, F.gelu, lambda z: F.relu(z) + 1],
    ids=["squared relu", "exp", "softplus", "log1p", "gelu", "relu"],
)
def test_what_autocast_computes_in_fp32_does_not_overflow(fn: Callable, is_compiled: bool) -> None:
    torch._dynamo.reset()
    x, w = torch.full((64, 64), 2.5, device="cuda"), torch.full((64, 64), 2.0, device="cuda")  # z is 320
    call = torch.compile(cutfuse.linear) if is_compiled else cutfuse.linear
    with torch.autocast("cuda", torch.float16):
        expected, actual = fn(F.linear(x, w)), call(x, w, epilogue=fn)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)  # of the same type too


def test_nothing_warns_and_nothing_synchronises() -> None:
    x, w, b, r = make_inputs()
    for call in CALLS.values():
        call(x, w, b, r)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for call in CALLS.values():
                call(x, w, b, r)
    finally:
        torch.cuda.set_sync_debug_mode("default")
