"""PyTorch's own settings decide the precision of fp32 products, unless a context or the process's mode does.

Contexts are those of batch invariance, of rounding and of specialization too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cutfuse
from cutfuse import invariance, native
from cutfuse.invariance import is_batch_invariant
from cutfuse.layer import autograd
from cutfuse.layer.linear_plan import cublas_linear
from cutfuse.precision import MODES, allows_tf32, captured_mode, process, product_mode
from cutfuse.rounding import is_eager


def in_new_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns on a thread that starts now."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_older_switch() -> None:
    for expected in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = expected
        assert allows_tf32() is expected


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch 2.9 brought fp32_precision")
def test_newer_switches() -> None:
    matmul = torch.backends.cuda.matmul
    try:
        matmul.fp32_precision = "tf32"
        assert allows_tf32()
        matmul.fp32_precision = "ieee"
        assert not allows_tf32()
        matmul.fp32_precision = "none"  # then the setting for everything holds
        torch.backends.fp32_precision = "tf32"
        assert allows_tf32()
    finally:
        torch.backends.fp32_precision = "none"


def test_a_pytorch_without_the_newer_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matmul:
        allow_tf32 = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Matmul())
    assert allows_tf32()


@pytest.mark.parametrize(("setting", "mode"), [("highest", "guarded"), ("high", "tf32"), ("medium", "tf32")])
def test_pytorch_decides_by_default(setting: str, mode: str) -> None:
    torch.set_float32_matmul_precision(setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert allows_tf32() is (mode == "tf32")
    assert product_mode() == mode
    assert captured_mode() == mode
    assert cutfuse.get_precision() is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", ["highest", "high"])
def test_a_forced_mode_overrides_pytorch_and_leaves_its_setting(mode: str, setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    with cutfuse.precision(mode):
        assert product_mode() == mode
        assert torch.get_float32_matmul_precision() == setting
    assert product_mode() == {"highest": "guarded", "high": "tf32"}[setting]
    cutfuse.set_precision(mode)
    assert cutfuse.get_precision() == mode
    assert product_mode() == mode
    assert torch.get_float32_matmul_precision() == setting


def test_contexts_nest_and_none_follows_pytorch_again() -> None:
    cutfuse.set_precision("ieee")
    with cutfuse.precision("split6"):
        with cutfuse.precision(None):
            assert product_mode() == "guarded"
            with cutfuse.precision("split3"):
                assert product_mode() == "split3"
            assert product_mode() == "guarded"
        assert product_mode() == "split6"
        assert cutfuse.get_precision() == "ieee"
        cutfuse.set_precision("tf32")  # of the process: the context goes on
        assert product_mode() == "split6"
    assert product_mode() == "tf32"


@pytest.mark.parametrize("choose", [cutfuse.precision, cutfuse.set_precision])
@pytest.mark.parametrize("mode", ["highest", "inherited", "", "IEEE"])
def test_other_modes_are_refused_before_a_context_is_entered(choose: Callable[[str], object], mode: str) -> None:
    with pytest.raises(
        ValueError, match=r'one of "ieee", "guarded", "split6", "split3", "tf32" or None .*, got '
    ) as raised:
        choose(mode)
    assert repr(mode) in str(raised.value)
    assert product_mode() == "guarded"


class Mode(NamedTuple):
    """Something that a thread's innermost context says, or the process; `values`: two that differ, and from None."""

    context: Callable[[Any], contextlib.AbstractContextManager[None]]
    of_process: Callable[[Any], None]
    current: Callable[[], Any]
    values: tuple[Any, Any]


EACH = {
    "precision": Mode(cutfuse.precision, cutfuse.set_precision, product_mode, ("split3", "split6")),
    "batch_invariant": Mode(cutfuse.batch_invariant, cutfuse.set_batch_invariant, is_batch_invariant, (True, False)),
    "rounding": Mode(
        cutfuse.rounding, cutfuse.set_rounding, lambda: ("once", "eager")[is_eager(None)], ("eager", "once")
    ),
    "specialization": Mode(
        cutfuse.specialization,
        cutfuse.set_specialization,
        lambda: native.core.specialization_mode().name,
        ("now", "off"),
    ),
}
EACH_MODE = pytest.mark.parametrize("mode", EACH.values(), ids=EACH)


@EACH_MODE
def test_contexts_nest_end_with_an_exception_and_decorate(mode: Mode) -> None:
    first, second = mode.values
    before = mode.current()
    with mode.context(first):
        with mode.context(second):
            assert mode.current() == second
        assert mode.current() == first
    with pytest.raises(KeyError), mode.context(first):
        raise KeyError
    assert mode.current() == before
    decorated = mode.context(first)(mode.current)
    assert [decorated(), mode.current(), decorated()] == [first, before, first]


@EACH_MODE
def test_a_context_is_this_threads_and_the_process_mode_every_threads(mode: Mode) -> None:
    first, second = mode.values
    with mode.context(first):
        assert in_new_thread(mode.current) != first
    mode.of_process(first)
    with mode.context(second):
        assert in_new_thread(mode.current) == first
        assert in_new_thread(mode.context(second)(mode.current)) == second
        assert mode.current() == second
    assert mode.current() == first


@pytest.mark.parametrize("mode", [EACH[name] for name in ("precision", "batch_invariant", "rounding")])
def test_a_context_is_this_tasks(mode: Mode) -> None:
    async def task(value: Any) -> Any:
        with mode.context(value):
            await asyncio.sleep(0)  # the other task enters its context here
            return mode.current()

    async def both() -> list[Any]:
        return await asyncio.gather(*map(task, mode.values))

    assert tuple(asyncio.run(both())) == mode.values


def test_what_a_forward_captured_holds_on_other_threads() -> None:
    with cutfuse.precision("split6"):
        captured = captured_mode()
    assert product_mode(captured) == "split6"
    assert in_new_thread(lambda: product_mode(captured)) == "split6"


@pytest.fixture
def recorded() -> Iterator[list[str]]:
    """The modes in which an operator, `torch.ops.cutfuse_test.product`, was run: of precision, and batch invariance."""
    modes: list[str] = []

    @torch.compiler.disable  # after a graph break the operator is called eagerly, and Dynamo of 2.8 compiles its Python
    def run(x: Tensor) -> Tensor:
        modes.append(product_mode() + ", invariant" * is_batch_invariant())
        return x + 1

    library = torch.library.Library("cutfuse_test", "FRAGMENT")
    library.define("product(Tensor x) -> Tensor")
    library.impl("product", run, "CPU")
    library.impl("product", torch.empty_like, "Meta")
    torch._dynamo.reset()
    yield modes
    library._destroy()
    torch._dynamo.reset()


def test_a_compiled_function_reads_the_modes_when_it_runs(recorded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance.process, "holds_somewhere", True)  # which compiled code is guarded by

    def function(x: Tensor) -> Tensor:
        return torch.ops.cutfuse_test.product(x * 2)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.zeros(2)
    compiled(x)
    with cutfuse.precision("split6"):
        compiled(x)
    with cutfuse.batch_invariant():
        compiled(x)
    cutfuse.set_precision("ieee")
    compiled(x)
    assert recorded == ["guarded", "split6", "guarded, invariant", "ieee"]


@pytest.mark.parametrize("name", ["precision", "specialization"])
def test_a_context_inside_a_compiled_function_breaks_the_graph_and_holds(name: str) -> None:
    mode, seen = EACH[name], []
    before = mode.current()

    @torch.compiler.disable
    def look() -> None:
        seen.append(mode.current())

    def function(x: Tensor) -> Tensor:
        with mode.context(mode.values[1]):
            look()
        look()
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        compiled(torch.zeros(2))
    assert seen == [mode.values[1], before] * 2
    torch._dynamo.reset()
    reason = rf"reads cutfuse\.{name} when it runs: enter it around the call of the compiled function"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(2))


def test_a_decorated_function_holds_the_mode_when_it_is_compiled(recorded: list[str]) -> None:
    @cutfuse.precision("split6")
    def function(x: Tensor) -> Tensor:
        return torch.ops.cutfuse_test.product(x)

    compiled = torch.compile(lambda x: function(x * 2) + torch.ops.cutfuse_test.product(x), backend="aot_eager")
    compiled(torch.zeros(2))
    compiled(torch.zeros(2))
    assert recorded == ["split6", "guarded"] * 2


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_a_forced_product_leaves_pytorchs_setting_as_it_was(setting: str) -> None:
    x = torch.randn(8, 8)
    torch.set_float32_matmul_precision(setting)
    for mode in ("ieee", "tf32"):
        with cutfuse.precision(mode):
            cublas_linear(x, x, None)
        assert torch.get_float32_matmul_precision() == setting
        assert allows_tf32() == (setting != "highest")


def test_a_product_of_fp32_stays_fp32_under_autocast() -> None:
    """As the backward pass may run within an autocast that its forward was outside of."""
    x = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cublas_linear(x, x, None).dtype == torch.float32
        assert torch.ops.cutfuse.product(x, x, "").dtype == torch.float32


def test_compiled_code_keeps_to_pytorchs_products_until_a_mode_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "opted_in", False)
    x = torch.empty(8, 8, device="meta")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    on_cuda = unittest.mock.Mock(dtype=torch.float32, device=torch.device("cuda"))
    assert not autograd.is_forced(x)
    assert not autograd.is_forced(on_cuda)
    with cutfuse.precision("split3"):
        assert autograd.is_forced(on_cuda)
    assert autograd.is_forced(on_cuda)
