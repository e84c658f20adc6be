"""Workers of pytest-xdist take the devices of a machine in turn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from device_order import beginning_at_its_own, take_devices_in_turn, visible_devices


def test_workers_begin_at_different_devices_and_see_all() -> None:
    orders = [beginning_at_its_own(["0", "1", "2"], f"gw{index}") for index in range(4)]
    assert orders == [["0", "1", "2"], ["1", "2", "0"], ["2", "0", "1"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    ("worker", "visible", "expected"),
    [("gw13", "4,6", "6,4"), ("gw1", "3", "3"), ("gw1", "", ""), (None, "4,6", "4,6")],
    ids=["two devices", "one", "none", "no worker"],
)
def test_only_what_is_visible_is_taken(
    worker: str | None, visible: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if worker is None:
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    else:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    take_devices_in_turn()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_devices_are_counted_where_none_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm"):  # a container may have some of a machine's
        (tmp_path / name).touch()
    assert visible_devices(tmp_path) == ["0", "1"]
