"""The Python of the README and of the documentation's pages, what it prints, and the pages' generated text.

As a program it writes the generated text and what the blocks print into the pages: `python tests/documents.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generated_text
import pytest
import torch

import cutfuse
from cutfuse.native import predicting

ROOT = Path(__file__).resolve().parents[1]
NEEDS_GPU = "needs a GPU"
OF_H200 = "facts of an H200"
OF_PACKAGE = generated_text.NOT_RUN
BLOCK = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)


def pages() -> list[Path]:
    """The README and the documentation; none where the tests run away from the source tree."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path.is_file()] if (ROOT / "docs").is_dir() else []


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """One block of Python. `printed`: the block of text behind it, None where there is none."""

    page: str
    line: int
    mark: str
    code: str
    printed: str | None

    @property
    def is_run(self) -> bool:
        return self.mark not in (NEEDS_GPU, OF_PACKAGE)

    def compile(self) -> Any:
        """With the page's lines in a traceback. A block about an H200's plans has CPU tensors here."""
        code = self.code.replace('"cuda"', '"cpu"') if self.mark == OF_H200 else self.code
        return compile("\n" * (self.line - 1) + code, self.page, "exec")

    def run(self, namespace: dict[str, Any]) -> str:
        """What it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as printed, _facts(self.mark):
            exec(self.compile(), namespace)
        return printed.getvalue()


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(name_of(path), text.count("\n", 0, match.start(2)) + 1, match[1] or "", match[2], match[3])
        for match in BLOCK.finditer(text)
    ]


def _facts(mark: str) -> contextlib.AbstractContextManager[None]:
    return explained_for_h200() if mark == OF_H200 else contextlib.nullcontext()


@contextlib.contextmanager
def explained_for_h200() -> Iterator[None]:
    """Within it, `cutfuse.explain` says what it says on an H200."""
    explain = cutfuse.explain

    def explain_for_h200(*args: Any, **kwargs: Any) -> Any:
        with predicting("explain", "H200"):
            return explain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutfuse, "explain", explain_for_h200)
        yield


def run_page(path: Path) -> list[tuple[Block, str]]:
    """Runs a page's blocks in order as one script, and gives what each prints. The rest is compiled only."""
    script = types.ModuleType("__main__")
    torch.manual_seed(0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", script)  # where torch.compile looks for what its functions read
        for block in blocks_of(path):
            if not block.is_run:
                block.compile()
            found.append((block, block.run(vars(script)) if block.is_run else ""))
    return found


def write_page(path: Path) -> bool:
    """Writes a page's generated text and what its blocks print into it, and says whether that was news."""
    before = path.read_text(encoding="utf-8")
    text = generated_text.fill(before)
    path.write_text(text, encoding="utf-8")
    printed = iter([output for _, output in run_page(path)])

    def replace(match: re.Match[str]) -> str:
        new = next(printed)
        if match[3] is None:
            return match[0]
        start, end = (place - match.start() for place in match.span(3))
        return f"{match[0][:start]}{new}{match[0][end:]}"

    changed = BLOCK.sub(replace, text)
    path.write_text(changed, encoding="utf-8")
    return changed != before


def main() -> None:
    for path in pages():
        if write_page(path):
            print(name_of(path))


if __name__ == "__main__":
    main()
