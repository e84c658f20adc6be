"""What `explain` says of epilogues that are compiled into their kernels."""

from __future__ import annotations

import contextlib
import re

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


def test_explain_says_what_passes_compile(compiler: FakeCompiler) -> None:
    x = torch.randn(16, 16)
    found = cutfuse.explain(cutfuse.pointwise, lambda z: torch.tanh(z) * z, x).compiles
    assert found.startswith("the program into its kernel, where that takes whole aligned vectors, in the background")
    assert cutfuse.explain(cutfuse.reduce, x, 1, "sum", prologue=lambda z: torch.tanh(z) * z).compiles == found
    with cutfuse.specialization("off"):
        off = cutfuse.explain(cutfuse.pointwise, lambda z: torch.tanh(z) * z, x).compiles
    assert off == 'nothing: the kernels interpret the program, because cutfuse.specialization is "off"'
    assert cutfuse.explain(cutfuse.pointwise, torch.relu, x).compiles.endswith("and have the program compiled in")


def test_no_activation_is_built_into_a_reduction(compiler: FakeCompiler) -> None:
    """Kernels that reduce have a single activation compiled as they have a chain."""
    x, weight = torch.randn(16, 16), torch.randn(16, 16)
    reductions = [
        lambda: cutfuse.explain(cutfuse.reduce, x, 1, "sum", prologue=torch.relu).compiles,
        lambda: cutfuse.explain(x, weight, epilogue=torch.relu, reduce="amax").compiles,
    ]
    for explained in reductions:
        assert explained().startswith("the program into its kernel, where that takes whole aligned vectors")
        with cutfuse.specialization("off"):
            assert explained() == 'nothing: the kernels interpret the program, because cutfuse.specialization is "off"'
    assert cutfuse.explain(cutfuse.sum, x, 1).compiles == "nothing: no program precedes the reduction"
    assert cutfuse.explain(x, weight, reduce="amax").compiles == "nothing: no program precedes the reduction"


def test_a_sum_without_a_product_compiles_nothing(compiler: FakeCompiler) -> None:
    found = cutfuse.explain(torch.randn(16, 16), torch.randn(16, 16), epilogue=lambda z: z / 2, reduce="sum")
    assert found.path == "matrix-vector"
    assert found.compiles == "nothing: the sums take the program's factors as weights, and do not run it"
