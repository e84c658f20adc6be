"""Writes the C++ file that holds the PTX of op_snippets.cu: `embed_op_snippets.py PTX CPP`."""

from __future__ import annotations

import sys
from pathlib import Path

DELIMITER = "PTX"
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
    lines = (line.rstrip() for line in ptx.splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.lstrip().startswith("//"))


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
