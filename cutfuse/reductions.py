"""The reductions that there are, from the native module's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import native

if TYPE_CHECKING:
    from . import _C


def _read_table() -> list[_C.ReductionInfo]:
    try:
        return native.core.reduction_table()
    except (ImportError, AttributeError):  # AttributeError: a module of an older build
        return []  # importing cutfuse succeeds without its module, so that cutfuse.report can tell of it


_TABLE = _read_table()

# By name, PyTorch's own.
REDUCTIONS: dict[str, Callable[..., Tensor]] = {row.name: getattr(torch, row.name) for row in _TABLE}
# What the gradient of the result is multiplied by for each element: see csrc/reduce/reductions.def.
GRADIENTS = {row.name: row.gradient for row in _TABLE}
# Those whose gradients depend on their results.
NEEDS_RESULT = tuple([row.name for row in _TABLE if row.needs_result])
# Those that a factor may be taken out of.
ADDITIVE = tuple([row.name for row in _TABLE if row.is_additive])
