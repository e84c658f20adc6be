"""What the release script decides: interpreters, versions, commands; and what an audited wheel may not have."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cutfuse

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "scripts").is_dir():
    pytest.skip("the release scripts are only in the source tree", allow_module_level=True)

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


def test_the_probe_tells_of_this_interpreter() -> None:
    found = wheel_plan.probe(sys.executable)
    assert found is not None
    assert found.version.rstrip("t") == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_tags_name_the_free_threaded_abi() -> None:
    assert wheel_plan.Interpreter("python", "3.10", True).tag == "cp310-cp310"
    assert wheel_plan.Interpreter("python", "3.14t", True).tag == "cp314-cp314t"


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


def test_interpreters_are_looked_for_on_path_and_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = make_python(tmp_path / "bin" / "python3.12", "3.12")
    elsewhere = make_python(tmp_path / "pyenv" / "3.11.7" / "bin" / "python3", "3.11")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(wheel_plan, "FOLDERS", (str(tmp_path / "pyenv/*/bin/python3"),))
    assert wheel_plan.candidates(["3.12", "3.13"]) == [on_path, elsewhere]


def test_a_missing_interpreter_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = build_wheels.parse(["--without-kernels"])
    workshop = build_wheels.Workshop(tmp_path)
    row = build_wheels.build_one(options, workshop, "3.14t", None, tmp_path, None, None)
    build_wheels.show_rows([row])
    assert "3.14t" in capsys.readouterr().out
    assert row.state.startswith("missing")


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--require-all"], 1)])
def test_missing_interpreters_fail_where_all_are_required(
    flags: list[str], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build_wheels, "build_all", lambda *_: [build_wheels.Row("3.14", "missing: none")])
    assert build_wheels.main(["--without-kernels", "--work-dir", str(tmp_path), *flags]) == status


def test_a_failed_build_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_wheels, "build_all", lambda *_: [build_wheels.Row("3.14", "failed: why")])
    assert build_wheels.main(["--without-kernels", "--work-dir", str(tmp_path)]) == 1


def test_a_failed_step_names_its_log(tmp_path: Path) -> None:
    workshop = build_wheels.Workshop(tmp_path)
    with pytest.raises(build_wheels.BuildError, match=r"the reason \(see .*step\.log\)"):
        workshop.run("step", [sys.executable, "-c", "import sys; sys.exit('the reason')"])


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


def test_kernels_are_compiled_once_and_by_the_toolkits_nvcc() -> None:
    configure, build = wheel_plan.kernels_commands(Path("src"), Path("out"), "cmake", "python", Path("/cuda"))
    assert "-DCMAKE_CUDA_COMPILER=/cuda/bin/nvcc" in configure
    assert "-DCUTFUSE_BUILD_MODULE=OFF" in configure
    assert build[-1] == "cutfuse_kernels"


def test_a_wheel_is_made_around_the_kernels_or_without_any() -> None:
    kernels = Path("/k/libcutfuse_kernels.a")
    command = wheel_plan.wheel_command("python", Path("src"), Path("out"), kernels)
    assert command[-1] == f"--config-settings=cmake.define.CUTFUSE_PREBUILT_KERNELS={kernels}"
    command = wheel_plan.wheel_command("python", Path("src"), Path("out"), None)
    assert command[-1] == "--config-settings=cmake.define.CUTFUSE_CUDA=OFF"


def test_cudart_is_the_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build looks for it in CUDA_HOME first, and by CUDACXX."""
    monkeypatch.setattr(build_wheels.wheel_plan, "wheel_command", lambda *_: ["sh", "-c", "echo $CUDA_HOME $CUDACXX"])
    workshop = build_wheels.Workshop(tmp_path)
    interpreter = wheel_plan.Interpreter("python", "3.12", True)
    with pytest.raises(ValueError, match="unpack"):  # no wheel was made
        workshop.build_wheel(interpreter, tmp_path, None, Path("/cuda"))
    assert "/cuda /cuda/bin/nvcc" in (tmp_path / "python3.12.log").read_text()
    assert wheel_plan.toolkit_variables(None) == {}


def test_the_classifiers_are_the_pythons_of_the_wheels() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert named == [version for version in wheel_plan.WANTED if not version.endswith("t")]


def test_the_oldest_wheel_is_of_the_oldest_python_that_the_package_takes() -> None:
    assert f'requires-python = ">={wheel_plan.WANTED[0]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "name", ["libtorch.so", "libc10.so", "libcuda.so.1", "libcudart.so.13", "libpython3.12.so.1.0"]
)
def test_a_module_linked_with_what_users_bring_fails(name: str) -> None:
    with pytest.raises(audit_wheel.AuditError, match=name.replace(".", r"\.")):
        audit_wheel.check_libraries({"libc.so.6", name})


def test_a_module_linked_with_the_system_alone_passes() -> None:
    audit_wheel.check_libraries({"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"})


def test_added_libraries_fail() -> None:
    with pytest.raises(audit_wheel.AuditError, match="libfoo"):
        audit_wheel.check_repaired(["cutfuse/_C.so", "cutfuse.libs/libfoo-1234.so"])
    audit_wheel.check_repaired(["cutfuse/_C.so", "cutfuse/__init__.py"])


def test_the_policy_is_the_oldest_that_the_name_has() -> None:
    name = "cutfuse-0.2.0-cp312-cp312-manylinux_2_31_x86_64.manylinux_2_28_x86_64.whl"
    assert audit_wheel.policy_of(name) == "manylinux_2_28_x86_64"
    with pytest.raises(audit_wheel.AuditError, match="no manylinux policy"):
        audit_wheel.policy_of("cutfuse-0.2.0-cp312-cp312-linux_x86_64.whl")


def test_a_gcc_that_is_too_new_is_named_as_the_cause() -> None:
    message = "auditwheel repair: too-recent versioned symbols"
    explained = audit_wheel.explain_failure(message, (3, 4, 35), (3, 4, 33))
    assert "GLIBCXX_3.4.35" in explained
    assert "end at GLIBCXX_3.4.33" in explained
    assert message in explained
    assert audit_wheel.explain_failure(message, (3, 4, 33), (3, 4, 33)) == message
    assert audit_wheel.explain_failure(message, (), ()) == message
    assert audit_wheel.newest(["3.4.9", "LDBL_3.4", "3.4.30", "3.4"]) == (3, 4, 30)


def test_the_audit_reads_which_libstdcxx_a_wheel_needs(tmp_path: Path) -> None:
    source = "#include <string>\nstd::string f(int x) { return std::to_string(x); }"
    library = tmp_path / "_C.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=source, text=True, check=True)
    wheel = tmp_path / "cutfuse-1-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "cutfuse/_C.so")
    assert audit_wheel.needed_glibcxx(wheel)[:2] == (3, 4)


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
