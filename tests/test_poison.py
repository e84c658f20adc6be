"""Memory is poisoned before each test on a GPU: what is filled, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from poison import HUGE, NAN, free_blocks, poison

on_gpu = [pytest.mark.gpu, pytest.mark.no_path("calls no public function")]
SIZES = (1, 100, 4096, 200_000, 1 << 20, 10_000_000, 40_000_000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_patterns_are_no_values_that_a_kernel_computes(dtype: torch.dtype) -> None:
    nan, huge = (torch.full((2,), bits, dtype=torch.int32).view(dtype) for bits in (NAN, HUGE))
    assert nan.isnan().all()
    assert (huge > 1e4).all()
    if dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(huge, torch.full_like(huge, 1e30), rtol=0.01, atol=0)


def test_free_blocks_are_those_that_an_allocation_may_be_given() -> None:
    def block(address: int, state: str) -> dict[str, object]:
        return {"address": address, "size": 512, "state": state}

    segments = [
        {"segment_pool_id": (0, 0), "blocks": [block(0, "active_allocated"), block(512, "inactive")]},
        {"segment_pool_id": (0, 1), "blocks": [block(1024, "inactive")]},  # of a CUDA graph
        {"blocks": [block(2048, "active_awaiting_free"), block(2560, "inactive")]},
    ]
    assert list(free_blocks(segments)) == [(512, 512), (2560, 512)]


def is_poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() | (tensor > 9e29)).all())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_what_is_in_use_is_left_alone(device: str) -> None:
    tensors = [torch.full((size,), 3.0, device=device) for size in SIZES[:-1]]
    for _ in range(2):
        poison(device)
        assert all((tensor == 3).all() for tensor in tensors)


class TestOnGpu:
    pytestmark = on_gpu

    def test_every_test_begins_with_poisoned_memory(self) -> None:
        assert is_poisoned(torch.empty(1000, device="cuda"))

    def test_what_is_allocated_next_is_poisoned(self) -> None:
        """Also where a result was, and where nothing was before."""
        results = [torch.ones(size, device="cuda") for size in SIZES]
        del results
        seen = set()
        for _ in range(2):
            poison()
            tensors = [torch.empty(size, device="cuda") for size in SIZES]
            assert all(map(is_poisoned, tensors))
            seen |= {bool(tensor.isnan().all()) for tensor in tensors}
            del tensors
        assert seen == {False, True}

    def test_no_memory_is_taken(self) -> None:
        poison()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        poison()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before

    def test_memory_of_other_streams(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = torch.ones(1 << 20, device="cuda")
            del result
        poison()
        with torch.cuda.stream(stream):
            assert is_poisoned(torch.empty(1 << 20, device="cuda"))
