"""The matrix-vector form of affine epilogues followed by a sum or mean over N, on the CPU."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from generators import FLOATS, assert_no_worse, eager_linear, make_inputs

import cutfuse
from cutfuse import matrix_vector
from cutfuse.native import use_operators_everywhere

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
    """Makes the matrix product an error."""
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_error_of_the_matrix_vector_form(dtype: torch.dtype, path: str, no_product: None) -> None:
    x, weight, bias = make_inputs(33, 257, 130, dtype)

    def epilogue(z):
        return z / 2 * 1.5

    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, reduce="sum", keepdim=True)
    eager = epilogue(x @ weight.t() + bias).sum(-1, keepdim=True)
    exact = epilogue(x.double() @ weight.t().double() + bias.double()).sum(-1, keepdim=True)
    assert actual.dtype == dtype
    assert_no_worse(actual, eager, exact)


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


def test_column_sums_are_never_stale(path: str) -> None:
    torch.manual_seed(0)
    module = cutfuse.nn.GemmDivideSumScale(7, 5, 1.5)
    reference = cutfuse.models.GemmDivideSumScale(7, 5, 1.5)
    x = torch.randn(6, 7)

    def check() -> None:
        reference.weight = torch.nn.Parameter(module.weight.detach().clone())
        torch.testing.assert_close(module(x.to(module.weight.dtype)), reference(x.to(module.weight.dtype)))

    check()
    with torch.no_grad():
        module.weight.add_(1.0)
    check()
    module.load_state_dict({"weight": torch.randn(5, 7)})
    check()
    module.weight.data.mul_(2.0)
    check()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    check()
    module.to(torch.float64)
    check()
    with torch.inference_mode():
        module.weight.mul_(0.5)
        check()


def test_the_parts_of_an_affine_program_are_found_once() -> None:
    x, weight = torch.randn(6, 7), torch.randn(5, 7)
    cutfuse.linear(x, weight, epilogue=lambda z: z / 2, reduce="sum")
    before = matrix_vector._split.cache_info().misses
    cutfuse.linear(x, weight, epilogue=lambda z: z / 2, reduce="sum")
    assert matrix_vector._split.cache_info().misses == before


def test_what_does_not_come_from_z_is_summed_in_fp64_too(path: str) -> None:
    x, w, b = (t.double() for t in make_inputs(6, 5, 4, torch.float32)[:3])
    mask = torch.tensor([True, False, True, True, False])
    column = torch.linspace(0.1, 1.1, 6, dtype=torch.float16).unsqueeze(1)

    def epilogue(z: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return z + torch.tan(m.double() + c)

    expected = epilogue(F.linear(x, w, b), mask, column).mean(-1)
    y = cutfuse.linear(x, w, b, epilogue=epilogue, operands=(mask, column), reduce="mean")
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
