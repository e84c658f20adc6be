"""`cutfuse.is_available`: true where kernels run, and the reason where they do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cutfuse
from cutfuse import native
from cutfuse.layer import layouts


def pretend(
    monkeypatch: pytest.MonkeyPatch, devices: int = 1, cuda: str | None = "13.0", built: bool = True, major: int = 9
) -> None:
    """PyTorch with CUDA devices of a capability, and a build of cutfuse with kernels or without."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(layouts, "_cuda_device_facts", lambda index: (major, 0, 132))
    monkeypatch.setattr(native, "has_kernels", lambda: built and cuda is not None)


@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:0", torch.device("cuda", 0)])
def test_it_is_true_where_all_kernels_run(monkeypatch: pytest.MonkeyPatch, device: torch.device | str | None) -> None:
    pretend(monkeypatch)
    found = cutfuse.is_available(device)
    assert found
    assert (repr(found), found.reason) == ("True", "")


@pytest.mark.parametrize(
    ("device", "machine", "reason"),
    [
        ("cpu", {}, "kernels are for CUDA devices"),
        (None, {"cuda": None}, f"PyTorch {torch.__version__} is built without CUDA"),
        (None, {"devices": 0}, "PyTorch finds no CUDA device"),
        ("cuda:3", {}, "PyTorch finds 1 CUDA devices, and no cuda:3"),
        (None, {"built": False}, "this build of cutfuse has no CUDA kernels"),
        (None, {"major": 7}, "the kernels are for sm_80 and later"),
    ],
)
def test_it_is_false_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str | None, machine: dict[str, object], reason: str
) -> None:
    pretend(monkeypatch, **machine)
    found = cutfuse.is_available(device)
    assert not found
    assert (repr(found), found.reason) == (f"False: {reason}", reason)


def test_where_kernels_run_that_do_not_multiply_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, major=8)
    found = cutfuse.is_available()
    assert found
    assert repr(found) == "True: fused products need compute capability 9.0, this device has 8.0"


def test_without_the_native_module_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> SimpleNamespace:
        raise ImportError("run `pip install -e .`")

    pretend(monkeypatch)
    monkeypatch.setattr(native, "module", missing)
    assert repr(cutfuse.is_available()) == "False: run `pip install -e .`"
