"""Packages of AOTInductor, whose runtime gives operators None for a list without items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from emulated_device import emulated_device
from torch import Tensor, nn

import cutfuse
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere
from cutfuse.registration import DISPATCHED

GELU, BF16, FP32 = "operands=0; gelu z", torch.bfloat16, torch.float32
GENERATOR = torch.Generator().manual_seed(0)
X, W, B, SCALAR = (torch.randn(shape, generator=GENERATOR).to(BF16) for shape in ((8, 16), (24, 16), (24,), ()))

# Arguments, and the places of the lists among them.
CALLS: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "linear": ((X, W, B, [], GELU, BF16), (3,)),
    "linear_reduce": ((X, W, B, [], GELU, "amax", FP32), (3,)),
    "linear_with_pre_activation": ((X, W, B, [], GELU, BF16), (3,)),
    "pointwise": ((X, [], GELU, BF16), (1,)),
    "reduce": ((SCALAR, [], GELU, "sum", [], FP32), (1, 4)),
    "pointwise_backward": ((X, X, [], GELU, "none", None, [], True), (2, 6)),
    "layer": ((X, W, B, [], GELU, "none", False, BF16), (3,)),
}


@pytest.fixture(params=["CUDA", "CPU"])
def key(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of an implementation. CUDA's run on CPU memory."""
    if request.param == "CPU":
        yield "CPU"
        return
    with emulated_device():
        yield "CUDA"


@pytest.mark.parametrize("name", CALLS)
def test_none_is_an_empty_list(key: str, name: str) -> None:
    given, places = CALLS[name]
    implementation = DISPATCHED["CompositeImplicitAutograd" if name == "layer" else key][name]
    without = tuple(None if place in places else argument for place, argument in enumerate(given))
    for _ in range(2):  # the second one may be direct
        torch.testing.assert_close(implementation(*without), implementation(*given))


def test_every_operator_with_a_list_is_among_them() -> None:
    """But for `joined`, which has no product without weights."""
    with_lists = [text.split("(")[0] for text in schema.SCHEMAS if "[] " in text]
    assert sorted(with_lists) == sorted([*CALLS, "joined"])


class Model(nn.Module):
    """The operators of an exported program, all of them without operands but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = cutfuse.nn.FusedLinear(16, 24, epilogue=F.gelu)
        self.gated = cutfuse.nn.FusedLinear(24, 24, epilogue=lambda z, r: z * r, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = cutfuse.pointwise(torch.sin, self.layer(x))
        y = self.gated(y, y) + cutfuse.linear(x, self.layer.weight, epilogue=F.gelu, reduce="amax", keepdim=True)
        joined = torch.ops.cutfuse.joined(x, [self.layer.weight], [None])
        return y + cutfuse.reduce(joined, 1, "logsumexp", keepdim=True) * 2


@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="AOTInductor of PyTorch 2.8 gives operators fp64 for the type fp32"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_package_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # where Inductor makes no fallback by itself for an operator with a decomposition
    model, x = Model().eval().requires_grad_(False), X.float()
    with use_operators_everywhere(), torch.no_grad():
        program = torch.export.export(model, (x,))
        called = {node.target for node in program.graph.nodes}
        assert called >= {schema.linear, schema.linear_reduce, schema.joined, schema.pointwise, schema.reduce}
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x), rtol=1e-4, atol=1e-4)
