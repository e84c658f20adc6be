"""Random models that are trained, and that planted faults are found in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from model_checks import PYTORCH_WARNINGS, aot_saving
from random_runs import check_seeds
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from trained_model_check import STEPS, check
from trained_models import CPU_SIZES, PRECISIONS, make_model

from cutfuse.compile import fusion

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("one_thread")]

# Each precision is among them, and so are gates, checkpoints and tied weights.
CPU_SEEDS = (0, 2, 5, 6, 12, 13)
# The last are trained in fp32, and split products of three dimensions whose rows Inductor pads.
GPU_SEEDS = (*range(28), 335, 464, 499, 777)
SHARES = len(GPU_SEEDS)  # that processes of pytest-xdist take side by side
PLAIN = 18  # in fp32, without jumps


def fused(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd behind the fusion pass, without a compiler."""
    fusion.fuse(module)
    return aot_saving(module, inputs)


@pytest.mark.parametrize("seed", CPU_SEEDS)
def test_a_model_is_as_near_to_fp64_as_pytorchs(seed: int) -> None:
    verdict = check(seed, "cpu", aot_saving, fused)
    assert [verdict.faults, verdict.pytorchs, verdict.skipped] == [[], [], ""]
    assert verdict.products
    assert verdict.tensors > 2


@pytest.mark.gpu
@pytest.mark.no_path("compiled models call operators")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", range(SHARES))
def test_models_on_a_gpu(share: int, request: pytest.FixtureRequest) -> None:
    def find(seed: int) -> str:
        faults = check(seed, "cuda").faults
        return "\n".join((make_model(seed).source, *faults)) if faults else ""

    check_seeds(request, f"trained models, {share}", GPU_SEEDS[share::SHARES], find)


def test_models_differ_and_a_seed_gives_one() -> None:
    sources = [make_model(seed, CPU_SIZES).source for seed in range(60)]
    assert len(set(sources)) == 60
    assert sources[:5] == [make_model(seed, CPU_SIZES).source for seed in range(5)]
    assert {make_model(seed, CPU_SIZES).precision for seed in range(60)} == set(PRECISIONS)
    text = "\n".join(sources)
    for word in ("chunk", "split", "torch.cat", "permute", "view", "LayerNorm", "Dropout", "checkpoint", "weight.t()"):
        assert word in text
    assert all(f"{name}.requires_grad_(False)" in text for name in ("weight", "bias"))


def planted(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """A backend that changes the matrices of graphs, forwards and backwards. change is also given the run's number."""
    runs = iter(range(1000))

    def compile_graph(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> list[Any]:
            number = next(runs)
            return [
                change(y, number) if isinstance(y, Tensor) and y.dim() > 1 and y.is_floating_point() else y
                for y in graph(*inputs)
            ]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compile_graph, partition_fn=default_partition)


def unwritten(y: Tensor, number: int) -> Tensor:
    found = torch.empty_like(y)
    found[..., :-1] = y[..., :-1]
    return found


def one_element(y: Tensor, number: int) -> Tensor:
    found = y.clone()
    found[(-1,) * y.dim()] += y.square().mean().sqrt()
    return found


FAULTS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "unwritten": (unwritten, "errors of four steps"),
    "one element": (one_element, "errors of four steps"),
    "rounded": (lambda y, number: y.bfloat16().to(y.dtype), "errors of four steps"),
    "wrong once": (lambda y, number: y * (1.1 if number == 2 * STEPS - 1 else 1), "errors of four steps"),
    "not repeatable": (lambda y, number: y * (1 + number % 3 * 2.0**-23), "two steps on one input differ"),
    "failing": (lambda y, number: y.view(-1, y.shape[-1] + 1), "RuntimeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    change, message = FAULTS[name]
    verdict = check(PLAIN, "cpu", aot_saving, planted(change))
    assert any(message in fault for fault in verdict.faults), verdict


def test_nothing_planted_is_no_fault() -> None:
    assert not check(PLAIN, "cpu", aot_saving, planted(lambda y, number: y)).faults


def test_what_is_wrong_in_pytorchs_compiler_too_is_no_fault() -> None:
    verdict = check(PLAIN, "cpu", planted(lambda y, number: y * 1.1), planted(lambda y, number: y * 1.1))
    assert not verdict.faults
    verdict = check(PLAIN, "cpu", planted(lambda y, number: y * float("nan")), aot_saving)
    assert not verdict.faults
    assert verdict.pytorchs
