"""What ops.def says that an op takes, counted in the PTX that kernels have compiled in."""

from __future__ import annotations

import re

import pytest

from cutfuse import native

core = native.module()
if not core.cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

SPECIAL = {"ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "sqrt"}
FREE = ("ld.param", "st.param", "mov", "ret")  # of the function, which is pasted, and moves that ptxas takes out
FUNCTION = re.compile(
    r"\.visible \.func[^(]*\([^)]*\) op_(fast|accurate)_(\w+)\([^)]*\)\s*\{(.*?)^\}", re.MULTILINE | re.DOTALL
)


def work_of(body: str) -> tuple[int, int]:
    """Instructions of a function, and the special functions among them."""
    instructions = special = 0
    for statement in re.split(r"[;{}\n]", body):
        opcode = re.sub(r"^@!?%?\w+\s+", "", statement.strip()).split(" ")[0].split("\t")[0]
        if not opcode or opcode[0] in "./$%" or opcode.endswith(":") or opcode.startswith(FREE):
            continue
        instructions += 1
        special += opcode.split(".")[0] in SPECIAL or opcode.startswith("div.full")
    return instructions, special


def test_the_table_has_what_the_compiler_makes_of_each_op() -> None:
    counted = {(kind, name): work_of(body) for kind, name, body in FUNCTION.findall(core.op_snippets())}
    table = {}
    for op in core.op_table():
        table["fast", op.name] = op.fast_work
        table["accurate", op.name] = op.accurate_work
    wrong = {
        key: f"ops.def has Work{work}, counted Work{counted[key]}"
        for key, work in table.items()
        if counted[key] != work
    }
    assert not wrong
