"""Plans of layers whose epilogue is compiled into its kernel."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import plan

from cutfuse.epilogue import Program


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_compiled_epilogue_is_predicted_to_take_less(dtype: str) -> None:
    """Of those that may be chosen, and those behind cuBLAS's product of 16-bit matrices are compiled too."""
    interpreted = plan(4096, 4096, 4096, dtype=dtype, epilogue_cost=12.0)
    compiled = plan(4096, 4096, 4096, dtype=dtype, epilogue_cost=12.0, specialized_cost=2.0)
    assert not interpreted.specializes
    assert compiled.specializes
    times = {way.name: way.microseconds for way in interpreted.alternatives if not way.rejection}
    assert compiled.alternatives[0].microseconds < min(times.values())
    *_, cublas = compiled.alternatives
    assert (cublas.microseconds < times[cublas.name]) == (dtype == "bfloat16")


# Of an epilogue: its cost where it is compiled, and bytes of its full operands, all and those that may be fetched.
RELU = {"specialized_cost": 0.023}
GELU = {"specialized_cost": 0.78}
SIX_OPS = {"specialized_cost": 1.56}
HEAVY = {"specialized_cost": 3.78}
GELU_RESIDUAL = {"specialized_cost": 1.0, "operand_bytes": 2.0, "fetched_bytes": 2.0}
RESIDUAL = {"specialized_cost": 0.22, "operand_bytes": 2.0, "fetched_bytes": 2.0}
GELU_SUMMED = {"specialized_cost": 0.78, "reduction": "sum"}
# Microseconds on an H200 of the fastest kernel that has such an epilogue in its text, in bf16.
MEASURED = [
    ((12608, 3072, 768), RELU, 89),
    ((8192, 8192, 1024), RELU, 187),
    ((1024, 8192, 8192), RELU, 180),
    ((12608, 3072, 768), GELU, 111),
    ((8192, 8192, 1024), GELU, 217),
    ((4096, 11008, 4096), GELU, 516),
    ((96, 14336, 5120), GELU, 54),
    ((12608, 3072, 768), SIX_OPS, 134),
    ((1536, 6144, 2560), SIX_OPS, 80),
    ((8192, 8192, 1024), HEAVY, 334),
    ((1536, 6144, 2560), HEAVY, 97),
    ((12608, 3072, 768), GELU_RESIDUAL, 123),
    ((4096, 11008, 4096), GELU_RESIDUAL, 549),
    ((2048, 2304, 768), GELU_RESIDUAL, 26),
    ((12608, 3072, 768), GELU_SUMMED, 119),
    ((2048, 2304, 768), GELU_SUMMED, 27),
    ((1024, 8192, 8192), GELU_SUMMED, 190),
]


@pytest.mark.parametrize(("shape", "epilogue", "measured"), MEASURED)
def test_predictions_of_compiled_epilogues(
    shape: tuple[int, int, int], epilogue: dict[str, Any], measured: int
) -> None:
    best = plan(*shape, epilogue_cost=9.0, **epilogue).alternatives[0]
    assert best.microseconds == pytest.approx(measured, rel=0.2)


def test_an_operand_that_is_fetched_is_predicted_to_take_less() -> None:
    loaded = {**RESIDUAL, "fetched_bytes": 0.0}
    for shape in ((8192, 8192, 1024), (2048, 2304, 768)):
        fetching, loading = (plan(*shape, epilogue_cost=2.5, **own).alternatives[0] for own in (RESIDUAL, loaded))
        assert fetching.microseconds < loading.microseconds


def test_no_kernel_that_reduces_rows_fetches_an_operand() -> None:
    loaded = {**RESIDUAL, "fetched_bytes": 0.0}
    ways = [plan(8192, 8192, 1024, reduction="sum", **own).alternatives[0] for own in (RESIDUAL, loaded)]
    assert ways[0].microseconds == ways[1].microseconds


def test_a_compiled_epilogue_changes_the_choice() -> None:
    """Interpreted, a chain of six ops behind a short product takes longer than a pass of its own."""
    shape = 12608, 3072, 768
    assert not plan(*shape, epilogue_cost=7.0, issuer="compiled_code").is_fused
    assert plan(*shape, epilogue_cost=7.0, specialized_cost=1.5, issuer="compiled_code").is_fused


TEMPERATURE = {"specialized_cost": 0.22, "reduction": "logsumexp"}
DRAWN = {"specialized_cost": 0.9, "reduction": "sum"}
# Of small matrices whose rows are reduced: what one kernel takes on an H200, and what cuBLAS and the kernel behind it.
REDUCED = [
    ((96, 14336, 5120), GELU_SUMMED, 67, 49),
    ((777, 3080, 1160), DRAWN, 28, 27),
    ((2048, 2304, 768), TEMPERATURE, 24, 23),
    ((1536, 6144, 2560), DRAWN, 87, 88),
    ((1024, 8192, 8192), {"specialized_cost": 0.85, "reduction": "amax"}, 197, 200),
]


@pytest.mark.parametrize(("shape", "epilogue", "fused", "unfused"), REDUCED)
def test_rows_of_a_small_matrix_are_reduced_by_what_is_faster(
    shape: tuple[int, int, int], epilogue: dict[str, Any], fused: int, unfused: int
) -> None:
    """By either one where both take as long."""
    found = plan(*shape, epilogue_cost=6.5, **epilogue)
    if abs(fused - unfused) > 0.02 * unfused:
        assert found.is_fused == (fused < unfused)
    best = min(way.microseconds for way in found.alternatives[:-1] if not way.rejection)
    assert best == pytest.approx(fused, rel=0.35)
    assert found.alternatives[-1].microseconds == pytest.approx(unfused, rel=0.35)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((12608, 3072, 768), {"specialized_cost": 0.9}),  # its matrix leaves the cache
        ((16384, 4096, 4096), {"specialized_cost": 0.6}),
        ((128, 32768, 32768), {"specialized_cost": 0.5}),  # 8 MiB, and cuBLAS takes as long
        ((128, 32768, 32768), {"specialized_cost": 0.5, "dtype": "float32", "precision": "tf32"}),
    ],
)
def test_rows_that_the_products_kernel_reduces(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    assert plan(*shape, reduction="sum", epilogue_cost=2.5, **options).is_fused


def test_a_reduction_behind_cublas_is_compiled_where_rows_are_whole_vectors() -> None:
    costs = ({}, {"specialized_cost": 2.0})
    for columns, is_compiled in ((4096, True), (4092, False)):
        interpreted, compiled = (
            plan(2048, columns, 1024, epilogue_cost=12.0, reduction="sum", **cost).alternatives[-1].microseconds
            for cost in costs
        )
        assert (compiled < interpreted) == is_compiled


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("operands=0", 0.0, 0.0),
        ("operands=0; relu z", 0.02, 0.05),
        ("operands=0; sigmoid z", 0.5, 0.9),
        ("operands=0; gelu z", 0.7, 1.0),
        ("operands=1; gelu z; mul prev r0", 0.9, 1.3),
        ("operands=0; " + "; ".join(["add prev z"] * 12), 0.2, 0.5),
    ],
)
def test_what_a_compiled_epilogue_costs(text: str, least: float, most: float) -> None:
    program = Program.parse(text).native
    for is_accurate in (False, True):
        assert least <= program.specialized_cost(is_accurate) <= most
        assert program.specialized_cost(is_accurate) <= program.without_chain.cost
    assert program.specialized_cost(True) >= program.specialized_cost(False)


@pytest.mark.parametrize(("rows", "measured"), [(12608, 58.6), (1576, 9.4)])
def test_what_torch_compiles_kernel_takes_for_gelu(rows: int, measured: float) -> None:
    """Behind [rows, 3072] in bf16 on an H200, bound by the instructions of erf; ours takes 42.6 and 6.2 us."""
    gelu = Program.parse("operands=0; gelu z").native
    costs = {"specialized_cost": gelu.specialized_cost(False), "generated_cost": gelu.generated_cost}
    alone = plan(rows, 3072, 768, epilogue_cost=0.0, issuer="graph").alternatives[-1].microseconds
    behind = plan(rows, 3072, 768, epilogue_cost=0.5, issuer="graph", **costs).alternatives[-1].microseconds
    assert behind - alone == pytest.approx(measured, rel=0.07)


def test_other_ops_of_torch_compiles_kernels_cost_as_much_as_accurate_ones() -> None:
    for text in ("operands=0; relu z", "operands=1; tanh z; mul prev r0"):
        program = Program.parse(text).native
        assert program.generated_cost == program.specialized_cost(True)


def test_rows_that_begin_between_cache_lines_are_predicted_to_take_longer() -> None:
    """On an H200 3009x3488x584 with gelu takes 60 us in tiles of 64x128, and 3006x4736x704 takes 49 us."""
    kernels = {"64x128": "sm90_bf16_64x128x64_1x1_pingpong", "128x256": "sm90_bf16_128x256x64_2x1_cooperative"}
    slower = {}
    for tile, kernel in kernels.items():
        own = [plan(4096, 4096, k, only=kernel, epilogue_cost=0.5, specialized_cost=0.1) for k in (1024, 1032)]
        times = [next(way.microseconds for way in found.alternatives if way.name == kernel) for found in own]
        slower[tile] = times[1] / times[0]
    assert slower["64x128"] > 1.3
    assert 1.01 < slower["128x256"] < 1.1


# Of M rows of x: what the kernel of the smallest tiles takes on an H200 where the last rows of its tiles are empty.
FEW_ROWS = [
    ((8192, 2048), {1: 16.2, 8: 16.1, 16: 15.4, 32: 14.2, 64: 12.2}),
    ((2048, 8192), {1: 26.2, 8: 24.6, 16: 23.4, 32: 22.4, 64: 20.4}),
    ((3072, 768), {1: 6.4, 8: 6.6, 16: 6.4, 32: 6.2, 64: 5.9}),
]


@pytest.mark.parametrize(("sizes", "measured"), FEW_ROWS, ids=str)
def test_few_rows_are_predicted_to_take_longer_than_a_tile_of_them(
    sizes: tuple[int, int], measured: dict[int, float]
) -> None:
    name = "sm90_bf16_64x64x128_1x1_pingpong"
    found = {}
    for m in measured:
        ways = plan(m, *sizes, epilogue_cost=2.5, issuer="graph", **GELU).alternatives
        (found[m],) = (way.microseconds for way in ways if way.name == name)
    assert found == pytest.approx(measured, rel=0.15)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_row_is_left_to_cublas_where_a_tile_of_rows_is_not() -> None:
    """On an H200 cuBLAS takes 10.9 and 11.7 us, and 1.2 more with a kernel behind it; ours 16.2 and 12.2."""
    ways = {m: plan(m, 8192, 2048, epilogue_cost=2.5, issuer="graph", **GELU) for m in (1, 64)}
    assert not ways[1].is_fused
    assert ways[64].is_fused
