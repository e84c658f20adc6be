"""Models that the fusion pass had wrong, each with PyTorch's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import Model, agree, tensors
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from cutfuse.compile.fusion import fuse
from cutfuse.compile.products import find_product
from cutfuse.compile.report import ProductReport

pytestmark = pytest.mark.usefixtures("everything_fuses", "one_thread")

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


def test_no_rows_and_columns_that_are_a_symbol() -> None:
    """No error of our own, of which a warning would tell: a view of no elements cannot find the columns."""

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.tanh(rows.mm(w.t()).view(*x.shape[:-1], w.shape[0])) * r

    reports: list[ProductReport] = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> fx.GraphModule:
        reports.extend(fuse(module))
        return module

    x, w, r = tensors((0, 5), (12, 5), (0, 12), dtype=torch.float16)
    y = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(x, w.requires_grad_(), r)
    assert y.shape == (0, 12)
    assert reports[0].reason.startswith("its input has no elements")


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


@pytest.mark.parametrize("function", [torch.mm, torch.addmm])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_product_of_a_wider_type_stays(function: Callable[..., Tensor], is_named: bool) -> None:
    """It is not rounded to the type of the matrices, and what is added to it is of its own type."""
    graph = fx.Graph()
    shapes = [(6,)] * (function is torch.addmm) + [(4, 8), (8, 6)]
    given = [graph.placeholder(f"given_{number}") for number in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    plain = graph.call_function(function, tuple(given))
    plain.meta["example_value"] = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    assert find_product(plain) is not None
    options = {"out_dtype": torch.float32} if is_named else {}
    wide = graph.call_function(function, (*given, *([] if is_named else [torch.float32])), options)
    wide.meta["example_value"] = torch.empty(4, 6, dtype=torch.float32, device="meta")
    assert find_product(wide) is None


@pytest.mark.parametrize("needs_grad", [(), (0, 1, 2)])
@pytest.mark.parametrize("shape", [(1,), (1, 6), (4, 6), (4, 1), ()])
def test_a_bias_that_pytorch_broadcasts_stays(shape: tuple[int, ...], needs_grad: tuple[int, ...]) -> None:
    x, w, b = tensors((4, 8), (6, 8), shape)
    reports = agree(lambda x, w, b: torch.relu(F.linear(x, w, b)) * 2, [x, w, b], needs_grad=needs_grad)
    assert not any(report.is_fused for report in reports)


def test_parameters_of_an_in_place_function_alone() -> None:
    """F.elu_ has scale where F.elu has inplace."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return F.elu_(F.linear(x, w), 1.0, 2.0) * 3

    agree(model, tensors((4, 8), (6, 8)))


# Sizes that change


def test_a_mean_of_a_size_that_changes_is_fused() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (F.linear(x, w) * 2).mean(-1)

    (report,) = agree(model, tensors((4, 8), (6, 8)), symbols=[(1, 0)])
    assert report.is_fused


# Gradients that PyTorch cuts


def test_a_view_of_a_type_has_no_gradient() -> None:
    agree(lambda x, w: torch.tanh(F.linear(x, w).view(torch.float64)) * 2, tensors((6, 8), (12, 8)), needs_grad=[0])


def test_a_product_that_is_left_out() -> None:
    x, w, e = tensors((6, 8), (8, 12), (6, 12))
    agree(lambda x, w, e: torch.relu(torch.addmm(e, x, w, alpha=0)), [x / 0, w, e])
