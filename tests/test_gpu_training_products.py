"""Training steps whose products are all kernels of ours, and the kernels that read x by its columns, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from fused_products import run_plan
from generators import assert_no_worse, make_inputs, slack_for
from gpu_tensors import DEVICE, guarded_results, randn
from test_gpu_layouts import operands_of
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Epilogue, Program
from cutfuse.layer.planner import LinearArguments, plan_linear
from cutfuse.layer.training_step import takes_few_launches

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def residual(z: Tensor, r: Tensor) -> Tensor:
    return z + r


LAYERS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "gelu": (F.gelu, 0),
    "relu": (F.relu, 0),
    "product": (torch.mul, 1),
    "residual": (residual, 1),
    "difference": (torch.sub, 1),
}


# Rows, columns, depth: of 16 bits, and of fp32, whose kernels take sizes that are no whole vectors.
STEPS = [
    ((m, n, k), dtype)
    for m, n, k in ((2, 8, 8), (197, 1536, 384), (1576, 768, 3072), (31, 264, 72))
    for dtype in DTYPES[:2]
]
STEPS += [(shape, torch.float32) for shape in ((2, 8, 8), (197, 1536, 384), (31, 265, 71), (6, 608, 432))]


@pytest.mark.parametrize(("shape", "dtype"), STEPS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
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


IDENTITY = Program((), 0)
CHAIN = Epilogue(lambda z, r: torch.tanh(z) * r + torch.sigmoid(z)).program
GELU = Epilogue(F.gelu).program
# Tiles across the end, columns that end within a subtile, fewer rows than one fragment has, and several tiles a block.
STORED_SHAPES = ((200, 328, 136), (1, 8, 16), (65, 264, 256), (13, 40, 1032), (2000, 3080, 128))


def arguments_of(
    program: Program, shape: tuple[int, int, int], dtype: torch.dtype, **settings: object
) -> LinearArguments:
    m, n, k = shape
    operands = [randn(1, n, dtype=dtype, seed=3)] * program.operand_count
    x, weight, bias = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    return LinearArguments(x, weight, bias, operands, program, "none", settings.pop("out_dtype", dtype), **settings)


def kernels_of(arguments: LinearArguments, precision: str) -> list[str]:
    *kernels, _ = plan_linear(arguments, precision).alternatives
    return [kernel.name for kernel in kernels if not kernel.rejection]


def assert_stored(arguments: LinearArguments, kernel: str, precision: str) -> None:
    """The result is that of the same kernel without it, and z that of the same kernel without a program."""
    storing = arguments._replace(stores_pre_activation=True)
    plan = plan_linear(storing, precision, only=kernel)
    with guarded_results():
        y, z = run_plan(plan, storing)
    plain = plan_linear(arguments, precision, only=kernel)
    bare = arguments._replace(program=IDENTITY, operands=())
    bare_plan = plan_linear(bare, precision, only=kernel)
    assert [launch.kernel.slices for launch in plan.launches if hasattr(launch, "kernel")] == [
        launch.kernel.slices for launch in plain.launches if hasattr(launch, "kernel")
    ]
    torch.testing.assert_close(y, run_plan(plain, arguments), rtol=0, atol=0, msg=kernel)
    torch.testing.assert_close(z, run_plan(bare_plan, bare).to(z.dtype), rtol=0, atol=0, msg=kernel)


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("shape", STORED_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_stores_it(dtype: torch.dtype, shape: tuple[int, int, int], mode: str) -> None:
    with cutfuse.specialization(mode):
        for program in (CHAIN, GELU):
            for out_dtype in {dtype, torch.float32}:
                arguments = arguments_of(program, shape, dtype, out_dtype=out_dtype)
                kernels = kernels_of(arguments, "tf32")
                assert kernels or min(shape[:2]) == 1  # tf32 has no kernel for one row
                for kernel in kernels:
                    assert_stored(arguments, kernel, "tf32")


@pytest.mark.parametrize("precision", ["split3", "split6", "guarded"])
@pytest.mark.parametrize("shape", STORED_SHAPES, ids=str)
def test_products_over_planes(shape: tuple[int, int, int], precision: str) -> None:
    arguments = arguments_of(CHAIN, shape, torch.float32)
    kernels = kernels_of(arguments, precision)
    assert kernels
    for kernel in kernels:
        assert_stored(arguments, kernel, precision)


def training_tensors(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    m, n, k = shape
    tensors = [randn(m, k, seed=1), randn(n, k, seed=2) * k**-0.5, randn(n, seed=3)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def test_a_step_takes_no_more_memory_than_eager() -> None:
    tensors = training_tensors((8192, 4096, 1024), torch.bfloat16)
    peaks = []
    for layer in (lambda: F.gelu(F.linear(*tensors)), lambda: cutfuse.linear(*tensors, epilogue=F.gelu)):
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            y = layer()
            torch.autograd.grad(y, tensors, torch.ones_like(y))
            del y
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] <= 1.01 * peaks[0]
