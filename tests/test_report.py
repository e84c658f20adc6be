"""`python -m cutfuse.report`: tells of the build and the machine, whatever is missing or broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import cutfuse
from cutfuse import __main__ as commands
from cutfuse import demo, native, report
from cutfuse.epilogue import __main__ as epilogue
from cutfuse.explain import Availability
from cutfuse.layer import planner


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
    monkeypatch.setattr(native, "core", core)
    assert lines_of("build")["kernels"] == "CUDA 13.0.88"
    assert lines_of("build")["other kernels"] == "80-real 90-real"


def test_a_module_of_an_older_build_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "core", SimpleNamespace(cuda_build=True))
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
    monkeypatch.setattr(native, "core", core)
    monkeypatch.setattr(cutfuse, "is_available", lambda device: Availability(True, ""))
    monkeypatch.setattr(cutfuse, "pointwise", lambda *arguments: calls.append(1))
    described = report.describe_paths(torch.device("cpu"))
    assert described == f"linear layers in one kernel; direct path {state}"


@pytest.mark.gpu
def test_on_a_gpu_the_direct_path_is_on() -> None:
    assert "direct path on" in report.describe_paths(torch.device("cuda", 0))


# The commands of the package: what `python -m cutfuse` lists, help, answers, and what they say without the module.


CALLS = """
import torch, cutfuse
x = torch.ones(4, 4)
for call in (
    lambda: cutfuse.linear(x, x, epilogue=torch.sigmoid, reduce="sum"),
    lambda: cutfuse.reduce(x, 0),
    lambda: cutfuse.nn.FusedLinear(4, 4, reduce="amax"),
):
    try:
        call()
    except ImportError as error:
        print("pip install -e ." in str(error))
"""


def test_the_commands_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 0
    listed = dict(re.findall(r"^python -m (\S+)  +(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    assert set(listed) == {"cutfuse.demo", "cutfuse.epilogue", "cutfuse.report", "bench"}


@pytest.mark.parametrize("command", [commands, demo, epilogue, report])
def test_each_command_has_help(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m cutfuse")


@pytest.fixture(scope="module")
def without_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree in which nothing was built."""
    folder = tmp_path_factory.mktemp("source")
    package = Path(cutfuse.__file__).parent
    shutil.copytree(package, folder / "cutfuse", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    return folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    # Without site, whose .pth files would let an editable installation win over this package.
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)


@pytest.mark.parametrize("command", ["cutfuse.demo", "cutfuse.epilogue"])
def test_a_command_without_the_module_says_what_to_do(command: str, without_module: Path) -> None:
    result = run_in(without_module, "-m", command)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cutfuse's native module cannot be imported")
    assert "pip install -e ." in line


def test_the_report_without_the_module_has_all_other_lines(without_module: Path) -> None:
    result = run_in(without_module, "-m", "cutfuse.report")
    assert result.returncode == 0, result.stderr
    assert "BROKEN: cutfuse's native module cannot be imported" in result.stdout
    assert "fast paths\n  FAILED" in result.stdout
    assert f"  {'torch':26}{torch.__version__}" in result.stdout


def test_a_call_with_a_reduction_without_the_module_says_what_to_do(without_module: Path) -> None:
    result = run_in(without_module, "-c", CALLS)
    assert result.stdout.split() == ["True"] * 3, result.stderr


def test_no_function_is_listed_twice() -> None:
    names = [line.partition("(")[0] for line in epilogue.listing() if re.match(r"torch\.", line)]
    assert len(names) > 100
    assert [name for name, count in Counter(names).items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "part", "is_known"),
    [
        ("gelu", "approximate='tanh'", True),
        ("F.silu", "a * sigmoid(a)", True),
        ("torch.Tensor.add", "a + alpha * b", True),
        ("+", "a + alpha * b", True),
        ("arcsin", "arcsin(a)", True),
        ("nn.Hardtanh", "hardtanh z", True),
        ("floor_divide", "a // b", True),
        ("__add__", "operator", True),
        ("softmax", "combines elements of a row or a column", False),
        ("nn.Softmax", "combines elements of a row or a column", False),
        ("sum", 'use reduce="sum"', False),
        ("relu_", "use torch.relu", False),
        ("torch.lgamma", "its derivative", False),
        ("matmul", "it is a further product", False),
        ("nn.Linear", "with its arguments", False),
        ("gelo", "did you mean gelu", False),
    ],
)
def test_a_function_is_described_or_what_the_language_lacks(
    name: str, part: str, is_known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert epilogue.main(["relu", name]) == (0 if is_known else 1)
    assert part in capsys.readouterr().out


# `cutfuse.is_available`: true where kernels run, and the reason where they do not.


def pretend(
    monkeypatch: pytest.MonkeyPatch, devices: int = 1, cuda: str | None = "13.0", built: bool = True, major: int = 9
) -> None:
    """PyTorch with CUDA devices of a capability, and a build of cutfuse with kernels or without."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    for module in (planner, report):
        monkeypatch.setattr(module, "device_facts", lambda device: (major, 0, 132))
    monkeypatch.setattr(native, "has_kernels", lambda: built and cuda is not None)


@pytest.mark.parametrize(
    ("device", "machine", "is_available", "reason"),
    [
        *((device, {}, True, "") for device in (None, 0, "cuda", "cuda:0", torch.device("cuda", 0))),
        (None, {"major": 8}, True, "fused products need compute capability 9.0, this device has 8.0"),
        ("cpu", {}, False, "kernels are for CUDA devices"),
        (None, {"cuda": None}, False, f"PyTorch {torch.__version__} is built without CUDA"),
        (None, {"devices": 0}, False, "PyTorch finds no CUDA device"),
        ("cuda:3", {}, False, "PyTorch finds 1 CUDA devices, and no cuda:3"),
        (None, {"built": False}, False, "this build of cutfuse has no CUDA kernels"),
        (None, {"major": 7}, False, "the kernels are for sm_80 and later"),
    ],
)
def test_it_is_true_or_false_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device | str | None,
    machine: dict[str, Any],
    is_available: bool,
    reason: str,
) -> None:
    pretend(monkeypatch, **machine)
    found = cutfuse.is_available(device)
    assert (bool(found), found.reason) == (is_available, reason)
    assert repr(found) == (f"{is_available}: {reason}" if reason else str(is_available))


def test_without_the_native_module_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> SimpleNamespace:
        raise ImportError("run `pip install -e .`")

    pretend(monkeypatch)
    monkeypatch.setattr(native, "module", missing)
    assert repr(cutfuse.is_available()) == "False: run `pip install -e .`"
