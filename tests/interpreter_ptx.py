"""The PTX of kernels that interpret programs, which tests compile from the source tree as the build does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
sys.path.append(str(ROOT / "build_backend"))


def compile_ptx(source: str, folder: Path, options: Sequence[str]) -> str:
    """What nvcc makes of a source. Skips the test where there is no source tree, as beside a wheel, or no nvcc."""
    if not CSRC.is_dir():
        pytest.skip("the interpreter's source is only in the source tree")
    import toolchain

    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    (folder / "interpreter.cu").write_text(source)
    own = ["-std=c++17", "-O3", "-DNDEBUG", f"-I{CSRC}", "--expt-relaxed-constexpr", *options]
    result = subprocess.run([nvcc, *own, "-ptx", "interpreter.cu"], cwd=folder, capture_output=True, text=True)
    if "jump-table-density" in result.stderr:  # an option of CUDA 13
        return compile_ptx(source, folder, [option for option in options if "jump-table-density" not in option])
    assert result.returncode == 0, result.stderr
    return (folder / "interpreter.ptx").read_text()
