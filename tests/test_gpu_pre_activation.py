"""Fused kernels that store the pre-activation beside the result, and training steps by them, on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_tensors import DEVICE, randn
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue, Program
from cutfuse.layer.linear_launch import launch_fused
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = pytest.mark.gpu
launches_a_plan = pytest.mark.no_path("launches plans, and calls no public function")

IDENTITY = Program((), 0)
CHAIN = Epilogue(lambda z, r: torch.tanh(z) * r + torch.sigmoid(z)).program
GELU = Epilogue(F.gelu).program
# Tiles across the end, columns that end within a subtile, fewer rows than one fragment has, and several tiles a block.
SHAPES = ((200, 328, 136), (1, 8, 16), (65, 264, 256), (13, 40, 1032), (2000, 3080, 128))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


def guarded(memory: Tensor) -> Tensor:
    """Memory of this size between rows that nothing may write to, filled with NaN."""
    whole = torch.full((memory.shape[0] + 2, memory.shape[1]), torch.nan, dtype=memory.dtype, device=DEVICE)
    return whole[1:-1]


def assert_stored(arguments: LinearArguments, kernel: str, precision: str) -> None:
    """The result is that of the same kernel without it, and z that of the same kernel without a program."""
    x, n = arguments.x, arguments.weight.shape[0]
    plan = plan_linear(arguments._replace(stores_pre_activation=True), precision, only=kernel)
    z = guarded(torch.empty((x.shape[0], n), dtype=x.dtype, device=DEVICE))
    y = launch_fused(plan, arguments, pre_activation=z)
    plain = plan_linear(arguments, precision, only=kernel)
    bare = arguments._replace(program=IDENTITY, operands=())
    bare_plan = plan_linear(bare, precision, only=kernel)
    assert [launch.kernel.slices for launch in plan.launches if hasattr(launch, "kernel")] == [
        launch.kernel.slices for launch in plain.launches if hasattr(launch, "kernel")
    ]
    torch.testing.assert_close(y, launch_fused(plain, arguments), rtol=0, atol=0, msg=kernel)
    torch.testing.assert_close(z, launch_fused(bare_plan, bare).to(z.dtype), rtol=0, atol=0, msg=kernel)
    assert z._base is not None
    assert z._base[[0, -1]].isnan().all(), kernel


@launches_a_plan
@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel(dtype: torch.dtype, shape: tuple[int, int, int], mode: str) -> None:
    with cutfuse.specialization(mode):
        for program in (CHAIN, GELU):
            for out_dtype in {dtype, torch.float32}:
                arguments = arguments_of(program, shape, dtype, out_dtype=out_dtype)
                kernels = kernels_of(arguments, "tf32")
                assert kernels or min(shape[:2]) == 1  # tf32 has no kernel for one row
                for kernel in kernels:
                    assert_stored(arguments, kernel, "tf32")


@launches_a_plan
@pytest.mark.parametrize("precision", ["split3", "split6", "guarded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_over_planes(shape: tuple[int, int, int], precision: str) -> None:
    arguments = arguments_of(CHAIN, shape, torch.float32)
    kernels = kernels_of(arguments, precision)
    assert kernels
    for kernel in kernels:
        assert_stored(arguments, kernel, precision)


@launches_a_plan
def test_columns_that_are_no_whole_vectors_are_left_to_cublas() -> None:
    arguments = arguments_of(GELU, (64, 12, 64), torch.bfloat16, out_dtype=torch.float32)
    assert kernels_of(arguments, "tf32")
    assert not kernels_of(arguments._replace(stores_pre_activation=True), "tf32")


def training_tensors(shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    m, n, k = shape
    tensors = [randn(m, k, seed=1), randn(n, k, seed=2) * k**-0.5, randn(n, seed=3)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def gradients(y: Tensor, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, tensors, grad)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_is_the_same_on_both_paths_and_as_accurate_as_eager(dtype: torch.dtype) -> None:
    shape = (4096, 4096, 2048)
    tensors = training_tensors(shape, dtype)
    grad = randn(*shape[:2], dtype=dtype, seed=4)

    def gelu_scaled(z: Tensor) -> Tensor:
        return F.gelu(z) * 0.5 + torch.sigmoid(z)

    with cutfuse.specialization("now"):
        steps = [gradients(cutfuse.linear(*tensors, epilogue=gelu_scaled), tensors, grad) for _ in range(3)]
    for first, *others in zip(*steps, strict=True):  # the first call takes the general path
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = gradients(gelu_scaled(F.linear(*exact_tensors)), exact_tensors, grad.double())
    eager = gradients(gelu_scaled(F.linear(*tensors)), tensors, grad)
    for own, plain, wanted in zip(steps[0], eager, exact, strict=True):
        errors = [(result.double() - wanted).norm() / wanted.norm() for result in (own, plain)]
        assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("first", [8, 4])
def test_an_operand_that_the_copy_engine_cannot_take(first: int) -> None:
    """Its rows lie apart by whole vectors, and begin in the middle of one."""
    m, n, k = 4096, 4096, 2048
    tensors = training_tensors((m, n, k), torch.bfloat16)
    grad, wide = (randn(m, columns, dtype=torch.bfloat16, seed=4) for columns in (n, n + 16))
    r = wide[:, first : first + n]

    def gated(z: Tensor, r: Tensor) -> Tensor:
        return F.gelu(z) * r + torch.sigmoid(z)

    with cutfuse.specialization("now"):
        steps = [gradients(cutfuse.linear(*tensors, epilogue=gated, operands=[r]), tensors, grad) for _ in range(2)]
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = gradients(gated(F.linear(*exact_tensors), r.double()), exact_tensors, grad.double())
    eager = gradients(gated(F.linear(*tensors), r), tensors, grad)
    for *own, plain, wanted in zip(*steps, eager, exact, strict=True):
        *errors, of_eager = ((result.double() - wanted).norm() / wanted.norm() for result in (*own, plain))
        assert max(errors) <= 1.1 * of_eager, (errors, of_eager)


def test_a_captured_step_has_its_epilogues_compiled() -> None:
    """Though a capture follows the first steps at once."""
    tensors = training_tensors((4096, 4096, 2048), torch.bfloat16)
    grad = randn(4096, 4096, dtype=torch.bfloat16, seed=4)

    def step() -> list[Tensor]:
        y = cutfuse.linear(*tensors, epilogue=lambda z: F.gelu(z) * 0.5 + torch.sigmoid(z))
        return gradients(y, tensors, grad)

    native.core.forget_specializations()
    native.core.forget_calls()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    assert cutfuse.wait(0) >= 2
    expected = step()
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, captured, expected))


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
