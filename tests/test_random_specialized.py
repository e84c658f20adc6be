"""What `random_specialized.py` makes of seeds and of what comparing finds, with functions in the place of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import interpreted_and_compiled
import pytest
import random_specialized
import torch
from interpreted_and_compiled import assert_same_pointwise, assert_same_reduction
from random_programs import make_program, recipe_of
from random_specialized import (
    Outcome,
    compare,
    compare_all,
    main,
)
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program

PROGRAM = Program.parse("operands=0; tanh z; mul prev z")


def die_at_two(seed: int) -> bool:
    if seed == 2:
        os._exit(3)
    return True


def differ_at_odd(seed: int) -> bool:
    if seed % 2:
        raise AssertionError(f"other bits at {seed}")
    return seed > 0


def test_what_fails_stops_nothing() -> None:
    found = compare_all(differ_at_odd, range(5))
    assert found == Outcome(2, 1, {1: "AssertionError: other bits at 1", 3: "AssertionError: other bits at 3"})


def test_a_process_that_dies_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Others are not disturbed."""
    assert main(["6", "--jobs", "3"], die_at_two) == 1
    output = capsys.readouterr()
    assert output.out == "4 programs with the same bits, 0 that no kernel interprets, 1 failed, of seeds 2\n"
    assert output.err == "seed 2: the process of seeds 2 to 3 died\n"


CHECKS = ("check_pointwise", "check_layer", "check_reduction", "check_gradients")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """The checks that run, each with its program and seed, in the place of those that need a GPU."""
    calls: list[tuple[str, str, int]] = []

    def check(name: str) -> Callable[[Program, int], None]:
        return lambda program, seed: calls.append((name, program.text, seed))

    for name in CHECKS:
        monkeypatch.setattr(random_specialized, name, check(name))
    return calls


def test_a_program_runs_in_four_kernels(called: list[tuple[str, str, int]]) -> None:
    interpreted = [compare(seed) for seed in range(300)]
    assert interpreted == [make_program(recipe_of(seed)).native.is_interpreted for seed in range(300)]
    assert not all(interpreted)
    assert tuple(name for name, _, _ in called[:4]) == CHECKS
    assert len(called) == 4 * sum(interpreted)
    assert all(text == make_program(recipe_of(seed)).text for _, text, seed in called)


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
