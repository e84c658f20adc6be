"""Checks of compiled models: values, types, gradients and what was written, against the model itself."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ProductReport

Model = Callable[..., Any]

# Raised by PyTorch itself: when Inductor is imported, and when Dynamo meets an autograd.Function.
PYTORCH_WARNINGS = (
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
)


def aot_saving(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd without a compiler, which saves what the backward pass needs and computes nothing again.

    PyTorch 2.13's own partitioner computes values again from inputs that the forward pass has written to since.
    """
    own = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), partition_fn=default_partition)
    compiled: Callable[..., Any] = own(module, inputs)
    return compiled


class Collector:
    """A backend that fuses, keeps the reports, and runs the rest by AOTAutograd without a compiler."""

    def __init__(self) -> None:
        self.reports: list[ProductReport] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.reports += fuse(module)
        self.graphs.append(module)
        return aot_saving(module, inputs)

    @property
    def programs(self) -> list[str]:
        """What was fused, product by product."""
        return [report.program for report in self.reports if report.is_fused]


def run(model: Model, inputs: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and after a sum of their squares the gradients of the inputs and parameters that need one."""
    torch.manual_seed(0)
    found = model(*inputs)
    outputs = list(found) if isinstance(found, tuple | list) else [found]
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
    leaves += list(model.parameters()) if isinstance(model, nn.Module) else []
    differentiable = [y for y in outputs if y.requires_grad]
    if not leaves or not differentiable:
        return outputs, []
    loss = torch.stack([y.double().square().sum() for y in differentiable]).sum()
    return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def compare(
    model: Model,
    inputs: Sequence[Any],
    symbols: Sequence[tuple[int, int]] = (),
    check_strides: bool = False,
    **options: Any,
) -> Collector:
    """Compiles a model with the fusion, and asserts that it does what the model does. Gives what was fused.

    symbols: inputs and their dimensions whose sizes are such.
    """
    torch._dynamo.reset()
    collector = Collector()
    own = [copy.deepcopy(model) if isinstance(model, nn.Module) else model for _ in range(2)]
    given = [_copies(inputs) for _ in range(2)]
    expected, expected_gradients = run(own[0], given[0])
    for place, dimension in symbols:
        torch._dynamo.mark_dynamic(given[1][place], dimension)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="cutfuse leaves")
        actual, gradients = run(torch.compile(own[1], backend=collector, **options), given[1])
    assert [y.requires_grad for y in actual] == [y.requires_grad for y in expected]
    for found, reference in zip(actual, expected, strict=True):
        _assert_close(found, reference, check_strides)
    is_rounded = any(report.dtype is torch.bfloat16 for report in collector.reports)
    for found, reference in zip(gradients, expected_gradients, strict=True):
        assert (found is None) == (reference is None)
        if found is not None and reference is not None:
            _assert_close(found, reference, is_rounded)
    for found, reference in zip(given[1], given[0], strict=True):  # what was written
        if isinstance(found, Tensor):
            _assert_close(found.detach(), reference.detach())
    return collector


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def agree(
    model: Model, given: Sequence[Tensor], needs_grad: Sequence[int] = (), symbols: Sequence[tuple[int, int]] = ()
) -> list[ProductReport]:
    """As `compare` of a model in one graph, and with the strides of its results. needs_grad: the inputs with gradients.

    Gives what became of products.
    """
    inputs = [tensor.clone().requires_grad_(k in needs_grad) for k, tensor in enumerate(given)]
    return compare(model, inputs, symbols, check_strides=True, fullgraph=True).reports


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [
        item.detach().clone().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item
        for item in inputs
    ]


def _assert_close(found: Tensor, reference: Tensor, is_rounded: bool = False, check_strides: bool = False) -> None:
    if is_rounded or torch.bfloat16 in (found.dtype, reference.dtype):
        tolerance = 3e-2
    else:
        tolerance = 1e-7 if found.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found, reference, rtol=tolerance, atol=tolerance, check_stride=check_strides)


# Steps of functions that are trained, as they are and compiled with their one product fused


def step(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The result, and the gradients of what is trained."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    y = function(*leaves)
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, trained, weights, allow_unused=True)]


def compiled(function: Callable[..., Tensor], graphs: list[fx.Graph]) -> Callable[..., Tensor]:
    """The function, whose one product has to be fused, and into `graphs` what is compiled of it."""

    def collect(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        assert [report.is_fused for report in fuse(module)] == [True]
        return aot_autograd(fw_compiler=collect)(module, inputs)

    torch._dynamo.reset()
    result: Callable[..., Tensor] = torch.compile(function, backend=backend)
    return result


def compiled_step(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...]
) -> tuple[list[Tensor | None], list[fx.Graph]]:
    graphs: list[fx.Graph] = []
    return step(compiled(function, graphs), tensors), graphs


def calls(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]
