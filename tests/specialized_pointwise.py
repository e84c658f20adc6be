"""Kernels of `cutfuse.pointwise` with a program compiled in: their PTX, run on the CPU as a GPU would launch them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import Function, find_kernel
from specialized_kernels import operand_types
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

ALIGNMENT = 256  # bytes, of what PyTorch allocates on a GPU
Matrix = tuple[int, int, int, int, int]


class Memory:
    """Tensors at the addresses that a launch is given. Each ends where its storage does: nothing lies in between."""

    def __init__(self) -> None:
        self.image = bytearray()

    def add(self, data: bytes) -> int:
        self.image += bytes(-len(self.image) % ALIGNMENT)
        self.image += data
        return MEMORY_BASE + len(self.image) - len(data)

    def add_tensor(self, tensor: Tensor, extents: Sequence[int]) -> Matrix:
        """A tensor that broadcasts to the extents, as the native module takes it."""
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
        address = self.add(storage) + tensor.storage_offset() * tensor.itemsize
        shape = (1,) * (3 - tensor.dim()) + tuple(tensor.shape)
        outer, row, column = tensor.view(shape).expand(*extents).stride()
        return (address, operand_types([tensor])[0], outer, row, column)

    def add_tables(self, ptx: str) -> dict[str, int]:
        symbols = {}
        for name, numbers in re.findall(r"^\.global [^\n]* (\w+)\[\d+\] = \{([\d, ]*)\};", ptx, re.MULTILINE):
            symbols[name] = self.add(bytes(int(number) for number in numbers.split(","))) - MEMORY_BASE
        return symbols


def kernel_text(program: Program, x: torch.dtype, operands: Sequence[Tensor] = ()) -> str:
    name = str(x).removeprefix("torch.")
    template = module().kernel_template(f"pointwise_{name}")
    assert template
    return module().specialize_kernel(template, program.native, operand_types(operands))


class SpecializedPointwise:
    """A specialized kernel. `run` gives its result for x `[rows, columns]`, or with an outer dimension before them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.function: Function = find_kernel(text, "pointwise_")

    def run(self, program: Program, x: Tensor, operands: Sequence[Tensor] = ()) -> Tensor:
        extents = [1] * (3 - x.dim()) + list(x.shape)
        memory = Memory()
        symbols = memory.add_tables(self.text)
        fields = [memory.add_tensor(tensor, extents) for tensor in (x, *operands)]
        out = memory.add(b"\xff" * (x.numel() * x.itemsize))
        code = operand_types([x])[0]
        problem = (program.native, extents, fields[0], fields[1:], out, code)
        assert module().pointwise_kernel(*problem), "the launch would interpret the program"
        parameters, blocks, threads = module().pointwise_parameters(*problem)
        lanes = np.arange(blocks * threads)
        special = {"%tid.x": lanes % threads, "%ctaid.x": lanes // threads}
        start = out - MEMORY_BASE
        stores = range(start, start + x.numel() * x.itemsize)
        machine = Machine(len(lanes), bytes(memory.image), symbols, special, stores)
        row = np.frombuffer(parameters, np.uint8)
        machine.run(self.function, [np.broadcast_to(row, (len(lanes), len(row)))])
        result = torch.from_numpy(machine.memory[start : stores.stop].copy())
        return result.view(x.dtype).view(x.shape)
