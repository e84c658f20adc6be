"""Gradients: of the composed operations, and of the operators' own autograd with their CPU implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from generators import EPILOGUES, FLOATS, REDUCTIONS, assert_no_worse, eager_linear, eager_reduce, operands_for
from hypothesis import given
from hypothesis import strategies as st
from test_epilogue_language import StraightThrough, gate
from torch import Tensor

import cutfuse
from cutfuse.native import use_operators_everywhere


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def make_inputs(dtype: torch.dtype, count: int, rows: int = 6, columns: int = 5, depth: int = 7) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, depth), (columns, depth), (columns,))
    return [torch.randn(shape, dtype=dtype) for shape in shapes] + operands_for(count, rows, columns, dtype)


@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_of_linear(name: str, reduction: str | None, path: str) -> None:
    epilogue, count = EPILOGUES[name]
    inputs = leaves(*make_inputs(torch.float64, count))
    x, weight, bias, *operands = inputs
    actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    expected = eager_linear(x, weight, bias, epilogue, operands, reduction)
    grad = torch.randn_like(expected)
    kwargs = {"allow_unused": True, "materialize_grads": True}
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, grad, **kwargs), torch.autograd.grad(expected, inputs, grad, **kwargs)
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
def test_error_of_gradients_is_at_most_eager_pytorchs(reduction: str | None, dtype: torch.dtype, path: str) -> None:
    epilogue, count = EPILOGUES["gelu_gate"]
    inputs = make_inputs(dtype, count, 33, 48, 64)
    results = []
    for function, cast in ((cutfuse.linear, None), (None, None), (None, torch.float64)):
        x, weight, bias, *operands = own = leaves(*(t if cast is None else t.to(cast) for t in inputs))
        if function is None:
            y = eager_linear(x, weight, bias, epilogue, operands, reduction)
        else:
            y = function(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
        torch.manual_seed(1)
        grad = torch.randn(y.shape, dtype=dtype)
        results.append(torch.autograd.grad(y, own, grad.to(y.dtype)))
    for actual, eager, exact in zip(*results, strict=True):
        assert actual.dtype == eager.dtype
        # amax picks another of two maxima that are equal in bf16 only: allow for it
        assert_no_worse(actual, eager, exact, slack=1.5 if reduction in ("amax", "amin") else 1.1)


@pytest.mark.parametrize("dim", [0, 1, 2, (0, 2), None])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradients_of_reduce(op: str, dim, path: str) -> None:
    x, row, column = leaves(*(torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (5,), (4, 1))))

    def prologue(z: Tensor, r: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(z) * r + c

    actual = cutfuse.reduce(x, dim, op, prologue=prologue, operands=(row, column))
    expected = eager_reduce(prologue(x, row, column), (0, 1, 2) if dim is None else dim, op)
    grad = torch.randn_like(expected)
    inputs = (x, row, column)
    torch.testing.assert_close(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("op", ["amax", "amin"])
def test_ties_share_the_gradient_evenly(op: str, path: str) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, -1.0]], requires_grad=True)
    for dim in (0, 1, (0, 1)):
        actual = cutfuse.reduce(x, dim, op, prologue=lambda z: z * 2)
        expected = eager_reduce(x * 2, dim, op)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, x, grad))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_special_values_in_gradients_as_in_pytorch(op: str, path: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1.0, nan], [1.0, inf], [1.0, -inf], [-inf, -inf], [inf, inf]])
    for x in (rows.requires_grad_(), rows.detach()[:, 1:].requires_grad_()):
        actual = cutfuse.reduce(x, 1, op, prologue=lambda z: z * 2)
        expected = eager_reduce(x * 2, 1, op)
        grad = torch.ones_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, x, grad), equal_nan=True
        )


@given(needs=st.lists(st.booleans(), min_size=5, max_size=5), reduction=st.sampled_from([None, "sum", "amax"]))
def test_only_what_is_needed_gets_a_gradient(needs: list[bool], reduction: str | None) -> None:
    epilogue, _ = EPILOGUES["two_operands"]
    tensors = make_inputs(torch.float64, 2)
    inputs = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    x, weight, bias, *operands = inputs
    with use_operators_everywhere():
        actual = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
    assert actual.requires_grad is any(needs)
    if not any(needs):
        return
    expected = eager_linear(x, weight, bias, epilogue, operands, reduction)
    wanted = [t for t in inputs if t.requires_grad]
    grad = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(actual, wanted, grad), torch.autograd.grad(expected, wanted, grad))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: cutfuse.linear(x, torch.ones(5, 7), epilogue=torch.sigmoid),
        lambda x: cutfuse.linear(x, torch.ones(5, 7), epilogue=torch.sigmoid, reduce="logsumexp"),
        lambda x: cutfuse.linear(x, torch.ones(5, 7), epilogue=lambda z: z / 2, reduce="sum"),
        lambda x: cutfuse.pointwise(torch.sigmoid, x),
        lambda x: cutfuse.reduce(x, 0, "amax"),
    ],
)
def test_nothing_is_kept_without_gradients(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, 7, requires_grad=True)
    with use_operators_everywhere():
        with torch.no_grad():
            assert not call(x).requires_grad
        with torch.inference_mode():
            assert call(x).is_inference()
        assert call(x).requires_grad


@pytest.mark.parametrize(
    ("call", "reference"),
    [
        (lambda x: cutfuse.pointwise(torch.sigmoid, x), torch.sigmoid),
        (lambda x: cutfuse.reduce(x, 1, "logsumexp"), lambda x: x.logsumexp(1)),
        (lambda x: cutfuse.linear(x, x, epilogue=torch.tanh), lambda x: torch.tanh(x @ x.t())),
        (
            lambda x: cutfuse.linear(x, x, x[0], epilogue=torch.tanh, reduce="mean"),
            lambda x: torch.tanh(x @ x.t() + x[0]).mean(1),
        ),
        (
            lambda x: cutfuse.linear(x, x, epilogue=lambda z, r: z * r, operands=(x[0],), reduce="sum"),
            lambda x: (x @ x.t() * x[0]).sum(1),
        ),
    ],
)
def test_second_derivatives(call, reference, path: str) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(reference(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_empty_inputs_have_empty_or_zero_gradients(path: str) -> None:
    for rows, columns, depth in ((0, 5, 7), (6, 0, 7), (6, 5, 0)):
        inputs = leaves(*make_inputs(torch.float32, 0, rows, columns, depth))
        for reduction in (None, "sum", "logsumexp"):
            y = cutfuse.linear(*inputs, epilogue=torch.sigmoid, reduce=reduction)
            expected = eager_linear(*inputs, torch.sigmoid, (), reduction)
            grad = torch.ones_like(y)
            torch.testing.assert_close(
                torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad)
            )


def test_a_training_step_moves_the_parameters_as_eager_does(path: str) -> None:
    modules = []
    for home in (cutfuse.models, cutfuse.nn):
        torch.manual_seed(0)
        module = home.LinearSigmoidSum(16, 24)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            module(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
        modules.append(module)
    torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("epilogue", [torch.relu, lambda z: z.clamp(0, 1), lambda z: torch.relu(z) * 0.5])
def test_a_mask_hides_an_infinite_gradient(epilogue: Callable[[Tensor], Tensor], dtype: torch.dtype, path: str) -> None:
    """Every sum is 0, where its square root has an infinite derivative. No value is 0, which clamp does not mask."""
    positive = (torch.rand(rows, 8, dtype=dtype) + 0.5 for rows in (6, 4))
    x, weight, bias = leaves(-next(positive), next(positive), torch.zeros(4, dtype=dtype))
    for y in (
        cutfuse.linear(x, weight, bias, epilogue=epilogue, reduce="sum"),
        cutfuse.reduce(x, 1, "sum", prologue=epilogue),
        cutfuse.pointwise(epilogue, x),
    ):
        gradients = torch.autograd.grad(y.sqrt().sum(), [x, weight, bias], allow_unused=True, materialize_grads=True)
        assert all(gradient.eq(0).all() for gradient in gradients)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("fn", [lambda z: StraightThrough.apply(torch.tanh(z)), lambda z: z * gate(z)])
def test_a_layer_runs_unfused_where_the_formula_has_another_gradient(
    fn: Callable[[Tensor], Tensor], is_compiled: bool
) -> None:
    torch._dynamo.reset()
    layer = cutfuse.nn.FusedLinear(8, 3, epilogue=fn)
    call = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    x = torch.randn(4, 8)
    expected = fn(torch.nn.functional.linear(x, layer.weight, layer.bias))
    with pytest.warns(UserWarning, match="unfused"):
        actual = call(x)
    torch.testing.assert_close(actual, expected)
    (gradient,), (reference,) = (torch.autograd.grad(y.sum(), layer.weight) for y in (actual, expected))
    torch.testing.assert_close(gradient, reference)
