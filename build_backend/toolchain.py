"""Where nvcc and the CUTLASS headers are: one answer for the build hook and for CMake, which runs this file.

`python toolchain.py nvcc|wheel-nvcc|cutlass` prints a path, or nothing where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path


def find_nvcc() -> str | None:
    """The nvcc of CUDACXX, PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda, in this order."""
    named = os.environ.get("CUDACXX")
    if named:
        return shutil.which(named)
    on_path = shutil.which("nvcc")
    if on_path:
        return on_path
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = (shutil.which("nvcc", path=os.path.join(root, "bin")) for root in roots if root)
    return next((path for path in candidates if path), None)


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
    finders: dict[str, Callable[[], str | None]] = {
        "nvcc": find_nvcc,
        "wheel-nvcc": find_wheel_nvcc,
        "cutlass": find_cutlass,
    }
    if len(arguments) != 1 or arguments[0] not in finders:
        print(f"usage: toolchain.py {'|'.join(finders)}", file=sys.stderr)
        return 2
    print(finders[arguments[0]]() or "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
