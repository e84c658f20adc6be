"""`cutfuse/_C.pyi` says what the native module has: names, parameters, types, docstrings."""

from __future__ import annotations

from pathlib import Path

from native_stub import declarations, describe

import cutfuse
from cutfuse import native

STUB = Path(cutfuse.__file__).with_name("_C.pyi")


def find_differences(written: dict[str, str], built: dict[str, str], has_kernels: bool) -> list[str]:
    """What a stub and a module differ in. A module without kernels lacks names of the stub, which are not looked at."""
    found = [f"the module has {name}" for name in built.keys() - written.keys()]
    if has_kernels:
        found += [f"the module has no {name}" for name in written.keys() - built.keys()]
    common = (written.keys() & built.keys()) - (set() if has_kernels else {"__all__"})
    found += [f"{written[name]}\nis now\n{built[name]}" for name in sorted(common) if written[name] != built[name]]
    return found


def test_the_stub_is_the_modules() -> None:
    module = native.module()
    written, built = declarations(STUB.read_text()), declarations(describe(Path(module.__file__ or "")))
    assert len(built) > 5
    differences = find_differences(written, built, module.cuda_build)
    assert not differences, "\n\n".join(["cutfuse/_C.pyi is out of date: run `make stub`", *differences])


def test_what_counts_as_a_difference() -> None:
    written = declarations('def f(a: int) -> int:\n    """Of a."""\ndef kernel() -> None: ...\nflag: bool')
    for change in ("a: float", "b: int", "a: int = 0"):
        assert find_differences(written, declarations(f'def f({change}) -> int:\n    """Of a."""'), False)
    assert find_differences(written, declarations("def f(a: int) -> int: ..."), False)
    same = 'def f(\n    a: int,\n) -> int:\n    """\n    Of a.\n    """\nflag: bool'
    assert not find_differences(written, declarations(same), False)
    assert find_differences(written, declarations(same), True) == ["the module has no kernel"]
    assert find_differences(written, declarations(f"{same}\ndef new() -> None: ..."), False) == ["the module has new"]
