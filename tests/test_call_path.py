"""The check that a call takes the path that a test is for, on CPU memory that stands for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from call_path import checked_calls, direct, is_checked
from emulated_device import direct_calls, emulated_device
from torch import Tensor

import cutfuse
from cutfuse import arguments, native
from cutfuse.layer import calls

core = native.module()
FP64 = "float64; kernels compute in fp32"


def why_composed(x: Tensor, arithmetic: torch.dtype) -> str:
    """As on a GPU."""
    return FP64 if arithmetic is torch.float64 else "a transform" if arguments._is_transformed() else ""


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with emulated_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", why_composed)
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


def test_a_call_that_is_not_direct_for_no_reason_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = sample()
    monkeypatch.setattr(calls, "remember", lambda *given: None)
    said = r"(?s)cutfuse.linear\(Tensor\[16, 32\] \(32, 1\) torch.bfloat16 cpu, .*was not direct.*NotImplemented"
    with pytest.raises(AssertionError, match=said), direct():
        layer(x, weight)


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
    with pytest.raises(AssertionError, match=r"no call was direct.*empty"), direct():
        layer(x[:0], weight)
    with direct("no rows"):
        layer(x[:0], weight)
    with pytest.raises(AssertionError, match="no call was direct"), direct():
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


class Plain(Tensor):
    """Is no plain tensor."""


def wants_gradient(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


X, ROW = whole(16, 32), whole(24)
REASONS: dict[str, tuple[Callable[[], object], str]] = {
    "trained in fp64": (lambda: layer(*map(wants_gradient, sample(torch.float64))), FP64),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16)(layer)(*sample()), "autocast is active"),
    "transform": (lambda: torch.func.vmap(cutfuse.sigmoid)(X), "a transform of torch.func is active"),
    "subclass": (lambda: cutfuse.sigmoid(X.as_subclass(Plain)), "Plain is no plain tensor"),
    "negated": (lambda: cutfuse.sigmoid(torch.zeros(4, dtype=torch.complex64).conj().imag), "is negated"),
    "prepared": (lambda: cutfuse.linear(X, cutfuse.prepare(whole(8, 32))), "PreparedWeight is no plain tensor"),
    "gradient of pointwise": (lambda: cutfuse.sigmoid(wants_gradient(X)), "a gradient is wanted"),
    "gradient of a reduction": (
        lambda: cutfuse.linear(wants_gradient(X), X, epilogue=torch.tanh, reduce="amax"),
        "a gradient is wanted",
    ),
    "cast result": (lambda: cutfuse.pointwise(torch.tanh, X, out_dtype=torch.float64), "cast to torch.float64"),
    "integers": (lambda: cutfuse.sigmoid(torch.arange(3)), "not floating-point"),
    "sum of integers": (lambda: cutfuse.sum(torch.arange(3)), "not floating-point"),
    "mask": (lambda: cutfuse.pointwise(lambda z, m: z.tanh() * m, X, X > 0), "cast or copied"),
    "empty": (lambda: cutfuse.sigmoid(torch.empty(0, 3)), "empty"),
    "raises": (lambda: cutfuse.linear(X, whole(4, 5)), "it raises ValueError"),
    "many dimensions": (
        lambda: cutfuse.pointwise(torch.mul, whole(2, 3, 4, 5), whole(3, 1, 5)),
        "common layout",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_general_paths_calls_have_a_reason(name: str) -> None:
    call, reason = REASONS[name]
    with checked_calls() as paths:
        try:
            call()
        except ValueError:
            assert name == "raises"
    assert any(reason in found for found in paths.general), paths.general


@pytest.mark.parametrize(("marks", "expected"), [(["gpu"], True), ([], False), (["gpu", "no_path"], False)])
def test_tests_on_a_gpu_are_checked(marks: list[str], expected: bool) -> None:
    node = SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)
    assert is_checked(node) == expected
