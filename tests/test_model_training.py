"""Trained layers of 16 bits in compiled models: which are fused, what they keep, and their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import calls, compiled, compiled_step, step
from torch import Tensor, fx, nn

import cutfuse
from cutfuse import arguments, native
from cutfuse.compile import choice
from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ProductReport
from cutfuse.epilogue import Program
from cutfuse.layer import planner, schema

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

Chain = Callable[[Tensor, Tensor], Tensor]


def trained_and_normed(chain: Chain, operand: Tensor) -> Any:
    """The report of a trained product with this chain behind it, at a size at which a frozen one is fused."""

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = chain(F.linear(x, w), r)
        return F.layer_norm(y, (1024,)) * 2 + y.sum()

    (product,) = cutfuse.explain_model(model, matrix(False), matrix(True, 1024), operand).products
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

    first, _ = cutfuse.explain_model(model, matrix(False), matrix(True, 1024)).products
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


def check_beside_fp64(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], found: list[Tensor | None], unit: float
) -> None:
    """Results and gradients are as near to fp64 as PyTorch's own, but for this part of the largest element."""
    exact = step(function, tuple(tensor.detach().double().requires_grad_() for tensor in tensors))
    for y, own, reference in zip(found, step(function, tensors), exact, strict=True):
        if own is None or y is None or reference is None:
            assert y is own is reference
            continue
        assert y.dtype == own.dtype
        limit = (own.double() - reference).abs().max() + reference.abs().max() * unit
        assert (y.double() - reference).abs().max() <= limit


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
    assert calls(forward).count("cutfuse.linear.default") == 1
    assert not any("cutfuse" in name for name in calls(backward))
    check_beside_fp64(model, (x, weight, bias, operand), found, 2**-8)


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


# Trained layers of 16 bits whose backward pass needs the pre-activation: kernels of ours behind cuBLAS's products.


GELU, SILU = "operands=0; gelu z", "operands=0; silu z"
LEFT = "its derivative depends on the product"


def compare(
    program: str, m: int, n: int, k: int, issuer: str = "compiled_code", sums_columns: bool = True
) -> tuple[float, float]:
    matrices = int(program.partition(";")[0].removeprefix("operands="))  # trained, and of the result's size
    forward, backward, parsed = 4 + 2 * matrices, 6 + 4 * matrices, Program.parse(program).native
    launched_by = native.core.Issuer.__members__[issuer]
    return native.core.compare_passes(m, n, k, forward, backward, parsed, sums_columns, 132, launched_by)


@pytest.mark.parametrize(
    ("shape", "own", "generated"),
    [
        ((12608, 3072, 768), 259 + 42.6 + 61.8 + 8.8, 255 + 58.6 + 78.4 + 34.7),
        ((8192, 4096, 1024), 275 + 36.2 + 55.2 + 8.0, 269 + 70.4 + 74.8 + 41.0),
    ],
)
def test_predictions_are_near_what_was_measured(shape: tuple[int, int, int], own: float, generated: float) -> None:
    """gelu in bf16 on an H200: the products, then the passes forwards and backwards with the sum for the bias."""
    found_own, found_generated = compare(GELU, *shape)
    assert abs(found_own / own - 1) < 0.1
    assert 0.8 * generated < found_generated < generated  # never more than it takes


def test_the_host_decides_small_layers() -> None:
    small = 197, 3072, 768
    for issuer, is_ours in (("compiled_code", True), ("compiled_cpp", False), ("graph", False)):
        own, generated = compare(GELU, *small, issuer=issuer)
        assert (own < generated) == is_ours
    own, generated = compare(SILU, 1576, 3072, 768)  # whose products keep the device busy
    assert own > generated


def test_without_a_sum_of_columns_there_is_less_to_gain() -> None:
    large = 12608, 3072, 768
    gains = [generated - own for own, generated in (compare(GELU, *large, sums_columns=s) for s in (True, False))]
    assert gains[0] > gains[1]
    own, generated = compare("operands=1; silu z; mul prev r0", *large, sums_columns=False)
    assert own >= generated


def parameter(*shape: int) -> Tensor:
    return nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))


def first_product(chain: Callable[[Tensor], Tensor], rows: int = 12608) -> ProductReport:
    """The report of a layer with this chain behind it, and then another one."""

    def model(x: Tensor, w: Tensor, b: Tensor, second: Tensor) -> Tensor:
        return F.linear(chain(F.linear(x, w, b)), second)

    x = torch.empty(rows, 768, dtype=torch.bfloat16, device="meta")
    return cutfuse.explain_model(model, x, parameter(3072, 768), parameter(3072), parameter(768, 3072)).products[0]


ROW, SHIFT = parameter(3072), parameter(3072)
MEAN, VARIANCE = (torch.empty(3072, dtype=torch.bfloat16, device="meta") for _ in range(2))
SLOWER = f"{LEFT}, and with its kernels behind the products a training step is predicted to take "
# What follows a product of so many rows, and why it is left.
FOLLOWING: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {
    "gelu": (F.gelu, 12608, ""),
    "silu": (F.silu, 12608, ""),
    "mish": (F.mish, 12608, ""),
    "gelu by tanh": (lambda z: F.gelu(z, approximate="tanh"), 12608, ""),
    "gelu of fewer rows": (F.gelu, 1576, ""),  # torch.compile's takes longer than its silu
    "gelu of few rows": (F.gelu, 1800, ""),
    "silu of fewer rows": (F.silu, 1576, SLOWER),
    "silu of few rows": (F.silu, 1800, SLOWER),
    # The gradient of what is broadcast is summed.
    "row": (lambda z: F.gelu(z) * ROW, 12608, f"{LEFT}$"),
    "expanded": (lambda z: F.silu(z) * ROW.expand(12608, 3072), 12608, f"{LEFT}$"),
    "batch norm": (lambda z: F.gelu(F.batch_norm(z, MEAN, VARIANCE, ROW, SHIFT, False)), 12608, f"{LEFT}$"),
    # PyTorch keeps the result alone, which the next product keeps too; kernels of ours need the pre-activation.
    "tanh": (torch.tanh, 12608, f"{LEFT}$"),
    "sigmoid": (torch.sigmoid, 12608, f"{LEFT}$"),
    "gelu of tanh": (lambda z: F.gelu(torch.tanh(z)), 12608, ""),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_activations_that_gain_by_it_are_ours(h200: None, name: str) -> None:
    chain, rows, reason = FOLLOWING[name]
    product = first_product(chain, rows)
    assert product.is_fused == (not reason)
    assert re.search(reason, product.reason)
    assert reason or product.ended_at == "linear"


@pytest.mark.parametrize(
    ("program", "read"),
    [
        ("operands=1; gelu z; add prev r0", set()),
        ("operands=2; gelu z; mul r1 0.5 -> s0; sub prev r0", set()),
        ("operands=1; gelu z; mul prev r0", {0}),
        ("operands=1; add z r0; gelu prev", {0}),
        ("operands=2; div r0 2.0; add prev r1; add prev z", set()),
        ("operands=1; div 2.0 r0; add prev z", {0}),
        ("operands=1; gt r0 0.0; where prev z 0.0", {0}),
    ],
)
def test_operands_that_a_derivative_reads(program: str, read: set[int]) -> None:
    assert Program.parse(program).operands_in_derivatives == read


def test_devices_without_kernels_have_none(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "device_facts", lambda device: (8, 0, 108))
    product = first_product(F.gelu)
    assert not product.is_fused
    assert "compute capability 9.0" in product.reason


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows trained products is computed by kernels of ours behind them, however long they take."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(choice, "why_generated", lambda region, z, operands, otherwise: "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "chain",
    [lambda z, r: F.gelu(z), lambda z, r: F.silu(z) * r, lambda z, r: torch.tanh(z) + r.float()],
    ids=["gelu", "gate", "another type"],
)
def test_gradients_of_passes(
    passes: None, chain: Callable[[Tensor, Tensor], Tensor], has_bias: bool, dtype: torch.dtype
) -> None:
    """A kernel behind each product, which also sums the columns, as near to fp64 as PyTorch's own gradients."""
    torch.manual_seed(0)
    sizes = [(2, 12, 16), (40, 16), (40,), (2, 12, 40)]
    tensors = tuple(torch.randn(size).to(dtype).requires_grad_() for size in sizes)

    def model(x: Tensor, weight: Tensor, bias: Tensor, operand: Tensor) -> Tensor:
        # All tensors have a gradient.
        return chain(F.linear(x, weight, bias if has_bias else None), operand) + 0 * (bias.sum() + operand.sum())

    found, graphs = compiled_step(model, tensors)
    forward, backward = map(calls, graphs)
    assert [name for name in forward if "cutfuse" in name or "mm" in name] == [
        "aten.addmm.default" if has_bias else "aten.mm.default",
        "cutfuse.pointwise.default",
    ]
    ours = [name for name in backward if "cutfuse" in name or "mm" in name]
    assert ours == ["cutfuse.pointwise_backward.default", "aten.mm.default", "aten.mm.default"]
    check_beside_fp64(model, tensors, found, torch.finfo(dtype).eps)


@pytest.mark.parametrize("trains", [False, True])
def test_an_operand_that_is_added_may_be_written_after_the_call(passes: None, trains: bool) -> None:
    """As in eager: the backward pass reads nothing of it."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8).bfloat16(), torch.randn(16, 8).bfloat16().requires_grad_()
    base = torch.randn(6, 16).bfloat16()

    def model(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight)) + state

    gradients = []
    for function in (model, compiled(model, [])):
        state = base.clone().requires_grad_(trains)
        y = function(x, weight, state)
        with torch.no_grad():
            state.copy_(y)
        gradients.append(torch.autograd.grad(y, [weight, state] if trains else [weight], torch.ones_like(y)))
    for own, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(own, expected, rtol=0.05, atol=0.05)


def test_an_operands_gradient_has_its_type_on_a_cpu() -> None:
    x, r = torch.randn(4, 8).bfloat16(), torch.randn(4, 8)
    outputs = schema.pointwise_backward(x, x, [r], "operands=1; silu z; mul prev r0", "none", None, [0, 1], False)
    assert [y.dtype for y in outputs] == [torch.bfloat16, torch.float32]
