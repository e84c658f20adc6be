"""Tensors in every layout that the pointwise and reduction kernels tell apart, and memory whose margins are watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

DEVICE = "cuda"
MARK = 77  # of every type
MARGIN = 256  # elements, which keep the alignment that PyTorch gives

Shape = tuple[int, int, int]
Layout = Callable[[Shape, torch.dtype], Tensor]


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=DEVICE).to(dtype)


LAYOUTS: dict[str, Layout] = {
    "contiguous": random,
    # Contiguous, but not on a 16-byte boundary.
    "offset": lambda shape, dtype: random((math.prod(shape) + 3,), dtype)[3:].view(shape),
    # Rows with a gap after each, of a length that keeps no alignment, and of one that does.
    "pitched": lambda shape, dtype: random((*shape[:2], shape[2] + 5), dtype)[:, :, :-5],
    "pitched_aligned": lambda shape, dtype: random((*shape[:2], shape[2] + 16 - shape[2] % 8), dtype)[:, :, : shape[2]],
    "stepped": lambda shape, dtype: random((*shape[:2], 2 * shape[2]), dtype)[:, :, ::2],
    "middle_last": lambda shape, dtype: random((shape[0], shape[2], shape[1]), dtype).transpose(1, 2),
    "outer_last": lambda shape, dtype: random((*shape[1:], shape[0]), dtype).permute(2, 0, 1),
    "repeated": lambda shape, dtype: random((shape[0], 1, shape[2]), dtype).expand(shape),
}


def layouts(*names: str) -> pytest.MarkDecorator:
    """Runs a test for each of these layouts, or for all."""
    return pytest.mark.parametrize("layout", [LAYOUTS[name] for name in names or LAYOUTS], ids=names or LAYOUTS)


class WatchedMemory:
    """In the place of PyTorch's allocation by calls: what it gives has margins that have to keep their mark."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def __call__(self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        buffer = torch.full((last + 1 + 2 * MARGIN,), MARK, dtype=dtype, device=DEVICE)
        self.buffers.append(buffer)
        return torch.empty(0, dtype=dtype, device=DEVICE).set_(buffer.untyped_storage(), MARGIN, sizes, strides)

    def check(self) -> None:
        for buffer in self.buffers:
            margins = torch.cat((buffer[:MARGIN], buffer[-MARGIN:]))
            assert (margins == MARK).all(), "written before the start or past the end"


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """`bound` beside one rounding of actual's type; NaN and infinities have to be the same."""
    assert actual.shape == expected.shape
    rounding = torch.finfo(actual.dtype).eps / 2 * expected.abs() * 1.001 + torch.finfo(actual.dtype).tiny
    got = actual.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    close = (got - expected).abs() <= rounding + bound
    wrong = (~(same | close)).nonzero()
    assert not wrong.numel(), (
        f"{len(wrong)} of {actual.numel()} wrong, first at {wrong[0].tolist()}: {got[tuple(wrong[0])]} for "
        f"{expected[tuple(wrong[0])]}"
    )
