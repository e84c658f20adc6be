"""Kernels of `cutfuse.pointwise` with a program compiled in: their PTX, run on the CPU as a GPU would launch them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import Function, find_kernel
from specialized_kernels import operand_types, tables_of
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

ALIGNMENT = 256  # bytes, of what PyTorch allocates on a GPU
Matrix = tuple[int, int, int, int, int]


class Memory:
    """A kernel's tables, and tensors at the addresses that a launch is given. Each ends where its storage does: nothing
    lies in between."""

    def __init__(self, ptx: str = "") -> None:
        self.image = bytearray()
        self.symbols = {name: self.add(table) - MEMORY_BASE for name, table in tables_of(ptx).items()}

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

    def add_result(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Of bytes that are NaN in each type, until a kernel stores its own."""
        return self.add(b"\xff" * (math.prod(shape) * dtype.itemsize))

    def launch(self, function: Function, parameters: bytes, blocks: int, threads: int, first: int) -> None:
        """Run a kernel, which may store at an address and behind it."""
        lanes = np.arange(blocks * threads)
        special = {"%tid.x": lanes % threads, "%ctaid.x": lanes // threads, "%ntid.x": np.full_like(lanes, threads)}
        stores = range(first - MEMORY_BASE, len(self.image))
        machine = Machine(len(lanes), bytes(self.image), self.symbols, special, stores, threads)
        row = np.frombuffer(parameters, np.uint8)
        machine.run(function, [np.broadcast_to(row, (len(lanes), len(row)))])
        self.image = bytearray(machine.memory)

    def result(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.image, dtype=dtype, count=math.prod(shape), offset=address - MEMORY_BASE).view(
            *shape
        )


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
        memory = Memory(self.text)
        fields = [memory.add_tensor(tensor, extents) for tensor in (x, *operands)]
        out = memory.add_result(x.shape, x.dtype)
        code = operand_types([x])[0]
        problem = module().PointwiseProblem(program.native, extents, fields[0], fields[1:], code, out)
        assert problem.kernel, "the launch would interpret the program"
        memory.launch(self.function, *module().pointwise_parameters(problem), first=out)
        return memory.result(out, x.shape, x.dtype)
