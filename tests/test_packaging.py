"""What an installation promises: it loads on any machine, quietly, and says which version it is."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import shutil
import subprocess
import sys

import pytest

import cutfuse
from cutfuse import native


def run_python(code: str) -> str:
    """Runs `code` in a fresh interpreter and returns what it prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_version_is_the_distributions() -> None:
    assert cutfuse.__version__ == importlib.metadata.version("cutfuse")


def test_is_marked_as_typed() -> None:
    assert importlib.resources.files("cutfuse").joinpath("py.typed").is_file()


def test_only_torch_is_required() -> None:
    requirements = importlib.metadata.requires("cutfuse") or []
    assert [requirement for requirement in requirements if "extra ==" not in requirement] == ["torch>=2.8"]


def test_import_does_no_cuda_work() -> None:
    assert run_python("import torch, cutfuse; print(torch.cuda.is_initialized())") == "False"


def test_import_needs_no_other_package() -> None:
    code = "import sys, cutfuse; print([name for name in ('rich', 'matplotlib', 'pytest') if name in sys.modules])"
    assert run_python(code) == "[]"


@pytest.mark.gpu
def test_import_makes_no_cuda_context() -> None:
    code = """
import ctypes
import cutfuse
from cutfuse import native
native.module()
driver = ctypes.CDLL("libcuda.so.1")
device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
assert driver.cuInit(0) == 0
assert driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
print(active.value)
"""
    assert run_python(code) == "0"


def list_symbols(*flags: str) -> list[str]:
    """The dynamic symbols of the native module."""
    if shutil.which("nm") is None:
        pytest.skip("nm, of binutils, lists a library's symbols")
    command = ["nm", "--dynamic", *flags, native.module().__file__]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in listing.stdout.splitlines()]


def test_module_needs_no_cuda_library() -> None:
    """cudart is inside and looks for the driver when first used, so the module loads where there is neither."""
    undefined = list_symbols("--undefined-only")
    assert "PyModule_Create2" in undefined or "PyModuleDef_Init" in undefined
    assert [symbol for symbol in undefined if symbol.startswith(("cu", "__cuda"))] == []


def test_module_exports_no_cuda_runtime() -> None:
    """torch brings a cudart of its own, whose symbols ours must not stand in for."""
    exported = list_symbols("--defined-only")
    assert "PyInit__C" in exported
    assert [symbol for symbol in exported if symbol.startswith(("cu", "__cuda"))] == []
