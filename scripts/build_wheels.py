"""`python scripts/build_wheels.py --cuda 13.0`: a wheel for each CPython from one build of the kernels, audited.

The kernels know no Python, so they are compiled once (half an hour on 2 cores) or given by --kernels, and each
interpreter compiles the module alone (a minute). Every wheel is imported, checked by audit_wheel.py and written to
--wheel-dir with its manylinux tag. An interpreter that is missing is listed as missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "scripts")]

import cuda_requirements  # noqa: E402
import wheel_plan  # noqa: E402
from wheel_plan import Interpreter  # noqa: E402

_IMPORT = """
import importlib.util, sys, warnings
warnings.simplefilter("ignore")  # of a module that turns the GIL on: that is what is asked for below
spec = importlib.util.spec_from_file_location("cutfuse._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
kernels = "with kernels" if module.cuda_build else "without kernels"
print(kernels + ("" if getattr(sys, "_is_gil_enabled", lambda: True)() else ", without the GIL"))
"""


class BuildError(Exception):
    """A step that failed; the message names its log."""


@dataclass(frozen=True)
class Row:
    """What became of one version of Python."""

    version: str
    state: str
    wheel: str = ""
    size: str = ""


class Workshop:
    """A folder for everything that is made on the way, and a log for each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tools = folder / "tools" / "bin"

    def run(self, step: str, command: Sequence[str], environment: dict[str, str] | None = None) -> str:
        """Runs a command and returns what it prints. Raises BuildError where it fails."""
        log = self.folder / f"{step}.log"
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            before = log.stat().st_size
            result = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        printed = log.read_bytes()[before:].decode(errors="replace")
        if result.returncode != 0:
            last = printed.strip().splitlines()[-1:] or [f"exits with {result.returncode}"]
            raise BuildError(f"{last[0]} (see {log})")
        return printed

    def install_tools(self, compiles_kernels: bool) -> None:
        self.run("tools", [sys.executable, "-m", "venv", str(self.tools.parent)])
        requirements = ["-r", str(ROOT / "scripts" / "requirements.txt")]
        if compiles_kernels:
            requirements += ["cmake>=3.24", "ninja", cuda_requirements.CUTLASS_REQUIREMENT]
        self.run("tools", [str(self.tools / "python"), "-m", "pip", "install", "--quiet", *requirements])

    def export_source(self, local: str) -> Path:
        """The tree that the wheels are made of: what git has of the commit, with the local version written into it."""
        source = self.folder / f"source-{local}"
        shutil.rmtree(source, ignore_errors=True)
        archive = self.folder / "source.tar"
        self.run("source", ["git", "-C", str(ROOT), "archive", "--output", str(archive), "HEAD"])
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(source, filter="data")
            else:
                tar.extractall(source)
        return source

    def build_kernels(self, source: Path, toolkit: Path, local: str) -> Path:
        build = self.folder / f"kernels-{local}"
        environment = {"PATH": os.pathsep.join([str(self.tools), os.environ.get("PATH", "")])}
        commands = wheel_plan.kernels_commands(
            source, build, str(self.tools / "cmake"), str(self.tools / "python"), toolkit
        )
        for command in commands:
            self.run(f"kernels-{local}", command, environment)
        return build / "libcutfuse_kernels.a"

    def build_wheel(self, interpreter: Interpreter, source: Path, kernels: Path | None, toolkit: Path | None) -> Path:
        folder = self.folder / "raw" / interpreter.version
        shutil.rmtree(folder, ignore_errors=True)
        command = wheel_plan.wheel_command(interpreter.path, source, folder, kernels)
        self.run(f"python{interpreter.version}", command, wheel_plan.toolkit_variables(toolkit))
        (wheel,) = folder.glob("cutfuse-*.whl")
        if interpreter.tag not in wheel.name:
            raise BuildError(f"{wheel.name} should have the tag {interpreter.tag}")
        return wheel

    def import_module(self, interpreter: Interpreter, wheel: Path) -> str:
        """Imports the wheel's native module alone, without PyTorch: says what kind of build it is."""
        folder = wheel.parent / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.startswith("cutfuse/_C.") and name.endswith(".so"))
            archive.extract(name, folder)
        return self.run(f"python{interpreter.version}", [interpreter.path, "-c", _IMPORT, str(folder / name)]).strip()

    def audit(self, interpreter: Interpreter, wheel: Path, wheel_dir: Path, platform: str) -> Path:
        command = [str(self.tools / "python"), str(ROOT / "scripts" / "audit_wheel.py"), str(wheel)]
        printed = self.run(
            f"python{interpreter.version}", [*command, "--wheel-dir", str(wheel_dir), "--platform", platform]
        )
        return Path(printed.split(" satisfies ")[0].splitlines()[-1])


def show_rows(rows: Sequence[Row]) -> None:
    """A table, with rich where it is installed."""
    headings = ("Python", "state", "wheel", "size")
    cells = [(row.version, row.state, row.wheel, row.size) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        for line in (headings, *cells):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*headings)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--cuda", help="a CUDA toolkit: its folder, or its version, as 12.8 for /usr/local/cuda-12.8")
    kind.add_argument("--without-kernels", action="store_true", help="wheels for machines without a GPU")
    parser.add_argument("--kernels", type=Path, help="a libcutfuse_kernels.a of this commit and toolkit, made before")
    parser.add_argument("--python", action="append", default=[], help="an interpreter, before those that are found")
    parser.add_argument("--versions", nargs="+", default=list(wheel_plan.WANTED), help="default: %(default)s")
    parser.add_argument("--platform", default="auto", help="the manylinux policy to demand, as manylinux_2_28_x86_64")
    parser.add_argument(
        "--index-version", action="store_true", help="no local version such as +cu130, which PyPI refuses"
    )
    parser.add_argument("--wheel-dir", type=Path, default=ROOT / "dist", help="folder of the audited wheels")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "build" / "wheels", help="folder of logs and kernels")
    parser.add_argument("--require-all", action="store_true", help="exit with 1 where an interpreter is missing")
    return parser.parse_args(arguments)


def build_all(options: argparse.Namespace, workshop: Workshop) -> list[Row]:
    """One row for each wanted version. Raises BuildError and ValueError for what stops them all."""
    toolkit = wheel_plan.find_toolkit(options.cuda, os.environ) if options.cuda else None
    release = None
    if toolkit is not None:
        release = wheel_plan.cuda_version(workshop.run("toolkit", [str(toolkit / "bin" / "nvcc"), "--version"]))
    local = wheel_plan.local_version(release)
    paths = [*options.python, *wheel_plan.candidates(options.versions)]
    interpreters = wheel_plan.find_interpreters(options.versions, paths)
    print(f"{local}: tools and source", flush=True)
    workshop.install_tools(compiles_kernels=toolkit is not None and options.kernels is None)
    source = workshop.export_source(local)
    if not options.index_version:
        version_file = source / "cutfuse" / "__init__.py"
        version_file.write_text(wheel_plan.with_local_version(version_file.read_text(), local))
    kernels = options.kernels and options.kernels.resolve()
    if toolkit is not None and kernels is None:
        print(f"{local}: kernels", flush=True)
        kernels = workshop.build_kernels(source, toolkit, local)
    return [
        build_one(options, workshop, version, interpreters[version], source, kernels, toolkit)
        for version in interpreters
    ]


def build_one(
    options: argparse.Namespace,
    workshop: Workshop,
    version: str,
    interpreter: Interpreter | None,
    source: Path,
    kernels: Path | None,
    toolkit: Path | None,
) -> Row:
    if interpreter is None:
        return Row(version, "missing: no interpreter with C headers was found")
    print(f"{version}: wheel by {interpreter.path}", flush=True)
    try:
        raw = workshop.build_wheel(interpreter, source, kernels, toolkit)
        state = workshop.import_module(interpreter, raw)
        wheel = workshop.audit(interpreter, raw, options.wheel_dir, options.platform)
    except BuildError as error:
        return Row(version, f"failed: {error}")
    return Row(version, f"built and audited, {state}", wheel.name, f"{wheel.stat().st_size / 1e6:.1f} MB")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        rows = build_all(options, Workshop(options.work_dir.resolve()))
    except (BuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    show_rows(rows)
    unwanted = ("failed", "missing") if options.require_all else ("failed",)
    return int(any(row.state.startswith(unwanted) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
