"""What the chains suite's contenders run on: tensors, the calls, and their results in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench import host_calls, specialized
from bench.chains import Chain
from bench.contenders import COMPILE, POINTWISE, PRODUCT
from bench.workloads import (
    REDUCTIONS,
    Reference,
    Run,
    Shape,
    Workload,
    product_reference,
    product_rows,
    random_tensor,
    rows_of,
)

Function = Callable[..., Tensor]


def operands_of(chain: Chain, m: int, n: int, precision: str, device: torch.device) -> tuple[Tensor, ...]:
    """The chain's operands beside z `[M, N]`."""
    return tuple(
        random_tensor(operand.shape(m, n), operand.precision(precision), device, seed=10 + index)
        for index, operand in enumerate(chain.operands)
    )


def finished(chain: Chain, y: Tensor) -> Tensor:
    """The chain's reduction of what its function gives."""
    return y if chain.reduce is None else REDUCTIONS[chain.reduce](y, -1)


def pointwise_run(chain: Chain, z: Tensor, operands: tuple[Tensor, ...]) -> Run:
    """`cutfuse.pointwise` of the chain's function over z, whose kernel is specialized."""

    def rows(start: int, stop: int) -> Tensor:
        return chain.function(*(rows_of(tensor, 2, start, stop) for tensor in (z, *operands)))

    call = specialized.in_mode(specialized.SPECIALIZED, lambda: cutfuse.pointwise(chain.function, z, *operands))
    return Run(call, Reference(rows, *z.shape))


def linear(shape: Shape, chain: Chain, precision: str, extras: tuple[str, ...], device: torch.device) -> Workload:
    """A product of `shape` (M, N, K) with the chain behind it; the weight is scaled so that z is about normal.

    `extras`: which of the chain alone, POINTWISE, and of cutfuse's product alone, PRODUCT, are built.
    """
    m, n, _ = shape
    x, weight = host_calls.product_tensors(shape, precision, device)
    operands = operands_of(chain, m, n, precision, device)

    def eager(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return finished(chain, chain.function(F.linear(x, weight), *operands))

    def rows(start: int, stop: int) -> Tensor:
        values = (rows_of(operand, 2, start, stop) for operand in operands)
        return finished(chain, chain.function(product_rows(x, weight, None, start, stop), *values))

    def fused(x: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, epilogue=chain.function, operands=operands, reduce=chain.reduce)

    own: dict[str, Run] = {}
    if POINTWISE in extras:
        own[POINTWISE] = pointwise_run(chain, torch.mm(x, weight.t()), operands)
    if PRODUCT in extras:
        own[PRODUCT] = Run(lambda: cutfuse.linear(x, weight), product_reference(x, weight))
    return Workload(
        arguments=(x, weight, *operands),
        eager=eager,
        fused=fused,
        reference=Reference(rows, m, max(weight.shape)),
        product=(x, weight),
        extras=own,
    )


def pointwise(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """`cutfuse.pointwise` of the chain over x of `shape`."""
    x = random_tensor(shape, precision, device, seed=1)
    arguments = (x, *operands_of(chain, *shape, precision, device))

    def fused(*tensors: Tensor) -> Tensor:
        return cutfuse.pointwise(chain.function, *tensors)

    return Workload(
        arguments=arguments,
        eager=chain.function,
        fused=fused,
        reference=Reference(
            lambda start, stop: chain.function(*(rows_of(tensor, 2, start, stop) for tensor in arguments)), *shape
        ),
    )


def reduction(shape: Shape, dim: int, op: str, chain: Chain, precision: str, device: torch.device) -> Workload:
    """`cutfuse.reduce` over a dimension of x with the chain before it."""
    x = random_tensor(shape, precision, device, seed=1)
    kept = 1 - dim

    def eager(x: Tensor) -> Tensor:
        return REDUCTIONS[op](chain.function(x), dim)

    def fused(x: Tensor) -> Tensor:
        return cutfuse.reduce(x, dim, op, prologue=chain.function)

    return Workload(
        arguments=(x,),
        eager=eager,
        fused=fused,
        reference=Reference(
            lambda start, stop: eager(x.narrow(kept, start, stop - start).double()), shape[kept], shape[dim]
        ),
    )


@torch.enable_grad()
def gradient_call(function: Function, x: Tensor, arriving: Tensor) -> Callable[[], Tensor]:
    """The gradient of x alone: the forward pass is run here, once."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return lambda: torch.autograd.grad(y, leaf, arriving, retain_graph=True)[0]


def backward(shape: Shape, chain: Chain, precision: str, device: torch.device) -> Workload:
    """The backward pass of `cutfuse.pointwise` of the chain, which has no operand."""
    x, arriving = (random_tensor(shape, precision, device, seed) for seed in (1, 2))

    def fused(x: Tensor) -> Tensor:
        return cutfuse.pointwise(chain.function, x)

    def in_mode(mode: str) -> Callable[[], Any]:
        call = specialized.in_mode(mode, lambda: gradient_call(fused, x, arriving))()
        return specialized.in_mode(mode, call)

    def rows(start: int, stop: int) -> Tensor:
        return gradient_call(chain.function, x[start:stop].double(), arriving[start:stop].double())()

    eager = gradient_call(chain.function, x, arriving)
    return Workload(
        arguments=(),
        eager=eager,
        fused=fused,
        reference=Reference(rows, *shape),
        in_mode=in_mode,
    )


def training(tensors: list[Tensor], layer: Function, fused_layer: Function) -> Workload:
    """A layer forwards and backwards. `tensors`: the layer's, which need gradients, and the gradient that arrives."""
    arguments = tuple(tensors)

    def step_of(layer: Function) -> Callable[..., Any]:
        return torch.enable_grad()(host_calls.training_step(layer))

    eager, fused = step_of(layer), step_of(fused_layer)
    wide = tuple(tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in arguments)
    exact = [part.detach() for part in eager(*wide)]
    norms = [part.norm() for part in exact]

    def collect(parts: tuple[Tensor, ...]) -> Tensor:
        """The result and the gradients as one tensor, each divided by its norm: their errors weigh alike."""
        pieces = [part.detach().double() / norm for part, norm in zip(parts, norms, strict=True)]
        return torch.cat([piece.flatten() for piece in pieces])

    joint = collect(tuple(exact))
    reference = Reference(lambda start, stop: joint[start:stop], joint.numel(), 1)
    # It is the layer that is compiled: the compiler frees the graph of a step.
    compiled = step_of(torch.compile(layer, fullgraph=True, dynamic=False))
    return Workload(
        arguments=arguments,
        eager=eager,
        fused=fused,
        reference=reference,
        collect=collect,
        extras={COMPILE: Run(lambda: compiled(*arguments), reference)},
    )


def training_of_gelu(shape: Shape, precision: str, device: torch.device) -> Workload:
    """A linear layer and gelu."""
    tensors = host_calls.training_tensors(shape, precision, device)
    return training(tensors, host_calls.linear_gelu, host_calls.fused_linear_gelu)
