"""Models behind a convolution, whose residuals PyTorch lays out by columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare
from torch import Tensor, nn

from cutfuse.compile import fusion
from cutfuse.compile.regions import Search
from cutfuse.compile.rewriting import UnfitError

pytestmark = [*PYTORCH_WARNINGS]
fusing = pytest.mark.usefixtures("everything_fuses")

CHANNELS, POSITIONS = 16, 12


class Block(nn.Module):
    """A pre-norm MLP, with dropout as models have it in evaluation."""

    def __init__(self, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(CHANNELS), mix
        self.up, self.down = nn.Linear(CHANNELS, 32), nn.Linear(32, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return self.mix(x, F.dropout(y, 0.1, training=self.training))


class Encoder(nn.Module):
    """A convolution, positions and blocks, as Whisper's encoder; `end` makes of the last value what is given."""

    def __init__(
        self,
        mix: Callable[[Tensor, Tensor], Tensor] = torch.add,
        end: Callable[[Tensor], Tensor | tuple[Tensor, ...]] = lambda x: F.layer_norm(x, (CHANNELS,)),
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(4, CHANNELS, 3, padding=1)
        self.positions = nn.Parameter(torch.randn(POSITIONS, CHANNELS))
        self.blocks = nn.ModuleList(Block(mix) for _ in range(2))
        self.end = end
        self.eval()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = F.gelu(self.stem(x)).permute(0, 2, 1) + self.positions
        x = F.dropout(x, 0.1, training=self.training)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def draw(batch: int = 3) -> Tensor:
    return torch.randn(batch, 4, POSITIONS, generator=torch.Generator().manual_seed(batch))


def copies_of(found: Collector) -> int:
    """How many copies are in a graph."""
    (graph,) = found.graphs
    return [node.target for node in graph.graph.nodes].count("contiguous")


@fusing
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_residuals_behind_a_convolution_are_fused(batch: int, trains: bool) -> None:
    found = compare(Encoder(), (draw(batch).requires_grad_(trains),))
    assert sorted(found.programs) == ["(r0 + z)"] * 2 + ["gelu(z)"] * 2
    assert copies_of(found) == 1


@fusing
def test_a_product_that_reads_the_value_itself_is_fused_too() -> None:
    weight = torch.randn(CHANNELS, CHANNELS)
    found = compare(Encoder(end=lambda x: F.linear(x, weight)), (draw(),))
    assert sum("r0" in program for program in found.programs) == 2


def add_by_columns(x: Tensor, y: Tensor) -> Tensor:
    """With a layer of the positions, whose result lies by columns as the residual does."""
    weight = torch.ones(POSITIONS, POSITIONS)
    return x + y + F.linear(y.transpose(1, 2), weight).transpose(1, 2)


SEEN: dict[str, nn.Module] = {
    "the result": Encoder(end=lambda x: x),
    "a view of it": Encoder(end=lambda x: x.permute(0, 2, 1)),
    "one of two results": Encoder(end=lambda x: (F.layer_norm(x, (CHANNELS,)), x)),
    "a convolution": Encoder(end=lambda x: F.conv1d(x.permute(0, 2, 1), torch.ones(2, CHANNELS, 1))),
    "written": Encoder(end=lambda x: F.layer_norm(x.add_(1), (CHANNELS,))),
    "by strides": Encoder(end=lambda x: x.as_strided((3, 4), (1, 3))),
    "another function": Encoder(end=lambda x: F.layer_norm(torch.cat([x, x], 1), (CHANNELS,))),
    "a sum in place": Encoder(mix=lambda x, y: x.add_(y)).requires_grad_(False),
    "another matrix by columns": Encoder(mix=add_by_columns),
}


@fusing
@pytest.mark.parametrize("name", SEEN)
def test_a_layout_that_is_seen_stays(name: str) -> None:
    assert copies_of(compare(SEEN[name], (draw(),))) == 0


@fusing
def test_without_a_layer_there_is_no_copy() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        y = x.permute(0, 2, 1) + 1
        return F.linear(F.layer_norm(y + y, (4,)), w)

    assert copies_of(compare(model, (draw(), torch.randn(8, 4)))) == 0


def test_where_nothing_is_fused_with_a_sum_there_is_no_copy() -> None:
    """As on a device without kernels."""
    assert copies_of(compare(Encoder(), (draw(),))) == 0


def test_what_is_undone_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: list[list[tuple[int, ...]]] = []

    def note(graph: torch.fx.Graph, written: set[object]) -> list[Search]:
        found = [node.meta.get("example_value") for node in graph.nodes]
        layouts.append([tensor.stride() for tensor in found if isinstance(tensor, Tensor)])
        return find_regions(graph, written)

    find_regions = fusion._find_regions
    monkeypatch.setattr(fusion, "_find_regions", note)
    compare(Encoder(), (draw(),))
    by_rows, as_it_was = layouts
    monkeypatch.setattr(fusion, "lay_out_by_rows", lambda graph, copies: None)
    compare(Encoder(), (draw(),))
    assert as_it_was == layouts[-1]
    assert len(by_rows) == len(as_it_was) + 1


class Written(Encoder):
    """A layer of an input that was written to before, beside an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(6, 8))
        self.layer = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.state.add_(1)
        encoded = super().forward(x)
        assert isinstance(encoded, Tensor)
        return encoded, F.gelu(self.layer(self.state))


@fusing
def test_a_copy_that_is_undone_costs_no_other_layer_its_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before a layer reads it does not count, however often regions are looked for."""
    why_left = fusion.why_left
    monkeypatch.setattr(fusion, "why_left", lambda region: "left" if region.operands else why_left(region))
    found = compare(Written(), (draw().requires_grad_(),))
    assert found.programs.count("gelu(z)") == 3
    assert copies_of(found) == 0


@fusing
@pytest.mark.parametrize("place", ["_find_regions", "rewriter"])
def test_an_error_takes_the_copies_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise UnfitError("it does not fit") if place == "rewriter" else ZeroDivisionError

    if place == "rewriter":
        monkeypatch.setattr(fusion.Rewriter, "rewrite", fail)
        found = compare(Encoder(), (draw(),))
    else:
        monkeypatch.setattr(fusion, "_find_regions", fail)
        found = Collector()
        with pytest.warns(UserWarning, match="cutfuse leaves a graph to the compiler"):
            torch.compile(Encoder(), backend=found)(draw())
    assert copies_of(found) == 0
