"""Random programs in kernels that interpret them and in kernels with them compiled in, which give the same bits.

What compares them is tested with functions in the place of a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import interpreted_and_compiled
import pytest
import torch
from generators import FLOATS, REDUCTIONS
from gpu_tensors import randn
from interpreted_and_compiled import (
    DEVICE,
    SPECIAL,
    assert_same_gradients,
    assert_same_layer,
    assert_same_pointwise,
    assert_same_reduction,
    kernels_for,
    layer,
    with_special_values,
)
from random_programs import OPERANDS, make_program, recipe_of
from random_runs import check_seeds
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program

SEEDS = range(150)
SHAPE = (200, 264)


# How an operand lies in memory, made of one with eight columns more.
LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda r: r[..., :-8].contiguous(),
    lambda r: r[..., 8:],
    lambda r: r[..., 1:-7],
    lambda r: r[..., :-8].mT.contiguous().mT,
    lambda r: r[..., :1, :-8].contiguous(),
    lambda r: r[..., :1].contiguous(),
    lambda r: r[..., :1, :1].contiguous(),
)


def drawn_operands(choose: random.Random, shape: tuple[int, ...]) -> list[Tensor]:
    *leading, columns = shape
    return [
        choose.choice(LAYOUTS)(randn(*leading, columns + 8, dtype=choose.choice(FLOATS), seed=1 + place))
        for place in range(OPERANDS)
    ]


def check_pointwise(program: Program, seed: int) -> None:
    """At special values among others, with operands of any layout and type."""
    x = randn(*SHAPE, dtype=dtype_of(seed))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, device=DEVICE)[:, None]
    assert_same_pointwise(program, x, drawn_operands(random.Random(seed), SHAPE))


def check_layer(program: Program, seed: int) -> None:
    """In the kernel that is fastest for it."""
    operands = [randn(*SHAPE, seed=1 + place) for place in range(OPERANDS)]
    arguments = layer(program, operands, dtype_of(seed), shape=SHAPE)
    assert_same_layer(arguments, kernels_for(arguments)[:1])


# Rows and columns of one block and many, of whole steps and of none, of one chunk and several.
REDUCED = [(3, 8), (70, 72), (513, 264), (2, 70000), (40000, 16), (4096, 8192), (8192, 1096), (5, 3000, 24)]


def check_reduction(program: Program, seed: int) -> None:
    """But for a mere factor, by which sums are multiplied. Of any shape, with operands of any layout and type."""
    if program.native.scaling is None:
        choose = random.Random(seed)
        *leading, columns = choose.choice(REDUCED)
        x = randn(*leading, columns, dtype=dtype_of(seed))
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, device=DEVICE)[: x.numel()].to(x.dtype)
        operands = drawn_operands(choose, (*leading, columns))
        assert_same_reduction(program, x, operands, choose.choice(REDUCTIONS), choose.choice((-1, -2)))


def check_gradients(program: Program, seed: int) -> None:
    """At special values among others."""
    wanted = [k for k in range(1 + OPERANDS) if k in program.inputs_with_gradient]
    if wanted:
        grad, x, *operands = with_special_values(2 + OPERANDS, SHAPE, dtype_of(seed))
        assert_same_gradients(program, grad, x, operands, wanted, column_sum=seed % 2 == 1)


def dtype_of(seed: int) -> torch.dtype:
    return FLOATS[seed % len(FLOATS)]


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_pointwise, check_layer, check_reduction, check_gradients])
def test_random_programs(check: Callable[[Program, int], None], request: pytest.FixtureRequest) -> None:
    def compare(seed: int) -> str:
        program = make_program(recipe_of(seed))
        if program.native.is_interpreted:
            native.core.forget_calls()  # whose plans hold what was compiled before
            native.core.forget_specializations()
            check(program, seed)
        return ""

    check_seeds(request, f"programs, {check.__name__}", SEEDS, compare)


PROGRAM = Program.parse("operands=0; tanh z; mul prev z")


def results_of(monkeypatch: pytest.MonkeyPatch, interpreted: Tensor, compiled: Tensor, count: int = 1) -> None:
    """What kernels give in each mode, and how many are compiled."""
    modes = native.core.SpecializationMode

    def run(*given: object) -> Tensor:
        return interpreted if native.core.specialization_mode() == modes.off else compiled

    monkeypatch.setattr(interpreted_and_compiled.cuda, "pointwise", run)
    monkeypatch.setattr(interpreted_and_compiled.cuda, "reduce", run)
    monkeypatch.setattr(native.core, "compiled_count", lambda: count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_compared(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Zeros' signs too; one NaN is as good as another."""
    x = torch.tensor([[0.0, 1.0, float("nan")]], dtype=dtype)
    results_of(monkeypatch, x, x.copysign(torch.tensor([1.0, 1.0, -1.0], dtype=dtype)))
    assert_same_pointwise(PROGRAM, x, [])
    assert_same_reduction(PROGRAM, x, [], "sum", -1)
    results_of(monkeypatch, x, -x.abs() * torch.tensor([1.0, -1.0, 1.0], dtype=dtype))
    with pytest.raises(AssertionError, match="tanh z; mul prev z"):
        assert_same_pointwise(PROGRAM, x, [])
    with pytest.raises(AssertionError, match="tanh z; mul prev z"):
        assert_same_reduction(PROGRAM, x, [], "sum", -1)


def test_nothing_compiled_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 3)
    results_of(monkeypatch, x, x, 0)
    with pytest.raises(AssertionError, match="nothing has been compiled"):
        assert_same_pointwise(PROGRAM, x, [])
