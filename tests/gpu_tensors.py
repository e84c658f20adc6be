"""Random tensors on a GPU, memory around results that is watched, and calls that are captured in a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import calls

DEVICE = "cuda"
Result = TypeVar("Result")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    torch.manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(shape, device=DEVICE).to(dtype)


@contextlib.contextmanager
def guarded_results(margin: float = torch.nan) -> Iterator[list[Tensor]]:
    """Within it, kernels store matrices into NaN between two rows of `margin`, and the memory of each is in this list.

    Raises AssertionError where one wrote outside of its result.
    """
    found: list[Tensor] = []
    functions = calls.torch_functions()
    allocate = functions["empty_strided"]

    def guarded(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        if len(sizes) != 2 or tuple(strides) != (sizes[1], 1):
            result: Tensor = allocate(sizes, strides, dtype)
            return result
        found.append(torch.full((sizes[0] + 2, sizes[1]), torch.nan, dtype=dtype, device=DEVICE))
        found[-1][[0, -1]] = margin
        return found[-1][1:-1]

    native.core.connect_calls({**functions, "empty_strided": guarded})
    try:
        yield found
    finally:
        calls.connect()
    for memory in found:
        rows = memory[[0, -1]]
        assert torch.equal(rows, torch.full_like(rows, margin)) or rows.isnan().all(), "written outside of the result"


def captured(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of a call on a stream of its own, and what it gives, after three calls that are not captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        cutfuse.wait()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, found


def check_repeats(step: Callable[[], list[Tensor]]) -> None:
    """A step gives the same bits in each call, and in a graph."""
    for _ in range(3):
        step()
    cutfuse.wait()
    # Without their graphs, whose nodes belong to this stream.
    expected, again = ([t.detach() for t in step()] for _ in range(2))
    graph, replayed = captured(step)
    graph.replay()
    for own, second, right in zip(replayed, again, expected, strict=True):
        assert torch.equal(own, right)
        assert torch.equal(second, right)


# Inputs of the GPU tests of products over planes.


# Where "guarded" is predicted to be faster over planes than through cuBLAS.
LARGE = (1024, 4096, 4096)
SPLIT_MODES = ("split3", "split6")
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
