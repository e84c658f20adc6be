"""The check that a call takes the path that a test is for, on CPU memory that stands for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_path import direct, is_checked
from emulated_device import direct_calls, emulated_device
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import calls

core = native.module()


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with emulated_device():
        yield


def whole(*shape: int) -> Tensor:
    """-1, 0 and 1, of which the emulated kernels make the bits that PyTorch does."""
    return torch.randint(-1, 2, shape).float()


def sample(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return whole(16, 32).to(dtype), whole(24, 32).to(dtype)


def limited(z: Tensor) -> Tensor:
    return (z * 2).clamp(-9, 9)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return cutfuse.linear(x, weight, epilogue=limited)


def module() -> cutfuse.nn.FusedLinear:
    made = cutfuse.nn.FusedLinear(32, 24, epilogue=limited).requires_grad_(False)
    made.load_state_dict({"weight": whole(24, 32), "bias": whole(24)})
    return made


CALLS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: layer(*sample()),
    "linear, reduced": lambda: cutfuse.linear(*sample(), epilogue=limited, reduce="amax", keepdim=True),
    "PyTorch's own layer": lambda: cutfuse.linear(*sample()),
    "an operation behind it": lambda: cutfuse.linear(*sample(), epilogue=torch.relu),
    "pointwise": lambda: cutfuse.pointwise(lambda z, r: limited(z) - r, whole(4, 8), whole(8)),
    "sigmoid": lambda: cutfuse.sigmoid(torch.zeros(4, 8)),
    "reduce": lambda: cutfuse.reduce(whole(4, 8), 1, "sum", prologue=limited, operands=()),
    "sum": lambda: cutfuse.sum(whole(4, 8), 0),
    "module": lambda: module()(whole(16, 32)),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_are_direct(name: str) -> None:
    before = direct_calls()
    with direct():
        CALLS[name]()
    assert direct_calls() > before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.view(torch.int16).view(-1)[:1].bitwise_xor_(1), "1 of 384 elements .* have other bits"),
        (lambda y: y.view(-1)[:2].fill_(torch.nan), "2 of 384 elements"),
        (lambda y: y.resize_(24, 16), "the direct result is"),
    ],
    ids=["a bit", "NaN", "shape"],
)
def test_another_result_fails(change: Callable[[Tensor], Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native_call = calls.call_linear

    def changed(*given: Any) -> Any:
        y = native_call(*given)
        if isinstance(y, Tensor):
            change(y)
        return y

    monkeypatch.setattr(calls, "call_linear", changed)
    x, weight = sample()
    with pytest.raises(AssertionError, match=said), direct():
        layer(x, weight)


def test_tests_without_direct_calls_are_marked() -> None:
    x, weight = sample()
    with pytest.raises(AssertionError, match="none of 1 calls was direct"), direct():
        layer(x[:0], weight)
    with direct("no rows"):
        layer(x[:0], weight)
    with pytest.raises(AssertionError, match="none of 0 calls was direct"), direct():
        pass


def test_a_mark_that_is_stale_fails() -> None:
    said = "1 calls were direct, but the test is marked general_path: fp64"
    with pytest.raises(AssertionError, match=said), direct("fp64"):
        layer(*sample())


def test_a_failure_of_the_test_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError), direct():
        raise ZeroDivisionError
    assert calls.call_linear is core.call_linear
    assert isinstance(layer(*sample()), Tensor)


@pytest.mark.parametrize(("marks", "expected"), [(["gpu"], True), ([], False), (["gpu", "no_path"], False)])
def test_tests_on_a_gpu_are_checked(marks: list[str], expected: bool) -> None:
    node = SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)
    assert is_checked(node) == expected
