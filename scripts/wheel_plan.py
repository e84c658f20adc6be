"""What `build_wheels.py` decides before it runs anything: interpreters, versions, tags and command lines."""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# A release has a wheel for each; "t" is the free-threaded build.
WANTED = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")

# Where interpreters are that PATH does not name: of pyenv, of uv, and of the manylinux images.
FOLDERS = (
    "~/.pyenv/versions/*/bin/python3",
    "~/.local/share/uv/python/*/bin/python3",
    "/opt/python/cp3*/bin/python3",
)

_PROBE = """
import json, os, platform, sys, sysconfig
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2] + ("t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
    "implementation": platform.python_implementation(),
    "has_headers": os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs: "3.14t", and whether its C headers are installed."""

    path: str
    version: str
    has_headers: bool

    @property
    def tag(self) -> str:
        """The wheel's Python and ABI tags."""
        number = self.version.rstrip("t").replace(".", "")
        return f"cp{number}-cp{self.version.replace('.', '')}"


def probe(path: str) -> Interpreter | None:
    """The interpreter at `path`; None where it does not run, or is not CPython."""
    try:
        result = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, timeout=60)
        found = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if found["implementation"] != "CPython":
        return None
    return Interpreter(path, found["version"], found["has_headers"])


def candidates(wanted: Iterable[str]) -> list[str]:
    """The paths that may be interpreters: on PATH by version, then those of FOLDERS."""
    paths = [
        os.path.join(folder, f"python{version}")
        for version in wanted
        for folder in os.get_exec_path()
        if os.access(os.path.join(folder, f"python{version}"), os.X_OK)
    ]
    for pattern in FOLDERS:
        paths += sorted(glob.glob(os.path.expanduser(pattern)))
    return paths


def find_interpreters(wanted: Sequence[str], paths: Iterable[str]) -> dict[str, Interpreter | None]:
    """For each wanted version the first interpreter of `paths` with C headers, or None."""
    found: dict[str, Interpreter | None] = dict.fromkeys(wanted)
    for path in paths:
        if None not in found.values():
            break
        interpreter = probe(path)
        if interpreter and interpreter.has_headers and found.get(interpreter.version, interpreter) is None:
            found[interpreter.version] = interpreter
    return found


def find_toolkit(cuda: str, environment: Mapping[str, str]) -> Path:
    """The CUDA toolkit that `--cuda` names: a folder, or a version such as 12.8 under /usr/local.

    Raises ValueError where there is no nvcc in it.
    """
    places = [Path(cuda)]
    if re.fullmatch(r"\d+\.\d+", cuda):
        major, minor = cuda.split(".")
        # The variables are those of NVIDIA's and conda's module files.
        named = [environment.get(f"CUDA_HOME_{major}_{minor}"), f"/usr/local/cuda-{cuda}"]
        places = [Path(place) for place in named if place]
    for place in places:
        if (place / "bin" / "nvcc").is_file():
            return place
    raise ValueError(f"--cuda {cuda}: there is no bin/nvcc in {' or '.join(map(str, places))}")


def cuda_version(nvcc_output: str) -> str:
    """The release in what `nvcc --version` prints, as 12.8."""
    match = re.search(r"release (\d+\.\d+)", nvcc_output)
    if match is None:
        raise ValueError(f"nvcc --version names no release: {nvcc_output!r}")
    return match[1]


def local_version(cuda: str | None) -> str:
    """What stands behind the "+" of a wheel's version: cu128 as in PyTorch's wheels, cpu without kernels."""
    return "cpu" if cuda is None else f"cu{cuda.replace('.', '')}"


def with_local_version(source: str, local: str) -> str:
    """The text of cutfuse/__init__.py with "+local" in its version, where the build takes the wheel's version from."""
    changed, count = re.subn(r'^(__version__ = "\d[^"+]*)"', rf'\1+{local}"', source, flags=re.MULTILINE)
    if count != 1:
        raise ValueError("cutfuse/__init__.py: one line has to be `__version__ = ...`, without a local version")
    return changed


def kernels_commands(source: Path, build: Path, cmake: str, python: str, toolkit: Path) -> list[list[str]]:
    """The commands that compile the kernels alone, to `build`/libcutfuse_kernels.a."""
    configure = [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", f"-DPython_EXECUTABLE={python}"]
    configure += [
        "-DCUTFUSE_BUILD_MODULE=OFF",
        "-DCUTFUSE_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
    ]
    return [configure, [cmake, "--build", str(build), "--target", "cutfuse_kernels"]]


def wheel_command(python: str, source: Path, folder: Path, kernels: Path | None) -> list[str]:
    """The command that makes one wheel, in build isolation: around `kernels`, or without any."""
    setting = "CUTFUSE_CUDA=OFF" if kernels is None else f"CUTFUSE_PREBUILT_KERNELS={kernels}"
    command = [python, "-m", "pip", "wheel", str(source), "--no-deps", "--wheel-dir", str(folder)]
    return [*command, f"--config-settings=cmake.define.{setting}"]


def toolkit_variables(toolkit: Path | None) -> dict[str, str]:
    """Has the build take cudart from the toolkit that compiled the kernels, whichever else the machine has."""
    if toolkit is None:
        return {}
    return {"CUDA_HOME": str(toolkit), "CUDA_PATH": str(toolkit), "CUDACXX": str(toolkit / "bin" / "nvcc")}
