"""torch.func's transforms, batched and further derivatives and forward mode, also where the operators would run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from public_calls import CALLS, TENSORS
from torch import Tensor

import cutfuse
from cutfuse.native import use_operators_everywhere

X, WEIGHT = TENSORS["x"], TENSORS["w"]
TOLERANCES = {"rtol": 1e-4, "atol": 1e-5}
DYNAMO_WARNINGS = ("ignore:.*torch.jit", "ignore:Dynamo detected a call to a `functools.lru_cache`")


def leaves_of(name: str) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in CALLS[name].given()]


def second_derivatives(y: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(gradient.sin().sum() for gradient in first), leaves)  # type: ignore[arg-type]


def batched_gradients(create_graph: bool, is_vmap: bool) -> Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]:
    def differentiate(y: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        def backward(v: Tensor, **more: bool) -> tuple[Tensor, ...]:
            return torch.autograd.grad(y, leaves, v, create_graph=create_graph, retain_graph=True, **more)

        directions = torch.eye(y.numel()).reshape(-1, *y.shape)
        return torch.vmap(backward)(directions) if is_vmap else backward(directions, is_grads_batched=True)

    return differentiate


DERIVATIVES = {
    "second": second_derivatives,
    "batched": batched_gradients(create_graph=False, is_vmap=False),
    "batched with a graph": batched_gradients(create_graph=True, is_vmap=False),
    "vmap": batched_gradients(create_graph=False, is_vmap=True),
    "vmap with a graph": batched_gradients(create_graph=True, is_vmap=True),
}


@pytest.mark.parametrize("by", DERIVATIVES)
@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_and_batched_gradients(name: str, by: str, path: str) -> None:
    found = []
    for call in CALLS[name][1:]:
        leaves = leaves_of(name)
        found.append(DERIVATIVES[by](call(*leaves), leaves))
    torch.testing.assert_close(*found, **TOLERANCES)
    assert [g.requires_grad for g in found[0]] == [g.requires_grad for g in found[1]]


@pytest.mark.parametrize("reduction", [None, "sum", "amax"])
def test_what_the_result_does_not_read_has_no_gradient(reduction: str | None, path: str) -> None:
    """Not zeros, which infinite gradients would make NaN."""
    x = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]], requires_grad=True)
    w, b, r, s = (torch.randn(shape, requires_grad=True) for shape in ((2, 2), (2,), (2,), (2,)))
    y = cutfuse.linear(x, w, b, epilogue=lambda z, r, s: torch.where(s > 0, r, -r), operands=(r, s), reduce=reduction)
    found = torch.autograd.grad(y.sum(), (x, w, b, r, s), allow_unused=True)
    assert [gradient is None for gradient in found] == [True, True, True, False, True]
    y = cutfuse.reduce(x, 1, reduction or "mean", prologue=lambda z, r: torch.sigmoid(z), operands=(r,))
    found = torch.autograd.grad(y.sum(), (x, r), allow_unused=True)
    assert [gradient is None for gradient in found] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_a_function_of_comparisons_only_has_no_gradient(dtype: torch.dtype, batched: bool, path: str) -> None:
    x = X.to(dtype, copy=True).requires_grad_()
    for y in (
        cutfuse.pointwise(lambda z: (z > 0) * 1.5, x),
        cutfuse.reduce(x, 1, "amax", prologue=lambda z: (z > 0) * 1.5),
        cutfuse.linear(x, WEIGHT.to(dtype), epilogue=lambda z: (z > 0) * 1.5),
    ):
        if y.requires_grad:
            direction = torch.ones(2, *y.shape, dtype=dtype) if batched else torch.ones_like(y)
            (gradient,) = torch.autograd.grad(y, x, direction, is_grads_batched=batched, allow_unused=True)
            assert gradient is None or not gradient.any()


def test_fx_of_the_functions_says_what_to_do() -> None:
    for call in (
        lambda x: cutfuse.linear(x, WEIGHT, epilogue=torch.tanh),
        lambda x: cutfuse.pointwise(torch.tanh, x),
        lambda x: cutfuse.sum(x, 1),
    ):
        with pytest.raises(TypeError, match=r"x is a torch\.fx\.Proxy, .* use torch\.export or torch\.compile"):
            torch.fx.symbolic_trace(call)


def test_vmap_over_a_captured_scalar_names_operands(path: str) -> None:
    scales = torch.tensor([0.5, 2.0])
    with pytest.raises(cutfuse.EpilogueError, match=r"torch.vmap maps over: pass it through operands="):
        torch.vmap(lambda s: cutfuse.pointwise(lambda z: z * s, X))(scales)
    actual = torch.vmap(lambda s: cutfuse.pointwise(lambda z, s: z * s, X, s))(scales)
    torch.testing.assert_close(actual, scales[:, None, None] * X)


Function = Callable[..., Tensor]


def of_one_row(call: Function) -> Function:
    return lambda x, *rest: call(x.unsqueeze(0), *rest)


def over_rows(call: Function) -> Callable[..., object]:
    return lambda x, *rest: torch.vmap(call, (0, *[None] * len(rest)))(x, *rest)


def gradient(call: Function) -> Callable[..., object]:
    return lambda *given: torch.func.grad(lambda *given: call(*given).square().sum(), tuple(range(len(given))))(*given)


TRANSFORMS: dict[str, Callable[[Function], Callable[..., object]]] = {
    "grad": gradient,
    "jvp": lambda call: lambda *given: torch.func.jvp(call, given, given),
    "vmap": lambda call: over_rows(of_one_row(call)),
    "vjp": lambda call: lambda *given: (lambda y, back: back(y))(*torch.func.vjp(call, *given)),
    "hessian": lambda call: torch.func.hessian(lambda x, *rest: call(x[:1], *rest).square().sum()),
    "jacrev": lambda call: torch.func.jacrev(call, 2),
    "vmap_of_grad": lambda call: over_rows(torch.func.grad(lambda *given: of_one_row(call)(*given).sum())),
}
TRANSFORMED = ("rows", "affine rows", "pointwise", "reduce", "mlp")
CASES = [
    *(("linear", transform, False) for transform in TRANSFORMS),
    *((name, transform, False) for name in TRANSFORMED for transform in ("grad", "jvp", "vmap")),
    *((name, "grad", True) for name in ("linear", *TRANSFORMED)),
]


@pytest.mark.filterwarnings(*DYNAMO_WARNINGS)
@pytest.mark.parametrize(
    ("name", "transform", "is_trained", "is_compiled"),
    [
        *((*case, is_compiled) for case in CASES for is_compiled in (False, True)),
        *(("head", transform, False, False) for transform in TRANSFORMS),
    ],
)
def test_transforms(name: str, transform: str, is_trained: bool, is_compiled: bool) -> None:
    """Dynamo enters a transform that it traces, below which no tensor asks for a gradient."""
    torch._dynamo.reset()
    call, reference = (TRANSFORMS[transform](function) for function in CALLS[name][1:])
    given = [tensor.clone().requires_grad_(is_trained) for tensor in CALLS[name].given()]
    expected = reference(*given)
    with use_operators_everywhere():
        found = (torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call)(*given)
    torch.testing.assert_close(found, expected, **TOLERANCES)


def tangent_inside(call: Function) -> Callable[..., Tensor | None]:
    def forward(*given: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, t.cos()) for t in given]
            tangent: Tensor | None = forward_ad.unpack_dual(call(*dual)).tangent
            return tangent

    return forward


@pytest.mark.filterwarnings(*DYNAMO_WARNINGS)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "head"])  # which Dynamo of PyTorch 2.8 cannot trace
def test_forward_mode(name: str) -> None:
    """Of a function that enters the level itself, also compiled, and of one that is compiled before it has duals."""
    torch._dynamo.reset()
    _, call, reference = CALLS[name]
    given = CALLS[name].given()
    expected = tangent_inside(reference)(*given)
    with use_operators_everywhere():
        eager = tangent_inside(call)(*given)
        found = torch.compile(tangent_inside(call), backend="aot_eager")(*given)
        compiled = torch.compile(call, backend="aot_eager")
        compiled(*given)
        around = tangent_inside(compiled)(*given)
        value = compiled(*given)
    torch.testing.assert_close((eager, found, around), (expected,) * 3, **TOLERANCES)
    torch.testing.assert_close(value, reference(*given), **TOLERANCES)
