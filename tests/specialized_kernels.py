"""The PTX of a build's kernels with programs compiled in, and what ptxas says of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fused_products import dtype_of

from cutfuse import native
from cutfuse.epilogue import Program

core = native.module()


def specialized(
    kernel: str,
    program: Program,
    kinds: Sequence[str] = (),
    types: Sequence[str] | None = None,
    template: str = "",
    **options: Any,
) -> str:
    """A kernel's text with a program whose operands have its own type and are strided, unless types and kinds say more.

    template: a text in the place of the build's.
    """
    own = str(dtype_of(kernel)).removeprefix("torch.")
    codes = [core.dtypes()[name] for name in types or [own] * program.operand_count]
    named = [core.OperandKind.__members__[kind] for kind in kinds]
    template = template or core.kernel_template(kernel)
    text: str = core.specialize_kernel(template, program.native.without_chain, codes, kinds=named, **options)
    return text


def find_ptxas() -> str | None:
    return shutil.which("ptxas", path="/usr/local/cuda/bin") or shutil.which("ptxas")


needs_ptxas = pytest.mark.skipif(find_ptxas() is None, reason="there is no ptxas here")


@dataclass(frozen=True)
class Report:
    """What ptxas -v says of each function: bytes of spills, and registers of the kernel."""

    spills: dict[str, int]
    registers: dict[str, int]
    warnings: list[str]


def assemble(ptx: str, folder: Path, architecture: str = "sm_90a") -> Report:
    ptxas = find_ptxas()
    assert ptxas is not None
    source = folder / "kernels.ptx"
    source.write_text(ptx)
    command = [ptxas, "-v", f"-arch={architecture}", "-O3", str(source), "-o", str(folder / "kernels.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
    text = result.stderr
    properties = re.findall(
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    spills = {name: int(stores) + int(loads) for name, stores, loads in properties}
    registers = dict(re.findall(r"Compiling entry function '(\S+)' [^U]*?Used (\d+) registers", text, re.DOTALL))
    warnings = [line for line in text.splitlines() if "warning" in line.lower() or re.search(r"\bC75\d\d", line)]
    return Report(spills, {name: int(count) for name, count in registers.items()}, warnings)


def assemble_without_spills(ptx: str, folder: Path, architecture: str = "sm_90a", *what: object) -> Report:
    """And without warnings. what: what is assembled, for the message of a failure."""
    report = assemble(ptx, folder, architecture)
    assert not report.warnings, what
    assert not any(report.spills.values()), (*what, report)
    return report


def assert_roundings(ptx: str) -> None:
    """Each operation says how it is rounded, so that ptxas fuses none."""
    assert not re.search(r"\b(add|sub|mul|mad)(\.ftz)?\.f(32|64)\b", ptx), "a rounding is left open"
