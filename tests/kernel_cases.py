"""Tensors in every layout that the pointwise and reduction kernels tell apart, and memory whose margins are watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def contiguous(shape: Shape, dtype: torch.dtype) -> Tensor:
    return random(shape, dtype)


def offset(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Contiguous, but not on a 16-byte boundary."""
    a, b, c = shape
    return random((a * b * c + 3,), dtype)[3:].view(shape)


def pitched(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Rows with a gap after each, of a length that keeps no alignment."""
    a, b, c = shape
    return random((a, b, c + 5), dtype)[:, :, :c]


def pitched_aligned(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, b, c + 16 - c % 8), dtype)[:, :, :c]


def stepped(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, b, 2 * c), dtype)[:, :, ::2]


def middle_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, c, b), dtype).transpose(1, 2)


def outer_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((b, c, a), dtype).permute(2, 0, 1)


def repeated(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, 1, c), dtype).expand(a, b, c)


LAYOUTS: tuple[Layout, ...] = (
    contiguous,
    offset,
    pitched,
    pitched_aligned,
    stepped,
    middle_last,
    outer_last,
    repeated,
)


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
