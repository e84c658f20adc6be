"""What of a model was fused: `cutfuse.explain_model`'s products, those that are alike counted together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

import cutfuse
from bench.model_zoo import Inputs
from bench.tables import one_line

FATE = ("fused", "program", "ended_at", "reason")
# Of two predictions, as cutfuse.compile.choice words them; the second is what would have been fused.
PREDICTIONS = re.compile(r"predicted to take [\d.]+ us, (.+?),? [\d.]+ us.*")


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


def kind_of(reason: str) -> str:
    """A reason without the predicted times, by which two layers that are left for the same reason would differ."""
    return PREDICTIONS.sub(r"predicted to take less than \1", reason)


def names_of(own: Sequence[dict[str, Any]], all_cases: Sequence[dict[str, Any]]) -> str:
    """The cases `own` of one model's: "all", a variant and precision for all of its shapes, or with the shapes."""
    if len(own) == len(all_cases):
        return "all"
    named: dict[str, list[str]] = {}
    for case in own:
        named.setdefault(f"{case['variant']} {case['precision']}", []).append(case["shape"])
    whole = Counter(f"{case['variant']} {case['precision']}" for case in all_cases)
    return "; ".join(
        name if len(shapes) == whole[name] else f"{name} {', '.join(shapes)}" for name, shapes in named.items()
    )


def fates_of(cases: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], str]:
    """By model, layer and what became of it: the names of the cases in which that became of it."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    explained_cases: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if not case.get("products"):
            continue
        explained_cases.setdefault(case["group"], []).append(case)
        for row in case["products"]:
            layer = f"{row['count']} x {row['module']} {row['n']}x{row['k']}"
            fate = {**row, "reason": kind_of(row["reason"])}
            own = found.setdefault((case["group"], layer, *(fate[part] for part in FATE)), [])
            if case not in own:
                own.append(case)
    return {key: names_of(own, explained_cases[key[0]]) for key, own in found.items()}


def fusion_rows(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of every model's products over all of its cases: a row for the layers that were treated alike.

    `layers` names them with how often they occur and their N x K. `cases` is "all" where that is every case of the
    model that has an explanation.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for (model, layer, *fate), own in fates_of(cases).items():
        about = {"model": model, **dict(zip(FATE, fate, strict=True)), "cases": own}
        rows.setdefault(tuple(about.values()), {**about, "layers": []})["layers"].append(layer)
    order = list(dict.fromkeys(row["model"] for row in rows.values()))
    return sorted(rows.values(), key=lambda row: order.index(row["model"]))
