"""The build's own Python: the requirements it asks for, where it finds nvcc, what it refuses in nvcc's output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "build_backend").is_dir():
    pytest.skip("the build files are only in the source tree", allow_module_level=True)

sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "cmake")]

import checked_nvcc  # noqa: E402
import cuda_requirements  # noqa: E402
import toolchain  # noqa: E402

CUTLASS = [cuda_requirements.CUTLASS_REQUIREMENT]
NVCC = [cuda_requirements.NVCC_REQUIREMENT]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CMAKE_ARGS", "SKBUILD_CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE", "CUTLASS_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["/usr/bin/nvcc", None])
def nvcc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(cuda_requirements, "find_nvcc", lambda compiler: request.param)
    return request.param


def test_cutlass_is_asked_for_only_with_an_nvcc(nvcc: str | None) -> None:
    assert cuda_requirements.cuda_requirements(None) == (CUTLASS if nvcc else [])


def test_nvcc_wheels_are_asked_for_only_without_an_nvcc(nvcc: str | None) -> None:
    settings = {"cmake.define.CUTFUSE_NVCC_WHEELS": "ON"}
    assert cuda_requirements.cuda_requirements(settings) == (CUTLASS if nvcc else NVCC + CUTLASS)


@pytest.mark.parametrize(
    "settings",
    [
        {"cmake.define.CUTFUSE_CUDA": "OFF"},
        {"cmake.define.CUTFUSE_CUDA": "off", "cmake.define.CUTFUSE_NVCC_WHEELS": "ON"},
        {"skbuild.cmake.define.CUTFUSE_CUDA": "OFF"},
        {"cmake.args": ["-DOTHER=1", "-DCUTFUSE_CUDA:STRING=OFF"]},
        {"cmake.define.CUTFUSE_PREBUILT_KERNELS": "/some/libcutfuse_kernels.a"},
    ],
)
def test_a_build_without_nvcc_asks_for_nothing(nvcc: str | None, settings: dict[str, str | list[str]]) -> None:
    assert cuda_requirements.cuda_requirements(settings) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CMAKE_ARGS", "-G Ninja '-DCUTFUSE_CUDA=OFF'"),
        ("SKBUILD_CMAKE_ARGS", "-DX=1;-DCUTFUSE_CUDA=OFF"),
        ("SKBUILD_CMAKE_DEFINE", "X=1;CUTFUSE_CUDA=OFF"),
    ],
)
def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert cuda_requirements.cmake_variable("CUTFUSE_CUDA", {}) == "OFF"
    assert cuda_requirements.cmake_variable("CUTFUSE_CUDA", {"cmake.define.CUTFUSE_CUDA": "ON"}) == "ON"


def test_a_cutlass_tree_replaces_the_wheel(nvcc: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_requirements.cuda_requirements({"cmake.define.CUTLASS_DIR": "/some/cutlass"}) == []
    monkeypatch.setenv("CUTLASS_DIR", "/some/cutlass")
    assert cuda_requirements.cuda_requirements(None) == []


def make_compiler(path: Path, status: int = 0) -> None:
    path.write_text(f"#!{sys.executable}\nraise SystemExit({status})\n")
    path.chmod(0o755)


def test_cudacxx_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("first", "second/bin"):
        (tmp_path / folder).mkdir(parents=True)
        make_compiler(tmp_path / folder / "nvcc")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "second"))
    assert toolchain.find_nvcc() == str(tmp_path / "second/bin/nvcc")
    monkeypatch.setenv("CUDACXX", str(tmp_path / "first/nvcc"))
    assert toolchain.find_nvcc() == str(tmp_path / "first/nvcc")


@pytest.mark.parametrize("variable", ["CUDACXX", "CMAKE_CUDA_COMPILER"])
def test_a_named_compiler_that_does_not_run_is_an_error(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another nvcc is on PATH: it is not the one that was asked for."""
    make_compiler(tmp_path / "nvcc")
    make_compiler(tmp_path / "broken", status=3)
    (tmp_path / "text").write_text("no program")
    monkeypatch.setenv("PATH", str(tmp_path))
    messages = {"missing": "no executable file", "text": "no executable file", "broken": "exits with status 3"}
    for name, message in messages.items():
        compiler = str(tmp_path / name)
        if variable == "CUDACXX":
            monkeypatch.setenv(variable, compiler)
            settings = {}
        else:
            settings = {f"cmake.define.{variable}": compiler}
        with pytest.raises(toolchain.ToolchainError, match=f"{variable} is .*{name}.*{message}.* unset it"):
            cuda_requirements.cuda_requirements(settings)
        assert cuda_requirements.cuda_requirements({**settings, "cmake.define.CUTFUSE_CUDA": "OFF"}) == []
        assert toolchain.main(["nvcc", *settings.values()]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize("variable", ["CUDACXX", "CMAKE_CUDA_COMPILER"])
def test_cmake_fails_on_a_named_compiler_that_does_not_run(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={sys.executable}"]
    if variable == "CUDACXX":
        monkeypatch.setenv(variable, str(tmp_path / "nvcc"))
    else:
        command.append(f"-D{variable}={tmp_path / 'nvcc'}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert f"{variable} is '" in " ".join(result.stderr.split())


def test_the_readmes_pip_options_are_spelt_as_every_pip_takes_them() -> None:
    """`-C` needs pip 23.1; the oldest Pythons' own pip is older."""
    for name in ("README.md", "CONTRIBUTING.md", "CMakeLists.txt"):
        assert re.findall(r"-C ?cmake\.", (ROOT / name).read_text()) == []


PTXAS_REPORT = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelv
    {stack} bytes stack frame, {stack} bytes spill stores, {stack} bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
"""


def test_a_clean_ptxas_report_has_no_faults() -> None:
    assert checked_nvcc.find_faults(PTXAS_REPORT.format(stack=0)) == []


def test_a_spill_is_a_fault() -> None:
    (fault,) = checked_nvcc.find_faults(PTXAS_REPORT.format(stack=16))
    assert re.search(r"spill.*16 bytes stored.*sm_90a.*_Z6kernelv", fault)


@pytest.mark.parametrize("code", ["C7507", "C7508", "C7510"])
def test_a_lost_asynchronous_instruction_is_a_fault(code: str) -> None:
    report = f"ptxas info    : ({code}) Potential Performance Loss: something is serialized in the function 'f'\n"
    assert checked_nvcc.find_faults(report) == [report.strip()]


def test_the_launcher_fails_a_compilation_that_spills(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The compiler here is a Python that prints a report; the object file's report is kept beside it."""
    command = [sys.executable, "-c", f"print({PTXAS_REPORT.format(stack=8)!r})", "-o", str(tmp_path / "kernel.o")]
    assert checked_nvcc.main(command) == 1
    shown = capfd.readouterr().err
    assert "register spill" in shown
    assert "Used 168 registers" not in shown
    assert "Used 168 registers" in (tmp_path / "kernel.o.ptxas.txt").read_text()


# Writes one intermediate file for each of the names given last into the folder of --keep-dir.
COMPILER = """\
import sys
from pathlib import Path
folder = next(word.removeprefix("--keep-dir=") for word in sys.argv if word.startswith("--keep-dir="))
for name in {names}:
    (Path(folder) / name).write_text("of " + name)
"""


def test_the_launcher_keeps_the_ptx(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing else of what nvcc leaves."""
    target = str(tmp_path / "kernel.o")
    program = COMPILER.format(names=["kernel.ptx", "kernel.cubin"])
    assert checked_nvcc.main(["--keep-ptx", sys.executable, "-c", program, "-o", target]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernel.o.ptx", "kernel.o.ptxas.txt"]
    assert (tmp_path / "kernel.o.ptx").read_text() == "of kernel.ptx"
    assert checked_nvcc.main(["--keep-ptx", sys.executable, "-c", "raise SystemExit(3)", "-o", target]) == 3
    assert not (tmp_path / "kernel.o.ptx").exists(), "the PTX of an earlier source"
    for names in ([], ["kernel.compute_80.ptx", "kernel.compute_90a.ptx"]):
        program = COMPILER.format(names=names)
        assert checked_nvcc.main(["--keep-ptx", sys.executable, "-c", program, "-o", target]) == 1
        assert "nvcc kept no PTX" in capfd.readouterr().err


def test_pybind11_is_the_builds_where_the_stub_is_made() -> None:
    """How it writes types down differs between versions."""
    assert len(re.findall(r'"pybind11==([\d.]+)"', (ROOT / "pyproject.toml").read_text())) == 2
    assert len(set(re.findall(r'"pybind11[^"-]*"', (ROOT / "pyproject.toml").read_text()))) == 1


def test_pre_commit_pins_what_ci_installs() -> None:
    pins = set(re.findall(r'"((?:ruff|clang-format)==[\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert pins == set(re.findall(r'"((?:ruff|clang-format)==[\d.]+)"', (ROOT / ".pre-commit-config.yaml").read_text()))
    assert len(pins) == 2
