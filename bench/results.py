"""Results files: written after each case, continued, merged from the runs of several machines, and shortened."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import SUITES
from bench.machine import PACKAGES
from bench.suite import Figures, Results, key_of, suite_of, title_of

SCHEMA = 2
RESULTS = Path(__file__).resolve().parent / "results"
LARGEST_BYTES = 50_000  # of a file that is committed
# What has to be the same of two runs whose cases are put side by side.
MACHINE = ("device", "commit", "cutfuse", "cutfuse_kernels", "torch", "cuda", *PACKAGES)
SETTINGS = ("small", "quick", "seed", "contenders", "seconds_per_case", "rounds")
# No table and no plot reads these.
UNREAD = frozenset({"host_us", "rounds", "late", "rounding", "compile_s", "seconds", "p10_us", "p90_us"})
UNREAD |= {"gpu_range_us", "wall_range_us", "products", "kernels", "warned"}
# Of the chains suite, whose cases have up to eight contenders.
UNREAD_OF_CHAINS = UNREAD | {"error", "path"}


def tidy(value: Any, digits: int = 6) -> Any:
    """Numbers cut to `digits` for JSON, and null for infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: tidy(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tidy(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def as_text(results: Results) -> str:
    """JSON with one line for each field, and for each case."""
    fields = []
    for key, value in results.items():
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if isinstance(value, list) and value:
            items = ",\n".join(json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in value)
            text = f"[\n{items}\n]"
        fields.append(f"{json.dumps(key)}:{text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def save(results: Results, path: Path) -> None:
    """Write results as JSON, making the folder. Whoever reads the file meanwhile finds what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.part")
    written.write_text(as_text(tidy(results)), encoding="utf-8")
    written.replace(path)


def part_path(path: Path, field: str) -> Path:
    """Where a summary has a field that is in a file of its own."""
    return path.with_name(f"{path.stem}-{field}{path.suffix}")


def load(path: Path) -> Results:
    """Read results, with the fields that are in files of their own.

    Raises ValueError for a file that `bench` did not write, and OSError where one is missing.
    """
    results = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(results, dict) or results.get("schema") != SCHEMA:
        raise ValueError(f"{path} holds no results of this benchmark (schema {SCHEMA})")
    for field in results.pop("parts", ()):
        results |= json.loads(part_path(path, field).read_text(encoding="utf-8"))
    return results


def committed_path(suite: str) -> Path:
    """Where a suite's committed results are."""
    return RESULTS / f"{suite}-nvidia-h200.json"


def committed_suites() -> list[str]:
    """The suites that have committed results."""
    return [suite for suite in SUITES if committed_path(suite).exists()]


def committed(suite: str) -> Results:
    """A suite's committed results, of which the documentation's tables and plots are made.

    Raises ValueError where it has none.
    """
    if suite not in committed_suites():
        raise ValueError(f"{suite} has no committed results: run it, and name the file that it writes")
    return load(committed_path(suite))


def has_failed(case: Figures) -> bool:
    """Whether a case could not be built, or one of its contenders failed or gave a wrong result."""
    entries = (case, *case["contenders"].values())
    return any(entry.get("note", "").startswith(("failed", "wrong")) for entry in entries)


def check_alike(results: Results, other: Results) -> None:
    """Raises ValueError with the reason where two runs are not to be put together."""
    if results["suite"] != other["suite"]:
        raise ValueError(f"the suites are {results['suite']} and {other['suite']}")
    for part, names in (("machine", MACHINE), ("settings", SETTINGS)):
        for name in names:
            one, two = results[part].get(name), other[part].get(name)
            if one != two:
                raise ValueError(f"{name} is {one} in one and {two} in the other")
    commit = results["machine"]["commit"]
    if commit is None or " " in commit:
        raise ValueError(f"the commit is {commit or 'unknown'}, so that the code may differ")


def complete(results: Results) -> None:
    """Put the cases into the suite's order, and work out what follows from them."""
    suite = suite_of(results["suite"])
    order = {key_of(case.as_dict()): place for place, case in enumerate(suite.cases_of(results))}
    results["cases"].sort(key=lambda case: order[key_of(case)])
    results.update(suite.derived(results))


def merged(runs: Sequence[Results]) -> Results:
    """All cases of several runs; one that several runs have is taken from the first in which it did not fail.

    Raises ValueError where the runs differ in more than their cases.
    """
    first = runs[0]
    for other in runs[1:]:
        check_alike(first, other)
    cases: dict[tuple[str, ...], Figures] = {}
    for case in (case for run in runs for case in run["cases"]):
        known = cases.get(key_of(case))
        if known is None or (has_failed(known) and not has_failed(case)):
            cases[key_of(case)] = case
    left_out = dict.fromkeys(title for run in runs for title in run["left_out"])
    measured = {title_of(case) for case in cases.values()}
    results = {
        **first,
        "cases": list(cases.values()),
        "left_out": [title for title in left_out if title not in measured],
        "seconds": sum(run.get("seconds", 0.0) for run in runs),
    }
    complete(results)
    return results


def without_unread(value: Any, unread: frozenset[str]) -> Any:
    """The results without the fields that nothing reads, settings apart: they say how the run was made."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in unread and item != ""}
        return {key: item if key == "settings" else without_unread(item, unread) for key, item in kept.items()}
    return [without_unread(item, unread) for item in value] if isinstance(value, list) else value


def summarise(results: Results, path: Path) -> dict[Path, int]:
    """Write what tables and plots are made of to `path`, and what is derived beside it; gives their sizes in bytes.

    A raw file also has sample counts, spreads and the host's times, and is several times as large. Raises ValueError
    where a file is larger than what may be committed.
    """
    is_long = results["suite"] == "chains"
    kept = tidy(without_unread(results, UNREAD_OF_CHAINS if is_long else UNREAD), 4 if is_long else 6)
    derived = suite_of(results["suite"]).derived(results)
    files = {part_path(path, field): {field: kept.pop(field)} for field in derived}
    if derived:
        kept["parts"] = list(derived)
    texts = {file: as_text(fields).encode() for file, fields in {path: kept, **files}.items()}
    for file, text in texts.items():
        if len(text) > LARGEST_BYTES:
            raise ValueError(f"{file.name} would have {len(text)} bytes, and at most {LARGEST_BYTES} are committed")
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        file.write_bytes(text)
    return {file: len(text) for file, text in texts.items()}
