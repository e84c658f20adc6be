"""Which GEMM kernels take a problem, and which is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cutfuse
from cutfuse import native
from cutfuse.ops import gemm

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2


def candidates(m: int = 1024, n: int = 8192, k: int = 8192, dtype: int = BFLOAT16, **options: Any) -> list[Any]:
    problem = native.module().GemmProblem(
        m=m,
        n=n,
        k=k,
        lda=options.get("lda", k),
        ldb=options.get("ldb", k),
        input=dtype,
        output=options.get("output", dtype),
        reduction=options.get("reduction", 0),
        multiprocessors=132,
        epilogue_cost=options.get("cost", 0.0),
    )
    return native.module().gemm_candidates(problem)


def runnable(**options: Any) -> list[str]:
    return [c.name for c in candidates(**options) if not c.rejection]


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("reduction", [0, 1, 5])
def test_every_type_has_kernels_fastest_first(dtype: int, reduction: int) -> None:
    ranked = [c for c in candidates(dtype=dtype, reduction=reduction) if not c.rejection]
    assert len(ranked) >= 4
    assert [c.microseconds for c in ranked] == sorted(c.microseconds for c in ranked)
    assert all("rows" in c.name for c in ranked) == (reduction != 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 1001, "lda": 1008, "ldb": 1008}, "K is 1001"),
        ({"lda": 8193}, "row pitch of x is 8193"),
        ({"ldb": 8193}, "row pitch of weight is 8193"),
        ({"n": 8191}, "N is 8191"),
        ({"m": 2**31 - 8}, "between 1 and"),
        ({"m": 0}, "between 1 and"),
        ({"m": 1, "dtype": FLOAT32}, "full precision"),
        ({"output": FLOAT16}, "float32, not float16"),
    ],
)
def test_rejections_name_the_values(options: dict[str, int], words: str) -> None:
    assert not runnable(**options)
    assert any(words in c.rejection for c in candidates(**options))


def test_ragged_reductions_need_no_aligned_output() -> None:
    assert runnable(n=8191, reduction=1)


def test_swizzle_never_pads_the_grid() -> None:
    for m, n in ((1024, 8192), (512, 4096), (2048, 2048), (1000, 3000)):
        for c in candidates(m=m, n=n):
            assert c.rejection or c.swizzle in (1, 2, 4, 8)
            if not c.rejection and c.swizzle > 1:
                assert -(-m // c.tile_m) % c.swizzle == 0
                assert -(-n // c.tile_n) % c.swizzle == 0


def test_every_kernel_has_a_prediction_for_every_shape() -> None:
    for m in (1, 16, 300, 8192):
        for dtype in (FLOAT16, BFLOAT16):
            assert all(c.microseconds > 0 for c in candidates(m=m, dtype=dtype) if not c.rejection)


def test_an_epilogue_of_six_ops_is_fused_where_the_prediction_hardly_differs() -> None:
    epilogue = cutfuse.Epilogue(lambda z: torch.tanh((F.silu(z) * 1.5).clamp(-3, 3)) + 0.5 + z)
    cost = epilogue.program.native.cost
    plan = gemm._plan(1024, 8192, 8192, 8192, 8192, torch.bfloat16, torch.bfloat16, "none", 132, cost, gemm.DIRECT)
    assert plan.chosen is plan.candidates[0]
    assert plan.chosen.microseconds < gemm.UNFUSED_ADVANTAGE * plan.unfused_microseconds
