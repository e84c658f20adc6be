"""Models as users write and call them: what they met with the compiled model and with `explain_model`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare, draw
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import cutfuse

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.usefixtures("one_thread", "everything_fuses"),
]


X = draw(4, 8)


class Broken(nn.Module):
    """Two graphs, as torch.compile makes of a model that prints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y)  # type: ignore[no-any-return]


# explain_model


@pytest.mark.parametrize(("model", "graphs"), [(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 1), (Broken(), 2)])
def test_a_model_is_explained_any_number_of_times(model: nn.Module, graphs: int) -> None:
    """Dynamo compiles one code eight times, and then no more."""
    for rows in range(2, 12):
        found = cutfuse.explain_model(model.requires_grad_(False), draw(rows, 8))
        assert (found.fused, found.graphs, found.products[0].m) == (graphs, graphs, rows)


def test_each_explanation_is_of_a_first_call() -> None:
    """Sizes of earlier calls do not make a size vary."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.linear(x, w) * x.shape[0]

    programs = [cutfuse.explain_model(model, draw(rows, 8), X).products[0].program for rows in (4, 5, 6)]
    assert programs == ["(z * 4)", "(z * 5)", "(z * 6)"]


class Method:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.compile(backend="eager")
    def call(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["wrapper", "in place", "function", "method"])
def test_a_model_that_is_compiled_is_explained_as_itself(how: str) -> None:
    """Behind a graph break, its own backend would get the graphs."""
    model = Broken().requires_grad_(False)
    compiled: Any = Method(model).call
    if how == "wrapper":
        compiled = torch.compile(model, backend="eager")
    elif how == "function":
        compiled = torch.compile(lambda x: model(x), backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
        compiled = model
    found = cutfuse.explain_model(compiled, X)
    assert (found.fused, found.graphs) == (2, 2)


def test_modules_are_named_from_the_model_on_behind_graph_breaks_too() -> None:
    model = Broken().requires_grad_(False)
    for call in (model, lambda x: model(x)):
        assert [product.module for product in cutfuse.explain_model(call, X).products] == ["first", "second.0"]


class _TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_modules_are_named_from_the_model_on_in_methods_and_behind_its_own_compile() -> None:
    model, layers = _TwoMethods().requires_grad_(False), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(False)
    compiled = _TwoMethods().requires_grad_(False)
    compiled.compile(backend="eager")
    layers.compile(backend="eager")
    calls = (
        (model, "layers.0"),
        (model.encode, "layers.0"),
        (compiled, "layers.0"),
        (layers, "0"),
        (layers.forward, "0"),
    )
    for call, name in calls:
        assert [product.module for product in cutfuse.explain_model(call, X).products] == [name]


def test_it_tells_where_no_graph_is() -> None:
    hooked = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    hooked[0].register_full_backward_hook(lambda *_: None)
    for model in (hooked, nn.LSTM(8, 8)):
        found = cutfuse.explain_model(model, X)
        if not found.graphs:  # of PyTorch's choosing
            assert "torch.compile makes no graph of it, as of nn.LSTM and of modules with full backward" in str(found)


# Sizes and types of tensors


class Experts(nn.Module):
    """Rows go to experts by their contents, so that nobody knows how many."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0].gt(0) == bool(index))
            y.index_add_(0, rows, F.silu(expert(x[rows])) * scale[rows, None])
        return y


def test_rows_of_an_expert_are_unknown() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        collector = compare(Experts(), (X, draw(4)), fullgraph=True)
    assert collector.programs == ["(silu(z) * r0)"] * 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_of_sizes_that_the_model_computes(dynamic: bool | None) -> None:
    """As the layers of GPT-2 in transformers have one: of varying sizes it is one node of the graph."""

    def model(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = torch.addmm(b, x.view(-1, x.size(-1)), w).view(x.size()[:-1] + (8,))  # noqa: RUF005, which makes no such node
        return x + F.gelu(y)

    collector = compare(model, (draw(2, 3, 8), draw(8, 8), draw(8)), dynamic=dynamic)
    assert collector.programs == ["(r0 + gelu(z))"]


@pytest.mark.parametrize("place", ["x", "weight"])
def test_tensors_that_compute_in_their_own_way_are_left(place: str) -> None:
    """As DTensor and quantized weights, whose operations PyTorch asks of them."""
    weight = draw(6, 8)
    x: Any = TwoTensor(X, X.clone()) if place == "x" else X
    w: Any = weight if place == "x" else TwoTensor(weight, weight.clone())
    collector = Collector()
    y: Any = torch.compile(lambda x, w: F.relu(F.linear(x, w)) * 2, backend=collector)(x, w)
    torch.testing.assert_close(y.a, F.relu(F.linear(X, weight)) * 2)
    assert collector.programs == []
    assert "is a TwoTensor" in collector.reports[0].reason


# Operations of other libraries


@torch.library.custom_op("cutfuse_test_users::mm", mutates_args=())
def other_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w + 100


@torch.library.custom_op("cutfuse_test_users::sum", mutates_args=())
def other_sum(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim) + 100


@torch.library.custom_op("cutfuse_test_users::view", mutates_args=())
def other_view(x: Tensor, shape: list[int]) -> Tensor:
    return x.view(shape) + 100


other_product.register_fake(torch.matmul)
other_sum.register_fake(torch.sum)
other_view.register_fake(lambda x, shape: x.clone().view(shape))


@torch.compiler.allow_in_graph
def addmm(bias: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(bias, x, w) + 100


NAMESAKES = {
    "operator mm": lambda x, w: torch.ops.cutfuse_test_users.mm(x, w).relu(),
    "operator sum": lambda x, w: torch.ops.cutfuse_test_users.sum((x @ w).relu(), -1),
    "operator view": lambda x, w: torch.ops.cutfuse_test_users.view(x @ w, [2, -1]).relu(),
    "function addmm": lambda x, w: addmm(w[0], x, w).relu(),
    "cutfuse.linear": lambda x, w: cutfuse.linear(x, w, epilogue=torch.sigmoid) + 1,
}


@pytest.mark.parametrize("name", NAMESAKES)
def test_another_librarys_operation_is_none_of_pytorchs(name: str) -> None:
    """Though it has the name of one."""
    collector = compare(NAMESAKES[name], (X, draw(8, 8)))
    assert collector.programs == (["relu(z)"] if name == "operator sum" else [])


@torch.library.custom_op("cutfuse_test_users::count_", mutates_args=("to",))
def count_(x: Tensor, to: Tensor) -> None:
    to.add_(x.sum())


def test_another_librarys_operation_writes_to_its_second_argument() -> None:
    """The row is written before the backward pass would read it."""

    def model(x: Tensor, w: Tensor, row: Tensor, numbers: Tensor) -> Tensor:
        y = torch.tanh(x @ w) * 2 + row
        torch.ops.cutfuse_test_users.count_(numbers, row)
        return y

    collector = compare(model, (X, draw(8, 8).requires_grad_(), draw(8), draw(3)))
    assert collector.programs == ["(tanh(z) * 2)"]


def test_a_batch_norm_with_its_arguments_in_another_order() -> None:
    """That of torch.batch_norm: the weight and the bias, and then the statistics."""

    def model(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        y = torch.batch_norm(x @ w, scale, shift, mean, variance, False, 0.1, 1e-5, False)
        return torch.ops.aten.batch_norm(y @ w, scale, shift, mean, variance, False, 0.1, 1e-5, False).relu()

    collector = compare(model, (X, draw(8, 8), *(draw(8) * k for k in (1, 2, 3)), draw(8).abs() + 1))
    assert collector.programs == []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_products_beside_an_autograd_function_are_fused() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Doubled.apply(F.gelu(F.linear(x, w)))
        return F.relu(F.linear(y, w))

    needed = [tensor.clone().requires_grad_() for tensor in (X, draw(8, 8))]
    assert compare(model, needed).programs == ["gelu(z)", "relu(z)"]


@pytest.mark.filterwarnings("error:cutfuse leaves")
def test_products_of_a_checkpoint_under_a_transform_are_left() -> None:
    def layer(x: Tensor) -> Tensor:
        return F.relu(F.linear(x, X)) * 2

    def model(x: Tensor) -> Tensor:
        checkpointed: Tensor = torch.vmap(lambda x: checkpoint(layer, x, use_reentrant=False))(x)
        return checkpointed

    found = cutfuse.explain_model(model, draw(2, 4, 8))
    assert [product.is_fused for product in found.products] == [False]
    assert "torch.func" in found.products[0].reason
