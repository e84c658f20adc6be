"""Trained layers of 16 bits in compiled models: which are fused, what they keep, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_training import calls, compiled_step, step
from torch import Tensor, fx, nn

import cutfuse
from cutfuse import arguments
from cutfuse.compile.fusion import fuse
from cutfuse.layer import planner, specialize

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

Chain = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory, and the kernels and facts of an H200 for them."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(planner, "device_facts", lambda device: (9, 0, 132))
    monkeypatch.setattr(specialize, "why_interpreted", lambda: "")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained_and_normed(chain: Chain, operand: Tensor) -> Any:
    """The report of a trained product with this chain behind it, at a size at which a frozen one is fused."""

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = chain(F.linear(x, w), r)
        return F.layer_norm(y, (1024,)) * 2 + y.sum()

    x = torch.empty(16384, 1024, dtype=torch.bfloat16, device="meta")
    weight = nn.Parameter(torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta"))
    (product,) = cutfuse.explain_model(model, x, weight, operand).products
    return product


def matrix(trains: bool, rows: int = 16384) -> Tensor:
    return torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta", requires_grad=trains)


@pytest.mark.parametrize(
    ("chain", "operand", "reason"),
    [
        (lambda z, r: z + r, matrix(True), ""),
        (lambda z, r: z * 0.5 - r, matrix(True), ""),
        (lambda z, r: r + z, matrix(False), ""),
        (lambda z, r: z * r[:1] + 1, matrix(True), "the gradient of a factor depends on the product"),
        (lambda z, r: F.gelu(z) + r, matrix(True), "its derivative depends on the product"),
        (lambda z, r: F.silu(z) + r, matrix(False), "its derivative depends on the product"),
    ],
)
def test_what_keeps_the_pre_activation_is_left(h200: None, chain: Chain, operand: Tensor, reason: str) -> None:
    product = trained_and_normed(chain, operand)
    assert product.is_fused == (not reason)
    assert reason in product.reason


def test_a_relu_keeps_its_result(h200: None) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, w)), w)

    x = torch.empty(16384, 1024, dtype=torch.bfloat16, device="meta")
    first, _ = cutfuse.explain_model(model, x, nn.Parameter(matrix(False, 1024))).products
    assert first.program == "relu(z)"


def test_reductions_and_fp32_are_left(h200: None) -> None:
    weight = nn.Parameter(torch.empty(6144, 2560, device="meta"))

    def summed(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).relu().amax(-1)

    for dtype, reason in ((torch.bfloat16, "its rows are reduced"), (torch.float32, "its product is of torch.float32")):
        x = torch.empty(1536, 2560, dtype=dtype, device="meta")
        (product,) = cutfuse.explain_model(summed, x, nn.Parameter(weight.to(dtype))).products
        assert reason in product.reason
        torch._dynamo.reset()


CHAINS: dict[str, Chain] = {
    "residual": lambda z, r: z + r,
    "scaled residual": lambda z, r: r - z * 0.25,
    "relu": lambda z, r: F.relu(z),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (1, 40), (24, 1), ()])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients(everything_fuses: None, name: str, shape: tuple[int, ...], has_bias: bool) -> None:
    """One operator forwards, and PyTorch's operations backwards, as near to fp64 as PyTorch's own gradients."""
    torch.manual_seed(len(shape) + has_bias)
    sizes = [(2, 12, 16), (40, 16), (40,), shape]
    x, weight, bias, operand = (torch.randn(size).bfloat16().requires_grad_() for size in sizes)
    chain = CHAINS[name]

    def model(x: Tensor, weight: Tensor, bias: Tensor, operand: Tensor) -> Tensor:
        z = F.linear(x.view(24, 16), weight, bias if has_bias else None)
        return chain(z, operand)

    found, (forward, backward) = compiled_step(model, (x, weight, bias, operand))
    expected = step(model, (x, weight, bias, operand))
    exact = step(model, tuple(tensor.double().detach().requires_grad_() for tensor in (x, weight, bias, operand)))
    assert calls(forward).count("cutfuse.linear.default") == 1
    assert not any("cutfuse" in name for name in calls(backward))
    for y, own, reference in zip(found, expected, exact, strict=True):
        if own is None or y is None or reference is None:
            assert y is own is reference
            continue
        assert y.dtype == own.dtype
        limit = (own.double() - reference).abs().max() + reference.abs().max() * 2**-8
        assert (y.double() - reference).abs().max() <= limit


def test_nothing_is_kept_for_a_residual(everything_fuses: None) -> None:
    """No tensor of the product's size is an output of the forward graph but the result."""
    tensors = torch.randn(64, 16).bfloat16().requires_grad_(), torch.randn(48, 16).bfloat16().requires_grad_()
    residual = torch.randn(64, 48).bfloat16()
    _, (forward, _) = compiled_step(lambda x, w, r: F.linear(x, w) + r, (*tensors, residual))
    (output,) = (node for node in forward.nodes if node.op == "output")
    kept = [node for node in output.all_input_nodes if node.meta["val"].shape == (64, 48)]
    assert len(kept) == 1


@pytest.mark.parametrize("chain", [lambda z: F.relu(z).float(), lambda z: F.relu(z.float()), lambda z: (-z).float()])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_results_of_another_type(everything_fuses: None, chain: Any, trained: tuple[bool, bool]) -> None:
    """The gradient of the product is of the product's type."""
    tensors = tuple(
        torch.randn(shape).bfloat16().requires_grad_(needed)
        for shape, needed in zip(((6, 16), (8, 16)), trained, strict=True)
    )

    def model(x: Tensor, w: Tensor) -> Tensor:
        return chain(F.linear(x, w))

    found, _ = compiled_step(model, tensors)
    expected = step(model, tensors)
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("chain", "kept"), [(lambda z, r: z * 0.5 - r / 2, 2), (lambda z, r: z * r + 1, 3)])
def test_an_operand_that_is_added_is_not_kept(everything_fuses: None, chain: Chain, kept: int) -> None:
    """Not by the layer itself, so that it may be written where nothing else takes what is not needed away."""
    x, w = (torch.randn(8, 8).bfloat16().requires_grad_() for _ in range(2))
    saved: list[Tensor] = []
    layer = torch.compile(lambda x, w, r: chain(F.linear(x, w), r), backend=run_as_it_is)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, w, torch.randn(8, 8).bfloat16())
    assert len(saved) == kept


def run_as_it_is(module: fx.GraphModule, inputs: Any) -> Any:
    assert [report.is_fused for report in fuse(module)] == [True]
    return module.forward


def test_a_trained_operand_that_is_no_sum(everything_fuses: None) -> None:
    """Its derivative depends on its value, and not on the product."""
    x, w, r = (torch.randn(8, 8).bfloat16().requires_grad_() for _ in range(3))

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return F.linear(x, w) + torch.sigmoid(r) * r - r / 4

    found, _ = compiled_step(model, (x, w, r))
    torch.testing.assert_close(found, step(model, (x, w, r)), rtol=2e-2, atol=2e-2)


def test_a_nan_of_relu_passes_its_gradient(everything_fuses: None) -> None:
    """As PyTorch's derivative of relu does."""
    x = torch.tensor([[1.0, float("nan")], [2.0, 3.0], [-1.0, -1.0]]).bfloat16().requires_grad_()
    weight = torch.ones(8, 2).bfloat16().requires_grad_()
    function = lambda x, w: F.relu(F.linear(x, w))  # noqa: E731
    found, _ = compiled_step(function, (x, weight))
    torch.testing.assert_close(found, step(function, (x, weight)), equal_nan=True)
