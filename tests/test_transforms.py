"""Forward-mode derivatives and torch.func transforms, also where the operators would run otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse.native import use_operators_everywhere


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 8), torch.randn(6, 8)


X, WEIGHT = inputs()
ROW = torch.randn(6, generator=torch.Generator().manual_seed(1))

# (cutfuse's call of x, weight and a row; PyTorch's own)
BATCHED = {
    "linear": (
        lambda x, w, r: cutfuse.linear(x, w, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,)),
        lambda x, w, r: torch.tanh(F.linear(x, w)) * r,
    ),
    "linear_amax": (
        lambda x, w, r: cutfuse.linear(x, w, r, epilogue=torch.sigmoid, reduce="amax"),
        lambda x, w, r: torch.sigmoid(F.linear(x, w, r)).amax(-1),
    ),
    "matrix_vector": (
        lambda x, w, r: cutfuse.linear(x, w, epilogue=lambda z, r: z * r, operands=(r,), reduce="sum"),
        lambda x, w, r: (F.linear(x, w) * r).sum(-1),
    ),
    "pointwise": (
        lambda x, w, r: cutfuse.pointwise(lambda z, r: torch.sin(z) * r, w.t(), r),
        lambda x, w, r: torch.sin(w.t()) * r,
    ),
    "reduce": (
        lambda x, w, r: cutfuse.reduce(w.t(), 0, "logsumexp", prologue=lambda z, r: z * r, operands=(r,)),
        lambda x, w, r: torch.logsumexp(w.t() * r, 0),
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("by", ["is_grads_batched", "vmap"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients(name: str, by: str, create_graph: bool, path: str) -> None:
    found = []
    for call in BATCHED[name]:
        leaves = [t.clone().requires_grad_() for t in (X, WEIGHT, ROW)]
        y = call(*leaves)
        directions = torch.eye(y.numel()).reshape(-1, *y.shape)
        settings = {"allow_unused": True, "create_graph": create_graph, "retain_graph": True}

        def backward(v: Tensor, y: Tensor = y, leaves: list = leaves, settings: dict = settings, **more) -> tuple:
            gradients = torch.autograd.grad(y, leaves, v, **settings, **more)
            return tuple(g for g in gradients if g is not None)

        found.append(backward(directions, is_grads_batched=True) if by != "vmap" else torch.vmap(backward)(directions))
    torch.testing.assert_close(found[0], found[1])
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
    x = X.to(dtype).requires_grad_()
    for y in (
        cutfuse.pointwise(lambda z: (z > 0) * 1.5, x),
        cutfuse.reduce(x, 1, "amax", prologue=lambda z: (z > 0) * 1.5),
        cutfuse.linear(x, WEIGHT.to(dtype), epilogue=lambda z: (z > 0) * 1.5),
    ):
        if y.requires_grad:
            direction = torch.ones(2, *y.shape, dtype=dtype) if batched else torch.ones_like(y)
            (gradient,) = torch.autograd.grad(y, x, direction, is_grads_batched=batched, allow_unused=True)
            assert gradient is None or not gradient.any()


DROP_INS = {
    "LinearSigmoidSum": (8, 6),
    "Sigmoid": (),
    "GemmDivideSumScale": (8, 6, 1.5),
    "SumReduction": (1,),
    "GemmSigmoidScaleResidual": (8, 6, 2.0),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated in PyTorch, still used
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torch.jit.script], ids=["fx", "jit"])
@pytest.mark.parametrize("name", DROP_INS)
def test_older_tracers_get_the_plain_model(name: str, trace) -> None:
    module = getattr(cutfuse.nn, name)(*DROP_INS[name])
    traced = trace(torch.nn.Sequential(module))
    torch.testing.assert_close(traced(X), module(X))
    torch.testing.assert_close(trace(module)(X), module(X))
    assert type(module) is getattr(cutfuse.nn, name)
    for p in module.parameters():
        p.data.mul_(2)
    torch.testing.assert_close(traced(X), module(X))  # the parameters are shared


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


TRANSFORMS = {
    "grad": lambda call: torch.func.grad(lambda x, w, r: call(x, w, r).square().sum(), (0, 1, 2)),
    "vjp": lambda call: lambda x, w, r: (lambda y, back: back(y))(*torch.func.vjp(call, x, w, r)),
    "jvp": lambda call: lambda x, w, r: torch.func.jvp(call, (x, w, r), (x, w, r)),
    "hessian": lambda call: torch.func.hessian(lambda x, w, r: call(x[:1], w, r).square().sum()),
    "jacrev": lambda call: torch.func.jacrev(call, 2),
    "vmap": lambda call: torch.vmap(lambda x, w, r: call(x.unsqueeze(0), w, r), (0, None, None)),
    "vmap_of_grad": lambda call: torch.vmap(
        torch.func.grad(lambda x, w, r: call(x.unsqueeze(0), w, r).sum()), (0, None, None)
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "transform", "is_trained"),
    [
        *(("linear", transform, False) for transform in TRANSFORMS),
        *((name, transform, False) for name in BATCHED if name != "linear" for transform in ("grad", "jvp", "vmap")),
        *((name, "grad", True) for name in BATCHED),
    ],
)
def test_transforms(name: str, transform: str, is_trained: bool, is_compiled: bool) -> None:
    """Dynamo enters a transform that it traces, below which no tensor asks for a gradient."""
    torch._dynamo.reset()
    call, reference = (TRANSFORMS[transform](function) for function in BATCHED[name])
    given = [t.detach().clone().requires_grad_(is_trained) for t in (X, WEIGHT, ROW)]
    expected = reference(*given)
    with use_operators_everywhere():
        found = (torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call)(*given)
    torch.testing.assert_close(found, expected)


def tangent_inside(call: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def forward(x: Tensor, w: Tensor, r: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(t, t.cos()) for t in (x, w, r)]
            tangent: Tensor | None = forward_ad.unpack_dual(call(*dual)).tangent
            return tangent

    return forward


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", BATCHED)
def test_forward_mode(name: str) -> None:
    """Of a function that enters the level itself, also compiled, and of one that is compiled before it has duals."""
    torch._dynamo.reset()
    call, reference = BATCHED[name]
    given = [t.detach() for t in (X, WEIGHT, ROW)]  # other tests have asked for their gradients
    expected = tangent_inside(reference)(*given)
    with use_operators_everywhere():
        eager = tangent_inside(call)(*given)
        found = torch.compile(tangent_inside(call), backend="aot_eager")(*given)
        compiled = torch.compile(call, backend="aot_eager")
        compiled(*given)
        around = tangent_inside(compiled)(*given)
        value = compiled(*given)
    torch.testing.assert_close((eager, found, around), (expected,) * 3)
    torch.testing.assert_close(value, reference(*given))
