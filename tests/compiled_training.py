"""Steps of functions that are trained, as they are and compiled with their one product fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from cutfuse.compile.fusion import fuse


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
