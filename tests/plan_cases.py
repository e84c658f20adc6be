"""Requests to the planner, and what is in its plans: shared by the tests of plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from cutfuse import native

MODULE = native.module()
DTYPES: dict[str, int] = MODULE.dtypes()
REDUCTIONS: dict[str, int] = {"none": 0, **MODULE.reductions()}
PRECISIONS = ("ieee", "tf32", "split3", "split6", "guarded")
# Compute capability and multiprocessors.
H200 = H100_SXM = (9, 0, 132)
H100_PCIE = (9, 0, 114)
A100 = (8, 0, 108)
B200 = (10, 0, 148)
HOPPER = (H200, H100_PCIE, (9, 0, 32))  # the last is a slice of one

Matrix = tuple[int, int, int, int, bool]


def contiguous(rows: int, columns: int) -> Matrix:
    return rows, columns, columns, 1, True


def transposed(rows: int, columns: int) -> Matrix:
    return rows, columns, 1, rows, True


def request(m: int = 1024, n: int = 8192, k: int = 8192, dtype: str = "bfloat16", **options: Any) -> Any:
    """Of contiguous matrices; `options` as the request takes them, or names of what it takes as codes."""
    precision = options.get("precision", "guarded") if dtype == "float32" else "tf32"
    return MODULE.LinearRequest(
        x=options.get("x", contiguous(m, k)),
        weight=options.get("weight", contiguous(n, k)),
        bias=options.get("bias", (1, True)),
        input=DTYPES[dtype],
        output=DTYPES[options.get("output", dtype)],
        reduction=REDUCTIONS[options.get("reduction", "none")],
        epilogue_cost=options.get("epilogue_cost", 2.5),
        specialized_cost=options.get("specialized_cost"),
        generated_cost=options.get("generated_cost", options.get("specialized_cost") or 0.0),
        operand_bytes=options.get("operand_bytes", 0.0),
        fetched_bytes=options.get("fetched_bytes", 0.0),
        precision=getattr(MODULE.Precision, precision),
        weight_has_planes=options.get("weight_has_planes", False),
        stores_pre_activation=options.get("stores_pre_activation", False),
        device=options.get("device", H200),
        issuer=MODULE.Issuer.__members__[options.get("issuer", "call")],
        batch_invariant=options.get("batch_invariant", False),
    )


def plan(*shape: int, only: str = "", **options: Any) -> Any:
    return MODULE.plan_linear(request(*shape, **options), only)


def kinds(of: Any) -> list[str]:
    return [type(launch).__name__ for launch in of.launches]


def products(of: Any) -> list[Any]:
    return [launch for launch in of.launches if isinstance(launch, MODULE.FusedProduct)]


@st.composite
def layouts(draw: st.DrawFn, rows: int, columns: int) -> Matrix:
    strides = draw(
        st.sampled_from(
            [(columns, 1), (columns, 1), (columns + 4, 1), (columns + 1, 1), (1, rows), (0, 1), (2 * columns, 2)]
        )
    )
    return rows, columns, *strides, draw(st.sampled_from([True, True, True, False]))


EXTENTS = st.one_of(
    st.integers(1, 70),
    st.sampled_from([128, 197, 256, 384, 768, 1024, 1576, 3072, 4096, 5001, 8192, 32768]),
    st.integers(1, 1 << 15),
)


@st.composite
def requests(draw: st.DrawFn, **fixed: Any) -> tuple[Any, dict[str, Any]]:
    """A request, and the options that it was made of."""
    m, n, k = draw(EXTENTS), draw(EXTENTS), draw(EXTENTS)
    options = {
        "m": m,
        "n": n,
        "k": k,
        "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
        "precision": draw(st.sampled_from(["guarded", *PRECISIONS])),
        "x": draw(layouts(m, k)),
        "weight": draw(layouts(n, k)),
        "bias": draw(st.sampled_from([None, (1, True), (1, False), (3, True)])),
        "reduction": draw(st.sampled_from(["none", *REDUCTIONS])),
        "epilogue_cost": draw(st.sampled_from([0.0, 0.5, 2.5, 14.0, 60.0])),
        "operand_bytes": draw(st.sampled_from([0.0, 2.0, 8.0])),
        "weight_has_planes": draw(st.booleans()),
        "device": draw(st.sampled_from([*HOPPER, A100])),
        **fixed,
    }
    return request(**options), options


def pieces_of(launch: Any) -> Iterable[tuple[str, Any]]:
    """A launch's pieces of memory by name, those that it has."""
    named = []
    if isinstance(launch, MODULE.SplitPass):
        named = [(name, getattr(launch.planes, name)) for name in ("values", "scales", "flags")]
        named.append(("cleared", launch.cleared))
    elif isinstance(launch, MODULE.FusedProduct):
        for operand in ("x", "weight"):
            planes = getattr(launch, operand)
            named += [(f"{operand} {name}", getattr(planes, name)) for name in ("values", "scales", "flags")]
        named += [(name, getattr(launch, name)) for name in ("weight_flags", "sums", "arrivals", "partials", "result")]
    elif isinstance(launch, MODULE.AlignedCopy):
        named = [("aligned", launch.aligned)]
    elif isinstance(launch, MODULE.FoldPartials):
        named = [("partials", launch.partials)]
    named += [("guard", piece) for piece in getattr(launch, "guard", ())]
    return [(name, piece) for name, piece in named if piece.bytes]
