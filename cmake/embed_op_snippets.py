"""Writes the C++ file that holds the PTX of op_snippets.cu: `embed_op_snippets.py PTX CPP`."""

from __future__ import annotations

import sys
from pathlib import Path

DELIMITER = "PTX"
# What nvcc writes around the text of an asm statement.
ASM_BEGINS = "// begin inline asm"
ASM_ENDS = "// end inline asm"
SOURCE = """// Written by cmake/embed_op_snippets.py.
#include "specialize/op_snippets.h"

namespace cutfuse::specialize {{

std::string_view op_snippets_text() {{
  return R"{delimiter}({text}){delimiter}";
}}

OpSnippets const& op_snippets() {{
  static OpSnippets const snippets(op_snippets_text());
  return snippets;
}}

}}  // namespace cutfuse::specialize
"""


def without_comments(ptx: str) -> str:
    """Without lines of a comment alone. Raises ValueError where an asm statement has such a line.

    That may be a mark, which csrc/specialize would look for in vain: it stays behind an instruction.
    """
    kept, is_asm = [], False
    for line in (line.rstrip() for line in ptx.splitlines()):
        text = line.lstrip()
        if text in (ASM_BEGINS, ASM_ENDS):
            is_asm = text == ASM_BEGINS
        elif text.startswith("//"):
            if is_asm:
                raise ValueError(f"an asm statement has the line '{text}', which is left out: put an instruction first")
        elif text:
            kept.append(f"{line}\n")
    return "".join(kept)


def embed(ptx: str) -> str:
    text = without_comments(ptx)
    if f"){DELIMITER}" in text:
        raise ValueError(f"the PTX holds the end of a raw string, '){DELIMITER}'")
    return SOURCE.format(delimiter=DELIMITER, text=text)


def main(source: str, target: str) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(embed(Path(source).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
