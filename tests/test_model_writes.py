"""Models that write, split columns or reduce rows in ways that the fusion pass had wrong, with PyTorch's answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_checks import Model, agree, tensors
from torch import Tensor

pytestmark = pytest.mark.usefixtures("everything_fuses", "one_thread")

# Parts of a product's columns


def gate(z: Tensor) -> Tensor:
    gated, factor = z.chunk(2, -1)
    return torch.relu(gated) * factor


@pytest.mark.parametrize("written", ["x", "w"])
def test_a_write_between_a_product_and_the_split_of_its_columns(written: str) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w)
        (x if written == "x" else w).add_(1)
        return gate(z)

    agree(model, tensors((6, 8), (12, 8)))


def test_columns_of_a_product_without_gradients_that_are_split_with_them() -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        with torch.no_grad():
            z = F.linear(x, w)
        return gate(z) * r

    agree(model, tensors((6, 8), (12, 8), (6, 6)), needs_grad=[1, 2])


def test_columns_of_a_product_that_are_split_inside_of_autocast() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        z = F.linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            return gate(z)

    agree(model, tensors((6, 8), (12, 8), dtype=torch.float32))


def test_columns_that_tensor_split_gives_twice() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        first, _, third, _ = torch.tensor_split(F.linear(x, w), (4, 2, 6), -1)
        return torch.sigmoid(first) * third

    agree(model, tensors((6, 8), (12, 8)))


def test_columns_that_are_split_in_one_epoch_are_parts() -> None:
    reports = agree(lambda x, w: gate(F.linear(x, w)), tensors((6, 8), (12, 8)), needs_grad=[0])
    assert [report.is_fused for report in reports] == [True]


# Reductions


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "logsumexp"])
def test_reductions_with_a_mask(name: str) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return getattr(torch.masked, name)(F.linear(x, w), -1, mask=r > 0)

    agree(model, tensors((6, 8), (12, 8), (6, 12)))


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_largest_of_equal_elements(name: str, needs_grad: bool) -> None:
    """PyTorch gives the gradient to the element whose index it gives; amax shares it out."""
    x, w = tensors((6, 8), (12, 8))
    reports = agree(lambda x, w: getattr(F.linear(x, w), name)(-1).values, [x * 0, w], [0] if needs_grad else [])
    assert [report.is_fused for report in reports] == [not needs_grad]


def test_dimensions_that_are_permuted_and_back_before_a_reduction() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w).transpose(1, 2)).transpose(1, 2).mean(-1)

    (report,) = agree(model, tensors((2, 3, 8), (12, 8)), needs_grad=[0, 1])
    assert report.is_fused


@pytest.mark.parametrize("is_reduced", [False, True])
def test_dimensions_that_are_permuted_and_back_before_a_view(is_reduced: bool) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        y = torch.relu(F.linear(x, w).transpose(0, 1)).transpose(0, 1).flatten(0, 1) * 2
        return y.sum(-1) if is_reduced else y

    (report,) = agree(model, tensors((2, 3, 8), (12, 8)), needs_grad=[0, 1])
    assert report.is_fused


# What writes


def foreach(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    u = torch.relu(F.linear(x, w) + e)
    torch._foreach_mul_([e], -3.0)
    return u


def embed(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    u = F.linear(x, w)
    return torch.tanh(F.embedding(torch.arange(3), w, max_norm=0.5).sum()), u * 2


def embed_bags(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    u = F.linear(x, w)
    return F.embedding_bag(torch.arange(4).view(2, 2), w, None, 0.5), u * 2


def conjugate(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    u = F.linear(x, w) + e
    return torch.conj_physical(e).add_(1), u * 2


def multiply_into(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.mm(x, w.t(), out=e)
    u = F.linear(x, w) + e
    return y.add_(1), u * 2


def normalise(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = e[0], e[1].abs()
    u = torch.tanh(F.linear(x, w) + mean)
    return torch.native_batch_norm(x @ w.t(), None, None, mean, variance, True, 0.5, 1e-5)[0], u * 2


def add_by_method(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    u = F.linear(x, w) + e
    e.__iadd__(1)
    return u * 2


def shift(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    indices = torch.arange(12) + e.long()
    u = F.linear(x, w) + indices
    indices <<= 1
    return u * 2 + indices


def activate(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    u = F.linear(x, w) + e
    return F.relu(e, inplace=1), u * 2  # type: ignore[arg-type]


def activate_by_place(x: Tensor, w: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    u = F.linear(x, w) + e
    return F.relu(e, 1), u * 2  # type: ignore[arg-type]


WRITERS = [embed, embed_bags, conjugate, multiply_into, normalise, add_by_method, shift, activate, activate_by_place]


@pytest.mark.parametrize("model", WRITERS, ids=lambda model: model.__name__)
def test_a_region_is_not_moved_behind_what_writes(model: Model) -> None:
    agree(model, tensors((6, 8), (12, 8), (6, 12)))


def test_embeddings_without_a_norm_write_nothing() -> None:
    def model(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
        u = F.linear(x, w)
        bags = F.embedding_bag(torch.arange(12).view(6, 2), w, None, None, 2.0, False, "sum")
        return torch.tanh(u) * bags.sum() + F.embedding(torch.arange(6), e, 0)

    (report,) = agree(model, tensors((6, 8), (12, 8), (6, 12)))
    assert report.is_fused


def test_a_residual_that_is_written_in_a_list() -> None:
    agree(foreach, tensors((6, 8), (12, 8), (6, 12)), needs_grad=[0])
