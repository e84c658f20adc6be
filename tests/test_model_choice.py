"""Which regions are left to the compiler, by the planner's predictions for an H200."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import calls, compiled
from torch import Tensor, fx, nn

import cutfuse
from bench.model_suite import kind_of
from cutfuse.compile import choice
from cutfuse.compile.choice import absorbed_bytes
from cutfuse.compile.regions import Region
from cutfuse.compile.report import ModelExplanation, ProductReport

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"), pytest.mark.usefixtures("h200")]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def explain(function: Callable[..., Any], *inputs: Any) -> ModelExplanation:
    with torch.no_grad():
        return cutfuse.explain_model(function, *inputs)


def layer(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return empty(m, k, dtype=dtype), empty(n, k, dtype=dtype), empty(n, dtype=dtype)


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def test_a_large_chain_is_fused_whose_leading_dimensions_count_as_rows() -> None:
    x, w, b = layer(1024, 8192, 8192)
    flat, deep = (explain(activated, t, w, b).products[0] for t in (x, x.view(4, 256, 8192)))
    assert flat.is_fused
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


def test_what_inductor_fuses_with_a_norm_is_left() -> None:
    """There the chain costs no kernel of its own."""

    def normed(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(activated(x, w, b), (8192,), scale)

    (product,) = explain(normed, *layer(1024, 8192, 8192), empty(8192)).products
    assert not product.is_fused
    assert kind_of(product.reason) == (
        "Inductor fuses it with what follows, and cuBLAS's product alone is predicted to take less than a fused one"
    )


def test_of_kernels_over_copies_the_fastest_is_told_of() -> None:
    """Rows of 50 and of 100 elements do not begin at multiples of 16 bytes; several kernels could run over copies."""
    inputs = layer(16384, 100, 50)
    (product,) = explain(activated, *inputs).products
    assert not product.is_fused
    expected = r"a fused kernel would take \d+ us \(predicted\) with copies to rows of whole 16 bytes, and cuBLAS \d+"
    assert re.fullmatch(expected, product.reason)
    (reason,) = cutfuse.explain(*inputs, epilogue=F.relu, device="H200").reasons
    assert re.fullmatch(r"sm90_\w+: would take \d+ us .* and cuBLAS \d+", reason)


def test_a_fused_row_tells_of_a_longer_region_as_one() -> None:
    """With the sum, cuBLAS and Inductor would be faster, and the product alone is not."""

    def normed(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return F.layer_norm(r + F.linear(x, w, b), (256,))

    inputs = *layer(1024, 256, 256, torch.float32), empty(1024, 256, dtype=torch.float32)
    (product,) = explain(normed, *inputs).products
    assert (product.is_fused, product.program, product.ended_at) == (True, "z", "add")
    assert product.reason.startswith("a longer region is left: Inductor fuses it with what follows")
    assert product.times.after < product.times.before


def test_the_next_product_absorbs_nothing() -> None:
    def two(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(activated(x, w, b), w.t())

    first, second = explain(two, *layer(1024, 8192, 8192)).products
    assert first.is_fused
    assert not second.is_fused


@pytest.mark.parametrize(
    ("sizes", "dtype", "is_fused"),
    [
        ((4096, 4096, 4096), torch.float32, True),
        ((64, 64, 64), torch.float32, True),
        ((907, 2408, 212), torch.float32, False),
        ((4096, 4096, 4096), torch.bfloat16, False),
    ],
)
def test_fp32_products_at_highest_are_regions_of_their_own(
    sizes: tuple[int, int, int], dtype: torch.dtype, is_fused: bool
) -> None:
    (product,) = explain(lambda x, w, b: F.linear(x, w, b).softmax(-1), *layer(*sizes, dtype)).products
    assert product.is_fused == is_fused
    assert product.program == ("z" if is_fused else "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training(dtype: torch.dtype) -> None:
    """Inductor fuses the chain with its gradient and what follows; products of fp32 matrices are faster as ours."""
    x, w, b = layer(4096, 4096, 4096, dtype)
    w, b = nn.Parameter(w), nn.Parameter(b)
    (product,) = cutfuse.explain_model(lambda x, w, b: F.gelu(F.linear(x, w, b)).softmax(-1), x, w, b).products
    assert product.is_fused == (dtype is torch.float32)
    assert product.program == ("z" if dtype is torch.float32 else "")
    assert "differentiates it" in product.reason


@pytest.mark.parametrize("trains", [False, True])
def test_a_sum_that_needs_no_product(trains: bool) -> None:
    """It is fused at every size, trained or not."""
    x, w, b = layer(64, 96, 8)
    w = nn.Parameter(w) if trains else w
    found = cutfuse.explain_model(lambda x, w, b: (F.linear(x, w, b) / 2 * 1.5).sum(-1), x, w, b)
    assert [product.program for product in found.products] == ["sum(((z / 2) * 1.5), -1)"]
    if trains:
        found = cutfuse.explain_model(lambda x, w, b: F.gelu(F.linear(x, w, b)).sum(-1), x, w, b)
        assert "differentiates it" in found.products[0].reason


def test_a_trained_sum_without_a_product_is_pytorchs_operations() -> None:
    """Which Inductor fuses and differentiates. A trained fp32 product is an operator, forwards and backwards."""
    x, w, b = torch.randn(8, 16), nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(32))
    for model, grad_y, expected in (
        (lambda x, w, b: (F.linear(x, w, b) * 2).sum(-1), torch.randn(8), [set(), set()]),
        (
            lambda x, w, b: F.linear(x, w, b).softmax(-1),
            torch.randn(8, 32),
            [{"cutfuse.linear.default"}, {"cutfuse.product.default"}],
        ),
    ):
        graphs: list[fx.Graph] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cutfuse.compile.choice._why_slower", lambda *_: "")
            y = compiled(model, graphs)(x, w, b)
        # A gradient of y's squares would multiply y's own errors, which are those of sums that cancel.
        found = torch.autograd.grad(y, (w, b), grad_y)
        reference = model(x, w, b)
        torch.testing.assert_close(y, reference, rtol=1e-5, atol=1e-4)  # of sums of 32 numbers
        torch.testing.assert_close(found, torch.autograd.grad(reference, (w, b), grad_y), rtol=1e-5, atol=1e-5)
        assert [{name for name in calls(graph) if "cutfuse" in name} for graph in graphs] == expected


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


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_product_is_split_only_where_the_parts_are_faster(by_columns: bool) -> None:
    """By columns is the weight of the three projections that GPT-2 computes as one product."""

    def gate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        left, right = (x @ w if by_columns else F.linear(x, w, b)).chunk(2, -1)
        return F.silu(left) * right

    def explain_gate(m: int, n: int, k: int) -> ProductReport:
        x, w, b = layer(m, n, k)
        return explain(gate, x, empty(k, n) if by_columns else w, b).products[0]

    large = explain_gate(4096, 22016, 4096)
    assert large.is_fused or "products of the parts" in large.reason
    assert not explain_gate(96, 1024, 512).is_fused


# What fusing a region spares the kernels that Inductor generates around it


M, N, K = 16384, 1024, 1024
MATRIX = 2 * M * N  # bytes
Model = Callable[[Tensor, Tensor, Tensor], Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What was found of each region that Inductor may compute, by its expression."""
    found: dict[str, float | None] = {}

    def observed(region: Region) -> float | None:
        spared = absorbed_bytes(region)
        found.setdefault(repr(region.epilogue.expression), spared)  # of the first product
        return spared

    monkeypatch.setattr(choice, "absorbed_bytes", observed)
    return found


def explain_layer(model: Model, k: int = K) -> ModelExplanation:
    return explain(model, empty(M, k), empty(N, k), empty(M, N))


def summed(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.linear(x, w) + r


def normed(y: Tensor) -> Tensor:
    return F.layer_norm(y, (N,))


def norm_alone(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return normed(summed(x, w, r))


def norm_and_result(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = summed(x, w, r)
    return normed(y), y


def norm_and_a_later_sum(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    y = summed(x, w, r)
    return torch.matmul(normed(y), w).view(y.shape) + y


def next_product(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.matmul(summed(x, w, r), w)


def a_view_of_a_residual(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w) + r.view(16, -1, N).contiguous().view(M, N)
    return normed(y), y


def pieces(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
    left, right = summed(x, w, r).chunk(2, -1)
    return [torch.matmul(left, w[:512]), torch.matmul(right, w[:512])]


def queries_and_keys(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    q, k = summed(x, w, r).view(-1, 256, 2, 8, 64).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, q)


def a_layer_far_behind(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """The residual is read there too, which costs no search through the layers between."""
    y = norm_alone(x, w, r)
    for _ in range(40):
        y = y.sin()
    return y + r


@pytest.fixture(scope="module", autouse=True)
def _another_library() -> Iterator[None]:
    library = torch.library.Library("cutfuse_test_absorption", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    torch.library.register_fake("cutfuse_test_absorption::opaque", torch.empty_like, lib=library)
    yield
    library._destroy()


MODELS: dict[str, tuple[Model, int | None]] = {
    "norm alone": (norm_alone, 1),  # z and the residual, instead of the sum
    "norm and result": (norm_and_result, 2),  # and the sum is stored
    "norm and a later sum": (norm_and_a_later_sum, 2),
    "norm that reads the residual": (lambda x, w, r: norm_alone(x, w, r).reshape(-1) * r.view(-1), 0),
    "a layer far behind": (a_layer_far_behind, 1),  # although that sum may be in the norm's kernel
    "next product": (next_product, None),
    "a view of a residual": (a_view_of_a_residual, 2),
    "a view in front of a product": (lambda x, w, r: next_product(x, w, r.view(16, -1, N).flatten(0, 1)), None),
    "pieces": (pieces, None),
    "queries and keys": (queries_and_keys, None),
    "another library's": (lambda x, w, r: torch.ops.cutfuse_test_absorption.opaque(summed(x, w, r)), None),
    # z is read and the sum is stored, instead of storing the operand
    "computed operand": (lambda x, w, r: next_product(x, w, r.cumsum(1)), 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_bytes_that_are_spared(seen: dict[str, float | None], name: str) -> None:
    model, matrices = MODELS[name]
    explain_layer(model)
    assert seen["(z + r0)"] == (None if matrices is None else matrices * MATRIX)


def test_a_size_is_no_reader(seen: dict[str, float | None]) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = summed(x, w, r)
        size = y.size()
        return torch.matmul(y, w).view(size)

    x, r = empty(M, K), empty(M, N)
    for tensor in (x, r):
        torch._dynamo.mark_dynamic(tensor, 0)
    explain(model, x, empty(N, K), r)
    assert seen["(z + r0)"] is None


def test_a_residual_of_a_pre_norm_block_is_fused() -> None:
    """Inductor's kernel of the norm would read the residual and store the sum, besides what it does of the norm."""
    (product,) = explain_layer(norm_and_result).products
    assert product.program == "(z + r0)"


def test_a_residual_of_a_post_norm_block_is_left() -> None:
    """Nothing stores the sum, so Inductor's kernel reads one matrix less, and the product's one more."""
    (product,) = explain_layer(norm_alone, 4 * K).products
    assert not product.is_fused
    assert "less in Inductor's kernel" in product.reason
