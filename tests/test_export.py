"""Exported programs: for ONNX, which has no operators of cutfuse, of PyTorch's own operations; packages of AOTInductor.

The runtime of AOTInductor gives operators None for a list without items.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from emulated_device import emulated_device
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cutfuse
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere
from cutfuse.registration import DISPATCHED

# PyTorch's own, of what it calls itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
DECOMPOSED = ("linear", "linear_with_pre_activation", "product", "joined", "pointwise", "reduce")


class Model(nn.Module):
    """Operators with operands and without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu)
        self.gated = cutfuse.nn.FusedLinear(8, 8, epilogue=lambda z, r: torch.tanh(z) * r, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = cutfuse.pointwise(lambda z: torch.sin(z) + 1, self.layer(x))
        y = self.gated(y, y) + cutfuse.linear(x, self.layer.weight, epilogue=F.gelu, reduce="amax", keepdim=True)
        return y + cutfuse.reduce(y, 1, "sum", keepdim=True, prologue=torch.cos)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with use_operators_everywhere():
        yield Model().eval().requires_grad_(False)


def operators_of(program: torch.export.ExportedProgram) -> set[str]:
    """cutfuse's, in a program."""
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return {target._schema.name for target in targets if target.namespace == "cutfuse"}


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_decompose(model: nn.Module, strict: bool) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (X,), dynamic_shapes=({0: rows},), strict=strict)
    assert operators_of(program) == {f"cutfuse::{name}" for name in ("linear", "pointwise", "reduce")}
    operators = [getattr(torch.ops.cutfuse, name) for name in DECOMPOSED]
    decomposed = program.run_decompositions(get_decompositions(operators))
    assert operators_of(decomposed) == set()
    for count in (6, 9):
        x = torch.randn(count, 16)
        torch.testing.assert_close(decomposed.module()(x), model(x))


def test_the_exporters_table_has_them(model: nn.Module) -> None:
    from torch.onnx._internal.exporter._decomp import create_onnx_friendly_decomposition_table

    table = create_onnx_friendly_decomposition_table(set())
    assert operators_of(torch.export.export(model, (X,)).run_decompositions(table)) == set()


def test_shapes_with_symbols_are_those_of_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs no decomposition for them."""
    monkeypatch.setattr(F, "linear", lambda *given: pytest.fail("the decomposition ran"))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(X, static_shapes=False)
        y = torch.ops.cutfuse.linear(x, torch.empty(8, 16), None, [], "operands=0; gelu z", "none", torch.float32)
    assert tuple(map(str, y.shape)) == (str(x.shape[0]), "8")


@pytest.mark.parametrize("trace", ["non-strict export", "strict export", "TorchScript"])
def test_calls_within_an_export_to_onnx_are_pytorchs(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    if trace == "TorchScript":
        traced: Any = torch.jit.trace(model, (X,))
        assert "cutfuse::" not in str(traced.inlined_graph)
        torch.testing.assert_close(traced(X), model(X))
        return
    program = torch.export.export(model, (X,), strict=trace == "strict export")
    assert operators_of(program) == set()
    torch.testing.assert_close(program.module()(X), model(X))


EXPORTS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda model: torch.onnx.export(model, (X,), dynamo=True),
    "program": lambda model: torch.onnx.export(torch.export.export(model, (X,)), dynamo=True),
    "TorchScript": lambda model: torch.onnx.export(model, (X,), io.BytesIO(), dynamo=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("export", EXPORTS)
def test_pytorchs_exporters(model: nn.Module, export: str) -> None:
    """Where what they need is installed."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    EXPORTS[export](model)


# AOTInductor


GELU, BF16, FP32 = "operands=0; gelu z", torch.bfloat16, torch.float32
ROWS, W, B, SCALAR = (torch.randn(shape).to(BF16) for shape in ((8, 16), (24, 16), (24,), ()))

# Arguments, and the places of the lists among them.
CALLS: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "linear": ((ROWS, W, B, [], GELU, "amax", FP32), (3,)),
    "linear_with_pre_activation": ((ROWS, W, B, [], GELU, BF16), (3,)),
    "pointwise": ((ROWS, [], GELU, BF16), (1,)),
    "reduce": ((SCALAR, [], GELU, "sum", [], FP32), (1, 4)),
    "pointwise_backward": ((ROWS, ROWS, [], GELU, "none", None, [], True), (2, 6)),
    "layer": ((ROWS, W, B, [], GELU, "none", False, BF16), (3,)),
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


def test_a_package_runs(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # where Inductor makes no fallback by itself for an operator with a decomposition

    class WithJoined(nn.Module):
        """A model, its 16-bit copy, and the operator that compiled models alone call."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.short = copy.deepcopy(model).bfloat16()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.model(x) + torch.ops.cutfuse.joined(x, [self.model.layer.weight], [None])
            return y, self.short(x.bfloat16())

    packaged = WithJoined().eval()
    with torch.no_grad():
        program = torch.export.export(packaged, (X,))
        names = ("linear", "joined", "pointwise", "reduce")
        assert operators_of(program) == {f"cutfuse::{name}" for name in names}
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    for y, expected, tolerance in zip(
        torch._inductor.aoti_load_package(path)(X), packaged(X), (1e-4, 2e-2), strict=True
    ):
        torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
