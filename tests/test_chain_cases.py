"""The chains suite's draw: which chains it has, that they are tame, and how cases are spread over the grid."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import product

import pytest
import torch
from bench_runs import parts_of

from bench import chain_suite
from bench.accuracy import WRONG_ABOVE
from bench.chain_suite import AUTOTUNED, QUICK, QUOTAS, SHAPES, all_cases, chains_of, gflop, operand_bytes, sizes_of
from bench.chains import (
    FULL,
    LARGEST,
    LIGHT,
    LIGHT_ALONE,
    NORMAL,
    PARAMETERS,
    SPECIAL,
    UNARY,
    Chain,
    Draw,
    Operand,
    combined,
    drawn_chain,
    drawn_chains,
    evaluator,
    image,
)
from bench.contenders import AUTOTUNE, MM, POINTWISE, PRODUCT
from bench.suite import Case
from bench.workloads import PRECISIONS, REDUCTIONS, dimensions
from cutfuse.epilogue import op_table, split_affine
from cutfuse.epilogue.resolve import resolve

CASTS = {"half", "bfloat16", "float", "copy"}
LIGHT_OPS = {"relu", "leaky_relu", "clamp", "clamp_open", "minimum", "add", "mul", "hardswish"}
SPECIAL_OPS = {"sigmoid", "silu"}


def ops_of(chain: Chain) -> list[str]:
    """The operations that cutfuse finds in a chain, without casts."""
    program = resolve(chain.function, len(chain.operands)).program
    return [instruction.op for instruction in program.instructions if instruction.op not in CASTS]


@pytest.mark.parametrize(
    "chain", [*chains_of(0), *drawn_chains(7), LIGHT, LIGHT_ALONE, SPECIAL], ids=lambda it: it.name
)
def test_a_chain_has_as_many_operations_as_it_says(chain: Chain) -> None:
    assert len(ops_of(chain)) == chain.ops


def test_what_moves_data_has_light_operations_and_two_special_ones() -> None:
    assert set(ops_of(LIGHT)) | set(ops_of(LIGHT_ALONE)) <= LIGHT_OPS
    assert sorted(set(ops_of(SPECIAL)) - LIGHT_OPS) == sorted(SPECIAL_OPS)
    assert sum(op in SPECIAL_OPS for op in ops_of(SPECIAL)) == 2
    assert any(operand.kind == FULL for operand in LIGHT.operands)


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


def test_mixed_operands_have_another_type_and_the_result_the_products() -> None:
    operand = Operand(FULL, is_mixed=True)
    assert [operand.precision(name) for name in ("bf16", "fp16", "tf32", "fp32")] == ["fp32", "fp32", "bf16", "bf16"]
    for chain in chains_of(0):
        if any(own.is_mixed for own in chain.operands):
            z = torch.zeros(2, 3, dtype=torch.bfloat16)
            tensors = [torch.zeros(own.shape(2, 3), dtype=torch.float32) for own in chain.operands]
            assert chain.function(z, *tensors).dtype == torch.bfloat16


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    assert drawn_chains(0) == drawn_chains(0)
    assert drawn_chains(0) != drawn_chains(1)
    titles = [case.title for case in all_cases(False, False, 0)]
    chain_suite.all_cases.cache_clear()
    assert [case.title for case in all_cases(False, False, 0)] == titles
    assert [case.title for case in all_cases(False, False, 1)] != titles


def test_a_draw_takes_no_operation_that_is_wild_or_does_nothing() -> None:
    table = op_table()
    assert image(table.op("exp"), NORMAL) is None  # too large
    assert image(table.op("log1p"), NORMAL) is None  # no number
    assert image(table.op("relu"), (1.0, 3.0)) is None  # the same
    assert image(table.op("sigmoid"), (4.0, 6.0)) is None  # hardly varies
    assert image(table.op("sin"), (-30.0, 30.0)) is None  # makes more of errors
    assert image(table.op("tanh"), NORMAL) == pytest.approx((-1.0, 1.0), abs=1e-4)
    assert combined(table.op("mul"), NORMAL, NORMAL) == (-36.0, 36.0)
    assert combined(table.op("mul"), NORMAL, (-7.0, 7.0)) is None
    assert LARGEST < 42


def test_operations_are_spelt_as_the_table_has_them() -> None:
    x = torch.linspace(0.5, 1.0, 5, dtype=torch.float64)
    for name in UNARY:
        op = op_table().op(name)
        if name not in PARAMETERS:
            assert torch.equal(evaluator(op)(x), op.compose([x], [default for _, default in op.parameters])), name
    assert evaluator(op_table().op("clamp"))(torch.tensor([-9.0, 9.0])).tolist() == [-2.0, 3.0]


def test_every_operand_of_a_drawn_chain_is_used() -> None:
    for seed in range(20):
        for operands in ((), (Operand(FULL),), (Operand("row"), Operand("column"), Operand("scalar"))):
            chain = drawn_chain("some", Draw(3, operands), random.Random(seed))
            names = set(re.findall(r"\b[abc]\b", " ".join(chain.lines)))
            assert names == set("abc"[: len(operands)]), chain.lines


def contenders_of(case: Case) -> tuple[str, ...]:
    """Who runs a case of launches."""
    return parts_of(case)[1]


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


def test_max_autotune_has_part_in_some_of_the_16_bit_cases_of_every_shape() -> None:
    cases = [case for case in products() if AUTOTUNE in contenders_of(case)]
    assert len(cases) == AUTOTUNED == 24
    assert {case.precision for case in cases} == {"bf16", "fp16"}
    assert {case.shape for case in cases} == set(map(dimensions, SHAPES))
    assert len({case.variant for case in cases}) > 8
    assert min(case.seconds for case in cases) > 40 > max(case.seconds for case in products(quick=True))


def test_a_quick_run_is_the_beginning_of_the_draw() -> None:
    cases = products(quick=True)
    assert [case.title for case in cases] == [case.title for case in products()[:QUICK]]
    assert len({case.shape for case in cases}) >= 6
    assert {case.precision for case in cases} == set(QUOTAS)


def test_what_bounds_a_case_is_measured_where_a_target_names_it() -> None:
    chains = {chain.name: chain for chain in chains_of(0)}
    for case in products():
        is_large = gflop(sizes_of(case.as_dict())) >= 40
        is_bounded = case.precision != "fp32" and is_large and not chains[case.variant].has_full
        assert (POINTWISE in contenders_of(case)) == is_bounded
        assert (PRODUCT in contenders_of(case)) == (case.precision == "fp32")
        assert MM in contenders_of(case)


def test_sizes_and_bytes() -> None:
    large = {shape for shape in SHAPES if gflop(shape) >= 40}
    assert set(SHAPES) - large == {(2048, 2304, 768), (777, 3080, 1160), (96, 14336, 5120)}
    assert gflop((4096, 11008, 4096)) == pytest.approx(369.4, abs=0.1)
    operands = (Operand(FULL, is_mixed=True), Operand("row"), Operand("column"), Operand("scalar"))
    chain = Chain("some", 1, operands, ("return z",))
    assert operand_bytes(chain, (10, 20, 5), "bf16") == 4 * 200 + 2 * (20 + 10 + 1)
    assert operand_bytes(chain, (10, 20, 5), "tf32") == 2 * 200 + 4 * (20 + 10 + 1)
