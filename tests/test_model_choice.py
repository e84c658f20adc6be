"""Which regions are left to the compiler, by the planner's predictions for an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import cutfuse
from bench.model_fusion import kind_of
from cutfuse import arguments
from cutfuse.compile.fusion import fuse
from cutfuse.compile.report import ModelExplanation
from cutfuse.layer import planner

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

H200 = (9, 0, 132)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without memory, and the kernels and facts of an H200 for them."""
    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(planner, "device_facts", lambda device: H200)
    yield
    torch._dynamo.reset()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def explain(function: Callable[..., Any], *inputs: Any) -> ModelExplanation:
    torch._dynamo.reset()
    with torch.no_grad():
        return cutfuse.explain_model(function, *inputs)


def layer(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return empty(m, k, dtype=dtype), empty(n, k, dtype=dtype), empty(n, dtype=dtype)


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def test_a_large_chain_is_fused() -> None:
    assert explain(activated, *layer(1024, 8192, 8192)).fused == 1


def test_leading_dimensions_count_as_rows() -> None:
    x, w, b = layer(1024, 8192, 8192)
    flat, deep = (explain(activated, t, w, b).products[0] for t in (x, x.view(4, 256, 8192)))
    assert deep == flat


def test_what_cublas_does_faster_is_left() -> None:
    """The reason has both predictions, which the benchmark's table of what was fused leaves out."""
    (product,) = explain(activated, *layer(96, 1024, 16384)).products
    assert not product.is_fused
    assert "cuBLAS and another kernel are predicted to take" in product.reason
    assert kind_of(product.reason) == "cuBLAS and another kernel are predicted to take less than a fused one"


WEIGHTS_BY_COLUMNS: dict[str, Callable[..., Tensor]] = {
    "@": lambda x, w, b: F.relu(x @ w),
    "matmul and a bias": lambda x, w, b: F.relu(torch.matmul(x, w) + b),
    "addmm": lambda x, w, b: F.relu(torch.addmm(b, x, w)),
    "Conv1D of GPT-2": lambda x, w, b: F.relu(torch.addmm(b, x.view(-1, 8192), w).view(8, 128, 8192)),
    "the transpose of a transpose": lambda x, w, b: F.relu(F.linear(x, w.t())),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WEIGHTS_BY_COLUMNS)
def test_a_weight_that_is_stored_by_columns_is_fused(name: str, dtype: torch.dtype) -> None:
    found = explain(WEIGHTS_BY_COLUMNS[name], *layer(1024, 8192, 8192, dtype))
    assert found.fused == 1, found


def test_what_reads_no_weight_by_columns_is_left() -> None:
    """The reason tells of the weight that the kernels read, as the model's own is contiguous."""
    x, w, _ = layer(1024, 8192, 8192)
    (product,) = explain(lambda x, w: F.relu(x @ w).sum(-1), x, w).products
    assert product.reason == (
        "weight as [N, K] has strides (1, 8192): its rows are not contiguous, as kernels that reduce rows need them"
    )
    (product,) = explain(lambda x, w: F.relu(x @ w), x, w[:, ::2]).products
    assert product.reason == ("weight as [N, K] has strides (2, 8192): neither its rows nor its columns are contiguous")


def test_a_part_of_the_columns_of_a_weight_by_columns() -> None:
    """As one of the three projections that GPT-2 computes as one product."""
    x, w = empty(4096, 4096), empty(4096, 22016)

    def gate(x: Tensor, w: Tensor) -> Tensor:
        left, right = (x @ w).chunk(2, -1)
        return F.silu(left) * right

    (product,) = explain(gate, x, w).products
    assert product.is_fused or "products of the parts" in product.reason


def test_what_inductor_fuses_with_a_norm_is_left() -> None:
    """There the chain costs no kernel of its own."""

    def normed(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(activated(x, w, b), (8192,), scale)

    (product,) = explain(normed, *layer(1024, 8192, 8192), empty(8192)).products
    assert not product.is_fused
    assert kind_of(product.reason) == (
        "Inductor fuses it with what follows, and cuBLAS's product alone is predicted to take less than a fused one"
    )


def test_the_next_product_absorbs_nothing() -> None:
    def two(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(activated(x, w, b), w.t())

    first, second = explain(two, *layer(1024, 8192, 8192)).products
    assert first.is_fused
    assert not second.is_fused


def test_fp32_products_at_highest_are_regions_of_their_own() -> None:
    x, w, b = layer(4096, 4096, 4096, torch.float32)
    (product,) = explain(lambda x, w, b: F.linear(x, w, b).softmax(-1), x, w, b).products
    assert product.is_fused
    assert product.program == "z"
    for sizes, is_fused in (((64, 64, 64), True), ((907, 2408, 212), False)):
        (small,) = explain(lambda x, w, b: F.linear(x, w, b).softmax(-1), *layer(*sizes, torch.float32)).products
        assert small.is_fused == is_fused


def test_products_of_16_bits_alone_are_pytorchs() -> None:
    (product,) = explain(lambda x, w, b: F.linear(x, w, b).softmax(-1), *layer(4096, 4096, 4096)).products
    assert not product.is_fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training(dtype: torch.dtype) -> None:
    """Inductor fuses the chain with its gradient and what follows; products of fp32 matrices are faster as ours."""
    x, w, b = layer(4096, 4096, 4096, dtype)
    w, b = nn.Parameter(w), nn.Parameter(b)
    torch._dynamo.reset()
    (product,) = cutfuse.explain_model(lambda x, w, b: F.gelu(F.linear(x, w, b)).softmax(-1), x, w, b).products
    assert product.is_fused == (dtype is torch.float32)
    assert product.program == ("z" if dtype is torch.float32 else "")
    assert "differentiates it" in product.reason


@pytest.mark.parametrize("trains", [False, True])
def test_a_sum_that_needs_no_product(trains: bool) -> None:
    """It is fused at every size, trained or not."""
    x, w, b = layer(64, 96, 8)
    w = nn.Parameter(w) if trains else w
    torch._dynamo.reset()
    found = cutfuse.explain_model(lambda x, w, b: (F.linear(x, w, b) / 2 * 1.5).sum(-1), x, w, b)
    assert [product.program for product in found.products] == ["sum(((z / 2) * 1.5), -1)"]
    if trains:
        found = cutfuse.explain_model(lambda x, w, b: F.gelu(F.linear(x, w, b)).sum(-1), x, w, b)
        assert "differentiates it" in found.products[0].reason


def test_a_trained_sum_without_a_product_is_pytorchs_operations() -> None:
    """Which Inductor fuses and differentiates. A trained fp32 product is an operator, forwards and backwards."""
    x, w, b = torch.randn(8, 16), nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(32))
    names: list[set[str]] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.append({str(node.target) for node in graph.graph.nodes if "cutfuse" in str(node.target)})
        return make_boxed_func(graph)

    for model, grad_y, expected in (
        (lambda x, w, b: (F.linear(x, w, b) * 2).sum(-1), torch.randn(8), [set(), set()]),
        (
            lambda x, w, b: F.linear(x, w, b).softmax(-1),
            torch.randn(8, 32),
            [{"cutfuse.linear.default"}, {"cutfuse.product.default"}],
        ),
    ):
        torch._dynamo.reset()
        names.clear()

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            assert [report.is_fused for report in fuse(module)] == [True]
            return aot_autograd(fw_compiler=collect)(module, inputs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cutfuse.compile.choice._why_slower", lambda *_: "")
            y = torch.compile(model, backend=backend)(x, w, b)
        # A gradient of y's squares would multiply y's own errors, which are those of sums that cancel.
        found = torch.autograd.grad(y, (w, b), grad_y)
        reference = model(x, w, b)
        torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-4)  # of sums of 32 numbers
        torch.testing.assert_close(found, torch.autograd.grad(reference, (w, b), grad_y), rtol=1e-5, atol=1e-5)
        assert names == expected


def test_a_mask_would_have_to_be_converted() -> None:
    def masked(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> Tensor:
        return F.linear(x, w, b).masked_fill(m, 0.0)

    given = layer(1024, 8192, 8192)
    (matrix,) = explain(masked, *given, empty(1024, 8192, dtype=torch.bool)).products
    assert "would have to be converted first" in matrix.reason
    (row,) = explain(masked, *given, empty(8192, dtype=torch.bool)).products
    assert "converted" not in row.reason


def test_an_operand_is_not_copied_to_all_rows() -> None:
    def shifted(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return F.relu(F.linear(x, w, b) + r)

    _, w, b = layer(1024, 8192, 8192)
    x = empty(8, 128, 8192)
    (product,) = explain(shifted, x, w, b, empty(128, 8192)).products
    assert "would have to be copied to all rows" in product.reason
    for shape in ((8, 128, 8192), (8, 128, 1), (1, 1, 8192), (8192,), ()):
        (product,) = explain(shifted, x, w, b, empty(*shape)).products
        assert "copied" not in product.reason, shape


def test_a_product_is_split_only_where_the_parts_are_faster() -> None:
    def gate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        left, right = F.linear(x, w, b).chunk(2, -1)
        return F.silu(left) * right

    large, small = (explain(gate, *layer(*sizes)).products[0] for sizes in ((4096, 22016, 4096), (96, 1024, 512)))
    assert large.is_fused or "products of the parts" in large.reason
    assert not small.is_fused


def test_on_a_cpu_everything_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, w, b = (torch.randn(shape) for shape in ((8, 16), (32, 16), (32,)))
    (product,) = explain(activated, x, w, b).products
    assert not product.is_fused
    assert product.reason == "x is on cpu; kernels are for CUDA devices"
