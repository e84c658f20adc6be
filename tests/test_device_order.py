"""Workers of pytest-xdist take the devices of a machine in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_order import order_of, visible_devices


def test_workers_begin_at_different_devices_and_see_all() -> None:
    orders = [order_of(["0", "1", "2"], f"gw{index}") for index in range(4)]
    assert orders == [["0", "1", "2"], ["1", "2", "0"], ["2", "0", "1"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    ("devices", "worker", "expected"),
    [(["4", "6"], "gw13", ["6", "4"]), (["3"], "gw1", ["3"]), ([], "gw1", []), (["4", "6"], "", ["4", "6"])],
    ids=["two devices", "one", "none", "no worker"],
)
def test_only_what_is_visible_is_taken(devices: list[str], worker: str, expected: list[str]) -> None:
    assert order_of(devices, worker) == expected


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
