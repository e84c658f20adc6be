"""Prepared weights in torch.compile and torch.export, and the operators that take them, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plane_device import COLUMNS, ROWS, make_weight
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cutfuse
from cutfuse.layer import schema
from cutfuse.layer.prepared import UNPREPARED

# Raised by PyTorch 2.13 itself: when Dynamo meets an autograd.Function, and when Inductor is imported.
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

X = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
BACKENDS = ("eager", "aot_eager", "inductor")


def sigmoid_of(x: Tensor, weight: Tensor | cutfuse.PreparedWeight) -> Tensor:
    return cutfuse.linear(x, weight, epilogue=torch.sigmoid)


def expected(weight: Tensor) -> Tensor:
    return torch.sigmoid(nn.functional.linear(X, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argument(path: str, backend: str) -> None:
    """One graph whatever is prepared again; operators refuse a change, and PyTorch's operations take the weight."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(sigmoid_of, fullgraph=True, backend=counter)
    weight = make_weight()
    with torch.no_grad():
        for _ in range(12):
            prepared = cutfuse.prepare(weight)
            torch.testing.assert_close(compiled(X, prepared), expected(weight))
            weight.neg_()
            if path == "operators":
                with pytest.raises(RuntimeError, match=r"written in place .* call prepare again"):
                    compiled(X, prepared)
        prepared = cutfuse.prepare(weight)
        weight.data = weight.clone()
        if path == "operators":
            with pytest.raises(RuntimeError, match="other memory"):
                compiled(X, prepared)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_gradients(path: str, backend: str) -> None:
    weight = nn.Parameter(make_weight())
    prepared = cutfuse.prepare(weight)
    y = torch.compile(sigmoid_of, fullgraph=True, backend=backend)(X, prepared)
    (found,) = torch.autograd.grad(y.square().sum(), weight)
    torch.testing.assert_close(found, torch.autograd.grad(expected(weight).square().sum(), weight)[0])


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(make_weight())
        self.prepared = cutfuse.prepare(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return sigmoid_of(x, self.prepared)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize(
    "make", [Holder, lambda: cutfuse.nn.FusedLinear(COLUMNS, ROWS, False, epilogue=torch.sigmoid).prepare()]
)
def test_a_module(path: str, make: Callable[[], nn.Module], backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(12):
            torch.testing.assert_close(compiled(X), expected(module.weight))
            module.weight.neg_()
            if path == "operators":
                with pytest.raises(RuntimeError, match="written in place"):
                    compiled(X)
            if isinstance(module, Holder):
                module.prepared = cutfuse.prepare(module.weight)
            else:
                module.prepare()
    assert counter.frame_count == 1


def test_prepare_itself_is_not_compiled() -> None:
    def prepare_and_call(x: Tensor, weight: Tensor) -> Tensor:
        return sigmoid_of(x, cutfuse.prepare(weight))

    weight = make_weight()
    with pytest.raises(Exception, match=r"cutfuse\.prepare splits a weight: call it before what is compiled"):
        torch.compile(prepare_and_call, fullgraph=True, backend="eager")(X, weight)
    torch._dynamo.reset()
    found = torch.compile(prepare_and_call, backend="eager")(X, weight)
    torch.testing.assert_close(found, expected(weight))


@pytest.mark.parametrize(
    "make", [Holder, lambda: cutfuse.nn.FusedLinear(COLUMNS, ROWS, False, epilogue=torch.sigmoid).prepare()]
)
def test_an_exported_program_has_the_weight_alone(path: str, make: Callable[[], nn.Module]) -> None:
    module = make().requires_grad_(False)
    program = torch.export.export(module, (X,))
    torch.testing.assert_close(program.module()(X), expected(module.weight))
    for node in program.graph.find_nodes(op="call_function", target=schema.linear):
        assert len(node.args) == 7 or node.args[7:] == tuple(UNPREPARED)


@pytest.mark.parametrize("planes", [None, torch.zeros(ROWS * COLUMNS * 4, dtype=torch.uint8)])
@pytest.mark.parametrize("reduction", ["none", "amax"])
def test_opcheck(reduction: str, planes: Tensor | None) -> None:
    weight = make_weight()
    arguments = (X, weight, None, [], "operands=0; sigmoid z", reduction, torch.float32)
    # Without a snapshot: opcheck copies the arguments one by one, and the weight and its snapshot would lie apart.
    torch.library.opcheck(schema.linear, (*arguments, None, planes, 3))
