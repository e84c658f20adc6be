"""Runs programs on the native host interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cutfuse.epilogue import Program
from cutfuse.native import module

VALUE = -1


def run_on_host(
    program: Program, z: torch.Tensor, operands: Sequence[torch.Tensor] = (), wrt: int = VALUE
) -> torch.Tensor:
    """The program's value in fp32, or its derivative with respect to z (wrt=0) or to operand wrt - 1."""
    arguments = [torch.as_tensor(tensor).to(torch.float32).contiguous() for tensor in (z, *operands)]
    out = torch.empty_like(arguments[0])
    pointers = [(tensor.data_ptr(), int(tensor.numel() > 1)) for tensor in arguments[1:]]
    module().evaluate(program.native, arguments[0].data_ptr(), out.data_ptr(), out.numel(), pointers, wrt)
    return out
