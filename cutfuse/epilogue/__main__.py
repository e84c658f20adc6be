"""`python -m cutfuse.epilogue`: the functions that an epilogue may use, or why it may not use those that are named."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence

import torch

from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.epilogue.calls import is_known, refuse_function
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.table import Description, describe_compositions, describe_op, find_namesakes, op_table
from cutfuse.report import print_lines

Group = list[Description]  # all that the language has of a function, under the names of the first


def group_functions() -> tuple[list[Group], list[Group]]:
    """The functions of the op table and those that are composed of it; no name is in two groups."""
    by_name: dict[str, Group] = {}
    sections: tuple[list[Group], list[Group]] = ([], [])
    described = map(describe_op, op_table().ops), describe_compositions()
    for section, descriptions in zip(sections, described, strict=True):
        for one in descriptions:
            known = [by_name[name] for name in one.names if name in by_name]
            new = [name for name in one.names if name not in by_name]
            if not known:
                known = [[]]
                section += known
            for group in {id(group): group for group in known}.values():
                _add(group, one._replace(names=(one.names if not group else (group[0].names[0], *new))))
            by_name.update(dict.fromkeys(new, known[0]))
    return sections


def _add(group: Group, one: Description) -> None:
    """Adds what is new of a function: of two with the same formula, another signature or what is special there."""
    for k, other in enumerate(group):
        if other.formula == one.formula and not one.special:
            return
        if (other.formula, other.signature) == (one.formula, one.signature):
            group[k] = other._replace(special="; ".join(filter(None, (other.special, one.special))))
            return
    group.append(one)


def format_group(group: Group) -> Iterator[str]:
    """The lines to print of a function: its names once, then each way to call it."""
    for k, one in enumerate(group):
        yield one.spellings if k == 0 else f"  {one.spellings.removeprefix(one.names[0])}"
        if one.formula:
            yield f"    {one.formula}" + (f"    [{one.special}]" if one.special else "")


def listing() -> Iterator[str]:
    """The lines to print of the whole language."""
    ops, compositions = group_functions()
    for group in ops:
        yield from format_group(group)
    yield ""
    yield "Composed of these; methods of Tensor and functions of torch.special have the same names:"
    for group in compositions:
        yield from format_group(group)


def answer(name: str) -> tuple[bool, list[str]]:
    """Whether an epilogue may use the function, method, operator or module of a name, and the lines to print of it."""
    bare = name.partition("(")[0].rpartition(".")[2]
    groups = [group for section in group_functions() for group in section if _is_named(group, bare)]
    if groups:
        return True, [line for group in groups for line in format_group(group)]
    functions = find_namesakes(f"torch.{bare}")
    if any(map(is_known, functions)):
        return True, [f"{name}", "    in the language, by the operator that it stands for"]
    module = getattr(torch.nn, bare, None)
    try:
        if functions:
            refuse_function(functions[0])
        if isinstance(module, type) and issubclass(module, torch.nn.Module):
            program = Epilogue(module()).program
            return True, [f"torch.nn.{bare}()", *program.pretty().splitlines()]
    except EpilogueError as error:
        return False, [name, f"    no: {error}"]
    except Exception as error:  # whatever a module makes of no arguments, or of a symbolic value
        return False, [name, f"    unknown ({error}): ask cutfuse.Epilogue(torch.nn.{bare}(...)), with its arguments"]
    names = {path.rpartition(".")[2] for section in group_functions() for group in section for path in group[0].names}
    close = difflib.get_close_matches(bare, sorted(names))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return False, [name, f"    no: PyTorch {torch.__version__} has no elementwise function of this name{hint}"]


def _is_named(group: Group, bare: str) -> bool:
    return any(bare in (name.rpartition(".")[2], *name.split()[1:2]) for one in group for name in one.names)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cutfuse.epilogue", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", help="functions to look up, as exp or torch.softmax; all without one")
    parser.epilog = "The exit status is 1 where an epilogue may not use one of the names."
    names = parser.parse_args(arguments).names
    native.require_module()
    answers = [answer(name) for name in names]
    print_lines([line for _, lines in answers for line in lines] if names else listing())
    return 0 if all(is_known for is_known, _ in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
