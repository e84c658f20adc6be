"""On a GPU: kernels with an epilogue compiled in give the interpreting kernels' bits, and run when they are said to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from generators import REDUCTIONS
from interpreted_and_compiled import (
    DEVICE,
    MODES,
    SPECIAL,
    assert_same_gradients,
    kernels_for,
    layer,
    with_special_values,
)
from interpreted_and_compiled import assert_same_layer as assert_same_bits
from specialized_cases import LONG, MASKS, program_inside, program_of
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program, op_table

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> None:
    native.core.forget_specializations()
    native.core.forget_calls()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["fast", "accurate"])
@pytest.mark.parametrize("name", [op.name for op in op_table().ops])
def test_every_op(name: str, dtype: torch.dtype) -> None:
    program = program_of(name, "; copy prev")
    generator = torch.Generator(DEVICE).manual_seed(8)
    operands = [torch.randn(200, 264, generator=generator, device=DEVICE).to(dtype) for _ in range(2)]
    operands[0][:, ::3] = torch.tensor(SPECIAL, device=DEVICE).repeat(15)[:200, None].to(dtype)
    arguments = layer(program, operands, dtype)
    assert_same_bits(arguments, kernels_for(arguments)[:1])


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("reduction", ["none", *REDUCTIONS])
@pytest.mark.parametrize("dtype", MODES, ids=str)
def test_every_kernel(dtype: torch.dtype, reduction: str, length: str) -> None:
    """With a row, a column and a full operand of three types."""
    tail = "mul prev r0; add prev r1; sub prev r2"
    program = Program.parse(f"operands=3; {'tanh z' if length == 'short' else LONG.replace('prev', 'z', 1)}; {tail}")
    row, column, full = (torch.randn(shape, device=DEVICE) for shape in ((1, 264), (200, 1), (200, 264)))
    for out_dtype in {dtype, torch.float32}:
        arguments = layer(program, (row.half(), column, full.bfloat16()), dtype, reduction, out_dtype)
        assert_same_bits(arguments, kernels_for(arguments))


@pytest.mark.parametrize("reduction", ["none", *REDUCTIONS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bare_product(dtype: torch.dtype, reduction: str) -> None:
    """Whose kernel would call a function for each fragment: the program has no operations, but is compiled in too."""
    for out_dtype in (dtype, torch.float32):
        arguments = layer(Program.parse("operands=0"), (), dtype, reduction, out_dtype)
        assert_same_bits(arguments, kernels_for(arguments))


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("dtype", MODES, ids=str)
@pytest.mark.parametrize("shape", [(200, 264), (3000, 2056), (8, 8)], ids=str)
def test_operands_that_the_copy_engine_brings(shape: tuple[int, int], dtype: torch.dtype, length: str) -> None:
    """The first of two matrices that it takes: whole, with a pitch, or behind one in rows that it does not take.

    (3000, 2056) has more tiles than a GPU has multiprocessors.
    """
    tail = "mul prev r0; sub prev r1"
    program = Program.parse(f"operands=2; {'tanh z' if length == 'short' else LONG.replace('prev', 'z', 1)}; {tail}")
    rows, columns = shape
    plain, other = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    pitched = torch.randn(rows, columns + 24, device=DEVICE).to(dtype)[:, 16:-8]
    odd = torch.randn(rows, columns + 1, device=DEVICE).to(dtype)[:, 1:]
    for operands in ((plain, other), (pitched, other), (odd, plain), (odd, odd), (plain.t().contiguous().t(), plain)):
        arguments = layer(program, operands, dtype, shape=shape)
        assert_same_bits(arguments, kernels_for(arguments))


def test_one_kernel_serves_all_numbers() -> None:
    for number in (0.25, 1.5, -3.0):
        program = Program.parse(f"operands=0; softplus z {number} 20.0; mul prev {number}; clamp prev {-number} 9.0")
        assert_same_bits(arguments := layer(program), kernels_for(arguments)[:1])
    assert native.core.specialization_count() == 1


def chain(z: Tensor, r: Tensor) -> Tensor:
    return torch.tanh(z) * r + torch.sigmoid(z)


def inputs() -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).bfloat16() for shape in ((512, 256), (1024, 256), (512, 1024))]


def test_a_graph_has_what_is_ready() -> None:
    """And a kernel that is compiled during the capture does not disturb it."""
    x, weight, r = inputs()
    with cutfuse.specialization("now"):
        expected = cutfuse.linear(x, weight, epilogue=chain, operands=(r,))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cutfuse.linear(x, weight, epilogue=chain, operands=(r,))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)
    native.core.forget_specializations()
    cutfuse.linear(x, weight, epilogue=lambda z, r: torch.cos(z) - r, operands=(r,))  # is being compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cutfuse.linear(x, weight, epilogue=lambda z, r: torch.cos(z) - r, operands=(r,))
    cutfuse.wait(60)
    expected = cutfuse.linear(x, weight, epilogue=lambda z, r: torch.cos(z) - r, operands=(r,))
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)


def test_streams_and_threads() -> None:
    x, weight, r = inputs()
    with cutfuse.specialization("off"):
        expected = cutfuse.linear(x, weight, epilogue=chain, operands=(r,))
    torch.cuda.synchronize()

    def call(_: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [cutfuse.linear(x, weight, epilogue=chain, operands=(r,)) for _ in range(20)]
            stream.synchronize()
        return all(torch.allclose(expected, y, rtol=2e-2, atol=2e-2) for y in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(32)))
    assert cutfuse.wait(60) == 1


PROGRAM = """
import time, torch, cutfuse
x, w, r = (torch.randn(shape, device="cuda").bfloat16() for shape in ((512, 256), (1024, 256), (512, 1024)))
chain = lambda z, r: torch.tanh(z) * r + torch.sigmoid(z)
with cutfuse.specialization("now"):
    y = cutfuse.linear(x, w, epilogue=chain, operands=(r,))
    z = torch.nn.functional.linear(x.double(), w.double())
    assert torch.allclose(y.double(), chain(z, r.double()), rtol=2e-2, atol=2e-2)
    print(cutfuse.explain(x, w, epilogue=chain, operands=(r,)).compiles)
"""


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "has the program compiled in" in output


@pytest.mark.parametrize("cache", ["cold", "disabled", "read-only", "truncated", "missing"])
def test_the_drivers_cache(cache: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    environment = {"CUDA_CACHE_PATH": str(folder)}
    if cache == "disabled":
        environment["CUDA_CACHE_DISABLE"] = "1"
    elif cache == "read-only":
        folder.mkdir(mode=0o500)
    elif cache == "truncated":
        finish(start(environment))
        for path in folder.rglob("*"):
            if path.is_file():
                with contextlib.suppress(OSError):
                    os.truncate(path, path.stat().st_size // 2)
    elif cache == "missing":
        environment["CUDA_CACHE_PATH"] = "/nowhere/at/all"
    finish(start(environment))


def test_many_processes_at_once(tmp_path: Path) -> None:
    processes = [start({"CUDA_CACHE_PATH": str(tmp_path / "cache")}) for _ in range(16)]
    for process in processes:
        finish(process)


# On a GPU: kernels with derivatives compiled in give the interpreting kernel's bits, and run when they are said to.


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [op.name for op in op_table().ops])
def test_every_op_backwards(name: str, dtype: torch.dtype) -> None:
    grad, x, *operands = with_special_values(4, (200, 264), dtype)
    for program in (program_of(name), program_inside(name)):
        wanted = [k for k in (0, 1, 2) if k in program.inputs_with_gradient]
        if wanted:
            assert_same_gradients(program, grad, x, operands, wanted, False)


@pytest.mark.parametrize("column_sum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", MASKS)
def test_masks(text: str, dtype: torch.dtype, column_sum: bool) -> None:
    grad, x, r = with_special_values(3, (200, 264), dtype)
    assert_same_gradients(Program.parse(text), grad, x, [r], [0, 1], column_sum)


@pytest.mark.parametrize("column_sum", [False, True])
@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_operands(dtype: torch.dtype, length: str, column_sum: bool) -> None:
    """With a row, a column, a transposed and a full operand of three types."""
    tail = "mul prev r0; add prev r1; sub prev r2; mul prev r3"
    program = Program.parse(f"operands=4; {'tanh z' if length == 'short' else LONG.replace('prev', 'z', 1)}; {tail}")
    for shape in ((1, 8), (70, 24), (333, 264), (1000, 1032), (2048, 4096)):
        grad, x, full = with_special_values(3, shape, dtype)
        row, column = (torch.randn(size, device="cuda") for size in ((1, shape[1]), (shape[0], 1)))
        turned = torch.randn(shape[::-1], device="cuda").t()
        operands = (row.half(), column, turned.bfloat16(), full)
        assert_same_gradients(program, grad, x, operands, [0, 4], column_sum)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_trained_layer_has_the_same_gradients_before_and_after(dtype: torch.dtype, bias: bool) -> None:
    x, weight, r = (torch.randn(shape, device="cuda").to(dtype) for shape in ((512, 256), (1024, 256), (512, 1024)))
    leaves = [t.requires_grad_() for t in (x, weight, r)]
    if bias:
        leaves.append(torch.randn(1024, device="cuda").to(dtype).requires_grad_())
    results = []
    for _ in range(3):
        y = cutfuse.linear(
            x, weight, leaves[3] if bias else None, epilogue=lambda z, r: torch.tanh(z) * r + z, operands=(r,)
        )
        results.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
        cutfuse.wait(60)
    assert native.core.compiled_count() == 2
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))
