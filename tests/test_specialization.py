"""When an epilogue is compiled into its kernel and when that kernel runs, on CPU memory that stands for a GPU's."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from compiled_epilogues import FakeCompiler, compiled_by, core, kernels_of
from compiled_epilogues import compiler as compiler
from emulated_device import EmulatedLaunches, paused
from emulated_device import launches as launches
from processes import HERE, run_python
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Epilogue, Program
from cutfuse.layer import cuda, planner, specialize
from cutfuse.layer.planner import LinearArguments

M, N, K = 512, 2048, 64
INTERPRETED = 0


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((M, K), (N, K), (M, N))
    x, weight, r = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, r


def layer(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) * 0.5 + r


def call_generally() -> Tensor:
    """What the operator does on CUDA tensors."""
    x, weight, r = tensors()
    with paused():
        y: Tensor = cuda.linear(x, weight, None, [r], Epilogue(layer, 1).program.text, "none", torch.bfloat16)
    return y


def call() -> Tensor:
    x, weight, r = tensors()
    y = cutfuse.linear(x, weight, epilogue=layer, operands=(r,))
    expected = layer(x.float() @ weight.float().T, r.float())
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    return y


def test_now_waits_for_what_the_background_has_begun(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    compiler.may_go_on.clear()
    call()
    assert compiler.has_begun.wait(30)
    call_generally()
    threading.Timer(0.2, compiler.may_go_on.set).start()
    with cutfuse.specialization("now"):
        call_generally()
    assert kernels_of(launches) == [INTERPRETED, INTERPRETED, 0x1001]
    assert len(compiler.compiled) == 1


def test_a_compiled_kernel_is_told_what_to_bring_to_shared_memory(
    compiler: FakeCompiler, launches: EmulatedLaunches
) -> None:
    """A matrix of the result's type by the copy engine, and rows, columns and numbers; one that interprets nothing."""
    x, weight, r = tensors()
    operands = (torch.randn(N).bfloat16(), torch.randn(M, 1).bfloat16(), r, torch.randn(1).bfloat16())

    def scaled(z: Tensor, row: Tensor, column: Tensor, matrix: Tensor, number: Tensor) -> Tensor:
        return torch.relu(z) * row + column * matrix - number

    for mode in ("off", "now", "now"):
        with cutfuse.specialization(mode):
            cutfuse.linear(x, weight, epilogue=scaled, operands=operands)
            cutfuse.linear(x, weight, epilogue=scaled, operands=operands)
    staged = {bool(launch.specialized): launch.staged for launch in launches.launches if launch.function == "gemm"}
    assert staged == {False: (-1, 0, 0), True: (2, 0b0001, 0b1010)}


def test_chains_that_kernels_call_meanwhile(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    x, weight, _ = tensors()
    with cutfuse.specialization("off"):
        cutfuse.linear(x, weight, epilogue=torch.nn.functional.gelu)
    assert not compiler.compiled
    with cutfuse.specialization("now"):
        cutfuse.linear(x, weight, epilogue=torch.relu)
        cutfuse.linear(x, weight, epilogue=torch.nn.functional.gelu)
        cutfuse.linear(x, weight, epilogue=torch.nn.functional.gelu)
    assert len(compiler.compiled) == 2
    assert all(program.is_interpreted for _, _, program in compiler.compiled)
    assert kernels_of(launches) == [INTERPRETED, 0x1001, 0x1002, 0x1002]
    program = Epilogue(torch.nn.functional.gelu, 0).program
    arguments = LinearArguments(x, weight, None, (), program, "none", torch.bfloat16)
    plans = []
    for mode in ("off", "now"):
        with cutfuse.specialization(mode):
            plans.append(planner.plan_linear(arguments, "tf32"))
    assert plans[0] is plans[1], "one kernel, whatever the mode: so the same bits"


def test_both_products_of_a_guarded_layer(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    x, weight, r = torch.zeros(128, 4096), torch.zeros(4096, 4096), torch.zeros(128, 4096)
    with cutfuse.precision("guarded"), cutfuse.specialization("now"):
        for _ in range(3):
            cutfuse.linear(x, weight, epilogue=layer, operands=(r,))
    assert kernels_of(launches) == [0x1001, 0x1002] * 3
    first, second = (kernel for kernel, _, _ in compiler.compiled)
    assert "3" in first
    assert "6" in second


def test_a_failure_in_the_background_where_warnings_are_errors(launches: EmulatedLaunches) -> None:
    """The thread goes on."""
    has_failed: list[bool] = []
    x, weight, r = tensors()
    with compiled_by(FakeCompiler(lambda kernel: not has_failed)), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        cutfuse.wait(30)
        has_failed.append(True)
        cutfuse.linear(x, weight, epilogue=lambda z, r: torch.tanh(z) + r, operands=(r,))
        assert cutfuse.wait(30) == 1


def test_an_old_driver_interprets_and_says_so(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize.native, "has_kernels", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(specialize, "is_capturing", lambda: False)
    specialize._warned_of.clear()
    with pytest.warns(RuntimeWarning, match="epilogues are interpreted"):
        call_generally()
    call()
    call()
    assert kernels_of(launches) == [INTERPRETED] * 3
    specialize._warned_of.clear()


def test_a_capture_waits_for_what_has_been_started(
    compiler: FakeCompiler, launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the direct path, whose plan is known already."""
    compiler.may_go_on.clear()
    call()
    assert compiler.has_begun.wait(30)
    monkeypatch.setattr(specialize, "is_capturing", lambda: True)
    threading.Timer(0.2, compiler.may_go_on.set).start()
    call_generally()
    call()
    assert kernels_of(launches) == [INTERPRETED, 0x1001, 0x1001]


def test_what_one_kernel_serves() -> None:
    def find(text: str, kernel: str = "a", device: int = 0, types: tuple[int, ...] = ()) -> object:
        return core.find_specialization(kernel, device, Program.parse(text).native, list(types))

    with compiled_by(FakeCompiler()):
        first = find("operands=1; mul z 2.0; add prev r0; clamp prev 0.0 1.0", types=(0,))
        assert first is find("operands=1; mul z 3.0; add prev r0; clamp prev -1.0 7.0", types=(0,))
        assert first is not find("operands=1; mul z 2.0; sub prev r0; clamp prev 0.0 1.0", types=(0,))
        assert first is not find("operands=1; mul z 2.0; add r0 prev; clamp prev 0.0 1.0", types=(0,))
        assert first is not find("operands=1; mul z 2.0; add prev r0; clamp prev 0.0 1.0", types=(1,))
        assert first is not find("operands=1; mul z 2.0; add prev r0; clamp prev 0.0 1.0", kernel="b", types=(0,))
        assert first is not find("operands=1; mul z 2.0; add prev r0; clamp prev 0.0 1.0", device=1, types=(0,))
        assert find("operands=0") is not None
        assert find("operands=0; relu z") is None  # a function of the kernel's
        assert find("operands=0; relu z") is None


def test_other_modes_are_refused() -> None:
    for wrong in ("on", "", None):
        with pytest.raises(ValueError, match=f'one of "background", "now", "off", got {wrong!r}'):
            cutfuse.specialization(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a specialization is one of"):
            cutfuse.set_specialization(wrong)  # type: ignore[arg-type]
    with cutfuse.specialization("off"):
        assert cutfuse.get_specialization() == "background"
        cutfuse.set_specialization("now")
        assert cutfuse.get_specialization() == "now"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: cutfuse.set_specialization("background"), "call cutfuse.set_specialization outside of compiled"),
        (cutfuse.get_specialization, "call cutfuse.get_specialization outside of compiled functions"),
        (cutfuse.wait, "call cutfuse.wait outside of compiled functions"),
    ],
)
def test_what_breaks_the_graph_says_so(call: Callable[[], object], reason: str) -> None:
    def function(x: Tensor) -> Tensor:
        call()
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(reason)):
        torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(2))
    assert torch.equal(torch.compile(function, backend="eager")(torch.zeros(2)), torch.ones(2))


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan"), float("inf"), "1", True, (1,)])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout: object) -> None:
    error, message = TypeError, "timeout has to be a number of seconds or None, got .* of type"
    if type(timeout) in (int, float):
        error, message = ValueError, f"timeout has to be from 0 to [0-9]+ seconds, or None .*, got {timeout}"
    with pytest.raises(error, match=message):
        cutfuse.wait(timeout)  # type: ignore[arg-type]


# What `explain` says of epilogues that are compiled into their kernels.


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


def explanation(*given: object, **options: object) -> str:
    return cutfuse.explain(*given, **options).compiles


def inputs(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


X, ODD, WEIGHT = inputs((16, 16), (16, 17), (8, 17))


# Passes alone, and behind a product that no kernel of ours takes.
@pytest.mark.parametrize(
    ("kernel", "function", "given", "options"),
    [
        ("pointwise_bfloat16", cutfuse.pointwise, (chain, X), {}),
        ("row_reduce_sum_bfloat16", cutfuse.reduce, (X, 1, "sum"), {"prologue": chain}),
        ("pointwise_bfloat16", cutfuse.linear, (ODD, WEIGHT), {"epilogue": chain}),
        ("pointwise_bfloat16", cutfuse.linear, (ODD, WEIGHT.clone().requires_grad_()), {"epilogue": chain}),
    ],
)
def test_explain_says_what_a_pass_has_compiled(
    compiler: FakeCompiler, launches: EmulatedLaunches, kernel: str, function: Callable, given: tuple, options: dict
) -> None:
    def explain() -> str:
        return explanation(function, *given, **options)

    assert explain() == f"the program into {kernel}, in the background; until then it is interpreted"
    with cutfuse.specialization("now"):
        assert explain() == f"the program into {kernel}, before the first call runs"
    with cutfuse.specialization("off"):
        assert explain() == 'nothing: the kernels interpret the program, because cutfuse.specialization is "off"'
    for _ in range(2):
        function(*given, **options)
    cutfuse.wait(30)
    assert re.fullmatch(rf"done: {kernel} has the program compiled in, which took \d\.\d\d s", explain())


def test_explain_says_what_passes_need(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    for given in ((cutfuse.pointwise, chain, ODD[:, 1:]), (cutfuse.reduce, ODD[:, 1:], 1)):
        options = {} if cutfuse.pointwise in given else {"prologue": chain}
        assert "because the tensors are no whole aligned vectors" in explanation(*given, **options)
    assert explanation(cutfuse.pointwise, torch.relu, ODD[:, 1:]).endswith("and have the program compiled in")


def test_what_pytorch_runs_compiles_nothing(compiler: FakeCompiler) -> None:
    """Without a GPU: on a device of the direct path it would."""
    x = torch.randn(16, 16)
    for given in ((cutfuse.pointwise, chain, x), (cutfuse.reduce, x, 1), (x, x)):
        assert explanation(*given) == "nothing: PyTorch's own operations run"


def test_no_activation_is_built_into_a_reduction(compiler: FakeCompiler, launches: EmulatedLaunches) -> None:
    """Kernels that reduce have a single activation compiled as they have a chain."""
    (weight,) = inputs((16, 17))
    for name, given, options in (
        ("sum", (cutfuse.reduce, X, 1, "sum"), {"prologue": torch.relu}),
        ("amax", (ODD, weight), {"epilogue": torch.relu, "reduce": "amax"}),
    ):
        assert explanation(*given, **options).startswith(f"the program into row_reduce_{name}_bfloat16, in the back")
        with cutfuse.specialization("off"):
            reason = 'the kernels interpret the program, because cutfuse.specialization is "off"'
            assert explanation(*given, **options) == f"nothing: {reason}"
    assert explanation(cutfuse.sum, ODD.float(), 1) == "nothing: no program precedes the reduction"
    assert explanation(ODD.float(), weight.float(), reduce="amax") == "nothing: no program precedes the reduction"


def test_a_sum_without_a_product_compiles_nothing(compiler: FakeCompiler) -> None:
    found = cutfuse.explain(torch.randn(16, 16), torch.randn(16, 16), epilogue=lambda z: z / 2, reduce="sum")
    assert found.path == "matrix-vector"
    assert found.compiles == "nothing: the sums take the program's factors as weights, and do not run it"


# What becomes of the threads that compile epilogues when a process forks or ends.


# A compiler on three threads that waits to be released, and a layer whose second call runs directly.
START = """
import os
import sys
import threading
import time

sys.path.insert(0, {here!r})
import torch

torch.set_num_threads(1)
from compiled_epilogues import FakeCompiler, core, kernels_of
from emulated_device import emulated_device

import cutfuse
from cutfuse.layer.specialize import background

background.most_threads = 3
compiler = FakeCompiler()
compiler.may_go_on.clear()
core.use_compiler(compiler)
x, weight = torch.zeros(512, 64).bfloat16(), torch.zeros(2048, 64).bfloat16()


def call():
    cutfuse.linear(x, weight, epilogue=lambda z: torch.tanh(z) * torch.relu(z))


device = emulated_device()
launches = device.__enter__()
call()
"""


def run(program: str) -> str:
    """What a program prints."""
    text = START.format(here=str(HERE)) + textwrap.dedent(program)
    return run_python("-c", text)


def test_the_end_of_a_process_waits_for_the_kernels_that_are_compiled() -> None:
    """By every thread, and for nothing that is queued behind them."""
    program = """
    import atexit
    for op in ("sin", "cos", "exp", "erf"):
        cutfuse.linear(x, weight, epilogue=lambda z, f=getattr(torch, op): f(z) * torch.relu(z))
    threading.Timer(1.0, compiler.may_go_on.set).start()
    start = time.monotonic()
    atexit._run_exitfuncs()
    print(len(compiler.compiled), time.monotonic() - start >= 0.9, background._threads)
    """
    found = run(program).split(maxsplit=1)
    assert found == ["3", "True set()"]


def test_the_end_of_a_process_at_once() -> None:
    program = """
    release = threading.Timer(0.5, compiler.may_go_on.set)
    release.daemon = True
    release.start()
    print("done", flush=True)
    """
    assert run(program) == "done"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_kernels_are_compiled() -> None:
    """The child has no such threads, waits for none, and compiles what it asks for itself."""
    program = """
    import warnings
    for op in ("cos", "exp", "erf"):
        cutfuse.linear(x, weight, epilogue=lambda z, f=getattr(torch, op): f(z) * torch.relu(z))
    launches.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        child = os.fork()
    if child == 0:
        compiler.may_go_on = threading.Event()
        compiler.may_go_on.set()
        assert cutfuse.wait(1) == 0
        call()
        assert kernels_of(launches) == [0]
        cutfuse.linear(x, weight, epilogue=lambda z: torch.sin(z) * torch.relu(z))
        assert cutfuse.wait(30) == 1
        os._exit(7)
    _, status = os.waitpid(child, 0)
    compiler.may_go_on.set()
    assert cutfuse.wait(30) == 4
    call()
    print(os.waitstatus_to_exitcode(status), kernels_of(launches)[-1] > 0)
    """
    assert run(program) == "7 True"
