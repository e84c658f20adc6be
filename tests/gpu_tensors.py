"""Random tensors on a GPU, and views of four dimensions of them."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda"

VIEWS = {
    "contiguous": lambda t: t,
    "permuted": lambda t: t.permute(3, 1, 0, 2),
    "channels_last": lambda t: t.permute(0, 3, 1, 2),
    "sliced": lambda t: t[:, 1:3, ::2],
    "offset": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "expanded": lambda t: t[:, :1, :, :1].expand(t.shape),
    "narrow": lambda t: t[:, :1, :, :1],
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    torch.manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(shape, device=DEVICE).to(dtype)
