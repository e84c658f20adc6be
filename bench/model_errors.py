"""Errors of a model's output and of its parameters' gradients against the same model in fp64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bench.launches import Checked
from bench.model_contenders import GRAPHS_MODE, Contender
from bench.model_zoo import FORWARD, TRAINING, Inputs
from bench.suite import Figures, Session
from bench.workloads import frobenius_error

# Of FORWARD or TRAINING.
InputsFor = Callable[[str], Inputs]


class WithoutFp32(TorchFunctionMode):
    """Makes fp64 of the fp32 that a model asks for, as in a norm: the reference is to be in fp64 throughout."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(widened_type, args), **{name: widened_type(item) for name, item in (kwargs or {}).items()})


def widened_type(value: Any) -> Any:
    """fp64 for fp32."""
    return torch.float64 if value is torch.float32 else value


def widened(value: Any) -> Any:
    """A copy of an argument in fp64: a tensor, or a cache of keys and values; anything else as it is."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value.clone()
    if not hasattr(value, "layers"):
        return value
    cache = copy.copy(value)
    cache.layers = [copy.copy(layer) for layer in value.layers]
    for layer in cache.layers:
        tensors = {name: widened(item) for name, item in vars(layer).items() if isinstance(item, Tensor)}
        vars(layer).update(tensors)
    return cache


def in_fp64(module: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    """A copy of the module in fp64, and a call of it that computes in nothing less."""
    wide = copy.deepcopy(module).double()

    def call(*arguments: Any, **keywords: Any) -> Any:
        with WithoutFp32():
            return wide(*arguments, **keywords)

    return wide, call


def widened_inputs(inputs: Inputs) -> Inputs:
    """The same inputs in fp64."""
    keywords = {name: widened(item) for name, item in inputs.keywords.items()}
    return replace(inputs, arguments=tuple(map(widened, inputs.arguments)), keywords=keywords)


def trained(module: nn.Module) -> list[Tensor]:
    """The parameters that have a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def output_of(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The forward pass's result, without gradients."""
    with torch.no_grad():
        inputs.rewind(inputs)
        return inputs.call(model)


def gradients_of(model: Callable[..., Any], module: nn.Module, inputs: Inputs, seed: int) -> list[Tensor]:
    """The gradients of the module's parameters; a random one comes in where the model's result is no loss."""
    with torch.enable_grad():
        inputs.rewind(inputs)
        result = inputs.call(model)
        generator = torch.Generator(result.device).manual_seed(seed)
        incoming = torch.randn(result.shape, dtype=torch.float32, device=result.device, generator=generator)
        # Rounded to bf16, so that it is the same in every precision; of a loss it is 1.
        incoming = torch.ones_like(result) if result.dim() == 0 else incoming.bfloat16().to(result.dtype)
        parameters = trained(module)
        found = torch.autograd.grad(result, parameters, incoming, allow_unused=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, found, strict=True)
    ]


def joint_error(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The relative error of tensors as if they were one; infinite where one is not a number."""
    difference = sum((one.double() - other).square().sum().item() for one, other in zip(results, exact, strict=True))
    norm = sum(other.square().sum().item() for other in exact)
    error = math.sqrt(difference / norm) if norm else math.sqrt(difference)
    return error if math.isfinite(error) else math.inf


def run(
    session: Session, contenders: Sequence[Contender], module: nn.Module, inputs_for: InputsFor, is_trained: bool
) -> Figures:
    """Every contender's errors but for those with CUDA graphs, which run the kernels of those without.

    The module is in eval mode throughout, so that it drops no elements at random.
    """
    seed = 1
    wide, call = in_fp64(module)
    inputs = inputs_for(FORWARD)
    exact = output_of(call, widened_inputs(inputs))
    learning = inputs_for(TRAINING) if is_trained else inputs
    gradients = gradients_of(call, wide, widened_inputs(learning), seed) if is_trained else []
    del wide, call
    checked: Checked[None] = Checked(session)

    def check(contender: Contender, entry: Figures) -> None:
        entry["error"] = frobenius_error(output_of(contender.of(module), inputs), exact)
        if is_trained:
            found = gradients_of(contender.of(module), module, learning, seed)
            entry["gradient_error"] = joint_error(found, gradients)

    for contender in contenders:
        if contender.mode != GRAPHS_MODE:
            checked.add(contender.name, partial(check, contender))
    return checked.figures({})
