"""The layout of a weight's gradient is the parameter's, so that autograd need not copy it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse.compile.layer import PassedLayer, TrainedLayer
from cutfuse.layer.autograd import weight_gradient

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
