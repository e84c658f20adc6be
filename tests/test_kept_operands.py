"""A trained layer keeps no operand that is only added, as PyTorch: it may be written to after the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from emulated_device import direct_calls, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from test_training_pre_activation import one_kernel as one_kernel
from test_training_products import Layer, assert_near, fused, plain
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutfuse

M, N, K = 37, 24, 16


def added(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) + r


def added_before_a_factor(z: Tensor, r: Tensor, s: Tensor) -> Tensor:
    return 2 * r - F.silu(z) * s


def added_behind_a_factor(z: Tensor, s: Tensor, r: Tensor) -> Tensor:
    return F.silu(z) * s + r / 3


# The epilogue, the shapes of its operands, and which of them is only added.
CHAINS: dict[str, tuple[Layer, list[tuple[int, ...]], int]] = {
    "a matrix": (added, [(M, N)], 0),
    "a row": (added, [(N,)], 0),
    "a column": (added, [(M, 1)], 0),
    "before a factor": (added_before_a_factor, [(M, N), (M, N)], 0),
    "behind a factor": (added_behind_a_factor, [(1, N), (M, N)], 1),
}


@pytest.fixture(params=["one kernel", "two kernels", "general"])
def path(request: pytest.FixtureRequest, launches: EmulatedLaunches) -> Iterator[str]:
    """How the layer runs: the later calls directly but on the general path."""
    if request.param == "one kernel":
        request.getfixturevalue("one_kernel")
    with paused() if request.param == "general" else contextlib.nullcontext():
        yield request.param


def tensors_of(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = [torch.randn(M, K), torch.randn(N, K) * K**-0.5, torch.randn(N), *(torch.randn(shape) for shape in shapes)]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def step(layer: Layer, tensors: list[Tensor], writes: int | None = None) -> list[Tensor]:
    """The gradients; between the passes the operand `writes` is overwritten."""
    given = list(tensors)
    if writes is not None:
        given[3 + writes] = tensors[3 + writes] * 1  # no leaf, which autograd would not let be written
    y = layer(*given)
    if writes is not None:
        with torch.no_grad():
            given[3 + writes].fill_(torch.nan)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return list(torch.autograd.grad(y, tensors, grad))


@pytest.mark.parametrize("name", CHAINS)
def test_it_may_be_written_before_the_backward_pass(name: str, path: str) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = tensors_of(shapes)
    expected = step(plain(epilogue), tensors)
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    before = direct_calls()
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    assert direct_calls() == before + (path != "general")


@pytest.mark.parametrize("name", ["a matrix", "before a factor"])
def test_the_kernel_is_given_nothing_of_it(name: str, launches: EmulatedLaunches) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = tensors_of(shapes)
    step(fused(epilogue), tensors)
    launches.launches.clear()
    step(fused(epilogue), tensors)
    (backward,) = [launch for launch in launches.launches if launch.function == "pointwise_backward"]
    addresses = [operand[0] for operand in backward.operands]
    assert addresses[k] == backward.x[0]
    assert addresses[k + 1 :] == [tensor.data_ptr() for tensor in tensors[3 + k + 1 :]]


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_kept_is_what_a_checkpoint_finds_again(name: str, path: str) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = tensors_of(shapes)
    expected = step(plain(epilogue), tensors)
    for _ in range(2):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            fused(epilogue)(*tensors)
        assert tensors[3 + k].data_ptr() not in [tensor.data_ptr() for tensor in saved]
        again = step(lambda *given: checkpoint(fused(epilogue), *given, use_reentrant=False), tensors)
        assert_near(again, expected)


@pytest.mark.parametrize("shape", [(N,), (), (1, M, N)], ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
def test_the_first_call_keeps_what_a_checkpoint_finds_again(
    shape: tuple[int, ...], is_trained: bool, launches: EmulatedLaunches
) -> None:
    """Which compares the shapes of what its two forward passes keep: of operands that are no matrices, too."""
    *tensors, factor = tensors_of([shape])
    factor.requires_grad_(is_trained)
    layer = fused(lambda z, r: F.silu(z) * r, out_dtype=torch.bfloat16)
    y = checkpoint(layer, *tensors, factor, use_reentrant=False)
    y.backward(torch.ones_like(y))
    expected = F.silu(F.linear(*tensors)) * factor
    found = [t.grad for t in tensors]
    assert_near(found, list(torch.autograd.grad(expected.view(M, N), tensors, torch.ones_like(y))))


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_can_be_differentiated_and_batched(name: str, path: str) -> None:
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)

    def twice(layer: Layer) -> list[Tensor]:
        y = layer(*tensors)
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype).requires_grad_()
        first = torch.autograd.grad(y, tensors, grad, create_graph=True)
        total = sum((g.float() ** 2).mean() for g in first)
        return list(torch.autograd.grad(total, [*tensors[:2], grad]))

    for _ in range(2):
        assert_near(twice(fused(epilogue)), twice(plain(epilogue)))
    grads = torch.randn(2, M, N).bfloat16()
    y = fused(epilogue)(*tensors)
    found = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, tensors, grad, retain_graph=True))(grads)
    reference = plain(epilogue)(*tensors)
    expected = [torch.autograd.grad(reference, tensors, grad, retain_graph=True) for grad in grads]
    for own in (found, mapped):
        assert_near(list(own), [torch.stack(items) for items in zip(*expected, strict=True)])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_of_rows_do_not_keep_it(reduction: str, recompute: bool, launches: EmulatedLaunches) -> None:
    tensors = tensors_of([(M, N)], torch.float32)
    found = step(fused(added, reduce=reduction, recompute=recompute), tensors, writes=0)
    expected = step(lambda *given: getattr(torch, reduction)(plain(added)(*given), -1), tensors)
    assert_near(found, expected)


@pytest.mark.parametrize("reduction", ["amax", "amin", "logsumexp"])
def test_what_compares_elements_with_the_result_keeps_it(reduction: str, launches: EmulatedLaunches) -> None:
    tensors = tensors_of([(M, N)], torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(fused(added, reduce=reduction), tensors, writes=0)
    expected = step(lambda *given: getattr(torch, reduction)(plain(added)(*given), -1), tensors)
    assert_near(step(fused(added, reduce=reduction), tensors), expected)


@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
def test_pointwise_and_reduce_do_not_keep_it(reduction: str | None, launches: EmulatedLaunches) -> None:
    x, r = (torch.randn(M, N).requires_grad_() for _ in range(2))

    def own(x: Tensor, r: Tensor) -> Tensor:
        if reduction is None:
            return cutfuse.pointwise(added, x, r)
        return cutfuse.reduce(x, 1, reduction, prologue=added, operands=(r,))

    def eager(x: Tensor, r: Tensor) -> Tensor:
        return added(x, r) if reduction is None else getattr(torch, reduction)(added(x, r), 1)

    written = r * 1
    y = own(x, written)
    with torch.no_grad():
        written.fill_(torch.nan)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    expected = torch.autograd.grad(eager(x, r), [x, r], grad)
    assert_near(list(torch.autograd.grad(y, [x, r], grad, retain_graph=True)), list(expected))
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, [x, r], grad, retain_graph=True))(grad[None])
    assert_near([gradient[0] for gradient in mapped], list(expected))
