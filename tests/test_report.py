"""`python -m cutfuse.report`: tells of the build and the machine, whatever is missing or broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cutfuse
from cutfuse import native, report
from cutfuse.explain import Availability


def lines_of(title: str) -> dict[str, str]:
    return dict(report.SECTIONS[title]())


def test_it_names_build_and_versions() -> None:
    text = report.report()
    assert [line for line in text.splitlines() if not line.startswith("  ")] == list(report.SECTIONS)
    assert "FAILED" not in text
    assert f"{cutfuse.__version__}, in " in lines_of("build")["cutfuse"]
    assert lines_of("build")["compiler"] == native.core.build_info()["host_compiler"]
    assert lines_of("versions")["torch"] == torch.__version__


def test_as_json_it_has_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    report.main([])
    lines = []
    for title, section in found.items():
        lines += [title, *(f"  {name:26}{value}" for name, value in section.items())]
    assert lines == capsys.readouterr().out.splitlines()
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("module", ["cutfuse.report", "cutfuse.epilogue"])
def test_a_reader_that_leaves_is_no_traceback(module: str) -> None:
    """As `python -m cutfuse.report | head -1`; here nothing is read at all."""
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert "Traceback" not in errors
        assert "BrokenPipe" not in errors
        assert process.wait(timeout=240) == 1


def test_the_native_module_knows_how_it_was_built() -> None:
    info = native.core.build_info()
    assert info["host_compiler"]
    if native.core.cuda_build:
        assert info["cuda_compiler"].split(".")[0] >= "12"
        assert "90a" in info["gemm_architectures"]
        assert re.fullmatch(r"\d+(-real|-virtual)?( \d+(-real|-virtual)?)*", info["portable_architectures"])
    else:
        assert info["cuda_compiler"] == info["gemm_architectures"] == info["portable_architectures"] == ""


def test_a_build_with_kernels_names_toolkit_and_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"host_compiler": "GCC 12", "cuda_compiler": "13.0.88", "gemm_architectures": "90a-real"}
    info["portable_architectures"] = "80-real 90-real"
    core = SimpleNamespace(cuda_build=True, build_info=lambda: info)
    monkeypatch.setattr(native, "module", lambda: core)
    assert lines_of("build")["kernels"] == "CUDA 13.0.88"
    assert lines_of("build")["other kernels"] == "80-real 90-real"


def test_a_broken_native_module_is_reported(tmp_path: Path) -> None:
    """As a program, with a file in the module's place that is no library."""
    code = """
import runpy, sys
sys.modules["cutfuse._C"] = None
runpy.run_module("cutfuse.report", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "BROKEN: cutfuse's native module cannot be imported" in result.stdout
    assert "fast paths\n  FAILED" in result.stdout
    assert f"  {'torch':26}{torch.__version__}" in result.stdout


def test_a_module_of_an_older_build_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", lambda: SimpleNamespace(cuda_build=True))
    assert "BROKEN" in lines_of("build")["native module"]


def test_settings_are_those_of_now() -> None:
    assert lines_of("settings")["cutfuse.set_precision"] == "None"
    with cutfuse.precision("split6"):
        assert lines_of("settings")["fp32 products run in"] == "split6"
    with torch.autocast("cpu"):
        assert lines_of("settings")["autocast"] == "cpu"


def test_why_nothing_is_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.core, "why_not_specialized", lambda: "the driver compiles no PTX of CUDA 13")
    found = {"mode": "background", "epilogues compiled": "no: the driver compiles no PTX of CUDA 13"}
    assert lines_of("specialization") == found
    monkeypatch.setattr(native.core, "why_not_specialized", lambda: "")
    assert lines_of("specialization")["epilogues compiled"] == "yes"
    with cutfuse.specialization("off"):
        assert lines_of("specialization")["epilogues compiled"] == 'no: cutfuse.specialization is "off"'


def test_only_variables_that_are_set_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in report.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert report.variable_lines() == [("none", "of those that matter")]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert report.variable_lines() == [("NVIDIA_TF32_OVERRIDE", "0")]


def test_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(report, "__file__", str(tmp_path / "venv" / "cutfuse" / "report.py"))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "lib.so"))
    text = report.report()
    assert ", in ~/venv/cutfuse\n" in text
    assert "~/lib.so" in text
    assert str(tmp_path) not in text


def test_values_stay_on_their_lines_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0\nfast paths é \udcff \\")
    text = report.report()
    assert [line for line in text.splitlines() if not line.startswith("  ")] == list(report.SECTIONS)
    assert "0\\nfast paths \\xe9 \\udcff \\" in text
    assert text.isascii()


@pytest.mark.parametrize(
    ("script", "driver"),
    [("printf '570.1\\377\\n'", "570.1\\ufffd"), ("exit 3", "unknown: nvidia-smi exits with 3"), (None, "unknown: ")],
)
def test_whatever_nvidia_smi_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, driver: str
) -> None:
    """`None`: it may not be run."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755 if script else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    (line,) = [line for line in report.report().splitlines() if line.startswith("  driver")]
    assert line.split(maxsplit=1)[1].startswith(driver)


@pytest.mark.parametrize(("cuda", "why"), [("13.0", "finds no CUDA device"), (None, "is built without CUDA")])
def test_why_no_kernel_runs(cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert why in lines_of("fast paths")["kernels"]


@pytest.mark.parametrize(("remembers", "state"), [(True, "on"), (False, "OFF")])
def test_the_direct_path_is_tried(remembers: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    core = SimpleNamespace(direct_calls=lambda: len(calls) if remembers else 0)
    monkeypatch.setattr(native, "module", lambda: core)
    monkeypatch.setattr(cutfuse, "is_available", lambda device: Availability(True, ""))
    monkeypatch.setattr(cutfuse, "pointwise", lambda *arguments: calls.append(1))
    described = report.describe_paths(torch.device("cpu"))
    assert described == f"linear layers in one kernel; direct path {state}"


@pytest.mark.no_path("asserts that a call is direct itself")
@pytest.mark.gpu
def test_on_a_gpu_the_direct_path_is_on() -> None:
    assert "direct path on" in report.describe_paths(torch.device("cuda", 0))
