"""Which card's table of predicted times a device is planned by, and that this is said where it is another's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import cutfuse
from cutfuse import native, report
from cutfuse.layer import layouts, linear_plan

H200 = "NVIDIA H200"
TABLES: dict[str, tuple[int, float, dict[str, float]]] = {
    H200: (132, 4800.0, {}),
    "NVIDIA H100 80GB HBM3": (132, 3350.0, {}),
    "NVIDIA H100 PCIe": (114, 2000.0, {}),
}
CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The properties that PyTorch gives of a device of compute capability 9.0."""
    found = SimpleNamespace(name=H200, multi_processor_count=132, memory_clock_rate=3_201_000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for cached in (layouts._cuda_times, layouts._cuda_device_facts, layouts.multiprocessors):
        cached.cache_clear()
        monkeypatch.setattr(layouts, cached.__name__, cached.__wrapped__)
    return found


@pytest.mark.parametrize(
    ("name", "multiprocessors", "gigabytes", "nearest"),
    [
        (H200, 132, 4915.0, H200),
        (H200, 99, 0.0, H200),  # a slice of one, by its name
        ("NVIDIA GH200 480GB", 132, 4022.0, H200),
        ("NVIDIA H100 NVL", 132, 3938.0, "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H800 PCIe", 114, 2039.0, "NVIDIA H100 PCIe"),
        ("NVIDIA H20", 78, 4000.0, "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 NVL", 132, 0.0, H200),  # the first, where PyTorch knows nothing of the memory
    ],
)
def test_a_card_without_a_table_takes_the_nearest(
    monkeypatch: pytest.MonkeyPatch, name: str, multiprocessors: int, gigabytes: float, nearest: str
) -> None:
    monkeypatch.setattr(native, "core", SimpleNamespace(device_times=lambda: TABLES))
    assert layouts.nearest_table(name, multiprocessors, gigabytes) == nearest


def test_a_card_that_has_a_table_says_nothing(card: SimpleNamespace) -> None:
    assert layouts.times_of(CUDA) == card.name
    assert layouts.caution_of(CUDA) == ""


def test_another_card_says_whose_times_it_is_planned_by(card: SimpleNamespace) -> None:
    card.name = "NVIDIA GH200 480GB"
    assert layouts.times_of(CUDA) == H200
    assert layouts.caution_of(CUDA) == f"planned by the times of an {H200}, the nearest card that has a table"


def test_a_pytorch_that_knows_no_bandwidth_is_no_hindrance(card: SimpleNamespace) -> None:
    del card.memory_clock_rate, card.memory_bus_width
    card.name = "NVIDIA GH200 480GB"
    assert layouts.times_of(CUDA) == H200


def test_a_card_without_fused_kernels_and_the_cpu_say_nothing(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    card.name = "NVIDIA A100-SXM4-80GB"
    assert layouts.caution_of(CUDA) == ""
    assert layouts.times_of(torch.device("cpu")) == layouts.caution_of(torch.device("cpu")) == ""


def test_a_request_names_a_table_that_there_is() -> None:
    with pytest.raises(ValueError, match="there is no table of times of NVIDIA A100"):
        native.core.predict_ways([], "cuBLAS", "NVIDIA A100", {})
    with pytest.raises(ValueError, match="a number has a name that no row of the table has"):
        native.core.predict_ways([], "cuBLAS", H200, {"cublas.end": 1.0})


def test_explain_says_whose_times_a_card_is_planned_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_plan, "caution_of", lambda device: "planned by another card's times")
    x, weight = (torch.empty(size, 1024, device="meta", dtype=torch.bfloat16) for size in (64, 2048))
    found = cutfuse.explain(cutfuse.linear, x, weight, epilogue=torch.relu, device="H200")
    assert found.reasons[-1] == "planned by another card's times"


def test_the_report_says_whose_times_a_card_is_planned_by(
    card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.total_memory = 96 << 30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ((_, own),) = report.device_lines()
    assert own == f"{H200}, sm_90, 132 multiprocessors, 96 GiB"
    card.name = "NVIDIA GH200 480GB"
    ((_, other),) = report.device_lines()
    assert other.endswith(f"96 GiB, planned by the times of an {H200}, the nearest card that has a table")
