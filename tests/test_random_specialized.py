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
    compare_in_turn,
    main,
    run_shares,
    shares_of,
    summary_of,
    total_of,
)
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Program

PROGRAM = Program.parse("operands=0; tanh z; mul prev z")


def name_process(seed: int) -> bool:
    raise RuntimeError(os.getpid())


def die_at_two(seed: int) -> bool:
    if seed == 2:
        os._exit(3)
    return True


def differ_at_odd(seed: int) -> bool:
    if seed % 2:
        raise AssertionError(f"other bits at {seed}")
    return seed > 0


def find_nothing(seed: int) -> bool:
    return seed != 7


def test_a_seed_has_one_program() -> None:
    programs = [make_program(recipe_of(seed)).text for seed in range(30)]
    assert programs == [make_program(recipe_of(seed)).text for seed in range(30)]
    assert len(set(programs)) > 25


@pytest.mark.parametrize(
    ("count", "jobs", "sizes"),
    [(10, 1, [10]), (10, 3, [4, 4, 2]), (2, 3, [1, 1]), (1000, 2, [400, 400, 200]), (800, 8, [100] * 8)],
)
def test_every_seed_is_in_one_share(count: int, jobs: int, sizes: list[int]) -> None:
    shares = shares_of(range(5, 5 + count), jobs)
    assert [len(share) for share in shares] == sizes
    assert [seed for share in shares for seed in share] == list(range(5, 5 + count))


def test_what_fails_stops_nothing() -> None:
    found = compare_all(differ_at_odd, range(5))
    assert found == Outcome(2, 1, {1: "AssertionError: other bits at 1", 3: "AssertionError: other bits at 3"})


def test_the_summary_is_one_line() -> None:
    assert summary_of(Outcome(7, 2, {})) == "7 programs with the same bits, 2 that no kernel interprets, 0 failed"
    total = total_of([Outcome(1, 0, {9: "", 4: ""}), Outcome(2, 5, {seed: "" for seed in range(20, 40)})])
    seeds = "4, 9, 20, 21, 22, 23, 24, 25, 26, 27, ..."
    expected = f"3 programs with the same bits, 5 that no kernel interprets, 22 failed, of seeds {seeds}"
    assert summary_of(total) == expected


def test_every_share_has_a_process_of_its_own() -> None:
    outcomes = list(run_shares(name_process, [range(2), range(2, 4), range(4, 5)], 2))
    assert [sorted(outcome.failures) for outcome in outcomes] == [[0, 1], [2, 3], [4]]
    processes = [set(outcome.failures.values()) for outcome in outcomes]
    assert [len(names) for names in processes] == [1, 1, 1]
    assert len(set.union(*processes)) == 3
    assert f"RuntimeError: {os.getpid()}" not in set.union(*processes)


def test_a_process_that_dies_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Others are not disturbed."""
    assert main(["6", "--jobs", "3"], die_at_two) == 1
    output = capsys.readouterr()
    assert output.out == "4 programs with the same bits, 0 that no kernel interprets, 1 failed, of seeds 2\n"
    assert output.err == "seed 2: the process of seeds 2 to 3 died\n"


def test_the_exit_status_of_programs_that_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["3", "6"], find_nothing) == 0
    assert capsys.readouterr() == ("2 programs with the same bits, 1 that no kernel interprets, 0 failed\n", "")


@pytest.mark.parametrize("arguments", [["0"], ["-3"], [], ["5", "--jobs", "0"]], ids=" ".join)
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments, find_nothing)
    assert "COUNT" in capsys.readouterr().err


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


def test_programs_run_in_the_kernels_in_turn(called: list[tuple[str, str, int]]) -> None:
    """Each kernel takes every type in both directions."""
    interpreted = [compare_in_turn(seed) for seed in range(48)]
    assert len(called) == sum(interpreted) > 40
    for name in CHECKS:
        assert {seed % 6 for checked, _, seed in called if checked == name} == set(range(6))


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
