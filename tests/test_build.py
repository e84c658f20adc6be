"""The build's own Python: the requirements it asks for, where it finds nvcc, what it refuses in nvcc's output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cutfuse

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


# Settings, and what is asked for with an nvcc and without one.
REQUIREMENTS: list[tuple[dict[str, str | list[str]], list[str], list[str]]] = [
    ({}, CUTLASS, []),
    ({"cmake.define.CUTFUSE_NVCC_WHEELS": "ON"}, CUTLASS, NVCC + CUTLASS),
    ({"cmake.define.CUTFUSE_CUDA": "OFF"}, [], []),
    ({"cmake.define.CUTFUSE_CUDA": "off", "cmake.define.CUTFUSE_NVCC_WHEELS": "ON"}, [], []),
    ({"skbuild.cmake.define.CUTFUSE_CUDA": "OFF"}, [], []),
    ({"cmake.args": ["-DOTHER=1", "-DCUTFUSE_CUDA:STRING=OFF"]}, [], []),
    ({"cmake.define.CUTFUSE_PREBUILT_KERNELS": "/some/libcutfuse_kernels.a"}, [], []),
    ({"cmake.define.CUTLASS_DIR": "/some/cutlass"}, [], []),
]


@pytest.mark.parametrize(("settings", "with_nvcc", "without"), REQUIREMENTS)
def test_what_a_build_asks_for(
    settings: dict, with_nvcc: list[str], without: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for nvcc, expected in (("/usr/bin/nvcc", with_nvcc), (None, without)):
        monkeypatch.setattr(cuda_requirements, "find_nvcc", lambda compiler, nvcc=nvcc: nvcc)
        assert cuda_requirements.cuda_requirements(settings or None) == expected


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


def test_a_cutlass_tree_in_the_environment_replaces_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_requirements, "find_nvcc", lambda compiler: "/usr/bin/nvcc")
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


def test_tools_have_one_pin() -> None:
    """How pybind11 writes types down differs between versions; pre-commit runs what CI installs."""
    metadata, hooks = ((ROOT / name).read_text() for name in ("pyproject.toml", ".pre-commit-config.yaml"))
    pins = re.findall(r'"pybind11[^"-]*"', metadata)
    assert len(pins) == 2
    assert len({*pins, *re.findall(r'"pybind11==[\d.]+"', metadata)}) == 1
    linters = [set(re.findall(r'"((?:ruff|clang-format)==[\d.]+)"', text)) for text in (metadata, hooks)]
    assert linters[0] == linters[1]
    assert len(linters[0]) == 2


# What the release script decides: interpreters, versions, commands; and what an audited wheel may not have.


sys.path.insert(0, str(ROOT / "scripts"))

import audit_wheel  # noqa: E402
import build_wheels  # noqa: E402
import wheel_plan  # noqa: E402


def make_python(path: Path, version: str, *, headers: bool = True, implementation: str = "CPython") -> str:
    """A program that answers the probe as an interpreter of `version` would."""
    answer = {"version": version, "implementation": implementation, "has_headers": headers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps({answer!r}))\n")
    path.chmod(0o755)
    return str(path)


def test_the_first_usable_interpreter_of_a_version_is_taken(tmp_path: Path) -> None:
    paths = [
        str(tmp_path / "nothing"),
        make_python(tmp_path / "pypy", "3.12", implementation="PyPy"),
        make_python(tmp_path / "bare", "3.12", headers=False),
        make_python(tmp_path / "first", "3.12"),
        make_python(tmp_path / "second", "3.12"),
        make_python(tmp_path / "threads", "3.14t"),
    ]
    found = wheel_plan.find_interpreters(["3.12", "3.14", "3.14t"], paths)
    assert {version: python and python.path for version, python in found.items()} == {
        "3.12": str(tmp_path / "first"),
        "3.14": None,
        "3.14t": str(tmp_path / "threads"),
    }


def test_a_missing_interpreter_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = build_wheels.parse(["--without-kernels"])
    workshop = build_wheels.Workshop(tmp_path)
    row = build_wheels.build_one(options, workshop, "3.14t", None, tmp_path, None, None)
    build_wheels.show_rows([row])
    assert "3.14t" in capsys.readouterr().out
    assert row.state.startswith("missing")


@pytest.mark.parametrize(
    ("state", "flags", "status"),
    [("missing: none", [], 0), ("missing: none", ["--require-all"], 1), ("failed: why", [], 1)],
)
def test_missing_interpreters_fail_where_all_are_required_and_failed_builds_always(
    state: str, flags: list[str], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_wheels, "build_all", lambda *_: [build_wheels.Row("3.14", state)])
    assert build_wheels.main(["--without-kernels", "--work-dir", str(tmp_path), *flags]) == status


def test_a_toolkit_is_a_folder_or_a_version(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert wheel_plan.find_toolkit(str(tmp_path), {}) == tmp_path
    assert wheel_plan.find_toolkit("12.8", {"CUDA_HOME_12_8": str(tmp_path)}) == tmp_path
    with pytest.raises(ValueError, match=r"--cuda 9\.7: there is no bin/nvcc in /usr/local/cuda-9\.7"):
        wheel_plan.find_toolkit("9.7", {})


def test_the_local_version_is_nvccs_release() -> None:
    printed = "Cuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8.r12.8"
    assert wheel_plan.local_version(wheel_plan.cuda_version(printed)) == "cu128"
    assert wheel_plan.local_version(None) == "cpu"
    with pytest.raises(ValueError, match="names no release"):
        wheel_plan.cuda_version("gcc 12")


def test_the_local_version_is_written_where_the_build_reads_it() -> None:
    source = (ROOT / "cutfuse" / "__init__.py").read_text()
    changed = wheel_plan.with_local_version(source, "cu130")
    assert f'__version__ = "{cutfuse.__version__.split("+")[0]}+cu130"' in changed
    with pytest.raises(ValueError, match="one line has to be"):
        wheel_plan.with_local_version(changed, "cu130")


def test_the_pythons_of_the_wheels_are_those_of_the_metadata() -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    assert named == [version for version in wheel_plan.WANTED if not version.endswith("t")]
    assert f'requires-python = ">={wheel_plan.WANTED[0]}"' in metadata


@pytest.mark.parametrize(
    "name", ["libtorch.so", "libc10.so", "libcuda.so.1", "libcudart.so.13", "libpython3.12.so.1.0"]
)
def test_a_module_linked_with_what_users_bring_fails(name: str) -> None:
    audit_wheel.check_libraries({"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"})  # the system alone
    with pytest.raises(audit_wheel.AuditError, match=name.replace(".", r"\.")):
        audit_wheel.check_libraries({"libc.so.6", name})


def test_a_gcc_that_is_too_new_is_named_as_the_cause() -> None:
    message = "auditwheel repair: too-recent versioned symbols"
    explained = audit_wheel.explain_failure(message, (3, 4, 35), (3, 4, 33))
    assert "GLIBCXX_3.4.35" in explained
    assert "end at GLIBCXX_3.4.33" in explained
    assert message in explained
    assert audit_wheel.explain_failure(message, (3, 4, 33), (3, 4, 33)) == message
    assert audit_wheel.explain_failure(message, (), ()) == message
    assert audit_wheel.newest(["3.4.9", "LDBL_3.4", "3.4.30", "3.4"]) == (3, 4, 30)


def test_the_audit_reads_what_a_wheels_modules_need(tmp_path: Path) -> None:
    """Of a library that is linked here; then the audit refuses it."""
    subprocess.run(
        ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so"],
        cwd=tmp_path,
        check=True,
    )
    link = ["cc", "-shared", "-x", "c", "/dev/null", "-L.", "-Wl,--no-as-needed", "-lcuda", "-o", "_C.so"]
    subprocess.run(link, cwd=tmp_path, check=True)
    wheel = tmp_path / "cutfuse-1-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "_C.so", "cutfuse/_C.so")
        archive.writestr("cutfuse/__init__.py", "")
    assert "libcuda.so.1" in audit_wheel.needed_libraries(wheel)
    assert audit_wheel.main([str(wheel), "--wheel-dir", str(tmp_path / "out")]) == 1
