"""What `explain` says of epilogues that are compiled into their kernels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from compiled_epilogues import FakeCompiler, compiled_by, core
from compiled_epilogues import compiler as compiler
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from test_specialization import call, layer, tensors

import cutfuse


def explained() -> str:
    x, weight, r = tensors()
    return cutfuse.explain(x, weight, epilogue=layer, operands=(r,)).compiles


def test_explain_says_what_is_compiled_and_when(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    compiler.may_go_on.clear()
    assert re.fullmatch(r"the program into sm90_bf16_\w+, in the background; until then it is interpreted", explained())
    with cutfuse.specialization("now"):
        assert explained().endswith("before the first call runs")
    with cutfuse.specialization("off"):
        assert explained() == 'nothing: the kernel interprets the program, because cutfuse.specialization is "off"'
    call()
    assert "at this moment" in explained()
    compiler.may_go_on.set()
    cutfuse.wait(30)
    assert re.search(r"^done: sm90_bf16_\w+ has the program compiled in, which took \d\.\d\d s$", explained())
    x, weight, _ = tensors()
    assert cutfuse.explain(x, weight, epilogue=torch.relu).compiles.endswith("the kernel calls a function for it")
    assert f"  compiles   {explained()}" in str(cutfuse.explain(x, weight, epilogue=layer, operands=(tensors()[2],)))


def test_explain_says_why_nothing_is_compiled(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    if not core.cuda_build:
        assert explained().endswith("because cutfuse was built without CUDA kernels")
    with compiled_by(FakeCompiler(lambda kernel: True)), contextlib.suppress(RuntimeWarning):
        call()
        cutfuse.wait(30)
        assert re.search(r"because compiling it failed: .*no driver for this", explained(), re.DOTALL)
    with compiled_by(FakeCompiler()):
        monkeypatch.setattr(core, "find_epilogues", lambda *_: [])
        assert explained().endswith(f"because this process has asked for {core.most_specializations} others already")


def chain(z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z) * z


def of_passes() -> list[tuple[str, Callable[[], object], Callable[[], str]]]:
    """Kernel, call and explanation of passes: alone, and behind a product that no kernel of ours takes."""
    x, odd, weight = (torch.randn(shape).bfloat16() for shape in ((16, 16), (16, 17), (8, 17)))
    trained = weight.clone().requires_grad_()
    calls: list[tuple[str, Callable[..., object], tuple[object, ...], dict[str, object]]] = [
        ("pointwise_bfloat16", cutfuse.pointwise, (chain, x), {}),
        ("row_reduce_sum_bfloat16", cutfuse.reduce, (x, 1, "sum"), {"prologue": chain}),
        ("pointwise_bfloat16", cutfuse.linear, (odd, weight), {"epilogue": chain}),
        ("pointwise_bfloat16", cutfuse.linear, (odd, trained), {"epilogue": chain}),
    ]
    return [
        (kernel, partial(function, *given, **options), partial(explanation, function, *given, **options))
        for kernel, function, given, options in calls
    ]


def explanation(*given: object, **options: object) -> str:
    return cutfuse.explain(*given, **options).compiles


@pytest.mark.parametrize("number", range(4))
def test_explain_says_what_a_pass_has_compiled(compiler: FakeCompiler, launches: EmulatedLaunches, number: int) -> None:
    kernel, call_once, explain = of_passes()[number]
    assert explain() == f"the program into {kernel}, in the background; until then it is interpreted"
    with cutfuse.specialization("now"):
        assert explain() == f"the program into {kernel}, before the first call runs"
    with cutfuse.specialization("off"):
        assert explain() == 'nothing: the kernels interpret the program, because cutfuse.specialization is "off"'
    call_once()
    call_once()
    cutfuse.wait(30)
    assert re.fullmatch(rf"done: {kernel} has the program compiled in, which took \d\.\d\d s", explain())


@pytest.mark.parametrize("number", range(4))
def test_explain_says_why_a_pass_was_not_compiled(launches: EmulatedLaunches, number: int) -> None:
    with compiled_by(FakeCompiler(lambda kernel: True)), contextlib.suppress(RuntimeWarning):
        kernel, call_once, explain = of_passes()[number]
        call_once()
        call_once()
        cutfuse.wait(30)
        reason = f"nothing: {kernel} interprets the program, because compiling it failed: "
        assert explain().startswith(reason)


def test_a_trained_reduction_is_compiled_behind_the_product(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    x, weight = torch.randn(16, 16).bfloat16(), torch.randn(8, 16).bfloat16().requires_grad_()
    found = explanation(x, weight, epilogue=chain, reduce="sum")
    assert found.startswith("the program into row_reduce_sum_bfloat16, in the background")


def test_explain_says_what_passes_need(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    odd = torch.randn(16, 17).bfloat16()[:, 1:]
    assert "because the tensors are no whole aligned vectors" in explanation(cutfuse.pointwise, chain, odd)
    assert "because the tensors are no whole aligned vectors" in explanation(cutfuse.reduce, odd, 1, prologue=chain)
    assert explanation(cutfuse.pointwise, torch.relu, odd).endswith("and have the program compiled in")


def test_what_pytorch_runs_compiles_nothing(compiler: FakeCompiler) -> None:
    """Without a GPU: on a device of the direct path it would."""
    x = torch.randn(16, 16)
    for given in ((cutfuse.pointwise, chain, x), (cutfuse.reduce, x, 1), (x, x)):
        assert explanation(*given) == "nothing: PyTorch's own operations run"


def test_no_activation_is_built_into_a_reduction(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    """Kernels that reduce have a single activation compiled as they have a chain."""
    x, odd, weight = (torch.randn(shape).bfloat16() for shape in ((16, 16), (16, 17), (16, 17)))
    reductions: list[tuple[str, Callable[[], str]]] = [
        ("sum", lambda: cutfuse.explain(cutfuse.reduce, x, 1, "sum", prologue=torch.relu).compiles),
        ("amax", lambda: cutfuse.explain(odd, weight, epilogue=torch.relu, reduce="amax").compiles),
    ]
    for name, explained in reductions:
        assert explained().startswith(f"the program into row_reduce_{name}_bfloat16, in the background")
        with cutfuse.specialization("off"):
            assert explained() == 'nothing: the kernels interpret the program, because cutfuse.specialization is "off"'
    x, weight = torch.randn(16, 17), torch.randn(16, 17)
    assert cutfuse.explain(cutfuse.sum, x, 1).compiles == "nothing: no program precedes the reduction"
    assert cutfuse.explain(x, weight, reduce="amax").compiles == "nothing: no program precedes the reduction"


def test_a_sum_without_a_product_compiles_nothing(compiler: FakeCompiler) -> None:
    found = cutfuse.explain(torch.randn(16, 16), torch.randn(16, 16), epilogue=lambda z: z / 2, reduce="sum")
    assert found.path == "matrix-vector"
    assert found.compiles == "nothing: the sums take the program's factors as weights, and do not run it"
