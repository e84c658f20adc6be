"""`cutfuse.linear` on a GPU: every op, epilogue, reduction and type, aligned and ragged, against fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from generators import (
    EPILOGUES,
    FLOATS,
    LAYOUTS,
    REDUCTIONS,
    assert_linear,
    assert_no_worse,
    eager_linear,
    make_inputs,
    operands_for,
    slack_for,
    to_double,
)
from torch import Tensor

import cutfuse
from cutfuse import matrix_vector
from cutfuse.epilogue.table import CONDITION, Op, op_table

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
# Rows, columns, depth: single rows, whole tiles, one more than a tile, strides that are no multiple of 16 bytes.
SHAPES = (
    (1, 8, 8),
    (1, 4096, 1024),
    (7, 64, 64),
    (128, 256, 128),
    (129, 264, 72),
    (300, 520, 264),
    (513, 1000, 336),
    (4096, 128, 64),
    (77, 131, 61),
    (33, 257, 1023),
)
PRECISIONS = {
    "float32 highest": torch.float32,
    "float32 high": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@pytest.fixture(params=PRECISIONS)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Each type, fp32 with both settings of PyTorch's own precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "float32 high" else "highest")
    yield PRECISIONS[request.param]
    torch.set_float32_matmul_precision(before)


def make_exact_inputs(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Matrices whose product, halves from -16 to 16, is exact in every type."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (rows, 32), device=DEVICE)
    weight = torch.randint(-1, 2, (columns, 32), device=DEVICE) / 2
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("shape", [(130, 264), (33, 131)], ids=["aligned", "ragged"])
@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op(op: Op, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = make_exact_inputs(*shape, dtype)
    operands = [t.abs() + 0.25 for t in operands_for(3, *shape, dtype, DEVICE)[1 : op.arity]]

    def epilogue(z: Tensor, *rest: Tensor) -> Tensor:
        first = z > 1 if op.tensors[0] == CONDITION else z
        return op.compose([first, *rest], [default for _, default in op.parameters]) * 1.0

    traced = cutfuse.Epilogue(epilogue, len(operands))  # recognised by its expression: the op is an object of Python's
    actual = cutfuse.linear(x, weight, epilogue=traced, operands=operands)
    eager = eager_linear(x, weight, None, epilogue, operands).to(dtype)
    exact = eager_linear(*to_double(x, weight, None), epilogue, to_double(*operands)).double()
    # NaN and infinities have to be the same; approximations of functions are allowed two more units of fp32
    assert_no_worse(actual, eager, exact, slack=1.0 if dtype != torch.float32 else 3.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_epilogue(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    epilogue, count = EPILOGUES[name]
    rows, columns, _ = shape
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    operands = operands_for(count, rows, columns, dtype, DEVICE)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
    assert_linear(actual, x, weight, bias, epilogue, operands, slack=slack_for(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["sigmoid", "residual"])
def test_every_reduction(name: str, reduction: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    epilogue, count = EPILOGUES[name]
    rows, columns, _ = shape
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    operands = operands_for(count, rows, columns, dtype, DEVICE)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    assert_linear(actual, x, weight, bias, epilogue, operands, reduction, slack_for(dtype))
    again = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    assert torch.equal(actual, again)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)  # one number's error would be chance
def test_matrix_vector_form(
    shape: tuple[int, int, int], reduction: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
    x, weight, bias = make_inputs(*shape, dtype, DEVICE)
    row, column = torch.rand_like(bias) + 0.5, torch.rand(shape[0], 1, dtype=dtype, device=DEVICE) + 0.5
    for epilogue, operands in ((lambda z: z / 2 * 1.5, ()), (lambda z, r, c: z * r / c + r, (row, column))):
        assert cutfuse.explain(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction).path == (
            "matrix-vector"
        )
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
        assert_linear(actual, x, weight, bias, epilogue, operands, reduction, slack_for(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_any_strides(layout: str, reduction: str | None, dtype: torch.dtype) -> None:
    make = LAYOUTS[layout]
    x, weight, bias = make_inputs(129, 264, 72, dtype, DEVICE)
    residual = torch.randn(129, 264, dtype=dtype, device=DEVICE)
    epilogue = EPILOGUES["residual"][0]
    actual = cutfuse.linear(
        make(x), make(weight), bias[::1], epilogue=epilogue, operands=(make(residual),), reduce=reduction
    )
    assert_linear(actual, x, weight, bias, epilogue, [residual], reduction, slack_for(dtype))


def test_expanded_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(1, 64, dtype=dtype, device=DEVICE).expand(100, 64)
    weight = torch.randn(128, 1, dtype=dtype, device=DEVICE).expand(128, 64) / 8
    bias = torch.randn(1, dtype=dtype, device=DEVICE).expand(128)
    residual = torch.randn(1, dtype=dtype, device=DEVICE).expand(100, 128)
    epilogue = EPILOGUES["residual"][0]
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(residual,))
    assert_linear(actual, x, weight, bias, epilogue, [residual], slack=slack_for(dtype))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3, 5), (1, 1)], ids=str)
def test_leading_dimensions(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    _, weight, bias = make_inputs(1, 136, 64, dtype, DEVICE)
    x = torch.randn(*leading, 64, dtype=dtype, device=DEVICE)
    column = torch.randn(*leading, 1, dtype=dtype, device=DEVICE)
    epilogue = EPILOGUES["two_operands"][0]
    for reduction in (None, "amax"):
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(column, bias), reduce=reduction)
        assert_linear(actual, x, weight, bias, epilogue, (column, bias), reduction, slack_for(dtype))


def test_operands_of_every_type(dtype: torch.dtype) -> None:
    x, weight, bias = make_inputs(129, 264, 72, dtype, DEVICE)
    mask = torch.rand(129, 264, device=DEVICE) > 0.5
    others = [torch.randn(264, dtype=other, device=DEVICE) for other in FLOATS]

    def epilogue(z: Tensor, m: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.where(m, z * a, b) + c

    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(mask, *others))
    assert actual.dtype == torch.float32
    assert_linear(actual, x, weight, bias, epilogue, (mask, *others), slack=slack_for(dtype))


def test_scalars_on_either_device(dtype: torch.dtype) -> None:
    x, weight, bias = make_inputs(64, 128, 64, dtype, DEVICE)
    expected = eager_linear(x, weight, bias, lambda z, s: torch.tanh(z) * s, (0.5,))
    for scalar in (0.5, torch.tensor(0.5), torch.tensor(0.5, device=DEVICE), torch.tensor(0.5, dtype=torch.float64)):
        actual = cutfuse.linear(x, weight, bias, epilogue=lambda z, s: torch.tanh(z) * s, operands=(scalar,))
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [None, "sum", "logsumexp"])
def test_out_dtype(out_dtype: torch.dtype, reduction: str | None, dtype: torch.dtype) -> None:
    x, weight, bias = make_inputs(129, 264, 72, dtype, DEVICE)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.tanh, reduce=reduction, out_dtype=out_dtype)
    assert_linear(actual, x, weight, bias, torch.tanh, (), reduction, slack_for(dtype), out_dtype)


@pytest.mark.general_path("tensors are empty")
@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 64, 64), (64, 0, 64), (64, 64, 0), (0, 0, 0)])
@pytest.mark.parametrize("reduction", [None, "sum", "mean", "logsumexp"])
def test_empty_dimensions(rows: int, columns: int, depth: int, reduction: str | None, dtype: torch.dtype) -> None:
    x = torch.randn(rows, depth, dtype=dtype, device=DEVICE)
    weight = torch.randn(columns, depth, dtype=dtype, device=DEVICE)
    bias = torch.randn(columns, dtype=dtype, device=DEVICE)
    for epilogue in (torch.sigmoid, lambda z: z / 2 + 1):
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, reduce=reduction)
        expected = eager_linear(x, weight, bias, epilogue, (), reduction)
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-2, atol=1e-2)


def test_special_values(dtype: torch.dtype) -> None:
    x = torch.eye(64, dtype=dtype, device=DEVICE)
    weight = torch.randn(128, 64, dtype=dtype, device=DEVICE)
    weight[3, 5], weight[4, 6], weight[5, 7] = float("nan"), float("inf"), float("-inf")
    for epilogue in (torch.relu, torch.sigmoid, lambda z: z.clamp(-1, 1), lambda z: torch.maximum(z, z * 0)):
        expected = eager_linear(x, weight, None, epilogue, ())
        actual = cutfuse.linear(x, weight, epilogue=epilogue)
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=2e-2, atol=2e-2)
        for reduction in REDUCTIONS:
            reduced = cutfuse.linear(x, weight, epilogue=epilogue, reduce=reduction)
            wanted = eager_linear(x, weight, None, epilogue, (), reduction)
            assert torch.equal(reduced.isfinite(), wanted.isfinite())
            assert torch.equal(reduced.isnan(), wanted.isnan())


def test_fp32_follows_pytorchs_setting() -> None:
    x, weight, bias = make_inputs(256, 512, 1024, torch.float32, DEVICE)
    exact = eager_linear(*to_double(x, weight, bias), torch.tanh, ())
    errors = {}
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            actual = cutfuse.linear(x, weight, bias, epilogue=torch.tanh)
            errors[precision] = ((actual - exact).norm() / exact.norm()).item()
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-6 < 5e-5 < errors["high"] < 2e-3


def test_double_is_composed() -> None:
    x, weight, bias = make_inputs(33, 47, 65, torch.float64, DEVICE)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.tanh, reduce="sum")
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, torch.tanh, (), "sum"), rtol=1e-12, atol=1e-12)
    assert cutfuse.explain(x, weight, bias, epilogue=torch.tanh).path == "composed"


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_more_than_2_31_results(reduction: str | None) -> None:
    """4.3 GB of results in bf16."""
    rows, columns, depth = 65544, 32776, 16
    x, weight, bias = make_inputs(rows, columns, depth, torch.bfloat16, DEVICE)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduction)
    for part in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
        assert_linear(actual[part], x[part], weight, bias, torch.sigmoid, (), reduction, slack=1.1)


def test_more_than_2_31_inputs() -> None:
    """4.3 GB of x in bf16."""
    rows, columns, depth = 2**20 + 8, 8, 2056
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(columns, depth, dtype=torch.bfloat16, device=DEVICE) / 45
    for epilogue in (torch.sigmoid, lambda z: z / 2):
        actual = cutfuse.linear(x, weight, epilogue=epilogue, reduce="sum")
        part = slice(rows - 8, rows)
        assert_linear(actual[part], x[part], weight, None, epilogue, (), "sum", slack=1.1)
