"""Products whose rows do not begin at multiples of 16 bytes, by kernels that need that, on a GPU.

Each kernel is forced, and calls have plans that copy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_products import arguments_of, dtype_of, out_dtype_of, placed, reduction_of, run_plan
from generators import EPILOGUES, assert_no_worse, eager_linear, make_inputs, slack_for, to_double
from gpu_tensors import DEVICE, captured, randn
from poison import poison
from test_gpu_layouts import assert_right, operands_of
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = pytest.mark.gpu
PLANES_AND_CORES = ("_split", "_convert", "_fp32_", "_joined_")
KERNELS = [name for name in native.module().gemm_kernels() if not any(part in name for part in PLANES_AND_CORES)]
# Rows, columns, depth: less than a vector, sizes of DLRM and MLP-Mixer, and more tiles than a GPU has multiprocessors.
SHAPES = ((2, 2, 3), (77, 13, 196), (131, 196, 13), (200, 333, 479), (2551, 4203, 61))


def padded(values: Tensor) -> Tensor:
    """With zeros behind rows and columns, up to multiples of 16 elements."""
    rows, columns = values.shape
    return F.pad(values, (0, -columns % 16, 0, -rows % 16))


def run(kernel: str, arguments: LinearArguments, mode: str = "now") -> Any:
    with cutfuse.specialization(mode), cutfuse.precision("tf32"):
        return run_plan(plan_linear(arguments, "tf32", only=kernel), arguments)


@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (1, 3), (8, 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str, shape: tuple[int, int, int], offset: int, gap: int) -> None:
    """Interpreted and compiled epilogues give the same bits, and what PyTorch does in fp64."""
    rows, columns, _ = shape
    dtype = dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    epilogue, count = EPILOGUES["gelu_gate"]
    operands = operands_of(count, rows, columns, dtype)
    reduction, out_dtype = reduction_of(kernel), out_dtype_of(kernel)
    given = arguments_of(
        placed(x, kernel, False, offset, gap),
        placed(weight, kernel, True, offset, gap),
        reduction,
        bias=placed(bias[None], "", False, offset, gap)[0],
        operands=operands,
        program=Epilogue(epilogue, count).program,
        out_dtype=out_dtype,
    )
    poison()
    interpreted = run(kernel, given, "off")
    poison()
    compiled = run(kernel, given)
    assert torch.equal(interpreted, compiled)
    assert interpreted.is_contiguous()
    if reduction == "none" and dtype != torch.float32 and out_dtype == dtype:
        assert_right(interpreted, x, weight, bias, epilogue, operands)
        return
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands))
    exact = exact if reduction == "none" else exact.sum(-1)
    scale = exact.abs().max().item()
    torch.testing.assert_close(interpreted.double(), exact, rtol=0.0, atol=2e-2 * max(scale, 1.0))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if "_rows_" not in name])
def test_the_same_bits_as_of_padded_matrices(kernel: str, shape: tuple[int, int, int]) -> None:
    x, weight, _ = make_inputs(*shape, dtype_of(kernel), DEVICE)
    options = {"program": Epilogue(torch.tanh).program, "out_dtype": out_dtype_of(kernel)}
    y, expected = (
        run(kernel, arguments_of(placed(given[0], kernel, False), placed(given[1], kernel, True), **options))
        for given in ((x, weight), (padded(x), padded(weight)))
    )
    assert torch.equal(y, expected[: shape[0], : shape[1]])


@pytest.mark.parametrize("shape", [(77, 1, 196), (1, 77, 13), (4096, 1, 479)], ids=str)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if "_tf32_" not in name and "_f32_" not in name])
def test_single_rows_and_columns(kernel: str, shape: tuple[int, int, int]) -> None:
    if any(part in kernel for part in ("_rows_", "_nn_", "_tn_")):
        pytest.skip("a single row or column is read by rows")
    x, weight, bias = make_inputs(*shape, dtype_of(kernel), DEVICE)
    rows = placed(x, kernel, False, gap=3), placed(weight, kernel, True, gap=5)
    given = arguments_of(*rows, bias=bias, program=Epilogue(torch.tanh).program)
    poison()
    assert_right(run(kernel, given), x, weight, bias, torch.tanh, ())


# Calls

CALLS = ((65536, 512, 13), (65536, 1024, 479), (65536, 196, 384), (4096, 2050, 1025), (2048, 50257, 768))


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    poison()
    y = cutfuse.linear(x, weight, bias, epilogue=torch.relu)
    rows = slice(None) if x.dim() > 2 else torch.randint(0, x.shape[0], (256,), device=DEVICE)
    eager = torch.relu(F.linear(x[rows], weight, bias))
    exact = torch.relu(F.linear(*to_double(x[rows], weight, bias)))
    assert_no_worse(y[rows], eager, exact, slack=slack_for(y.dtype))
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", CALLS, ids=str)
def test_calls(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    steps = cutfuse.explain(x, weight, bias, epilogue=torch.relu).steps
    assert "with the copies" in steps[0], steps
    for _ in range(2):  # the second call runs the first one's plan
        check(x, weight, bias)


def test_views_and_leading_dimensions() -> None:
    weight, bias = randn(1030, 2049, dtype=torch.bfloat16, seed=1), randn(2060, dtype=torch.bfloat16, seed=2)[::2]
    check(randn(4096, 2050, dtype=torch.bfloat16)[:, 1:], weight, bias)
    check(randn(8, 256, 2049, dtype=torch.bfloat16), weight, bias)
    check(randn(4096, 2049, dtype=torch.bfloat16), weight.t().contiguous().t(), None)


def test_a_graph_replays_the_copies() -> None:
    x, weight, bias = make_inputs(4096, 2050, 1025, torch.bfloat16, DEVICE)
    with cutfuse.specialization("now"):
        graph, y = captured(lambda: cutfuse.linear(x, weight, bias, epilogue=torch.relu))
        x.copy_(randn(4096, 1025, dtype=torch.bfloat16, seed=3))
        graph.replay()
        assert torch.equal(y, cutfuse.linear(x, weight, bias, epilogue=torch.relu))


@pytest.mark.parametrize("shape", [(4096, 4088, 2049), (4096, 4090, 2048)], ids=str)
def test_gradients(shape: tuple[int, int, int]) -> None:
    x, weight, bias = (t.requires_grad_() for t in make_inputs(*shape, torch.bfloat16, DEVICE))
    grad = randn(*shape[:2], dtype=torch.bfloat16, seed=4)
    double = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.autograd.grad(F.gelu(F.linear(*double)), double, grad.double())
    eager = torch.autograd.grad(F.gelu(F.linear(x, weight, bias)), (x, weight, bias), grad)
    for _ in range(2):
        poison()
        found = torch.autograd.grad(cutfuse.linear(x, weight, bias, epilogue=F.gelu), (x, weight, bias), grad)
        for own, other, right in zip(found, eager, exact, strict=True):
            assert own.stride() == other.stride()
            assert_no_worse(own, other, right, slack=slack_for(own.dtype))
