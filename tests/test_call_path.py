"""The check that a call takes the path that a test is for, on CPU memory that stands for a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from call_path import direct
from emulated_device import emulated_device
from test_direct_calls import limited, whole
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import calls

core = native.module()


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with emulated_device():
        yield


def sample() -> tuple[Tensor, Tensor]:
    """Of which the emulated kernels make the bits that PyTorch does."""
    return whole(16, 32, dtype=torch.bfloat16), whole(24, 32, dtype=torch.bfloat16)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return cutfuse.linear(x, weight, epilogue=limited)


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
