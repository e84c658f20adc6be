"""Pre-norm MLP blocks, as transformers have them, in plain PyTorch and with cutfuse: same parameters, same results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


class PlainBlock(nn.Module):
    """`x + down(gelu(up(norm(x))))` of x `[..., width]`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class FusedBlock(nn.Module):
    """The same with what follows each linear layer inside it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = cutfuse.nn.FusedLinear(width, hidden, epilogue=F.gelu)
        self.down = cutfuse.nn.FusedLinear(hidden, width, epilogue=lambda z, residual: residual + z)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)), x)


def build_stacks(
    count: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Sequential, nn.Sequential]:
    """`count` blocks in plain PyTorch, and `count` with cutfuse that share their parameters."""
    torch.manual_seed(0)
    with device:
        plain = nn.Sequential(*(PlainBlock(width, hidden) for _ in range(count))).to(dtype)
    with torch.device("meta"):
        fused = nn.Sequential(*(FusedBlock(width, hidden) for _ in range(count)))
    fused.load_state_dict(plain.state_dict(keep_vars=True), strict=True, assign=True)
    return plain, fused
