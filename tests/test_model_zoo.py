"""The models of the models suite, small, on a CPU: they run and train, and a compiler gets them in one graph."""

from __future__ import annotations

import pytest
import torch

from bench.machine import installed_version
from bench.model_suite import in_fp64, output_of, widened_inputs
from bench.model_zoo import FORWARD, MODELS, TRAINING, Model

CPU = torch.device("cpu")
pytestmark = [
    # Of the packages' own, where they are first imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread", "fresh_dynamo"),
]


def is_installed(model: Model) -> bool:
    """Whether the model can be built here."""
    return not model.package or installed_version(model.package) is not None


PASSES = [
    pytest.param(
        model,
        kind,
        id=f"{model.name}-{kind}",
        marks=pytest.mark.skipif(not is_installed(model), reason=f"{model.package} is not installed"),
    )
    for model in MODELS
    for kind in (FORWARD, TRAINING)
    if kind == FORWARD or model.batches.training is not None
]


@pytest.mark.parametrize(("model", "kind"), PASSES)
def test_a_model_runs_and_trains_in_one_graph(model: Model, kind: str) -> None:
    module = model.build(True, torch.float32, CPU, seed=0)
    inputs = model.inputs_on(module, 2, torch.float32, kind, CPU, seed=1)
    compiled = torch.compile(module, backend="aot_eager")
    with torch.set_grad_enabled(kind == TRAINING):
        inputs.rewind(inputs)
        expected = inputs.call(module)
        inputs.rewind(inputs)
        result = inputs.call(compiled)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    counters = torch._dynamo.utils.counters
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1
    if kind == TRAINING:
        result.backward(None if result.dim() == 0 else torch.ones_like(result))
        assert all(own.grad is not None for own in module.parameters() if own.requires_grad)
    else:
        exact = output_of(in_fp64(module)[1], widened_inputs(inputs))
        assert exact.dtype == torch.float64
        torch.testing.assert_close(expected.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model", "kind"), PASSES)
def test_a_model_of_bf16_has_results_of_bf16_and_the_same_inputs_each_time(model: Model, kind: str) -> None:
    module = model.build(True, torch.bfloat16, CPU, seed=0)
    found = []
    for _ in range(2):
        inputs = model.inputs_on(module, 1, torch.bfloat16, kind, CPU, seed=1)
        with torch.no_grad():
            found.append(inputs.call(module))
    assert torch.equal(*found)
    assert found[0].dtype == torch.bfloat16 or found[0].dim() == 0  # transformers computes some losses in fp32
