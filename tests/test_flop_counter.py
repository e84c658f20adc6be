"""PyTorch's counter of operations counts a fused layer's products as it counts those of PyTorch's own operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import EmulatedLaunches, direct_calls
from emulated_device import launches as launches
from processes import run_python
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cutfuse
from cutfuse.native import use_operators_everywhere

X, W, B = torch.randn(6, 16), torch.randn(8, 16), torch.randn(8)
CUBE = torch.randn(2, 3, 16)


@pytest.fixture(autouse=True)
def _operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every call takes the operators; on an emulated device they do so anyway."""
    with contextlib.nullcontext() if "launches" in request.fixturenames else use_operators_everywhere():
        yield


def count(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# A layer of x, a weight and a bias; the first is what the others stand for.
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
LAYERS: dict[str, Layer] = {
    "PyTorch's": lambda x, w, b: F.gelu(F.linear(x, w, b)),
    "layer": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=F.gelu),
    "without a bias": lambda x, w, b: cutfuse.linear(x, w, epilogue=F.gelu),
    "sum": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=lambda z, r: z + r, operands=(b,)),
    "operand": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=lambda z, r: F.gelu(z) * r, operands=(b,)),
    "rows": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=F.gelu, reduce="logsumexp"),
    "elementwise": lambda x, w, b: cutfuse.reduce(cutfuse.pointwise(F.gelu, F.linear(x, w, b)), -1),
}


@pytest.mark.parametrize("x", [X, CUBE, CUBE.bfloat16()], ids=["matrix", "3-D", "bf16"])
@pytest.mark.parametrize("trained", ["", "x", "w", "xwb"])
@pytest.mark.parametrize("name", LAYERS)
def test_counts_are_pytorchs(name: str, trained: str, x: Tensor) -> None:
    """Of the forward pass and of the backward pass for those that are trained."""
    layer, tensors = LAYERS[name], zip("xwb", (x, W, B), strict=True)
    given = [t.to(x.dtype, copy=True).requires_grad_(key in trained) for key, t in tensors]
    found = count(lambda: layer(*given).sum().backward() if trained else layer(*given))
    assert found == 2 * 6 * 8 * 16 * {"": 1, "xwb": 3}.get(trained, 2)


@pytest.mark.parametrize("name", LAYERS)
def test_counts_under_autocast(name: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert count(lambda: LAYERS[name](X, W, B)) == 2 * 6 * 8 * 16


def test_products_side_by_side() -> None:
    weights = [torch.randn(n, 16) for n in (8, 8, 24)]
    found = count(lambda: torch.ops.cutfuse.joined(X, weights, [B, None, None]))
    assert found == count(lambda: [F.linear(X, weight) for weight in weights])


def test_an_exported_program_is_counted() -> None:
    """Dynamo compiles nothing below a mode, and calls what it has compiled before no more."""
    layer = cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu).requires_grad_(False)
    program = torch.export.export(layer, (X,))
    assert torch.ops.cutfuse.linear.default in {node.target for node in program.graph.nodes}
    assert count(lambda: program.module()(X)) == 2 * 6 * 8 * 16


def test_modules_have_counts_of_their_own() -> None:
    model = torch.nn.Sequential(cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu))
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    assert sum(counter.get_flop_counts()["Sequential.0"].values()) == 2 * 6 * 8 * 16 * 2


@pytest.mark.parametrize("imports", ["torch.utils.flop_counter, cutfuse", "cutfuse, torch.utils.flop_counter"])
def test_the_order_of_imports_does_not_matter(imports: str) -> None:
    """cutfuse does not import the counter itself."""
    program = f"""
import sys, torch
if "{imports}".startswith("cutfuse"):
    import cutfuse
    assert "torch.utils.flop_counter" not in sys.modules
import importlib.util
assert importlib.util.find_spec("torch.utils.flop_counter").name == "torch.utils.flop_counter"
import {imports}
found = [op for op in torch.utils.flop_counter.flop_registry if "cutfuse" in str(op)]
assert len(found) == len(cutfuse.registration.FLOPS), found
"""
    run_python("-c", program)


@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_whose_calls_are_direct_is_counted(launches: EmulatedLaunches, trained: bool) -> None:
    """Of one that is trained the backward pass, when the forward pass was direct."""
    weight = W.clone().requires_grad_(trained)

    def call() -> Tensor:
        return cutfuse.linear(X, weight, B, epilogue=F.gelu).sum()

    call()
    before = direct_calls()
    y = call()
    assert direct_calls() == before + 1
    assert count(y.backward if trained else call) == 2 * 6 * 8 * 16
