"""`python -m cutfuse.demo`: passes on a right cutfuse, fails on a wrong one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import cutfuse
from cutfuse import demo


@pytest.fixture(autouse=True)
def _restored_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def make_result(torch_error: float, cutfuse_error: float) -> demo.Result:
    return demo.Result(demo.SMALL_SIZE[0], demo.BFLOAT16, "fused", (torch_error, cutfuse_error), (2e-3, 1e-3))


def test_every_model_matches_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert table.count(" ok\n") == 2 * len(demo.SMALL_SIZE)
    assert all(case.name in table for case in demo.SMALL_SIZE)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_a_usage_error(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--device", device])
    assert f"error: --device {device}: " in capsys.readouterr().err


def test_a_wrong_model_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "SMALL_SIZE", (demo.Case("Sigmoid", (), (4, 8)),))
    monkeypatch.setattr(cutfuse.nn.Sigmoid, "forward", lambda self, x: cutfuse.pointwise(torch.tanh, x))
    assert demo.main(["--device", "cpu"]) == 1
    assert "MISMATCH" in capsys.readouterr().out


def test_one_rounding_is_allowed_and_no_more() -> None:
    one_rounding = torch.finfo(torch.bfloat16).eps / 2
    assert make_result(1e-3, 1e-3 + one_rounding).matches
    assert not make_result(1e-3, 1e-3 + 1.01 * one_rounding).matches
    assert not make_result(1e-3, math.nan).matches


def test_errors_are_measured_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REFERENCE_SLICE", 16)
    model, x = cutfuse.models.Sigmoid(), torch.randn(5, 8)
    exact = torch.sigmoid(x.double())
    wrong = exact.clone()
    wrong[4, 7] += 1.0
    errors = demo.measure_errors(model, x, (exact, wrong))
    assert errors == pytest.approx([0.0, 1.0 / exact.norm().item()])


def test_both_sizes_are_the_same_models() -> None:
    names = [case.name for case in demo.FULL_SIZE]
    assert names == [case.name for case in demo.SMALL_SIZE]
    assert sorted(names) == cutfuse.models.__all__
