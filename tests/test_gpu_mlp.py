"""An MLP as one node on a GPU: its gradients, what it keeps, and that its steps hold on streams and in graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gpu_tensors import check_repeats
from mlp_cases import check_case, make, one_node, random_case  # noqa: F401
from torch import Tensor

import cutfuse

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("seed", range(102))
def test_random_mlps(seed: int, request: pytest.FixtureRequest) -> None:
    if seed % 2:  # others choose by their size
        request.getfixturevalue("one_node")
    check_case(random_case(seed, DTYPES[seed // 34], "cuda", scale=(1, 8, 16)[seed % 3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "gate", "options"),
    [
        ("relu squared", False, {"with_biases": False}),
        ("gelu", False, {"with_residual": True}),
        ("silu", True, {"with_biases": False}),
        ("silu", True, {"is_pair": True}),
        ("gelu tanh", False, {"recompute": True}),
    ],
)
@pytest.mark.parametrize("rows", [7, 1576, 4096])
def test_mlps_of_models(rows: int, activation: str, gate: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    sizes = (768, 3072, 768) if not gate else (512, 1376, 512)
    check_case(
        make(rows, dtype, activation=activation, gate=gate, leading=(rows,), sizes=sizes, device="cuda", **options)
    )


def bytes_of(forward: Callable[[], Tensor], trained: Sequence[Tensor] = ()) -> tuple[int, int]:
    """What a forward pass leaves allocated beside its result, until the backward pass, and the peak of both passes.

    trained: of which the backward pass computes gradients, if there is one.
    """
    for _ in range(2):  # the first one has kernels planned and compiled
        cutfuse.wait()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = forward()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
        if trained:
            torch.autograd.grad(y, trained, torch.ones_like(y))
            torch.cuda.synchronize()
        del y
    return kept, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("activation", "gate", "recompute", "of_eager"),
    [
        ("gelu", False, False, 0.55),
        ("relu squared", False, False, 0.51),
        ("silu", True, False, 0.60),
        ("gelu", False, True, 0.05),
        ("silu", True, True, 0.05),
    ],
)
def test_memory_that_is_kept(activation: str, gate: bool, recompute: bool, of_eager: float) -> None:
    rows, width = 4096, 4096
    case = make(
        0, torch.bfloat16, activation=activation, gate=gate, leading=(rows,), sizes=(512, width, 512), device="cuda"
    )
    (found, _), (eager, _) = bytes_of(lambda: case.call(recompute=recompute)), bytes_of(case.eager)
    assert found <= of_eager * eager
    matrices = 0 if recompute else 2 if gate else 1
    assert found <= matrices * rows * width * 2 + (1 << 20)


@pytest.mark.parametrize(
    ("activation", "gate", "matrices"),
    [
        ("relu squared", False, 2),  # h and z's gradient
        ("gelu", False, 2),  # z and the gradient of h; then that of z and h in their places
        ("silu", True, 4),  # both pre-activations, the gradient of h, and that of the second
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_peak_of_a_step(activation: str, gate: bool, matrices: int, recompute: bool) -> None:
    rows, width = 4096, 4096
    sizes = (512, width, 512)
    case = make(0, torch.bfloat16, activation=activation, gate=gate, leading=(rows,), sizes=sizes, device="cuda")
    case.options["recompute"] = recompute
    # The result, the gradient that arrives and those of x and of the weights have 1/8 of a matrix each, or 2/8.
    _, peak = bytes_of(case.call, list(case.tensors.values()))
    assert peak <= (matrices + 0.8) * rows * width * 2


@pytest.mark.usefixtures("one_node")
def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    for gate in (False, True):
        case = make(0, torch.bfloat16, gate=gate, leading=(256,), sizes=(512, 1024, 512), device="cuda")
        tensors = list(case.tensors.values())
        for _ in range(2):  # planned, and then as it was planned
            y = case.call()
            first, second, last = (
                torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=k < 2) for k in range(3)
            )
            assert all(map(torch.equal, first, second))
            assert all(map(torch.equal, first, last))


@pytest.mark.parametrize("way", ["one_node", "layers"])
def test_a_step_repeats_to_the_bit_and_in_a_graph(way: str, request: pytest.FixtureRequest) -> None:
    if way == "one_node":
        request.getfixturevalue(way)
    case = make(0, torch.bfloat16, gate=True, leading=(256,), sizes=(512, 1024, 512), device="cuda")
    grad = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)

    def step() -> list[Tensor]:
        y = case.call()
        return [y, *torch.autograd.grad(y, list(case.tensors.values()), grad)]

    check_repeats(step)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    check_case(make(0, torch.bfloat16, leading=(64,), sizes=(256, 512, 256), device="cuda:1"))
