"""Which fp32 layers the planner gives to the kernels on CUDA cores, and what it tells of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import H200, MODULE, contiguous, kinds, plan, products, transposed

FP32 = {"dtype": "float32", "precision": "guarded"}
CUBLAS = "cuBLAS in fp32 and one more kernel"
TILES = ("16x32x64", "32x32x64", "64x64x32")


def chosen(found: Any) -> str:
    name: str = found.alternatives[found.chosen].name
    return name


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 64, 64), "sm90_fp32_8x8x1024"),
        ((3, 264, 936), "sm90_fp32_8x8x1024"),
        ((2, 6104, 1496), "sm90_fp32_8x8x1024"),
        ((44, 512, 256), "sm90_fp32_16x32x64"),
        ((15, 3920, 4576), "sm90_fp32_16x32x64"),
        ((197, 384, 1536), "sm90_fp32_32x32x64"),
        ((197, 1536, 384), "sm90_fp32_64x64x32"),
        ((8, 4096, 8192), "sm90_fp32_16x32x64"),
        ((32, 4096, 8192), "sm90_convert3_128x128x64"),
        ((3363, 2552, 880), "sm90_split3_128x128x64"),
    ],
    ids=str,
)
def test_the_kernel_of_a_layer(shape: tuple[int, int, int], name: str) -> None:
    found = plan(*shape, **FP32)
    assert chosen(found) == name
    if "fp32" in name:
        assert kinds(found) == ["FusedProduct"]
        assert found.workspace_bytes == 0
        (product,) = products(found)
        assert (product.kernel.name, product.kernel.slices, product.problem.k) == (name, 1, shape[2])
        assert product.when == MODULE.RunWhen.always


@pytest.mark.parametrize(
    ("kernel", "shape", "microseconds"),
    [
        ("8x8x1024", (1, 4096, 4096), 22.4),
        ("8x8x1024", (1, 8192, 8192), 67.9),
        ("8x8x1024", (4, 4096, 8192), 50.9),
        ("8x8x1024", (5, 3424, 6040), 40.8),
        ("8x8x1024", (8, 4096, 8192), 75.8),
        ("8x8x1024", (2, 7832, 6808), 65.4),
        ("16x32x64", (16, 4096, 8192), 65.4),
        ("16x32x64", (16, 8192, 8192), 115.0),
        ("32x32x64", (32, 4096, 4096), 47.9),
    ],
    ids=str,
)
def test_a_weight_that_l2_does_not_keep(kernel: str, shape: tuple[int, int, int], microseconds: float) -> None:
    """What an H200 took to multiply, with the weight read from memory."""
    (found,) = (way for way in plan(*shape, **FP32).alternatives if way.name == f"sm90_fp32_{kernel}")
    assert found.microseconds == pytest.approx(microseconds, rel=0.1)


@pytest.mark.parametrize("shape", [(5, 7, 9), (17, 591, 263), (13, 2206, 451)], ids=str)
def test_any_size_will_do(shape: tuple[int, int, int]) -> None:
    assert "fp32" in chosen(plan(*shape, **FP32))


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, ""),
        ({"weight": transposed(384, 256)}, "nn_"),
        ({"x": transposed(64, 256), "weight": transposed(384, 256)}, "tn_"),
        ({"x": (64, 256, 300, 1, False), "weight": (384, 256, 259, 1, False)}, ""),
    ],
    ids=str,
)
def test_the_layout_is_the_kernels(options: dict[str, Any], reads: str) -> None:
    found = plan(64, 384, 256, **FP32, **options)
    names = [way.name for way in found.alternatives if "fp32_" in way.name]
    of_few_rows = set() if reads else {"sm90_fp32_8x8x1024"}
    assert set(names) == {f"sm90_fp32_{reads}{tile}" for tile in TILES} | of_few_rows
    assert chosen(found) in names


@pytest.mark.parametrize(
    "options",
    [
        {"x": transposed(64, 256)},  # the weight by rows
        {"weight": (384, 256, 512, 2, True)},
        {"reduction": "sum"},
        {"precision": "split3"},
        {"precision": "split6"},
        {"precision": "tf32"},
    ],
    ids=str,
)
def test_what_they_do_not_compute(options: dict[str, Any]) -> None:
    found = plan(64, 384, 256, **{**FP32, **options})
    assert not any("fp32_" in way.name for way in found.alternatives[:-1])
    assert "fp32_" not in chosen(found)


@pytest.mark.parametrize(("bias", "is_read"), [(None, True), ((1, False), True), ((3, True), False)])
def test_the_bias_is_contiguous(bias: tuple[int, bool] | None, is_read: bool) -> None:
    found = plan(64, 384, 256, **FP32, bias=bias)
    assert ("fp32_" in chosen(found)) == is_read
    assert not found.copies_bias


def test_a_graph_takes_nothing_of_the_host() -> None:
    """There the product by cuBLAS and a kernel behind it, which take less of the device, take less altogether."""
    shape = (181, 2149, 68)
    assert "fp32_" in chosen(plan(*shape, **FP32))
    in_graph = plan(*shape, **FP32, issuer="graph")
    assert [way.compared for way in in_graph.alternatives if not way.rejection][:-1] == [
        way.microseconds for way in in_graph.alternatives if not way.rejection
    ][:-1]


def test_a_bias_decides_what_cublas_takes() -> None:
    """With one, PyTorch calls kernels that do not slice K: 128x1024x4096 takes 41 us without and 85 with it (H200)."""
    shape = (128, 1024, 4096)
    without, with_one = (plan(*shape, **FP32, bias=bias).alternatives[-1].microseconds for bias in (None, (1, True)))
    assert with_one > 1.5 * without


def test_a_residual_takes_time_of_either_way() -> None:
    """1576x768x64: so that it alone does not make cuBLAS and another kernel the better choice."""
    shape = (1576, 768, 64)
    without, with_one = (plan(*shape, **FP32, operand_bytes=size) for size in (0.0, 4.0))
    assert chosen(without) == chosen(with_one)
    assert with_one.alternatives[-1].microseconds > without.alternatives[-1].microseconds + 1


def test_more_tiles_than_can_be_counted_are_refused() -> None:
    m = n = 1_000_000
    found = plan(m, n, 8, **FP32)
    refused = {way.name: way.rejection for way in found.alternatives if "fp32_8x8" in way.name}
    assert refused == {"sm90_fp32_8x8x1024": "has a block for each tile, and cannot have 15625000000"}


@given(m=st.integers(2, 600), n=st.integers(2, 3000), k=st.integers(1, 5000), cost=st.sampled_from([0.0, 0.5, 14.0]))
@settings(max_examples=300, deadline=None)
def test_predictions_grow_with_the_problem(m: int, n: int, k: int, cost: float) -> None:
    """Not by less rows, columns or depth, and more where the operands have no vectors."""

    def times(m: int, n: int, k: int, pitch: int) -> dict[str, float]:
        x, weight = (m, k, pitch, 1, True), (n, k, pitch, 1, True)
        found = plan(m, n, k, **FP32, x=x, weight=weight, epilogue_cost=cost, device=H200)
        return {way.name: way.microseconds for way in found.alternatives if "fp32_" in way.name}

    pitch = (k + 600) // 4 * 4
    small = times(m, n, k, pitch)
    for larger in (times(m + 64, n, k, pitch), times(m, n + 64, k, pitch), times(m, n, k + 512, pitch)):
        assert all(larger[name] >= small[name] for name in small)
    odd = times(m, n, k, pitch + 1)
    assert all(odd[name] >= small[name] for name in small)


def test_what_is_contiguous_either_way_is_read_by_rows() -> None:
    assert "_nn_" not in chosen(plan(8, 1, 64, **FP32, weight=contiguous(1, 64)))
