"""Plans of products with several weights, and the launch that a plan leads to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_device import READERS, RecordedLaunches, emulated_device
from plan_cases import MODULE, plan

from cutfuse.layer import planner
from cutfuse.layer.call_plans import plan_joined_call
from cutfuse.layer.planner import plan_joined, plan_of

QKV = (1024, 1024, 1024)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "device_facts", lambda device: (9, 0, 132))
    monkeypatch.setattr(planner, "times_of", lambda device: "")


def rows_of(rows: int, columns: int, pitch: int | None = None, aligned: bool = True) -> Any:
    return rows, columns, pitch or columns, 1, aligned


def planned(m: int, k: int, rows: tuple[int, ...] = QKV, **options: Any) -> Any:
    weights = [rows_of(count, k) for count in rows]
    return plan_joined(rows_of(m, k), weights, torch.bfloat16, torch.device("cuda"), **options)


def test_small_products_are_joined_by_the_kernel_that_fills_the_device() -> None:
    found = planned(512, 1024, issuer="graph")
    assert found.is_fused
    assert found.alternatives[0].name == "sm90_bf16_joined_128x128x64_2x1_pingpong"
    assert found.alternatives[-1].name == "cuBLAS, one product for each weight"
    assert found.output_shape == [512, 3072]
    (launch,) = found.launches
    assert (launch.problem.m, launch.problem.n, launch.problem.k) == (512, 3072, 1024)


@pytest.mark.parametrize("rows", [QKV, (2048, 512, 512), (128, 128)])
def test_cublas_takes_what_its_products_take(rows: tuple[int, ...]) -> None:
    apart = planned(700, 2048, rows, issuer="graph").alternatives[-1].microseconds
    bare = {"epilogue_cost": 0.0, "specialized_cost": 0.0, "bias": None, "issuer": "graph"}
    alone = [plan(700, n, 2048, **bare).alternatives[-1].microseconds for n in rows]
    assert apart == pytest.approx(sum(alone))


def test_the_host_counts_every_launch() -> None:
    """In compiled code, where the device takes less."""
    found = planned(1, 1024, (128, 128, 128), issuer="compiled_code")
    best, apart = found.alternatives[0], found.alternatives[-1]
    assert apart.compared > 3 * best.compared


@pytest.mark.parametrize(("rows", "kernels"), [(QKV, 3), ((2048, 192, 64), 1), ((96, 96), 0), ((128, 120), 0)])
def test_no_tile_has_columns_of_two_weights(rows: tuple[int, ...], kernels: int) -> None:
    found = planned(512, 1024, rows)
    taken = [way for way in found.alternatives[:-1] if not way.rejection]
    assert len(taken) == kernels
    refused = [way.rejection for way in found.alternatives[:-1] if way.rejection]
    assert all("columns of one weight at a time" in reason for reason in refused)


@pytest.mark.parametrize(
    "weights",
    [
        [rows_of(128, 64)] * 4,
        [rows_of(128, 64), rows_of(128, 64, pitch=72)],
        [(128, 64, 1, 128, True), (128, 64, 64, 1, True)],
        [rows_of(128, 64), rows_of(0, 64)],
    ],
    ids=["four", "pitches", "layouts", "no rows"],
)
def test_weights_that_no_kernel_reads(weights: list[Any]) -> None:
    assert plan_joined(rows_of(8, 64), weights, torch.bfloat16, torch.device("cuda")) is None


def test_fp32_is_never_joined() -> None:
    assert plan_joined(rows_of(8, 64), [rows_of(128, 64)] * 2, torch.float32, torch.device("cuda")) is None


ZEROS = torch.zeros(256, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "bias", [ZEROS[0], ZEROS[:1], ZEROS[:128].half(), ZEROS[1:129], ZEROS[::2]], ids=["0-d", "1", "type", "1:", "::2"]
)
def test_biases_that_no_kernel_reads_are_left_to_pytorch(bias: torch.Tensor) -> None:
    x, weights = torch.randn(12, 64).bfloat16(), [torch.randn(128, 64).bfloat16()] * 2
    assert plan_of(x, weights, [None, None]) is not None
    assert plan_of(x, weights, [bias, None]) is None


def test_weights_of_another_type_are_left_to_pytorch() -> None:
    x, weight = torch.randn(12, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    assert plan_of(x, [weight, weight.half()], [None, None]) is None


@pytest.mark.parametrize("reader", READERS)
def test_a_direct_call(reader: str) -> None:
    """Of other tensors than those that it was planned for, whose addresses alone differ."""
    widths = 256, 128, 64
    first, second = (
        (
            torch.zeros(12, 64).bfloat16(),
            [torch.zeros(n, 64).bfloat16() for n in widths],
            [torch.zeros(256).bfloat16(), None, torch.zeros(64).bfloat16()],
        )
        for _ in range(2)
    )
    launches = RecordedLaunches()
    with emulated_device(reader, launches):
        function = MODULE.CallFunction.joined_operator
        key = MODULE.call_key(function, first, 0)
        call_plan = plan_joined_call(*first).call
        assert MODULE.remember_call(function, first, 0, key, call_plan)
        y = MODULE.call_joined_operator(*second)
        other = MODULE.call_joined_operator(second[0], second[1], [None, None, None])
    assert other is NotImplemented
    assert y.shape == (12, sum(widths))
    x, weights, biases = second
    (launch,) = launches.launches
    assert (launch.function, launch.kernel) == ("gemm", "sm90_bf16_joined_64x64x128_1x1_pingpong")
    assert (launch.a, launch.d) == (x.data_ptr(), y.data_ptr())
    addresses = [w.data_ptr() for w in weights], [0 if b is None else b.data_ptr() for b in biases]
    assert launch.joined == list(zip(*addresses, widths, strict=True))
