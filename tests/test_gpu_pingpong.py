"""The pingpong kernels where both warpgroups are in their epilogues at once, as these take longer than main loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.linear_launch import launch_fused
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = [pytest.mark.gpu, pytest.mark.no_path("launches plans, and calls no public function")]

KERNELS = [name for name in native.module().gemm_kernels() if name.endswith("_pingpong") and "_joined_" not in name]
# Five tiles of 128x128 for each of 132 multiprocessors, ragged in M and N; K is shorter than the epilogue.
SIZES = 4200, 2552, 136
RUNS = 4


def slow(z: Tensor, row: Tensor, column: Tensor, full: Tensor) -> Tensor:
    value = torch.tanh(z * row) + torch.sigmoid(z + column)
    for _ in range(3):
        value = torch.nn.functional.gelu(value) * 1.25 + full
    return value


def arguments_for(name: str) -> LinearArguments:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[name.split("_")[1]]
    m, n, k = SIZES
    x, weight, bias, row, column, full = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (n, k), (n,), (1, n), (m, 1), (m, n))
    )
    if "_nn_" in name or "_tn_" in name:
        weight = weight.t().contiguous().t()
    if "_tn_" in name:
        x = x.t().contiguous().t()
    out_dtype = torch.float32 if "_f32_" in name else dtype
    reduction = "sum" if "_rows_" in name else "none"
    program = Epilogue(slow, 3).program
    return LinearArguments(x, weight * k**-0.5, bias, (row, column, full), program, reduction, out_dtype)


def expected_of(arguments: LinearArguments) -> Tensor:
    x, weight, bias = (arguments.x.double(), arguments.weight.double(), arguments.bias.double())
    y = slow(torch.addmm(bias, x, weight.t()), *(operand.double() for operand in arguments.operands))
    return y.sum(1) if arguments.reduction == "sum" else y


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("name", KERNELS)
def test_epilogues_that_run_beside_each_other(name: str, mode: str) -> None:
    torch.manual_seed(0)
    arguments = arguments_for(name)
    with cutfuse.specialization(mode):
        plan = plan_linear(arguments, "tf32", only=name)
        results = [launch_fused(plan, arguments) for _ in range(RUNS)]
    for later in results[1:]:
        assert torch.equal(results[0], later)
    expected = expected_of(arguments)
    error = ((results[0].double() - expected).norm() / expected.norm()).item()
    assert error < {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-3}[arguments.x.dtype]


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_a_warpgroup_without_a_tile(name: str, tiles: int) -> None:
    """Fewer tiles than twice the multiprocessors: some blocks have one warpgroup with one tile, and one with none."""
    torch.manual_seed(0)
    whole = arguments_for(name)
    rows = 128 * tiles - (8 if "_tn_" in name else 5)  # which are copied in whole vectors where x lies by columns
    row, column, full = whole.operands
    part = whole._replace(x=whole.x[:rows], operands=(row, column[:rows], full[:rows]))
    with cutfuse.specialization("now"):
        got = launch_fused(plan_linear(part, "tf32", only=name), part)
        expected = launch_fused(plan_linear(whole, "tf32", only=name), whole)
    assert torch.equal(got, expected[:rows])
