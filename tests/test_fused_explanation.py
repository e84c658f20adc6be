"""What `explain` says of a linear layer on an H200: the kernel, the other ways, and the reasons."""

from __future__ import annotations

import re

import pytest
import torch
from fused_products import arguments_of, explain, inputs

import cutfuse
from cutfuse.epilogue import Epilogue
from cutfuse.layer import linear_plan, planner
from cutfuse.layer.layouts import device_facts
from cutfuse.precision import GUARDED


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_plan, planner):
        monkeypatch.setattr(module, "device_facts", lambda device: (9, 0, 132))


@pytest.mark.parametrize("mode", ["split3", "split6", GUARDED])
def test_explain_takes_every_mode(mode: str) -> None:
    name, reasons = explain(*inputs(1024, 8192, 8192), mode)
    assert name.startswith(("sm90_convert", "sm90_split"))
    assert any("splits the weight" in reason for reason in reasons)
    assert any(reason.startswith("guarded: sm90_convert6") for reason in reasons) == (mode == GUARDED)


def test_explain_says_why_a_faster_kernel_does_not_run() -> None:
    name, reasons = explain(*inputs(100, 4096, 4097), GUARDED)
    assert name is None
    assert "would take" in reasons[0]
    assert reasons[-1].endswith("at least 5% faster than cuBLAS")
    with cutfuse.precision(GUARDED):
        *kernels, cublas = linear_plan.plan_call(arguments_of(*inputs(100, 4096, 4097))).alternatives
    best = min(kernel.microseconds for kernel in kernels if not kernel.rejection)
    assert 0.95 < best / cublas.microseconds < 1


def test_explain_names_a_device_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_plan, planner):
        monkeypatch.setattr(module, "device_facts", device_facts)
    for dtype in (torch.float32, torch.float64):  # the second is no type of the kernels
        x, weight = inputs(8, 8, 8, dtype)
        assert explain(x, weight, GUARDED) == (None, ["fused products run on CUDA devices, not on cpu"])


def test_explain_names_the_kernel_and_the_other_ways() -> None:
    x, weight = inputs(1024, 8192, 8192, torch.bfloat16)
    name, reasons = explain(x, weight, "tf32", program=Epilogue(torch.sigmoid).program)
    assert name.startswith("sm90_bf16_128x256x64_2x1_cooperative, tiles along M first, swizzle ")
    assert reasons[0].startswith("cuBLAS and one more kernel would take ")
    assert len(reasons) == 4
    name, reasons = explain(*inputs(256, 1024, 16384, torch.bfloat16), "tf32", "sum")
    assert name is None
    assert reasons[0].startswith("sm90_bf16_rows_")
    name, reasons = explain(*inputs(4096, 8192, 1024, torch.bfloat16), "tf32", "sum")
    assert name.startswith("sm90_bf16_rows_")
    assert reasons[0].endswith("the matrix of 67 MB that it reduces is not allocated")
    assert reasons[1].startswith("cuBLAS and one more kernel would take ")
    program = Epilogue(lambda z: torch.tanh(torch.sigmoid(z))).program
    name, reasons = explain(*inputs(2048, 4096, 1024, torch.bfloat16), "tf32", program=program)
    assert name is None
    assert all(reason.startswith("sm90_bf16_") for reason in reasons)
    x, weight = inputs(64, 64, 64, torch.bfloat16)
    assert explain(x, weight.t(), "tf32")[0].startswith("sm90_bf16_nn_64x128x64")
    name, reasons = explain(x, weight.t(), "tf32", "amax")
    assert name is None
    assert "as kernels that reduce rows need them" in reasons[0]
    name, reasons = explain(*inputs(64, 63, 64, torch.bfloat16), "tf32", stores_pre_activation=True)
    assert name is None
    assert reasons == sorted(reasons)
    assert all("N is 63" in reason for reason in reasons)


def test_explain_names_what_is_copied() -> None:
    x, weight = inputs(4096, 2050, 1025, torch.bfloat16)
    bias = torch.randn(4100).bfloat16()[::2]
    with cutfuse.precision("tf32"):
        explained = linear_plan.explain_fused(arguments_of(x, weight, bias=bias))
    kernel, *copies = explained.steps
    assert ", with the copies: " in kernel
    assert copies == [
        "the bias is copied first",
        "x, 4096 lines of 1025 elements, 8.5 MB, is copied first, to 1032 elements apart",
        "weight, 2050 lines of 1025 elements, 4.2 MB, is copied first, to 1032 elements apart",
        "the result, 4096 lines of 2050 elements, 16.8 MB, is stored 2056 elements apart and copied",
    ]
    assert explained.workspace_bytes == pytest.approx(2 * (4096 * 1032 + 2050 * 1032 + 4096 * 2056), rel=0.001)


def test_explain_says_where_the_host_decides() -> None:
    """A small layer is one kernel although the GPU is done sooner with cuBLAS and another: that takes two launches."""
    program = Epilogue(lambda z: torch.tanh(z) * z).program
    name, reasons = explain(*inputs(4, 256, 256, torch.bfloat16), "tf32", program=program)
    assert name is not None
    assert reasons[0].startswith("cuBLAS and one more kernel would take ")
    assert reasons[0].endswith(" us (predicted), but the host would take longer to launch them")


@pytest.mark.parametrize("is_trained", [False, True])
def test_explain_times_the_way_that_runs_and_gives_the_others_as_reasons(
    is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutfuse.arguments, "why_composed", lambda x, arithmetic: "")
    x, weight = (torch.empty(size, 1024, dtype=torch.bfloat16) for size in (2048, 4096))
    weight.requires_grad_(is_trained)
    explanation = cutfuse.explain(x, weight, epilogue=lambda z: torch.tanh(torch.sigmoid(z)))
    assert explanation.path == "unfused"
    assert explanation.steps[0] == "cuBLAS: torch.mm"
    after = "pointwise kernel" if is_trained else "pointwise kernel, in place"
    assert re.fullmatch(rf"{after}: [\d.]+ us predicted with the product", explanation.steps[1])
    assert explanation.reasons
    assert all(re.fullmatch(r"sm90_\w+ would take [\d.]+ us \(predicted\)", reason) for reason in explanation.reasons)
