"""Where nvcc and the CUTLASS headers are: one answer for the build hook and for CMake, which runs this file.

`python toolchain.py nvcc [COMPILER]|wheel-nvcc|cutlass` prints a path, or nothing where there is none. A compiler that
was named, in CUDACXX or as COMPILER (CMake's CMAKE_CUDA_COMPILER), and is none is an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


class ToolchainError(Exception):
    """A compiler that was named and cannot be used."""


def find_nvcc(compiler: str = "") -> str | None:
    """CMake's compiler where one is named, or the nvcc of CUDACXX, PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda.

    Raises ToolchainError where CMAKE_CUDA_COMPILER or CUDACXX names what does not run.
    """
    for variable, named in (("CMAKE_CUDA_COMPILER", compiler), ("CUDACXX", os.environ.get("CUDACXX"))):
        if named:
            return _check_compiler(variable, named)
    on_path = shutil.which("nvcc")
    if on_path:
        return on_path
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = (shutil.which("nvcc", path=os.path.join(root, "bin")) for root in roots if root)
    return next((path for path in candidates if path), None)


def _check_compiler(variable: str, named: str) -> str:
    path = shutil.which(named)
    if path is None:
        raise ToolchainError(
            f"{variable} is {named!r}, which is no executable file and no command on PATH; name an nvcc without flags, "
            "or unset it to have one searched for"
        )
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        failure = f"exits with status {result.returncode}" if result.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = f"fails: {error}"
    if failure:
        raise ToolchainError(
            f"{variable} is {named!r}, but `{path} --version` {failure}. Name an nvcc that runs, or unset it"
        )
    return path


def _package_folders(name: str) -> list[Path]:
    """The folders of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def find_wheel_nvcc() -> str | None:
    """The nvcc that the `cuda-toolkit[nvcc]` wheels install under site-packages/nvidia/cu13."""
    compilers = (folder / "cu13" / "bin" / "nvcc" for folder in _package_folders("nvidia"))
    return next((str(path) for path in compilers if path.is_file()), None)


def find_cutlass() -> str | None:
    """The CUTLASS source tree inside the `nvidia-cutlass` wheel."""
    sources = (folder / "source" for folder in _package_folders("cutlass_library"))
    return next((str(path) for path in sources if (path / "include" / "cutlass").is_dir()), None)


def main(arguments: list[str]) -> int:
    finders: dict[str, Callable[..., str | None]] = {
        "nvcc": find_nvcc,
        "wheel-nvcc": find_wheel_nvcc,
        "cutlass": find_cutlass,
    }
    if not arguments or arguments[0] not in finders or len(arguments) > (2 if arguments[0] == "nvcc" else 1):
        print("usage: toolchain.py nvcc [COMPILER]|wheel-nvcc|cutlass", file=sys.stderr)
        return 2
    try:
        print(finders[arguments[0]](*arguments[1:]) or "")
    except ToolchainError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
