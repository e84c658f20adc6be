"""Training steps whose products are all kernels of ours, and the kernels that read x by its columns, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from generators import EPILOGUES, assert_no_worse, make_inputs, slack_for
from gpu_tensors import DEVICE, randn
from test_gpu_weight_by_columns import DTYPES, assert_right, by_columns, dtype_of, launches_plans, operands_of, run
from test_gpu_weight_by_columns import results as results
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments
from cutfuse.layer.training_step import takes_few_launches

pytestmark = pytest.mark.gpu

KERNELS = [name for name in native.module().gemm_kernels() if "_tn_" in name and "_fp32_" not in name]
# Rows, columns, depth: one vector of rows, a depth of one element more than a stage and of odd numbers, ragged tiles,
# and more tiles than a GPU has multiprocessors.
SHAPES = ((8, 8, 8), (64, 128, 65), (72, 264, 197), (384, 1536, 3), (136, 328, 1576), (2552, 4200, 31))


def identity(z: Tensor) -> Tensor:
    return z


@launches_plans
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["identity", "gelu_gate"])  # gradients, and what the table's other kernels can
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str, name: str, shape: tuple[int, int, int], gap: int, results: list[Tensor]) -> None:
    epilogue, count = (identity, 0) if name == "identity" else EPILOGUES[name]
    (rows, columns, _), dtype = shape, dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    operands = operands_of(count, rows, columns, dtype)
    program = Epilogue(epilogue, count).program
    arguments = LinearArguments(by_columns(x, gap), by_columns(weight, gap), bias, operands, program, "none", dtype)
    interpreted, compiled = (run(kernel, arguments, mode) for mode in ("off", "now"))
    assert torch.equal(interpreted.view(torch.int16), compiled.view(torch.int16))
    assert_right(interpreted, x, weight, bias, epilogue, operands)


@launches_plans
@pytest.mark.parametrize("shape", [(64, 128, 64), (200, 328, 136)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_as_of_rows(kernel: str, shape: tuple[int, int, int], results: list[Tensor]) -> None:
    dtype = dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    program = Epilogue(torch.tanh).program
    y = run(kernel, LinearArguments(by_columns(x), by_columns(weight), bias, (), program, "none", dtype))
    expected = run(kernel.replace("_tn_", "_"), LinearArguments(x, weight, bias, (), program, "none", dtype))
    assert torch.equal(y, expected)


def residual(z: Tensor, r: Tensor) -> Tensor:
    return z + r


LAYERS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "gelu": (F.gelu, 0),
    "relu": (F.relu, 0),
    "product": (torch.mul, 1),
    "residual": (residual, 1),
    "difference": (torch.sub, 1),
}


def check_step(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """As near to fp64 as PyTorch's step, with the same bits in each call."""
    epilogue, count = LAYERS[name]
    tensors = [*make_inputs(*shape, dtype, DEVICE), *operands_of(count, *shape[:2], dtype)]
    grad = randn(*shape[:2], dtype=dtype, seed=4)
    program = Epilogue(epilogue, count).program
    leaves = [t.detach().requires_grad_() for t in tensors]
    arguments = LinearArguments(leaves[0], leaves[1], leaves[2], leaves[3:], program, "none", dtype)
    assert takes_few_launches(arguments)  # which does not ask whether PyTorch keeps less, as of a difference

    def step(given: Sequence[Tensor], layer: Callable[..., Tensor]) -> list[Tensor]:
        trained = [t.detach().requires_grad_() for t in given]
        y = layer(*trained)
        return [y.detach(), *torch.autograd.grad(y, trained, grad.to(y.dtype))]

    def plain(x: Tensor, w: Tensor, b: Tensor, *operands: Tensor) -> Tensor:
        return epilogue(F.linear(x, w, b), *operands)

    def own(x: Tensor, w: Tensor, b: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.linear(x, w, b, epilogue=epilogue, operands=operands)

    with cutfuse.specialization("now"):
        runs = [step(tensors, own) for _ in range(3)]
    eager, exact = step(tensors, plain), step([t.double() for t in tensors], plain)
    for first, again, last, expected, wanted in zip(*runs, eager, exact, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, last)
        assert_no_worse(first, expected, wanted, slack=slack_for(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 8), (197, 1536, 384), (1576, 768, 3072), (31, 264, 72)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_step(name, shape, dtype)


@pytest.mark.no_path("steps of modules on streams, some of them captured")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_a_captured_step() -> None:
    """A graph of forward and backward pass, replayed with other values."""
    torch.manual_seed(0)
    layer = cutfuse.nn.FusedLinear(384, 768, epilogue=F.gelu).cuda().bfloat16()
    x = torch.randn(197, 384, device=DEVICE).bfloat16().requires_grad_()
    grad = torch.randn(197, 768, device=DEVICE).bfloat16()

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    with cutfuse.specialization("now"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            grad.copy_(torch.randn_like(grad))
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            assert torch.equal(found, expected)
