"""`explain_model` as a table with bars: in a terminal, in a notebook, and as a page."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS
from test_prediction import explained
from torch import Tensor, nn

import cutfuse
from cutfuse.compile import report
from cutfuse.compile.regions import Times
from cutfuse.compile.report import ModelExplanation, rows_of

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Block(nn.Module):
    """Products that are joined, fused, left, and not predicted: a sum of an affine chain needs no product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.score = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.query, self.key, self.value))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return x * self.score(x).sum(-1, keepdim=True)


@pytest.fixture(scope="module")
def found() -> ModelExplanation:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(1024) for _ in range(3))).bfloat16(), torch.empty(2, 512, 1024).bfloat16()
    with torch.no_grad():
        return cutfuse.explain_model(model, x, device="H200")


def test_a_product_is_fused_joined_or_left(found: ModelExplanation) -> None:
    rows = {row.product.module.split(".")[-1]: row for row in rows_of(found)}
    assert {name: row.verdict for name, row in rows.items()} == {
        **dict.fromkeys(("query", "key", "value"), "joined"),
        "up": "fused",
        "down": "left",
        "score": "fused",
    }
    assert {row.occurrences for row in rows.values()} == {3}
    assert rows["up"].after < rows["up"].before
    assert rows["down"].after == rows["down"].before
    assert rows["score"].before is None
    both = re.findall(r"([\d.]+) us", rows["down"].product.reason)
    assert f"{rows['down'].before / 3:.1f}" == both[0]
    together, apart = (float(time) for time in re.findall(r"([\d.]+) us", rows["query"].product.reason))
    assert rows["query"].before == pytest.approx(apart, abs=0.1)  # a third of three products, three times
    assert rows["query"].after == pytest.approx(together, abs=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_sums_are_those_of_the_rows(seed: int) -> None:
    one = explained(seed, "meta", "H200")
    rows = rows_of(one)
    assert sum(row.occurrences for row in rows) == len(one.products)
    forward, steps = (
        [row for row in rows if row.product.times and row.product.times.is_step == is_step] for is_step in (False, True)
    )
    assert one.before == pytest.approx(sum(row.before or 0.0 for row in forward))
    assert one.after == pytest.approx(sum(row.after or 0.0 for row in forward))
    assert one.step_before == pytest.approx(sum(row.before or 0.0 for row in steps))
    assert one.step_after == pytest.approx(sum(row.after or 0.0 for row in steps))
    alone = " alone (the backward pass is not predicted)" if any(row.product.is_trained for row in forward) else ""
    told = f"predicted, forward{alone}: {one.before:,.1f} us before (torch.compile), {one.after:,.1f} after"
    assert (told in " ".join(str(one).split())) == bool(forward)
    for product in one.products:
        times = product.times
        if times is not None and not product.is_fused and not product.is_joined:
            assert times.before == times.after > 0.0


class OwnLayers(nn.Module):
    """Layers of cutfuse's, with PyTorch's between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = cutfuse.nn.FusedLinear(width, 4 * width, epilogue=F.gelu)
        self.down = nn.Linear(4 * width, width)
        self.scored = cutfuse.nn.LinearSigmoidSum(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.scored(x + self.down(self.up(x)))


def explain_own_layers(dtype: torch.dtype) -> ModelExplanation:
    model, x = OwnLayers(1024).to(dtype), torch.ones(4096, 1024, dtype=dtype)
    return cutfuse.explain_model(model, x, device="H200")


def test_layers_of_cutfuses_own_are_rows_at_their_own_times() -> None:
    with torch.no_grad():
        products = explain_own_layers(torch.bfloat16).products
    programs = {"up": "gelu(z)", "down": "(r0 + z)", "scored": "sum(sigmoid(z), -1)"}
    assert {product.module: product.program for product in products} == programs
    for product in (products[0], products[2]):
        assert product.is_fused
        assert product.times.before == product.times.after > 0
        assert product.reason == "a layer of cutfuse's own, fused already: both times are its own"
    assert (products[0].m, products[0].n, products[0].k) == (4096, 4096, 1024)


def test_a_trained_layer_of_cutfuses_own_is_a_row() -> None:
    with cutfuse.precision("guarded"):
        products = explain_own_layers(torch.float32).products
    assert [product.module for product in products] == ["up", "down", "scored"]
    assert all(product.is_trained for product in products)


def test_a_trained_model_has_a_sum_of_each_kind() -> None:
    found = explain_own_layers(torch.bfloat16)
    assert found.step_before
    assert found.before
    kinds = {product.module: product.times.is_step for product in found.products if product.times}
    assert kinds == {"up": True, "down": False, "scored": False}
    for text in (" ".join(str(found).split()), found._repr_html_()):
        alone = "predicted, forward alone (the backward pass is not predicted): "
        assert f"{alone}{found.before:,.1f} us before (torch.compile)" in text
        assert f"predicted, training steps: {found.step_before:,.1f} us before (torch.compile)" in text
        assert "4096 x 4096 x 1024 bfloat16, training step" in text
        assert "4096 x 1024 x 4096 bfloat16, forward alone" in text
        assert "sum, forward alone" in text
        assert "sum, training steps" in text
        assert "do not add up" in text
        assert "Before is torch.compile without cutfuse" in text


@pytest.mark.parametrize(
    ("dtype", "is_step", "after", "told"),
    [
        (torch.bfloat16, False, 80.0, ["20.0% less of the products' time", "7 to 9% on average of a layer in 16 bits"]),
        (torch.float16, False, 95.0, ["5.0% less of the products' time, which is within the predictions' error"]),
        (torch.float32, False, 95.0, ["5.0% less of the products' time other", "error is not known in fp32"]),
        (torch.bfloat16, True, 95.0, ["5.0% less of the products' time other", "not known of training steps"]),
        (torch.bfloat16, False, 100.0, ["0.0% less of the products' time other operations are not counted"]),
    ],
)
def test_a_gain_is_the_products_and_has_an_error(
    found: ModelExplanation, dtype: torch.dtype, is_step: bool, after: float, told: list[str]
) -> None:
    product = found.products[0]._replace(dtype=dtype, times=Times(100.0, after, is_step))
    text = " ".join(str(dataclasses.replace(found, products=(product,))).split())
    for part in told:
        assert part in text
    assert ("within the predictions' error" in text) == ("within" in told[0])


def test_of_trained_fp32_products_the_backward_pass_is_said_to_be_missing() -> None:
    model, x = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)), torch.ones(4096, 1024)
    found = cutfuse.explain_model(model, x, device="H200")
    text = " ".join(str(found).split())
    assert "predicted, forward alone (the backward pass is not predicted): " in text
    assert text.count("4096 x 1024 x 1024 float32, forward alone") == 2
    model[0].requires_grad_(False)  # a frozen layer has no backward pass
    assert [product.is_trained for product in cutfuse.explain_model(model, x, device="H200").products] == [False, True]


def test_a_product_with_nothing_behind_it_is_not_called_fused() -> None:
    model, x = (
        nn.Sequential(nn.Linear(1024, 1024), nn.Softmax(-1), nn.Linear(1024, 1024), nn.GELU()),
        torch.ones(4096, 1024),
    )
    with torch.no_grad():
        found = cutfuse.explain_model(model, x, device="H200")
    assert [row.verdict for row in rows_of(found)] == ["product", "fused"]
    assert found.fused == 1
    told = "1 of 2 products are fused, in 1 graph; of 1 more a kernel of cutfuse's computes the product alone"
    assert str(found).startswith(told)


def test_autocast_of_the_card_holds_for_tensors_that_stand_for_its() -> None:
    model, x = nn.Sequential(nn.Linear(1024, 4096), nn.GELU()), torch.ones(4096, 1024)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") leaves it off where there is no GPU
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with torch.no_grad():
            found = cutfuse.explain_model(model, x, device="H200")
            call = cutfuse.explain(x, model[0].weight, epilogue=F.gelu, device="H200").call
            own = cutfuse.explain(x, model[0].weight, epilogue=F.gelu).call
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert found.products[0].dtype == torch.bfloat16
    assert call == "linear of x [4096, 1024] bfloat16, weight [4096, 1024] bfloat16"
    assert own == "linear of x [4096, 1024] float32, weight [4096, 1024] float32"
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # what stands for it where there is no GPU
        assert cutfuse.explain_model(model, x, device="H200").products[0].dtype == torch.bfloat16


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Standard output is one."""
    stdout = SimpleNamespace(encoding="utf-8", isatty=lambda: True)
    monkeypatch.setattr(report, "sys", SimpleNamespace(stdout=stdout))  # pytest puts its own in sys
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return monkeypatch


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_text_is_no_wider_than_the_terminal(
    found: ModelExplanation, terminal: pytest.MonkeyPatch, columns: int
) -> None:
    terminal.setenv("COLUMNS", str(columns))
    text = re.sub(r"\033\[\d+m", "", str(found))
    assert max(map(len, text.splitlines())) <= columns
    assert "█" in text
    assert "sum, forward" in text


def test_colours_are_a_terminals_that_wants_them(found: ModelExplanation, terminal: pytest.MonkeyPatch) -> None:
    assert "\033[32m█" in str(found)  # green
    assert "\033[90m█" in str(found)  # grey
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        with terminal.context() as setting:
            setting.setenv(name, value)
            assert "\033" not in str(found)
    terminal.setattr(report.sys.stdout, "isatty", lambda: False)
    assert "\033" not in str(found)


def test_an_output_without_blocks_has_other_bars(found: ModelExplanation, terminal: pytest.MonkeyPatch) -> None:
    terminal.setattr(report.sys.stdout, "encoding", "ascii")
    assert "###" in str(found).encode("ascii").decode()


def test_bars_are_as_long_as_the_times(found: ModelExplanation, terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("NO_COLOR", "1")
    terminal.setenv("COLUMNS", "100")
    bars = {line.split()[1]: line for line in str(found).splitlines() if "█" in line}
    longest = max(row.before or 0.0 for row in rows_of(found))
    for row in rows_of(found):
        if row.before is not None and row.after is not None:
            line = bars[row.product.module]
            assert line.count("█") == max(round(20 * row.after / longest), 1)
            assert line.count("█") + line.count("░") == round(20 * row.before / longest)


def check_is_self_contained(text: str) -> None:
    assert not re.search(r"<script|<link|<img|<iframe|\b(?:src|href)\s*=|url\(|@import|https?:", text)


def test_a_notebook_shows_the_same_table(found: ModelExplanation) -> None:
    text = found._repr_html_()
    table = ElementTree.fromstring(text)  # it is well-formed
    rows = [["".join(cell.itertext()) for cell in row] for row in table.findall(".//tbody/tr")]
    assert [row[0:2] for row in rows] == [[row.verdict, row.product.module] for row in rows_of(found)]
    sums = [float(sum(float(row[place]) for row in rows if row[place] != "-")) for place in (4, 5)]
    assert sums == pytest.approx([found.before, found.after], abs=0.5)  # of rounded numbers
    greens = [row for row in table.findall(".//tbody/tr") if "#2da44e" in ElementTree.tostring(row, "unicode")]
    assert len(greens) == 4
    check_is_self_contained(text)


def test_a_page_is_one_file(found: ModelExplanation, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    found.save(path)
    found.save(os.fspath(path))
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    page = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert page.find("body/div/table") is not None
    assert found._repr_html_() in text
    assert "prefers-color-scheme: dark" in text
    assert "a prediction for an H200; nothing ran on one" in text
    check_is_self_contained(text)


def test_a_table_is_given_no_markup_by_a_model(found: ModelExplanation) -> None:
    first, *rest = found.products
    odd = first._replace(module="<script>alert(1)</script>", program="a < b & c", reason='"<b>"')
    text = dataclasses.replace(found, products=(odd, *rest))._repr_html_()
    assert "<script>" not in text
    assert "a &lt; b &amp; c" in text


NO_LAYER, TRAINED, HIGH = "no linear layer was found in it", "as it is trained", 'fp32 products at "high"'
PREDICTS = 'device="H200") predicts'


@pytest.mark.parametrize(
    ("model", "size", "trains", "device", "expected"),
    [
        (nn.ReLU(), 8, False, "H200", {NO_LAYER}),
        (nn.Linear(1024, 1024), 1024, True, "H200", {TRAINED, HIGH}),
        (nn.Linear(1024, 1024), 1024, False, "H200", {HIGH}),
        (nn.Linear(64, 64), 64, False, None, {PREDICTS, HIGH}),
    ],
)
def test_the_head_of_a_table_says_of_what_it_is(
    model: nn.Module, size: int, trains: bool, device: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.set_float32_matmul_precision("high")
    with torch.set_grad_enabled(trains):
        text = " ".join(str(cutfuse.explain_model(model, torch.empty(8, size), device=device)).split())
    assert {part for part in (NO_LAYER, TRAINED, HIGH, PREDICTS) if part in text} == expected


class Multiplying(nn.Module):
    """Calls of PyTorch's that multiply by weights, and are no products of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2, 64, 64))
        self.row = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.einsum("bd,gde->gbe", x, self.weights)
        y = torch.bmm(y, self.weights.transpose(1, 2))
        y = torch.bmm(y, y.transpose(1, 2))  # of values alone
        return y, self.row(x[0])  # a row, and no matrix


RECURRENT = "1 call of nn.LSTM, with products of its own, is not looked into"


@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        (
            nn.MultiheadAttention(64, 4),
            [(8, 2, 64)] * 3,
            "1 call of multi_head_attention_forward, with products of its own, is not looked into",
        ),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4), 2, enable_nested_tensor=False),
            [(8, 2, 64)],
            "2 calls of multi_head_attention_forward, with products of their own, are not looked into",
        ),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).eval(),
            [(8, 2, 64)],
            "2 calls of ",  # of the encoder's own kernel, or of attention
        ),
        (nn.LSTM(64, 64), [(8, 2, 64)], RECURRENT),
        (nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64)), [(8, 2, 64)], RECURRENT),
        (nn.GRUCell(64, 64), [(8, 64)], "1 call of gru_cell, "),
        (nn.Bilinear(64, 64, 8), [(8, 64)] * 2, "1 call of bilinear, "),
        (
            nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 1)),
            [(1, 3, 8, 8)],
            "2 calls of conv2d, 1 of conv_transpose2d, with products of their own, are not looked into",
        ),
        (Multiplying(), [(8, 64)], "1 call of einsum, 1 of bmm, 1 of linear, with products of their own"),
    ],
)
def test_calls_that_hold_products_are_named(model: nn.Module, inputs: list[tuple[int, ...]], told: str) -> None:
    with torch.no_grad():
        found = cutfuse.explain_model(model.to("meta"), *(torch.empty(size, device="meta") for size in inputs))
    for text in (str(found), found._repr_html_()):
        assert told in " ".join(text.split())
        assert NO_LAYER not in text


def test_of_what_is_not_predicted_there_are_no_times() -> None:
    one = cutfuse.explain_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    assert (one.before, one.after) == (0.0, 0.0)
    for text in (str(one), one._repr_html_()):
        assert "us" not in re.sub(r"before, us|after, us", "", text).split()
        assert "Counted" not in text
        assert "x is on cpu; kernels are for CUDA devices" in text
