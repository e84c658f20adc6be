"""Tables of predicted times: that each is the fit of its samples, and what a fit finds of times that are known."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_runs import LaunchClock, results_of, run, session_of

from bench import fit, goals
from bench.__main__ import main
from bench.fit import PRODUCT, SAMPLES, UNFUSED, Fit, Layer, Sample, Samples, choices, held_out_tables
from bench.goals import lines_of
from bench.runner import figures_of
from bench.suite import Figures, Session
from cutfuse import native

DEVICE = "NVIDIA H200"
KERNELS = ("sm90_bf16_128x256x64_2x1_cooperative", "sm90_bf16_64x128x64_1x1_pingpong")
NUMBERS = native.module().device_times()[DEVICE][2]
LAST_DIGIT = 0.006  # of three, beside another library's order of additions


def committed() -> list[Path]:
    return sorted(SAMPLES.glob("*.json"))


def made_up(count: int, numbers: dict[str, float], seed: int = 0) -> Samples:
    """Layers whose ways take what is predicted with these numbers."""
    generator = random.Random(seed)
    layers = []
    for place in range(count):
        m, n, k = (8 * generator.randrange(8, 700) for _ in range(3))
        layers.append(Layer(m, n, k, f"operands=0; {'relu' if place % 2 else 'gelu'} z"))
    empty = Samples(DEVICE, 132, 4800.0, (), {}, NUMBERS, ())
    times = {way: empty.predict(way, numbers, layers, is_bare=way == PRODUCT) for way in (*KERNELS, PRODUCT, UNFUSED)}
    samples = [Sample(layer, {way: own[place] for way, own in times.items()}) for place, layer in enumerate(layers)]
    return empty.of(samples)


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.stem)
def test_a_table_is_the_fit_of_its_samples(path: Path) -> None:
    samples = Samples.load(path)
    multiprocessors, gigabytes, numbers = native.core.device_times()[samples.device]
    assert (multiprocessors, gigabytes) == (samples.multiprocessors, samples.gigabytes_per_second)
    fitted = Fit(samples).run()
    assert len(fitted) > 40
    assert {name: numbers[name] for name in fitted} == pytest.approx(fitted, rel=LAST_DIGIT, abs=1e-3)
    assert numbers == samples.earlier | {name: numbers[name] for name in fitted}
    written = fit.table_path(samples.device).read_text(encoding="utf-8")
    assert written == fit.table_text(samples, {name: numbers[name] for name in fitted})


def test_every_device_with_a_table_has_samples() -> None:
    assert {Samples.load(path).device for path in committed()} == set(native.core.device_times())


def test_the_choice_is_good_for_layers_that_were_not_fitted() -> None:
    """With cuBLAS one layer is 1.26: its product was measured once, at 126 us, where others of its size took 100."""
    samples = Samples.load(fit.samples_path(DEVICE))
    fits = fit.held_out_fits(samples)
    of_kernels, of_all = (fit.held_out(fits, with_cublas=with_cublas) for with_cublas in (False, True))
    assert len(of_kernels) == len(of_all) > 100
    assert statistics.fmean(one.loss for one in of_kernels) < 1.01
    assert max(one.loss for one in of_kernels) < 1.15
    assert statistics.fmean(one.loss for one in of_all) < 1.01


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    name = "pingpong_64x128.per_wave_of_1024_k"
    other = {name: 1.1 * NUMBERS[name], "cublas.per_1024_k": 0.95 * NUMBERS["cublas.per_1024_k"]}
    found = Fit(made_up(60, other)).run()
    assert {own: found[own] for own in other} == pytest.approx(other, rel=0.01)
    rest = {own: NUMBERS[own] for own in found if own.endswith("per_wave_of_1024_k") and own not in other}
    assert {own: found[own] for own in rest} == pytest.approx(rest, rel=0.02)


def test_numbers_that_no_sample_depends_on_stay_and_the_table_names_them() -> None:
    samples = made_up(20, {})
    fitted = Fit(samples).run()
    left = {name for name in NUMBERS if name not in fitted}
    assert {"early_finalize", "pingpong_64x64.start"} < left
    _, rest = fit.table_text(samples, fitted).split(f"// Not yet with samples: {len(left)} numbers.\n")
    assert {line.partition("(")[2].partition(",")[0] for line in rest.splitlines()} == left


def test_times_of_the_host_are_not_counted() -> None:
    samples = replace(made_up(20, {}), shortest_us={"kernel": 1e6, "product": 0.0})
    assert {name.partition(".")[0] for name in Fit(samples).run()} <= {"cublas", "bytes_per_microsecond"}
    assert choices(samples, {}, with_cublas=True) == []


def test_a_choice_by_wrong_numbers_loses_what_was_measured() -> None:
    samples = made_up(40, {})
    assert {one.loss for one in choices(samples, {}, with_cublas=True)} == {1.0}
    wrong = {"pingpong_64x128.per_wave_of_1024_k": 0.1}
    found = choices(samples, wrong, with_cublas=False)
    assert {one.chosen for one in found} == {KERNELS[1]}
    assert max(one.loss for one in found) > 1.2
    table, worst = held_out_tables(samples)
    assert table.columns["mean"][0] == "1.0000"
    assert len(worst.rows) > 0


def test_where_the_second_kernel_was_not_measured_its_time_is_predicted() -> None:
    samples = made_up(20, {})
    alone = samples.of(
        [replace(one, times={way: us for way, us in one.times.items() if way != UNFUSED}) for one in samples.samples]
    )
    assert choices(alone, {}, with_cublas=True) == choices(samples, {}, with_cublas=True)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    samples = made_up(4, {})
    short = replace(samples.samples[0], times={PRODUCT: 12.0})
    samples = samples.of([short, *samples.samples[1:]])
    samples.save(path)
    found = Samples.load(path)
    assert found.samples[0] == short
    assert [one.layer for one in found.samples] == [one.layer for one in samples.samples]
    assert found.samples[1].times == pytest.approx(dict(samples.samples[1].times), abs=0.006)
    assert found.earlier == NUMBERS


def measured(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, float], count: int) -> list[Figures]:
    """Layers as the suite draws and times them, on a device whose ways take what these numbers predict."""
    empty = Samples(DEVICE, 132, 4800.0, (), {}, NUMBERS, ())

    def launches(layer: Layer, device: torch.device) -> fit.Launches:
        assert device.type == "cpu"
        kernels = KERNELS if layer.reduction == "none" else ()
        times = {
            way: empty.predict(way, numbers, [layer], is_bare=way == PRODUCT)[0] for way in (*kernels, PRODUCT, UNFUSED)
        }
        return {way: us.__float__ for way, us in times.items()}

    class Timed(Session):
        clock = LaunchClock()

    monkeypatch.setattr(fit, "launches_of", launches)
    session = session_of(*fit.CONTENDERS)
    timed = Timed(session.device, session.contenders, session.effort)
    return [figures_of(case, timed) for case in list(fit.SUITE.cases(False, False, 0))[:count]]


def test_a_run_writes_the_samples_and_the_table_which_a_refit_writes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "cooperative_128x256.per_wave_of_1024_k"
    other = {name: 1.2 * NUMBERS[name]}
    results = results_of("fit", measured(monkeypatch, other, 240))
    results["machine"]["multiprocessors"] = 132
    monkeypatch.setattr(fit, "SAMPLES", tmp_path / "samples")
    monkeypatch.setattr(fit, "TABLES", tmp_path)
    lines = fit.finish(results)
    assert lines[-1].startswith("Samples: ")
    assert "held-out layers" in lines[0]
    table = tmp_path / "h200.def"
    text = table.read_text(encoding="utf-8")
    fitted = float(text.split(f"CUTFUSE_TIME({name}, ")[1].split(")")[0])
    assert fitted == pytest.approx(other[name], rel=0.04)
    table.unlink()
    assert main(["refit"]) == 0
    assert table.read_text(encoding="utf-8") == text
    assert "held-out layers" in capsys.readouterr().out
    assert goals.tables_of(results)[1].columns["fastest"][3] == UNFUSED


def test_the_goals_are_of_the_way_that_the_table_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for numbers, losing in (({}, False), ({"pingpong_64x128.per_wave_of_1024_k": 1.0}, True)):
        cases = measured(monkeypatch, numbers, 12)
        mean, worst = lines_of(results_of("fit", cases))
        assert len(mean.cells) == len(worst.cells) == sum(case["layer"][4] == "none" for case in cases) == 9
        assert mean.value is not None
        assert worst.value is not None
        assert (mean.value > 1.001, worst.value > 1.01) == (losing, losing)


def test_the_suite_draws_every_kind_of_layer_within_its_time() -> None:
    cases = list(fit.SUITE.cases(False, False, 0))
    assert {tuple(case.about["layer"][3:]) for case in cases} == set(fit.FOLLOWING)
    assert 1.4 * len(cases) < 1.05 * fit.SUITE.time_limit_s
    assert fit.SUITE.time_limit_s < 1200


def test_a_time_that_the_host_may_be_a_part_of_is_no_sample() -> None:
    layer = [16, 256, 256, "operands=0; relu z", "none"]
    entries = {KERNELS[0]: {"median_us": 5.0, "late": 1}, KERNELS[1]: {"note": "failed"}, PRODUCT: {"median_us": 4.0}}
    results = results_of("fit", [{"layer": layer, "contenders": entries}])
    assert [one.times for one in fit.samples_of(results).samples] == [{PRODUCT: 4.0}]


def test_the_suite_runs_on_the_cpu_and_writes_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fit, "TABLES", tmp_path / "tables")
    status, results = run("fit", tmp_path / "run")
    assert status == 0
    assert {way for case in results["cases"] for way in case["contenders"]} == {PRODUCT, UNFUSED}
    assert not any("note" in entry for case in results["cases"] for entry in case["contenders"].values())
    assert not (tmp_path / "tables").exists()


def test_the_terms_are_judged_without_each() -> None:
    table = fit.terms_table(made_up(12, {}))
    assert table.columns["without"][0] == "none"
    assert {"contention", "per_op", "per_further_sector"} <= set(table.columns["without"])
