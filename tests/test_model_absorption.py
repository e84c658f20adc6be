"""What fusing a region spares the kernels that Inductor generates around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse import arguments
from cutfuse.compile import choice
from cutfuse.compile.choice import absorbed_bytes
from cutfuse.compile.regions import Region
from cutfuse.layer import planner, specialize

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

M, N, K = 16384, 1024, 1024
MATRIX = 2 * M * N  # bytes


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float | None]]:
    """What was found of each region that Inductor may compute, by its expression."""
    found: dict[str, float | None] = {}

    def observed(region: Region) -> float | None:
        spared = absorbed_bytes(region)
        found.setdefault(repr(region.epilogue.expression), spared)  # of the first product
        return spared

    monkeypatch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
    monkeypatch.setattr(planner, "device_facts", lambda device: (9, 0, 132))
    monkeypatch.setattr(specialize, "why_interpreted", lambda: "")
    monkeypatch.setattr(choice, "absorbed_bytes", observed)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


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


def norm_that_reads_the_residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return normed(summed(x, w, r)).reshape(-1) * r.view(-1)


def next_product(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.matmul(summed(x, w, r), w)


def heads(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    y = summed(x, w, r).view(-1, 256, 16, 64).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y, y)


def computed_operand(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.matmul(F.linear(x, w) + r.cumsum(1), w)


def a_view_of_a_residual(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w) + r.view(16, -1, N).contiguous().view(M, N)
    return normed(y), y


def a_view_in_front_of_a_product(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.matmul(F.linear(x, w) + r.view(16, -1, N).flatten(0, 1), w)


def pieces(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
    left, right = summed(x, w, r).chunk(2, -1)
    return [torch.matmul(left, w[:512]), torch.matmul(right, w[:512])]


def a_slice(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.matmul(summed(x, w, r)[:, :512], w[:512])


def queries_and_keys(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    q, k = summed(x, w, r).view(-1, 256, 2, 8, 64).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, q)


def another_librarys(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return torch.ops.cutfuse_test_absorption.opaque(summed(x, w, r))


@pytest.fixture(scope="module", autouse=True)
def _another_library() -> Iterator[None]:
    library = torch.library.Library("cutfuse_test_absorption", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    torch.library.register_fake("cutfuse_test_absorption::opaque", torch.empty_like, lib=library)
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("function", "matrices"),
    [
        (norm_alone, 1),  # z and the residual, instead of the sum
        (norm_and_result, 2),  # and the sum is stored
        (norm_and_a_later_sum, 2),
        (norm_that_reads_the_residual, 0),
        (next_product, None),
        (heads, None),
        (a_view_of_a_residual, 2),
        (a_view_in_front_of_a_product, None),
        (pieces, None),
        (a_slice, None),
        (queries_and_keys, None),
        (another_librarys, None),
        (computed_operand, 1),  # z is read and the sum is stored, instead of storing the operand
    ],
)
def test_the_bytes_that_are_spared(
    seen: dict[str, float | None], function: Callable[..., Any], matrices: int | None
) -> None:
    with torch.no_grad():
        cutfuse.explain_model(function, empty(M, K), empty(N, K), empty(M, N))
    assert seen["(z + r0)"] == (None if matrices is None else matrices * MATRIX)


def test_a_size_is_no_reader(seen: dict[str, float | None]) -> None:
    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = summed(x, w, r)
        size = y.size()
        return torch.matmul(y, w).view(size)

    x, r = empty(M, K), empty(M, N)
    for tensor in (x, r):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        cutfuse.explain_model(model, x, empty(N, K), r)
    assert seen["(z + r0)"] is None


def test_the_search_ends_soon(seen: dict[str, float | None]) -> None:
    """A residual that the last layer reads too costs no search through the layers between."""

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = norm_alone(x, w, r)
        for _ in range(40):
            y = y.sin()
        return y + r

    with torch.no_grad():
        cutfuse.explain_model(model, empty(M, K), empty(N, K), empty(M, N))
    assert seen["(z + r0)"] == MATRIX  # although that sum may be in the norm's kernel


def test_a_residual_of_a_pre_norm_block_is_fused(seen: dict[str, float | None]) -> None:
    """Inductor's kernel of the norm would read the residual and store the sum, besides what it does of the norm."""
    with torch.no_grad():
        (product,) = cutfuse.explain_model(norm_and_result, empty(M, K), empty(N, K), empty(M, N)).products
    assert product.program == "(z + r0)"


def test_a_residual_of_a_post_norm_block_is_left(seen: dict[str, float | None]) -> None:
    """Nothing stores the sum, so Inductor's kernel reads one matrix less, and the product's one more."""
    with torch.no_grad():
        (product,) = cutfuse.explain_model(norm_alone, empty(M, 4 * K), empty(N, 4 * K), empty(M, N)).products
    assert not product.is_fused
    assert "less in Inductor's kernel" in product.reason
