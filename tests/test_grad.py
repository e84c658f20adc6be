"""Gradients: of the composed operations, and of the operators' own autograd with their CPU implementations.

Also what is kept for them, of layers that compute their pre-activation again too.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generators import (
    EPILOGUES,
    FLOATS,
    REDUCTIONS,
    assert_no_worse,
    eager_linear,
    eager_reduce,
    operands_for,
    saved_tensors,
)
from hypothesis import given
from hypothesis import strategies as st
from public_calls import CALLS
from torch import Tensor

import cutfuse
from cutfuse.compile.layer import TrainedLayer
from cutfuse.layer import autograd, linear_plan, planner, training_step
from cutfuse.layer.autograd import weight_gradient
from cutfuse.layer.layouts import NOT_CUDA
from cutfuse.native import use_operators_everywhere


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def make_inputs(dtype: torch.dtype, count: int, rows: int = 6, columns: int = 5, depth: int = 7) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, depth), (columns, depth), (columns,))
    return [torch.randn(shape, dtype=dtype) for shape in shapes] + operands_for(count, rows, columns, dtype)


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], grad: Tensor | None = None, **tolerances: Any
) -> None:
    """Gradients of both results, of zeros for an input that is not read; grad: the result's, random by default."""
    grad = torch.randn_like(expected) if grad is None else grad
    found, right = (
        torch.autograd.grad(y, inputs, grad, allow_unused=True, materialize_grads=True) for y in (actual, expected)
    )
    torch.testing.assert_close(found, right, **tolerances)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
def test_error_of_gradients_is_at_most_eager_pytorchs(reduction: str | None, dtype: torch.dtype, path: str) -> None:
    epilogue, count = EPILOGUES["gelu_gate"]
    inputs = make_inputs(dtype, count, 33, 48, 64)
    results = []
    for is_own, cast in ((True, dtype), (False, dtype), (False, torch.float64)):
        x, weight, bias, *operands = own = leaves(*(t.to(cast) for t in inputs))
        if is_own:
            y = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
        else:
            y = eager_linear(x, weight, bias, epilogue, operands, reduction)
        torch.manual_seed(1)
        grad = torch.randn(y.shape, dtype=dtype)
        results.append(torch.autograd.grad(y, own, grad.to(y.dtype)))
    for actual, eager, exact in zip(*results, strict=True):
        assert actual.dtype == eager.dtype
        # amax picks another of two maxima that are equal in bf16 only: allow for it
        assert_no_worse(actual, eager, exact, slack=1.5 if reduction in ("amax", "amin") else 1.1)


@pytest.mark.parametrize("dim", [0, 1, 2, (0, 2), None])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradients_of_reduce(op: str, dim: int | tuple[int, ...] | None, path: str) -> None:
    x, row, column = leaves(*(torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (5,), (4, 1))))

    def prologue(z: Tensor, r: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(z) * r + c

    actual = cutfuse.reduce(x, dim, op, prologue=prologue, operands=(row, column))
    expected = eager_reduce(prologue(x, row, column), (0, 1, 2) if dim is None else dim, op)
    assert_same_gradients(actual, expected, (x, row, column))


@pytest.mark.parametrize("op", ["amax", "amin"])
def test_ties_share_the_gradient_evenly(op: str, path: str) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, -1.0]], requires_grad=True)
    for dim in (0, 1, (0, 1)):
        actual = cutfuse.reduce(x, dim, op, prologue=lambda z: z * 2)
        assert_same_gradients(actual, eager_reduce(x * 2, dim, op), (x,))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_special_values_in_gradients_as_in_pytorch(op: str, path: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1.0, nan], [1.0, inf], [1.0, -inf], [-inf, -inf], [inf, inf]])
    for x in (rows.requires_grad_(), rows.detach()[:, 1:].requires_grad_()):
        actual = cutfuse.reduce(x, 1, op, prologue=lambda z: z * 2)
        expected = eager_reduce(x * 2, 1, op)
        assert_same_gradients(actual, expected, (x,), torch.ones_like(expected), equal_nan=True)


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
    assert_same_gradients(actual, expected, [t for t in inputs if t.requires_grad])


@pytest.mark.parametrize("name", ["linear", "rows", "affine rows", "pointwise", "reduce"])
def test_nothing_is_kept_without_gradients(name: str) -> None:
    call, given = CALLS[name].own, leaves(*CALLS[name].given())
    with use_operators_everywhere():
        with torch.no_grad():
            assert not call(*given).requires_grad
        with torch.inference_mode():
            assert call(*given).is_inference()
        assert call(*given).requires_grad


def test_empty_inputs_have_empty_or_zero_gradients(path: str) -> None:
    for rows, columns, depth in ((0, 5, 7), (6, 0, 7), (6, 5, 0)):
        inputs = leaves(*make_inputs(torch.float32, 0, rows, columns, depth))
        for reduction in (None, "sum", "logsumexp"):
            y = cutfuse.linear(*inputs, epilogue=torch.sigmoid, reduce=reduction)
            expected = eager_linear(*inputs, torch.sigmoid, (), reduction)
            assert_same_gradients(y, expected, inputs)


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


# Layers that compute their pre-activation again in the backward pass.

M, N, K = 12, 40, 8


def tensors() -> list[Tensor]:
    """x, weight, bias and an operand of a layer."""
    return leaves(*make_inputs(torch.float32, 1, M, N, K))


def gated(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) * r + torch.sigmoid(z)


def saved_by(function: Callable[[], Tensor]) -> int:
    """Bytes of storages that autograd keeps."""
    with saved_tensors() as kept:
        y = function()
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("reduce", [None, *REDUCTIONS])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_are_those_of_a_layer_that_keeps_it(
    dtype: torch.dtype, has_bias: bool, reduce: str | None, path: str
) -> None:
    x, weight, bias, r = leaves(*make_inputs(dtype, 1, M, N, K))
    inputs = (x, weight, bias, r) if has_bias else (x, weight, r)
    options = {"epilogue": gated, "operands": [r], "reduce": reduce}
    found, expected = (
        cutfuse.linear(x, weight, bias if has_bias else None, **options, recompute=recompute)
        for recompute in (True, False)
    )
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **tolerance)
    assert_same_gradients(found, expected, inputs, torch.ones_like(expected), **tolerance)


@pytest.mark.parametrize("reduce", [None, "sum", "logsumexp"])
def test_only_what_is_given_is_kept(reduce: str | None, path: str) -> None:
    x, weight, bias = tensors()[:3]
    parameters = sum(tensor.nbytes for tensor in (x, weight, bias))
    options = {"epilogue": lambda z: F.gelu(z) * 2, "reduce": reduce}
    layer = functools.partial(cutfuse.linear, x, weight, bias, **options)
    recomputed, kept = (saved_by(functools.partial(layer, recompute=recompute)) for recompute in (True, False))
    assert recomputed == parameters if path == "operators" else recomputed <= parameters
    assert kept >= recomputed + 4 * M * N


def test_the_products_precision_is_the_forward_pass_one(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    original = autograd.cublas_linear
    monkeypatch.setattr(autograd, "cublas_linear", lambda *given: modes.append(given[3]) or original(*given))
    given = tensors()
    x, weight, bias, r = given
    with use_operators_everywhere():
        with cutfuse.precision("ieee"):
            y = cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r], recompute=True)
        torch.autograd.grad(y.sum(), given)
    assert modes == ["ieee"]


def test_a_weight_that_changes_in_between_raises() -> None:
    x, weight, bias, r = tensors()
    with use_operators_everywhere():
        y = cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r], recompute=True)
        with torch.no_grad():
            weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_layer_without_gradients_and_a_bare_one_have_nothing_to_recompute() -> None:
    x, weight, bias, r = tensors()
    with use_operators_everywhere():
        with torch.no_grad():
            y = cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r], recompute=True)
        torch.testing.assert_close(y, gated(F.linear(x, weight, bias), r).detach())
        bare = cutfuse.linear(x, weight, bias, recompute=True)
        torch.testing.assert_close(bare, F.linear(x, weight, bias))


def test_a_flag_that_is_none_raises() -> None:
    x, weight, bias, _ = tensors()
    for call in (cutfuse.linear, cutfuse.explain):
        arguments = (x, weight, bias) if call is cutfuse.linear else (cutfuse.linear, x, weight, bias)
        with pytest.raises(TypeError, match=r"recompute has to be True or False, got 1 of type int"):
            call(*arguments, epilogue=torch.relu, recompute=1)


def test_a_module() -> None:
    layer = cutfuse.nn.FusedLinear(K, N, epilogue=F.gelu, recompute=True)
    assert "recompute=True" in repr(layer)
    x = torch.randn(M, K)
    with use_operators_everywhere():
        kept = []
        for recompute in (True, False):
            layer.recompute = recompute
            kept.append(saved_by(lambda: layer(x)))
        assert kept[1] == kept[0] + 4 * M * N
    with pytest.raises(TypeError, match="recompute has to be True or False"):
        layer.recompute = None
    del layer.__dict__["recompute"]  # a module that was pickled before
    assert pickle.loads(pickle.dumps(layer)).recompute is False


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_plan, planner, training_step):
        monkeypatch.setattr(module, "device_facts", lambda device: NOT_CUDA)
    x, weight, bias, _ = tensors()
    with use_operators_everywhere():
        explanation = cutfuse.explain(cutfuse.linear, x, weight, bias, epilogue=F.gelu, recompute=True)
    backward = explanation.steps[-1]
    assert backward.startswith("backward: torch.mm for the pre-activation again, pointwise_backward kernel")
    assert backward.endswith("torch.mm for x and weight")
    assert explanation.reasons[0] == "recompute=True: the backward pass computes the pre-activation again"


# The layout of a weight's gradient is the parameter's, so that autograd need not copy it.

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]

LAYERS: dict[str, Layer] = {
    "a pass of ours": lambda x, weight, bias: TrainedLayer.apply("operands=0; gelu z", x.dtype, True, x, weight, bias),
    "a fused relu": lambda x, weight, bias: TrainedLayer.apply("operands=0; relu z", x.dtype, False, x, weight, bias),
    "eager": lambda x, weight, bias: cutfuse.linear(x, weight, bias, epilogue=F.gelu),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_it_arrives_as_the_parameter_lies(name: str, is_transposed: bool, dtype: torch.dtype, path: str) -> None:
    found: list[Tensor] = []
    shape = (K, N) if is_transposed else (N, K)
    parameter = torch.randn(shape, dtype=dtype).requires_grad_()
    parameter.register_hook(found.append)
    x, bias = torch.randn(M, K, dtype=dtype), torch.randn(N, dtype=dtype)
    y = LAYERS[name](x, parameter.t() if is_transposed else parameter, bias)
    y.backward(torch.ones_like(y))
    (gradient,) = found
    assert gradient.shape == shape
    if path == "operators" or name != "eager":  # elsewhere it is PyTorch's own
        assert gradient.is_contiguous()


@pytest.mark.parametrize("shape", [(N, K), (1, K), (N, 1), (1, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_it_is_the_product(shape: tuple[int, int], is_transposed: bool) -> None:
    n, k = shape
    weight = torch.empty(k, n).t() if is_transposed else torch.empty(n, k)
    grad_z, x = torch.randn(M, n), torch.randn(M, k)
    for multiply in (None, torch.mm):
        gradient = weight_gradient(grad_z, x, weight, multiply)
        torch.testing.assert_close(gradient, grad_z.t() @ x)
        assert gradient.stride() == weight.stride() or 1 in shape
