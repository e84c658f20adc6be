"""What conftest.py sets up: memory is poisoned before each test on a GPU, and processes take the devices in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_order import order_of, visible_devices
from poison import poison

on_gpu = pytest.mark.gpu
SIZES = (1, 100, 4096, 200_000, 1 << 20, 10_000_000, 40_000_000)


def is_poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() | (tensor > 9e29)).all())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_what_is_in_use_is_left_alone(device: str) -> None:
    tensors = [torch.full((size,), 3.0, device=device) for size in SIZES[:-1]]
    for _ in range(2):
        poison(device)
        assert all((tensor == 3).all() for tensor in tensors)


class TestOnGpu:
    pytestmark = on_gpu

    def test_every_test_begins_with_poisoned_memory(self) -> None:
        assert is_poisoned(torch.empty(1000, device="cuda"))

    def test_what_is_allocated_next_is_poisoned(self) -> None:
        """Also where a result was, and where nothing was before."""
        results = [torch.ones(size, device="cuda") for size in SIZES]
        del results
        seen = set()
        for _ in range(2):
            poison()
            tensors = [torch.empty(size, device="cuda") for size in SIZES]
            assert all(map(is_poisoned, tensors))
            seen |= {bool(tensor.isnan().all()) for tensor in tensors}
            del tensors
        assert seen == {False, True}

    def test_no_memory_is_taken(self) -> None:
        poison()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        poison()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before

    def test_memory_of_other_streams(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = torch.ones(1 << 20, device="cuda")
            del result
        poison()
        with torch.cuda.stream(stream):
            assert is_poisoned(torch.empty(1 << 20, device="cuda"))


# Workers of pytest-xdist take the devices of a machine in turn.


def test_workers_begin_at_different_devices_and_see_all() -> None:
    orders = [order_of(["0", "1", "2"], f"gw{index}") for index in range(4)]
    assert orders == [["0", "1", "2"], ["1", "2", "0"], ["2", "0", "1"], ["0", "1", "2"]]


@pytest.mark.parametrize(("named", "expected"), [("4,6", ["4", "6"]), ("", []), (None, ["0", "1"])])
def test_devices_are_those_named_or_those_there_are(
    named: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm"):  # a container may have some of a machine's
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_devices(tmp_path) == expected
