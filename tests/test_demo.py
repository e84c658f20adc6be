"""`python -m cutfuse.demo`: passes on a right cutfuse, fails on a wrong one."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest
import torch
from processes import run_python

import cutfuse
from cutfuse import demo


def make_result(torch_error: float, cutfuse_error: float) -> demo.Result:
    return demo.Result(demo.SMALL_SIZE[0], demo.BFLOAT16, "fused", (torch_error, cutfuse_error), (2e-3, 1e-3))


def test_every_model_matches_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu"]) == 0
    table, progress = capsys.readouterr()
    assert progress.startswith("[1/10] LinearSigmoidSum fp32\n[2/10] LinearSigmoidSum bf16\n")
    assert table.count(" ok\n") == 2 * len(demo.SMALL_SIZE)
    assert all(case.name in table for case in demo.SMALL_SIZE)
    assert table.rstrip().splitlines()[-1].startswith("  python -m cutfuse.report")
    assert "nothing is timed: kernels are for CUDA devices" in table
    assert "ratio:" not in table


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_a_usage_error(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--device", device])
    assert f"error: --device {device}: " in capsys.readouterr().err


def test_a_wrong_model_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "SMALL_SIZE", (demo.Case("Sigmoid", (), (4, 8)),))
    monkeypatch.setattr(cutfuse.nn.Sigmoid, "_call", lambda self, x, call=cutfuse.pointwise: call(torch.tanh, x))
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


def test_bars_are_parts_of_pytorchs_time_of_characters_that_the_output_has() -> None:
    drawn = [demo.bar(ratio, "#.") for ratio in (0.0, 0.25, 1.02, 3.0)]
    assert drawn == ["#" + 19 * ".", 5 * "#" + 15 * ".", 20 * "#", 20 * "#" + ">"]
    assert demo.bar_characters("utf-8") == "█░"
    assert demo.bar_characters("ascii") == demo.bar_characters(None) == "#."


def wide_results() -> list[demo.Result]:
    """The rows of a GPU with the longest texts, one slower than PyTorch and less accurate."""
    path = "planes of both operands in slices of K"
    return [
        demo.Result(case, demo.FLOAT32, path, (5.3e-7, error), (1.25e-2, seconds))
        for case, error, seconds in zip(
            demo.FULL_SIZE, (1e-7, 2e-7, 3e-7, 1.0, 5e-7), (1e-3, 2e-3, 12e-3, 4e-2, 5e-5), strict=True
        )
    ]


HEADINGS = {column.heading for column in demo.COLUMNS}
SHOWN = {
    60: {"model", "precision", "ratio", "check"},
    80: {"model", "precision", "ratio", demo.BAR_HEADING, "check"},
    100: HEADINGS - {"input", "path", "error:\nPyTorch", "error:\ncutfuse"},
    160: HEADINGS - {"input"},
    200: HEADINGS,
}


@pytest.mark.parametrize("width", SHOWN)
def test_no_cell_is_truncated(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = wide_results()
    monkeypatch.setenv("COLUMNS", str(width))
    demo.show_table(results)
    printed = capsys.readouterr().out
    shown, _, remark = printed.partition("ratio: time of cutfuse over PyTorch")
    assert all(len(line) <= width for line in remark.splitlines())
    remark = " ".join(remark.split()).partition("Columns left out, because the terminal is too narrow: ")[2]
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert SHOWN[width] == {column.heading for column in demo.arrange(results, "█░", width)[0]}
    for one in results:
        characters = demo.bar_characters(sys.stdout.encoding)
        texts = {column.heading: column.cell(one, characters) for column in demo.COLUMNS}
        (line,) = (line for line in lines if line.startswith(one.case.name + " "))
        assert [texts[heading] for heading in SHOWN[width] if texts[heading] not in line] == []
    for heading in SHOWN[width]:
        assert all(part in shown for part in heading.split("\n"))
    assert remark.startswith("input") == (width < 200)


@pytest.mark.parametrize("width", [80, 200])
def test_without_times_there_is_no_ratio(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    short = [replace(result, path="matrix-vector", seconds=None) for result in wide_results()]
    demo.show_table(short)
    shown = capsys.readouterr().out
    assert not re.search(r"ratio|time|full bar|[█#]", shown)
    assert shown.count("matrix-vector") == shown.count("5.3e-07") == len(short)
    assert max(map(len, shown.splitlines())) <= width


def test_a_terminal_shows_bars_in_colour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plain = [make_result(1e-3, 1e-3), make_result(1e-3, 1.0)]
    demo.show_table(plain)
    without_colours = capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    demo.show_table(plain)
    shown = capsys.readouterr().out
    assert shown.count("\x1b[32m") == 4  # green: two ratios and two bars, faster than PyTorch
    assert "\x1b[1;31mMISMATCH" in shown
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == without_colours


def test_the_command_runs() -> None:
    """As a module, of which nothing may be defined behind the line that runs it."""
    assert "as accurate as PyTorch's" in run_python("-m", "cutfuse.demo", "--device", "cpu")
