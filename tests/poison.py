"""Fills the memory that PyTorch hands out next, so that what nobody writes is NaN or 1e30 and no earlier result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

NAN = -1  # as a 32-bit integer; NaN in every floating-point type
HUGE = 0x71497149  # 1e30 in fp32 and bf16, 10824 in fp16
# Bytes that are made free on the device where less is: of the allocator's pool of small blocks, and of the other. What
# is allocated beyond them is new memory, which holds what the driver left there.
RESERVED = (1 << 10, 256 << 20)
# On a CPU, whose allocator hands out freed memory again, of some sizes more often than of others. glibc keeps what is
# freed up to the size of the first.
_CPU_SIZES = (24 << 20, *(1 << k for k in range(6, 24)))

_turns = itertools.count()


class _Block:
    """Memory of the device as torch.as_tensor takes it: 32-bit integers."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def poison(device: torch.device | str = "cuda") -> None:
    """Fills the free memory that PyTorch's allocator keeps: blocks in turn with NaN and 1e30, which change places.

    On a GPU that is all of it, on every device, but for the private pools of CUDA graphs; on a CPU some of each size.
    No more is allocated afterwards than before.
    """
    device, turn = torch.device(device), next(_turns)
    if device.type == "cpu":
        held = [torch.empty(size // 4, dtype=torch.int32) for size in _CPU_SIZES]
        for index, tensor in enumerate(held):
            tensor.fill_(_bits(index + turn))
        return
    reserved = [torch.empty(size, dtype=torch.uint8, device=device) for size in RESERVED]
    del reserved
    _synchronize()  # until then kernels of other streams may use what is free
    for index, (address, size) in enumerate(free_blocks(torch.cuda.memory_snapshot())):
        torch.as_tensor(_Block(address, size)).fill_(_bits(index + turn))
    _synchronize()  # other streams are handed some of it


def free_blocks(segments: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of the blocks that an allocation may be given, in what torch.cuda.memory_snapshot gives."""
    for segment in segments:
        if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0):
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    yield block["address"], block["size"]


def _bits(index: int) -> int:
    return HUGE if index % 2 else NAN


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
