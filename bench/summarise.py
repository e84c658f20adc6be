"""From a raw run to what is committed: the figures that the tables and plots are made of, and nothing else.

A raw file also has how long each case took, every sample count and the host's times; it is several times as large, and
stays in the ignored folder `bench/raw`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.report import part_path, tidy

LARGEST_BYTES = 50_000
# No table and no plot reads these.
UNREAD = frozenset({"host_us", "rounds", "late", "rounding", "compile_s", "seconds", "reasons", "is_exact"})
# Of the models suite: its table of what was fused is made of the products.
UNREAD |= {"gpu_range_us", "wall_range_us", "products"}
# Of the chains suite: its tables have medians, and a case has up to eight contenders.
UNREAD_OF_CHAINS = frozenset({"p10_us", "p90_us", "error", "path", "kernels"})
# Fields that are as large as all others together, and have a file of their own.
PARTS = {"models": ("fusion",), "chains": ("chains",)}
PRODUCT = "product"  # the route of the accuracy suite whose errors are shown; gradients are judged by their ratios


def without_unread(value: Any, unread: frozenset[str] = UNREAD) -> Any:
    """The results without the fields that nothing reads, settings apart: they say how the run was made."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in unread}
        return {key: item if key == "settings" else without_unread(item, unread) for key, item in kept.items()}
    if isinstance(value, list):
        return [without_unread(item, unread) for item in value]
    return value


def without_gradients_errors(results: dict[str, Any]) -> dict[str, Any]:
    """The accuracy suite's results with every ratio, and with the errors of the products alone."""
    if results["suite"] != "accuracy":
        return results
    cases = [case if case["route"] == PRODUCT else {**case, "contenders": {}} for case in results["cases"]]
    return {**results, "cases": cases}


def without_empty_fields(results: dict[str, Any]) -> dict[str, Any]:
    """The models suite's results, whose table of what was fused has a row for each reason and many empty fields."""
    if results["suite"] != "models":
        return results
    return {**results, "fusion": [{key: item for key, item in row.items() if item != ""} for row in results["fusion"]]}


def as_text(results: dict[str, Any]) -> str:
    """JSON with one line for each field, and for each case."""
    fields = []
    for key, value in results.items():
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, list) and value:
            items = ",\n".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in value)
            text = f"[\n{items}\n]"
        fields.append(f"{json.dumps(key)}:{text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def checked(content: bytes, path: Path) -> bytes:
    """A file's content, if it may be committed."""
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"{path.name} would have {len(content)} bytes, and at most {LARGEST_BYTES} are committed")
    return content


def summarise(results: dict[str, Any], path: Path) -> dict[Path, int]:
    """Write the summary of `results` to `path`, and what has a file of its own beside it; gives their sizes in bytes.

    Raises ValueError where one is larger than what may be committed.
    """
    is_long = results["suite"] == "chains"
    shortened = without_empty_fields(without_gradients_errors(results))
    kept = tidy(without_unread(shortened, UNREAD | UNREAD_OF_CHAINS if is_long else UNREAD), 4 if is_long else 6)
    parts = PARTS.get(results["suite"], ())
    files = {part_path(path, field): {field: kept.pop(field)} for field in parts}
    if parts:
        kept["parts"] = list(parts)
    contents = {file: checked(as_text(fields).encode(), file) for file, fields in {path: kept, **files}.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        file.write_bytes(content)
    return {file: len(content) for file, content in contents.items()}
