"""`explain` and `explain_model` for a card that is not there: they say what they say on one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import cutfuse
from cutfuse import arguments, native, prediction
from cutfuse.compile import picture
from cutfuse.compile.picture import rows_of
from cutfuse.compile.report import ModelExplanation
from cutfuse.gradients import autograd
from cutfuse.planning import fused, joined, linear_plan, traced, training_step

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@contextlib.contextmanager
def on_an_h200() -> Iterator[None]:
    """CPU tensors have the kernels, the facts and the driver of an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
        for module in (fused, joined, linear_plan, traced, training_step):
            patch.setattr(module, "device_facts", lambda device: (9, 0, 132))
        patch.setattr(autograd, "stands_in_for", lambda device: True)  # precisions are forced on CUDA devices
        patch.setattr(native.core, "why_not_specialized", lambda: "")
        yield


CHAINS: list[Callable[..., Tensor] | None] = [
    None,
    F.gelu,
    torch.relu,
    lambda z: torch.tanh(z) * z,
    lambda z: z * 0.5,
    lambda z: F.silu(z) + torch.sigmoid(z) * 2.0,
]
SIZES = (1, 8, 64, 100, 256, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_layer(draw: random.Random, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `linear`, without values."""
    (m, n, k), dtype = draw.choices(SIZES, k=3), draw.choice(DTYPES)
    x, weight = (torch.empty(size, k, dtype=dtype, device=device) for size in (m, n))
    weight.requires_grad_(draw.random() < 0.4)
    bias = torch.empty(n, dtype=dtype, device=device) if draw.random() < 0.5 else None
    options: dict[str, Any] = {"epilogue": draw.choice(CHAINS), "reduce": draw.choice([None, None, "sum", "amax"])}
    if draw.random() < 0.3:
        options.update(epilogue=lambda z, r: z + r, operands=(torch.empty(m, n, dtype=dtype, device=device),))
    return (x, weight, bias), options


@pytest.mark.parametrize("seed", range(24))
def test_a_layer_is_explained_as_on_the_card(seed: int) -> None:
    given, options = random_layer(random.Random(seed), "cpu")
    with on_an_h200():
        expected = cutfuse.explain(*given, **options)
    found = [cutfuse.explain(*given, **options, device="H200")]
    given, options = random_layer(random.Random(seed), "meta")
    found.append(cutfuse.explain(*given, **options, device="H200"))
    with FakeTensorMode():
        given, options = random_layer(random.Random(seed), "cpu")
        found.append(cutfuse.explain(*given, **options, device="H200"))
    for one in found:
        assert one.device == "H200"
        for name in ("call", "path", "steps", "reasons", "bytes", "flops", "workspace_bytes", "compiles"):
            assert getattr(one, name) == getattr(expected, name), name


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """With a layer of cutfuse's, which is an operator on the card, and no product of the graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = cutfuse.nn.FusedLinear(width, width, epilogue=F.gelu)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return torch.relu(self.down(y))


BLOCKS: list[Callable[[int], nn.Module]] = [
    Gated,
    Attention,
    Fused,
    lambda width: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
    lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.Dropout(0.1)),
]


def random_model(seed: int, device: str) -> tuple[nn.Module, Tensor, bool]:
    """A model, its input, and whether gradients are wanted."""
    draw = random.Random(seed)
    width, rows = draw.choice([64, 256]), draw.choice([4, 128, 512])
    dtype = draw.choice([torch.bfloat16, torch.float32])
    with torch.device(device):
        model = nn.Sequential(*(draw.choice(BLOCKS)(width) for _ in range(3))).to(dtype)
        x = torch.zeros(2, rows, width, dtype=dtype)
    return model.train(draw.random() < 0.5), x, draw.random() < 0.4


def explained(seed: int, place: str, device: str | None) -> cutfuse.compile.report.ModelExplanation:
    model, x, trains = random_model(seed, place)
    torch._dynamo.reset()
    with torch.set_grad_enabled(trains):
        return cutfuse.explain_model(model, x, device=device)


@pytest.mark.parametrize("seed", range(5))
def test_a_model_is_explained_as_on_the_card(seed: int) -> None:
    with on_an_h200():
        expected = explained(seed, "meta", None)
    for place in ("cpu", "meta"):
        found = explained(seed, place, "H200")
        assert found.products == expected.products
        assert (found.graphs, found.device) == (expected.graphs, "H200")
    assert found.products


def fails(x: Tensor) -> Tensor:
    raise ValueError("of the model")


def test_without_a_card_the_tensors_own_device_is_explained() -> None:
    x, weight = torch.randn(8, 16), torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    with pytest.raises(ValueError, match="unknown reduction"):
        cutfuse.explain(x, weight, reduce="max", device="H200")
    with pytest.raises(ValueError, match="of the model"):
        cutfuse.explain_model(fails, x, device="H200")
    told = cutfuse.explain(x, weight, epilogue=torch.relu)
    assert (told.device, told.reasons) == (None, ("x is on cpu; kernels are for CUDA devices",))
    found = cutfuse.explain_model(model, x)
    assert (found.device, found.before, found.products[0].times) == (None, 0.0, None)
    assert found.products[0].reason == "x is on cpu; kernels are for CUDA devices"


def test_other_threads_and_later_calls_are_none_of_a_prediction() -> None:
    seen = []

    @torch.compiler.disable
    def layer(x: Tensor) -> Tensor:
        """Runs as it stands while a card is predicted for."""
        other = threading.Thread(target=lambda: seen.append(cutfuse.explain(x, x, epilogue=torch.relu).path))
        other.start()
        other.join()
        return cutfuse.linear(x, x, epilogue=F.gelu)

    x = torch.randn(8, 8)
    cutfuse.explain_model(lambda x: layer(F.linear(x, x)), x, device="H200")
    assert set(seen) == {"composed"}
    for _ in range(3):
        torch.testing.assert_close(cutfuse.linear(x, x, epilogue=F.gelu), F.gelu(F.linear(x, x)))


@pytest.mark.parametrize("device", ["B200", "h200", "cuda", torch.device("cpu")])
def test_an_unknown_card_names_the_known_ones(device: Any) -> None:
    x = torch.randn(8, 8)
    for explain in (cutfuse.explain, cutfuse.explain_model):
        with pytest.raises(ValueError, match=rf"^cutfuse.{explain.__name__}: device has to be one of 'H200', 'H100'"):
            explain(torch.relu, x, device=device)


def test_tensors_on_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r'on cuda:1, a NVIDIA A100; move the call to the CPU or to device="meta"'):
        prediction.check_devices("explain", "H100", devices)
    prediction.check_devices("explain", None, devices)
    a100.major, a100.multi_processor_count = 9, 132  # such a card itself
    prediction.check_devices("explain", "H100", devices)


def test_a_prediction_says_that_it_is_one() -> None:
    x = torch.empty(1024, 1024, device="meta")
    layer = nn.Linear(1024, 1024, device="meta")
    for device, caution in (("H200", ""), ("H100", "with the times of an H200, whose memory is 1.4 times as fast")):
        call = cutfuse.explain(x, x, epilogue=F.gelu, device=device)
        for found in (call, cutfuse.explain_model(layer, x, device=device)):
            for text in (str(found), found._repr_html_()):
                assert f"a prediction for an {device}" in " ".join(text.split())
                assert caution in " ".join(text.split())


# `explain_model` as a table with bars: in a terminal, in a notebook, and as a page.


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
    assert one.before == pytest.approx(sum(row.before or 0.0 for row in rows))
    assert one.after == pytest.approx(sum(row.after or 0.0 for row in rows))
    assert f"{one.before:,.1f} us before, by PyTorch, and {one.after:,.1f} us after" in " ".join(str(one).split())
    for product in one.products:
        times = product.times
        if times is not None and not product.is_fused and not product.is_joined:
            assert times.before == times.after > 0.0


class Terminal:
    """Standard output that is a terminal."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.encoding = encoding

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(picture, "sys", SimpleNamespace(stdout=Terminal()))  # pytest puts its own in sys
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
    assert "sum of these" in text


def test_colours_are_a_terminals_that_wants_them(found: ModelExplanation, terminal: pytest.MonkeyPatch) -> None:
    assert "\033[32m█" in str(found)  # green
    assert "\033[90m█" in str(found)  # grey
    terminal.setenv("TERM", "dumb")
    assert "\033" not in str(found)
    terminal.setenv("TERM", "xterm")
    terminal.setenv("NO_COLOR", "1")
    assert "\033" not in str(found)
    terminal.delenv("NO_COLOR")
    terminal.setattr(Terminal, "isatty", lambda self: False)
    assert "\033" not in str(found)


def test_an_output_without_blocks_has_other_bars(found: ModelExplanation, terminal: pytest.MonkeyPatch) -> None:
    terminal.setattr(picture.sys, "stdout", Terminal("ascii"))
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
    assert "prefers-color-scheme: dark" in text
    assert "a prediction for an H200; nothing ran on one" in text
    check_is_self_contained(text)


def test_a_page_is_given_no_markup_by_a_model(found: ModelExplanation, tmp_path: Path) -> None:
    first, *rest = found.products
    odd = first._replace(module="<script>alert(1)</script>", program="a < b & c", reason='"<b>"')
    changed = dataclasses.replace(found, products=(odd, *rest))
    changed.save(tmp_path / "report.html")
    for text in (changed._repr_html_(), (tmp_path / "report.html").read_text(encoding="utf-8")):
        assert "<script>" not in text
        assert "a &lt; b &amp; c" in text


def test_of_what_is_not_predicted_there_are_no_times() -> None:
    one = cutfuse.explain_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    assert (one.before, one.after) == (0.0, 0.0)
    for text in (str(one), one._repr_html_()):
        assert "us" not in re.sub(r"before, us|after, us", "", text).split()
        assert "Counted" not in text
        assert "x is on cpu; kernels are for CUDA devices" in text
