"""What the threads of a block do together in the PTX machine: memory of their own, shuffles and barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
from ptx_arithmetic import Array
from ptx_parser import Address, Register, Statement

WARP = 32


class Block:
    """Part of a machine, whose threads come block by block.

    block_of: the block of each thread. shared: the bytes of each block's memory, whose addresses begin at 0.
    """

    threads: int
    active: Array
    block_of: Array
    shared: Array
    read: Any
    write: Any
    address_of: Any

    def shared_places(self, address: Address, count: int) -> Array:
        start = np.full(self.threads, address.offset, np.int64)
        is_register = isinstance(address.base, Register)
        start += self.read(address.base, "u64").astype(np.int64) if is_register else self.address_of(address.base)
        assert (start[self.active] + count <= self.shared.shape[1]).all(), "an address behind a block's memory"
        return np.where(self.active, start, 0)[:, None] + np.arange(count)

    def load_shared(self, places: Array) -> Array:
        return self.shared[self.block_of[:, None], places]

    def store_shared(self, places: Array, data: Array) -> None:
        self.shared[self.block_of[self.active, None], places[self.active]] = data[self.active]

    def do_shfl(self, statement: Statement) -> None:
        assert statement.parts[1:3] == ["sync", "bfly"], statement.opcode
        target, source, distance = statement.operands[:3]
        lanes = np.arange(self.threads)
        others = lanes ^ self.read(distance, "u32").astype(np.int64)
        assert self.active[others[self.active]].all(), "a thread asks one that is elsewhere"
        assert (others // WARP == lanes // WARP).all(), "a thread asks one of another warp"
        self.write(target, self.read(source, "b32")[others])

    def do_bar(self, statement: Statement) -> None:
        """Threads meet again at the first instruction that any of them waits for, and so at this one."""
        here = np.bincount(self.block_of, self.active)
        assert np.isin(here, (0, np.bincount(self.block_of).max())).all(), "a part of a block waits at a barrier"
