"""The GEMM kernels that a plan weighs: which can compute a layer, why others cannot, and their order over its tiles."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from plan_cases import plan, products

GUARDED = {"dtype": "float32"}
TF32 = {"dtype": "float32", "precision": "tf32"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduction", ["none", "sum", "logsumexp"])
def test_every_type_has_kernels_fastest_first(dtype: str, reduction: str) -> None:
    *kernels, _ = plan(dtype=dtype, precision="tf32", reduction=reduction).alternatives
    assert len(kernels) >= 4
    assert all(kernel.microseconds > 0 for kernel in kernels)
    assert [kernel.microseconds for kernel in kernels] == sorted(kernel.microseconds for kernel in kernels)
    assert all("rows" in kernel.name for kernel in kernels) == (reduction != "none")


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1024, 8192, 1001), {"x": (1024, 1001, 1008, 1, True), "weight": (8192, 1001, 1008, 1, True)}, "K is 1001"),
        ((1024, 8192, 8192), {"x": (1024, 8192, 8193, 1, True)}, "row pitch of x is 8193"),
        ((1024, 8192, 8192), {"weight": (8192, 8192, 8193, 1, True)}, "row pitch of weight is 8193"),
        ((1024, 8191, 8192), {}, "N is 8191"),
        ((2**31 - 8, 64, 64), {}, "between 1 and"),
        ((0, 64, 64), {}, "between 1 and"),
        ((64, 64, 0), GUARDED, "between 1 and"),
        ((1, 8192, 8192), TF32, "full precision"),
    ],
)
def test_rejections_name_the_values(shape: tuple[int, int, int], options: dict[str, Any], words: str) -> None:
    found = plan(*shape, **options)
    assert not found.is_fused
    assert all(words in kernel.rejection for kernel in found.alternatives[:-1])


def test_kernels_of_another_output_say_what_they_write() -> None:
    *kernels, _ = plan(output="float16").alternatives
    assert any("stores float32, not float16" in kernel.rejection for kernel in kernels)


def test_ragged_reductions_need_no_aligned_output() -> None:
    *kernels, _ = plan(1024, 8191, 8192, reduction="sum").alternatives
    assert [kernel.rejection for kernel in kernels] == [""] * len(kernels)


@pytest.mark.parametrize(("m", "n"), [(1024, 8192), (512, 4096), (2048, 2048), (1000, 3000), (2048, 1024)])
def test_tiles_are_kept_together_as_far_as_that_pads_no_grid(m: int, n: int) -> None:
    """The largest of 8, 4, 2 and 1 clusters that divides both dimensions; the shorter one of the matrix first."""
    for kernel in plan(m, n, 8192).alternatives[:-1]:
        (product,) = products(plan(m, n, 8192, only=kernel.name))
        chosen = product.kernel
        cluster_m, cluster_n = (int(size) for size in re.findall(r"_(\d)x(\d)_", kernel.name)[0])
        clusters = [math.ceil(m / chosen.tile_m / cluster_m), math.ceil(n / chosen.tile_n / cluster_n)]
        assert chosen.swizzle == max(size for size in (1, 2, 4, 8) if all(count % size == 0 for count in clusters))
        assert chosen.raster_along_m == (m < n)
