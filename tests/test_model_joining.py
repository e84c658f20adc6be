"""Products of one x with several weights, which one kernel computes: which are joined, and that models stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare
from torch import Tensor, nn

import cutfuse
from cutfuse import native
from cutfuse.compile import joining
from cutfuse.layer import schema

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("everything_fuses")]

JOINED = "one kernel multiplies its input by the weights of "


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = draw(2, 6, 32)
W = [draw(32, 32), draw(32, 32), draw(16, 32), draw(8, 32)]


def joined(found: Collector) -> list[int]:
    """How many weights each operator has that was put into the graphs."""
    return [len(node.args[1]) for graph in found.graphs for node in graph.graph.nodes if node.target is schema.joined]


def compare_without_gradients(function: Callable[..., Any], *inputs: Any, **options: Any) -> Collector:
    with torch.no_grad():
        return compare(function, inputs, **options)


class Attention(nn.Module):
    """Of `heads` heads; keys and values have `kept` of them."""

    def __init__(self, heads: int = 4, kept: int = 4) -> None:
        super().__init__()
        self.heads, self.kept = heads, kept
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 8 * kept, bias=False)
        self.value, self.out = nn.Linear(32, 8 * kept), nn.Linear(32, 32)

    def split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], -1, 8).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        key, value = (t.repeat_interleave(self.heads // self.kept, 1) for t in (key, value))
        y = F.scaled_dot_product_attention(query, key, value)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kept", [4, 2])
def test_attention(kept: int, dynamic: bool) -> None:
    found = compare_without_gradients(Attention(kept=kept).eval(), X, dynamic=dynamic)
    assert joined(found) == [3]
    reasons = [report.reason for report in found.reports]
    assert reasons[:3] == [f"{JOINED}query, key and value"] * 3
    assert not any(report.is_fused for report in found.reports)


def test_inductor_runs_them() -> None:
    model = Attention().eval()
    with torch.no_grad():
        y = torch.compile(model, backend="cutfuse")(X)
        torch.testing.assert_close(y, model(X))


def halves(rows: Tensor) -> Tensor:
    """Of another shape, so that no kernel of a product stores it."""
    return rows.unflatten(-1, (2, -1)).sin()


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(halves(F.linear(x, weight)) for weight in weights)


@pytest.mark.parametrize(("count", "expected"), [(1, []), (2, [2]), (3, [3]), (4, [3])])
@pytest.mark.parametrize("x", [X, X[0], X[None]], ids=["3-D", "2-D", "4-D"])
def test_how_many_are_joined(x: Tensor, count: int, expected: list[int]) -> None:
    """At most three: a fourth one has a product of its own."""
    assert joined(compare_without_gradients(products, x, *W[:count])) == expected


def test_no_weight_of_another_type_or_layout_is_joined() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return halves(F.linear(x, w)), halves(x @ v)

    assert joined(compare_without_gradients(function, X, W[0], W[1].t())) == []


def test_nothing_that_is_trained_is_joined() -> None:
    found = compare(Attention(), (X,))
    assert joined(found) == []
    assert found.reports


def test_nothing_that_has_its_place_between_products_is_crossed() -> None:
    def writes(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = halves(F.linear(x, w))
        x.mul_(2)
        return first, halves(F.linear(x, v))

    assert joined(compare_without_gradients(writes, X.clone(), W[0], W[1])) == []


def test_a_weight_that_is_computed_between_products_is_not_joined() -> None:
    def computes(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first = halves(F.linear(x, w))
        return first, halves(F.linear(x, v * first.sum()))

    assert joined(compare_without_gradients(computes, X, W[0], W[1])) == []


def returned(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w), F.linear(x, v)


def viewed_flat(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w).view(-1).sin(), halves(F.linear(x, v))


def transposed_for_the_caller(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w).transpose(0, 1), halves(F.linear(x, v))


def returned_in_part(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w)[0, 0], halves(F.linear(x, v))


def strided(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w).as_strided((2, 5, 2, 32), (192, 32, 32, 1)).sin(), halves(F.linear(x, v))


def written(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Where there is a view the product is written to, and where there is a copy it is not."""
    rows, others = F.linear(x, w), F.linear(x, v)
    rows.reshape(-1).mul_(2)
    return halves(rows), halves(others)


def written_by_halves(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    left, right = (F.linear(x, weight).unflatten(-1, (2, -1)) for weight in (w, v))
    left.mul_(2)
    return left + right, right * 3


@torch.library.custom_op("joining::dense", mutates_args=())
def dense(x: Tensor) -> Tensor:
    """As operators of other libraries do, it needs its input without gaps."""
    assert x.is_contiguous()
    return x + 1


@dense.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def given_to_an_operator_of_another_library(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return dense(F.linear(x, w).unflatten(-1, (2, -1))), halves(F.linear(x, v))


@pytest.mark.parametrize(
    "function",
    [
        returned,
        returned_in_part,
        viewed_flat,
        transposed_for_the_caller,
        strided,
        written,
        written_by_halves,
        given_to_an_operator_of_another_library,
    ],
)
def test_layouts_that_somebody_would_notice_stay(function: Callable[..., Any]) -> None:
    assert joined(compare_without_gradients(function, X, W[0], W[1])) == []


def places(x: Tensor, w: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, w).nonzero().sum(), halves(F.linear(x, v))


def repeated(x: Tensor, w: Tensor, v: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    return torch.repeat_interleave(F.linear(x, w), counts, dim=1).sin(), halves(F.linear(x, v))


@pytest.mark.parametrize("function", [places, repeated])
def test_results_whose_size_is_not_known_are_not_computed_twice(function: Callable[..., Any]) -> None:
    """Their size is a symbol without a value, and evaluating a node again would make another one."""
    counts = torch.tensor([1, 2, 0, 1, 1, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert joined(compare_without_gradients(function, X, W[0], W[1], counts)) == []


@pytest.mark.parametrize("rows", [(3, 1), (1, 3, 1), (3, 1, 1)], ids=str)
def test_views_across_dimensions_of_one_row(rows: tuple[int, ...]) -> None:
    """PyTorch's examples have a flat view of rows that lie apart, which no tensor has."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w).view(-1).sin(), halves(F.linear(x, v))

    found = compare_without_gradients(function, draw(*rows, 32), W[0], W[1])
    assert joined(found) == []


@pytest.mark.parametrize("own", [Tensor.clone, Tensor.double, lambda rows: rows.softmax(-1)])
def test_a_result_of_one_row_has_its_own_strides(own: Callable[[Tensor], Tensor]) -> None:
    """A copy keeps those of a dimension of one, which of a column of the joined matrix are the matrix's.

    Inductor makes the copies: the examples of PyTorch 2.8 and 2.9 are not what a clone that runs alone gives.
    """

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return own(F.linear(x, w)), halves(F.linear(x, v))

    inputs = draw(1, 32), W[0], W[1]
    with torch.no_grad():
        actual, expected = torch.compile(function, backend="cutfuse")(*inputs), function(*inputs)
    assert [y.stride() for y in actual] == [y.stride() for y in expected]


def test_bytes_of_a_product_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Whether columns have such a view would be tried, and a trial that fails prints PyTorch's traceback."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, w).view(torch.float64).sin(), F.linear(x, v).unsqueeze(-1).sin()

    assert joined(compare_without_gradients(function, X, W[0], draw(7, 32))) == []
    assert [record for record in caplog.records if record.name == "torch._subclasses.fake_tensor"] == []


def test_products_of_nothing() -> None:
    x, weights = draw(2, 3, 0), [draw(4, 0), draw(6, 0)]
    assert joined(compare_without_gradients(products, x, *weights)) == []


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_bias_of_one_number_for_all_columns(shape: tuple[int, ...]) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return halves(F.linear(x, w, bias)), halves(F.linear(x, v))

    assert joined(compare_without_gradients(function, X, W[0], W[1], draw(*shape))) == []


class Cached(nn.Module):
    """A key that is copied to its place among others."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("keys", torch.zeros(2, 4, 9, 8))

    def forward(self, x: Tensor) -> Tensor:
        query, key = (layer(x).view(2, 6, 4, 8).transpose(1, 2) for layer in (self.query, self.key))
        self.keys.index_copy_(2, torch.arange(2, 8), key)
        return query @ self.keys.mT


def test_keys_that_are_kept() -> None:
    assert joined(compare_without_gradients(Cached().eval(), X)) == [2]


def test_layers_behind_a_joined_one() -> None:
    def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        first, second = F.linear(x, weights[0]), F.linear(x, weights[1])
        return *products(first, *weights[:2]), *products(second, *weights[2:])

    assert joined(compare_without_gradients(function, X, *W)) == [2, 2, 2]


@pytest.mark.parametrize("name", ["_groups", "_emit_parts", "examples_behind"])
def test_a_fault_of_joining_leaves_the_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also one behind the last node that is emitted; and of a second group alone."""
    function, calls = getattr(joining, name), []
    limit = 0 if name == "_groups" else 1

    def fail(*given: Any) -> Any:
        calls.append(name)
        found = function(*given)
        if len(calls) > limit:
            raise KeyError("planted")
        return found

    monkeypatch.setattr(joining, name, fail)
    model, found = nn.Sequential(Attention(), Attention()).eval(), Collector()
    compiled = torch.no_grad()(torch.compile(model, backend=found))
    with pytest.warns(UserWarning, match="cutfuse leaves products of one input"):
        y = compiled(X)
    assert joined(found) == [3] * limit
    assert sum(JOINED in report.reason for report in found.reports) == 3 * limit
    with torch.no_grad():
        torch.testing.assert_close(y, model(X))


def test_the_explanation_names_them() -> None:
    with torch.no_grad():
        text = str(cutfuse.explain_model(Attention().eval(), X))
    assert f"{JOINED}query, key and value" in " ".join(text.split())


def test_elsewhere_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without kernels."""
    monkeypatch.setattr(native, "operators_everywhere", False)
    assert joined(compare_without_gradients(Attention().eval().bfloat16(), X.bfloat16())) == []
