"""Training steps whose forward pass is one kernel that stores the pre-activation too, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_epilogues import FakeCompiler
from compiled_epilogues import compiler as compiler
from emulated_device import direct_calls, emulated_device, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from plan_cases import plan
from test_training_products import Layer, assert_near, fused, plain
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutfuse
from cutfuse.layer import call_plans
from cutfuse.layer.planner import LinearArguments, plan_linear

SHAPE = 37, 24, 16


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes take the first kernel that can, as behind a product of a long K."""

    def plan_by_a_kernel(arguments: LinearArguments, *others: Any) -> Any:
        *kernels, _ = plan_linear(arguments, "tf32").alternatives
        name = next(kernel.name for kernel in kernels if not kernel.rejection)
        return plan_linear(arguments, "tf32", only=name)

    monkeypatch.setattr(call_plans, "plan_call", plan_by_a_kernel)


def gated(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) * r + torch.sigmoid(z)


def tensors_of(dtype: torch.dtype, has_bias: bool = True) -> list[Tensor]:
    m, n, k = SHAPE
    made = [torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n), torch.randn(m, n)]
    return [tensor.to(dtype).requires_grad_() for tensor in (made if has_bias else made[:2] + made[3:])]


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_that_of_the_general_path(launches: EmulatedLaunches, dtype: torch.dtype, has_bias: bool) -> None:
    tensors = tensors_of(dtype, has_bias)
    grad = torch.randn(SHAPE[:2]).to(dtype)

    def step() -> list[Tensor]:
        x, weight, *bias, r = tensors
        y = cutfuse.linear(x, weight, *bias, epilogue=gated, operands=[r])
        return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

    with paused():
        expected = step()
    step()
    launches.launches.clear()
    before = direct_calls()
    found = step()
    assert direct_calls() == before + 1
    gemm, backward, *_ = launches.launches
    assert (gemm.function, backward.function) == ("gemm", "pointwise_backward")
    assert gemm.pre_activation == backward.x[0] != gemm.d
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y.float(), wanted.float(), rtol=6e-2, atol=6e-2)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("is_fused", [False, True])
def test_each_operand_gets_its_own_gradient(is_fused: bool, request: pytest.FixtureRequest) -> None:
    if is_fused:
        request.getfixturevalue("one_kernel")
    tensors = [*tensors_of(torch.bfloat16), torch.randn(SHAPE[:2]).bfloat16().requires_grad_()]
    grad = torch.randn(SHAPE[:2]).bfloat16()

    def chain(z: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return F.gelu(z) * r + torch.tanh(s) * 3

    def step() -> tuple[Tensor, ...]:
        x, weight, bias, r, s = tensors
        return torch.autograd.grad(cutfuse.linear(x, weight, bias, epilogue=chain, operands=[r, s]), tensors, grad)

    step()
    before = direct_calls()
    found = step()
    assert direct_calls() == before + 1
    x, weight, bias, r, s = tensors
    expected = torch.autograd.grad(chain(F.linear(x, weight, bias), r, s), tensors, grad)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own.float(), wanted.float(), rtol=6e-2, atol=6e-2)


# Microseconds on an H200 of the fastest kernel with the pre-activation, and of cuBLAS with a kernel behind it; of relu.
# The device had nothing to do before: behind other work, as it is predicted, each takes up to 4 us less.
MEASURED = [
    ((12608, 3072, 768), 120, 135),
    ((8192, 4096, 1024), 125, 139),
    ((2048, 2304, 768), 25, 23),
    ((4096, 8192, 8192), 743, 745),
    ((16384, 4096, 4096), 757, 797),
]


@pytest.mark.parametrize(("shape", "fused", "unfused"), MEASURED)
def test_what_is_stored_beside_the_result_takes_time(shape: tuple[int, int, int], fused: int, unfused: int) -> None:
    options: dict[str, Any] = {"specialized_cost": 0.023, "epilogue_cost": 1.0}
    plain = plan(*shape, **options)
    storing = plan(*shape, **options, stores_pre_activation=True)
    best, *_, cublas = storing.alternatives
    assert best.microseconds > plain.alternatives[0].microseconds
    assert best.microseconds == pytest.approx(fused, rel=0.15, abs=4.5)
    assert cublas.microseconds == pytest.approx(unfused, rel=0.15, abs=4.5)
    if abs(fused - unfused) > 0.01 * unfused:  # either is right where they take as long
        assert storing.is_fused == (fused < unfused)


def test_no_kernel_stores_it_beside_reduced_rows_or_in_part_of_a_vector() -> None:
    options = {"stores_pre_activation": True, "specialized_cost": 1.0}
    for shape, own, words in (
        ((1024, 8192, 512), {"reduction": "sum"}, "stores no matrix, and so no pre-activation"),
        ((1024, 8196, 512), {"output": "float32"}, "N is 8196 bfloat16 elements"),
    ):
        *kernels, _ = plan(*shape, **options, **own).alternatives
        assert kernels
        assert all(words in kernel.rejection for kernel in kernels)
        *kernels, _ = plan(*shape, **own).alternatives
        assert not all(kernel.rejection for kernel in kernels)


def test_a_kernel_behind_cublas_leaves_the_product() -> None:
    for stores in (False, True):
        found = plan(2048, 2304, 768, epilogue_cost=40.0, stores_pre_activation=stores)
        *_, launch = found.launches
        assert not found.is_fused
        assert launch.in_place != stores


@pytest.mark.usefixtures("one_kernel", "compiler", "launches")
@pytest.mark.parametrize(("first", "kind"), [(8, "source"), (4, "strided")])
def test_the_copy_engine_is_given_aligned_operands_alone(
    monkeypatch: pytest.MonkeyPatch, first: int, kind: str
) -> None:
    found: list[Any] = []
    find = call_plans.find_epilogues

    def find_and_note(*given: Any) -> Any:
        found.extend(find(*given))
        return found

    monkeypatch.setattr(call_plans, "find_epilogues", find_and_note)
    m, n, _ = SHAPE
    x, weight, *_ = tensors_of(torch.bfloat16)
    cutfuse.linear(x, weight, epilogue=gated, operands=[torch.randn(m, n + 16).bfloat16()[:, first : first + n]])
    assert [[own.name for own in epilogue.operand_kinds] for epilogue in found] == [[kind]]


@pytest.mark.usefixtures("one_kernel")
def test_a_captured_step_takes_the_path_that_waits_for_its_epilogues(compiler: FakeCompiler) -> None:
    """Others run directly while they are interpreted."""
    tensors = tensors_of(torch.bfloat16, has_bias=False)
    captures: list[bool] = []

    def step() -> list[int]:
        launches.launches.clear()
        y = cutfuse.linear(*tensors[:2], epilogue=gated, operands=tensors[2:])
        torch.autograd.grad(y, tensors, torch.ones_like(y))
        return [launch.specialized for launch in launches.launches if hasattr(launch, "specialized")][:2]

    with emulated_device(is_capturing=lambda: bool(captures)) as launches:
        compiler.may_go_on.clear()
        step()
        before = direct_calls()
        assert step() == [0, 0]
        assert direct_calls() == before + 1
        captures.append(True)
        step()
        assert direct_calls() == before + 1
        compiler.may_go_on.set()
        cutfuse.wait(30)
        assert sorted(step()) == [0x1001, 0x1002]
        assert direct_calls() == before + 2


# A trained layer keeps no operand that is only added, as PyTorch: it may be written to after the call.


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


def chain_tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
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
    tensors = chain_tensors(shapes)
    expected = step(plain(epilogue), tensors)
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    before = direct_calls()
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    assert direct_calls() == before + (path != "general")


@pytest.mark.parametrize("name", ["a matrix", "before a factor"])
def test_the_kernel_is_given_nothing_of_it(name: str, launches: EmulatedLaunches) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = chain_tensors(shapes)
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
    tensors = chain_tensors(shapes)
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
    *tensors, factor = chain_tensors([shape])
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
    tensors = chain_tensors(shapes)

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
    tensors = chain_tensors([(M, N)], torch.float32)
    found = step(fused(added, reduce=reduction, recompute=recompute), tensors, writes=0)
    expected = step(lambda *given: getattr(torch, reduction)(plain(added)(*given), -1), tensors)
    assert_near(found, expected)


@pytest.mark.parametrize("reduction", ["amax", "amin", "logsumexp"])
def test_what_compares_elements_with_the_result_keeps_it(reduction: str, launches: EmulatedLaunches) -> None:
    tensors = chain_tensors([(M, N)], torch.float32)
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
