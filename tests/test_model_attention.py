"""Attention of compiled models: it runs as in eager code, which passes no mask and repeats no heads where it can."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from cutfuse.compile import attention

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("everything_fuses")]

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def qkv(heads: int = HEADS, rows: int = LENGTH) -> list[Tensor]:
    return [draw(BATCH, HEADS, rows, WIDTH), *(draw(BATCH, heads, LENGTH, WIDTH) for _ in range(2))]


def attentions(found: Collector) -> list[dict[str, Any]]:
    """The arguments of each attention in the graphs."""
    nodes = [node for graph in found.graphs for node in graph.graph.nodes]
    return [
        attention.named_arguments(node, attention._PARAMETERS)
        for node in nodes
        if node.target is F.scaled_dot_product_attention
    ]


def masking(found: Collector) -> str:
    """What the attention of a graph hides: nothing, what "is_causal" does, or what a mask says."""
    (given,) = attentions(found)
    if given.get("attn_mask") is not None:
        return "mask"
    return "causal" if given.get("is_causal") else "nothing"


def attend(mask: Callable[[Tensor], Tensor], **options: Any) -> Callable[..., Tensor]:
    """Attention behind a function that makes its mask, with what models do with the result."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q), **options)
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
        given = qkv()
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, dim)
        found = Collector()
        compiled = torch.compile(attend(of_rows), backend=found, fullgraph=True, dynamic=dim == 2)
        torch.testing.assert_close(compiled(*given), attend(of_rows)(*given))
        assert masking(found) == hidden
        torch._dynamo.reset()


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


def test_random_masks() -> None:
    """Of comparisons of indices: no mask is passed where its values hide nothing or are causal, and only there."""
    chance = random.Random(0)
    comparisons = [torch.le, torch.ge, torch.lt, torch.ne]
    seen = set()
    for turn in range(24):
        rows = chance.randint(2, 4)
        columns = rows if turn % 2 else chance.randint(2, 4)
        terms = [
            (chance.choice(comparisons), chance.randint(-1, 1) * 4, chance.choice([0, 1]), chance.choice([0, 1]))
            for _ in range(chance.randint(0, 2))
        ]
        if turn % 4 == 1:
            terms.append((torch.le, 0, 1, 1))

        def mask(q: Tensor, rows: int = rows, columns: int = columns, terms: list[Any] = terms) -> Tensor:
            down, right = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
            found = torch.ones(rows, columns, dtype=torch.bool)
            for compare_, shift, times_down, times_right in terms:
                found = found & compare_(right * times_right + shift, down * times_down)
            return found

        values = mask(draw(1))
        if not values.any(-1).all():  # a query that sees no key has no answer that all kernels share
            continue
        is_causal = rows == columns and torch.equal(values, torch.ones_like(values).tril())
        given = [draw(1, 2, rows, WIDTH), draw(1, 2, columns, WIDTH), draw(1, 2, columns, WIDTH)]
        found = masking(compare(attend(mask), given, fullgraph=True))
        assert found == ("nothing" if values.all() else "causal" if is_causal else "mask")
        seen.add(found)
    assert seen == {"nothing", "causal", "mask"}


# Heads that share keys and values


def repeat(rows: Tensor, times: int = 2) -> Tensor:
    batch, heads, length, width = rows.shape
    return rows[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def unsqueezed(rows: Tensor) -> Tensor:
    return rows.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)


def shared_attention(repeating: Callable[[Tensor], Tensor] = repeat, **options: Any) -> Callable[..., Tensor]:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, repeating(k), repeating(v), **options)
        return found.transpose(1, 2).reshape(*q.shape[::2], -1)

    return model


def heads_of(found: Collector) -> tuple[int, int]:
    """How many heads the queries and the keys of the attention have."""
    (given,) = attentions(found)
    query, key = (given[name].meta["example_value"] for name in ("query", "key"))
    return query.shape[1], key.shape[1]


@pytest.mark.parametrize("repeating", [repeat, unsqueezed])
@pytest.mark.parametrize("is_trained", [False, True])
def test_one_query_of_heads_that_share_keys(repeating: Callable[..., Tensor], is_trained: bool) -> None:
    given = [tensor.requires_grad_(is_trained) for tensor in qkv(HEADS // 2, rows=1)]
    mask = torch.arange(LENGTH)[None, None, None, :] < 4
    for options in ({}, {"attn_mask": mask}, {"attn_mask": mask[0, 0]}, {"scale": 0.5, "dropout_p": 0.0}):
        assert heads_of(compare(shared_attention(repeating, **options), given, fullgraph=True)) == (2, 2)


def test_one_query_of_a_static_cache() -> None:
    """Each step writes its keys and values to the cache, before the attention of its layer."""

    def model(q: Tensor, k: Tensor, v: Tensor, place: Tensor) -> Tensor:
        for cache in (k, v):
            cache.index_copy_(2, place, q[:, ::2])
        mask = torch.arange(LENGTH)[None, None, None, :] <= place
        return shared_attention(attn_mask=mask)(q, k, v)

    assert heads_of(compare(model, [*qkv(HEADS // 2, rows=1), torch.tensor([3])], fullgraph=True)) == (2, 2)


@pytest.mark.parametrize(
    "model",
    [
        shared_attention(attn_mask=draw(1, HEADS, 1, LENGTH)),
        shared_attention(is_causal=True),
        shared_attention(lambda rows: rows.repeat(1, 2, 1, 1)),
        shared_attention(lambda rows: rows[:, torch.tensor([1, 0]), None].expand(-1, -1, 2, -1, -1).flatten(1, 2)),
        shared_attention(lambda rows: rows[:, (1, 0), None].expand(-1, -1, 2, -1, -1).flatten(1, 2)),
        shared_attention(lambda rows: rows[:, range(1, -1, -1), None].expand(-1, -1, 2, -1, -1).flatten(1, 2)),
        shared_attention(lambda rows: rows[:, :, [3, 2, 1, 0, 5, 4]][:, :, None].repeat(1, 1, 2, 1, 1).flatten(1, 2)),
        lambda q, k, v: (
            F.scaled_dot_product_attention(q, (twice := repeat(k)), repeat(v.add_(twice.sum()))) + k.add_(1).sum()
        ),
    ],
    ids=[
        "a mask of each head",
        "causal",
        "heads in another order",
        "an index of data",
        "a tuple",
        "a range",
        "a list",
        "written between",
    ],
)
def test_keys_that_stay_repeated(model: Callable[..., Tensor]) -> None:
    assert heads_of(compare(model, qkv(HEADS // 2, rows=1))) == (HEADS, HEADS)


@pytest.mark.parametrize("is_trained", [False, True])
def test_keys_that_are_written_before_the_backward_pass_stay_repeated(is_trained: bool) -> None:
    """Attention keeps its keys and values for the backward pass, and those that are repeated are copies."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = shared_attention()(q, k, v)
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
    causal = shared_attention(attn_mask=torch.ones(LENGTH, LENGTH).tril() == 1)
    for is_taken in (True, False):
        monkeypatch.setattr(attention, "_takes_shared_heads", lambda *_, is_taken=is_taken: is_taken)
        assert heads_of(compare(shared_attention(is_causal=True), given, fullgraph=True)) == (
            HEADS,
            2 if is_taken else HEADS,
        )
        assert heads_of(compare(causal, given, fullgraph=True)) == (HEADS, HEADS)  # a mask from outside has no values


def test_kernels_that_the_model_chooses_get_the_heads_that_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be others than flash attention, which take no shared heads."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return shared_attention()(q, k, v)

    monkeypatch.setattr(attention, "_takes_shared_heads", lambda *_: True)
    assert heads_of(compare(model, qkv(HEADS // 2), fullgraph=True)) == (HEADS, HEADS)
