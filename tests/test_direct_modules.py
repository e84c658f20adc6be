"""Direct calls of `cutfuse.nn.FusedLinear`: parameters as PyTorch has them, wherever they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from emulated_device import EmulatedLaunches, direct_calls, directly
from emulated_device import launches_of_each_reader as launches_of_each_reader
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import cutfuse


class Halved(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value / 2


def halve(name: str) -> Callable[[nn.Module], object]:
    return lambda module: parametrize.register_parametrization(module, name, Halved())


def replace_by_tensor(module: nn.Module) -> None:
    weight = module.weight.detach() * 3
    del module.weight
    module.weight = weight


# What changes a module's parameters after its first calls, and whether they are parameters of the module then.
CHANGES: dict[str, tuple[Callable[[nn.Module], object], bool]] = {
    "nothing": (lambda module: None, True),
    "a weight in place": (lambda module: module.weight.data.mul_(2), True),
    "another weight": (lambda module: setattr(module, "weight", nn.Parameter(module.weight.detach() * 2)), True),
    "no bias": (lambda module: setattr(module, "bias", None), True),
    "a computed weight": (halve("weight"), False),
    "a computed bias": (halve("bias"), False),
    "a pruned weight": (lambda module: prune.l1_unstructured(module, "weight", 0.5), False),
    "a plain tensor": (replace_by_tensor, False),
}


def refuse(module: nn.Module) -> Tensor:
    raise AssertionError("parameters are looked for in nn.Module's way")


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_are_those_of_the_call(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, are_parameters = CHANGES[name]
    module = cutfuse.nn.FusedLinear(16, 8, epilogue=torch.relu)
    x = torch.randn(4, 16)

    def check() -> None:
        expected = torch.relu(F.linear(x, module.weight, module.bias))
        for _ in range(3):
            torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        check()
        change(module)
        before = direct_calls()
        check()
        assert direct_calls() > before
        monkeypatch.setattr(cutfuse.nn.FusedLinear, "_weight", refuse)
        with contextlib.nullcontext() if are_parameters else pytest.raises(AssertionError, match=r"nn\.Module's way"):
            check()


class Tied(cutfuse.nn.FusedLinear):
    """Its weight is another module's."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(16, 8, bias=False, epilogue=torch.relu)
        self.embedding = embedding

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.embedding.weight


class Scaled(cutfuse.nn.FusedLinear):
    def _weight(self) -> Tensor:
        return self.weight * 2


def test_a_subclass_gives_its_own_weight(launches: EmulatedLaunches) -> None:
    x = torch.randn(4, 16)
    tied, scaled = Tied(nn.Embedding(8, 16)), Scaled(16, 8, bias=False, epilogue=torch.relu)
    shadowed = cutfuse.nn.FusedLinear(16, 8, bias=False, epilogue=torch.relu)
    shadowed.__dict__["weight"] = torch.randn(8, 16)
    weights = (tied.embedding.weight, scaled.weight * 2, shadowed.__dict__["weight"])
    for module, weight in zip((tied, scaled, shadowed), weights, strict=True):
        for _ in range(3):
            y = module(x)
            torch.testing.assert_close(y, torch.relu(F.linear(x, weight)), rtol=1e-4, atol=1e-4)
    tied(x).sum().backward()
    assert tied.embedding.weight.grad is not None


def test_a_subclass_of_other_methods_stays_direct(launches: EmulatedLaunches) -> None:
    class Named(cutfuse.nn.FusedLinear):
        def extra_repr(self) -> str:
            return "named"

    module, x = Named(16, 8, epilogue=torch.relu), torch.randn(4, 16)
    with torch.no_grad():
        module(x)
        directly(lambda: module(x))
    assert Named._has_plain_parameters


@pytest.mark.parametrize("wrong", [[1.0, 2.0], None, torch.ones(4, 16, dtype=torch.int64)], ids=str)
def test_a_wrong_input_raises_what_linear_raises(wrong: object) -> None:
    module = cutfuse.nn.FusedLinear(16, 8, epilogue=torch.relu)
    with pytest.raises(TypeError, match=r"cutfuse\.nn\.FusedLinear: x"):
        module(wrong)
