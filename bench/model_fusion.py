"""What of a model was fused: `cutfuse.explain_model`'s products, those that are alike counted together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

import cutfuse
from bench.model_zoo import Inputs
from bench.runner import one_line

FATE = ("fused", "program", "ended_at", "reason")


def pattern_of(module: str) -> str:
    """A module's name with "*" for the numbers of layers; a name of nothing but numbers stays."""
    parts = module.split(".")
    return module if all(map(str.isdigit, parts)) else ".".join("*" if part.isdigit() else part for part in parts)


def product_rows(products: Iterable[Any]) -> list[dict[str, Any]]:
    """A model's products for the results file: one row for those that differ by the layer's number only."""
    counts = Counter(
        (
            pattern_of(product.module),
            int(product.m),
            int(product.n),
            int(product.k),
            str(product.dtype).removeprefix("torch."),
            bool(product.is_fused),
            product.program,
            product.ended_at,
            product.reason,
        )
        for product in products
    )
    names = ("module", "m", "n", "k", "dtype", "fused", "program", "ended_at", "reason")
    return [{**dict(zip(names, row, strict=True)), "count": count} for row, count in counts.items()]


def explained(
    module: nn.Module, inputs: Inputs, explain: Callable[..., Any] | None = None
) -> tuple[list[dict[str, Any]], str]:
    """The rows of a model's products, and a note where the explanation failed."""
    try:
        explanation = (explain or cutfuse.explain_model)(module, *inputs.arguments, **inputs.keywords)
        return product_rows(explanation.products), ""
    except Exception as error:  # The times are good without the explanation; the report shows why it is missing.
        return [], f"explain failed: {one_line(error)}"


def fused_of(rows: Sequence[dict[str, Any]]) -> str:
    """How many products are fused, of how many; empty without products."""
    fused, whole = (sum(row["count"] for row in own) for own in ([row for row in rows if row["fused"]], rows))
    return f"{fused} of {whole}" if rows else ""


def fates_of(cases: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], list[str]]:
    """By model, layer and what became of it: the cases in which that became of it, in one model as "all"."""
    found: dict[tuple[Any, ...], list[str]] = {}
    titles: dict[str, list[str]] = {}
    for case in cases:
        if not case.get("products"):
            continue
        title = f"{case['variant']} {case['shape']} {case['precision']}"
        titles.setdefault(case["group"], []).append(title)
        for row in case["products"]:
            layer = f"{row['count']} x {row['module']} {row['n']}x{row['k']}"
            own = found.setdefault((case["group"], layer, *(row[part] for part in FATE)), [])
            if title not in own:
                own.append(title)
    return {key: ["all"] if own == titles[key[0]] else own for key, own in found.items()}


def fusion_rows(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of every model's products over all of its cases: a row for the layers that were treated alike.

    `layers` names them with how often they occur and their N x K. `cases` is "all" where that is every case of the
    model that has an explanation.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (model, layer, *fate), own in fates_of(cases).items():
        about = {"model": model, **dict(zip(FATE, fate, strict=True)), "cases": "; ".join(own)}
        rows.setdefault(tuple(about.values()), {**about, "layers": []})["layers"].append(layer)
    order = list(dict.fromkeys(row["model"] for row in rows.values()))
    return sorted(rows.values(), key=lambda row: order.index(row["model"]))
