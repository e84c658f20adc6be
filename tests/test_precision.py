"""PyTorch's own settings decide the precision of fp32 products."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from cutfuse.precision import allows_tf32, autocast_dtype


@pytest.fixture(autouse=True)
def _restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "expected"), [("highest", False), ("high", True), ("medium", True)])
def test_matmul_precision(precision: str, expected: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert allows_tf32() is expected


def test_older_switch() -> None:
    for expected in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = expected
        assert allows_tf32() is expected


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch 2.9 brought fp32_precision")
def test_newer_switches() -> None:
    matmul = torch.backends.cuda.matmul
    try:
        matmul.fp32_precision = "tf32"
        assert allows_tf32()
        matmul.fp32_precision = "ieee"
        assert not allows_tf32()
        matmul.fp32_precision = "none"  # then the setting for everything holds
        torch.backends.fp32_precision = "tf32"
        assert allows_tf32()
    finally:
        torch.backends.fp32_precision = "none"


def test_a_pytorch_without_the_newer_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        allow_tf32 = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    assert allows_tf32()


def test_autocast() -> None:
    assert autocast_dtype("cpu") is None
    assert autocast_dtype("meta") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype("cpu") is torch.bfloat16
        assert autocast_dtype("cuda") is None
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype("cpu") is None
