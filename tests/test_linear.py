"""`cutfuse.linear` on a CPU and on a GPU: values against fp64, operands, shapes and types."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.nn.functional as F
from generators import (
    EPILOGUES,
    FLOATS,
    GPU_WAYS,
    LAYOUTS,
    REDUCTIONS,
    Way,
    assert_linear,
    assert_no_worse,
    eager_linear,
    make_inputs,
    operands_for,
    slack_for,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse import matrix_vector
from cutfuse.epilogue.table import CONDITION, Op, op_table
from cutfuse.native import use_operators_everywhere

# Rows, columns, depth: on a GPU single rows, whole tiles, one more than a tile, strides that are no multiple of 16 B.
SHAPES = {
    "cpu": ((33, 47, 65), (17, 130, 64)),
    "cuda": (
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
    ),
}
ALIGNED = {"cpu": (33, 48, 64), "cuda": (129, 264, 72)}


@pytest.mark.parametrize("name", EPILOGUES)
def test_error_is_at_most_eager_pytorchs(name: str, way: Way) -> None:
    epilogue, count = EPILOGUES[name]
    for shape in SHAPES[way.device]:
        x, weight, bias = make_inputs(*shape, way.dtype, way.device)
        operands = operands_for(count, *shape[:2], way.dtype, way.device)
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        assert_linear(actual, x, weight, bias, epilogue, operands, slack=slack_for(way.dtype))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["sigmoid", "residual"])
def test_error_of_reductions_is_at_most_eager_pytorchs(name: str, reduction: str, way: Way) -> None:
    epilogue, count = EPILOGUES[name]
    for shape in SHAPES[way.device]:
        x, weight, bias = make_inputs(*shape, way.dtype, way.device)
        operands = operands_for(count, *shape[:2], way.dtype, way.device)
        actual, again = (
            cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction) for _ in range(2)
        )
        assert_linear(actual, x, weight, bias, epilogue, operands, reduction, slack_for(way.dtype))
        assert torch.equal(actual, again)


@st.composite
def _problems(draw: st.DrawFn) -> dict:
    leading = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    columns, depth = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    full = (*leading, columns)
    shapes = []
    for _ in range(draw(st.integers(0, 4))):
        kept = draw(st.integers(0, len(full)))
        shape = tuple(1 if draw(st.booleans()) else size for size in full[len(full) - kept :])
        shapes.append(draw(st.sampled_from([shape, full, (columns,), ()])))
    reduction = draw(st.sampled_from([None, "sum", "mean", "logsumexp"]))
    return {
        "leading": leading,
        "columns": columns,
        "depth": depth,
        "operands": shapes,
        "reduce": reduction,
        "keepdim": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "affine": draw(st.booleans()),
        "operators": draw(st.booleans()),
    }


@given(_problems())
def test_any_shapes(problem: dict) -> None:
    torch.manual_seed(0)
    x = torch.randn(*problem["leading"], problem["depth"], dtype=torch.float64)
    weight = torch.randn(problem["columns"], problem["depth"], dtype=torch.float64)
    bias = torch.randn(problem["columns"], dtype=torch.float64) if problem["bias"] else None
    operands = [torch.randn(shape, dtype=torch.float64) for shape in problem["operands"]]

    def epilogue(z: Tensor, *others: Tensor) -> Tensor:
        y = z * 2 + 1 if problem["affine"] else torch.tanh(z)
        for k, other in enumerate(others):
            y = y * other if k % 2 else y - other
        return y

    reduce, keepdim = problem["reduce"], problem["keepdim"]  # which has no effect without a reduction
    with use_operators_everywhere() if problem["operators"] else contextlib.nullcontext():
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduce, keepdim=keepdim)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands, reduce, keepdim))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_any_strides(layout: str, reduction: str | None, way: Way) -> None:
    make = LAYOUTS[layout]
    shape = ALIGNED[way.device]
    x, weight, bias = make_inputs(*shape, way.dtype, way.device)
    (residual,) = operands_for(1, *shape[:2], way.dtype, way.device)
    epilogue = EPILOGUES["residual"][0]
    given = {"epilogue": epilogue, "operands": (make(residual),), "reduce": reduction}
    actual = cutfuse.linear(make(x), make(weight), bias[::1], **given)
    assert_linear(actual, x, weight, bias, epilogue, [residual], reduction, slack_for(way.dtype))


def test_expanded_inputs(way: Way) -> None:
    given = {"dtype": way.dtype, "device": way.device}
    x, weight = torch.randn(1, 64, **given).expand(100, 64), torch.randn(128, 1, **given).expand(128, 64) / 8
    bias, residual = torch.randn(1, **given).expand(128), torch.randn(1, **given).expand(100, 128)
    epilogue = EPILOGUES["residual"][0]
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(residual,))
    assert_linear(actual, x, weight, bias, epilogue, [residual], slack=slack_for(way.dtype))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 64, 64), (64, 0, 64), (64, 64, 0), (0, 0, 0)])
@pytest.mark.parametrize("reduction", [None, "sum", "mean", "logsumexp"])
def test_empty_dimensions(rows: int, columns: int, depth: int, reduction: str | None, way: Way) -> None:
    x, weight, bias = make_inputs(rows, columns, depth, way.dtype, way.device)
    for epilogue in (torch.sigmoid, lambda z: z / 2 + 1):
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, reduce=reduction)
        expected = eager_linear(x, weight, bias, epilogue, (), reduction)
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-2, atol=1e-2)


def test_maximum_of_nothing_is_an_error_as_in_pytorch(path: str) -> None:
    x, weight, _ = make_inputs(6, 0, 7, torch.float32)
    with pytest.raises(IndexError, match="non-zero size"):
        cutfuse.linear(x, weight, epilogue=torch.sigmoid, reduce="amax")


def test_numbers_as_operands(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    residual = torch.randn(6, 5)

    def epilogue(z, scale, r, power, slope):
        return F.leaky_relu(z, slope) ** power * scale + r

    operands = (0.5, residual, 2, torch.tensor(0.1))
    with pytest.raises(cutfuse.EpilogueError):  # a parameter of an op has to be a number
        cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
    operands = (0.5, residual, 2, 0.1)
    for scale in (0.5, 0.25):  # a second value is a second program
        operands = (scale, *operands[1:])
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands))


def test_zeros_of_both_signs_are_different_numbers(path: str) -> None:
    x, weight = torch.ones(1, 1), torch.ones(1, 1)
    for zero in (0.0, -0.0):
        for epilogue in (lambda z, s: z / s, cutfuse.Epilogue(lambda z, s: z / s)):
            actual = cutfuse.linear(x, weight, epilogue=epilogue, operands=(zero,))
            torch.testing.assert_close(actual, torch.tensor([[1.0]]) / zero)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("number", [1e300, -1e300])
def test_numbers_beyond_fp32_are_infinities(number: float, is_compiled: bool, path: str) -> None:
    """As in PyTorch, which rounds a number to the type that it computes in."""
    x, w = torch.randn(3, 4), torch.randn(5, 4)

    def epilogue(z: Tensor, r: float) -> Tensor:
        return torch.add(z, r, alpha=2) * torch.sigmoid(z)

    def layer() -> Tensor:
        return cutfuse.linear(x, w, epilogue=epilogue, operands=(number,))

    y = torch.compile(layer, backend="eager", fullgraph=True)() if is_compiled else layer()
    assert torch.equal(y, epilogue(F.linear(x, w), number))
    assert y.isinf().all()


def test_prebuilt_epilogue_with_numbers(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    residual = torch.randn(6, 5)
    epilogue = cutfuse.Epilogue(lambda z, s, r: torch.relu(z) * s + r)
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(0.5, residual))
    torch.testing.assert_close(actual, torch.relu(F.linear(x, weight, bias)) * 0.5 + residual)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", [None, "sum", "amax"])
def test_out_dtype_is_one_rounding(out_dtype: torch.dtype, reduction: str | None, path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.bfloat16)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.exp, reduce=reduction, out_dtype=out_dtype)
    expected = torch.exp(F.linear(x, weight, bias).float())
    expected = expected if reduction is None else getattr(torch, reduction)(expected, dim=-1)
    torch.testing.assert_close(actual, expected.to(out_dtype))


def test_without_epilogue_it_is_a_linear_layer(path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    torch.testing.assert_close(cutfuse.linear(x, weight, bias), F.linear(x, weight, bias), rtol=0, atol=0)
    torch.testing.assert_close(cutfuse.linear(x, weight, reduce="amax"), F.linear(x, weight).amax(-1))
    doubled = cutfuse.linear(x, weight, bias, out_dtype=torch.float64)
    torch.testing.assert_close(doubled, F.linear(x, weight, bias).double())


def test_special_values(way: Way) -> None:
    x = torch.eye(64, dtype=way.dtype, device=way.device)
    weight = torch.randn(128, 64, dtype=way.dtype, device=way.device)
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


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_autocast(reduction: str | None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
    x, weight, bias = make_inputs(6, 5, 7, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager = eager_linear(x, weight, bias, torch.sigmoid, (), reduction)
        actual = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduction)
        plain = cutfuse.linear(x, weight, bias)
        affine = cutfuse.linear(x, weight, bias, epilogue=lambda z, a: z * a, operands=(bias,), reduce="sum")
    assert actual.dtype == plain.dtype == torch.bfloat16
    assert affine.dtype == torch.float32
    assert_no_worse(actual, eager, eager_linear(*to_double(x, weight, bias), torch.sigmoid, (), reduction))
    rounded = [t.bfloat16() for t in (x, weight, bias)]
    exact = (F.linear(*to_double(*rounded)) * bias.double()).sum(-1)
    torch.testing.assert_close(affine.double(), exact, rtol=1e-5, atol=1e-5)


def test_scalars_on_either_device(way: Way) -> None:
    x, weight, bias = make_inputs(64, 128, 64, way.dtype, way.device)
    expected = eager_linear(x, weight, bias, lambda z, s: torch.tanh(z) * s, (0.5,))
    for scalar in (
        0.5,
        torch.tensor(0.5),
        torch.tensor(0.5, device=way.device),
        torch.tensor(0.5, dtype=torch.float64),
    ):
        actual = cutfuse.linear(x, weight, bias, epilogue=lambda z, s: torch.tanh(z) * s, operands=(scalar,))
        assert actual.dtype == way.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [None, "sum", "logsumexp"])
def test_out_dtype(out_dtype: torch.dtype, reduction: str | None, way: Way) -> None:
    x, weight, bias = make_inputs(*ALIGNED[way.device], way.dtype, way.device)
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.tanh, reduce=reduction, out_dtype=out_dtype)
    assert_linear(actual, x, weight, bias, torch.tanh, (), reduction, slack_for(way.dtype), out_dtype)


def make_exact_inputs(rows: int, columns: int, way: Way) -> tuple[Tensor, Tensor]:
    """Matrices whose product, halves from -16 to 16, is exact in every type."""
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (rows, 32), device=way.device)
    weight = torch.randint(-1, 2, (columns, 32), device=way.device) / 2
    return x.to(way.dtype), weight.to(way.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS, indirect=True)
@pytest.mark.parametrize("shape", [(130, 264), (33, 131)], ids=["aligned", "ragged"])
@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op(op: Op, shape: tuple[int, int], way: Way) -> None:
    x, weight = make_exact_inputs(*shape, way)
    operands = [t.abs() + 0.25 for t in operands_for(3, *shape, way.dtype, way.device)[1 : op.arity]]

    def epilogue(z: Tensor, *rest: Tensor) -> Tensor:
        first = z > 1 if op.tensors[0] == CONDITION else z
        return op.compose([first, *rest], [default for _, default in op.parameters]) * 1.0

    traced = cutfuse.Epilogue(epilogue, len(operands))  # recognised by its expression: the op is an object of Python's
    actual = cutfuse.linear(x, weight, epilogue=traced, operands=operands)
    eager = eager_linear(x, weight, None, epilogue, operands).to(way.dtype)
    exact = eager_linear(*to_double(x, weight, None), epilogue, to_double(*operands)).double()
    # NaN and infinities have to be the same; approximations of functions are allowed two more units of fp32
    assert_no_worse(actual, eager, exact, slack=1.0 if way.dtype != torch.float32 else 3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_more_than_2_31_results(reduction: str | None) -> None:
    """4.3 GB of results in bf16."""
    rows, columns, depth = 65544, 32776, 16
    x, weight, bias = make_inputs(rows, columns, depth, torch.bfloat16, "cuda")
    actual = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce=reduction)
    for part in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
        assert_linear(actual[part], x[part], weight, bias, torch.sigmoid, (), reduction, slack=1.1)


@pytest.mark.gpu
def test_more_than_2_31_inputs() -> None:
    """4.3 GB of x in bf16."""
    rows, columns, depth = 2**20 + 8, 8, 2056
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(columns, depth, dtype=torch.bfloat16, device="cuda") / 45
    for epilogue in (torch.sigmoid, lambda z: z / 2):
        actual = cutfuse.linear(x, weight, epilogue=epilogue, reduce="sum")
        part = slice(rows - 8, rows)
        assert_linear(actual[part], x[part], weight, None, epilogue, (), "sum", slack=1.1)


# The matrix-vector form of affine epilogues followed by a sum or mean over N, on the CPU.


AFFINE = {
    "scale": (lambda z: z / 2 * 1.5, ()),
    "shift": (lambda z: 3 - z, ()),
    "negative": (lambda z: -(z + 1) * 0.25, ()),
    "row": (lambda z, r: z * r, ((5,),)),
    "column": (lambda z, c: z / c + c, ((6, 1),)),
    "scalar": (lambda z, s: s * z - s, ((),)),
    "row_and_column": (lambda z, r, c: -(c * z) / r, ((5,), (6, 1))),
    "factored": (lambda z, r, c: z * (r * r / c) + r, ((5,), (6, 1))),
    "quotient": (lambda z, r, c: z / (r * 2 * c), ((5,), (6, 1))),
    "residual": (lambda z, r: z * 0.5 + r, ((6, 5),)),
    "gated_residual": (lambda z, r, c: z * c + r * c, ((6, 5), (6, 1))),
    "partly_cancelled": (lambda z: z - z / 4, ()),
    "constant_of_a_type": (lambda z: z * (torch.ones_like(z) * 3) - torch.full_like(z, 2) / 4, ()),
}


def refuse(*_: object) -> None:
    raise AssertionError("the matrix product was computed")


@pytest.fixture
def no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the matrix product an error, however small it is."""
    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
    monkeypatch.setattr(F, "linear", refuse)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", AFFINE)
def test_affine_sums_need_no_product(name: str, with_bias: bool, reduction: str, path: str, no_product: None) -> None:
    epilogue, shapes = AFFINE[name]
    x, weight, bias = make_inputs(6, 5, 7, torch.float64)
    bias = bias if with_bias else None
    operands = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in shapes]
    leaves = [t.requires_grad_() for t in (x, weight, bias, *operands) if t is not None]
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    z = x @ weight.t() if bias is None else x @ weight.t() + bias
    expected = getattr(torch, reduction)(epilogue(z, *operands), dim=-1)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(expected)
    actual_grads = torch.autograd.grad(actual, leaves, grad, allow_unused=True, materialize_grads=True)
    expected_grads = torch.autograd.grad(expected, leaves, grad, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(actual_grads, expected_grads)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_error_of_the_matrix_vector_form(reduction: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
    for shape in SHAPES[way.device][1:]:  # one number's error would be chance
        x, weight, bias = make_inputs(*shape, way.dtype, way.device)
        row, column = torch.rand_like(bias) + 0.5, torch.rand(shape[0], 1, dtype=way.dtype, device=way.device) + 0.5
        for epilogue, operands in ((lambda z: z / 2 * 1.5, ()), (lambda z, r, c: z * r / c + r, (row, column))):
            given = {"epilogue": epilogue, "operands": operands, "reduce": reduction}
            assert cutfuse.explain(x, weight, bias, **given).path == "matrix-vector"
            actual = cutfuse.linear(x, weight, bias, **given)
            assert_linear(actual, x, weight, bias, epilogue, operands, reduction, slack_for(way.dtype))


@pytest.mark.parametrize(
    ("epilogue", "shapes", "reduction"),
    [
        (lambda z, r: z * r, ((6, 5),), "sum"),
        (lambda z, r, c: z * (r + c), ((5,), (6, 1)), "sum"),
        (lambda z: z * z, (), "sum"),
        (torch.abs, (), "mean"),
        (lambda z: z * 2, (), "amax"),
        (lambda z: 2 / z, (), "sum"),
    ],
)
def test_what_is_not_affine_keeps_the_product(epilogue, shapes, reduction, path: str) -> None:
    x, weight, bias = make_inputs(6, 5, 7, torch.float64)
    operands = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in shapes]
    call = cutfuse.explain(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    assert call.path != "matrix-vector"
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    torch.testing.assert_close(actual, eager_linear(x, weight, bias, epilogue, operands, reduction))


def test_an_epilogue_that_does_not_read_z_is_not_zero_times_it(path: str) -> None:
    x, w, r = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]]), torch.randn(2, 2), torch.randn(2)
    y = cutfuse.linear(x, w, epilogue=lambda z, r: r + r, operands=(r,), reduce="sum")
    torch.testing.assert_close(y, (r + r).sum().expand(2))


def test_a_slope_of_shared_values_is_split_at_once(path: str, no_product: None) -> None:
    """As a tree the slope has 2 ** 29 leaves, which would take hours."""

    def epilogue(z: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        slope = r * c
        for _ in range(28):
            slope = slope * slope
        return z * slope

    x, weight, bias = make_inputs(6, 5, 7, torch.float64)
    start = time.perf_counter()
    y = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(torch.ones(5), -torch.ones(6, 1)), reduce="sum")
    assert time.perf_counter() - start < 1
    torch.testing.assert_close(y, (x @ weight.t() + bias).sum(1))


def test_a_scale_beyond_fp64_keeps_the_product(path: str) -> None:
    """The numbers overflow by themselves: (1e200 r)(1e200 c) is finite where r and c are small."""

    def epilogue(z: torch.Tensor, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return z * ((r * c * 1e200) * (r * c * 1e200))

    x, weight, _ = make_inputs(6, 5, 7, torch.float64)
    operands = (torch.full((5,), 1e-100, dtype=torch.float64), torch.full((6, 1), 1e-100, dtype=torch.float64))
    actual = cutfuse.linear(x, weight, epilogue=epilogue, operands=operands, reduce="sum")
    torch.testing.assert_close(actual, (x @ weight.t()).sum(1))


@pytest.mark.parametrize("number", [1e30, 1e-30])
def test_a_scale_beyond_fp32_keeps_the_product(number: float, path: str) -> None:
    """As above, in fp32: z is the reciprocal of the number, so that what is summed is finite, and not 0."""

    def epilogue(z: torch.Tensor) -> torch.Tensor:
        return z * number * number

    x, weight = torch.rand(6, 7) / number, torch.rand(5, 7)
    actual = cutfuse.linear(x, weight, epilogue=epilogue, reduce="sum")
    torch.testing.assert_close(actual / number, epilogue(x @ weight.t()).sum(1) / number)


def test_gradients_of_the_matrix_vector_form_are_no_products(monkeypatch: pytest.MonkeyPatch, no_product: None) -> None:
    monkeypatch.setattr(torch, "mm", refuse)
    monkeypatch.setattr(torch, "mv", refuse)
    x, weight = torch.randn(6, 7, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    with use_operators_everywhere():
        y = cutfuse.linear(x, weight, epilogue=lambda z: z / 2, reduce="sum")
    grad = torch.randn(6)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(grad_x, grad[:, None] * weight.sum(0) / 2)
    torch.testing.assert_close(grad_weight, (grad @ x / 2).expand(5, 7))
    assert grad_weight.stride(0) == 0  # one row, spread


def test_what_does_not_come_from_z_is_summed_in_fp64_too(path: str) -> None:
    x, w, b = (t.double() for t in make_inputs(6, 5, 4, torch.float32)[:3])
    mask = torch.tensor([True, False, True, True, False])
    column = torch.linspace(0.1, 1.1, 6, dtype=torch.float16).unsqueeze(1)

    def epilogue(z: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return z + torch.tan(m.double() + c)

    expected = epilogue(F.linear(x, w, b), mask, column).mean(-1)
    y = cutfuse.linear(x, w, b, epilogue=epilogue, operands=(mask, column), reduce="mean")
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
