"""A device on the CPU for the tests of kept planes: its split copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import cutfuse
from cutfuse.ops import planes
from cutfuse.ops.planes import SPLIT3, Layout, Planes, weight_planes

ROWS, COLUMNS = 6, 8
NBYTES = ROWS * COLUMNS * 4  # of the planes that a copy makes of one weight


class Device:
    """What the module asks of a GPU."""

    def __init__(self) -> None:
        self.splits = 0
        self.stream = 0
        self.memory = 1 << 30
        self.is_capturing = False

    def split(self, matrix: Tensor, plan: int) -> Planes:
        """Planes that are a copy, so that stale ones are told from new ones; none of a storage that was freed."""
        self.splits += 1
        values = matrix.detach().clone() if matrix.untyped_storage().nbytes() else torch.empty(0)
        return Planes(Layout(matrix.shape[1], 0, values.nbytes, 0, 0), values)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device of 1 GiB, and nothing kept before and after."""
    fake = Device()
    monkeypatch.setattr(planes, "split_weight", fake.split)
    monkeypatch.setattr(planes, "stream_of", lambda index: fake.stream)
    monkeypatch.setattr(planes, "_device_memory", lambda index: fake.memory)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(planes, "_fraction", 0.25)
    cutfuse.forget_planes()
    yield fake
    cutfuse.forget_planes()


def make_layer() -> nn.Linear:
    """Its weight is [ROWS, COLUMNS]."""
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def make_weight() -> Tensor:
    """Without a gradient."""
    return make_layer().weight.detach().clone()


def keep(weight: Tensor, plan: int = SPLIT3) -> Planes:
    """The planes that a weight keeps, after the two calls that it takes."""
    weight_planes(weight, plan)
    kept = weight_planes(weight, plan)
    assert weight_planes(weight, plan) is kept, "not kept"
    return kept


def is_current(found: Planes, weight: Tensor) -> bool:
    """Whether the planes are of the weight as it is now."""
    return torch.equal(found.memory, weight.detach())
