"""The head of a language model: losses, log-probabilities and entropies of rows of logits, beside PyTorch in fp64."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import emulated_device, needs_exchange_api
from generators import saved_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import PYTORCH_WARNINGS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cutfuse
from cutfuse import head
from cutfuse.epilogue.program import arithmetic_dtype

pytestmark = [*PYTORCH_WARNINGS]
IGNORED = -100
KEPT = st.sampled_from([0, 1 << 12, 1 << 20])  # bytes of logits: none, some parts or all


def shaped(logits: Tensor, softcap: float | None, temperature: float) -> Tensor:
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def cross_entropy(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """By PyTorch, with the logits in memory."""
    logits = shaped(F.linear(x, weight, bias), options["softcap"], options["temperature"]).flatten(0, -2)
    smoothing, reduction = options["label_smoothing"], options["reduction"]
    losses = F.cross_entropy(logits, target.flatten(), reduction="none", label_smoothing=smoothing)
    counts = target.flatten() != IGNORED
    losses = torch.where(counts, losses + options["z_loss"] * torch.logsumexp(logits, -1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def logprob(x: Tensor, weight: Tensor, token: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """And the entropy, side by side."""
    found = torch.log_softmax(shaped(F.linear(x, weight, bias), **options), -1)
    chosen = found.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return torch.stack([chosen, -(found.exp() * found).sum(-1)])


def own_logprob(*tensors: Any, **options: Any) -> Tensor:
    pair = cutfuse.linear_logprob(*tensors, entropy=True, **options)
    assert isinstance(pair, tuple)
    return torch.stack(pair)


def gradients(y: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    trained = [t for t in tensors if t is not None and t.requires_grad]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, trained, grad.to(y))]


def compare(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    target: Tensor,
    options: dict[str, Any],
    part_bytes: int,
    kept_bytes: int = 0,
) -> None:
    """Values and gradients beside fp64: within rounding of each type, or what PyTorch's own error is."""
    x, weight, bias = tensors
    assert x is not None
    memory = {"part_bytes": part_bytes, "kept_bytes": kept_bytes}
    found = gradients(function(x, weight, target, bias, **memory, **options), tensors)
    wide = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = gradients(reference(wide[0], wide[1], target, wide[2], **options), wide)
    usual = gradients(reference(x, weight, target, bias, **options), tensors)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[x.dtype]
    # A probability is exp of a logit less the logsumexp, whose own rounding grows with them.
    logits = F.linear(*wide).detach()  # type: ignore[arg-type]
    of_logits = 4 * torch.finfo(arithmetic_dtype(x)).eps * logits.abs().max().item()
    # What is left of a loss, or of 1 less a probability near it, may be smaller than that rounding.
    least = max(1.0, x.abs().max().item()) if of_logits > tolerance else 0.0
    tolerance = max(tolerance, of_logits)
    for own, right, eager in zip(found, exact, usual, strict=True):
        assert own.shape == right.shape
        largest = max(right.abs().max().item(), least)
        allowed = max(tolerance * largest, 2.0 * (eager.double() - right).abs().max().item(), 1e-7)
        assert (own.double() - right).abs().max().item() <= allowed


@st.composite
def heads(draw: st.DrawFn) -> tuple[list[Tensor | None], Tensor, int]:
    """x, weight and bias, a class for each row, and the memory of a part."""
    leading = draw(st.sampled_from([(1,), (7,), (3, 5), (2, 1, 9)]))
    classes, width = draw(st.sampled_from([(5, 16), (301, 24), (640, 3), (1023, 40)]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    # Large logits rounded to 16 bits, as a CPU rounds them, have errors of no bound that a test could know.
    scale = draw(st.sampled_from([0.3, 1.0] if dtype.itemsize == 2 else [0.3, 1.0, 30.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    x = (scale * torch.randn(*leading, width, generator=generator)).to(dtype)
    weight = (torch.randn(classes, width, generator=generator) / math.sqrt(width)).to(dtype)
    if draw(st.booleans()):
        weight = weight.t().contiguous().t()
    bias = torch.randn(classes, generator=generator).to(dtype) if draw(st.booleans()) else None
    tensors = [x, weight, bias]
    for tensor in draw(st.sampled_from([[x, weight], [x], [weight], tensors])):
        if tensor is not None:
            tensor.requires_grad_()
    return tensors, torch.randint(classes, leading, generator=generator), draw(st.sampled_from([1, 1 << 20]))


@settings(max_examples=30, deadline=None)
@given(given_head=heads(), data=st.data())
def test_losses_are_pytorchs(given_head: tuple[list[Tensor | None], Tensor, int], data: st.DataObject) -> None:
    tensors, target, part_bytes = given_head
    options = {
        "softcap": data.draw(st.sampled_from([None, 5.0])),
        "temperature": data.draw(st.sampled_from([1.0, 0.7])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1])),
        "z_loss": data.draw(st.sampled_from([0.0, 1e-3])),
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
    }
    ignored = torch.randperm(target.numel())[: data.draw(st.integers(0, target.numel() - 1))]
    target.flatten()[ignored] = IGNORED
    compare(cutfuse.linear_cross_entropy, cross_entropy, tensors, target, options, part_bytes, data.draw(KEPT))


@settings(max_examples=20, deadline=None)
@given(given_head=heads(), softcap=st.sampled_from([None, 5.0]), temperature=st.sampled_from([1.0, 0.7]), kept=KEPT)
def test_log_probabilities_and_entropies_are_pytorchs(
    given_head: tuple[list[Tensor | None], Tensor, int], softcap: float | None, temperature: float, kept: int
) -> None:
    tensors, token, part_bytes = given_head
    options = {"softcap": softcap, "temperature": temperature}
    compare(own_logprob, logprob, tensors, token, options, part_bytes, kept)


def make(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((6, 16), (300, 16)))
    return x, weight, torch.randint(300, (6,), generator=generator)


def test_no_row_counts() -> None:
    x, weight, target = make()
    none = torch.full_like(target, IGNORED)
    assert cutfuse.linear_cross_entropy(x, weight, none).isnan()
    loss = cutfuse.linear_cross_entropy(x, weight, none, reduction="sum")
    assert loss == 0.0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, [x, weight]))
    assert cutfuse.linear_cross_entropy(x[:0], weight, target[:0]).isnan()
    empty = cutfuse.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert empty == 0.0
    assert not torch.autograd.grad(empty, weight)[0].any()
    kept = cutfuse.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum", kept_bytes=1 << 20)
    assert not torch.autograd.grad(kept, weight)[0].any()


def test_rows_that_do_not_count_are_not_seen() -> None:
    """Their logits may be as large as the type has them."""
    x, weight, target = make()
    target[2] = IGNORED
    wide = x.detach().clone()
    wide[2] *= 1e30
    wide.requires_grad_()
    losses = [cutfuse.linear_cross_entropy(given, weight, target) for given in (x, wide)]
    of_x, of_weight = torch.autograd.grad(losses[0], [x, weight])
    of_wide, again = torch.autograd.grad(losses[1], [wide, weight])
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(of_x, of_wide)
    assert not of_x[2].any()
    torch.testing.assert_close(of_weight, again)


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_an_infinite_logit_gives_nan_in_its_row(part_bytes: int) -> None:
    """In the loss and in the gradients, where a loss scaler looks for it, as in PyTorch."""
    x, weight, target = make()
    with torch.no_grad():
        x[2] = torch.finfo(x.dtype).max
    found = cutfuse.linear_cross_entropy(x, weight, target, reduction="none", part_bytes=part_bytes)
    right = F.cross_entropy(F.linear(x, weight), target, reduction="none")
    assert right.isnan().sum() == 1
    pair = ([y, *torch.autograd.grad(y.sum(), [x, weight])] for y in (found, right))
    torch.testing.assert_close(*pair, equal_nan=True)


@pytest.mark.parametrize("entropy", [False, True])
def test_classes_that_a_bias_of_minus_infinity_rules_out(entropy: bool) -> None:
    x, weight, target = make()
    bias = torch.zeros(300)
    bias[100:] = -math.inf
    target %= 100
    found = cutfuse.linear_logprob(x, weight, target, bias, entropy=entropy)
    y = sum(found) if isinstance(found, tuple) else found
    few = cutfuse.linear_logprob(x, weight[:100], target, entropy=entropy)
    right = sum(few) if isinstance(few, tuple) else few
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x, weight]), torch.autograd.grad(right.sum(), [x, weight]))


def test_memory_is_of_a_part() -> None:
    """Of the logits, and of their gradient."""
    original, seen = head.linear, []

    def linear(x: Tensor, weight: Tensor, *given: Any, **options: Any) -> Tensor:
        seen.append(weight.shape[0])
        return original(x, weight, *given, **options)

    x, weight = torch.randn(70, 8, requires_grad=True), torch.randn(5000, 8, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "linear", linear)
        y = cutfuse.linear_cross_entropy(x, weight, torch.randint(5000, (70,)), part_bytes=4 * 70 * 600)
        assert seen == [512] * 9 + [392]
        seen.clear()
        torch.autograd.grad(y, [x, weight])
    assert sum(size for size in seen if size > 8) == 5000
    assert max(seen) == 512


def test_logits_are_kept_as_far_as_there_is_memory() -> None:
    """Whole parts of them, and only where a backward pass may follow."""
    x, weight, target = make()
    for kept_bytes, trains, kept in ((1 << 20, True, 3), (8000, True, 2), (3071, True, 0), (1 << 20, False, 0)):
        with saved_tensors() as saved, torch.set_grad_enabled(trains):
            y = cutfuse.linear_cross_entropy(x, weight, target, part_bytes=1, kept_bytes=kept_bytes)
        sizes = [tensor.numel() for tensor in saved.values()]
        assert [size for size in sizes if size in (768, 1536, 2304)] == [768 * kept] * (kept > 0)
        assert y.requires_grad == trains


@needs_exchange_api
@pytest.mark.parametrize("classes", [2, 64, 300])
def test_an_entropy_reads_logits_that_are_rounded_as_those_of_the_logsumexp(classes: int) -> None:
    """Rows of large logits: probabilities that do not add up to 1 would give entropies below 0."""
    generator = torch.Generator().manual_seed(0)
    x = (5.0 * torch.randn(256, 64, generator=generator)).bfloat16()
    weight = (0.25 * torch.randn(classes, 64, generator=generator)).bfloat16()
    token = torch.zeros(256, dtype=torch.int64)
    usual, right = (
        logprob(*t, token, None, softcap=None, temperature=1.0) for t in ((x, weight), (x.double(), weight.double()))
    )
    with emulated_device():
        found = own_logprob(x, weight, token)
    assert (found[1] >= -1e-4).all()
    assert (found - right).abs().max() <= 2.0 * (usual - right).abs().max()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "cutfuse"])
def test_it_compiles_without_a_break(backend: str) -> None:
    x, weight, target = make()

    def step(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = cutfuse.linear_logprob(x, weight, target.clamp(min=0), entropy=True)
        assert isinstance(found, tuple)
        loss = cutfuse.linear_cross_entropy(
            torch.tanh(x), weight, target, label_smoothing=0.1, z_loss=1e-3, part_bytes=1, kept_bytes=1 << 12
        )
        return loss + found[0].mean() + found[1].mean()

    target[1] = IGNORED
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for rows in (6, 4):
        given = (x[:rows].detach().requires_grad_(), weight, target[:rows])
        y, right = compiled(*given), step(*given)
        torch.testing.assert_close(y, right)
        torch.testing.assert_close(torch.autograd.grad(y, given[:2]), torch.autograd.grad(right, given[:2]))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # by the checks of PyTorch 2.14
@pytest.mark.parametrize("kept_bytes", [0, 1 << 13])
def test_the_operators_pass_pytorchs_checks(kept_bytes: int) -> None:
    x, weight, target = make()
    bias = torch.randn(300, requires_grad=True)
    given = (x, weight, bias, target, 3.0, 0.5, True, True, 1, kept_bytes, "")
    torch.library.opcheck(head.logit_statistics, given)
    statistics = [t.detach() for t in head.logit_statistics(*given)]
    fixed = [t.detach() for t in (x, weight, bias)]
    assert statistics[-1].shape == ((2, 6 * 128) if kept_bytes else (0, 0))
    grads = [torch.randn_like(t) for t in statistics[:-1]]
    torch.library.opcheck(
        head.logit_gradients, (grads, statistics, *fixed, target, 3.0, 0.5, 1, "", [True, False, True])
    )


@pytest.mark.parametrize(
    ("options", "trained", "products"),
    [
        ({}, "", 1),
        ({}, "x weight", 4),
        ({"kept_bytes": 1 << 20}, "x weight", 3),
        ({"kept_bytes": 1 << 20, "label_smoothing": 0.1, "softcap": 5.0}, "x", 2),
        ({"kept_bytes": 1 << 20}, "", 1),
        ({"label_smoothing": 0.1}, "weight", 3),
        ({"label_smoothing": 0.1, "softcap": 5.0}, "x", 4),
    ],
)
def test_the_counter_of_operations_counts_the_products(options: dict[str, Any], trained: str, products: int) -> None:
    x, weight, target = make()
    x.requires_grad_("x" in trained)
    weight.requires_grad_("weight" in trained)
    with FlopCounterMode(display=False) as counter:
        loss = cutfuse.linear_cross_entropy(x, weight, target, **options)
        if trained:
            loss.backward()
    assert counter.get_total_flops() == products * 2 * 6 * 16 * 300


def test_autocast_checkpoints_and_a_shared_weight() -> None:
    x, weight, target = make()
    expected = F.cross_entropy(F.linear(x, weight), target)
    right = torch.autograd.grad(expected, [x, weight])
    with torch.autocast("cpu", torch.bfloat16):
        loss = cutfuse.linear_cross_entropy(x, weight, target)
    assert loss.dtype == torch.float32
    for own, other in zip(torch.autograd.grad(loss, [x, weight]), right, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0.05, atol=0.01)
    again: Any = checkpoint(cutfuse.linear_cross_entropy, x, weight, target, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, [x, weight]), right)
    tied = F.embedding(target, weight)
    pair = [cutfuse.linear_cross_entropy(tied, weight, target), F.cross_entropy(F.linear(tied, weight), target)]
    torch.testing.assert_close(*(torch.autograd.grad(y, weight, retain_graph=True)[0] for y in pair))


def test_the_module() -> None:
    linear = nn.Linear(16, 300)
    x, _, target = make()
    layer = cutfuse.nn.LinearCrossEntropy.from_linear(linear, label_smoothing=0.1)
    assert layer.weight is linear.weight
    torch.testing.assert_close(layer(x, target), F.cross_entropy(linear(x), target, label_smoothing=0.1))
    assert repr(layer) == "LinearCrossEntropy(in_features=16, out_features=300, bias=True, label_smoothing=0.1)"
    own = cutfuse.nn.LinearCrossEntropy(16, 300, dtype=torch.float64)
    assert own.state_dict().keys() == nn.Linear(16, 300, bias=False).state_dict().keys()
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, target), layer(x, target))
    with pytest.raises(
        TypeError, match=r"LinearCrossEntropy.from_linear: linear has to be an nn\.Linear, got Embedding"
    ):
        cutfuse.nn.LinearCrossEntropy.from_linear(nn.Embedding(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the weight of ParametrizedLinear is computed and no parameter to share"):
        cutfuse.nn.LinearCrossEntropy.from_linear(nn.utils.parametrizations.weight_norm(linear))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "reduction": ("max", ValueError, "reduction has to be .* got 'max'"),
    "label_smoothing": (2.0, ValueError, "label_smoothing has to be from 0 to 1, got 2.0"),
    "label_smoothing's type": ("0", TypeError, "label_smoothing has to be a number, got '0' of type str"),
    "softcap": (0.0, ValueError, "softcap has to be above 0 and finite, got 0.0"),
    "softcap's size": (math.inf, ValueError, "softcap has to be above 0 and finite, got inf"),
    "softcap's type": (True, TypeError, "softcap has to be a number, got True of type bool"),
    "temperature": (-1.0, ValueError, "temperature has to be above 0 and finite, got -1.0"),
    "temperature's type": (torch.ones(()), TypeError, r"temperature has to be a number, got tensor\(1.\) of type"),
    "z_loss": ("1e-4", TypeError, "z_loss has to be a number, got '1e-4' of type str"),
    "ignore_index": (None, TypeError, "ignore_index has to be an integer, got None of type NoneType"),
    "part_bytes": (0, ValueError, "part_bytes has to be above 0 and finite, got 0"),
    "part_bytes's type": (1e9, TypeError, "part_bytes has to be an integer, got 1000000000.0 of type float"),
    "kept_bytes": (-1, ValueError, "kept_bytes has to be 0 or more, got -1"),
    "target": ([1, 2], TypeError, "target has to be a tensor, got list"),
    "target's type": (torch.zeros(6, dtype=torch.int32), TypeError, "classes of int64, got torch.int32$"),
    "target's kind": (torch.rand(6, 300), TypeError, "classes of int64, got torch.float32; probabilities"),
    "target's shape": (torch.zeros(5).long(), ValueError, r"got shapes \(5,\) and \(6, 16\)"),
    "target's class": (torch.full((6,), 300), IndexError, "out of (range|bounds)"),
    "target's sign": (torch.full((6,), -1), IndexError, "out of (range|bounds)"),
    "weight": (torch.zeros(300, 16).half(), TypeError, "of one type, got x torch.float32, weight torch.float16"),
    "weight's shape": (torch.zeros(0, 16), ValueError, r"shape \(0, 16\) has no class"),
    "bias": (torch.zeros(16), ValueError, r"bias has to be \[N\] .* got shapes \(16,\) and \(300, 16\)"),
}


@pytest.mark.parametrize(("name", "case"), WRONG.items(), ids=WRONG)
def test_wrong_calls(name: str, case: tuple[Any, type[Exception], str]) -> None:
    """Of the argument that a case is named for."""
    value, error, message = case
    x, weight, target = make()
    with pytest.raises(error, match=message):
        cutfuse.linear_cross_entropy(**{"x": x, "weight": weight, "target": target, name.partition("'")[0]: value})


@pytest.mark.parametrize("name", ["target", "target's type", "target's shape"])
def test_the_tokens_have_their_own_name_in_messages(name: str) -> None:
    x, weight, _ = make()
    value, error, _ = WRONG[name]
    with pytest.raises(error, match=r"linear_logprob: .*\btoken\b"):
        cutfuse.linear_logprob(x, weight, value)


@pytest.mark.parametrize(
    "called", [cutfuse.linear_cross_entropy, cutfuse.linear_logprob, cutfuse.nn.LinearCrossEntropy(16, 300)]
)
def test_explain_says_which_call_to_ask_about(called: Any) -> None:
    x, weight, target = make()
    with pytest.raises(TypeError, match=r'several calls of cutfuse.linear.*, reduce="logsumexp"'):
        cutfuse.explain(called, x, weight, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bits_are_rounded_alike(dtype: torch.dtype) -> None:
    """On a CPU, as PyTorch rounds them: where a target is nearly certain, loss and gradients are what is left of 1."""
    generator = torch.Generator().manual_seed(5)
    x, weight = ((3.0 * torch.randn(*shape, generator=generator)).to(dtype) for shape in ((64, 16), (300, 16)))
    target = F.linear(x, weight).argmax(-1)
    x.requires_grad_()
    found = cutfuse.linear_cross_entropy(x, weight, target, reduction="none")
    right = F.cross_entropy(F.linear(x, weight).float(), target, reduction="none")
    assert right.median() < 0.01
    torch.testing.assert_close(found, right)
    own, usual = (torch.autograd.grad(y.sum(), x)[0] for y in (found, right))
    torch.testing.assert_close(own, usual, rtol=0.0, atol=4 * torch.finfo(dtype).eps * usual.abs().max().item())


@needs_exchange_api
@pytest.mark.parametrize(("kept_bytes", "kernel"), [(0, "gemm"), (1 << 22, "pointwise")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_an_emulated_gpu_it_is_fused(dtype: torch.dtype, kept_bytes: int, kernel: str) -> None:
    """The products whose epilogue reduces rows, and those that make the gradients, are kernels' launches; of logits
    that were kept, passes are."""
    generator = torch.Generator().manual_seed(3)
    x, weight = ((torch.randn(*shape, generator=generator) / 16).to(dtype) for shape in ((256, 256), (2048, 256)))
    target = torch.randint(2048, (256,), generator=generator)
    tensors = [x.requires_grad_(), weight.requires_grad_(), None]
    options: dict[str, Any] = {"softcap": None, "temperature": 1.0, "label_smoothing": 0.0, "z_loss": 0.0}
    with emulated_device() as launches:
        summed = {**options, "reduction": "sum"}
        compare(cutfuse.linear_cross_entropy, cross_entropy, tensors, target, summed, 1 << 19, kept_bytes)
    assert any(name.startswith(kernel) for name in launches.names)


def test_targets_of_a_part_that_is_planned_otherwise_are_rounded_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, target = make(torch.bfloat16)
    target[::2] = torch.tensor([256, 280, 299])  # of the last part, which has 44 classes
    exact = (x.double() * weight.double()[target]).sum(-1).float()
    monkeypatch.setattr(head, "_rounds_logits", lambda x, part, *_: part.weight.shape[0] < 128)
    _, chosen, *_ = head.logit_statistics(x, weight, None, target, 0.0, 1.0, False, False, 1, 0, "")
    is_last = target >= 256
    assert torch.equal(chosen[is_last], exact[is_last].bfloat16().float())
    torch.testing.assert_close(chosen[~is_last], exact[~is_last], rtol=1e-6, atol=1e-6)
