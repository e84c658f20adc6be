"""The chains suite's draw: which chains it has, that they are tame, and how cases are spread over the grid."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from bench_runs import CPU

from bench import workloads
from bench.chain_suite import QUOTAS, SHAPES, all_cases, chains_of, gflop, operand_bytes
from bench.chains import FULL, LIGHT, LIGHT_ALONE, SPECIAL, Chain, Operand, drawn_chains, finished, operands_of
from bench.suite import Case
from bench.workloads import WRONG_ABOVE, dimensions, exact_of, random_tensor
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
    z, operands = random_tensor((64, 512), precision, CPU, 3), operands_of(chain, 64, 512, precision, CPU)
    y, exact = chain.function(z, *operands), exact_of(chain.function, (z, *operands))[0]
    if not any(operand.is_mixed for operand in chain.operands):
        assert y.dtype == z.dtype
    return workloads.relative_error(finished(chain, y), finished(chain, exact))


@pytest.mark.parametrize(("seed", "precision"), list(product((0, 1, 2), ("bf16", "fp16", "fp32"))))
def test_chains_are_tame(seed: int, precision: str) -> None:
    for chain in chains_of(seed):
        assert relative_error(chain, precision) < 0.5 * WRONG_ABOVE[precision], chain


def products() -> list[Case]:
    """The products with a chain behind them."""
    return [case for case in all_cases(False, False, 0) if case.group == "linear"]


def test_cases_are_spread_over_the_grid() -> None:
    chains = {chain.name: chain for chain in chains_of(0)}
    cases = products()
    assert len(cases) == 117
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


def test_sizes_and_bytes() -> None:
    large = {shape for shape in SHAPES if gflop(shape) >= 40}
    assert set(SHAPES) - large == {(2048, 2304, 768), (777, 3080, 1160), (96, 14336, 5120)}
    assert gflop((4096, 11008, 4096)) == pytest.approx(369.4, abs=0.1)
    operands = (Operand(FULL, is_mixed=True), Operand("row"), Operand("column"), Operand("scalar"))
    chain = Chain("some", 1, operands, ("return z",))
    assert operand_bytes(chain, (10, 20, 5), "bf16") == 4 * 200 + 2 * (20 + 10 + 1)
    assert operand_bytes(chain, (10, 20, 5), "tf32") == 2 * 200 + 4 * (20 + 10 + 1)
