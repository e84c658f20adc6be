"""The memory of training steps, as the chains and mlp suites measure it: on the CPU, by a meter with given counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from bench_runs import CPU, measured

import cutfuse
from bench import chain_suite, launches, mlp_suite
from bench.chain_suite import EAGER_STACK, FUSED_STACK, MEMORY, MEMORY_SHAPES, RECOMPUTED_STACK, all_cases
from bench.launches import Steps
from bench.mlp_suite import KINDS, RECOMPUTED, SUITE
from bench.tables import summary


class LiveTensors:
    """Counts what a step holds: `base`, and beyond it `kept` after a forward pass and `most` at the peak."""

    def __init__(self, base: int, kept: list[int], most: list[int]) -> None:
        self.device = CPU
        self.base = base
        self.kept = kept
        self.most = most
        self.calls: list[str] = []

    def allocated(self) -> int:
        self.calls.append("allocated")
        is_after_forward = self.calls[-2:-1] == ["restart"]
        return self.base + (self.kept.pop(0) if is_after_forward else 0)

    def restart_peak(self) -> None:
        self.calls.append("restart")

    def peak(self) -> int:
        self.calls.append("peak")
        return self.base + self.most.pop(0)


@pytest.mark.parametrize(
    ("build", "counts_result", "names"),
    [
        (partial(chain_suite.stack_steps, dtype=torch.float32), True, (EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK)),
        *((kind.steps, False, ("eager", "cutfuse", RECOMPUTED)) for kind in KINDS),
    ],
)
def test_the_last_step_counts_once_kernels_are_compiled_without_what_was_there_before(
    build: Callable[..., Steps], counts_result: bool, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that does not count has 4 x 16 numbers of 2 bytes, which are 128."""
    waited: list[None] = []
    monkeypatch.setattr(cutfuse, "wait", lambda: waited.append(None))
    meter = LiveTensors(5000, [9, 9, 1128, 9, 9, 628, 9, 9, 228], [9, 9, 1300, 9, 9, 900, 9, 9, 950])
    found = launches.memory_of(partial(build, (4, 24, 16)), counts_result, meter)["contenders"]  # type: ignore[arg-type]
    more = 128 if counts_result else 0
    assert found == {
        name: {"kept_bytes": kept + more, "peak_bytes": peak}
        for name, kept, peak in zip(names, (1000, 500, 100), (1300, 900, 950), strict=True)
    }
    assert meter.calls == ["allocated", "restart", "allocated", "peak"] * 9
    assert len(waited) == 3


def kept_for_backward(stack: torch.nn.Module, x: torch.Tensor) -> int:
    """The bytes of activations that a forward pass keeps: what is saved and no parameter."""
    parameters = {parameter.data_ptr() for parameter in stack.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = stack(x)
    del result
    return sum(saved.values())


def test_the_stacks_compute_the_same_and_one_of_them_keeps_less() -> None:
    stacks = chain_suite.stacks_of((8, 64, 16), torch.float32, CPU)
    x = torch.randn(8, 16, requires_grad=True)
    results = {name: stack(x) for name, stack in stacks.items()}
    for name in (FUSED_STACK, RECOMPUTED_STACK):
        torch.testing.assert_close(results[name], results[EAGER_STACK])
    for stack in stacks.values():
        assert len(stack) == chain_suite.BLOCKS
    kept = {name: kept_for_backward(stack, x) for name, stack in stacks.items()}
    assert kept[RECOMPUTED_STACK] < kept[EAGER_STACK]


def test_a_case_of_memory_is_run_with_the_devices_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments)
        return {"contenders": {EAGER_STACK: {"kept_bytes": 2_000_000, "peak_bytes": 3_000_000}}}

    monkeypatch.setattr(launches, "memory_of", measure)
    case = next(case for case in all_cases(False, False, 0) if case.group == MEMORY)
    figures = {**measured(case), "seconds": 4.0}
    ((build, counts_result, meter),) = asked
    assert (build.args, counts_result, meter) == ((MEMORY_SHAPES[0],), True, launches.Meter(CPU))
    assert summary(figures) == "eager 3.0 MB (4.0 s)"


def test_the_cases_are_the_named_mlps_and_as_many_of_each_at_random() -> None:
    cases = list(SUITE.cases(False, False, 0))
    named = [case for case in cases if not case.variant.endswith("drawn")]
    assert len(named) == 3 * sum(len(kind.shapes) for kind in KINDS)
    assert len(cases) - len(named) == 3 * mlp_suite.RANDOM_COUNT
    assert all(case.group != mlp_suite.MEMORY for case in SUITE.cases(True, False, 0))
