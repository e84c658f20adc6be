"""The mlp suite: its cases, and the memory of its steps, on the CPU with a meter of given counts."""

from __future__ import annotations

import pytest
import torch
from test_chain_memory import LiveTensors

from bench import mlp_suite
from bench.mlp_suite import KINDS, MEMORY, RECOMPUTED, SUITE


def test_the_cases_are_the_named_mlps_and_as_many_of_each_at_random() -> None:
    cases = SUITE.cases(False, False, 0)
    named = [case for case in cases if not case.variant.endswith("drawn")]
    assert len(named) == 3 * sum(len(kind.shapes) for kind in KINDS)
    assert len(cases) - len(named) == 3 * mlp_suite.RANDOM_COUNT
    assert len({case.title for case in cases}) == len(cases)
    drawn, other = ([case.shape for case in SUITE.cases(False, False, seed)][len(named) :] for seed in (0, 1))
    assert drawn != other
    assert all(case.group != MEMORY for case in SUITE.cases(True, False, 0))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_memory_of_a_step_is_without_its_result(kind: mlp_suite.Kind) -> None:
    """Its 4 x 16 numbers of 2 bytes are 128."""
    meter = LiveTensors(5000, [9, 9, 1128, 9, 9, 628, 9, 9, 228], [9, 9, 1300, 9, 9, 900, 9, 9, 950])
    found = mlp_suite.measure_memory(kind, (4, 24, 16), torch.device("cpu"), meter)["contenders"]  # type: ignore[arg-type]
    assert found == {
        "eager": {"kept_bytes": 1000, "peak_bytes": 1300},
        "cutfuse": {"kept_bytes": 500, "peak_bytes": 900},
        RECOMPUTED: {"kept_bytes": 100, "peak_bytes": 950},
    }
