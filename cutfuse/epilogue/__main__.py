"""`python -m cutfuse.epilogue`: the functions of the epilogue language, from the op table and the compositions."""

from __future__ import annotations

from collections.abc import Iterator

from cutfuse.epilogue.registry import describe_compositions
from cutfuse.epilogue.table import Op, op_table
from cutfuse.printing import print_lines


def format_op(op: Op) -> tuple[str, str, str]:
    """How the op is written, its formula over its arguments a, b and c, and its special values."""
    arguments = list(op.tensors)
    arguments += [f"{name}={value:g}" for name, value in op.parameters]
    arguments += [f"{name}={value!r}" for name, value in op.literals]
    operators = [f"a {op.infix} b"] if op.infix else [f"{op.prefix}a"] if op.prefix else []
    spellings = [f"{op.path}({', '.join(arguments)})", *op.aliases, *operators]
    return ", ".join(spellings), op.formula, op.special


def listing() -> Iterator[str]:
    """The lines to print."""
    for spellings, formula, special in map(format_op, op_table().ops):
        yield spellings
        yield f"    {formula}" + (f"    [{special}]" if special else "")
    yield ""
    yield "Composed of these; methods of Tensor and functions of torch.special have the same names:"
    for spellings, formula in describe_compositions():
        yield spellings
        if formula:
            yield f"    {formula}"


def main() -> None:
    print_lines(listing())


if __name__ == "__main__":
    main()
