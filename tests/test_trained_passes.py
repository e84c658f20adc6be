"""Trained layers of 16 bits whose backward pass needs the pre-activation: kernels of ours behind cuBLAS's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import cutfuse
from cutfuse import arguments, native
from cutfuse.compile import choice
from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ProductReport
from cutfuse.epilogue import Program
from cutfuse.planning import traced

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

core = native.core
GELU = "operands=0; gelu z"
LEFT = "its derivative depends on the product"


def compare(program: str, elements: int, issuer: str = "compiled_code", sums_columns: bool = True) -> Any:
    matrices = int(program.partition(";")[0].removeprefix("operands="))  # trained, and of the result's size
    forward, backward, parsed = 4 + 2 * matrices, 6 + 4 * matrices, Program.parse(program).native
    return core.compare_passes(elements, forward, backward, parsed, sums_columns, core.Issuer.__members__[issuer])


@pytest.mark.parametrize(
    ("m", "n", "own", "generated"),
    [(12608, 3072, 42.6 + 61.8 + 8.8, 58.6 + 78.4 + 34.7), (8192, 4096, 36.2 + 55.2 + 8.0, 70.4 + 74.8 + 41.0)],
)
def test_predictions_are_near_what_was_measured(m: int, n: int, own: float, generated: float) -> None:
    """gelu in bf16 on an H200, forwards and backwards with the sum for the bias."""
    found_own, found_generated = compare(GELU, m * n, issuer="graph")
    assert abs(found_own / own - 1) < 0.1
    assert 0.6 * generated < found_generated < generated  # never more than it takes


def test_the_host_decides_small_layers() -> None:
    own, generated = compare(GELU, 197 * 3072)
    assert own > 2 * generated
    assert compare(GELU, 197 * 3072, issuer="graph")[0] < 0.5 * own


def test_without_a_sum_of_columns_there_is_less_to_gain() -> None:
    elements = 12608 * 3072
    assert compare(GELU, elements)[0] < compare(GELU, elements)[1]
    own, generated = compare("operands=1; silu z; mul prev r0", elements, sums_columns=False)
    assert own >= generated


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory, and the kernels and facts of an H200 for them."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(traced, "device_facts", lambda device: (9, 0, 132))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def parameter(*shape: int, trains: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=trains)


Follow = Callable[[Tensor, Tensor], Tensor]


def first_product(
    chain: Callable[[Tensor], Tensor],
    rows: int = 12608,
    dtype: torch.dtype = torch.bfloat16,
    trains_bias: bool = True,
    then: Follow = F.linear,
) -> ProductReport:
    """The report of a layer with this chain behind it, and then another one."""

    def model(x: Tensor, w: Tensor, b: Tensor, second: Tensor) -> Tensor:
        return then(chain(F.linear(x, w, b)), second)

    x = torch.empty(rows, 768, dtype=dtype, device="meta")
    tensors = parameter(3072, 768, dtype=dtype), parameter(3072, trains=trains_bias, dtype=dtype)
    return cutfuse.explain_model(model, x, *tensors, parameter(768, 3072, dtype=dtype)).products[0]


@pytest.mark.parametrize("activation", [F.gelu, F.silu, torch.tanh, lambda z: F.gelu(z, approximate="tanh")])
def test_large_activations_are_ours(h200: None, activation: Callable[[Tensor], Tensor]) -> None:
    product = first_product(activation)
    assert product.is_fused
    assert product.ended_at == "linear"


@pytest.mark.parametrize("options", [{"rows": 197}, {"rows": 1576}, {"trains_bias": False}])
def test_what_gains_nothing_is_left(h200: None, options: dict[str, Any]) -> None:
    product = first_product(F.gelu, **options)
    assert not product.is_fused
    assert f"{LEFT}, and its kernels behind the products are predicted to take " in product.reason


def normed(y: Tensor, second: Tensor) -> Tensor:
    return F.layer_norm(y, (3072,)) @ second.t()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"then": normed}, LEFT),
        ({"dtype": torch.float32}, "its product is of torch.float32"),
    ],
)
def test_what_others_compute_with_is_left(h200: None, options: dict[str, Any], reason: str) -> None:
    found = first_product(F.gelu, **options)
    assert "gelu" not in found.program
    assert reason in found.reason


def test_the_gradient_of_what_is_broadcast_is_left(h200: None) -> None:
    scale = parameter(3072)
    product = first_product(lambda z: F.gelu(z) * scale)
    assert not product.is_fused
    assert product.reason.endswith(LEFT)


def test_devices_without_kernels_have_none(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "device_facts", lambda device: (8, 0, 108))
    product = first_product(F.gelu)
    assert not product.is_fused
    assert "compute capability 9.0" in product.reason


def step(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The result, and the gradients of all tensors."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


def calls(graph: fx.Graph) -> list[str]:
    found = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in found if "cutfuse" in name or "mm" in name or "sum" in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "chain",
    [lambda z, r: F.gelu(z), lambda z, r: F.silu(z) * r, lambda z, r: torch.tanh(z) + r.float()],
    ids=["gelu", "gate", "another type"],
)
def test_gradients(
    monkeypatch: pytest.MonkeyPatch, chain: Callable[[Tensor, Tensor], Tensor], has_bias: bool, dtype: torch.dtype
) -> None:
    """A kernel behind each product, which also sums the columns, as near to fp64 as PyTorch's own gradients."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(choice, "why_generated", lambda region, z, operands, otherwise: "")
    torch.manual_seed(0)
    sizes = [(2, 12, 16), (40, 16), (40,), (2, 12, 40)]
    tensors = tuple(torch.randn(size).to(dtype) for size in sizes)

    def model(x: Tensor, weight: Tensor, bias: Tensor, operand: Tensor) -> Tensor:
        # All tensors have a gradient.
        return chain(F.linear(x, weight, bias if has_bias else None), operand) + 0 * (bias.sum() + operand.sum())

    graphs: list[fx.Graph] = []

    def collect(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph)

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        assert [report.is_fused for report in fuse(module)] == [True]
        return aot_autograd(fw_compiler=collect)(module, inputs)

    torch._dynamo.reset()
    found = step(torch.compile(model, backend=backend), tensors)
    forward, backward = map(calls, graphs)
    assert [name for name in forward if "sum" not in name] == [
        "aten.addmm.default" if has_bias else "aten.mm.default",
        "cutfuse.pointwise.default",
    ]
    ours = [name for name in backward if "cutfuse" in name or "mm" in name]
    assert ours == ["cutfuse.pointwise_backward.default", "aten.mm.default", "aten.mm.default"]
    expected, exact = step(model, tensors), step(model, tuple(tensor.double() for tensor in tensors))
    for y, own, reference in zip(found, expected, exact, strict=True):
        assert y.dtype == own.dtype
        limit = (own.double() - reference).abs().max() + reference.abs().max() * torch.finfo(dtype).eps
        assert (y.double() - reference).abs().max() <= limit
