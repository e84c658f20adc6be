"""The chains suite's draw: which chains it has, that they are tame, and how cases are spread over the grid."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from bench_runs import CPU, results_of

from bench import chain_cases, chain_memory
from bench.accuracy import WRONG_ABOVE
from bench.chain_cases import (
    MEMORY,
    QUOTAS,
    SHAPES,
    all_cases,
    chains_of,
)
from bench.chain_drawing import (
    drawn_chains,
)
from bench.chain_functions import LIGHT, LIGHT_ALONE, SPECIAL, Chain
from bench.chain_memory import EAGER_STACK, FUSED_STACK, RECOMPUTED_STACK
from bench.goals import MISSED, lines_of
from bench.suite import Case
from bench.workloads import PRECISIONS, REDUCTIONS, dimensions
from cutfuse.epilogue import split_affine
from cutfuse.epilogue.resolve import resolve

CASTS = {"half", "bfloat16", "float", "copy"}


def ops_of(chain: Chain) -> list[str]:
    """The operations that cutfuse finds in a chain, without casts."""
    program = resolve(chain.function, len(chain.operands)).program
    return [instruction.op for instruction in program.instructions if instruction.op not in CASTS]


@pytest.mark.parametrize(
    "chain", [*chains_of(0), *drawn_chains(7), LIGHT, LIGHT_ALONE, SPECIAL], ids=lambda it: it.name
)
def test_a_chain_has_as_many_operations_as_it_says(chain: Chain) -> None:
    assert len(ops_of(chain)) == chain.ops


def test_the_chains_are_of_every_kind_that_the_grid_names() -> None:
    chains = chains_of(0)
    assert len(chains) == len({chain.name for chain in chains}) >= 12
    assert {chain.ops for chain in chains} == {1, 3, 6, 12}
    assert {len(chain.operands) for chain in chains} == {0, 1, 3}
    assert {operand.kind for chain in chains for operand in chain.operands} == {"full", "row", "column", "scalar"}
    assert {operand.kind for chain in chains for operand in chain.operands if operand.is_mixed} == {"full", "row"}
    assert {chain.reduce for chain in chains} == {None, "sum", "amax", "logsumexp"}
    # A sum of an affine chain needs no product.
    for chain in chains:
        if chain.reduce == "sum":
            assert split_affine(resolve(chain.function, len(chain.operands)).expression) is None


def relative_error(chain: Chain, precision: str) -> float:
    """Eager's error against fp64 on normal values."""
    m, n = 64, 512
    generator = torch.Generator().manual_seed(3)

    def values(shape: tuple[int, ...], name: str) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(PRECISIONS[name].dtype)

    z = values((m, n), precision)
    operands = [values(operand.shape(m, n), operand.precision(precision)) for operand in chain.operands]
    y, exact = chain.function(z, *operands), chain.function(z.double(), *(operand.double() for operand in operands))
    if not any(operand.is_mixed for operand in chain.operands):
        assert y.dtype == z.dtype
    if chain.reduce is not None:
        y, exact = (REDUCTIONS[chain.reduce](value, -1) for value in (y, exact))
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("seed", "precision"), list(product((0, 1, 2), ("bf16", "fp16", "fp32"))))
def test_chains_are_tame(seed: int, precision: str) -> None:
    for chain in chains_of(seed):
        assert relative_error(chain, precision) < 0.5 * WRONG_ABOVE[precision], chain


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    assert drawn_chains(0) == drawn_chains(0)
    assert drawn_chains(0) != drawn_chains(1)
    titles = [case.title for case in all_cases(False, False, 0)]
    chain_cases.all_cases.cache_clear()
    assert [case.title for case in all_cases(False, False, 0)] == titles
    assert [case.title for case in all_cases(False, False, 1)] != titles


def products(quick: bool = False) -> list[Case]:
    """The products with a chain behind them."""
    return [case for case in all_cases(False, quick, 0) if case.group == "linear"]


def test_cases_are_spread_over_the_grid() -> None:
    chains = {chain.name: chain for chain in chains_of(0)}
    cases = products()
    assert len({case.title for case in cases}) == len(cases) == 117
    pairs = Counter((case.shape, case.precision) for case in cases)
    assert pairs == {(dimensions(shape), precision): QUOTAS[precision] for shape in SHAPES for precision in QUOTAS}
    counts = Counter(case.variant for case in cases)
    assert set(counts) == set(chains)
    assert max(counts.values()) - min(counts.values()) <= 4
    for precision in QUOTAS:
        own = [chains[case.variant] for case in cases if case.precision == precision]
        assert {chain.ops for chain in own} == {1, 3, 6, 12}
        assert {len(chain.operands) for chain in own} == {0, 1, 3}
        assert {chain.reduce for chain in own} == {None, "sum", "amax", "logsumexp"}
        assert {chain.has_full for chain in own} == {True, False}


class LiveTensors:
    """Counts what a step holds: `base`, and beyond it `kept` after a forward pass and `most` at the peak."""

    def __init__(self, base: int, kept: list[int], most: list[int]) -> None:
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


def test_the_last_step_counts_and_what_was_allocated_before_does_not() -> None:
    meter = LiveTensors(5000, [9, 9, 100, 9, 9, 90, 9, 9, 60], [9, 9, 300, 9, 9, 310, 9, 9, 250])
    found = chain_memory.measure((4, 24, 16), torch.float32, CPU, meter)["contenders"]
    assert found == {
        EAGER_STACK: {"kept_bytes": 100, "peak_bytes": 300},
        FUSED_STACK: {"kept_bytes": 90, "peak_bytes": 310},
        RECOMPUTED_STACK: {"kept_bytes": 60, "peak_bytes": 250},
    }
    assert meter.calls == ["allocated", "restart", "allocated", "peak"] * 9


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
    stacks = chain_memory.stacks_of((8, 64, 16), torch.float32, CPU)
    x = torch.randn(8, 16, requires_grad=True)
    results = {name: stack(x) for name, stack in stacks.items()}
    for name in (FUSED_STACK, RECOMPUTED_STACK):
        torch.testing.assert_close(results[name], results[EAGER_STACK])
    for stack in stacks.values():
        assert len(stack) == chain_memory.BLOCKS
    kept = {name: kept_for_backward(stack, x) for name, stack in stacks.items()}
    assert kept[RECOMPUTED_STACK] < kept[EAGER_STACK]


def test_the_worst_stack_is_held_to_eager() -> None:
    cases = []
    own = [case for case in all_cases(False, False, 0) if case.group == MEMORY]
    for case, peak in zip(own, (1.0, 1.002, 0.9), strict=True):
        entries = {EAGER_STACK: (100.0, 100.0), FUSED_STACK: (100.0, 100.0 * peak), RECOMPUTED_STACK: (70.0, 80.0)}
        figures = {name: {"kept_bytes": kept, "peak_bytes": most} for name, (kept, most) in entries.items()}
        cases.append({**case.as_dict(), "contenders": figures})
    lines = [line for line in lines_of(results_of("chains", cases)) if line.cells]
    assert [line.value for line in lines] == [pytest.approx(1.002), 0.7]
    assert lines[0].verdict == MISSED
    assert "16384x4096x1024" in lines[0].where
