"""Training steps on a CPU: the kernels of both passes, what is kept in between, and PyTorch's gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_epilogues import FakeCompiler
from compiled_epilogues import compiler as compiler
from emulated_device import EmulatedLaunches, direct_calls, directly, emulated_device, paused
from emulated_device import launches as launches
from functorch.compile import aot_function, nop
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutfuse
from cutfuse.layer import autograd, call_plans, training, training_step
from cutfuse.layer.planner import LinearArguments, plan_linear

M, N, K = 37, 24, 16
HALVES = (torch.bfloat16, torch.float16)
Layer = Callable[..., Tensor]


def gelu(z: Tensor) -> Tensor:
    return F.gelu(z)


def gated(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) * r + torch.sigmoid(z)


def added(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) + r


# The epilogue, the shapes of its operands, and which of them is only added.
CHAINS: dict[str, tuple[Layer, list[tuple[int, ...]], int | None]] = {
    "an activation": (gelu, [], None),
    "a residual": (torch.add, [(M, N)], 0),
    "a sum with itself": (lambda z: z + z, [], None),
    "a gate": (gated, [(M, N)], None),
    "a gate and a function": (lambda z, r, s: F.gelu(z) * r + torch.tanh(s) * 3, [(M, N), (M, N)], None),
    "a matrix": (added, [(M, N)], 0),
    "a row": (added, [(N,)], 0),
    "a column": (added, [(M, 1)], 0),
    "before a factor": (lambda z, r, s: 2 * r - F.silu(z) * s, [(M, N), (M, N)], 0),
    "behind a factor": (lambda z, s, r: F.silu(z) * s + r / 3, [(1, N), (M, N)], 1),
}
EITHER = pytest.mark.parametrize("name", ["an activation", "a residual"])


def tensors_of(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, leading: tuple[int, ...] = (M,)
) -> list[Tensor]:
    """Of a layer: x, weight and bias, and operands of these shapes."""
    made = [torch.randn(*leading, K), torch.randn(N, K) * K**-0.5, torch.randn(N), *map(torch.randn, shapes)]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def fused(epilogue: Layer, **options: Any) -> Layer:
    return lambda x, w, b, *rest: cutfuse.linear(x, w, b, epilogue=epilogue, operands=rest, **options)


def plain(epilogue: Layer) -> Layer:
    return lambda x, w, b, *rest: epilogue(F.linear(x, w, b), *rest)


def ramp(y: Tensor) -> Tensor:
    """A gradient of y."""
    return torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)


def step(
    layer: Layer, tensors: Sequence[Tensor], grad: Tensor | None = None, writes: int | None = None
) -> list[Tensor]:
    """The result and the gradients; between the passes the operand `writes` is overwritten."""
    given = list(tensors)
    if writes is not None:
        given[3 + writes] = tensors[3 + writes] * 1  # no leaf, which autograd would not let be written
    y = layer(*given)
    result = y.detach().clone()
    if writes is not None:
        with torch.no_grad():
            given[3 + writes].fill_(torch.nan)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return [result, *torch.autograd.grad(y, wanted, ramp(y) if grad is None else grad)]


def kernels_of(found: EmulatedLaunches) -> list[str]:
    """What was launched: the layout of products, and the function of others."""
    names = [launch.kernel if launch.function == "gemm" else launch.function for launch in found.launches]
    return [next((part for part in ("_nn_", "_tn_") if part in name), name.partition("_128")[0]) for name in names]


def direct_step(launches: EmulatedLaunches, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Of a second call, which is direct; the first one is not."""
    first = run()
    launches.launches.clear()
    found = directly(run)
    assert_near(found, first)
    return found


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        assert own.shape == wanted.shape
        assert own.dtype == wanted.dtype
        torch.testing.assert_close(own.float(), wanted.float(), rtol=6e-2, atol=6e-2)


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes take the first kernel that can, as behind a product of a long K."""

    def plan_by_a_kernel(arguments: LinearArguments, *others: Any) -> Any:
        *kernels, _ = plan_linear(arguments, "tf32").alternatives
        name = next(kernel.name for kernel in kernels if not kernel.rejection)
        return plan_linear(arguments, "tf32", only=name)

    monkeypatch.setattr(call_plans, "plan_call", plan_by_a_kernel)


@pytest.fixture(params=["one kernel", "two kernels", "general"])
def path(request: pytest.FixtureRequest, launches: EmulatedLaunches) -> Iterator[str]:
    """How the layer runs: the later calls directly but on the general path."""
    if request.param == "one kernel":
        request.getfixturevalue("one_kernel")
    with paused() if request.param == "general" else contextlib.nullcontext():
        yield request.param


# What runs


@pytest.mark.parametrize("leading", [(M,), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@EITHER
def test_what_is_launched(launches: EmulatedLaunches, name: str, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """A residual's gradient is the one that arrives, and no pre-activation is stored for it."""
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of([(*leading, N)] * len(shapes), dtype, leading)
    grad = torch.randn(*leading, N).to(dtype)
    found = direct_step(launches, lambda: step(fused(epilogue), tensors, grad))
    forward, *elements, summed, of_x, of_weight = launches.launches
    if name == "an activation":
        (own,) = elements
        assert forward.pre_activation == own.x[0] != forward.d
        (_, grad_z, _), *_ = own.outputs
    else:
        assert not forward.pre_activation
        grad_z = grad.data_ptr()
        assert summed.x[0] == grad_z
        assert torch.equal(found[-1], grad)
    assert kernels_of(launches)[1:] == ["pointwise_backward"] * len(elements) + ["reduce", "_nn_", "_tn_"]
    assert (of_x.a, of_x.b) == (grad_z, tensors[1].data_ptr())
    assert (of_weight.a, of_weight.b) == (grad_z, tensors[0].data_ptr())
    assert_near(found, step(plain(epilogue), tensors, grad))


FROZEN = [(0,), (1,), (2,), (0, 2)]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [*(("an activation", places) for places in FROZEN), *(("a residual", places) for places in [*FROZEN, (3,)])],
)
def test_frozen_tensors(launches: EmulatedLaunches, name: str, frozen: tuple[int, ...]) -> None:
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)
    for place in frozen:
        tensors[place].requires_grad_(False)
    found = direct_step(launches, lambda: step(fused(epilogue), tensors))
    multiplied = [kernel for kernel in kernels_of(launches)[1:] if kernel in ("_nn_", "_tn_")]
    assert multiplied == [kernel for place, kernel in enumerate(("_nn_", "_tn_")) if place not in frozen]
    assert ("reduce" in kernels_of(launches)) == (2 not in frozen)
    assert_near(found, step(plain(epilogue), tensors))


@EITHER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_general_path_has_the_same_products(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """So that results do not depend on which call comes first."""
    epilogue, shapes, _ = CHAINS[name]
    tensors, asked = tensors_of(shapes, dtype), []
    product = autograd.schema.product

    def spied(a: Tensor, b: Tensor, mode: str, issuer: str) -> Tensor:
        asked.append((tuple(a.shape), issuer))
        found: Tensor = product(a, b, mode, issuer)
        return found

    monkeypatch.setattr(autograd.schema, "product", spied)
    with paused():
        step(fused(epilogue), tensors)
    assert asked == [((M, N), "training"), ((N, M), "training")]


def test_a_large_layer_is_multiplied_by_pytorch(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "_waits", lambda *given: False)
    tensors = tensors_of([])
    found = direct_step(launches, lambda: step(fused(gelu), tensors))
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce"]
    assert_near(found, step(plain(gelu), tensors))


def test_fp32_of_any_address_is_multiplied_by_kernels(launches: EmulatedLaunches) -> None:
    """They read single elements where x or the weight does not begin at a multiple of 16 bytes."""
    x, weight, bias = tensors_of([], torch.float32)
    moved = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape) for t in (x, weight)]
    tensors = [*(t.requires_grad_() for t in moved), bias]
    found = direct_step(launches, lambda: step(fused(gelu), tensors))
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce", "_nn_", "_tn_"]
    assert_near(found, step(plain(gelu), tensors))


def test_a_layer_with_nothing_after_it_is_pytorchs_in_every_call(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (autograd, training):
        monkeypatch.setattr(module, "is_forced", lambda x, mode="": True)
    tensors = tensors_of([], torch.float32)
    for _ in range(3):
        y = cutfuse.linear(*tensors)
        assert type(y.grad_fn).__name__ == "AddmmBackward0"
        torch.autograd.grad(y, tensors, ramp(y))
    assert not launches.launches


@pytest.mark.parametrize("mode", ["ieee", "tf32", "split3"])
def test_the_mode_of_the_forward_pass_is_the_backwards(launches: EmulatedLaunches, mode: str) -> None:
    """In fp32 kernels of ours multiply in "guarded" alone."""
    tensors = tensors_of([], torch.float32)
    with cutfuse.precision(mode):
        y = fused(gelu)(*tensors)
    launches.launches.clear()
    torch.autograd.grad(y, tensors, ramp(y))
    assert not any("fp32" in str(launch.kernel) for launch in launches.launches if launch.function == "gemm")


@EITHER
def test_the_backward_pass_multiplies_as_the_forward_pass_did(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Where the forward pass was in a context, and where PyTorch's setting has changed since."""
    epilogue, shapes, _ = CHAINS[name]
    tensors, modes = tensors_of(shapes, torch.float32), []
    product = autograd.schema.product
    monkeypatch.setattr(
        autograd.schema, "product", lambda a, b, mode, issuer: modes.append(mode) or product(a, b, mode, issuer)
    )
    torch.set_float32_matmul_precision("high")
    with cutfuse.precision("guarded"):
        y = fused(epilogue)(*tensors)
    launches.launches.clear()
    torch.autograd.grad(y, tensors, ramp(y))
    kernels = [launch.kernel for launch in launches.launches if launch.function == "gemm"]
    assert ["fp32" in kernel for kernel in kernels] == [True, True]
    torch.set_float32_matmul_precision("highest")
    for _ in range(2):
        y = fused(epilogue)(*tensors)
    torch.set_float32_matmul_precision("high")
    torch.autograd.grad(y, tensors, ramp(y))
    assert modes == ["guarded"] * 2


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
    x, weight, _ = tensors_of([])
    cutfuse.linear(x, weight, epilogue=gated, operands=[torch.randn(M, N + 16).bfloat16()[:, first : first + N]])
    assert [[own.name for own in epilogue.operand_kinds] for epilogue in found] == [[kind]]


@pytest.mark.usefixtures("one_kernel")
def test_a_captured_step_takes_the_path_that_waits_for_its_epilogues(compiler: FakeCompiler) -> None:
    """Others run directly while they are interpreted."""
    tensors = tensors_of([(M, N)])
    captures: list[bool] = []

    def kernels() -> list[int]:
        launches.launches.clear()
        step(fused(gated), tensors)
        return [launch.specialized for launch in launches.launches if hasattr(launch, "specialized")][:2]

    with emulated_device(is_capturing=lambda: bool(captures)) as launches:
        compiler.may_go_on.clear()
        kernels()
        assert directly(kernels) == [0, 0]
        captures.append(True)
        before = direct_calls()
        kernels()
        assert direct_calls() == before
        compiler.may_go_on.set()
        cutfuse.wait(30)
        assert sorted(directly(kernels)) == [0x1001, 0x1002]


def test_explain_tells_of_the_products(launches: EmulatedLaunches) -> None:
    x, weight, bias, residual = tensors_of([(M, N)])

    def backward(epilogue: Layer, bias: Tensor | None, **options: Any) -> str:
        return cutfuse.explain(x, weight, bias, epilogue=epilogue, **options).steps[-1]

    products = "sm90_bf16_nn_64x128x64_1x1_pingpong for x, sm90_bf16_tn_64x128x64_1x1_pingpong for weight"
    elements = "pointwise_backward kernel"
    assert backward(gelu, bias) == f"backward: {elements} (with the bias gradient's sum), {products}"
    assert backward(gelu, None) == f"backward: {elements}, {products}"
    assert backward(gelu, None, recompute=True) == (
        f"backward: torch.mm for the pre-activation again, {elements}, {products}"
    )
    given = {"operands": [residual]}
    assert backward(torch.add, bias, **given) == f"backward: reduction kernel (the bias gradient's sum), {products}"
    assert backward(torch.add, bias.detach(), **given) == f"backward: {products}"


# Gradients, and what is kept for them: no operand that is only added, as PyTorch, so that it may be written to.


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_what_is_only_added_may_be_written_before_the_backward_pass(name: str, path: str, dtype: torch.dtype) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = tensors_of(shapes, dtype)
    expected = step(plain(epilogue), tensors)
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    before = direct_calls()
    assert_near(step(fused(epilogue), tensors, writes=k), expected)
    assert direct_calls() == before + (path != "general")


@pytest.mark.parametrize("name", ["a matrix", "before a factor"])
def test_the_kernel_is_given_nothing_of_it(name: str, launches: EmulatedLaunches) -> None:
    epilogue, shapes, k = CHAINS[name]
    tensors = tensors_of(shapes)
    direct_step(launches, lambda: step(fused(epilogue), tensors))
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
        again = step(lambda *given: checkpoint(fused(epilogue), *given, use_reentrant=False), tensors)
        assert_near(again, expected)
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            fused(epilogue)(*tensors)
        kept = [tensor.data_ptr() for tensor in saved]
        assert k is None or tensors[3 + k].data_ptr() not in kept
        assert name != "a residual" or kept == [tensor.data_ptr() for tensor in tensors[:2]]


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
    assert_near(found, torch.autograd.grad(expected.view(M, N), tensors, torch.ones(M, N).bfloat16()))


@pytest.mark.parametrize("name", [name for name in CHAINS if "gate" not in name])
def test_gradients_can_be_differentiated_and_batched(name: str, path: str) -> None:
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)

    def twice(layer: Layer) -> Sequence[Tensor]:
        y = layer(*tensors)
        grad = ramp(y).requires_grad_()
        first = torch.autograd.grad(y, tensors, grad, create_graph=True)
        total = sum((g.float() ** 2).mean() for g in first)
        return torch.autograd.grad(total, [*tensors[:2], grad])

    for _ in range(2):
        assert_near(twice(fused(epilogue)), twice(plain(epilogue)))
    grads = torch.randn(2, M, N).bfloat16()
    y = fused(epilogue)(*tensors)
    found = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, tensors, grad, retain_graph=True))(grads)
    reference = plain(epilogue)(*tensors)
    expected = [torch.autograd.grad(reference, tensors, grad, retain_graph=True) for grad in grads]
    for own in (found, mapped):
        assert_near(own, [torch.stack(items) for items in zip(*expected, strict=True)])


@EITHER
def test_tensors_without_memory(launches: EmulatedLaunches, name: str) -> None:
    """As tracers pass them, outside of torch.compile."""
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)
    traced = aot_function(fused(epilogue), fw_compiler=nop, bw_compiler=nop)
    torch.testing.assert_close(traced(*tensors), plain(epilogue)(*tensors), rtol=6e-2, atol=6e-2)


def turned(tensor: Tensor) -> Tensor:
    """The same values, laid out by columns."""
    return tensor.detach().t().contiguous().t() if tensor.dim() == 2 else tensor.detach()


@EITHER
def test_saved_tensors_that_come_back_otherwise(launches: EmulatedLaunches, name: str) -> None:
    """As hooks that keep them elsewhere may return them."""
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)

    def run() -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
            return step(fused(epilogue), tensors)

    assert_near(direct_step(launches, run), step(plain(epilogue), tensors))


@EITHER
@pytest.mark.parametrize(
    "grad",
    [
        torch.ones((), dtype=torch.bfloat16).expand(M, N),
        torch.linspace(-1, 1, M * N).bfloat16().view(N, M).t(),
        torch.linspace(-1, 1, M * N + 1).bfloat16()[1:].view(M, N),  # no aligned address
    ],
    ids=["expanded", "by columns", "unaligned"],
)
def test_gradients_that_arrive_otherwise(launches: EmulatedLaunches, name: str, grad: Tensor) -> None:
    epilogue, shapes, _ = CHAINS[name]
    tensors = tensors_of(shapes)
    found = direct_step(launches, lambda: step(fused(epilogue), tensors, grad))
    assert_near(found, step(plain(epilogue), tensors, grad))
    if name == "a residual":  # handed on as it is, as PyTorch does
        assert found[-1].stride() == grad.stride()
        assert torch.equal(found[-1], grad)


# Behind a reduction


def reduced(reduction: str | None) -> Layer:
    return lambda y: y if reduction is None else getattr(torch, reduction)(y, -1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_of_rows_do_not_keep_it(reduction: str, recompute: bool, launches: EmulatedLaunches) -> None:
    tensors = tensors_of([(M, N)], torch.float32)
    found = step(fused(added, reduce=reduction, recompute=recompute), tensors, writes=0)
    assert_near(found, step(lambda *given: reduced(reduction)(plain(added)(*given)), tensors))


@pytest.mark.parametrize("reduction", ["amax", "amin", "logsumexp"])
def test_what_compares_elements_with_the_result_keeps_it(reduction: str, launches: EmulatedLaunches) -> None:
    tensors = tensors_of([(M, N)], torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(fused(added, reduce=reduction), tensors, writes=0)
    expected = step(lambda *given: reduced(reduction)(plain(added)(*given)), tensors)
    assert_near(step(fused(added, reduce=reduction), tensors), expected)


@pytest.mark.parametrize("reduction", [None, "sum", "mean"])
def test_pointwise_and_reduce_do_not_keep_it(reduction: str | None, launches: EmulatedLaunches) -> None:
    x, r = (torch.randn(M, N).requires_grad_() for _ in range(2))
    written = r * 1
    if reduction is None:
        y = cutfuse.pointwise(added, x, written)
    else:
        y = cutfuse.reduce(x, 1, reduction, prologue=added, operands=(written,))
    with torch.no_grad():
        written.fill_(torch.nan)
    expected = torch.autograd.grad(reduced(reduction)(added(x, r)), [x, r], ramp(y))
    assert_near(torch.autograd.grad(y, [x, r], ramp(y), retain_graph=True), expected)
    mapped = torch.func.vmap(lambda grad: torch.autograd.grad(y, [x, r], grad, retain_graph=True))(ramp(y)[None])
    assert_near([gradient[0] for gradient in mapped], expected)
