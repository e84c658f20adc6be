"""Runs nvcc and fails the compilation when ptxas spilled registers or gave up on asynchronous matrix instructions.

Used as the CUDA compiler launcher: `checked_nvcc.py [--keep-ptx] [ccache] nvcc ... -Xptxas=-v ... -o OBJECT`. ptxas's
resource report is kept in OBJECT.ptxas.txt; only other output and what is wrong are shown. --keep-ptx keeps the PTX of
a source for one architecture in OBJECT.ptx, which takes no time: nvcc makes it anyway.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# C7507 and C7508: setmaxnreg ignored; C7510: wgmma serialised. A pingpong GEMM with C7510 runs 1.8x slower on an H200.
FORBIDDEN_WARNING = re.compile(r"\bC75(07|08|10)\b")
FUNCTION = re.compile(r"Function properties for (\S+)|Compiling entry function '([^']+)' for '([^']+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REPORT_LINE = re.compile(r"^ptxas info\s*:|^\s+\d+ bytes stack frame,")


def find_faults(output: str) -> list[str]:
    """What in nvcc's output must not be: one line for each spill and each forbidden warning."""
    faults = []
    function, architecture = "unknown function", "unknown architecture"
    for line in output.splitlines():
        named = FUNCTION.search(line)
        if named:
            function = named[1] or named[2]
            architecture = named[3] or architecture
        spills = SPILLS.search(line)
        if spills and (int(spills[1]) or int(spills[2])):
            faults.append(f"register spill, {spills[1]} bytes stored, {spills[2]} loaded ({architecture}): {function}")
        if FORBIDDEN_WARNING.search(line):
            faults.append(line.strip())
    return faults


def compile_source(command: list[str]) -> subprocess.CompletedProcess[str]:
    # ccache's preprocessor mode sees one architecture's code only and so takes two sources that differ under
    # `#if __CUDA_ARCH__` for one (seen with 4.7); its depend mode hashes the files themselves.
    environment = {**os.environ, "CCACHE_DEPEND": "1"}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compile_and_keep_ptx(command: list[str], kept: Path) -> subprocess.CompletedProcess[str]:
    """Compiles, and moves the PTX among nvcc's intermediate files, which take 100 MB and more, to `kept`."""
    kept.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        result = compile_source([*command, "--keep", f"--keep-dir={folder}"])
        found = [path for path in Path(folder).iterdir() if path.suffix == ".ptx"]
        if result.returncode == 0 and len(found) == 1:
            found[0].rename(kept)
    return result


def main(command: list[str]) -> int:
    keeps_ptx = command[0] == "--keep-ptx"
    command = command[1:] if keeps_ptx else command
    target = command[command.index("-o") + 1] if "-o" in command else ""
    kept = Path(f"{target}.ptx") if keeps_ptx and target else None
    result = compile_and_keep_ptx(command, kept) if kept else compile_source(command)
    faults = find_faults(result.stdout)
    if kept and result.returncode == 0 and not kept.is_file():
        faults.append(f"nvcc kept no PTX of {target}, or that of several architectures")
    shown = [line for line in result.stdout.splitlines() if not REPORT_LINE.match(line)]
    if target:
        Path(f"{target}.ptxas.txt").write_text(result.stdout)
    for line in shown + [f"error: {fault}" for fault in faults]:
        print(line, file=sys.stderr)
    return result.returncode or (1 if faults else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
