"""The workspace of a plan: its pieces, and that each launch finds in them what an earlier one has left for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from plan_cases import MODULE, Memory, pieces_of, plan, products, requests, transposed

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


def written_for(found: Any, tripped_by: str) -> tuple[Memory, Any]:
    """What memory holds at the end, and the product that gave the result, where the guard is clear ("") or trips.

    It trips by what the passes find ("planes"), or by what the first product finds of the weight ("product"). Every
    launch is checked on its way.
    """
    memory, kept, result = Memory(), Memory(), None
    for launch in found.launches:
        if isinstance(launch, MODULE.SplitPass):
            check_guard(found, memory, launch)
            if launch.when == ALWAYS or tripped_by:
                split(memory, launch)
        elif isinstance(launch, MODULE.FusedProduct):
            check_guard(found, memory, launch)
            if launch.weight_flags.bytes:
                memory.write(launch.weight_flags, "flags", scheme_of(launch), "weight")  # cleared by who returns too
            is_clear = not tripped_by or (tripped_by == "product" and launch.when == IF_CLEAR)
            if launch.when == ALWAYS or is_clear == (launch.when == IF_CLEAR):
                multiply(memory, kept, launch)
                result = launch
        elif isinstance(launch, MODULE.AlignedCopy):
            copy(memory, launch)
        else:
            assert memory.read(launch.partials) == {("partials", result.kernel.name)}
    return memory, result


def scheme_of(product: Any) -> str:
    return "split3" if product.kernel.name.replace("convert", "split").startswith("sm90_split3") else "split6"


def split(memory: Memory, launch: Any) -> None:
    operand = "weight" if launch.is_weight else "x"
    for name in ("values", "scales", "flags"):
        memory.write(getattr(launch.planes, name), name, launch.scheme.name, operand)
    if launch.cleared.bytes:
        memory.write(launch.cleared, "zeros")


def copy(memory: Memory, launch: Any) -> None:
    if launch.matrix == MODULE.CopiedMatrix.result:
        assert memory.read(launch.aligned) == {("result",)}
    else:
        memory.write(launch.aligned, "aligned", launch.matrix.name)


def multiply(memory: Memory, kept: Memory, product: Any) -> None:
    scheme, is_over_planes = scheme_of(product), product.x.scales.bytes > 0
    for operand in ("x", "weight"):
        planes = getattr(product, operand)
        if planes.values.bytes == 0:
            assert operand == "weight" or not is_over_planes
            continue
        if not is_over_planes:
            assert memory.read(planes.values) == {("aligned", operand)}
            continue
        for name in ("values", "scales"):
            piece = getattr(planes, name)
            if piece.memory == WEIGHT_PLANES:
                assert operand == "weight"
            else:
                assert memory.read(piece) == {(name, scheme, operand)}
    assert (product.sums.bytes > 0) == (product.arrivals.bytes > 0) == (product.kernel.slices > 1)
    if product.arrivals.bytes:
        assert memory.read(product.arrivals) == {("zeros",)}
        memory.write(product.arrivals, "arrivals")
        memory.write(product.sums, "sums")
    if product.result.bytes:
        memory.write(product.result, "result")
    if product.partials.bytes:
        memory.write(product.partials, "partials", product.kernel.name)


def check_guard(found: Any, memory: Memory, launch: Any) -> None:
    """Whoever waits for the guard reads the flags of split3's operands, all that are known by then."""
    if launch.when == ALWAYS:
        return
    first = products(found)[0]
    read = [{("outside",)} if flags.memory == WEIGHT_PLANES else memory.read(flags) for flags in launch.guard]
    x, weight = {("flags", "split3", "x")}, {("flags", "split3", "weight")}
    if first.weight.flags.memory == WEIGHT_PLANES:
        weight = {("outside",)}
    finds_the_weight_s = launch.when == IF_CLEAR and first.weight_flags.bytes > 0
    assert read == ([x] if finds_the_weight_s else [x, weight])


@pytest.mark.parametrize("tripped_by", ["", "planes", "product"])
@given(requests(**OVER_PLANES))
def test_inputs_of_every_launch_are_written_before(tripped_by: str, case: tuple[Any, dict[str, Any]]) -> None:
    for found in fused_plans(case):
        if tripped_by and len(products(found)) == 1:
            continue  # there is no guard
        if tripped_by == "product" and not products(found)[0].weight_flags.bytes:
            continue  # every flag is known before the first product
        _, result = written_for(found, tripped_by)
        assert result is not None


@given(requests(**OVER_PLANES, precision="guarded"))
def test_exactly_one_product_of_a_guarded_plan_gives_the_result(case: tuple[Any, dict[str, Any]]) -> None:
    for found in filter(is_over_planes, fused_plans(case)):
        first, fallback = products(found)
        assert (scheme_of(first), scheme_of(fallback)) == ("split3", "split6")
        assert (first.when, fallback.when) == (IF_CLEAR, IF_TRIPPED)
        assert scheme_of(written_for(found, "")[1]) == "split3"
        assert scheme_of(written_for(found, "planes")[1]) == "split6"
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
