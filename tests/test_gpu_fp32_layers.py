"""The fp32 kernels on CUDA cores, each of them forced, against fp64; and layers that they compute and train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from generators import EPILOGUES, make_inputs
from gpu_tensors import DEVICE
from test_gpu_training_products import LAYERS, check_step, identity
from test_gpu_weight_by_columns import assert_right, by_columns, launches_plans, operands_of
from test_gpu_weight_by_columns import results as results
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.linear_launch import launch_fused, plan_call
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = pytest.mark.gpu

KERNELS = [name for name in native.module().gemm_kernels() if "_fp32_" in name]
# Rows, columns, depth: the least that has columns to read, odd numbers, one element more than a tile and fewer than a
# vector, whole tiles, a depth of many stages, and more tiles than a GPU has multiprocessors.
SHAPES = (
    (2, 2, 2),
    (3, 5, 7),
    (8, 8, 1024),
    (17, 33, 65),
    (64, 64, 64),
    (65, 131, 30),
    (129, 66, 1026),
    (40, 520, 4104),
    (1100, 1400, 100),
)


def placed(matrix: Tensor, kernel: str, offset: int, gap: int, is_weight: bool) -> Tensor:
    """The same values by rows or columns, as the kernel reads them; between the lines, and before the first, is NaN."""
    reads_columns = "_tn_" in kernel or ("_nn_" in kernel and is_weight)
    lines = matrix.t() if reads_columns else matrix
    count, length = lines.shape
    memory = matrix.new_full((offset + count * (length + gap),), torch.nan)
    view = memory.as_strided((count, length), (length + gap, 1), offset)
    view.copy_(lines)
    return view.t() if reads_columns else view


def run(kernel: str, arguments: LinearArguments, mode: str = "now", pre_activation: Tensor | None = None) -> Tensor:
    with cutfuse.specialization(mode):
        plan = plan_linear(arguments, "guarded", only=kernel)
        return launch_fused(plan, arguments, pre_activation=pre_activation)


@launches_plans
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["identity", *EPILOGUES])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str, name: str, shape: tuple[int, int, int], results: list[Tensor]) -> None:
    """Interpreted and compiled epilogues give the same bits, and both what PyTorch does in fp64."""
    epilogue, count = (identity, 0) if name == "identity" else EPILOGUES[name]
    x, weight, bias = make_inputs(*shape, torch.float32, DEVICE)
    operands = operands_of(count, *shape[:2], torch.float32)
    program = Epilogue(epilogue, count).program
    given = placed(x, kernel, 0, 0, is_weight=False), placed(weight, kernel, 0, 0, is_weight=True)
    arguments = LinearArguments(*given, bias, operands, program, "none", torch.float32)
    interpreted, compiled = (run(kernel, arguments, mode) for mode in ("off", "now"))
    assert torch.equal(interpreted.view(torch.int32), compiled.view(torch.int32))
    assert_right(interpreted, x, weight, bias, epilogue, operands)


@launches_plans
@pytest.mark.parametrize(("offset", "gap"), [(1, 0), (4, 4), (0, 3), (2, 1)])
@pytest.mark.parametrize("shape", [(9, 70, 36), (130, 100, 132)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_place_and_pitch(
    kernel: str, shape: tuple[int, int, int], offset: int, gap: int, results: list[Tensor]
) -> None:
    """What lies between the lines is not read; neither is a bias that is not there."""
    x, weight, _ = make_inputs(*shape, torch.float32, DEVICE)
    given = placed(x, kernel, offset, gap, is_weight=False), placed(weight, kernel, offset, gap, is_weight=True)
    arguments = LinearArguments(*given, None, (), Epilogue(F.gelu).program, "none", torch.float32)
    assert_right(run(kernel, arguments), x, weight, None, F.gelu, ())


@launches_plans
@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("shape", [(5, 7, 9), (197, 384, 160)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_pre_activation(kernel: str, shape: tuple[int, int, int], mode: str, results: list[Tensor]) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, DEVICE)
    z = torch.full(shape[:2], torch.nan, device=DEVICE)
    given = placed(x, kernel, 0, 0, is_weight=False), placed(weight, kernel, 0, 0, is_weight=True)
    arguments = LinearArguments(*given, bias, (), Epilogue(F.silu).program, "none", torch.float32)
    y = run(kernel, arguments._replace(stores_pre_activation=True), mode, z)
    assert_right(y, x, weight, bias, F.silu, ())
    assert_right(z, x, weight, bias, identity, ())


@launches_plans
@pytest.mark.parametrize("kernel", KERNELS)
def test_special_values_reach_their_elements_alone(kernel: str, results: list[Tensor]) -> None:
    x, weight, bias = make_inputs(40, 72, 68, torch.float32, DEVICE)
    x[3, 5], x[7, 0], weight[11, 67] = torch.inf, torch.nan, -torch.inf
    given = placed(x, kernel, 0, 0, is_weight=False), placed(weight, kernel, 0, 0, is_weight=True)
    y = run(kernel, LinearArguments(*given, bias, (), Epilogue(identity).program, "none", torch.float32))
    assert torch.equal(y.isfinite(), F.linear(x.double(), weight.double(), bias.double()).isfinite())


@launches_plans
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 40, 72), (40, 1, 72), (9, 20, 1)], ids=str)
def test_single_lines_are_read_by_rows(shape: tuple[int, int, int], results: list[Tensor]) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, DEVICE)
    for kernel in (name for name in KERNELS if "_nn_" not in name and "_tn_" not in name):
        for given in (weight, weight.t().contiguous().t()):
            arguments = LinearArguments(x, given, bias, (), Epilogue(torch.tanh).program, "none", torch.float32)
            if shape[1] == 1 or shape[2] == 1 or given is weight:
                assert_right(run(kernel, arguments), x, weight, bias, torch.tanh, ())


def guarded_call(x: Tensor, weight: Tensor, bias: Tensor) -> LinearArguments:
    return LinearArguments(x, weight, bias, (), Epilogue(F.gelu).program, "none", torch.float32)


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 264, 936), (17, 591, 264), (197, 1536, 384)], ids=str)
def test_small_layers_are_one_kernel(shape: tuple[int, int, int]) -> None:
    x, weight, bias = make_inputs(*shape, torch.float32, DEVICE)
    plan = plan_call(guarded_call(x, weight, bias))
    assert [type(launch).__name__ for launch in plan.launches] == ["FusedProduct"]
    with cutfuse.specialization("now"):
        runs = [cutfuse.linear(x, weight, bias, epilogue=F.gelu) for _ in range(3)]
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    assert_right(runs[0], x, weight, bias, F.gelu, ())


@pytest.mark.parametrize("shape", [(2, 8, 8), (197, 1536, 384), (31, 265, 71), (6, 608, 432)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_step(name: str, shape: tuple[int, int, int]) -> None:
    check_step(name, shape, torch.float32)


@launches_plans
@pytest.mark.parametrize("layout", ["_nn_", "_tn_"])
def test_layouts_agree(layout: str, results: list[Tensor]) -> None:
    """A tile's products are added in the same order however the operands lie."""
    x, weight, bias = make_inputs(200, 328, 136, torch.float32, DEVICE)
    x_given = by_columns(x) if layout == "_tn_" else x
    for kernel in (name for name in KERNELS if layout in name):
        arguments = LinearArguments(x, weight, bias, (), Epilogue(torch.tanh).program, "none", torch.float32)
        expected = run(kernel.replace(layout, "_"), arguments)
        assert torch.equal(run(kernel, arguments._replace(x=x_given, weight=by_columns(weight))), expected)
