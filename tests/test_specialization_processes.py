"""What becomes of the threads that compile epilogues when a process forks or ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# A compiler that takes 0.5 s and each time 0.2 s more, on so many threads, and a layer whose second call runs directly.
START = """
import os
import sys
import time

sys.path.insert(0, {here!r})
import torch

torch.set_num_threads(1)
from compiled_epilogues import FakeCompiler, core, kernels_of
from emulated_device import emulated_device

import cutfuse
from cutfuse.layer.specialize import background


class Slow(FakeCompiler):
    seconds = 0.3

    def __call__(self, *given):
        self.seconds += 0.2
        time.sleep(self.seconds)
        return super().__call__(*given)


background.most_threads = {threads}
compiler = Slow()
core.use_compiler(compiler)
x, weight = torch.zeros(512, 64).bfloat16(), torch.zeros(2048, 64).bfloat16()


def call():
    cutfuse.linear(x, weight, epilogue=lambda z: torch.tanh(z) * torch.relu(z))


device = emulated_device()
launches = device.__enter__()
call()
"""


def run(program: str, threads: int = 1) -> str:
    text = START.format(here=str(HERE), threads=threads) + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("threads", [1, 3])
def test_the_end_of_a_process_waits_for_the_kernels_that_are_compiled(threads: int) -> None:
    """By every thread, and for nothing that is queued behind them."""
    program = """
    import atexit
    for op in ("sin", "cos", "exp", "erf"):
        cutfuse.linear(x, weight, epilogue=lambda z, f=getattr(torch, op): f(z) * torch.relu(z))
    time.sleep(0.1)
    start = time.monotonic()
    atexit._run_exitfuncs()
    print(len(compiler.compiled), time.monotonic() - start < 1.5, background._threads)
    """
    assert run(program, threads) == f"{threads} True set()\n"


def test_the_end_of_a_process_at_once() -> None:
    assert run("print('done', flush=True)") == "done\n"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_while_kernels_are_compiled(threads: int) -> None:
    """The child has no such threads, waits for none, and compiles what it asks for itself."""
    program = """
    import warnings
    for op in ("cos", "exp", "erf"):
        cutfuse.linear(x, weight, epilogue=lambda z, f=getattr(torch, op): f(z) * torch.relu(z))
    time.sleep(0.1)
    launches.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        child = os.fork()
    if child == 0:
        assert cutfuse.wait(1) == 0
        call()
        assert kernels_of(launches) == [0]
        cutfuse.linear(x, weight, epilogue=lambda z: torch.sin(z) * torch.relu(z))
        assert cutfuse.wait(30) == 1
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert cutfuse.wait(30) == 4
    call()
    print(os.waitstatus_to_exitcode(status), kernels_of(launches)[-1] > 0)
    """
    assert run(program, threads) == "7 True\n"
