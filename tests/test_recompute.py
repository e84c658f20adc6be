"""Layers that compute their pre-activation again in the backward pass."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse.compile.layer import PassedLayer, TrainedLayer
from cutfuse.layer import autograd, linear_plan, planner, training_step
from cutfuse.layer.autograd import weight_gradient
from cutfuse.layer.layouts import NOT_CUDA
from cutfuse.native import use_operators_everywhere

M, N, K = 12, 40, 8


def tensors(dtype: torch.dtype = torch.float32, has_bias: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(M, K), (N, K), *([(N,)] if has_bias else []), (M, N)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gated(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) * r + torch.sigmoid(z)


def run(given: list[Tensor], recompute: bool, reduce: str | None = None, **options: bool) -> list[Tensor]:
    x, weight, *bias, r = given
    y = cutfuse.linear(x, weight, *bias, epilogue=gated, operands=[r], reduce=reduce, recompute=recompute)
    return [y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y), **options)]


def saved_by(function: Callable[[], Tensor]) -> int:
    """Bytes of storages that autograd keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function()
    assert y.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("reduce", [None, "sum", "mean", "amax", "amin", "logsumexp"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_results_are_those_of_a_layer_that_keeps_it(
    dtype: torch.dtype, has_bias: bool, reduce: str | None, path: str
) -> None:
    given = tensors(dtype, has_bias)
    found, expected = run(given, True, reduce), run(given, False, reduce)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, **tolerance)


@pytest.mark.parametrize("reduce", [None, "sum", "logsumexp"])
def test_only_what_is_given_is_kept(reduce: str | None, path: str) -> None:
    x, weight, bias = tensors()[:3]
    parameters = sum(tensor.nbytes for tensor in (x, weight, bias))
    options = {"epilogue": lambda z: F.gelu(z) * 2, "reduce": reduce}
    layer = functools.partial(cutfuse.linear, x, weight, bias, **options)
    recomputed, kept = (saved_by(functools.partial(layer, recompute=recompute)) for recompute in (True, False))
    assert recomputed == parameters if path == "operators" else recomputed <= parameters
    assert kept >= recomputed + 4 * M * N


def test_a_second_derivative_and_batched_gradients() -> None:
    given = tensors(torch.float64)
    with use_operators_everywhere():
        for recompute in (True, False):
            first = run(given, recompute, create_graph=True)
            second = torch.autograd.grad(first[1].sum(), given[1])
            if recompute:
                expected = second
        torch.testing.assert_close(second, expected)
        x, weight, bias, r = tensors()
        y = cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r], recompute=True)
        (found,) = torch.autograd.grad(y, weight, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
        torch.testing.assert_close(found[0], run([x, weight, bias, r], False)[2])


def test_below_transforms_and_in_compiled_functions() -> None:
    x, weight, bias, r = (tensor.detach() for tensor in tensors())

    def loss(weight: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r], recompute=True).sum()

    expected = run([t.clone().requires_grad_() for t in (x, weight, bias, r)], False)[2]
    torch.testing.assert_close(torch.func.grad(loss)(weight), expected)
    leaf = weight.clone().requires_grad_()
    torch.compile(loss, backend="aot_eager", fullgraph=True)(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


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


M, N, K = 6, 8, 16
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]

LAYERS: dict[str, Layer] = {
    "a pass of ours": lambda x, weight, bias: PassedLayer.apply("operands=0; gelu z", x.dtype, x, weight, bias),
    "a fused relu": lambda x, weight, bias: TrainedLayer.apply("operands=0; relu z", x.dtype, x, weight, bias),
    "eager": lambda x, weight, bias: cutfuse.linear(x, weight, bias, epilogue=F.gelu),
}


def arriving(layer: Layer, weight: Tensor, *, is_transposed: bool, dtype: torch.dtype) -> Tensor:
    """The parameter's gradient as autograd is given it."""
    found: list[Tensor] = []
    parameter = weight.detach().clone().requires_grad_()
    parameter.register_hook(found.append)
    x, bias = torch.randn(M, K, dtype=dtype), torch.randn(N, dtype=dtype)
    y = layer(x, parameter.t() if is_transposed else parameter, bias)
    y.backward(torch.ones_like(y))
    (gradient,) = found
    return gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_it_arrives_as_the_parameter_lies(name: str, is_transposed: bool, dtype: torch.dtype, path: str) -> None:
    shape = (K, N) if is_transposed else (N, K)
    gradient = arriving(LAYERS[name], torch.randn(shape, dtype=dtype), is_transposed=is_transposed, dtype=dtype)
    assert gradient.shape == shape
    if path == "operators" or name != "eager":  # elsewhere it is PyTorch's own
        assert gradient.is_contiguous()


@pytest.mark.parametrize("shape", [(N, K), (1, K), (N, 1), (1, 1)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_it_is_the_product(shape: tuple[int, int], is_transposed: bool) -> None:
    n, k = shape
    weight = torch.empty(k, n).t() if is_transposed else torch.empty(n, k)
    grad_z, x = torch.randn(M, n), torch.randn(M, k)
    for multiply in (None, lambda a, b: torch.mm(a, b.t())):
        gradient = weight_gradient(grad_z, x, weight, multiply)
        torch.testing.assert_close(gradient, grad_z.t() @ x)
        assert gradient.stride() == weight.stride() or 1 in shape
