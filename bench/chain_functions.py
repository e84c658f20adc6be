"""Chains as text, of which one Python function is made for every contender; and those that are written by hand."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.workloads import PRECISIONS, Shape

FULL, ROW, COLUMN, SCALAR = "full", "row", "column", "scalar"
MIXED = " mixed"
FP32 = torch.float32


@dataclass(frozen=True)
class Operand:
    """A tensor beside z `[M, N]`: of the same shape, a row `[N]`, a column `[M, 1]` or a scalar `[]`.

    One that is mixed has another type: fp32 behind a product of 16 bits, and bf16 behind one of 32.
    """

    kind: str
    is_mixed: bool = False

    @property
    def label(self) -> str:
        """As results have it."""
        return self.kind + MIXED * self.is_mixed

    def shape(self, m: int, n: int) -> Shape:
        """Its shape beside z."""
        return {FULL: (m, n), ROW: (n,), COLUMN: (m, 1), SCALAR: ()}[self.kind]

    def precision(self, product: str) -> str:
        """The precision that names its type, behind a product of precision `product`."""
        if not self.is_mixed:
            return product
        return "bf16" if PRECISIONS[product].dtype == FP32 else "fp32"


@dataclass(frozen=True)
class Chain:
    """What follows a product: the lines of a function of z and the operands a, b, c, and a reduction of each row.

    `ops`: how many operations it has, without casts and the reduction.
    """

    name: str
    ops: int
    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    reduce: str | None = None

    @cached_property
    def function(self) -> Callable[..., Tensor]:
        """The function: of z and the operands."""
        parameters = ", ".join(["z", *"abc"[: len(self.operands)]])
        source = f"def chain({parameters}):\n" + "".join(f"    {line}\n" for line in self.lines)
        file = f"<chain {self.name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
        namespace: dict[str, Any] = {"torch": torch, "F": F, "__name__": __name__}
        exec(compile(source, file, "exec"), namespace)
        return namespace["chain"]

    @property
    def operand_labels(self) -> str:
        """The operands as results have them."""
        return ", ".join(operand.label for operand in self.operands)

    @property
    def has_full(self) -> bool:
        """Whether an operand is as large as the result."""
        return any(operand.kind == FULL for operand in self.operands)

    def as_dict(self) -> dict[str, Any]:
        """What results say of it."""
        own = {"name": self.name, "ops": self.ops, "operands": self.operand_labels, "reduce": self.reduce}
        return {**own, "text": "; ".join(self.lines).replace("torch.", "").replace("F.", "")}


GELU_WRITTEN_OUT = (
    "u = 0.7978845608 * (z + 0.044715 * z * z * z)",
    "y = 0.5 * z * (1.0 + torch.tanh(u))",
)
ROWS_AND_FULL = (Operand(ROW), Operand(ROW), Operand(FULL))
HAND_WRITTEN = (
    Chain("relu", 1, (), ("return torch.relu(z)",)),
    Chain("residual", 1, (Operand(FULL),), ("return z + a",)),
    Chain("column scale", 1, (Operand(COLUMN),), ("return z * a",)),
    Chain("temperature", 1, (Operand(SCALAR),), ("return z * a",), "logsumexp"),
    Chain("gelu, column, z", 3, (Operand(COLUMN),), ("return F.gelu(z) * a + z",)),
    Chain("affine, residual", 3, ROWS_AND_FULL, ("return z * a + b + c",)),
    Chain("gelu, z", 3, (), ("return F.gelu(z * 2) + z",), "sum"),
    Chain("silu, scale in fp32", 3, (Operand(ROW, is_mixed=True),), ("return (F.silu(z) * a + z).to(z.dtype)",)),
    Chain("highway", 6, (Operand(FULL),), ("s = torch.sigmoid(z)", "return torch.tanh(s * a + (1 - s) * z)")),
    Chain("squash", 6, (), ("v = torch.tanh(torch.clamp(F.silu(z) * 0.5, -1.0, 1.0))", "return v + 0.1 + z")),
    Chain("gelu written out", 12, ROWS_AND_FULL, (*GELU_WRITTEN_OUT, "return y * a + b + c")),
    Chain("gelu written out, relu", 12, (), (*GELU_WRITTEN_OUT, "return torch.relu(y * 1.5 + 0.25)"), "sum"),
)
# Of what is no product: six Light ops of ops.def, and two Special ones besides.
LIGHT_LINES = ("v = torch.relu(z * 1.5 + 0.25)", "v = torch.minimum(v, a) * 0.75")
LIGHT = Chain("six Light ops", 6, (Operand(FULL),), (*LIGHT_LINES, "return F.hardswish(v)"))
LIGHT_ALONE = Chain(
    "six Light ops",
    6,
    (),
    ("v = F.leaky_relu(z * 1.5 + 0.25, 0.1)", "v = torch.clamp(v, -4.0, 4.0) * 0.75", "return F.hardswish(v)"),
)
SPECIAL = Chain(
    "six Light ops, two Special",
    8,
    (Operand(FULL),),
    (*LIGHT_LINES, "v = F.hardswish(v)", "return F.silu(torch.sigmoid(v))"),
)
