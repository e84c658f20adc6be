"""Models whose products must not be fused carelessly: writes, views, modes, gradients and types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, compare
from torch import Tensor

import cutfuse.compile

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.usefixtures("everything_fuses"),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


X, W, B, R = draw(8, 32), draw(16, 32), draw(16), draw(8, 16)


class Trap(NamedTuple):
    function: Callable[..., Any]
    programs: list[str]  # what is to be fused
    inputs: tuple[Any, ...] = (X, W, B)


def add_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    y += 1
    return y * 2


def add_in_place_seen_by_a_view(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    view = y.view(-1, 16)
    y += 1
    return view * 2


def operand_written_after_use(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.linear(x, w, b) + r
    r += 1
    return y


def operand_written_inside(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.linear(x, w, b) + r
    r += 1
    return y * 2


def x_written_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    x.mul_(2)
    return torch.tanh(y) * 2


def bias_written_through_a_view(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    b[:4].zero_()
    return torch.tanh(y)


def item_set_inside(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    r[0] = 7.0
    return y + r


def in_place_activation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b), inplace=True) * 2


def in_place_method(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).mul_(3).sigmoid_().add(1)


def product_without_gradient(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.linear(x, w, b)
    return y * 2 + b


def detached(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return torch.tanh(y.detach()) * 2, y.sum()


def autocast_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, w, b)
    return y * 2 + y


def autocast_around_all(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(F.linear(x, w, b)) * 2


def cast_down_and_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).to(torch.bfloat16).float() * 2


def mask(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
    return F.linear(x, w, b).masked_fill(m, -1e9)


def number(x: Tensor, w: Tensor, b: Tensor, s: float) -> Tensor:
    return F.linear(x, w, b) * s


def size_as_a_number(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b) * x.shape[0]


def checkpointed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: F.gelu(F.linear(x, w, b)), x, use_reentrant=False)


def vmapped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: torch.tanh(F.linear(row, w, b)))(x)


def vmapped_matrices(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.func.vmap(lambda rows: torch.tanh(F.linear(rows, w, b)))(x.view(2, 4, 32))


def cast_to_integers(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).long().float() + 1


def integer_operand(x: Tensor, w: Tensor, b: Tensor, i: Tensor) -> Tensor:
    return F.linear(x, w, b) * i


def wide(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.relu(F.linear(x.double(), w.double(), b.double())).float()


def product_used_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return torch.tanh(y) * 2, y + 1


def inner_value_used(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(F.linear(x, w, b))
    return y * 2, y.cumsum(0)


def operand_made_of_the_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return y * y.softmax(-1)


def dropout_in_training(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.dropout(F.relu(F.linear(x, w, b)), 0.5, True) * 2


def norm_in_training(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return torch.relu(F.batch_norm(y, mean, variance, None, None, True)) + 1


def norm_read_after_training(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    y = F.batch_norm(F.linear(x, w, b), mean, variance)
    F.batch_norm(x[:, :16], mean, variance, None, None, True)
    return torch.relu(y)


def row_added_to_a_product_used_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.t()
    return torch.relu(y + b), y


def written_operand_of_the_row(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x @ w.t() + b
    b.add_(1)
    return torch.relu(y)


def result_laid_out_otherwise(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r.t().contiguous().t() + F.linear(x, w, b)


def written_result(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.relu(F.linear(x, w, b))
    y[0] = 1
    return y * 2


def grad(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


NORM = (B.clone(), B.abs() + 1)
TRAPS = {
    "add in place": Trap(add_in_place, ["((z + 1) * 2)"]),
    "add in place seen by a view": Trap(add_in_place_seen_by_a_view, []),
    "operand written after use": Trap(operand_written_after_use, ["(z + r0)"], (X, W, B, R)),
    "operand written inside": Trap(operand_written_inside, ["(z + r0)"], (X, W, B, R)),
    "x written inside": Trap(x_written_inside, []),
    "bias written through a view": Trap(bias_written_through_a_view, []),
    "item set inside": Trap(item_set_inside, [], (X, W, B, R)),
    "in-place activation": Trap(in_place_activation, ["(relu(z) * 2)"]),
    "in-place methods": Trap(in_place_method, ["(sigmoid((z * 3)) + 1)"]),
    "product without a gradient": Trap(product_without_gradient, [], (X, grad(W), grad(B))),
    "detached": Trap(detached, [], (grad(X), grad(W), B)),
    "detached where no gradient is": Trap(lambda x, w, b: F.linear(x, w, b).detach() * 2, ["(z * 2)"]),
    "autocast around the product": Trap(autocast_product, []),
    "autocast around all": Trap(autocast_around_all, ["(gelu(z) * 2)"]),
    "autocast in training": Trap(autocast_around_all, ["(gelu(z) * 2)"], (grad(X), grad(W), grad(B))),
    "cast down and up": Trap(cast_down_and_up, ["(copy(bfloat16(z)) * 2)"]),
    "mask": Trap(mask, ["where(r0, -1000000000, z)"], (X, W, B, R > 0)),
    "number": Trap(number, ["(z * 0.37)"], (X, W, B, 0.37)),
    "size as a number": Trap(size_as_a_number, ["(z * 8)"]),
    "checkpoint": Trap(checkpointed, ["gelu(z)"], (grad(X), grad(W), B)),
    "vmap": Trap(vmapped, []),
    "vmap of matrices": Trap(vmapped_matrices, []),
    "cast to integers": Trap(cast_to_integers, []),
    "integer operand": Trap(integer_operand, ["(z * r0)"], (X, W, B, torch.arange(16))),
    "float64": Trap(wide, ["float(relu(z))"]),
    "product used twice": Trap(product_used_twice, []),
    "inner value used": Trap(inner_value_used, ["tanh(z)"]),
    "operand made of the product": Trap(operand_made_of_the_product, []),
    "dropout in training": Trap(dropout_in_training, ["relu(z)"]),
    "norm in training": Trap(norm_in_training, [], (X, W, B, *NORM)),
    "norm whose statistics change": Trap(norm_read_after_training, ["((z * r0) + r1)"], (X, W, B, *NORM)),
    "row added to a product that is used twice": Trap(row_added_to_a_product_used_twice, []),
    "bias written inside": Trap(written_operand_of_the_row, []),
    "result laid out otherwise": Trap(result_laid_out_otherwise, [], (X, W, B, R)),
    "result written": Trap(written_result, ["relu(z)"]),
}


@pytest.mark.parametrize("name", TRAPS)
def test_it_does_what_the_model_does(name: str) -> None:
    trap = TRAPS[name]
    collector = compare(trap.function, trap.inputs)
    assert collector.programs == trap.programs


# PyTorch itself refuses the gradient of the first, and takes changed statistics for that of the second.
WITHOUT_GRADIENTS = ("result written", "norm whose statistics change")


@pytest.mark.parametrize("name", [n for n, trap in TRAPS.items() if trap.programs and n not in WITHOUT_GRADIENTS])
def test_gradients_are_the_models(name: str) -> None:
    trap = TRAPS[name]
    is_written = "written" in name  # a leaf that needs a gradient cannot be
    inputs = [
        grad(t) if isinstance(t, Tensor) and t.is_floating_point() and not (is_written and index > 2) else t
        for index, t in enumerate(trap.inputs)
    ]
    compare(trap.function, inputs)


def test_dynamic_sizes_as_numbers_are_left() -> None:
    collector = compare(size_as_a_number, (X, W, B), dynamic=True)
    assert collector.programs == []
    assert "not known at compile time" in collector.reports[0].reason


def test_a_model_with_nothing_to_fuse_stays_as_it_is() -> None:
    collector = compare(lambda x, w: (x @ w.t()).softmax(-1), (X, W))
    assert collector.programs == []
    assert all("cutfuse" not in str(node.target) for graph in collector.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("place", ["find_regions", "Rewriter.rewrite"])
def test_an_error_inside_leaves_the_graph(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(f"cutfuse.compile.fusion.{place}", fail)
    torch._dynamo.reset()
    compiled = torch.compile(in_place_activation, backend=cutfuse.compile.backend, options={"compile_threads": 1})
    with pytest.warns(UserWarning, match="because of an error of its own: KeyError: 'planted'"):
        actual = compiled(X, W, B)
    torch.testing.assert_close(actual, in_place_activation(X, W, B))


def test_an_error_half_way_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that were put in before the error are taken out again."""
    monkeypatch.setattr("cutfuse.compile.rewriting._check_result", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        found = cutfuse.explain_model(in_place_activation, X, W, B)
    assert found.fused == 0
    assert "ZeroDivisionError" in found.products[0].reason
