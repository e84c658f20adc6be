"""Products of one x with several weights, which one kernel computes: which are joined, and that models stay right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare, draw
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cutfuse
from cutfuse import native
from cutfuse.compile import attention, joining
from cutfuse.layer import schema

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("everything_fuses")]

JOINED = "one kernel multiplies its input by the weights of "


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


def test_inductor_runs_them_and_the_explanation_names_them() -> None:
    model = Attention().eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="cutfuse")(X), model(X))
        text = str(cutfuse.explain_model(model, X))
    assert f"{JOINED}query, key and value" in " ".join(text.split())


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


def written_x(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    first = halves(F.linear(x, w))
    x.mul_(2)
    return first, halves(F.linear(x, v))


def computed_weight(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    first = halves(F.linear(x, w))
    return first, halves(F.linear(x, v * first.sum()))


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


dense.register_fake(torch.empty_like)


def unlike(first: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Of two products, of which something is made of the first one that its columns of a wider matrix do not give."""
    return lambda x, w, v, *given: (first(F.linear(x, w), *given), halves(F.linear(x, v)))


# What stays as it is: something has its place between the products, or somebody would notice the layout.
APART: dict[str, Callable[..., Any]] = {
    "a weight by columns": lambda x, w, v: (halves(F.linear(x, w)), halves(x @ v.t())),
    "x is written": written_x,
    "a weight is computed": computed_weight,
    "returned": lambda x, w, v: (F.linear(x, w), F.linear(x, v)),
    "returned in part": unlike(lambda rows: rows[0, 0]),
    "viewed flat": unlike(lambda rows: rows.view(-1).sin()),
    "transposed for the caller": unlike(lambda rows: rows.transpose(0, 1)),
    "strided": unlike(lambda rows: rows.as_strided((2, 5, 2, 32), (192, 32, 32, 1)).sin()),
    "written": written,
    "written by halves": written_by_halves,
    "given to an operator of another library": unlike(lambda rows: dense(rows.unflatten(-1, (2, -1)))),
}


@pytest.mark.parametrize("name", APART)
def test_what_somebody_would_notice_is_not_joined(name: str) -> None:
    assert joined(compare_without_gradients(APART[name], X.clone(), W[0], W[1])) == []


def test_nothing_that_is_trained_is_joined() -> None:
    found = compare(Attention(), (X,))
    assert joined(found) == []
    assert found.reports


@pytest.mark.parametrize(
    "first",
    [
        lambda rows, counts: rows.nonzero().sum(),
        lambda rows, counts: torch.repeat_interleave(rows, counts, dim=1).sin(),
    ],
    ids=["nonzero", "repeat_interleave"],
)
def test_results_whose_size_is_not_known_are_not_computed_twice(first: Callable[..., Any]) -> None:
    """Their size is a symbol without a value, and evaluating a node again would make another one."""
    counts = torch.tensor([1, 2, 0, 1, 1, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert joined(compare_without_gradients(unlike(first), X, W[0], W[1], counts)) == []


@pytest.mark.parametrize("rows", [(3, 1), (1, 3, 1), (3, 1, 1)], ids=str)
def test_views_across_dimensions_of_one_row(rows: tuple[int, ...]) -> None:
    """PyTorch's examples have a flat view of rows that lie apart, which no tensor has."""
    assert joined(compare_without_gradients(APART["viewed flat"], draw(*rows, 32), W[0], W[1])) == []


@pytest.mark.parametrize("own", [Tensor.clone, Tensor.double, lambda rows: rows.softmax(-1)])
def test_a_result_of_one_row_has_its_own_strides(own: Callable[[Tensor], Tensor]) -> None:
    """A copy keeps those of a dimension of one, which of a column of the joined matrix are the matrix's.

    Inductor makes the copies: the examples of PyTorch 2.8 and 2.9 are not what a clone that runs alone gives.
    """
    function, inputs = unlike(own), (draw(1, 32), W[0], W[1])
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


def test_keys_that_are_kept() -> None:
    """A key that is copied to its place among others."""

    def function(x: Tensor, w: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        query, key = (F.linear(x, weight).view(2, 6, 4, 8).transpose(1, 2) for weight in (w, v))
        keys.index_copy_(2, torch.arange(2, 8), key)
        return query @ keys.mT

    assert joined(compare_without_gradients(function, X, W[0], W[1], torch.zeros(2, 4, 9, 8))) == [2]


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


def test_elsewhere_nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without kernels."""
    monkeypatch.setattr(native, "operators_everywhere", False)
    assert joined(compare_without_gradients(Attention().eval().bfloat16(), X.bfloat16())) == []


# Attention of compiled models: it runs as in eager code, which passes no mask and repeats no heads where it can.


BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


def qkv(heads: int = HEADS, rows: int = LENGTH) -> list[Tensor]:
    return [draw(BATCH, HEADS, rows, WIDTH), *(draw(BATCH, heads, LENGTH, WIDTH) for _ in range(2))]


def attention_of(found: Collector) -> dict[str, Any]:
    """The arguments of the attention in the graphs."""
    nodes = [node for graph in found.graphs for node in graph.graph.nodes]
    (node,) = (node for node in nodes if node.target is F.scaled_dot_product_attention)
    return attention.named_arguments(node, attention._PARAMETERS)


def masking(found: Collector) -> str:
    """What the attention of a graph hides: nothing, what "is_causal" does, or what a mask says."""
    given = attention_of(found)
    if given.get("attn_mask") is not None:
        return "mask"
    return "causal" if given.get("is_causal") else "nothing"


def attend(
    mask: Callable[[Tensor], Tensor | None] = lambda q: None,
    repeating: Callable[[Tensor], Tensor] = lambda rows: rows,
    **options: Any,
) -> Callable[..., Tensor]:
    """Attention behind functions that make its mask and repeat heads, with what models do with the result."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, repeating(k), repeating(v), attn_mask=mask(q), **options)
        return found.transpose(1, 2).reshape(*q.shape[::2], -1)

    return model


def indices(q: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries and keys, as rows and columns of a mask of four dimensions."""
    place = torch.arange(q.shape[-2], device=q.device) + 0
    return place[None, None, :, None], place[None, None, None, :]


def of_rows(q: Tensor) -> Tensor:
    return (indices(q)[0] >= 0).expand(q.shape[0], -1, q.shape[-2], q.shape[-2])


def of_packed_rows(q: Tensor) -> Tensor:
    """Causal, within sequences that are one behind another in a row; here each row has one."""
    rows, columns = indices(q)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    places = torch.arange(q.shape[-2]).unsqueeze(0).expand(q.shape[0], -1)
    sequence = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    seen = rows.new_ones((), dtype=torch.bool) & (places[batch, columns] <= places[batch, rows]).to(q.device)
    return seen & (sequence[batch, rows] == sequence[batch, columns])


def full(q: Tensor, value: float) -> Tensor:
    return torch.full((q.shape[-2], q.shape[-2]), value, device=q.device)


MASKS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "rows": ("nothing", of_rows),
    "ones": ("nothing", lambda q: torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)),
    "ones of two dimensions less": ("nothing", lambda q: q.new_ones((1, q.shape[-2]), dtype=torch.bool)),
    "zeros to add": ("nothing", lambda q: torch.zeros_like(q[..., :1])),
    "padding of ones": ("nothing", lambda q: (1 - torch.ones(q.shape[0], q.shape[-2]))[:, None, None] * -10000.0),
    "columns and rows": ("causal", lambda q: indices(q)[1] <= indices(q)[0]),
    "packed rows": ("causal", of_packed_rows),
    "tril": ("causal", lambda q: full(q, 1).tril().bool()),
    "triu of minus infinity": ("causal", lambda q: full(q, -math.inf).triu(1)),
    "masked_fill": ("causal", lambda q: full(q, 0.0).masked_fill(full(q, 1).triu(diagonal=1) == 1, -math.inf)),
    "of a transformer": ("causal", lambda q: nn.Transformer.generate_square_subsequent_mask(q.shape[-2])),
    "a wide window": ("causal", lambda q: (indices(q)[1] <= indices(q)[0]) & (indices(q)[0] - indices(q)[1] < 64)),
    "a window": ("mask", lambda q: (indices(q)[1] <= indices(q)[0]) & (indices(q)[0] - indices(q)[1] < 3)),
    "upside down": ("mask", lambda q: indices(q)[1] >= indices(q)[0]),
    "a large number": ("mask", lambda q: full(q, -1e4).triu(1)),
    "a bias": ("mask", lambda q: -(indices(q)[0] - indices(q)[1]).abs().float()),
    "data": ("mask", lambda q: q[:, :, :1, :1] < 1e9),
    "random": ("mask", lambda q: torch.rand(LENGTH, LENGTH) >= 0),
    "another value each time": ("mask", lambda q: torch.empty(LENGTH, LENGTH, dtype=torch.uint8) >= 0),
}


@pytest.mark.parametrize(("hidden", "mask"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_mask_is_passed_only_where_it_has_to_be(hidden: str, mask: Callable[..., Tensor], is_trained: bool) -> None:
    found = compare(attend(mask), [tensor.requires_grad_(is_trained) for tensor in qkv()], fullgraph=True)
    assert masking(found) == hidden


def test_the_nodes_that_made_a_mask_go_with_it() -> None:
    found = compare(attend(of_packed_rows), qkv(), fullgraph=True)
    (graph,) = found.graphs
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [F.scaled_dot_product_attention]


@pytest.mark.parametrize("write", [lambda mask: mask.tril_(), lambda mask: mask[:, 3:].zero_()])
@pytest.mark.parametrize("is_before", [False, True])
def test_a_mask_that_is_written_to_is_passed(write: Callable[[Tensor], Tensor], is_before: bool) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        view = mask[:, :]
        if is_before:
            write(mask)
        found = F.scaled_dot_product_attention(q, k, v, view)
        if not is_before:
            write(mask)
        return found + mask.sum()

    assert masking(compare(model, qkv(), fullgraph=True)) == "mask"


class Write(torch.autograd.Function):
    """Writes to its first argument, and doubles the second."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        mask[:, 3:] = -1.0
        ctx.mark_dirty(mask)
        return mask, q * 2

    @staticmethod
    def backward(ctx: Any, mask: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return mask, q * 2


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_a_mask_that_an_inner_graph_writes_to_is_passed(is_checkpoint: bool) -> None:
    def write(mask: Tensor, q: Tensor) -> Tensor:
        mask[:, 3:] = -1.0
        return q * 2

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        seen = mask[:, :]
        q = checkpoint(write, mask, q, use_reentrant=False) if is_checkpoint else Write.apply(mask, q)[1]
        return F.scaled_dot_product_attention(q, k, v, seen)

    given = [tensor.requires_grad_() for tensor in qkv()]
    assert masking(compare(model, given, fullgraph=True)) == "mask"


def test_a_mask_of_an_autocast_of_the_graph_is_passed() -> None:
    """Autocast is not on where the graph is rewritten, and the result would have another type."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(MASKS["tril"][1])(q, k, v)

    found = compare(model, qkv(), fullgraph=True)
    assert masking(found) == "mask"
    (graph,) = found.graphs
    (node,) = (node for node in graph.graph.nodes if node.target is F.scaled_dot_product_attention)
    assert node.meta["example_value"].dtype == torch.bfloat16


def test_a_causal_mask_of_other_queries_than_keys_is_passed() -> None:
    """`is_causal` aligns them at the first key, and flash attention does not compute it."""
    lower = attend(lambda q: torch.ones(q.shape[-2], LENGTH, dtype=torch.bool).tril())
    assert masking(compare(lower, qkv(rows=3), fullgraph=True)) == "mask"
    full = attend(lambda q: torch.ones(q.shape[-2], LENGTH, dtype=torch.bool))
    assert masking(compare(full, qkv(rows=3), fullgraph=True)) == "nothing"


def test_a_mask_of_a_size_that_varies() -> None:
    """The batch may; a mask of a length that is a symbol has no values."""
    for dim, hidden in ((0, "nothing"), (2, "mask")):
        symbols = [(place, dim) for place in range(3)]
        assert masking(compare(attend(of_rows), qkv(), symbols, fullgraph=True, dynamic=dim == 2)) == hidden


def test_a_mask_too_large_to_compute_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MOST_ELEMENTS", LENGTH * LENGTH - 1)
    assert masking(compare(attend(MASKS["tril"][1]), qkv(), fullgraph=True)) == "mask"


def test_other_strides_of_the_result() -> None:
    """PyTorch decomposes attention on a CPU for a mask of three dimensions, and lays its result out by heads."""

    def mask(q: Tensor) -> Tensor:
        return (torch.arange(LENGTH)[None, :, None] >= 0).expand(1, LENGTH, LENGTH)

    given = [draw(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2) for _ in range(3)]
    assert masking(compare(attend(mask), given, fullgraph=True)) == "nothing"
    seen = compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask(q)), given, fullgraph=True)
    assert masking(seen) == "mask"


class Encoder(nn.Module):
    """A block whose layers fuse, around attention with a mask that the model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inward, self.outward = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inward(self.norm(x)).chunk(3, -1))
        return x + self.outward(attend(of_rows)(q, k, v))


@pytest.mark.parametrize("is_trained", [False, True])
def test_layers_around_fuse(is_trained: bool) -> None:
    found = compare(Encoder().requires_grad_(is_trained), [draw(2, LENGTH, 32)], fullgraph=True)
    assert masking(found) == "nothing"
    assert any(report.is_fused for report in found.reports)


# Heads that share keys and values


def repeat(rows: Tensor, times: int = 2) -> Tensor:
    batch, heads, length, width = rows.shape
    return rows[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def twice(rows: Tensor) -> Tensor:
    """Of `[batch, heads, 1, length, width]`."""
    return rows.expand(-1, -1, 2, -1, -1).flatten(1, 2)


def unsqueezed(rows: Tensor) -> Tensor:
    return twice(rows.unsqueeze(2))


def heads_of(found: Collector) -> tuple[int, int]:
    """How many heads the queries and the keys of the attention have."""
    given = attention_of(found)
    query, key = (given[name].meta["example_value"] for name in ("query", "key"))
    return query.shape[1], key.shape[1]


@pytest.mark.parametrize("repeating", [repeat, unsqueezed])
@pytest.mark.parametrize("is_trained", [False, True])
def test_one_query_of_heads_that_share_keys(repeating: Callable[..., Tensor], is_trained: bool) -> None:
    given = [tensor.requires_grad_(is_trained) for tensor in qkv(HEADS // 2, rows=1)]
    mask = torch.arange(LENGTH)[None, None, None, :] < 4
    for options in ({}, {"mask": lambda q: mask}, {"mask": lambda q: mask[0, 0]}, {"scale": 0.5, "dropout_p": 0.0}):
        assert heads_of(compare(attend(repeating=repeating, **options), given, fullgraph=True)) == (2, 2)


def test_one_query_of_a_static_cache() -> None:
    """Each step writes its keys and values to the cache, before the attention of its layer."""

    def model(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        for cache in (k, v):
            cache.index_copy_(2, place, q[:, ::2])
        mask = torch.arange(LENGTH)[None, None, None, :] <= place
        return attend(lambda q: mask, repeat)(q, k, v)

    assert heads_of(compare(model, [*qkv(HEADS // 2, rows=1), torch.tensor([3])], fullgraph=True)) == (2, 2)


MASK_OF_HEADS = draw(1, HEADS, 1, LENGTH)
REPEATED: dict[str, Callable[..., Tensor]] = {
    "a mask of each head": attend(lambda q: MASK_OF_HEADS, repeat),
    "causal": attend(repeating=repeat, is_causal=True),
    "heads in another order": attend(repeating=lambda rows: rows.repeat(1, 2, 1, 1)),
    "an index of data": attend(repeating=lambda rows: twice(rows[:, torch.tensor([1, 0]), None])),
    "a tuple": attend(repeating=lambda rows: twice(rows[:, (1, 0), None])),
    "a range": attend(repeating=lambda rows: rows[:, range(1, -1, -1), None].expand(-1, -1, 2, -1, -1).flatten(1, 2)),
    "a list": attend(
        repeating=lambda rows: rows[:, :, [3, 2, 1, 0, 5, 4]][:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2)
    ),
    "written between": lambda q, k, v: (
        F.scaled_dot_product_attention(q, (repeated := repeat(k)), repeat(v.add_(repeated.sum()))) + k.add_(1).sum()
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_keys_that_stay_repeated(name: str) -> None:
    assert heads_of(compare(REPEATED[name], qkv(HEADS // 2, rows=1))) == (HEADS, HEADS)


@pytest.mark.parametrize("is_trained", [False, True])
def test_keys_that_are_written_before_the_backward_pass_stay_repeated(is_trained: bool) -> None:
    """Attention keeps its keys and values for the backward pass, and those that are repeated are copies."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = attend(repeating=repeat)(q, k, v)
        for cache in (k, v):
            cache.mul_(2.0)
        return found

    q, k, v = qkv(HEADS // 2, rows=1)
    found = compare(model, [q.requires_grad_(is_trained), k, v], fullgraph=True)
    assert heads_of(found) == ((HEADS, HEADS) if is_trained else (2, 2))


@pytest.mark.parametrize(
    "model",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :1], repeat(k), repeat(v)),
        lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(torch.cat([v, v], 1), 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q, F.scaled_dot_product_attention(q, repeat(k), repeat(v)), q),
    ],
    ids=["one head of queries", "other heads of values", "of keys that are attention"],
)
def test_heads_that_are_not_shared_alike(model: Callable[..., Tensor]) -> None:
    compare(model, qkv(HEADS // 2, rows=1), fullgraph=True)


def test_flash_attention_takes_shared_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it computes several queries without a mask, on a CUDA device."""
    given = [tensor.requires_grad_() for tensor in qkv(HEADS // 2)]
    mask = torch.ones(LENGTH, LENGTH).tril() == 1  # from outside, so that it has no values
    for is_taken in (True, False):
        monkeypatch.setattr(attention, "_takes_shared_heads", lambda *_, is_taken=is_taken: is_taken)
        causal = compare(attend(repeating=repeat, is_causal=True), given, fullgraph=True)
        assert heads_of(causal) == (HEADS, 2 if is_taken else HEADS)
        assert heads_of(compare(attend(lambda q: mask, repeat), given, fullgraph=True)) == (HEADS, HEADS)


def test_kernels_that_the_model_chooses_get_the_heads_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be others than flash attention, which take no shared heads."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(repeating=repeat)(q, k, v)

    monkeypatch.setattr(attention, "_takes_shared_heads", lambda *_: True)
    assert heads_of(compare(model, qkv(HEADS // 2), fullgraph=True)) == (HEADS, HEADS)
