"""`rounding="eager"` on a GPU: the bits of PyTorch's own operations, of every op on all 16-bit inputs and of layers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse.epilogue import op_table
from cutfuse.epilogue.eager import without_last_rounding
from cutfuse.epilogue.lower import lower
from cutfuse.epilogue.resolve import resolve
from cutfuse.epilogue.table import LOGICAL
from cutfuse.epilogue.types import types_of
from cutfuse.layer.call_plans import plan_pointwise_call

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = [torch.bfloat16, torch.float16]
# Ops with parameters, numbers or arguments of their own, and functions that PyTorch computes in steps.
CASES: dict[str, Callable[..., Tensor]] = {
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "hardtanh": lambda z: F.hardtanh(z, -0.3, 1.7),
    "clamp": lambda z: torch.clamp(z, -0.3, 0.7),
    "clamp, one bound": lambda z: torch.clamp(z, min=0.1),
    "elu": lambda z: F.elu(z, 1.3),
    "softplus": lambda z: F.softplus(z, 1.7, 11.0),
    "gelu, tanh": lambda z: F.gelu(z, approximate="tanh"),
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "threshold": lambda z: F.threshold(z, 0.5, 0.25),
    "square": lambda z: z**2,
    "cube": lambda z: z**3,
    "root": lambda z: z**0.5,
    "inverse root": lambda z: z**-0.5,
    "inverse": lambda z: z**-1,
    "power": lambda z: z**1.5,
    "fourth power": lambda z: z**4,
    "plus a number": lambda z: z + 0.1,
    "times a number": lambda z: z * 1.7,
    "times 2 plus 1": lambda z: z * 2.5 + 0.3,
    "over a number": lambda z: z / 3,
    "number over": lambda z: 3.0 / z,
    "number minus": lambda z: 0.7 - z,
    "above a number": lambda z: torch.where(z > 0.5, z, 0.1),
    "float, times 3, plus 1": lambda z: z.float() * 3.3 + 0.7,
    "float, sum, half": lambda z: (z.float() * z + 0.1).to(z.dtype) * 1.1,
    "nan_to_num": lambda z: torch.nan_to_num(z, nan=0.1),
    "frac": torch.frac,
    "silu, times z": lambda z: F.silu(z) * z + 0.5,
    "gate": lambda z, r: F.silu(z) * r,
    "gelu gate, residual": lambda z, r: F.gelu(z) * r + z,
    "masked": lambda z, r: torch.where(z > r, z, r * 0.3),
    "power of tensors": torch.pow,
    "prelu": lambda z, r: torch.where(z > 0, z, r * z),
}


def functions() -> Iterator[tuple[str, Callable[..., Tensor], int]]:
    """Every op that has no numbers of its own, and CASES, with the number of operands."""
    for op in op_table().ops:
        if op.eager != "none" and op.arity <= 2 and not op.parameters and not op.literals and op.infix not in LOGICAL:
            yield op.name, op.operator or op.function, op.arity - 1
    for name, function in CASES.items():
        code: Any = getattr(function, "__code__", None)
        two = function is torch.pow or (code is not None and code.co_varnames[:2] == ("z", "r"))
        yield name, function, int(two)


def all_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of special numbers each with each, and random ones: any bits, also by powers of 2, whose quotients are ties among
    subnormal numbers, and of magnitudes that layers have."""
    info, generator = torch.finfo(dtype), torch.Generator(DEVICE).manual_seed(0)
    special = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 100.0, info.tiny, info.smallest_normal / 4, info.max, torch.inf, torch.nan]
    numbers = torch.tensor([sign * value for value in special for sign in (1, -1)], device=DEVICE).to(dtype)
    shape = 2, 2**20
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator, device=DEVICE).to(torch.int16).view(dtype)
    normal = torch.randn(shape, generator=generator, device=DEVICE).to(dtype)
    grid = torch.cartesian_prod(numbers, numbers).t()
    powers = torch.stack([bits[0], torch.where(bits[1].isfinite(), torch.frexp(bits[1].float())[1], 0).float().exp2()])
    a, b = torch.cat([grid, bits, powers.to(dtype), normal], 1).contiguous()
    length = a.numel() // 8 * 8
    return a[:length].contiguous(), b[:length].contiguous()


def compiled(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
    """By the pointwise kernel that has the rounded program compiled in."""
    first, *others = types_of(*tensors)
    found = resolve(function, len(others), (first._replace(rounds=True), *others))
    out_dtype = found.dtype
    assert out_dtype is not None
    program = lower(without_last_rounding(found.expression, out_dtype), len(others), is_eager=True)
    stored = torch.float32 if out_dtype is torch.bool else out_dtype
    y = torch.empty_like(tensors[0], dtype=stored, device="meta")
    with cutfuse.specialization("now"):
        planned = plan_pointwise_call(tensors[0], tensors[1:], program, y)
        assert planned is not None
        result: Tensor = planned.run(list(tensors), 1)
    assert not program.native.has_eager_formulas or all(item.is_ready for item in planned.epilogues)
    return result.to(out_dtype)


def differences(a: Tensor, b: Tensor) -> Tensor:
    """Where bits differ, but for those of NaN."""
    if a.dtype is torch.bool:
        return a != b
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(integers) != b.view(integers)) & ~(a.isnan() & b.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op_has_pytorchs_bits(dtype: torch.dtype) -> None:
    inputs = {0: (all_values(dtype),), 1: pairs(dtype)}
    faults, count = [], 0
    for name, function, operands in functions():
        tensors = inputs[operands]
        try:
            y, expected = compiled(function, tensors), function(*tensors)
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        count += 1
        wrong = differences(y, expected).nonzero().flatten()
        if len(wrong):
            k = wrong[len(wrong) // 2]
            given = ", ".join(f"{t[k].item():g}" for t in tensors)
            faults.append(
                f"{name}: {len(wrong)} of {y.numel()} differ, as at ({given}): {y[k].item():.9g}, "
                f"and PyTorch's {expected[k].item():.9g}"
            )
    print(f"{dtype}: {count} functions compared")
    assert not faults, "\n".join([f"{len(faults)} of {count} functions differ:", *faults])
    assert count > 60


CHAINS: tuple[tuple[Callable[..., Tensor] | None, int], ...] = (
    (torch.relu, 0),
    (F.gelu, 0),
    (F.silu, 0),
    (lambda z: F.gelu(z, approximate="tanh"), 0),
    (lambda z, r: z + r, 1),
    (lambda z, r: F.silu(z) * r, 1),
    (lambda z, r, s: r + s * z, 2),
    (lambda z, r: torch.sigmoid(z) * r + 0.5 * z, 1),
    (lambda z: z.float() * 0.3 + 1.0, 0),
    (lambda z: torch.clamp(z, -1.1, 0.9) / 3, 0),
)


@pytest.mark.parametrize("seed", range(40))
def test_layers_have_pytorchs_bits(seed: int) -> None:
    draw = random.Random(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype = draw.choice(DTYPES)
    m, n, k = (draw.choice([1, 7, 64, 197, 1000, 2048, 4096]), *(8 * draw.randint(1, 600) for _ in range(2)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    chain, count = draw.choice(CHAINS)
    x, weight = randn(m, k), randn(n, k) / k**0.5
    bias = draw.choice([None, randn(n)])
    operands = [draw.choice([randn(m, n), randn(n), randn(m, 1)]) for _ in range(count)]
    z = F.linear(x, weight, bias)
    expected = z if chain is None else chain(z, *operands)
    before = torch.cuda.get_rng_state()
    with torch.no_grad(), cutfuse.rounding("eager"), cutfuse.specialization("now"):
        for _ in range(3):
            y = cutfuse.linear(x, weight, bias, epilogue=chain, operands=operands)
            wrong = int(differences(y, expected).sum())
            assert not wrong, f"{(m, n, k)} {dtype}, bias {bias is not None}: {wrong} of {y.numel()} elements differ"
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_graph_replays_the_kernels_of_a_call_before_it() -> None:
    x, weight = torch.randn(1024, 1024, device=DEVICE).bfloat16(), torch.randn(1024, 1024, device=DEVICE).bfloat16()
    other = torch.randn(2048, 1024, device=DEVICE).bfloat16()
    with torch.no_grad(), cutfuse.rounding("eager"), cutfuse.specialization("now"):
        cutfuse.linear(x, weight, epilogue=F.gelu)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            known = cutfuse.linear(x, weight, epilogue=F.gelu)
            unknown = cutfuse.linear(x, other, epilogue=F.gelu)
        graph.replay()
    assert torch.equal(known, F.gelu(F.linear(x, weight)))
    assert torch.equal(unknown, F.gelu(F.linear(x, other)))
