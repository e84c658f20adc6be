"""Models whose products must not be fused carelessly: writes, views, modes, gradients and types.

`TRAPS` were foreseen; the fusion pass had what follows them wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Model, agree, compare, draw, tensors
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import cutfuse.compile
from cutfuse.compile.fusion import fuse
from cutfuse.compile.products import find_product
from cutfuse.compile.report import ProductReport

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.usefixtures("everything_fuses", "one_thread"),
]


X, W, B, R = draw(8, 32), draw(16, 32), draw(16), draw(8, 16)


class Trap(NamedTuple):
    function: Callable[..., Any]
    programs: list[str]  # what is to be fused
    inputs: tuple[Any, ...] = (X, W, B)
    trained: list[str] | None = None  # and in training, where that is something else


def add_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    y += 1
    return y * 2


def add_in_place_seen_by_a_view(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    view = y.view(-1, 16)
    y += 1
    return view * 2


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


def size_as_a_number(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b) * x.shape[0]


def checkpointed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x: F.gelu(F.linear(x, w, b)), x, use_reentrant=False)


def vmapped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.func.vmap(lambda rows: torch.tanh(F.linear(rows, w, b)))(x.view(2, 4, 32))


def product_used_twice(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return torch.tanh(y) * 2, y + 1


def inner_value_used(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(F.linear(x, w, b))
    return y * 2, y.cumsum(0)


def operand_made_of_the_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return y * y.softmax(-1)


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
    "bias written through a view": Trap(bias_written_through_a_view, []),
    "item set inside": Trap(item_set_inside, [], (X, W, B, R)),
    "in-place activation": Trap(in_place_activation, ["(relu(z) * 2)"]),
    "in-place methods": Trap(lambda x, w, b: F.linear(x, w, b).mul_(3).sigmoid_().add(1), ["(sigmoid((z * 3)) + 1)"]),
    "product without a gradient": Trap(product_without_gradient, [], (X, grad(W), grad(B))),
    "detached": Trap(detached, [], (grad(X), grad(W), B)),
    "detached where no gradient is": Trap(lambda x, w, b: F.linear(x, w, b).detach() * 2, ["(z * 2)"], trained=[]),
    "autocast around the product": Trap(autocast_product, []),
    "autocast around all": Trap(autocast_around_all, ["(gelu(z) * 2)"]),
    "cast down and up": Trap(
        lambda x, w, b: F.linear(x, w, b).to(torch.bfloat16).float() * 2, ["(copy(bfloat16(z)) * 2)"]
    ),
    "mask": Trap(
        lambda x, w, b, m: F.linear(x, w, b).masked_fill(m, -1e9), ["where(r0, -1000000000, z)"], (X, W, B, R > 0)
    ),
    "number": Trap(lambda x, w, b, s: F.linear(x, w, b) * s, ["(z * 0.37)"], (X, W, B, 0.37)),
    "size as a number": Trap(size_as_a_number, ["(z * 8)"]),
    "checkpoint": Trap(checkpointed, ["gelu(z)"], (grad(X), grad(W), B)),
    "vmap": Trap(vmapped, []),
    "cast to integers": Trap(lambda x, w, b: F.linear(x, w, b).long().float() + 1, []),
    "integer operand": Trap(lambda x, w, b, i: F.linear(x, w, b) * i, ["(z * r0)"], (X, W, B, torch.arange(16))),
    "float64": Trap(
        lambda x, w, b: torch.relu(F.linear(x.double(), w.double(), b.double())).float(), ["float(relu(z))"]
    ),
    "product used twice": Trap(product_used_twice, []),
    "inner value used": Trap(inner_value_used, ["tanh(z)"]),
    "operand made of the product": Trap(operand_made_of_the_product, []),
    "dropout in training": Trap(lambda x, w, b: F.dropout(F.relu(F.linear(x, w, b)), 0.5, True) * 2, ["relu(z)"]),
    "norm in training": Trap(norm_in_training, [], (X, W, B, *NORM)),
    "norm whose statistics change": Trap(norm_read_after_training, ["((z * r0) + r1)"], (X, W, B, *NORM)),
    "row added to a product that is used twice": Trap(row_added_to_a_product_used_twice, []),
    "bias written inside": Trap(written_operand_of_the_row, []),
    "result laid out otherwise": Trap(lambda x, w, b, r: r.t().contiguous().t() + F.linear(x, w, b), [], (X, W, B, R)),
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
    assert compare(trap.function, inputs).programs == (trap.programs if trap.trained is None else trap.trained)


def test_dynamic_sizes_as_numbers_are_left() -> None:
    collector = compare(size_as_a_number, (X, W, B), dynamic=True)
    assert collector.programs == []
    assert "not known at compile time" in collector.reports[0].reason


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


# What the fusion pass had wrong


class Run(NamedTuple):
    """A model that is compared at these inputs, of which those of `needs_grad` have gradients."""

    model: Model
    programs: list[str]  # what is to be fused
    inputs: Sequence[Tensor]
    needs_grad: Sequence[int]


RUNS: list[Run] = []
ROWS = tensors((6, 8), (12, 8), (6, 12))
MATRICES = tensors((6, 8), (8, 12), (6, 12))
BATCH = tensors((2, 3, 8), (12, 8), (2, 3, 12))
SINGLE = tensors((6, 8), (12, 8), (6, 12), dtype=torch.float32)


def run(
    programs: list[str], inputs: Sequence[Tensor] = ROWS, needs_grad: Sequence[int] = ()
) -> Callable[[Model], Model]:
    def add(model: Model) -> Model:
        RUNS.append(Run(model, programs, inputs, needs_grad))
        return model

    return add


@run(["(tanh(z) > 0.3)"], needs_grad=(0, 1))
@run(["copy((tanh(z) > 0.3))"])
def comparisons_that_need_no_gradient(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return (torch.tanh(F.linear(x, w)) > 0.3).double()


@run(["where(r0, z, 0.5)"], needs_grad=(2,))
@run(["where(r0, z, 0.5)"], needs_grad=(1, 2))
def an_operand_that_is_compared(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.where(r > 0, F.linear(x, w), 0.5)


@run(["(tanh(z) * 2)"], needs_grad=(1,))
def a_chain_without_gradients(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(F.linear(x, w)) * 2


@run([], MATRICES, needs_grad=(2,))
@run([], MATRICES, needs_grad=(0, 2))
@run(["relu((z * 2))"], MATRICES, needs_grad=(0,))
def an_addend_without_a_say_that_has_a_gradient_of_zeros(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(torch.addmm(r, x, w, beta=0, alpha=2))


@run([], [MATRICES[0] / 0, *MATRICES[1:]])
def a_product_that_is_left_out(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(torch.addmm(r, x, w, alpha=0))


@run([], needs_grad=(0,))
def an_input_that_is_written_before_the_backward_pass(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    y = torch.tanh(F.linear(h, w))
    h += 1
    return y, h


@run(["((z * r0) + r1)"], tensors((4, 8), (6, 8), (6,), (6,), (6,), (6,)), needs_grad=(0, 1, 4, 5))
def batch_norm_in_double_precision(
    x: Tensor, w: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    return F.batch_norm(F.linear(x, w), mean, variance.abs(), scale, shift, False, 0.1, 1e-5)


@run(["amax((z + ((r0 * 0.5) * r0)), -1)"], [*SINGLE[:2], ROWS[2]], needs_grad=(0, 1, 2))
def the_largest_of_a_wider_type(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.addcmul(F.linear(x, w), r, r, value=0.5).amax(-1)


@run([], MATRICES)
def a_product_that_is_written_to_a_tensor(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(torch.mm(x, w, out=r)) * 2


@run([])
def parameters_of_an_in_place_function_alone(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """F.elu_ has scale where F.elu has inplace."""
    return F.elu_(F.linear(x, w), 1.0, 2.0) * 3


@run([], needs_grad=(0,))
def a_view_of_a_type_has_no_gradient(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w).view(torch.float64)) * 2


def gate(z: Tensor) -> Tensor:
    gated, factor = z.chunk(2, -1)
    return torch.relu(gated) * factor


@run([])
def x_that_is_written_before_the_split(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    z = F.linear(x, w)
    x.add_(1)
    return gate(z)


@run([], tensors((6, 8), (12, 8), (6, 6)), needs_grad=(1, 2))
def columns_of_a_product_without_gradients_that_are_split_with_them(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        z = F.linear(x, w)
    return gate(z) * r


@run([], SINGLE)
def columns_that_are_split_inside_of_autocast(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    z = F.linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        return gate(z)


@run([])
def columns_that_tensor_split_gives_twice(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    first, _, third, _ = torch.tensor_split(F.linear(x, w), (4, 2, 6), -1)
    return torch.sigmoid(first) * third


@run(["mean(relu(z), -1)"], BATCH, needs_grad=(0, 1))
def permuted_and_back_before_a_reduction(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w).transpose(1, 2)).transpose(1, 2).mean(-1)


@run(["(relu(z) * 2)"], BATCH, needs_grad=(0, 1))
def permuted_and_back_before_a_view(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w).transpose(0, 1)).transpose(0, 1).flatten(0, 1) * 2


@run(["sum((relu(z) * 2), -1)"], BATCH, needs_grad=(0, 1))
def permuted_and_back_before_a_view_that_is_reduced(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return permuted_and_back_before_a_view(x, w, r).sum(-1)


@run(["((tanh(z) * r0) + r1)"])
def embeddings_without_a_norm_which_write_nothing(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    u = F.linear(x, w)
    bags = F.embedding_bag(torch.arange(12).view(6, 2), w, None, None, 2.0, False, "sum")
    return torch.tanh(u) * bags.sum() + F.embedding(torch.arange(6), r, 0)


@run(["(z + r0)"])
def product_with_out(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.mm(x, w.t(), out=r)
    u = F.linear(x, w) + r
    return y.add_(1), u * 2


@run(["(z + r0)"])
def shift(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    indices = torch.arange(12) + r.long()
    u = F.linear(x, w) + indices
    indices <<= 1
    return u * 2 + indices


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.model.__name__} {run.needs_grad}")
def test_what_the_pass_had_wrong(run: Run) -> None:
    reports = agree(run.model, run.inputs, run.needs_grad)
    assert [report.program for report in reports if report.is_fused] == run.programs


# What writes to x, the weight or an operand.
WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "x by a method": lambda x, w, r: x.mul_(2),
    "operator": lambda x, w, r: operator.iadd(r, 1),
    "method of an operator": lambda x, w, r: r.__iadd__(1),
    "list": lambda x, w, r: torch._foreach_mul_([r], -3.0),
    "result that is r itself": lambda x, w, r: torch.conj_physical(r).add_(1),
    "function in place": lambda x, w, r: F.relu(r, inplace=1),  # type: ignore[arg-type]
    "function in place by position": lambda x, w, r: F.relu(r, 1),  # type: ignore[arg-type]
    "embedding": lambda x, w, r: F.embedding(torch.arange(3), w, max_norm=0.5).sum(),
    "embedding_bag": lambda x, w, r: F.embedding_bag(torch.arange(4).view(2, 2), w, None, 0.5),
    "statistics": lambda x, w, r: torch.native_batch_norm(r * 2, None, None, r[0], r[1].abs(), True, 0.5, 1e-5)[0],
}


@pytest.mark.parametrize("name", WRITES)
def test_a_region_is_not_moved_behind_what_writes(name: str) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
        u = F.linear(x, w) + r
        found = WRITES[name](x, w, r)
        return [u * 2, *([found] if isinstance(found, Tensor) else [])]

    reports = agree(model, ROWS)
    assert [report.program for report in reports if report.is_fused] == ["(z + r0)"]


def test_a_region_that_is_trained_is_not_moved_behind_a_write_in_a_list() -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        u = torch.relu(F.linear(x, w) + r)
        torch._foreach_mul_([r], -3.0)
        return u

    agree(model, ROWS, needs_grad=(0,))


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin", "logsumexp"])
def test_reductions_with_a_mask(name: str) -> None:
    agree(lambda x, w, r: getattr(torch.masked, name)(F.linear(x, w), -1, mask=r > 0), ROWS)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_largest_of_equal_elements(name: str, needs_grad: bool) -> None:
    """PyTorch gives the gradient to the element whose index it gives; amax shares it out."""
    x, w, _ = ROWS
    reports = agree(lambda x, w: getattr(F.linear(x, w), name)(-1).values, [x * 0, w], [0] if needs_grad else [])
    assert [report.is_fused for report in reports] == [not needs_grad]


@pytest.mark.parametrize(
    "write", [lambda r: r.mul_(2), lambda r: r.view(-1)[:3].add_(1), lambda r: torch.add(r, 1, out=r)]
)
def test_an_operand_is_written_before_the_backward_pass(write: Model) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, w)) + r
        write(r)
        return y

    (report,) = agree(model, ROWS, needs_grad=(0, 1))
    assert report.is_fused
    assert "r0" not in report.program
    (report,) = agree(model, ROWS)
    assert "r0" in report.program


def test_an_operand_of_a_checkpoint_is_written_behind_it() -> None:
    if torch.__version__.startswith("2.8."):
        pytest.skip("the compiler of PyTorch 2.8 itself repeats the write in the backward pass")

    def model(x: Tensor, w: Tensor, r: Tensor, s: Tensor) -> Tensor:
        y = checkpoint(lambda x: torch.tanh(F.linear(x, w) + s) * 2 + r, x, use_reentrant=False)
        r.mul_(2)
        return y

    (report,) = agree(model, tensors((4, 8), (6, 8), (4, 6), (4, 6)), needs_grad=(0, 3))
    assert report.is_fused


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


def test_a_mean_of_a_size_that_changes_is_fused() -> None:
    (report,) = agree(lambda x, w: (F.linear(x, w) * 2).mean(-1), ROWS[:2], symbols=[(1, 0)])
    assert report.is_fused
