"""Random models that are trained: a few of them, that planted faults are found, and the processes of many."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import random_trained_models
import torch
from functorch.compile import default_partition, make_boxed_func
from model_checks import PYTORCH_WARNINGS, aot_saving
from random_trained_models import main
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from trained_model_check import STEPS, Verdict, check
from trained_models import CPU_SIZES, PRECISIONS, make_model

from cutfuse.compile import fusion

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("one_thread")]

# Each precision is among them, and so are gates, checkpoints and tied weights.
CPU_SEEDS = (0, 2, 5, 6, 12, 13)
# The last are trained in fp32, and split products of three dimensions whose rows Inductor pads.
GPU_SEEDS = (*range(20), 335, 464, 499, 777)
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
@pytest.mark.parametrize("seed", GPU_SEEDS)
def test_a_model_on_a_gpu(seed: int) -> None:
    verdict = check(seed, "cuda")
    assert not verdict.faults, "\n".join((make_model(seed).source, *verdict.faults))


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


# Processes

may_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def answer(calls: Any, log: str, device: str) -> None:
    """In the place of `serve`: seed 1 ends the process, seed 2 hangs, seed 3 is wrong."""
    Path(log).write_text(f"on {os.environ['TORCHINDUCTOR_CACHE_DIR']}\nlast words\n")
    calls.send(None)
    while True:
        seed = calls.recv()
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 2:
            signal.pause()
        calls.send(Verdict(seed, "fp32", ["is wrong"] if seed == 3 else []))


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Arguments of a run whose processes begin and answer at once."""
    monkeypatch.setattr(random_trained_models, "serve", answer)
    monkeypatch.setattr(random_trained_models, "PROCESSES", multiprocessing.get_context("fork"))
    return ["--devices", "cpu", "--jobs", "2", "--model-seconds", "3", "--faults", str(tmp_path / "faults.txt")]


@may_fork
def test_a_process_that_dies_or_hangs_is_a_fault_and_stops_no_other(
    answering: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*answering, "--models", "6"]) == 1
    text = capsys.readouterr().out
    assert "Seeds 0 to 5: 6 models, 3 with faults, 6 wanted" in text
    assert "ended with exit status -9; " in text
    assert "last words" in text
    assert "no answer within 3 s" in text
    assert "seed 3, fp32: is wrong" in text
    faults = (tmp_path / "faults.txt").read_text()
    assert faults.count("class Model(nn.Module):") == 3
    assert "# seed 3, " in faults
