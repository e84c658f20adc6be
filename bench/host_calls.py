"""What the host suite times: calls as users write them, in PyTorch and with cutfuse, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.workloads import Shape, random_tensor

Result = Tensor | tuple[Tensor, ...]
Function = Callable[..., Result]

LAYERS = 8  # in one compiled function: what entering it costs, in which the two do not differ, is shared by so many


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer and what follows it."""
    return F.gelu(F.linear(x, weight, bias))


def fused_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with cutfuse, with a lambda that is new on each call."""
    return cutfuse.linear(x, weight, bias, epilogue=lambda z: F.gelu(z))


def fused_linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """A layer, relu, and a tensor of the result's shape."""
    return cutfuse.linear(x, weight, bias, epilogue=lambda z, r: torch.relu(z) + r, operands=(residual,))


def fused_three_ops(x: Tensor, operand: Tensor) -> Tensor:
    """Three operations without a product."""
    return cutfuse.pointwise(lambda v, u: torch.sigmoid(v) * u + v, x, operand)


def training_step(layer: Callable[..., Tensor], count: int | None = None) -> Function:
    """Of the layer's tensors and the gradient that arrives: its result, and the gradients of its first `count` tensors.

    None: of all.
    """

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        *own, gradient = tensors
        y = layer(*own)
        return y, *torch.autograd.grad(y, own[:count], gradient)

    return step


def repeated(layer: Callable[..., Tensor]) -> Function:
    """Of x and the weights and biases of layers: `layer` once with each of these."""

    def layers(x: Tensor, *parameters: Tensor) -> Tensor:
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, weight, bias)
        return x

    return layers


def parameter_tensors(shape: Shape, precision: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Weight `[N, K]` and bias `[N]`; the weight is scaled so that the product is about normal."""
    _, n, k = shape
    weight = random_tensor((n, k), precision, device, seed).mul_(k**-0.5)
    return weight, random_tensor((n,), precision, device, seed + 1)


def layer_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, K]`, weight and bias."""
    m, _, k = shape
    return [random_tensor((m, k), precision, device, seed=1), *parameter_tensors(shape, precision, device, seed=2)]


def product_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and weight."""
    return layer_tensors(shape, precision, device)[:2]


def residual_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x, weight, bias and a residual `[M, N]`."""
    return [*layer_tensors(shape, precision, device), random_tensor(shape[:2], precision, device, seed=4)]


def training_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x, weight and bias, which need gradients, and the gradient that arrives, `[M, N]`."""
    leaves = [tensor.requires_grad_() for tensor in layer_tensors(shape, precision, device)]
    return [*leaves, random_tensor(shape[:2], precision, device, seed=4)]


def repeated_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and the weights and biases of `LAYERS` layers; K = N."""
    parameters = [parameter_tensors(shape, precision, device, seed=2 + 2 * index) for index in range(LAYERS)]
    return [layer_tensors(shape, precision, device)[0], *chain.from_iterable(parameters)]


def elementwise_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, N]` and an operand of its shape."""
    return [random_tensor(shape[:2], precision, device, seed) for seed in (1, 4)]


def single_tensor(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, N]`."""
    return elementwise_tensors(shape, precision, device)[:1]
