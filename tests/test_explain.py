"""`cutfuse.explain`: what would run, from the dispatcher's own decision, without running it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse
from cutfuse import matrix_vector
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere

X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)


def six_ops(z: Tensor) -> Tensor:
    return torch.tanh(F.hardtanh(F.silu(z) * 0.5) - 0.25) + 0.125


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("explain ran something")

    monkeypatch.setattr(F, "linear", refuse)
    for name in ("linear", "pointwise", "reduce"):
        monkeypatch.setattr(schema, name, refuse)


def test_a_custom_epilogue_needs_no_compilation(nothing_runs: None) -> None:
    with use_operators_everywhere():
        explanation = cutfuse.explain(X, W, B, epilogue=six_ops)
    text = str(explanation)
    assert text == repr(explanation)
    assert explanation.path == "unfused"
    assert len(explanation.program.instructions) == 6
    assert "compiles   nothing" in text
    assert "linear of x [6, 7] float32, weight [5, 7] float32 with bias" in text
    for line in ("silu z", "mul prev 0.5", "hardtanh prev -1.0 1.0", "sub prev 0.25", "tanh prev", "add prev 0.125"):
        assert line in text


@pytest.mark.parametrize(
    ("arguments", "options", "header", "path"),
    [
        ((X, W), {"epilogue": torch.relu, "reduce": "amax"}, "linear of x [6, 7]", "unfused"),
        ((cutfuse.linear, X, W, B), {"epilogue": torch.relu}, "linear of x", "unfused"),
        ((X, W), {"epilogue": lambda z: z / 2, "reduce": "sum"}, "linear of x", "unfused"),
        ((X, W, B), {}, "linear of x", "composed"),
        ((torch.sigmoid, X), {}, "pointwise of x [6, 7]", "kernel"),
        ((lambda z, r: z * r, X, X), {}, "pointwise of x", "kernel"),
        ((cutfuse.Epilogue(torch.tanh), X), {}, "pointwise of x", "kernel"),
        ((cutfuse.pointwise, torch.sigmoid, X), {}, "pointwise of x", "kernel"),
        ((cutfuse.sigmoid, X), {}, "pointwise of x", "kernel"),
        ((X, 0, "amax"), {}, "amax of x [6, 7] float32 over dim 0", "kernel"),
        ((X, (0, 1)), {"prologue": torch.exp}, "sum of x [6, 7] float32 over dims (0, 1)", "kernel"),
        ((cutfuse.sum, X), {}, "sum of x", "kernel"),
        ((cutfuse.reduce, X, 0), {}, "sum of x", "kernel"),
        ((cutfuse.nn.LinearSigmoidSum(7, 5), X), {}, "linear of x", "unfused"),
        ((cutfuse.nn.GemmDivideSumScale(7, 5, 1.5), X), {}, "linear of x", "unfused"),
        ((cutfuse.nn.Sigmoid(), X), {}, "pointwise of x", "kernel"),
    ],
)
def test_every_kind_of_call(nothing_runs: None, arguments, options, header: str, path: str) -> None:
    with use_operators_everywhere():
        explanation = cutfuse.explain(*arguments, **options)
    assert explanation.call.startswith(header)
    assert explanation.path == path
    assert explanation.steps


def test_why_nothing_is_fused_on_a_cpu(nothing_runs: None) -> None:
    explanation = cutfuse.explain(X, W, epilogue=torch.relu)
    assert explanation.path == "composed"
    assert explanation.reasons == ("x is on cpu; kernels are for CUDA devices",)


def test_gradients_are_part_of_the_answer(nothing_runs: None) -> None:
    weight = W.clone().requires_grad_()
    with use_operators_everywhere():
        explanation = cutfuse.explain(X, weight, B, epilogue=torch.relu)
        assert any("backward" in step for step in explanation.steps)
        with torch.no_grad():
            assert not any("backward" in step for step in cutfuse.explain(X, weight, B, epilogue=torch.relu).steps)


def test_traffic_and_work() -> None:
    explanation = cutfuse.explain(X, W, B, epilogue=lambda z, r: z * r, operands=(X[:1, :5].expand(6, 5),))
    assert explanation.flops == 2 * 6 * 5 * 7
    assert explanation.bytes == 4 * (6 * 7 + 5 * 7 + 5 + 5 + 6 * 5)
    assert cutfuse.explain(X, 1).bytes == 4 * (6 * 7 + 6)


def with_forward(module: cutfuse.nn.FusedLinear) -> cutfuse.nn.FusedLinear:
    module.forward = lambda x: x
    return module


class OfOneRow(cutfuse.nn.FusedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:1])


class OwnLayer(cutfuse.nn.FusedLinear):
    """A class of the user's, whose forward is cutfuse's."""


OTHER_FORWARD = r".* has another forward than cutfuse's\. Either PyTorch's own operations compute"
NO_CALL = "makes no call that can be explained; write explain"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((with_forward(cutfuse.nn.FusedLinear(7, 5)), X), OTHER_FORWARD),
        ((OfOneRow(7, 5), X), OTHER_FORWARD),
        (
            (torch.compile(cutfuse.nn.FusedLinear(7, 5), backend="eager"), X),
            r".* is compiled .*; explain the one that torch\.compile was given, or for a whole",
        ),
        ((cutfuse.set_precision, "tf32"), f"set_precision {NO_CALL}"),
        ((cutfuse.prepare, W), f"prepare {NO_CALL}"),
        ((cutfuse.explain_model, X), f"explain_model {NO_CALL}"),
        ((nn.Linear(7, 5), X), "Linear is no module of cutfuse.nn; for a whole model use cutfuse.explain_model"),
        ((nn.Sequential(OwnLayer(7, 5)), X), "Sequential is no module of cutfuse.nn; for a whole model use"),
        ((F.linear, X, W), "linear is no function of .*torch.nn.functional.linear is not in the epilogue language"),
        ((torch.sum, X), 'sum is no function of cutfuse. .*use reduce="sum"'),
        ((OwnLayer(7, 5),), ".*missing a required argument: 'x' in a call of OwnLayer; write"),
    ],
)
def test_what_is_no_call_of_cutfuse_is_refused_and_not_run(arguments, message: str) -> None:
    precision = cutfuse.get_precision()
    with pytest.raises(TypeError, match=f"^cutfuse.explain: {message}"):
        cutfuse.explain(*arguments)
    assert cutfuse.get_precision() == precision


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, W), {"reduce": "max"}, ValueError, "unknown reduction"),
        ((OwnLayer(7, 5), X[:, 1:]), {}, ValueError, r"x has to be \[..., K\]"),
        ((OwnLayer(7, 5, epilogue=lambda z: torch.softmax(z, -1)), X[:, 1:]), {}, ValueError, r"x has to be \["),
        ((X.int(), 0, "mean"), {"out_dtype": torch.int32}, TypeError, "the mean's out_dtype has to be"),
    ],
)
def test_a_wrong_call_raises_what_it_would_raise(arguments, options, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cutfuse.explain(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "call", "reason"),
    [
        (
            (cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z: torch.softmax(z, -1)), X),
            "linear of x [6, 7] float32, weight [5, 7] float32",
            "the epilogue runs unfused: torch.softmax is not in the epilogue language",
        ),
        ((cutfuse.nn.LinearSigmoidSum(7, 5), X[None]), "linear of x [1, 6, 7] float32", "x is no matrix"),
        ((cutfuse.nn.GemmDivideSumScale(7, 5, 1.5), X[None]), "linear of x [1, 6, 7] float32", "x is no matrix"),
        ((cutfuse.nn.SumReduction(0), X.int()), "sum of x [6, 7] int32 over dim 0", "x is torch.int32: without"),
        ((X.int(), 0, "amax"), "amax of x [6, 7] int32 over dim 0", "x is torch.int32: without a prologue"),
        ((cutfuse.sum, X.bool()), "sum of x [6, 7] bool over dims (0, 1)", "x is torch.bool: without a prologue"),
    ],
)
def test_a_call_that_pytorch_computes_is_explained_with_the_reason(
    nothing_runs: None, arguments, call: str, reason: str
) -> None:
    explanation = cutfuse.explain(*arguments)
    assert explanation.call.startswith(call)
    assert explanation.path == "composed"
    assert explanation.reasons[0].startswith(reason)
    assert explanation.flops == (2 * 6 * 5 * 7 if call.startswith("linear") else 0)
    assert explanation.bytes >= 6 * 7
    assert "program" not in str(explanation)  # it has none


def test_a_module_is_explained_without_its_hooks(nothing_runs: None) -> None:
    module = OwnLayer(7, 5, epilogue=lambda z, r: z * r, reduce="amax")
    module.register_forward_pre_hook(lambda *_: pytest.fail("a hook ran"))
    explanation = cutfuse.explain(module, X, 2.0)
    assert explanation.call.endswith("weight [5, 7] float32 with bias, amax over the last dimension")
    assert explanation.program.text == "operands=0; mul z 2.0"


def test_calls_of_other_threads_run() -> None:
    """One thread's question does not stop another thread's work."""
    results = []

    def fn(z: Tensor) -> Tensor:
        # While explain traces fn here, another thread calls cutfuse.
        other = threading.Thread(target=lambda: results.append(cutfuse.sigmoid(X)))
        other.start()
        other.join()
        return torch.relu(z)

    explanation = cutfuse.explain(fn, X)
    assert explanation.path == "composed"
    torch.testing.assert_close(results[0], torch.sigmoid(X))


def test_a_notebook_shows_a_table_of_the_same_and_no_markup_of_a_call() -> None:
    found = cutfuse.explain(X, W, B, epilogue=six_ops)
    found = dataclasses.replace(found, call="<script>alert(1)</script>", reasons=("a < b & c", *found.reasons))
    markup = found._repr_html_()
    table = ElementTree.fromstring(markup.replace("<br>", "\n"))  # valid XML but for those
    rows = {row.findtext("th"): row.findtext("td") for row in table.iter("tr")}
    assert table.findtext("caption") == found.call
    assert rows["path"] == found.path
    assert rows["because"] == "\n".join(found.reasons)
    assert rows["program"] == found.program.pretty().rstrip("\n")
    assert "color" not in markup  # the page's own: light or dark


def test_long_reasons_are_wrapped_to_a_terminal() -> None:
    explanation = dataclasses.replace(cutfuse.explain(X, W), reasons=("word " * 60, "short"))
    lines = str(explanation).splitlines()
    assert max(map(len, lines)) <= 120
    assert "             short" in lines
    assert " ".join(str(explanation).split()).count("word") == 60


def explained_for_h200(*args: Any, **kwargs: Any) -> Any:
    return cutfuse.explain(*args, device="H200", **kwargs)


def test_what_times_are_compared_with_is_said() -> None:
    x, weight = torch.ones(1024, 4096), torch.ones(4096, 4096)
    fused = explained_for_h200(x, weight, epilogue=torch.sigmoid)
    assert fused.baseline.startswith("cuBLAS and one kernel of cutfuse's behind it; eager PyTorch")
    assert "  baseline   cuBLAS and one kernel of cutfuse's behind it; eager PyTorch" in str(fused)
    assert cutfuse.explain(x, weight, epilogue=torch.sigmoid).baseline == ""  # on a CPU nothing is predicted
    unfused = explained_for_h200(x[:80].bfloat16(), weight.bfloat16(), epilogue=torch.sigmoid, reduce="sum")
    assert bool(unfused.baseline) == any("predicted" in step for step in unfused.steps)


def test_a_product_with_nothing_behind_it_is_not_called_fused() -> None:
    x, weight = torch.ones(1024, 4096), torch.ones(4096, 4096)
    product = explained_for_h200(cutfuse.linear, x, weight)
    assert product.path == "product"
    assert product.baseline == "cuBLAS's product, which is eager PyTorch's too"
    assert explained_for_h200(cutfuse.linear, x, weight, epilogue=torch.sigmoid).path == "fused"
    assert explained_for_h200(cutfuse.linear, x, weight, reduce="amax").path == "fused"


@pytest.mark.parametrize(
    ("shape", "operands", "needs_no_product"),
    [
        ((1024, 8192, 8192), 0, True),
        ((1024, 8192, 512), 0, False),
        ((512, 8192, 8192), 1, True),
        ((256, 8192, 8192), 0, True),
        ((256, 8192, 8192), 1, False),  # steps for the operand: they take longer than the product
    ],
)
def test_a_summed_affine_chain_is_a_product_where_that_is_sooner(
    shape: tuple[int, int, int], operands: int, needs_no_product: bool
) -> None:
    m, n, k = shape
    x, weight = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    rows = [torch.empty(n, dtype=torch.bfloat16)] * operands
    found = explained_for_h200(x, weight, epilogue=lambda z, *rows: z * 2 + sum(rows), operands=rows, reduce="sum")
    assert (found.path == "matrix-vector") == needs_no_product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
        assert explained_for_h200(x, weight, epilogue=lambda z: z * 2, reduce="sum").path == "matrix-vector"


def test_tensors_that_make_a_call_a_training_step_are_named() -> None:
    x, weight, bias = torch.ones(64, 32), torch.ones(16, 32), torch.ones(16)
    operand = torch.ones(64, 16)
    arguments: dict[str, Any] = {"epilogue": lambda z, r: torch.relu(z) * r + z, "operands": (operand,)}
    assert cutfuse.explain(x, weight, bias, **arguments).trained == ()
    for tensor in (x, weight, operand):
        tensor.requires_grad_()
    found = cutfuse.explain(x, weight, bias, **arguments)
    assert found.trained == ("x", "weight", "operand 0")
    assert "  training   a step, because x, weight and operand 0 need gradients; within torch.no_grad()" in str(found)
    assert "  training   a step, because x needs gradients" in str(cutfuse.explain(cutfuse.pointwise, torch.exp, x))
    with torch.no_grad():
        assert cutfuse.explain(x, weight, bias, **arguments).trained == ()
