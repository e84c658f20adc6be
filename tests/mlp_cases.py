"""Random MLPs beside PyTorch's, for tests on a CPU and on a GPU."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse import native


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small MLPs are one node too, although their layers are issued sooner one after another."""
    monkeypatch.setattr(importlib.import_module("cutfuse.mlp"), "mlp_waits_for_host", lambda *given: False)
    native.module().forget_calls()  # what was planned of calls like these
    yield
    native.module().forget_calls()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "identity": None,
    "affine": lambda z: 2.0 * z + 1.0,
    "relu": F.relu,
    "relu squared": lambda z: F.relu(z).square(),
    "leaky relu": lambda z: F.leaky_relu(z, 0.1),
    "sigmoid": torch.sigmoid,
    "capped": lambda z: 3.0 * torch.tanh(z / 3.0),
    "softplus": F.softplus,
    "exp": lambda z: torch.exp(-z.abs()),
    "gelu": F.gelu,
    "gelu tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "clamped": lambda z: z.clamp(-1.0, 1.0) * torch.sin(z),
    # its gradient is longer than a program may be
    "long": lambda z: torch.sin(z) * torch.tanh(z) * torch.cos(2.0 * z) * torch.sigmoid(z) * F.mish(z),
}


@dataclass
class Case:
    """An MLP's tensors by the names of `cutfuse.mlp`, and its options."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def call(self, tensors: dict[str, Tensor] | None = None, **more: Any) -> Tensor:
        given = self.tensors if tensors is None else tensors
        first = (given["gate"], given["up"]) if "gate" in given else given["w1"]
        biases = (given["gate_bias"], given["up_bias"]) if "gate_bias" in given else given.get("b1")
        options = {**self.options, **more}
        return cutfuse.mlp(
            given["x"], first, biases, given["w2"], given.get("b2"), residual=given.get("residual"), **options
        )

    def eager(self, tensors: dict[str, Tensor] | None = None) -> Tensor:
        given = self.tensors if tensors is None else tensors
        if "gate" in given:
            parts = [F.linear(given["x"], given[name], given.get(f"{name}_bias")) for name in ("gate", "up")]
        else:
            z = F.linear(given["x"], given["w1"], given.get("b1"))
            parts = [z] if self.options["gate"] is False else list(z.chunk(2, -1))
        activation, gate = self.options["activation"], self.options["gate"]
        if callable(gate):
            h = gate(*parts)
        else:
            h = parts[0] if activation is None else activation(parts[0])
            h = h if gate is False else h * parts[1]
        y = F.linear(h.to(given["w2"].dtype), given["w2"], given.get("b2"))
        return y + given["residual"] if "residual" in given else y

    def wide(self) -> dict[str, Tensor]:
        return {
            name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in self.tensors.items()
        }


def gradients(y: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The result, and the gradients of the tensors that need one."""
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = torch.autograd.grad(y, list(trained.values()), grad) if trained else ()
    return {"y": y, **dict(zip(trained, found, strict=True))}


def error(found: Tensor, exact: Tensor) -> float:
    """Over the largest value there is."""
    return ((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item() if exact.numel() else 0.0


def check(found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Within twice eager's own error and a rounding."""
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        own = found[name]
        assert own.shape == right.shape
        assert own.dtype == eager[name].dtype
        rounding = {torch.float64: 1e-13, torch.float32: 3e-6}.get(own.dtype, 3.0 * torch.finfo(own.dtype).eps)
        own_error, usual = error(own, right), error(eager[name], right)
        assert own_error <= 2.0 * usual + rounding, f"{name}: {own_error:.2e}, eager's {usual:.2e}"


def check_case(case: Case, **more: Any) -> None:
    eager = gradients(case.eager(), case.tensors)
    wide = case.wide()
    check(gradients(case.call(**more), case.tensors), eager, gradients(case.eager(wide), wide))


def make(
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    activation: str = "gelu",
    gate: Any = False,
    is_pair: bool = False,
    leading: Sequence[int] = (2, 7),
    sizes: tuple[int, int, int] = (13, 31, 9),
    with_biases: bool = True,
    with_residual: bool = False,
    frozen: Sequence[str] = (),
    device: str = "cpu",
    **options: Any,
) -> Case:
    """sizes: K, H and N."""
    depth, width, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"x": (*leading, depth), "w2": (columns, width)}
    if gate is not False and is_pair:
        shapes |= {name: (width, depth) for name in ("gate", "up")}
        shapes |= {f"{name}_bias": (width,) for name in ("gate", "up") if with_biases}
    else:
        rows = width if gate is False else 2 * width
        shapes["w1"] = (rows, depth)
        if with_biases:
            shapes["b1"] = (rows,)
    if with_biases:
        shapes["b2"] = (columns,)
    if with_residual:
        shapes["residual"] = (*leading, columns)
    tensors = {}
    for name, shape in shapes.items():
        scale = shape[-1] ** -0.5 if len(shape) == 2 and name not in ("x", "residual") else 1.0
        tensor = (scale * torch.randn(shape, generator=generator)).to(device, dtype)
        tensors[name] = tensor.requires_grad_(name not in frozen)
    chosen = None if callable(gate) else ACTIVATIONS[activation]
    return Case(tensors, {"activation": chosen, "gate": gate, **options})


def sided(a: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(a) * torch.tanh(b) + a


def random_case(seed: int, dtype: torch.dtype, device: str = "cpu", scale: int = 1) -> Case:
    """Sizes of any alignment; with a scale above 1 those of kernels."""
    draw = random.Random(seed)
    gate: Any = draw.choice([False, False, True, sided])
    names = ["x", "w1", "b1", "w2", "b2", "gate", "up", "gate_bias", "up_bias", "residual"]
    return make(
        seed,
        dtype,
        activation=list(ACTIVATIONS)[seed % len(ACTIVATIONS)],
        gate=gate,
        is_pair=draw.random() < 0.5,
        leading=draw.choice([(5 * scale,), (3, 4 * scale), (2, 1, 3 * scale)]),
        sizes=tuple(scale * draw.randint(3, 40) + draw.choice([0, 1]) for _ in range(3)),  # type: ignore[arg-type]
        with_biases=draw.random() < 0.5,
        with_residual=draw.random() < 0.5,
        frozen=draw.choice([[], [], draw.sample(names, 3), draw.sample(names, 6)]),
        device=device,
        recompute=draw.random() < 0.3,
    )
