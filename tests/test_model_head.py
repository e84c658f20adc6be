"""Heads of compiled models in training: found in models as they are, right beside fp64, and without the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, calls, compiled_step, step
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

import cutfuse
from cutfuse.compile.fusion import fuse
from cutfuse.compile.products import softcap_of
from cutfuse.epilogue import Program

pytestmark = [*PYTORCH_WARNINGS]

BATCH, LENGTH, WIDTH, CLASSES = 3, 7, 16, 300
LABELS = torch.randint(CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(7))
LABELS[1, 2:5] = -100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def wide_and_flat(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    logits = (x @ w.t()).to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits.view(-1, CLASSES), LABELS.view(-1), reduction="sum") / 17


def shifted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].contiguous().view(-1))


def last_rows(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b)[:, -1], LABELS[:, -1])


def padded(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    labels = F.pad(LABELS, (0, 1), value=-1)[..., 1:].clamp(min=-1)
    return F.cross_entropy(F.linear(x, w).reshape(-1, CLASSES), labels.reshape(-1), ignore_index=-1)


def smoothed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, b).flatten(0, -2), LABELS.flatten(), label_smoothing=0.1)


def capped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    logits = torch.tanh(F.linear(x, w) / 3.0) * 3.0
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


def capped_and_cooled(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    logits = 2.0 * torch.tanh(0.5 * F.linear(x, w, b).flatten(0, 1)) / 0.7
    return F.cross_entropy(logits, LABELS.flatten(), label_smoothing=0.2, reduction="none")


LOSSES = (wide_and_flat, shifted, last_rows, padded, smoothed, capped, capped_and_cooled)


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (BATCH, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,)
    x, w, b = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return x, w, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_and_gradients(everything_fuses: None, loss: Loss, dtype: torch.dtype) -> None:
    tensors = draw(dtype)
    exact = step(loss, tuple(t.detach().double().requires_grad_() for t in tensors))
    usual = step(loss, tensors)
    found, graphs = compiled_step(loss, tensors)
    assert [name for graph in graphs for name in calls(graph) if "logit_" in name] == [
        "cutfuse.logit_statistics.default",
        "cutfuse.logit_gradients.default",
    ]
    for own, eager, right in zip(found, usual, exact, strict=True):
        assert (own is None) == (right is None)
        if own is not None and right is not None and eager is not None:
            assert own.dtype == eager.dtype
            allowed = max(2 * (eager - right).abs().max().item(), 4 * torch.finfo(dtype).eps * right.abs().max().item())
            assert (own - right).abs().max().item() <= allowed


@pytest.mark.parametrize("loss", [shifted, capped], ids=lambda loss: loss.__name__)
def test_logits_are_kept_once_and_in_16_bits(everything_fuses: None, loss: Loss) -> None:
    """The forward graph returns them and the backward graph takes them; their gradient is in parts, in the operator."""
    _, graphs = compiled_step(loss, draw(torch.bfloat16))
    values = [[node.meta["val"] for node in graph.nodes if "val" in node.meta] for graph in graphs]
    large = [[v for v in found if isinstance(v, Tensor) and v.numel() > CLASSES * WIDTH] for found in values]
    assert [len(found) for found in large] == [1, 1]
    assert all(found[0].dtype == torch.bfloat16 for found in large)


def test_logits_that_are_read_elsewhere_are_kept(everything_fuses: None) -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, w, b)
        return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), LABELS[:, 1:].reshape(-1)), logits.argmax(-1)

    (product,) = cutfuse.explain_model(loss, *draw(torch.float32)).products
    assert not product.is_fused
    assert product.ended_at == "cross_entropy"


class TiedModel(nn.Module):
    """A head tied to the embedding, under autocast, with lengths that change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head(self.embedding(words).tanh())
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def test_tied_weights_autocast_and_lengths_that_change(everything_fuses: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TiedModel()
    found: list[bool] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        found.extend(report.is_fused for report in fuse(module))
        return aot_eager(module, inputs)

    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (5, 9, 12):
        words = torch.randint(CLASSES, (2, length))
        own, usual = compiled(words), model(words)
        torch.testing.assert_close(own, usual, rtol=1e-2, atol=1e-2)
        gradients = [torch.autograd.grad(y, model.head.weight)[0] for y in (own, usual)]
        assert torch.norm(gradients[0] - gradients[1]) < 2e-2 * torch.norm(gradients[1])
    assert found
    assert all(found)


@pytest.mark.parametrize(
    ("rows", "reason"), [(8192, ""), (64, "the logits take 16 MB, and in parts of them up to 268")]
)
def test_small_logits_are_left_to_the_compiler(h200: None, rows: int, reason: str) -> None:
    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), target)

    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, 4096), (128256, 4096)))
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    (product,) = cutfuse.explain_model(loss, x, nn.Parameter(weight), target).products
    assert product.is_fused == (not reason)
    assert reason in product.reason


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("operands=0", (0.0, 1.0)),
        ("operands=0; mul 4.0 z; div prev 2.0", (0.0, 0.5)),
        ("operands=0; div z 8.0; tanh prev; mul 8.0 prev", (8.0, 1.0)),
        ("operands=0; tanh z; mul prev 4.0; div prev 2.0", (1.0, 0.5)),
        ("operands=0; mul z -1.0", None),
        ("operands=0; div 2.0 z", None),
        ("operands=0; tanh z; tanh prev", None),
        ("operands=0; tanh z; mul prev z", None),
        ("operands=1; mul z r0", None),
    ],
)
def test_softcaps_are_recognised(program: str, expected: tuple[float, float] | None) -> None:
    assert softcap_of(Program.parse(program)) == expected
