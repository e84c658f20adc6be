"""Compiled models on a GPU: layers are fused, and results and gradients are as near to fp64 as PyTorch's own."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from emulated_device import direct_calls
from torch import Tensor, nn

import cutfuse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # Inductor's, at "highest"
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # of the first one in a process
]

ROWS, WIDTH = 16384, 1024
MARGIN = 1.1  # of PyTorch's own error


class PreNormBlock(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Columns(nn.Module):
    """A layer whose weight is `[K, N]`, as GPT-2's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(torch.addmm(self.bias, x, self.weight), approximate="tanh")


def blocks(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(PreNormBlock(activation), PreNormBlock(activation), nn.LayerNorm(WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: blocks(F.gelu),
    "relu": lambda: blocks(F.relu),
    "columns": Columns,
}


@pytest.fixture(autouse=True)
def _settings(fresh_dynamo: None) -> None:
    cutfuse.set_specialization("now")
    torch.set_float32_matmul_precision("highest")


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]().cuda().to(dtype), torch.randn(ROWS, WIDTH, device="cuda").to(dtype)


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def ratios_of_errors(found: list[Tensor], exact: list[Tensor], *pytorchs: list[Tensor]) -> list[float]:
    """Of each value the error over that of PyTorch's farthest value."""
    ratios = []
    for y, reference, *others in zip(found, exact, *pytorchs, strict=True):
        assert all(y.dtype == other.dtype for other in others)
        ratios.append(error_of(y, reference) / max(error_of(other, reference) for other in others))
    return ratios


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, dtype: torch.dtype, mode: str | None) -> None:
    model, x = made(name, dtype)
    with torch.no_grad():
        fused = cutfuse.explain_model(model, x).fused
        assert fused
        compiled = torch.compile(model, backend="cutfuse", mode=mode)
        for _ in range(3):  # graphs are recorded at the second call
            before = direct_calls()
            y = compiled(x).clone()
        if mode is None:
            assert direct_calls() == before + fused
        (ratio,) = ratios_of_errors([y], [copy.deepcopy(model).double()(x.double())], [model(x)])
    assert ratio <= MARGIN


def step(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf)
    weights = torch.linspace(-1, 1, y.shape[-1], device="cuda").to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], weights.expand_as(y))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_training(name: str, dtype: torch.dtype) -> None:
    """In 16 bits kernels of ours compute each gelu and its gradient, and each relu and, before a norm, each residual
    is fused, which keep no pre-activation."""
    model, x = made(name, dtype)
    leaf = x.detach().clone().requires_grad_()
    programs = [product.program for product in cutfuse.explain_model(model, leaf).products]
    if dtype is torch.bfloat16:
        assert ("relu(z)" in programs) == (name == "relu")
        assert ("gelu(z)" in programs) == (name == "gelu")
    compiled = torch.compile(model, backend="cutfuse")
    exact_model = copy.deepcopy(model).double()
    found, exact = step(model, x, compiled), step(exact_model, x.double(), exact_model)
    torch._dynamo.reset()
    result, *gradients = ratios_of_errors(found, exact, step(model, x, model), step(model, x, torch.compile(model)))
    assert result <= MARGIN
    assert statistics.geometric_mean(gradients) <= MARGIN
    # Behind an operator Inductor sums the last norm's gradient over the rows in another way: 2e-7 of it, not 7e-8.
    assert max(gradients) <= 4 * MARGIN
