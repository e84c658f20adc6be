"""Plans of layers whose epilogue is compiled into its kernel."""

from __future__ import annotations

import pytest
from plan_cases import plan

from cutfuse.epilogue import Program


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_compiled_epilogue_is_predicted_to_take_less(dtype: str) -> None:
    """Of every kernel: those behind cuBLAS's product of 16-bit matrices are compiled too."""
    interpreted = plan(4096, 4096, 4096, dtype=dtype, epilogue_cost=12.0)
    compiled = plan(4096, 4096, 4096, dtype=dtype, epilogue_cost=12.0, specialized_cost=2.0)
    assert not interpreted.specializes
    assert compiled.specializes
    times = {way.name: way.microseconds for way in interpreted.alternatives if not way.rejection}
    for way in compiled.alternatives:
        if way.name.startswith("cuBLAS"):
            assert (way.microseconds < times[way.name]) == (dtype == "bfloat16")
        elif not way.rejection:
            assert way.microseconds < times[way.name]


# Microseconds on an H200 in bf16 of kernels that had been compiled with a chain: gelu and a column operand, five ops
# with two special functions, and four with one and a full operand.
COMPILED_CHAINS = {
    (4096, 11008, 4096): (511, 520, 522),
    (12608, 3072, 768): (147, 146, 199),
    (1536, 6144, 2560): (81, 86, 94),
    (2048, 2304, 768): (28, 28, 39),
}


@pytest.mark.parametrize("shape", COMPILED_CHAINS)
def test_predictions_of_compiled_epilogues_against_measurements(shape: tuple[int, int, int]) -> None:
    for measured, cost, operand_bytes in zip(COMPILED_CHAINS[shape], (0.95, 1.9, 1.4), (0, 0, 2), strict=True):
        best = plan(*shape, epilogue_cost=6.0, specialized_cost=cost, operand_bytes=operand_bytes).alternatives[0]
        assert best.microseconds == pytest.approx(measured, rel=0.12)


def test_a_compiled_epilogue_changes_the_choice() -> None:
    """Interpreted, a chain of six ops behind a short product takes longer than a pass of its own."""
    shape = 12608, 3072, 768
    assert not plan(*shape, epilogue_cost=7.0, issuer="compiled_code").is_fused
    assert plan(*shape, epilogue_cost=7.0, specialized_cost=1.5, issuer="compiled_code").is_fused


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("operands=0", 0.0, 0.0),
        ("operands=0; gelu z", 0.5, 0.5),
        ("operands=1; gelu z; mul prev r0", 0.1, 1.0),
        ("operands=0; " + "; ".join(["add prev z"] * 12), 0.5, 3.0),
    ],
)
def test_what_a_compiled_epilogue_costs(text: str, least: float, most: float) -> None:
    program = Program.parse(text).native
    assert least <= program.specialized_cost <= most
    assert program.specialized_cost <= program.cost
