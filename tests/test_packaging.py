"""What an installation promises: it loads on any machine, quietly, and says which version it is."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python

import cutfuse
from cutfuse import native

ROOT = Path(__file__).resolve().parents[1]


def test_version_is_the_distributions() -> None:
    assert cutfuse.__version__ == importlib.metadata.version("cutfuse")


def test_the_readme_in_the_metadata_leads_to_the_repository() -> None:
    """Beside PyPI's page there is no file that a relative link could name."""
    metadata = importlib.metadata.metadata("cutfuse")
    readme = metadata.get_payload() or metadata.get("Description")
    if not readme:
        pytest.skip("this installation's metadata has no README")
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    assert all(target.startswith("https://") for target in targets), targets
    assert "/raw/HEAD/docs/images/" in readme
    prose = re.sub(r"```.*?```", "", readme, flags=re.DOTALL)
    assert re.findall(r"<\w+", prose) == [], "PyPI drops most of HTML"


def test_is_marked_as_typed() -> None:
    assert importlib.resources.files("cutfuse").joinpath("py.typed").is_file()


def test_only_torch_is_required() -> None:
    requirements = importlib.metadata.requires("cutfuse") or []
    assert [requirement for requirement in requirements if "extra ==" not in requirement] == ["torch>=2.8"]


def test_pytest_takes_the_installed_package(tmp_path: Path) -> None:
    """Beside a source tree too, whose package has no native module, and run as `python -m pytest` inside of it."""
    installed, tests = tmp_path / "installed" / "cutfuse", tmp_path / "source" / "tests"
    for folder in (installed, tests, tmp_path / "source" / "cutfuse"):
        folder.mkdir(parents=True)
    for path in {*Path(cutfuse.__file__).parent.iterdir(), Path(native.module().__file__)}:
        (installed / path.name).symlink_to(path)
    (tmp_path / "source" / "cutfuse" / "__init__.py").write_text("raise ImportError('from the source tree')")
    for name in ("conftest.py", "plane_device.py"):
        shutil.copy(Path(__file__).parent / name, tests)
    (tests / "test_import.py").write_text(
        f"import cutfuse\n\ndef test_it():\n    assert cutfuse.__file__ == {str(installed / '__init__.py')!r}\n"
    )
    # Without site, whose .pth files would let an editable installation win in any case.
    paths = [str(installed.parent), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    run_python("-S", "-m", "pytest", "-q", "tests", folder=tests.parent, PYTHONPATH=os.pathsep.join(paths))


def test_pytest_leaves_out_a_benchmark_plugin_of_the_machine(tmp_path: Path) -> None:
    """Its warning that it is off beside pytest-xdist would be an error, and end the run before the first test."""
    metadata = tmp_path / "pytest_benchmark-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-benchmark\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\nbenchmark = benchmark_of_the_machine\n")
    (tmp_path / "benchmark_of_the_machine.py").write_text(
        "import warnings\n\ndef pytest_configure(config):\n    warnings.warn('benchmarks are off', UserWarning)\n"
    )
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    run_python("-m", "pytest", "-q", *settings, "test_nothing.py", folder=tmp_path, PYTHONPATH=paths)


def test_without_its_native_module_it_says_where_it_was_imported_from() -> None:
    code = """
import sys, torch
sys.modules["cutfuse._C"] = None
import cutfuse
try:
    cutfuse.sigmoid(torch.ones(2))
except ImportError as error:
    print(error)
"""
    message = run_python("-c", code)
    assert f"beside {Path(cutfuse.__file__).parent}. If this is the source tree, run `pip install -e .`" in message


def test_import_does_no_cuda_work() -> None:
    assert run_python("-c", "import torch, cutfuse; print(torch.cuda.is_initialized())") == "False"


def test_import_needs_no_other_package() -> None:
    code = "import sys, cutfuse; print([name for name in ('rich', 'matplotlib', 'pytest') if name in sys.modules])"
    assert run_python("-c", code) == "[]"


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
    assert run_python("-c", code) == "0"


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
