"""The head of a language model on a GPU: its products are kernels', and its loops hold on streams and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_tensors import check_repeats
from test_head import IGNORED, compare, cross_entropy, logprob, own_logprob
from torch import Tensor

import cutfuse

pytestmark = pytest.mark.gpu


def make(
    dtype: torch.dtype, rows: int, width: int, classes: int, device: str = "cuda"
) -> tuple[list[Tensor | None], Tensor]:
    generator = torch.Generator().manual_seed(rows + classes)
    x, weight, bias = (
        (scale * torch.randn(*shape, generator=generator)).to(device, dtype).requires_grad_()
        for shape, scale in (((rows, width), 1.0), ((classes, width), width**-0.5), ((classes,), 1.0))
    )
    return [x, weight, bias], torch.randint(classes, (rows,), generator=generator).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width", "classes"), [(7, 768, 50257), (500, 264, 3001), (1024, 1024, 8192)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses(dtype: torch.dtype, rows: int, width: int, classes: int, smoothing: float) -> None:
    tensors, target = make(dtype, rows, width, classes)
    target[::5] = IGNORED
    options: dict[str, Any] = {"softcap": 30.0, "temperature": 1.0, "label_smoothing": smoothing, "z_loss": 1e-4}
    some = 2 * rows * 1024
    for memory in ((some, 0), (some, 2 * some), (1 << 28, 0), (1 << 28, 1 << 28)):
        given = {**options, "reduction": "sum"}
        compare(cutfuse.linear_cross_entropy, cross_entropy, tensors, target, given, *memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probabilities_and_entropies(dtype: torch.dtype) -> None:
    tensors, token = make(dtype, 300, 512, 5000)
    compare(own_logprob, logprob, tensors, token, {"softcap": None, "temperature": 0.7}, 1 << 20)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_step_repeats_to_the_bit_and_in_a_graph(kept_bytes: int) -> None:
    tensors, target = make(torch.bfloat16, 256, 512, 4096)
    x, weight, bias = tensors

    def step() -> list[Tensor]:
        memory = {"part_bytes": 1 << 20, "kept_bytes": kept_bytes}
        loss = cutfuse.linear_cross_entropy(x, weight, target, bias, **memory)  # type: ignore[arg-type]
        return [loss, *torch.autograd.grad(loss, [x, weight, bias])]  # type: ignore[list-item]

    check_repeats(step)


def test_a_step_holds_one_part_at_a_time() -> None:
    """Beside the gradients: a part of the logits' gradient, or two of x's in fp32 where the next is added to one."""
    part_bytes = 32 << 20
    (x, weight, _), target = make(torch.bfloat16, 1024, 256, 65536)

    def step() -> list[Tensor]:
        loss = cutfuse.linear_cross_entropy(x, weight, target, part_bytes=part_bytes)  # type: ignore[arg-type]
        return list(torch.autograd.grad(loss, [x, weight]))  # type: ignore[list-item]

    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = step()
    found = torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in gradients)
    assert part_bytes <= found <= 1.25 * part_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    tensors, target = make(torch.bfloat16, 64, 256, 1000, "cuda:1")
    options: dict[str, Any] = {"softcap": None, "temperature": 1.0, "label_smoothing": 0.0, "z_loss": 0.0}
    compare(cutfuse.linear_cross_entropy, cross_entropy, tensors, target, {**options, "reduction": "mean"}, 1 << 20)
