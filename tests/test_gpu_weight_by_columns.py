"""The kernels that read a 16-bit weight by its columns, on a GPU: each of them forced, against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_products import run_plan
from generators import EPILOGUES, assert_no_worse, eager_linear, make_inputs, slack_for, to_double
from gpu_tensors import DEVICE, guarded_results, randn
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.planner import LinearArguments, plan_linear

pytestmark = pytest.mark.gpu
launches_plans = pytest.mark.no_path("it launches plans, and calls no public function")

KERNELS = [name for name in native.module().gemm_kernels() if "_nn_" in name and "_fp32_" not in name]
DTYPES = (torch.bfloat16, torch.float16)
# Rows, columns, depth: one row, whole tiles, one vector more than a tile, K shorter than a stage and no whole stages,
# a deep K, and more tiles than a GPU has multiprocessors.
SHAPES = (
    (1, 8, 8),
    (7, 64, 64),
    (128, 256, 128),
    (129, 264, 72),
    (200, 328, 136),
    (513, 1000, 336),
    (65, 520, 4104),
    (4200, 2552, 136),
)


def by_columns(weight: Tensor, gap: int = 0) -> Tensor:
    """The same values, with a stride of 1 between rows; `gap` elements of NaN follow each column."""
    n, k = weight.shape
    stored = weight.new_full((k, n + gap), torch.nan)
    stored[:, :n] = weight.t()
    return stored[:, :n].t()


def dtype_of(kernel: str) -> torch.dtype:
    return torch.bfloat16 if "_bf16_" in kernel else torch.float16


def operands_of(count: int, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """A full matrix, a row, a column and a scalar, in this order."""
    shapes = ((rows, columns), (1, columns), (rows, 1), (1, 1))
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes[:count])]


@pytest.fixture
def results() -> Iterator[list[Tensor]]:
    """Of `guarded_results`."""
    with guarded_results() as found:
        yield found


def run(kernel: str, arguments: LinearArguments, mode: str = "now") -> Any:
    with cutfuse.specialization(mode):
        return run_plan(plan_linear(arguments, "tf32", only=kernel), arguments)


def assert_right(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epilogue: Callable[..., Tensor],
    operands: Sequence[Tensor],
) -> None:
    eager = eager_linear(x, weight, bias, epilogue, operands)
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands))
    assert_no_worse(y, eager, exact, slack=slack_for(y.dtype))


@launches_plans
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str, name: str, shape: tuple[int, int, int], results: list[Tensor]) -> None:
    """Interpreted and compiled epilogues give the same bits, and both what PyTorch does in fp64."""
    (epilogue, count), (rows, columns, _), dtype = EPILOGUES[name], shape, dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    operands = operands_of(count, rows, columns, dtype)
    program = Epilogue(epilogue, count).program
    arguments = LinearArguments(x, by_columns(weight), bias, operands, program, "none", dtype)
    interpreted, compiled = (run(kernel, arguments, mode) for mode in ("off", "now"))
    assert torch.equal(interpreted.view(torch.int16), compiled.view(torch.int16))
    assert len(results) == 2
    assert_right(interpreted, x, weight, bias, epilogue, operands)


@launches_plans
@pytest.mark.parametrize("gap", [8, 24])
@pytest.mark.parametrize("kernel", KERNELS)
def test_columns_with_gaps(kernel: str, gap: int, results: list[Tensor]) -> None:
    """What lies between the columns is not read; neither is a bias that is not there."""
    dtype = dtype_of(kernel)
    x, weight, _ = make_inputs(200, 328, 136, dtype, DEVICE)
    pitched = by_columns(weight, gap)
    assert pitched.stride() == (1, 328 + gap)
    arguments = LinearArguments(x, pitched, None, (), Epilogue(F.gelu).program, "none", dtype)
    assert_right(run(kernel, arguments), x, weight, None, F.gelu, ())


@launches_plans
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_same_bits_as_of_a_weight_by_rows(kernel: str, shape: tuple[int, int, int], results: list[Tensor]) -> None:
    """Products of the same elements are added in the same order, whichever way they lie in shared memory."""
    dtype = dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    program = Epilogue(torch.tanh).program
    y = run(kernel, LinearArguments(x, by_columns(weight), bias, (), program, "none", dtype))
    expected = run(kernel.replace("_nn_", "_"), LinearArguments(x, weight, bias, (), program, "none", dtype))
    assert torch.equal(y, expected)


@launches_plans
@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_pre_activation_is_stored(
    kernel: str, shape: tuple[int, int, int], mode: str, results: list[Tensor]
) -> None:
    dtype = dtype_of(kernel)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    given = LinearArguments(x, by_columns(weight), bias, (), Epilogue(F.gelu).program, "none", dtype)
    y, z = run(kernel, given._replace(stores_pre_activation=True), mode)
    assert torch.equal(y, run(kernel, given, mode))
    assert_right(z, x, weight, bias, lambda z: z, ())


@launches_plans
@pytest.mark.parametrize("kernel", KERNELS)
def test_special_values(kernel: str, results: list[Tensor]) -> None:
    dtype = dtype_of(kernel)
    x = torch.eye(64, dtype=dtype, device=DEVICE)
    weight = randn(136, 64, dtype=dtype)
    weight[3, 5], weight[4, 6], weight[5, 7] = torch.nan, torch.inf, -torch.inf
    arguments = LinearArguments(x, by_columns(weight), None, (), Epilogue(torch.sigmoid).program, "none", dtype)
    torch.testing.assert_close(
        run(kernel, arguments), torch.sigmoid(F.linear(x, weight)), equal_nan=True, rtol=2e-2, atol=2e-2
    )


@pytest.mark.no_path("a compiled model calls operators")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_compiled_model(dtype: torch.dtype) -> None:
    """The layers of GPT-2, whose weights are [K, N]."""
    x, w = randn(1024, 8192, dtype=dtype), randn(8192, 8192, dtype=dtype) / 64
    bias = randn(8192, dtype=dtype, seed=1)

    def model(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return F.relu(torch.addmm(bias, x, w))

    with torch.no_grad():
        (product,) = cutfuse.explain_model(model, x, w, bias).products
        assert product.is_fused, product.reason
        torch._dynamo.reset()
        y = torch.compile(model, backend="cutfuse")(x, w, bias)
        assert_right(y, x, w.t(), bias, F.relu, ())
