"""Products of backward passes by kernels of ours, where the device waits for the host: plans, and calls on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import direct_calls, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from functorch.compile import aot_function, nop
from plan_cases import contiguous, plan, transposed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutfuse
from cutfuse.layer import autograd, training, training_step

HALVES = {"bfloat16": "bf16", "float16": "f16"}
DTYPES = (torch.bfloat16, torch.float16)
Layer = Callable[..., Tensor]


# Plans of products whose x and weight lie by columns


@pytest.mark.parametrize(("dtype", "short"), HALVES.items())
@pytest.mark.parametrize("k", [2, 197, 1576])
def test_a_weights_gradient_has_kernels_of_its_own(dtype: str, short: str, k: int) -> None:
    """Their K is the layer's number of rows, of which whole vectors are not needed."""
    found = plan(1536, 384, k, dtype=dtype, x=by_columns(1536, k), weight=by_columns(384, k), bias=None)
    names = {kernel.name for kernel in found.alternatives[:-1]}
    assert names == {f"sm90_{short}_tn_{tile}_pingpong" for tile in ("128x128x64_2x1", "64x128x64_1x1")}
    assert not any(kernel.rejection for kernel in found.alternatives)


def test_the_kernel_is_told_both_pitches() -> None:
    given = {"x": by_columns(1536, 197, 1544), "weight": by_columns(384, 197), "bias": None}
    (launch,) = plan(1536, 384, 197, only="sm90_bf16_tn_64x128x64_1x1_pingpong", **given).launches
    problem = launch.problem
    assert (problem.lda, problem.ldb) == (1544, 384)
    assert problem.reads_columns_of_x
    assert problem.reads_columns_of_weight
    assert "x by columns weight by columns" in repr(problem)


def test_in_a_step_that_waits_for_the_host_the_device_counts_for_less() -> None:
    called, trained = (plan(1576, 768, 3072, issuer=issuer, epilogue_cost=0.0) for issuer in ("call", "training"))
    for of_call, of_step in zip(called.alternatives, trained.alternatives, strict=True):
        assert of_step.microseconds == of_call.microseconds
        host = 15.0 if of_step.name == "cuBLAS" else 12.5
        assert of_step.compared == pytest.approx(host + 0.35 * of_step.microseconds)
    assert not plan(16384, 4096, 4096, issuer="training", epilogue_cost=0.0).is_fused


def by_columns(rows: int, columns: int, pitch: int = 0) -> tuple[int, int, int, int, bool]:
    return rows, columns, 1, pitch or rows, True


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": contiguous(64, 40)}, "x has strides (1, 64) and weight (40, 1): kernels that read x by columns"),
        ({"reduction": "sum"}, "x has strides (1, 64): its rows are not contiguous, as kernels that reduce rows"),
        ({"output": "float32"}, "x has strides (1, 64): its rows are not contiguous, as kernels that store another"),
        ({"x": (64, 40, 2, 128, True)}, "x has strides (2, 128): neither its rows nor its columns are contiguous"),
    ],
)
def test_what_rules_an_x_by_columns_out(options: dict[str, Any], reason: str) -> None:
    given = {"x": transposed(64, 40), "weight": transposed(64, 40), **options}
    assert plan(64, 64, 40, **given).ruled_out.startswith(reason)


# Training steps


def gelu(z: Tensor) -> Tensor:
    return F.gelu(z)


def step(layer: Layer, tensors: list[Tensor], grad: Tensor, wanted: Sequence[Tensor] = ()) -> list[Tensor]:
    y = layer(*tensors)
    return [y.detach(), *torch.autograd.grad(y, wanted or tensors, grad)]


def fused(epilogue: Layer, **options: Any) -> Layer:
    return lambda x, w, b, *rest: cutfuse.linear(x, w, b, epilogue=epilogue, operands=rest, **options)


def plain(epilogue: Layer) -> Layer:
    return lambda x, w, b, *rest: epilogue(F.linear(x, w, b), *rest)


def made(dtype: torch.dtype, *leading: int, residual: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(*leading, 16), (24, 16), (24,)] + [(*leading, 24)] * residual
    return [(torch.randn(shape) / 2).to(dtype).requires_grad_() for shape in shapes]


def kernels_of(found: EmulatedLaunches) -> list[str]:
    """What was launched: the layout of products, and the function of others."""
    names = [launch.kernel if launch.function == "gemm" else launch.function for launch in found.launches]
    return [next((part for part in ("_nn_", "_tn_") if part in name), name.partition("_128")[0]) for name in names]


def direct_step(launches: EmulatedLaunches, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Of a second call, which is direct; the first one is not."""
    first = run()
    launches.launches.clear()
    before = direct_calls()
    found = run()
    assert direct_calls() == before + 1
    assert_near(found, first)
    return found


def assert_near(found: list[Tensor], expected: list[Tensor]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        assert own.shape == wanted.shape
        assert own.dtype == wanted.dtype
        torch.testing.assert_close(own.float(), wanted.float(), rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize("leading", [(37,), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_an_activation(launches: EmulatedLaunches, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    tensors, grad = made(dtype, *leading), torch.randn(*leading, 24).to(dtype)
    found = direct_step(launches, lambda: step(fused(gelu), tensors, grad))
    forward, *backward = launches.launches
    assert forward.pre_activation
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce", "_nn_", "_tn_"]
    elements, _, of_x, of_weight = backward
    (_, grad_z, _), *_ = elements.outputs
    assert (of_x.a, of_x.b) == (grad_z, tensors[1].data_ptr())
    assert (of_weight.a, of_weight.b) == (grad_z, tensors[0].data_ptr())
    assert_near(found, step(plain(gelu), tensors, grad))


@pytest.mark.parametrize("leading", [(37,), (3, 5)], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_a_residual(launches: EmulatedLaunches, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    """Its gradient is the one that arrives, and no pre-activation is stored."""
    tensors, grad = made(dtype, *leading, residual=True), torch.randn(*leading, 24).to(dtype)
    found = direct_step(launches, lambda: step(fused(torch.add), tensors, grad))
    forward, summed, of_x, of_weight = launches.launches
    assert not forward.pre_activation
    assert kernels_of(launches)[1:] == ["reduce", "_nn_", "_tn_"]
    assert summed.x[0] == of_x.a == of_weight.a == grad.data_ptr()
    assert_near(found, step(plain(torch.add), tensors, grad))
    assert torch.equal(found[-1], grad)


FROZEN = [(0,), (1,), (2,), (0, 2)]


@pytest.mark.parametrize(
    ("epilogue", "frozen"), [(gelu, places) for places in FROZEN] + [(torch.add, places) for places in [*FROZEN, (3,)]]
)
def test_frozen_tensors(launches: EmulatedLaunches, epilogue: Layer, frozen: tuple[int, ...]) -> None:
    tensors = made(torch.bfloat16, 37, residual=epilogue is torch.add)
    for place in frozen:
        tensors[place].requires_grad_(False)
    wanted, grad = [t for t in tensors if t.requires_grad], torch.randn(37, 24).bfloat16()
    found = direct_step(launches, lambda: step(fused(epilogue), tensors, grad, wanted))
    multiplied = [name for name in kernels_of(launches)[1:] if name in ("_nn_", "_tn_")]
    assert multiplied == [name for place, name in enumerate(("_nn_", "_tn_")) if place not in frozen]
    assert ("reduce" in kernels_of(launches)) == (2 not in frozen)
    assert_near(found, step(plain(epilogue), tensors, grad, wanted))


def saved_by(layer: Layer, tensors: list[Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(*tensors)
    return saved


@pytest.mark.parametrize("call", ["first", "later"])
def test_a_residual_keeps_what_pytorch_keeps(launches: EmulatedLaunches, call: str) -> None:
    """So it may be written to before the backward pass, and a checkpoint finds the same tensors again."""
    tensors, grad = made(torch.bfloat16, 37, residual=True), torch.randn(37, 24).bfloat16()
    if call == "later":
        fused(torch.add)(*tensors)
    assert [t.data_ptr() for t in saved_by(fused(torch.add), tensors)] == [t.data_ptr() for t in tensors[:2]]
    *product, residual = tensors
    written = residual * 1
    y = fused(torch.add)(*product, written)
    with torch.no_grad():
        written.add_(1)
    found = torch.autograd.grad(y, tensors, grad)
    assert_near(list(found), step(plain(torch.add), tensors, grad)[1:])


@pytest.mark.parametrize("leading", [(37,), (5, 7)], ids=str)
@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
def test_a_checkpoint(launches: EmulatedLaunches, epilogue: Layer, leading: tuple[int, ...]) -> None:
    """Whose first forward pass takes the general path, and whose second is direct: both have to keep the same."""
    tensors = made(torch.bfloat16, *leading, residual=epilogue is torch.add)
    grad = torch.randn(*leading, 24).bfloat16()
    found = step(lambda *given: checkpoint(fused(epilogue), *given, use_reentrant=False), tensors, grad)
    assert_near(found, step(plain(epilogue), tensors, grad))


def doubled(z: Tensor) -> Tensor:
    return z + z


def test_a_sum_of_the_product_with_itself(launches: EmulatedLaunches) -> None:
    tensors, grad = made(torch.bfloat16, 37), torch.randn(37, 24).bfloat16()
    for _ in range(2):
        assert_near(step(fused(doubled), tensors, grad), step(plain(doubled), tensors, grad))


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
def test_gradients_that_are_batched(launches: EmulatedLaunches, epilogue: Layer) -> None:
    tensors = made(torch.bfloat16, 37, residual=epilogue is torch.add)
    grads = torch.randn(3, 37, 24).bfloat16()
    expected = [
        torch.stack(items) for items in zip(*(step(plain(epilogue), tensors, g)[1:] for g in grads), strict=True)
    ]
    for _ in range(2):
        y = fused(epilogue)(*tensors)
        batched = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
        assert_near(list(batched), expected)
        mapped = torch.func.vmap(lambda g, y=y: torch.autograd.grad(y, tensors, g, retain_graph=True))(grads)
        assert_near(list(mapped), expected)


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
def test_tensors_without_memory(launches: EmulatedLaunches, epilogue: Layer) -> None:
    """As tracers pass them, outside of torch.compile."""
    tensors = made(torch.bfloat16, 37, residual=epilogue is torch.add)
    traced = aot_function(fused(epilogue), fw_compiler=nop, bw_compiler=nop)
    torch.testing.assert_close(traced(*tensors), plain(epilogue)(*tensors), rtol=6e-2, atol=6e-2)


def test_explain_tells_of_the_products(launches: EmulatedLaunches) -> None:
    x, weight, bias, residual = made(torch.bfloat16, 37, residual=True)

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


def turned(tensor: Tensor) -> Tensor:
    """The same values, laid out by columns."""
    return tensor.detach().t().contiguous().t() if tensor.dim() == 2 else tensor.detach()


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
def test_saved_tensors_that_come_back_otherwise(launches: EmulatedLaunches, epilogue: Layer) -> None:
    """As hooks that keep them elsewhere may return them."""
    tensors = made(torch.bfloat16, 37, residual=epilogue is torch.add)
    grad = torch.randn(37, 24).bfloat16()

    def run() -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
            return step(fused(epilogue), tensors, grad)

    assert_near(direct_step(launches, run), step(plain(epilogue), tensors, grad))


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
@pytest.mark.parametrize(
    "grad",
    [
        torch.ones((), dtype=torch.bfloat16).expand(37, 24),
        torch.linspace(-1, 1, 37 * 24).bfloat16().view(24, 37).t(),
        torch.linspace(-1, 1, 37 * 24 + 1).bfloat16()[1:].view(37, 24),  # no aligned address
    ],
    ids=["expanded", "by columns", "unaligned"],
)
def test_gradients_that_arrive_otherwise(launches: EmulatedLaunches, epilogue: Layer, grad: Tensor) -> None:
    tensors = made(torch.bfloat16, 37, residual=epilogue is torch.add)
    found = direct_step(launches, lambda: step(fused(epilogue), tensors, grad))
    assert_near(found, step(plain(epilogue), tensors, grad))


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
def test_gradients_of_gradients(launches: EmulatedLaunches, epilogue: Layer) -> None:
    def twice(layer: Layer, tensors: list[Tensor]) -> list[Tensor]:
        y = layer(*tensors)
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype).requires_grad_()
        first = torch.autograd.grad(y, tensors, grad, create_graph=True)
        total = sum((g.float() ** 2).sum() for g in first)
        return list(torch.autograd.grad(total, [*tensors[:2], grad]))

    tensors = made(torch.bfloat16, 5, residual=epilogue is torch.add)
    found = direct_step(launches, lambda: twice(fused(epilogue), tensors))
    for own, wanted in zip(found, twice(plain(epilogue), tensors), strict=True):
        torch.testing.assert_close(own.float(), wanted.float(), rtol=6e-2, atol=6e-1)


def test_a_large_layer_is_multiplied_by_pytorch(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "_waits", lambda *given: False)
    tensors, grad = made(torch.bfloat16, 37), torch.randn(37, 24).bfloat16()
    found = direct_step(launches, lambda: step(fused(gelu), tensors, grad))
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce"]
    assert_near(found, step(plain(gelu), tensors, grad))


@pytest.mark.parametrize("epilogue", [gelu, torch.add], ids=["activation", "residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_general_path_has_the_same_products(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, epilogue: Layer, dtype: torch.dtype
) -> None:
    """So that results do not depend on which call comes first."""
    tensors = made(dtype, 37, residual=epilogue is torch.add)
    grad, asked = torch.randn(37, 24).to(dtype), []
    product = autograd.schema.product

    def spied(a: Tensor, b: Tensor, mode: str, issuer: str) -> Tensor:
        asked.append((tuple(a.shape), issuer))
        found: Tensor = product(a, b, mode, issuer)
        return found

    monkeypatch.setattr(autograd.schema, "product", spied)
    with paused():
        found = step(fused(epilogue), tensors, grad)
    assert asked == [((37, 24), "training"), ((24, 37), "training")]
    assert_near(found, step(plain(epilogue), tensors, grad))
    if epilogue is torch.add:
        assert torch.equal(found[-1], grad)


def test_a_small_layer_is_one_kernel(launches: EmulatedLaunches) -> None:
    x, weight, bias = torch.randn(16, 64), torch.randn(64, 64), torch.randn(64)
    y = cutfuse.linear(x, weight, bias, epilogue=gelu)
    (launch,) = launches.launches
    assert (launch.function, launch.kernel) == ("gemm", "sm90_fp32_8x8x1024")
    assert (launch.a, launch.b, launch.d) == (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    torch.testing.assert_close(y, gelu(torch.nn.functional.linear(x, weight, bias)))


@pytest.mark.parametrize("mode", ["ieee", "tf32", "split3"])
def test_the_mode_of_the_forward_pass_is_the_backwards(launches: EmulatedLaunches, mode: str) -> None:
    """In fp32 kernels of ours multiply in "guarded" alone."""
    tensors, grad = made(torch.float32, 37), torch.randn(37, 24)
    with cutfuse.precision(mode):
        y = fused(gelu)(*tensors)
    launches.launches.clear()
    torch.autograd.grad(y, tensors, grad)
    assert not any("fp32" in str(launch.kernel) for launch in launches.launches if launch.function == "gemm")


@pytest.mark.parametrize("epilogue", [gelu, torch.add])
def test_the_backward_pass_multiplies_as_the_forward_pass_did(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, epilogue: Layer
) -> None:
    """Where the forward pass was in a context, and where PyTorch's setting has changed since."""
    tensors, grad = made(torch.float32, 37, residual=epilogue is torch.add), torch.randn(37, 24)
    modes: list[str] = []
    product = autograd.schema.product
    monkeypatch.setattr(
        autograd.schema, "product", lambda a, b, mode, issuer: modes.append(mode) or product(a, b, mode, issuer)
    )
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with cutfuse.precision("guarded"):
            y = fused(epilogue)(*tensors)
        launches.launches.clear()
        torch.autograd.grad(y, tensors, grad)
        kernels = [launch.kernel for launch in launches.launches if launch.function == "gemm"]
        assert ["fp32" in kernel for kernel in kernels] == [True, True]
        torch.set_float32_matmul_precision("highest")
        for _ in range(2):
            y = fused(epilogue)(*tensors)
        torch.set_float32_matmul_precision("high")
        torch.autograd.grad(y, tensors, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    assert modes == ["guarded"] * 2


def test_a_layer_with_nothing_after_it_is_pytorchs_in_every_call(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (autograd, training):
        monkeypatch.setattr(module, "is_forced", lambda x, mode="": True)
    tensors, grad = made(torch.float32, 37), torch.randn(37, 24)
    for _ in range(3):
        y = cutfuse.linear(*tensors)
        assert type(y.grad_fn).__name__ == "AddmmBackward0"
        torch.autograd.grad(y, tensors, grad)
    assert not launches.launches


def test_fp32_of_any_address_is_multiplied_by_kernels(launches: EmulatedLaunches) -> None:
    """They read single elements where x or the weight does not begin at a multiple of 16 bytes."""
    x, weight, bias = made(torch.float32, 37)
    moved = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape) for t in (x, weight)]
    tensors, grad = [*(t.requires_grad_() for t in moved), bias], torch.randn(37, 24)
    found = direct_step(launches, lambda: step(fused(gelu), tensors, grad))
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce", "_nn_", "_tn_"]
    assert_near(found, step(plain(gelu), tensors, grad))
