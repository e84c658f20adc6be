"""The chains suite's measurements on the CPU: what is checked of a result, and the start of processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import CPU, measured, parts_of

import cutfuse
from bench import chain_suite, chains
from bench.chain_suite import MODEL, MODEL_CHAINS, ONE_CHAIN, START, all_cases, chains_of
from bench.chains import LIGHT_ALONE
from bench.goals import TARGET_DEVICE
from bench.launches import CONTENDERS, INTERPRETED, POINTWISE, PRODUCT, SPECIALIZED, poison, worst_line_error
from bench.suite import Case
from bench.workloads import Reference, ceilings_for, floor_us


class Modes:
    """Stands for cutfuse's interface of specialization; `seen` are the modes that were set, in turn."""

    def __init__(self) -> None:
        self.mode = "background"
        self.seen: list[str] = []
        self.kernels = 1

    def set(self, mode: str) -> None:
        self.mode = mode
        self.seen.append(mode)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None
        return self.kernels


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    """A cutfuse that runs the same in every mode."""
    fake = Modes()
    monkeypatch.setattr(cutfuse, "get_specialization", lambda: fake.mode, raising=False)
    monkeypatch.setattr(cutfuse, "set_specialization", fake.set, raising=False)
    monkeypatch.setattr(cutfuse, "wait", fake.wait, raising=False)
    return fake


def linear_case(**wanted: str) -> Case:
    """A small product's case with a precision or a chain."""
    return next(
        case
        for case in all_cases(True, False, 0)
        if case.group == "linear" and all(getattr(case, name) == value for name, value in wanted.items())
    )


def figures_with(case: Case) -> dict[str, Any]:
    """What a run of a case gives for cutfuse."""
    return measured(case, INTERPRETED, SPECIALIZED)["contenders"]


@pytest.mark.usefixtures("one_thread")
def test_modes_are_set_for_the_calls_of_a_contender(modes: Modes) -> None:
    build, _ = parts_of(linear_case(precision="bf16", variant="relu"))
    with torch.no_grad():
        workload = build(CPU)
        for name, mode in ((INTERPRETED, "off"), (SPECIALIZED, "now")):
            modes.seen.clear()
            CONTENDERS[name].prepare(workload).launch()
            assert modes.seen == [mode, "background"]


@pytest.mark.usefixtures("one_thread")
def test_memory_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves an element of its result as the memory was, which the first time held the right one."""
    linear = cutfuse.linear
    memory: dict[tuple[int, ...], torch.Tensor] = {}

    def forgetful(*arguments: Any, **settings: Any) -> torch.Tensor:
        y = linear(*arguments, **settings)
        if tuple(y.shape) not in memory:
            memory[tuple(y.shape)] = y
            return y
        old = memory[tuple(y.shape)]
        old.reshape(-1)[1:] = y.reshape(-1)[1:]
        return old

    monkeypatch.setattr(cutfuse, "linear", forgetful)
    for variant in ("affine, residual", "gelu, z"):  # a matrix, and one number a row
        case = next(case for case in all_cases(True, False, 0) if case.variant == variant)
        entry = figures_with(case)[INTERPRETED]
        assert entry["note"].startswith("wrong: relative error inf"), variant
        memory.clear()


@pytest.mark.usefixtures("one_thread")
def test_what_cutfuse_warns_of_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = cutfuse.linear

    def warning(*arguments: Any, **settings: Any) -> torch.Tensor:
        import warnings

        warnings.warn("the driver is too old", stacklevel=2)
        return linear(*arguments, **settings)

    monkeypatch.setattr(cutfuse, "linear", warning)
    with pytest.warns(UserWarning, match="too old"):  # the timed calls warn too
        entry = figures_with(linear_case(precision="bf16", variant="relu"))[SPECIALIZED]
    assert entry["warned"] == "the driver is too old"


def test_one_wrong_tile_stands_out() -> None:
    exact = torch.randn(700, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference = Reference(lambda start, stop: exact[start:stop], 700, 4096)
    result = exact.bfloat16()
    assert worst_line_error(result, reference) < 0.005
    for place in ((slice(64, 128), slice(0, 64)), (slice(5, 6), slice(None)), (slice(None), slice(9, 10))):
        wrong = result.clone()
        wrong[place] = 0
        assert worst_line_error(wrong, reference) > 0.1
    result[3, 4] = torch.nan
    assert worst_line_error(result, reference) == torch.inf
    rows = Reference(lambda start, stop: exact[start:stop, 0], 700, 1)
    assert worst_line_error(exact[:, 0] * 1.5, rows) == pytest.approx(0.5)


def test_poison_fills_a_result_or_several() -> None:
    parts = torch.ones(3), torch.ones(2, requires_grad=True)
    poison(parts)
    assert all(part.isnan().all() for part in parts)


def test_extra_contenders_are_the_chain_and_the_product_alone() -> None:
    chain = next(chain for chain in chains_of(0) if chain.name == "gelu, z")
    with torch.no_grad():
        workload = chains.linear((6, 20, 10), chain, "bf16", CPU)
        x, weight = workload.arguments
        z = torch.mm(x, weight.t())
        alone = workload.extras[POINTWISE]()
        assert alone.launch().shape == (6, 20)  # without the reduction
        torch.testing.assert_close(alone.exact[0], chain.function(z.double()))
        torch.testing.assert_close(workload.extras[PRODUCT]().launch(), z)


def test_a_backward_pass_is_the_gradient_alone() -> None:
    workload = chains.backward((6, 20), LIGHT_ALONE, "fp32", CPU)
    with torch.no_grad():
        found = [*(workload.extras[name]().launch() for name in (INTERPRETED, SPECIALIZED)), workload.eager()]
    for gradient in found:
        torch.testing.assert_close(gradient.double(), workload.exact[0], rtol=1e-5, atol=1e-6)


def test_the_least_time_is_that_of_the_ceilings() -> None:
    cases = {case.title: case for case in all_cases(False, False, 0)}
    size = 2 * 8192 * 8192

    def floor(title: str, device: str = TARGET_DEVICE) -> float | None:
        return floor_us(cases[title].prepare.__self__.work, "bf16", ceilings_for(device))  # type: ignore[attr-defined]

    assert floor("pointwise six Light ops 8192x8192 bf16") == pytest.approx(1e6 * 3 * size / 4.28e12)
    reduced = "reduce sum of dim 1 8192x8192 bf16"
    assert floor(reduced) == pytest.approx(1e6 * (size + 2 * 8192) / 4.36e12)
    assert floor(reduced, "some other card") is None
    residual = next(case for case in cases.values() if case.variant == "residual" and case.precision == "bf16")
    m, n, _ = map(int, residual.shape.split("x"))
    assert floor(residual.title) == pytest.approx(1e6 * 2 * m * n / 4.28e12)  # the operand, at the rate of a copy


@pytest.fixture
def small_start() -> Iterator[Any]:
    """`measure_start` of a small product."""
    with torch.no_grad():
        yield lambda count: chain_suite.measure_start(count, (4, 24, 16), CPU)


def test_one_chain_waits_in_its_call_and_many_in_the_background(small_start: Any, modes: Modes) -> None:
    found = small_start(1)
    assert modes.seen == ["off", "background", "now", "background"]
    assert found["wait_s"] > 0
    assert found["kernels"] == 1
    modes.kernels = 30
    assert small_start(30)["kernels"] == 30
    assert modes.seen.count("now") == 1


def test_chains_of_the_start_are_different_ones() -> None:
    chains = chain_suite.new_chains(MODEL_CHAINS)
    assert len({chain.lines for chain in chains}) == MODEL_CHAINS
    assert (chains[0].ops, chains[0].reduce) == (6, None)
    assert min(chain.ops for chain in chains) == 3
    assert not {chain.lines for chain in chains} & {chain.lines for chain in chains_of(0)}


SCRIPT = """
import json, os, sys
from pathlib import Path
import bench
cache = Path(os.environ["CUDA_CACHE_PATH"])
found = cache.exists()
cache.mkdir(parents=True, exist_ok=True)
print("a line of a library")
print(json.dumps({"wait_s": 0.01 if found else 0.4, "kernels": int(sys.argv[1])}))
"""


def start_case(variant: str) -> Case:
    """A case of processes."""
    return next(case for case in all_cases(False, False, 0) if (case.group, case.variant) == (START, variant))


def test_processes_begin_without_a_cache_and_the_second_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_suite, "start_command", lambda count: [sys.executable, "-c", SCRIPT, str(count)])
    found = measured(start_case(ONE_CHAIN))["contenders"]
    assert {name: entry["wait_s"] for name, entry in found.items()} == {"cold": 0.4, "second process": 0.01}
    found = measured(start_case(MODEL))["contenders"]
    assert found == {"cold": {"wait_s": 0.4, "kernels": MODEL_CHAINS}}


def test_chains_that_are_left_to_the_interpreter_are_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_suite, "start_command", lambda count: [sys.executable, "-c", SCRIPT, str(count - 1)])
    found = measured(start_case(MODEL))["contenders"]
    assert found == {"cold": {"note": "failed: 29 of 30 chains ran specialized"}}


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3: no device"):
        chain_suite.run_process(
            [sys.executable, "-c", "import sys; print('no device', file=sys.stderr); sys.exit(3)"], tmp_path
        )
    assert chain_suite.start_command(30)[1:] == ["-m", "bench.chain_suite", "30"]
