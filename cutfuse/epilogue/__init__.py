"""The epilogue language: tracing a Python callable to a program, and what can be done with one."""

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, input, operand
from cutfuse.epilogue.lower import Affine, split_affine
from cutfuse.epilogue.program import Instruction, Program, evaluate
from cutfuse.epilogue.resolve import resolve
from cutfuse.epilogue.table import op_table
from cutfuse.epilogue.trace import Epilogue

__all__ = [
    "Affine",
    "Epilogue",
    "EpilogueError",
    "Expr",
    "Instruction",
    "Program",
    "evaluate",
    "input",
    "op_table",
    "operand",
    "resolve",
    "split_affine",
]
