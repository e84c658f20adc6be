"""Weights that a product splits on their way in, on a GPU: the same bits as from planes, with kernels forced."""

from __future__ import annotations

import math

import pytest
import torch
from fused_products import run_plan
from torch import Tensor

from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments, plan_linear
from cutfuse.precision import GUARDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("guarded_products"),
]

MODES = ("split3", "split6", GUARDED)
SIGMOID = Epilogue(torch.sigmoid)


def product(
    x: Tensor, weight: Tensor, mode: str, converts: bool, reduction: str = "none", epilogue: Epilogue = SIGMOID
) -> Tensor:
    """By kernels that split the weight on its way in, or by those that take its planes."""
    if not converts:  # rows that the copy engine does not take
        weight = torch.nn.functional.pad(weight, (0, 1))[:, :-1]
    arguments = LinearArguments(x, weight, None, (), epilogue.program, reduction, torch.float32)
    wanted = "convert" if converts else "split"
    names = [way.name for way in plan_linear(arguments, mode).alternatives if wanted in way.name]
    plan = plan_linear(arguments, mode, only=names[0])
    kernels = [launch.kernel.name for launch in plan.launches if hasattr(launch, "kernel")]
    assert len(kernels) == (2 if mode == GUARDED else 1)
    assert all(("convert" in name) == converts for name in kernels)
    return run_plan(plan, arguments)


def assert_same_bits(x: Tensor, weight: Tensor, mode: str, reduction: str = "none") -> None:
    converted, expected = (product(x, weight, mode, converts, reduction) for converts in (True, False))
    torch.testing.assert_close(converted, expected, rtol=0, atol=0, equal_nan=True)


def random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda")


@pytest.mark.parametrize("reduction", ["none", "logsumexp"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [4, 64, 124, 192, 320])
def test_several_tiles_of_few_steps(k: int, mode: str, reduction: str) -> None:
    """Ragged, and more tiles than multiprocessors: a block goes on with its rings from one tile to the next."""
    x, weight = random(1500, k), random(2100, k)
    assert_same_bits(x, weight, mode, reduction)
    weight[700, k // 2] = math.inf
    assert_same_bits(x, weight, GUARDED, reduction)


@pytest.mark.parametrize("value", [0.0, 2.0**-18, math.inf, -math.inf, math.nan, 2.0**70, 2.0**-140])
@pytest.mark.parametrize("shape", [(130, 260, 1032), (1500, 2100, 192)], ids=str)
def test_what_trips_the_guard(shape: tuple[int, int, int], value: float) -> None:
    """Of one element, of too few, of enough of a block and of too many of all."""
    m, n, k = shape
    for count in (1, 7, 8):
        x, weight = random(m, k), random(n, k)
        weight[37, 64 : 64 + count] = value
        assert_same_bits(x, weight, GUARDED)
    weight[:, ::64] = value
    assert_same_bits(x, weight, GUARDED)


def test_an_infinity_leaves_other_rows_as_they_are() -> None:
    x, weight = random(130, 640), random(260, 640)
    expected = product(x, weight, "split3", converts=True)
    weight[35, 100] = math.inf
    found = product(x, weight, "split3", converts=True)
    others = torch.arange(260, device="cuda") != 35
    assert torch.equal(found[:, others], expected[:, others])


def test_products_of_the_smallest_safe_scales() -> None:
    """Blocks at the end of what the guard leaves to split3, on both sides: scales' products are denormal numbers."""
    x, weight = (torch.sign(random(rows, 1024)) * 2.0**-60 for rows in (128, 512))
    for converts in (True, False):
        found = product(x, weight, GUARDED, converts)
        assert torch.equal(found, product(x, weight, "split3", converts))
    y = product(x, weight, "split3", converts=True, epilogue=Epilogue(lambda z: z))
    assert torch.equal(y.double(), torch.mm(x.double(), weight.double().t()))
