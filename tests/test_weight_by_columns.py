"""16-bit weights [N, K] with contiguous columns, as `x @ w` and `torch.addmm` give them: plans, and calls by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import direct_calls, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from fused_products import run_plan
from plan_cases import contiguous, plan, products, transposed
from test_training_pre_activation import gated
from test_training_pre_activation import one_kernel as one_kernel
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments, plan_linear

HALVES = {"bfloat16": "bf16", "float16": "f16"}
TILES = ("128x256x64_2x1_cooperative", "128x128x64_2x1_pingpong", "64x128x64_1x1_pingpong")
SQUARE = 1024, 4096, 4096
COLUMNS = transposed(4096, 4096)
COMPILED = {"epilogue_cost": 0.5, "specialized_cost": 0.5}


def kernels_of(found: Any) -> dict[str, Any]:
    return {kernel.name: kernel for kernel in found.alternatives[:-1]}


# Plans


@pytest.mark.parametrize(("dtype", "short"), HALVES.items())
def test_each_layout_has_kernels_of_its_own(dtype: str, short: str) -> None:
    by_columns = kernels_of(plan(*SQUARE, dtype=dtype, weight=COLUMNS))
    assert set(by_columns) == {f"sm90_{short}_nn_{tile}" for tile in TILES}
    assert not any(kernel.rejection for kernel in by_columns.values())
    assert not any("_nn_" in name for name in kernels_of(plan(*SQUARE, dtype=dtype)))


def test_the_fastest_is_chosen_and_compared_with_cublas() -> None:
    large, small = (1024, 8192, 8192), (64, 64, 64)
    found = plan(*large, weight=transposed(8192, 8192), **COMPILED)
    assert found.alternatives[found.chosen].name == "sm90_bf16_nn_128x256x64_2x1_cooperative"
    found = plan(*small, weight=transposed(64, 64))
    assert found.alternatives[found.chosen].name == "sm90_bf16_nn_64x128x64_1x1_pingpong"
    assert not plan(4096, 4096, 1024, weight=transposed(4096, 1024)).is_fused


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("pitch", [4096, 4104])
def test_the_kernel_is_told_the_columns_pitch(tile: str, pitch: int) -> None:
    weight = (4096, 1024, 1, pitch, True)
    (product,) = products(plan(200, 4096, 1024, weight=weight, only=f"sm90_bf16_nn_{tile}"))
    assert (product.problem.ldb, product.problem.lda) == (pitch, 1024)
    assert product.problem.reads_columns_of_weight
    assert repr(product.problem).endswith("weight by columns")
    (product,) = products(plan(200, 4096, 1024, only=f"sm90_bf16_{tile}"))
    assert not product.problem.reads_columns_of_weight
    assert "columns" not in repr(product.problem)


@pytest.mark.parametrize(
    ("weight", "reads_columns"),
    [
        (contiguous(64, 64), False),
        ((64, 64, 1, 1, True), False),  # rows that overlap
        ((1, 64, 1, 1, True), False),
        ((64, 1, 1, 64, True), False),  # one column has rows of one element
        ((64, 1, 64, 64, True), False),
        ((64, 64, 1, 64, True), True),
        ((64, 64, 1, 72, True), True),
        ((1, 64, 1, 64, True), True),
        ((1, 64, 5, 64, True), True),  # one row has no stride
    ],
)
def test_which_lines_are_read(weight: tuple[int, int, int, int, bool], reads_columns: bool) -> None:
    """Rows where both are contiguous, because more kernels read these."""
    n, k = weight[:2]
    found = plan(64, n, k, weight=weight)
    assert found.ruled_out == ""
    assert all(("_nn_" in name) == reads_columns for name in kernels_of(found))


ROWS_NEEDED = "weight has strides (1, 4096): its rows are not contiguous, as kernels "


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"reduction": "sum"}, ROWS_NEEDED + "that reduce rows need them"),
        ({"output": "float32"}, ROWS_NEEDED + "that store another type than they read need them"),
        ({"output": "float16"}, ROWS_NEEDED + "that store another type than they read need them"),
        ({"dtype": "float32", "precision": "tf32"}, ROWS_NEEDED + "of float32 operands need them"),
        (
            {"weight": (4096, 4096, 1, 4095, True)},
            "weight has strides (1, 4095): neither its rows nor its columns are contiguous",
        ),
        (
            {"weight": (4096, 4096, 1, 0, True)},
            "weight has strides (1, 0): neither its rows nor its columns are contiguous",
        ),
    ],
)
def test_what_rules_these_weights_out(options: dict[str, Any], reason: str) -> None:
    found = plan(*SQUARE, **{"weight": COLUMNS, **options})
    assert found.ruled_out == reason
    assert not found.is_fused


# Calls, on CPU memory in the place of a GPU's


def stored_by_columns(n: int, k: int, dtype: torch.dtype, pitch: int = 0) -> Tensor:
    """[N, K], with a stride of 1 between rows and `pitch` or N between columns."""
    stored = torch.randn(k, max(pitch, n)) * k**-0.5
    return stored.to(dtype)[:, :n].t()


def scaled(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) * 0.5 + r


@pytest.mark.parametrize("pitch", [0, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_direct_call_reads_the_columns(launches: EmulatedLaunches, dtype: torch.dtype, pitch: int) -> None:
    weight = stored_by_columns(24, 16, dtype, pitch)
    x, bias, r = (torch.randn(shape).to(dtype) for shape in ((37, 16), (24,), (37, 24)))

    def call() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=scaled, operands=[r])

    call()
    before = direct_calls()
    launches.launches.clear()
    y = call()
    assert direct_calls() == before + 1
    (gemm,) = launches.launches
    assert "_nn_" in gemm.kernel
    assert (gemm.b, gemm.problem.ldb) == (weight.data_ptr(), pitch or 24)
    expected = scaled(F.linear(x.double(), weight.double(), bias.double()), r.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_plan_launches_each_kernel(launches: EmulatedLaunches, dtype: torch.dtype, tile: str) -> None:
    weight = stored_by_columns(24, 16, dtype)
    x, r = torch.randn(37, 16).to(dtype), torch.randn(37, 24).to(dtype)
    given = LinearArguments(x, weight, None, [r], Epilogue(scaled, 1).program, "none", dtype, True)
    name = f"sm90_{'bf16' if dtype is torch.bfloat16 else 'f16'}_nn_{tile}"
    y, z = run_plan(plan_linear(given, "tf32", only=name), given)
    assert [launch.kernel for launch in launches.launches] == [name]
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(z.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(y.double(), scaled(expected, r.double()), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_training_step_reads_the_columns(launches: EmulatedLaunches, dtype: torch.dtype) -> None:
    m, n, k = 37, 24, 16
    weight = stored_by_columns(n, k, dtype)
    tensors = [torch.randn(m, k).to(dtype), weight, torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)]
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    grad = torch.randn(m, n).to(dtype)

    def step() -> list[Tensor]:
        x, w, bias, r = tensors
        y = cutfuse.linear(x, w, bias, epilogue=gated, operands=[r])
        return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

    with paused():
        expected = step()
    step()
    launches.launches.clear()
    found = step()
    gemm = launches.launches[0]
    assert "_nn_" in gemm.kernel
    assert gemm.pre_activation
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y.float(), wanted.float(), rtol=6e-2, atol=6e-2)


def test_explain_names_the_kernel_and_what_rules_it_out(launches: EmulatedLaunches) -> None:
    x, weight = torch.randn(37, 16).bfloat16(), stored_by_columns(24, 16, torch.bfloat16)
    assert "sm90_bf16_nn_64x128x64" in str(cutfuse.explain(x, weight, epilogue=torch.sigmoid))
    reduced = cutfuse.explain(x, weight, epilogue=torch.sigmoid, reduce="amax")
    assert "as kernels that reduce rows need them" in str(reduced)
