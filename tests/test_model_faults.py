"""Models that the fusion pass had wrong, each with PyTorch's answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ProductReport
from cutfuse.routing import use_operators_everywhere

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def _operators(one_thread: None) -> Iterator[None]:
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


# Gradients


def test_a_result_of_comparisons_needs_no_gradient() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(F.linear(x, w)) > 0.3).double()

    given = tensors((4, 8), (6, 8))
    (report,) = agree(model, given, needs_grad=(0, 1))
    assert report.ended_at == "double"
    (report,) = agree(model, given)
    assert not report.ended_at


def test_an_operand_that_is_compared_gives_no_gradient() -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return torch.where(r > 0, F.linear(x, w), 0.5)

    agree(model, tensors((4, 8), (6, 8), (4, 6)), needs_grad=(2,))
    (report,) = agree(model, tensors((4, 8), (6, 8), (4, 6)), needs_grad=(1, 2))
    assert report.is_fused


def test_what_has_a_gradient_is_fused_without_one() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.tanh(F.linear(x, w)) * 2

    (report,) = agree(model, tensors((4, 8), (6, 8)), needs_grad=(1,))
    assert report.is_fused


def test_an_addend_without_a_say_has_a_gradient_of_zeros() -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return torch.relu(torch.addmm(r, x, w, beta=0, alpha=2))

    given = tensors((4, 8), (8, 6), (4, 6))
    agree(model, given, needs_grad=(2,))
    agree(model, given, needs_grad=(0, 2))
    (report,) = agree(model, given, needs_grad=(0,))
    assert report.is_fused


# Writes behind a region


@pytest.mark.parametrize(
    "write", [lambda r: r.mul_(2), lambda r: r.view(-1)[:3].add_(1), lambda r: torch.add(r, 1, out=r)]
)
def test_an_operand_is_written_before_the_backward_pass(write: Model) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, w)) + r
        write(r)
        return y

    given = tensors((4, 8), (6, 8), (4, 6))
    (report,) = agree(model, given, needs_grad=(0, 1))
    assert report.is_fused
    assert "r0" not in report.program
    (report,) = agree(model, given)
    assert "r0" in report.program


def test_an_input_is_written_before_the_backward_pass() -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        y = torch.tanh(F.linear(h, w))
        h += 1
        return y, h

    agree(model, tensors((4, 8), (6, 8)), needs_grad=(0,))


# Views


@pytest.mark.parametrize("view", [lambda z: z, lambda z: z.flatten(0, 1)])
def test_a_result_made_without_gradients_can_be_written_to(view: Model) -> None:
    """It is no view, as autograd refuses to write to a view that was made without gradients."""

    def model(x: Tensor, w: Tensor, r: Tensor, s: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.tanh(view(torch.tanh(F.linear(x, w)) + r))
        y += s
        return y

    (report,) = agree(model, tensors((2, 3, 8), (6, 8), (2, 1, 6), (6,)), needs_grad=(3,))
    assert report.is_fused


@pytest.mark.parametrize(
    "view",
    [
        lambda z: z.squeeze(-1),
        lambda z: z.unflatten(-1, (1, 6)),
        lambda z: z.flatten(1),
        lambda z: z.view(z.dtype),
        lambda z: z.squeeze(),
    ],
)
@pytest.mark.parametrize("inner", [1, 8])
def test_a_view_of_rows_is_one_of_the_products_input(view: Model, inner: int) -> None:
    """Whatever its arguments would be of a matrix with as many columns as the input."""

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return torch.tanh(view(F.linear(x, w)) + r)

    x, w = tensors((4, inner), (6, inner))
    (r,) = tensors(tuple(view(F.linear(x, w)).shape))
    (report,) = agree(model, [x, w, r])
    assert report.is_fused


# Types


def test_a_batch_norm_in_double_precision_is_one() -> None:
    def model(x: Tensor, w: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w), mean, variance.abs(), scale, shift, False, 0.1, 1e-5)

    (report,) = agree(model, tensors((4, 8), (6, 8), (6,), (6,), (6,), (6,)), needs_grad=(0, 1, 4, 5))
    assert report.is_fused


def test_the_largest_of_a_wider_type_has_a_gradient() -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return torch.addcmul(F.linear(x, w), r, r, value=0.5).amax(-1)

    x, w = tensors((4, 8), (6, 8), dtype=torch.float32)
    (report,) = agree(model, [x, w, *tensors((4, 6))], needs_grad=(0, 1, 2))
    assert report.program.startswith("amax")


def test_an_operand_of_a_checkpoint_is_written_behind_it() -> None:
    if torch.__version__.startswith("2.8."):
        pytest.skip("the compiler of PyTorch 2.8 itself repeats the write in the backward pass")

    def model(x: Tensor, w: Tensor, r: Tensor, s: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(F.linear(x, w) + s) * 2 + r, x, use_reentrant=False)
        r.mul_(2)
        return y

    (report,) = agree(model, tensors((4, 8), (6, 8), (4, 6), (4, 6)), needs_grad=(0, 3))
    assert report.is_fused


# In place


def test_a_product_that_is_written_to_a_tensor_stays() -> None:
    def model(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        z = torch.mm(x, w, out=y)
        return torch.relu(z) * 2

    agree(model, tensors((4, 8), (8, 6), (4, 6)))


def test_parameters_of_an_in_place_function_alone() -> None:
    """F.elu_ has scale where F.elu has inplace."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return F.elu_(F.linear(x, w), 1.0, 2.0) * 3

    agree(model, tensors((4, 8), (6, 8)))


# Sizes that change


def test_a_mean_of_a_size_that_changes_is_fused() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (F.linear(x, w) * 2).mean(-1)

    (report,) = agree(model, tensors((4, 8), (6, 8)), dynamic_columns=True)
    assert report.is_fused
