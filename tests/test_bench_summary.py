"""What of a run is committed, and the plots that are made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import model_report, report
from bench.__main__ import load, main, report_of
from bench.summarise import LARGEST_BYTES, summarise

COMMITTED = sorted((Path(__file__).resolve().parents[1] / "bench" / "results").glob("*"))


@pytest.mark.parametrize(
    ("suite", "filters"), [("reference", ["Sigmoid 256"]), ("fp32", ["skinny"]), ("accuracy", ["integers"])]
)
def test_a_summary_gives_the_same_tables(
    suite: str, filters: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [part for text in filters for part in ("--filter", text)]
    raw = tmp_path / f"{suite}.json"
    main([suite, "--device", "cpu", "--rounds", "2", "--output", str(raw), *arguments])
    assert main(["summarise", str(raw), "--output", str(tmp_path / "results")]) == 0
    committed = tmp_path / "results" / raw.name
    assert f"Summary: {committed}" in capsys.readouterr().out
    assert committed.stat().st_size < raw.stat().st_size
    form = report_of(suite)
    shown = [getattr(form, "summary", form.markdown)(load(path, "render")) for path in (raw, committed)]
    assert shown[0] == shown[1]


def test_a_summary_of_models_has_what_was_fused_in_a_file_of_its_own_without_empty_fields(tmp_path: Path) -> None:
    results = {**report.committed("models")}
    row = {
        "model": "MLP",
        "fused": False,
        "cases": "all",
        "layers": ["8x8"],
        **dict.fromkeys(("program", "ended_at", "reason"), ""),
    }
    results["fusion"] = [row]
    sizes = summarise(results, tmp_path / "models.json")
    assert sizes == {path: path.stat().st_size for path in (tmp_path / "models.json", tmp_path / "models-fusion.json")}
    assert "layers" not in (tmp_path / "models.json").read_text()
    shortened = load(tmp_path / "models.json", "render")
    assert shortened["fusion"] == [{key: item for key, item in row.items() if item != ""}]
    given, kept = (model_report.fusion_table(of) for of in (results, shortened))
    assert given == kept


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    results = {"schema": report.SCHEMA, "suite": "reduce", "cases": [{"group": "x" * LARGEST_BYTES}]}
    with pytest.raises(ValueError, match="at most 50000 are committed"):
        summarise(results, tmp_path / "reduce.json")
    models = {**report.committed("models"), "fusion": [{"layers": ["x" * LARGEST_BYTES]}]}
    with pytest.raises(ValueError, match=r"models-fusion\.json would have"):
        summarise(models, tmp_path / "models.json")
    assert not list(tmp_path.iterdir())
    raw = tmp_path / "raw.json"
    report.save(results, raw)
    with pytest.raises(SystemExit, match="cannot summarise"):
        main(["summarise", str(raw), "--output", str(tmp_path)])


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_what_is_committed_is_small(path: Path) -> None:
    assert path.suffix in (".json", ".png")  # PNGs are those of `render`, which git ignores
    assert path.suffix == ".png" or path.stat().st_size <= LARGEST_BYTES


def test_plots_are_of_the_committed_results() -> None:
    pytest.importorskip("matplotlib")
    from bench import figures

    for suite, draw in figures.FIGURES.values():
        results = report.committed(suite)
        svg = figures.render(draw, results, figures.INKS["dark"])
        assert report.heading(results) in svg  # digits of its versions too, which are no coordinates
        assert figures.INKS["dark"] in svg
