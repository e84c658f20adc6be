"""Compares a compiled model with itself where everything that can be fused is fused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ProductReport
from cutfuse.native import use_operators_everywhere

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def operators(one_thread: None) -> Iterator[None]:
    """Everything that can be fused is, and a warning of the pass is an error."""
    torch._dynamo.reset()
    with use_operators_everywhere(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="cutfuse leaves")
        yield
    torch._dynamo.reset()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def agree(
    model: Model, given: Sequence[Tensor], needs_grad: Sequence[int] = (), dynamic_columns: bool = False
) -> list[ProductReport]:
    """Compares a compiled model with itself: results, what is written and gradients. Gives what became of products.

    dynamic_columns: whether the number of the weight's rows, the second tensor's, is a symbol.
    """
    reports: list[ProductReport] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.extend(fuse(module))
        compiled: Callable[..., Any] = aot_eager(module, inputs)
        return compiled

    answers = []
    for function in (model, torch.compile(model, backend=backend, fullgraph=True)):
        inputs = [tensor.clone().requires_grad_(k in needs_grad) for k, tensor in enumerate(given)]
        if dynamic_columns:
            torch._dynamo.mark_dynamic(inputs[1], 0)
        found = function(*inputs)
        results = list(found) if isinstance(found, tuple) else [found]
        ends, leaves = [y for y in results if y.requires_grad], [inputs[k] for k in needs_grad]
        loss = sum(y.square().sum() for y in ends)
        gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True)) if ends else []
        answers.append((results, inputs, gradients))
    (results, inputs, gradients), (own, own_inputs, own_gradients) = answers
    assert [y.requires_grad for y in own] == [y.requires_grad for y in results]
    torch.testing.assert_close(own, results, check_stride=True)
    torch.testing.assert_close(own_inputs, inputs)
    assert [g is None for g in own_gradients] == [g is None for g in gradients]
    torch.testing.assert_close([g for g in own_gradients if g is not None], [g for g in gradients if g is not None])
    return reports
