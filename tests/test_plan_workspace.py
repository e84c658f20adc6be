"""The workspace of a plan: its pieces, and who waits for which flags in them.

That a launch finds what an earlier one has left for it is seen in results: `test_aligned_copies.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import split_cases as cases
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import MODULE, pieces_of, plan, products, requests, transposed

WORKSPACE, WEIGHT_PLANES = MODULE.Memory.workspace, MODULE.Memory.weight_planes
ALWAYS, IF_CLEAR, IF_TRIPPED = (getattr(MODULE.RunWhen, name) for name in ("always", "if_clear", "if_tripped"))
ALIGNMENT = 256
OVER_PLANES = {"dtype": "float32", "device": (9, 0, 132)}
PRECISIONS = ("split3", "split6", "guarded")


def fused_plans(case: tuple[Any, dict[str, Any]]) -> list[Any]:
    """The plan of every fused alternative of a request."""
    request, _ = case
    names = [a.name for a in MODULE.plan_linear(request).alternatives[:-1] if not a.rejection]
    return [MODULE.plan_linear(request, name) for name in names]


def is_over_planes(found: Any) -> bool:
    return any(isinstance(launch, MODULE.SplitPass) for launch in found.launches)


@given(requests(device=(9, 0, 132)))
def test_pieces_are_aligned_and_inside_the_workspace(case: tuple[Any, dict[str, Any]]) -> None:
    for found in fused_plans(case):
        ends = [0]
        for launch in found.launches:
            for name, piece in pieces_of(launch):
                assert piece.offset >= 0, name
                assert piece.offset % ALIGNMENT == 0, name
                if piece.memory == WORKSPACE:
                    ends.append(piece.offset + piece.bytes)
        assert max(ends) <= found.workspace_bytes < max(ends) + ALIGNMENT, "more than the pieces and their alignment"


@given(requests(**OVER_PLANES))
def test_pieces_of_one_product_never_overlap(case: tuple[Any, dict[str, Any]]) -> None:
    """Whose launches are those up to the product, and what is folded after it."""
    for found in fused_plans(case):
        fold = [launch for launch in found.launches if isinstance(launch, MODULE.FoldPartials)]
        group: list[Any] = []
        for launch in found.launches:
            group.append(launch)
            if not isinstance(launch, MODULE.FusedProduct):
                continue
            pieces = {
                (piece.offset, piece.bytes)
                for member in [*group, *fold]
                for _, piece in pieces_of(member)
                if piece.memory == WORKSPACE
            }
            ordered = sorted(pieces)
            assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(ordered)), ordered
            group = []


def scheme_of(product: Any) -> str:
    return "split3" if product.kernel.name.replace("convert", "split").startswith("sm90_split3") else "split6"


@given(requests(**OVER_PLANES, precision="guarded"))
def test_exactly_one_product_of_a_guarded_plan_runs(case: tuple[Any, dict[str, Any]]) -> None:
    for found in filter(is_over_planes, fused_plans(case)):
        first, fallback = products(found)
        assert (scheme_of(first), scheme_of(fallback)) == ("split3", "split6")
        assert (first.when, fallback.when) == (IF_CLEAR, IF_TRIPPED)
        assert [flags.bytes > 0 for flags in fallback.guard] == [True, True]
        passes = [launch for launch in found.launches if isinstance(launch, MODULE.SplitPass)]
        for launch in passes:
            is_first = launch.scheme == MODULE.SplitScheme.split3
            assert launch.when == (ALWAYS if is_first else IF_TRIPPED)
            guard = [(flags.memory, flags.offset, flags.bytes) for flags in launch.guard]
            assert guard == ([] if is_first else [(f.memory, f.offset, f.bytes) for f in fallback.guard])


@given(requests(device=(9, 0, 132)))
def test_only_guarded_plans_have_a_guard(case: tuple[Any, dict[str, Any]]) -> None:
    _, options = case
    guarded = options["dtype"] == "float32" and options["precision"] == "guarded"
    for found in fused_plans(case):
        has_guard = guarded and is_over_planes(found)
        assert [product.when for product in products(found)] == ([IF_CLEAR, IF_TRIPPED] if has_guard else [ALWAYS])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("weight", ["contiguous", "transposed", "has planes"])
def test_planes_are_as_large_as_the_kernels_want_them(precision: str, weight: str) -> None:
    m, n, k = 130, 264, 4097  # too small for a guarded product, unless it is asked for
    layout = transposed(n, k) if weight == "transposed" else (n, k, 4100, 1, True)
    options = {"precision": precision, "weight": layout, "weight_has_planes": weight == "has planes"}
    names = [way.name for way in plan(m, n, k, "float32", **options).alternatives]
    found = plan(m, n, k, "float32", only=next(name for name in names if "fp32" not in name), **options)
    passes = [launch for launch in found.launches if isinstance(launch, MODULE.SplitPass)]
    assert len(passes) == (2 if precision == "guarded" else 1) * (2 if weight == "transposed" else 1)
    for launch in passes:
        rows, is_transposed = (n, weight == "transposed") if launch.is_weight else (m, False)
        *_, values, scales, flags = MODULE.planes_shape(rows, k, int(launch.scheme), is_transposed, launch.is_weight)
        planes = launch.planes
        assert [planes.values.bytes, planes.scales.bytes, planes.flags.bytes] == [values, scales, flags]


@pytest.mark.parametrize("scheme", [3, 6])
@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (257, 4097)])
def test_planes_of_a_weight_in_memory_of_their_own(shape: tuple[int, int], scheme: int) -> None:
    for is_transposed in (False, True):
        own = MODULE.weight_planes(*shape, scheme, is_transposed)
        *_, values, scales, flags = MODULE.planes_shape(*shape, scheme, is_transposed, True)
        pieces = [own.pieces.values, own.pieces.scales, own.pieces.flags]
        assert [piece.bytes for piece in pieces] == [values, scales, flags]
        assert all(piece.memory == WEIGHT_PLANES and piece.offset % ALIGNMENT == 0 for piece in pieces)
        assert all(a.offset + a.bytes <= b.offset for a, b in itertools.pairwise(pieces))
        assert pieces[-1].offset + pieces[-1].bytes <= own.bytes < pieces[-1].offset + pieces[-1].bytes + ALIGNMENT


@given(
    rows=st.integers(0, 100000),
    columns=st.integers(0, 100000),
    scheme=st.sampled_from(cases.SCHEMES),
    turned=st.booleans(),
    is_weight=st.booleans(),
)
def test_planes_shape(rows: int, columns: int, scheme: int, turned: bool, is_weight: bool) -> None:
    shape = MODULE.planes_shape(rows, columns, scheme, turned, is_weight)
    pitch, scale_pitch, flag_count, *sizes = shape
    assert (pitch, scale_pitch) == (cases.round_up(columns, cases.BLOCK), cases.scale_pitch(rows, scheme, is_weight))
    assert flag_count <= 1056
    assert (flag_count == 0) == (rows == 0 or columns == 0)
    assert sizes == [cases.PLANES[scheme] * rows * pitch * 2, pitch // cases.BLOCK * scale_pitch * 4, flag_count * 4]
