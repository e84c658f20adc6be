"""Inputs of the GPU tests of products over planes."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda"
# Where "guarded" is predicted to be faster over planes than through cuBLAS.
LARGE = (1024, 4096, 4096)
KERNELS = {"split3": ("sm90_split3", "sm90_convert3"), "split6": ("sm90_split6", "sm90_convert6")}
SPLIT_MODES = tuple(KERNELS)
# An error may by chance be above that of PyTorch's own fp32 product, which rounds in another order.
SLACK = 2.0


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Drawn on the CPU, so that every device has the same numbers."""
    generator = torch.Generator().manual_seed(seed + 1000 * sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def draw(rows: int, columns: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K] that gives products near one, and a bias [N]."""
    weight = normal(columns, depth, seed=seed + 1) * depth**-0.5
    return normal(rows, depth, seed=seed), weight, normal(columns, seed=seed + 2)


def wild(tensor: Tensor) -> Tensor:
    """Its columns times 2^-20 to 2^20 at random: more octaves than two fp16 parts of a block hold."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-20, 21, (tensor.shape[1],), generator=generator)
    return tensor * torch.ldexp(torch.ones(tensor.shape[1]), exponents).to(DEVICE)
