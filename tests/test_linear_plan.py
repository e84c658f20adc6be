"""Which kernels compute a linear layer, and whether cuBLAS does: plans for GPUs that this machine need not have."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from plan_cases import (
    A100,
    B200,
    H100_PCIE,
    MODULE,
    contiguous,
    kinds,
    plan,
    products,
    requests,
    transposed,
)

import cutfuse

MIB = 1 << 20
COLUMNS = transposed(8192, 8192)
BOTH = {"x": transposed(64, 40), "weight": transposed(64, 40)}
ROWS_NEEDED = "weight has strides (1, 8192): its rows are not contiguous, as kernels "
HALVES = {"bfloat16": "bf16", "float16": "f16"}
GUARDED = {"dtype": "float32"}
TF32 = {"dtype": "float32", "precision": "tf32"}
CUBLAS = "cuBLAS and one more kernel"
CHAIN = {"epilogue_cost": 0.5, "specialized_cost": 0.5}  # compiled in
STORING = {"stores_pre_activation": True}
ROWS = "sm90_tf32_rows_128x128x32_1x2_pingpong"


def with_host(device_microseconds: float, host_microseconds: float, share: float) -> float:
    """What the choice compares: the longer of both, and the share of the host's time that its other work waits for."""
    return max(device_microseconds, host_microseconds) + share * host_microseconds


@pytest.mark.parametrize(
    ("shape", "options", "chosen"),
    [
        ((1024, 8192, 8192), CHAIN, "sm90_bf16_128x256x64_2x1_cooperative"),
        ((1024, 8192, 8192), {}, CUBLAS),
        ((1024, 8192, 8192), {**CHAIN, "operand_bytes": 8.0}, CUBLAS),
        ((1024, 8192, 8192), {"epilogue_cost": 0.0}, "cuBLAS"),
        ((1024, 8192, 8192), {**CHAIN, "device": H100_PCIE}, CUBLAS),
        ((197, 1536, 384), {}, "sm90_bf16_64x64x128_1x1_pingpong"),
        ((1576, 3072, 768), {}, CUBLAS),
        ((64, 64, 64), {}, "sm90_bf16_64x32x128_1x1_pingpong"),
        ((8, 2048, 8192), {}, "sm90_bf16_64x32x128_1x1_pingpong"),
        ((8, 14336, 4096), {}, "sm90_bf16_64x64x128_1x1_pingpong"),
        ((128, 4096, 4096), {}, "sm90_bf16_64x64x128_1x1_pingpong"),
        ((128, 4096, 4096), {"device": H100_PCIE}, CUBLAS),
        ((64, 64, 64), {"reduction": "logsumexp"}, "sm90_bf16_rows_64x128x64_1x1_pingpong"),
        ((1024, 4096, 1024), {**CHAIN, "reduction": "sum"}, "sm90_bf16_rows_128x256x64_2x1_cooperative"),
        ((1024, 8192, 8192), {"output": "float32"}, "sm90_bf16_f32_128x256x64_2x1_cooperative"),
        ((1024, 8192, 8192), {"output": "float16"}, CUBLAS),
        ((1024, 32768, 1024), {"dtype": "float16"}, CUBLAS),
        ((4096, 4096, 4096), TF32, "sm90_tf32_128x256x32_2x1_cooperative"),
        ((4096, 4096, 4096), {**TF32, "device": H100_PCIE}, "sm90_tf32_128x128x32_2x1_cooperative"),
        ((1, 4096, 4096), {**TF32, "reduction": "sum"}, CUBLAS),
        ((128, 32768, 32768), {**TF32, **CHAIN, "reduction": "sum"}, ROWS),
        ((128, 32768, 32768), {**CHAIN, "reduction": "sum"}, "sm90_bf16_rows_128x256x64_1x1_cooperative"),
        ((1024, 8192, 8192), GUARDED, "sm90_split3_128x128x64"),
        ((128, 4096, 4096), GUARDED, "sm90_convert3_128x128x64"),
        ((128, 4096, 4096), {**GUARDED, "precision": "split6"}, "sm90_convert6_128x128x64"),
        ((128, 4096, 4096), {**GUARDED, "weight_has_planes": True}, "sm90_split3_128x128x64"),
        ((128, 4096, 4096), {**GUARDED, "weight": transposed(4096, 4096)}, "sm90_split3_128x128x64"),
        ((128, 1024, 8192), {**GUARDED, "reduction": "amax"}, "sm90_convert3_rows_128x128x64"),
        ((907, 2408, 128), GUARDED, "cuBLAS in fp32 and one more kernel"),
        ((16, 4096, 4096), {**GUARDED, "bias": None, "x": transposed(16, 4096)}, "cuBLAS in fp32 and one more kernel"),
        ((64, 4096, 4096), {**GUARDED, "weight_has_planes": True}, "sm90_split3_128x128x64"),
        ((907, 2408, 212), {**GUARDED, "epilogue_cost": 0.0}, "cuBLAS in fp32"),
        ((64, 64, 64), {**GUARDED, "precision": "split3"}, "sm90_convert3_128x128x64"),
        ((1024, 8192, 8192), {**CHAIN, "weight": transposed(8192, 8192)}, "sm90_bf16_nn_128x256x64_2x1_cooperative"),
        ((64, 64, 64), {"weight": transposed(64, 64)}, "sm90_bf16_nn_64x128x64_1x1_pingpong"),
        ((4096, 4096, 1024), {"weight": transposed(4096, 1024)}, CUBLAS),
        ((16384, 4096, 4096), {"epilogue_cost": 0.0, "issuer": "training"}, "cuBLAS"),
        ((1, 64, 64), GUARDED, "sm90_fp32_8x8x1024"),
        ((3, 264, 936), GUARDED, "sm90_fp32_8x8x1024"),
        ((2, 6104, 1496), GUARDED, "sm90_fp32_8x8x1024"),
        ((44, 512, 256), GUARDED, "sm90_fp32_16x32x64"),
        ((15, 3920, 4576), GUARDED, "sm90_fp32_16x32x64"),
        ((197, 384, 1536), GUARDED, "sm90_fp32_32x32x64"),
        ((197, 1536, 384), GUARDED, "sm90_fp32_64x64x32"),
        ((8, 4096, 8192), GUARDED, "sm90_fp32_16x32x64"),
        ((32, 4096, 8192), GUARDED, "sm90_convert3_128x128x64"),
        ((3363, 2552, 880), GUARDED, "sm90_split3_128x128x64"),
    ],
)
def test_what_is_chosen(shape: tuple[int, int, int], options: dict[str, Any], chosen: str) -> None:
    found = plan(*shape, **options)
    assert found.alternatives[found.chosen].name == chosen
    assert found.is_fused == (not chosen.startswith("cuBLAS"))
    if found.is_fused:
        assert products(found)[0].kernel.name == chosen
    if "_fp32_" in chosen:  # on CUDA cores, which take a matrix as it is
        (product,) = found.launches
        assert found.workspace_bytes == 0
        assert (product.kernel.slices, product.problem.k, product.when) == (1, shape[2], MODULE.RunWhen.always)


@pytest.mark.parametrize(
    ("shape", "options", "fastest"),
    [
        ((128, 15360, 19584), {"reduction": "sum"}, ROWS),
        ((96, 11264, 19456), {}, "sm90_tf32_128x128x32_1x2_pingpong"),
    ],
)
def test_fewer_tiles_than_multiprocessors_read_a_weight_more_slowly(
    shape: tuple[int, int, int], options: dict[str, Any], fastest: str
) -> None:
    """The fastest of our kernels, by up to 1.8 times on an H200, but cuBLAS reads with every multiprocessor."""
    _, n, k = shape
    found = plan(*shape, **TF32, **CHAIN, **options)
    assert found.alternatives[0].name == fastest
    assert not found.is_fused
    share = n / 128 / 132
    bandwidth = MODULE.device_times()["NVIDIA H200"][2]["bytes_per_microsecond"]
    assert found.alternatives[0].microseconds >= 4 * n * k / bandwidth / share


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": (0, 0, 0)}, "CUDA devices"),
        ({"device": A100}, "compute capability 9.0, this device has 8.0"),
        ({"device": B200}, "this device has 10.0"),
        ({"x": (8, 64, 1, 8, True), "weight": (8, 64, 64, 1, True)}, "x has strides (1, 8) and weight (64, 1)"),
        ({"weight": (8192, 8192, 2, 16384, True)}, "weight has strides (2, 16384): neither its rows nor its columns"),
        ({**GUARDED, "precision": "ieee"}, 'cuBLAS in precision "ieee"'),
        ({**GUARDED, "output": "bfloat16"}, "products of float32 matrices store float32, not bfloat16"),
        ({**GUARDED, "device": A100}, "compute capability 9.0"),
        ({"weight": COLUMNS, "reduction": "sum"}, ROWS_NEEDED + "that reduce rows need them"),
        ({"weight": COLUMNS, "output": "float32"}, ROWS_NEEDED + "that store another type than they read need them"),
        ({"weight": COLUMNS, "output": "float16"}, ROWS_NEEDED + "that store another type than they read need them"),
        ({"weight": COLUMNS, **TF32}, ROWS_NEEDED + "of float32 operands need them"),
        ({"weight": (8192, 8192, 1, 8191, True)}, "weight has strides (1, 8191): neither its rows nor its columns are"),
        ({"weight": (8192, 8192, 1, 0, True)}, "weight has strides (1, 0): neither its rows nor its columns are"),
        ({**BOTH, "weight": (64, 40, 40, 1, True)}, "(40, 1): kernels that read x by columns"),
        ({**BOTH, "reduction": "sum"}, "x has strides (1, 64): its rows are not contiguous, as kernels that reduce"),
        ({**BOTH, "output": "float32"}, "x has strides (1, 64): its rows are not contiguous, as kernels that store"),
        ({**BOTH, "x": (64, 40, 2, 128, True)}, "x has strides (2, 128): neither its rows nor its columns are"),
    ],
)
def test_what_rules_fused_kernels_out(options: dict[str, Any], words: str) -> None:
    found = plan(**options)
    assert words in found.ruled_out
    assert not found.is_fused
    assert kinds(found)[0] == "CublasProduct"


def test_a_long_chain_that_is_interpreted_is_a_pass_of_its_own() -> None:
    chain = cutfuse.Epilogue(lambda z: torch.tanh((F.silu(z) * 1.5).clamp(-3, 3)) + 0.5 + z).program.native
    assert not plan(4096, 4096, 1024, epilogue_cost=chain.cost).is_fused
    assert not plan(2048, 4096, 2048, epilogue_cost=chain.cost).is_fused


def test_a_graph_takes_nothing_of_the_host() -> None:
    shape = 96, 4096, 4096  # for which cuBLAS cuts K
    assert plan(*shape, **CHAIN).is_fused
    graph = plan(*shape, issuer="graph", **CHAIN)
    assert not graph.is_fused
    assert all(way.compared == way.microseconds for way in graph.alternatives)


@pytest.mark.parametrize(
    ("issuer", "options", "fused", "unfused", "share"),
    [
        ("call", CHAIN, 12.5, 22, 0.1),
        ("call", {**CHAIN, "bias": (2, True)}, 15.5, 22, 0.1),  # which is copied for a kernel of ours
        ("call", {"epilogue_cost": 0.0}, 12.5, 15, 0.1),
        ("call", {**TF32, **CHAIN}, 8.5, 22, 0.2),
        ("call", {**TF32, "epilogue_cost": 0.0}, 8.5, 13, 0.2),
        ("compiled_code", CHAIN, 8, 19.5, 0.1),
        ("compiled_code", {**TF32, **CHAIN}, 8, 19.5, 0.1),
        ("compiled_cpp", CHAIN, 30, 19, 0.2),
        ("compiled_cpp", {**TF32, **CHAIN}, 30, 19, 0.2),
    ],
)
def test_what_the_host_takes_counts(
    issuer: str, options: dict[str, Any], fused: float, unfused: float, share: float
) -> None:
    """The microseconds in which it launches a fused kernel, and PyTorch's product with what follows."""
    *kernels, cublas = plan(197, 1536, 384, issuer=issuer, **options).alternatives
    assert cublas.compared == with_host(cublas.microseconds, unfused, share)
    for kernel in kernels:
        assert kernel.rejection or kernel.compared == with_host(kernel.microseconds, fused, share)


@pytest.mark.parametrize(("issuer", "is_fused"), [("call", True), ("compiled_code", True), ("compiled_cpp", False)])
def test_a_layer_that_waits_for_the_host_is_what_the_host_issues_sooner(issuer: str, is_fused: bool) -> None:
    """That is one kernel, but for code in C++, which reaches it through PyTorch's dispatcher."""
    assert plan(197, 1536, 384, issuer=issuer, **CHAIN).is_fused == is_fused


def test_in_a_step_that_waits_for_the_host_the_device_counts_for_less() -> None:
    called, trained = (plan(1576, 768, 3072, issuer=issuer, epilogue_cost=0.0) for issuer in ("call", "training"))
    for of_call, of_step in zip(called.alternatives, trained.alternatives, strict=True):
        assert of_step.microseconds == of_call.microseconds
        host = 15.0 if of_step.name == "cuBLAS" else 12.5
        assert of_step.compared == pytest.approx(host + 0.35 * of_step.microseconds)


NN_TILES = ("128x256x64_2x1_cooperative", "128x128x64_2x1_pingpong", "64x128x64_1x1_pingpong")
TN_TILES = ("128x128x64_2x1_pingpong", "64x128x64_1x1_pingpong")


@pytest.mark.parametrize(("dtype", "short"), HALVES.items())
@pytest.mark.parametrize(
    ("reads", "k", "tiles"), [("nn", 384, NN_TILES), *(("tn", k, TN_TILES) for k in (2, 197, 1576))]
)
def test_columns_are_read_by_kernels_of_their_own(
    dtype: str, short: str, reads: str, k: int, tiles: tuple[str, ...]
) -> None:
    """Of a weight, and of both matrices, as for a weight's gradient: its K need not be whole vectors."""
    by_columns = {"weight": transposed(384, k)} | ({"x": transposed(1536, k)} if reads == "tn" else {})
    found = plan(1536, 384, k, dtype=dtype, bias=None, epilogue_cost=0.0, **by_columns)
    assert {kernel.name for kernel in found.alternatives[:-1]} == {f"sm90_{short}_{reads}_{tile}" for tile in tiles}
    assert not any(kernel.rejection for kernel in found.alternatives)


@pytest.mark.parametrize(
    ("kernel", "options", "pitches", "columns"),
    [
        ("64x128x64_1x1_pingpong", {}, (200, 200), ""),
        *((f"nn_{tile}", {"weight": (384, 200, 1, 384, True)}, (200, 384), "weight by columns") for tile in NN_TILES),
        (f"nn_{NN_TILES[0]}", {"weight": (384, 200, 1, 392, True)}, (200, 392), "weight by columns"),
        (
            "tn_64x128x64_1x1_pingpong",
            {"x": (1536, 200, 1, 1544, True), "weight": transposed(384, 200)},
            (1544, 384),
            "x by columns weight by columns",
        ),
    ],
)
def test_a_kernel_is_told_the_pitches(
    kernel: str, options: dict[str, Any], pitches: tuple[int, int], columns: str
) -> None:
    (product,) = products(plan(1536, 384, 200, only=f"sm90_bf16_{kernel}", bias=None, **options))
    problem = product.problem
    assert (problem.lda, problem.ldb) == pitches
    assert (problem.reads_columns_of_x, problem.reads_columns_of_weight) == ("x" in columns, "weight" in columns)
    assert repr(problem).endswith(columns)
    assert "columns" in columns or "columns" not in repr(problem)


@pytest.mark.parametrize(
    ("weight", "reads_columns"),
    [
        (contiguous(64, 64), False),
        ((64, 64, 1, 1, True), False),  # rows that overlap
        ((1, 64, 1, 1, True), False),
        ((64, 1, 1, 64, True), False),  # one column has rows of one element
        ((64, 1, 64, 64, True), False),
        ((64, 64, 1, 64, True), True),
        ((64, 64, 1, 72, True), True),
        ((1, 64, 1, 64, True), True),
        ((1, 64, 5, 64, True), True),  # one row has no stride
    ],
)
def test_which_lines_are_read(weight: tuple[int, int, int, int, bool], reads_columns: bool) -> None:
    """Rows where both are contiguous, because more kernels read these."""
    n, k = weight[:2]
    found = plan(64, n, k, weight=weight)
    assert found.ruled_out == ""
    assert all(("_nn_" in kernel.name) == reads_columns for kernel in found.alternatives[:-1])


def test_single_rows_and_columns_have_any_stride() -> None:
    assert plan(x=(1, 8192, 3, 1, True)).ruled_out == ""
    assert plan(x=(1024, 1, 1, 3, True), weight=(8192, 1, 1, 3, True)).ruled_out == ""
    assert plan(weight=(1, 8192, 8192, 1, True), bias=(2, True)).ruled_out == ""


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, ["CublasProduct", "PointwisePass"]),
        ({"epilogue_cost": 0.0}, ["CublasProduct"]),
        ({"epilogue_cost": 0.0, "output": "float32"}, ["CublasProduct", "PointwisePass"]),
        ({"reduction": "sum"}, ["CublasProduct", "ReductionPass"]),
        ({"reduction": "sum", "epilogue_cost": 0.0}, ["CublasProduct", "ReductionPass"]),
        ({"stores_pre_activation": True}, ["CublasProduct", "PointwisePass"]),
    ],
)
def test_what_follows_cublas(options: dict[str, Any], launches: list[str]) -> None:
    found = plan(device=A100, **options)
    assert kinds(found) == launches
    assert (found.workspace_bytes > 0) == (launches[-1] == "ReductionPass")
    if launches[-1] == "PointwisePass":
        assert found.launches[-1].in_place == (not options.keys() & {"output", "stores_pre_activation"})


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"precision": "split3"}, "SplitPass FusedProduct"),
        ({"precision": "split3", "weight": transposed(4096, 4096)}, "SplitPass SplitPass FusedProduct"),
        ({"precision": "split3", "weight": (4096, 4096, 4098, 1, True)}, "SplitPass SplitPass FusedProduct"),
        ({"precision": "split3", "weight": (4096, 4096, 4096, 1, False)}, "SplitPass SplitPass FusedProduct"),
        ({"precision": "split3", "weight": (4096, 4096, 0, 1, True)}, "SplitPass SplitPass FusedProduct"),
        ({"precision": "split6"}, "SplitPass FusedProduct"),
        ({"precision": "split6", "weight": (4096, 4096, 4098, 1, True)}, "SplitPass SplitPass FusedProduct"),
        ({}, "SplitPass FusedProduct SplitPass FusedProduct"),
        ({"weight_has_planes": True}, "SplitPass FusedProduct SplitPass FusedProduct"),
        ({"weight": transposed(4096, 4096)}, "SplitPass SplitPass FusedProduct SplitPass SplitPass FusedProduct"),
        ({"reduction": "mean"}, "SplitPass FusedProduct SplitPass FusedProduct FoldPartials"),
        ({"precision": "tf32", "reduction": "mean", "only": ROWS}, "FusedProduct FoldPartials"),
        ({"precision": "tf32", "reduction": "mean"}, "CublasProduct ReductionPass"),
    ],
)
def test_launches_of_fp32_products(options: dict[str, Any], launches: str) -> None:
    assert kinds(plan(128, 4096, 4096, "float32", **options)) == launches.split()


def test_planes_of_the_weight_save_the_pass_that_splits_it() -> None:
    weight = transposed(4096, 4096)  # which is not split on its way
    without, kept = (
        plan(1024, 4096, 4096, "float32", weight=weight, weight_has_planes=planes).alternatives[0].microseconds
        for planes in (False, True)
    )
    assert 25 < without - kept < 60  # 4 bytes read and 4 written of 4096 x 4096 elements
    first, fallback = products(plan(1024, 4096, 4096, "float32", weight=weight, weight_has_planes=True))
    assert first.weight.values.memory == first.weight.flags.memory == MODULE.Memory.weight_planes
    assert fallback.weight.values.memory == MODULE.Memory.workspace


def test_a_precision_that_is_asked_for_leaves_no_choice() -> None:
    forced = plan(64, 64, 64, "float32", precision="split3")
    assert 'precision "split3" leaves no choice' in forced.alternatives[-1].rejection


@pytest.mark.parametrize(
    ("shape", "options", "megabytes"),
    [
        ((4096, 4096, 64), {}, 0),  # 32 MiB
        ((4097, 4096, 64), {}, 34),
        ((2048, 4096, 64), {"dtype": "float32", "precision": "tf32"}, 0),
        ((2049, 4096, 64), {"dtype": "float32", "precision": "tf32"}, 34),
        ((4096, 8191, 8192), {}, 67),
    ],
)
def test_a_matrix_that_leaves_the_cache_is_not_stored_to_reduce_its_rows(
    shape: tuple[int, int, int], options: dict[str, Any], megabytes: int
) -> None:
    found = plan(*shape, reduction="sum", **options)
    rejection = f"a large row reduction is always fused: the matrix of {megabytes} MB that it reduces is not allocated"
    assert found.alternatives[-1].rejection == (rejection if megabytes else "")
    assert found.is_fused or not megabytes
    assert plan(*shape, **options).alternatives[-1].rejection == ""


def test_each_alternative_can_be_asked_for() -> None:
    for options in ({}, {"dtype": "float32"}, {"reduction": "sum"}):
        for wanted in plan(1024, 4096, 4096, **options).alternatives:
            found = plan(1024, 4096, 4096, only=wanted.name, **options)
            assert found.alternatives[found.chosen].name == wanted.name
            assert [product.kernel.name for product in products(found)][:1] == [wanted.name] * found.is_fused


def test_what_cannot_run_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"sm90_split3_128x128x64 cannot run; there are .*N is 1022"):
        plan(1024, 1022, 1024, "float32", only="sm90_split3_128x128x64")
    with pytest.raises(ValueError, match="sm90_bf16 cannot run: fused products need compute capability"):
        plan(device=A100, only="sm90_bf16")


def test_requests_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"got \[8, 64\] and \[8, 32\]"):
        plan(x=(8, 64, 64, 1, True), weight=(8, 32, 32, 1, True))
    with pytest.raises(ValueError, match="CUDA device has at least one multiprocessor, got 0"):
        plan(device=(9, 0, 0))


@given(requests())
def test_the_cheapest_alternative_is_chosen(case: tuple[Any, dict[str, Any]]) -> None:
    request, options = case
    found = MODULE.plan_linear(request)
    *fused, cublas = found.alternatives
    runnable = [alternative for alternative in fused if not alternative.rejection]
    times = [alternative.microseconds for alternative in runnable]
    assert times == sorted(times)
    assert all("rows" in alternative.name for alternative in fused) == (options["reduction"] != "none") or not fused
    assert found.is_fused == (found.chosen < len(fused))
    if found.ruled_out or not runnable:
        assert not found.is_fused
        assert bool(found.ruled_out) == (not fused)
        assert cublas.rejection == ""
        return
    reduces = options["reduction"] != "none"
    if options["dtype"] == "float32" and options["precision"] != "tf32":
        is_forced = options["precision"] != "guarded"
    else:
        itemsize = 4 if options["dtype"] == "float32" else 2
        is_forced = reduces and options["m"] * options["n"] * itemsize > 32 * MIB
    assert bool(cublas.rejection) == is_forced
    least = min(kernel.compared for kernel in runnable)
    assert found.is_fused == (is_forced or least <= cublas.compared)
    if found.is_fused:
        assert found.alternatives[found.chosen].compared == least


@given(requests())
def test_nothing_that_was_rejected_is_launched(case: tuple[Any, dict[str, Any]]) -> None:
    request, _ = case
    found = MODULE.plan_linear(request)
    assert found.alternatives[found.chosen].rejection == ""
    launched = products(found)
    assert found.is_fused == bool(launched) == ("CublasProduct" not in kinds(found))
    rejected = {alternative.name for alternative in found.alternatives if alternative.rejection}
    for product in launched:
        assert product.kernel.rejection == ""
        assert product.kernel.name not in rejected


@given(requests())
def test_what_is_written_for_the_caller(case: tuple[Any, dict[str, Any]]) -> None:
    request, options = case
    found = MODULE.plan_linear(request)
    m, n, reduction = options["m"], options["n"], options["reduction"]
    assert found.output_shape == ([m, n] if reduction == "none" else [m])
    states = {product.partials.bytes for product in products(found)}
    if found.is_fused and reduction != "none":
        tiles = -(-n // products(found)[0].kernel.tile_n)
        assert states == {4 * tiles * m * (2 if reduction == "logsumexp" else 1)}
        assert found.launches[-1].tiles == tiles
    else:
        assert states <= {0}
    assert ("FoldPartials" in kinds(found)) == (found.is_fused and reduction != "none")
    assert ("ReductionPass" in kinds(found)) == (not found.is_fused and reduction != "none")


@given(requests(dtype="float32"))
def test_the_same_weight_takes_the_same_slices_however_it_is_split(case: tuple[Any, dict[str, Any]]) -> None:
    """The bits of a result depend on how many slices K has."""
    request, _ = case
    found = MODULE.plan_linear(request)
    slices: dict[str, set[int]] = {}
    for alternative in found.alternatives[:-1]:
        if not alternative.rejection:
            slices.setdefault(alternative.name.replace("convert", "split"), set()).add(alternative.slices)
    assert all(len(counts) == 1 for counts in slices.values())


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1024, 8191, 8192), STORING, "N is 8191"),
        ((1024, 8196, 512), {**STORING, "output": "float32"}, "N is 8196 bfloat16 elements"),
        ((1024, 8192, 512), {**STORING, "reduction": "sum"}, "stores no matrix, and so no pre-activation"),
        ((2**31 - 8, 64, 64), {}, "between 1 and"),
        ((0, 64, 64), {}, "between 1 and"),
        ((64, 64, 0), GUARDED, "between 1 and"),
        ((1, 8192, 8192), TF32, "full precision"),
        ((1024, 1022, 1024), {**GUARDED, "precision": "split3"}, "N is 1022"),
    ],
)
def test_rejections_name_the_values(shape: tuple[int, int, int], options: dict[str, Any], words: str) -> None:
    found = plan(*shape, **options)
    *kernels, cublas = found.alternatives
    assert not found.is_fused
    assert kernels
    assert all(words in kernel.rejection for kernel in kernels)
    assert cublas.rejection == ""
    if "stores_pre_activation" in options:
        others = plan(*shape, **{**options, "stores_pre_activation": False}).alternatives[:-1]
        assert not all(kernel.rejection for kernel in others)


def test_ragged_reductions_need_no_aligned_output() -> None:
    *kernels, _ = plan(1024, 8191, 8192, reduction="sum").alternatives
    assert [kernel.rejection for kernel in kernels] == [""] * len(kernels)


@pytest.mark.parametrize(
    ("m", "n"),
    [(1024, 8192), (512, 4096), (2048, 2048), (1000, 3000), (2048, 1024), (8192, 128256), (4096, 50304), (99999, 768)],
)
def test_tiles_are_kept_together_as_far_as_that_hardly_pads_the_grid(m: int, n: int) -> None:
    """The largest of 8, 4, 2 and 1 clusters that adds 1% of tiles at most; the shorter one of the matrix first."""
    for kernel in plan(m, n, 8192).alternatives[:-1]:
        (product,) = products(plan(m, n, 8192, only=kernel.name))
        chosen = product.kernel
        cluster_m, cluster_n = (int(size) for size in re.findall(r"_(\d)x(\d)_", kernel.name)[0])
        clusters = [math.ceil(m / chosen.tile_m / cluster_m), math.ceil(n / chosen.tile_n / cluster_n)]
        padded = {size: math.prod(math.ceil(count / size) * size for count in clusters) for size in (1, 2, 4, 8)}
        assert chosen.swizzle == max(size for size in padded if padded[size] - padded[1] <= padded[1] // 100)
        assert chosen.raster_along_m == (m < n)


# Which fp32 layers the planner gives to the kernels on CUDA cores, and what it tells of them.


TILES = ("16x32x64", "32x32x64", "64x64x32")


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
    (found,) = (way for way in plan(*shape, **GUARDED).alternatives if way.name == f"sm90_fp32_{kernel}")
    assert found.microseconds == pytest.approx(microseconds, rel=0.1)


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
    found = plan(64, 384, 256, **GUARDED, **options)
    names = [way.name for way in found.alternatives if "fp32_" in way.name]
    of_few_rows = set() if reads else {"sm90_fp32_8x8x1024"}
    assert set(names) == {f"sm90_fp32_{reads}{tile}" for tile in TILES} | of_few_rows
    assert found.alternatives[found.chosen].name in names


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
    found = plan(64, 384, 256, **{**GUARDED, **options})
    assert not any("fp32_" in way.name for way in found.alternatives)


def test_a_bias_decides_what_cublas_takes() -> None:
    """With one, PyTorch calls kernels that do not slice K: 128x1024x4096 takes 41 us without and 85 with it (H200)."""
    shape = (128, 1024, 4096)
    without, with_one = (plan(*shape, **GUARDED, bias=bias).alternatives[-1].microseconds for bias in (None, (1, True)))
    assert with_one > 1.5 * without


def test_more_tiles_than_can_be_counted_are_refused() -> None:
    m = n = 1_000_000
    found = plan(m, n, 8, **GUARDED)
    refused = {way.name: way.rejection for way in found.alternatives if "fp32_8x8" in way.name}
    assert refused == {"sm90_fp32_8x8x1024": "has a block for each tile, and cannot have 15625000000"}


@pytest.mark.parametrize(("bias", "is_read"), [(None, True), ((1, False), True), ((3, True), False)])
def test_the_bias_is_contiguous(bias: tuple[int, bool] | None, is_read: bool) -> None:
    found = plan(64, 384, 256, **GUARDED, bias=bias)
    assert ("fp32_" in found.alternatives[found.chosen].name) == is_read
    assert not found.copies_bias
