"""Writes the C++ file that holds the PTX of kernels: `embed_kernel_templates.py CPP OBJECT...`.

An OBJECT of GEMM kernels has its PTX beside it, in OBJECT.ptx (checked_nvcc.py keeps it); one that is called *.ptx is
PTX itself, of kernels that are compiled for nothing else. A source holds several kernels, which share functions. A
template is one kernel, under the name of its row in gemm_configs.def or its own, with what it needs of them, and with
an empty body of run_epilogue: that is replaced anyway (csrc/specialize/kernel_text.h).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embed_op_snippets import DELIMITER, without_comments

REPLACED = "run_epilogue"
KERNEL = re.compile(r"(?:sm90|fma)_gemmINS_\d+(sm90_\w+?)EEE")
# nvcc gives names of internal linkage a number that differs between builds.
INTERNAL = re.compile(r"_INTERNAL_[0-9a-f]{8}_|_GLOBAL__N__[0-9a-f]{8}_|(?<=_cu_)[0-9a-f]{8}")
NAME = re.compile(r"[\w$.]+")
SOURCE = """// Written by cmake/embed_kernel_templates.py.
#include "specialize/kernel_text.h"

namespace cutfuse::specialize {{
namespace {{

struct NamedTemplate {{
  std::string_view name;
  std::string_view ptx;
}};

constexpr NamedTemplate kTemplates[] = {{
{rows}
}};

}}  // namespace

std::string_view kernel_template(std::string_view kernel) {{
  for (NamedTemplate const& found : kTemplates) {{
    if (found.name == kernel) return found.ptx;
  }}
  return {{}};
}}

}}  // namespace cutfuse::specialize
"""


@dataclass(frozen=True)
class Item:
    """A declaration or definition: a line that ends with ";", or a function with its body."""

    text: str
    name: str
    is_kernel: bool

    @property
    def is_body(self) -> bool:
        return "{" in self.text and not self.text.startswith(".global")


def split_items(ptx: str) -> tuple[str, list[Item]]:
    """The directives at the head, and what follows them."""
    lines = iter(ptx.splitlines(keepends=True))
    head = ""
    for line in lines:
        head += line
        if line.startswith(".address_size"):
            break
    return head, list(_items(lines))


def _items(lines: Iterator[str]) -> Iterator[Item]:
    for first in lines:
        text, depth = first, first.count("{") - first.count("}")
        is_function = first.startswith((".func", ".visible .entry", ".entry", ".visible .func", ".weak .func"))
        while depth or (is_function and not _is_finished(text)) or (not is_function and ";" not in text):
            line = next(lines)
            text += line
            depth += line.count("{") - line.count("}")
        yield Item(text, _name_of(text, is_function), ".entry" in text.split("(")[0])


def _is_finished(function: str) -> bool:
    return function.rstrip().endswith((";", "}"))


def _name_of(text: str, is_function: bool) -> str:
    if is_function:
        head = re.sub(r"\(\.param[^)]*func_retval[^)]*\)", "", text.split("{")[0])
        return NAME.findall(head.split("(")[0])[-1]
    return NAME.findall(re.split(r"[\[=;]", text)[0])[-1]


def without_body(item: Item) -> Item:
    open_brace = item.text.index("{")
    return Item(item.text[: open_brace + 1] + "\n}\n", item.name, item.is_kernel)


def templates(ptx: str, are_named: bool = False) -> dict[str, str]:
    """The template of each kernel that runs a program in one source's PTX, by the name of its row in gemm_configs.def.

    are_named: of every kernel, by its own name instead.
    """
    head, items = split_items(INTERNAL.sub("_INTERNAL_", without_comments(ptx)))
    items = [without_body(item) if REPLACED in item.name and item.is_body else item for item in items]
    found = {}
    for kernel in items:
        if not kernel.is_kernel:
            continue
        name = kernel.name if are_named else _row_of(kernel)
        needed = _needed(kernel, items)
        if not are_named and not any(REPLACED in item.name for item in needed):
            continue
        text = head + "".join(item.text for item in items if item in needed)
        found[name] = text.replace(kernel.name, name)  # what a profiler shows
    return found


def _row_of(kernel: Item) -> str:
    row = KERNEL.search(kernel.name)
    if row is None:
        raise ValueError(f"the kernel {kernel.name} is of no row of gemm_configs.def")
    return row[1]


def _needed(kernel: Item, items: list[Item]) -> list[Item]:
    """The kernel, and everything that it names, directly or not."""
    needed, names, pending = [], set(), {kernel.name}
    while pending:
        names |= pending
        added = [item for item in items if item.name in pending]
        needed += added
        mentioned = {name for item in added for name in NAME.findall(item.text)}
        pending = {item.name for item in items if item.name in mentioned} - names
    return needed


def embed(found: dict[str, str]) -> str:
    if any(f"){DELIMITER}" in text for text in found.values()):
        raise ValueError(f"the PTX holds the end of a raw string, '){DELIMITER}'")
    # With its length, which the compiler would otherwise count, and give up on.
    rows = (f'    {{"{name}", {{R"{DELIMITER}({text}){DELIMITER}", {len(text)}}}}},' for name, text in found.items())
    return SOURCE.format(rows="\n".join(rows))


def main(target: str, *objects: str) -> None:
    found: dict[str, str] = {}
    for source in objects:
        is_ptx = source.endswith(".ptx")
        ptx = Path(source if is_ptx else f"{source}.ptx")
        if ptx.is_file():  # the objects of C++ sources have none
            found.update(templates(ptx.read_text(), are_named=is_ptx))
    if not found:
        raise FileNotFoundError(f"none of {len(objects)} objects has its PTX beside it")
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(embed(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
