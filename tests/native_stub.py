"""Writes `cutfuse/_C.pyi`, the types of the native module. `make stub` runs this, and formats the result.

pybind11-stubgen reads them from a module with the kernels' functions. Where the installed one has none, the bindings
are compiled alone, with the CUDA runtime's headers and without nvcc: a module that can be imported, and not called.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "cutfuse" / "_C.pyi"
HEADER = '"""The native module of a build with CUDA kernels. Written by `make stub`, from csrc/bindings*."""\n\n'

# A parameter takes every object that Python makes an integer or a float of; what is passed here is one.
SIMPLER = {
    "typing.SupportsInt | typing.SupportsIndex": "int",
    "typing.SupportsFloat | typing.SupportsIndex": "float",
}


def describe(library: Path) -> str:
    """The stub of a native module, given the file of its shared library."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "cutfuse"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / library.name).symlink_to(library)
        # Without site, whose .pth files would let an editable installation win over this package.
        run([sys.executable, "-S", "-m", "pybind11_stubgen", "cutfuse._C", "-o", "out", "--exit-code"], Path(folder))
        text = (Path(folder) / "out" / "cutfuse" / "_C.pyi").read_text()
    for accepted, meant in SIMPLER.items():
        text = text.replace(accepted, meant)
    return re.sub(r"^(\w+: bool) = \w+$", r"\1", text, flags=re.MULTILINE)  # cuda_build, of this build


def declarations(stub: str) -> dict[str, str]:
    """The text of each name that a stub declares, whatever its layout."""
    found = {}
    for node in ast.parse(stub).body:
        for part in ast.walk(node):
            if isinstance(part, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(part) is not None:
                part.body[0] = ast.Expr(ast.Constant(inspect.cleandoc(ast.get_docstring(part) or "")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ast.unparse(node)
    return found


def compile_bindings(folder: Path) -> Path:
    """A module of all bindings, whose undefined symbols are weak: null, as the kernels are not there."""
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DCUTFUSE_WITH_CUDA=1"]
    places = [ROOT / "csrc", find_pybind11(), Path(sysconfig.get_path("include")), find_cuda_headers()]
    for source in binding_sources():
        run([*compiler, *(f"-I{place}" for place in places), "-c", str(source)], folder)
    objects = sorted(str(path) for path in folder.glob("*.o"))
    for path in objects:
        run(["objcopy", "--weaken", path], folder)
    library = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    # Weak references alone would not have libstdc++ loaded.
    run([compiler[0], "-shared", "-Wl,--no-as-needed", *objects, "-o", str(library)], folder)
    return library


def binding_sources() -> list[Path]:
    """Of the module, but for the kernels' own launcher, of which nothing is needed to read types."""
    folders = [("", "bindings*.cpp"), ("call", "*.cpp"), ("launch", "*.cpp")]
    found = [path for folder, names in folders for path in sorted((ROOT / "csrc" / folder).glob(names))]
    return [path for path in found if path.name != "no_kernels.cpp"]


def find_pybind11() -> Path:
    spec = importlib.util.find_spec("pybind11")
    if spec is None or spec.origin is None:
        raise SystemExit('pybind11 is missing: pip install "cutfuse[lint]"')
    return Path(spec.origin).parent / "include"


def find_cuda_headers() -> Path:
    sys.path.insert(0, str(ROOT / "build_backend"))
    import cuda_requirements
    import toolchain

    compilers = [toolchain.find_nvcc(), toolchain.find_wheel_nvcc()]
    toolkits = [Path(compiler).resolve().parents[1] for compiler in compilers if compiler]
    toolkits += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    for toolkit in toolkits:
        if (toolkit / "include" / "cuda_runtime.h").is_file():
            return toolkit / "include"
    raise SystemExit(
        "The CUDA runtime's headers are missing: install a CUDA toolkit and set CUDA_HOME to it, or "
        f'pip install "{cuda_requirements.NVCC_REQUIREMENT}"'
    )


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exits with {result.returncode}:\n{result.stdout}{result.stderr}")


def main() -> None:
    from cutfuse import native

    with tempfile.TemporaryDirectory() as folder:
        has_kernels = native.module().cuda_build
        library = Path(native.module().__file__ or "") if has_kernels else compile_bindings(Path(folder))
        STUB.write_text(HEADER + describe(library))


if __name__ == "__main__":
    main()
