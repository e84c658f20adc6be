"""Direct calls and what a process does: fork, subinterpreters, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cutfuse import native

core = native.module()
HERE = Path(__file__).parent

# What the programs below begin with. They have calls that run directly; PyTorch's threads do not live through a fork.
START = """
import sys

sys.path.insert(0, {here!r})
import torch

torch.set_num_threads(1)
from emulated_device import core, direct_calls, emulated_device
from emulated_device import EmulatedLaunches

import cutfuse

x, weight, r = torch.randn(6, 16), torch.randn(8, 16, requires_grad=True), torch.randn(6, 8)
scale = 2.0


def layer(z, s):
    return torch.relu(z) * scale + s


def run():
    with torch.no_grad():
        results = [cutfuse.linear(x, weight, epilogue=layer, operands=(r,)), cutfuse.pointwise(layer, r, r)]
        results.append(cutfuse.reduce(r, -1, "sum", prologue=torch.tanh))
    y = cutfuse.linear(x, weight, epilogue=torch.sigmoid)
    return [*results, *torch.autograd.grad(y.sum(), weight)]


def reference():
    z = torch.nn.functional.linear(x, weight)
    y = [(torch.relu(z) * scale + r).detach(), torch.relu(r) * scale + r, torch.tanh(r).sum(-1)]
    return [*y, *torch.autograd.grad(torch.sigmoid(z).sum(), weight)]


def check(is_direct=True):
    before = direct_calls()
    for y, expected in zip(run(), reference(), strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert not is_direct or direct_calls() == before + 4


device = emulated_device()
launches = device.__enter__()
check(is_direct=False)
check()
"""


# Runs each program in a child, which ends as a process of its own does unless it says otherwise: to import PyTorch in
# each, and to end it, takes long.
CHILDREN = """
import os
import traceback

for k, program in enumerate({programs!r}):
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.path.join({folder!r}, f"{{k}}.{{stream}}"), os.O_WRONLY | os.O_CREAT), stream)
        exec(program, globals())
        break
    with open(os.path.join({folder!r}, f"{{k}}.status"), "w") as file:
        file.write(str(os.waitpid(child, 0)[1]))
else:
    os._exit(0)
"""

PROGRAMS = {
    # With what was remembered before, and what they learn, change and forget themselves; a child's child, too.
    "children of a fork": """
def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def change():
    global scale
    check()
    scale = 3.0
    check(is_direct=False)
    check()
    in_child(check)
    core.forget_calls()
    core.forget_callables()
    check(is_direct=False)
    check()

for _ in range(3):
    in_child(change)
assert scale == 2.0
check()
os._exit(0)
""",
    # It waits for threads, whose calls go on when the main thread has nothing left to do, and then for what is to be
    # called at its end. Plans, callables and their traces are alive to the last; one object calls when it is torn down.
    "threads call at the end": """
import atexit
import threading

entered = threading.Barrier(5)

def work():
    entered.wait()
    threading.main_thread().join()
    for _ in range(20):
        for y, expected in zip(run(), reference(), strict=True):
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    os.write(1, b"done ")

class Late:
    def __del__(self, call=cutfuse.pointwise, function=torch.relu, tensor=r, write=os.write):
        y = call(function, tensor)
        write(1, b"torn down" if y.shape == tensor.shape else b"wrong")

def check_at_exit():
    check()
    os.write(1, b"at exit ")
    core.record_launches(dict().setdefault)  # makes none: PyTorch may be gone later

cutfuse.pointwise(torch.relu, r)
cutfuse.pointwise(torch.relu, r)
atexit.register(check_at_exit)
late = Late()
kept = [layer, run, device, lambda z: layer(z, kept)]
for _ in range(4):
    threading.Thread(target=work).start()
entered.wait()
""",
    # It does not wait for these. PyTorch's own operations abort a process that ends while such a thread is in them. And
    # cutfuse's own modules are gone before the native one, whose plans hold objects of the program.
    "daemon threads launch at the end": """
import threading

inside = threading.Semaphore(0)
never = threading.Event()

class Stuck(EmulatedLaunches):
    def write_down(self, launch):
        inside.release()
        never.wait()

plan = core.training_call(run, [check])
given = (x, weight, None, layer, (r,), None, False, None)
number = core.new_callable_number()
key = core.call_key(core.CallFunction.linear, given, number)
assert core.remember_call(core.CallFunction.linear, given, number, key, plan)
core.record_launches(Stuck())
for _ in range(4):
    threading.Thread(target=run, daemon=True).start()
for _ in range(4):
    inside.acquire()
for name in [name for name in sys.modules if name.startswith("cutfuse") and name != "cutfuse._C"]:
    del sys.modules[name]
del cutfuse, device, launches, plan
""",
}
WRITES = {
    "children of a fork": "",
    "threads call at the end": "done done done done at exit torn down",
    "daemon threads launch at the end": "",
}


def run(program: str) -> None:
    """It has to end well, and to complain of nothing."""
    # Python looks for modules where it is started, and the source tree's cutfuse has no native module.
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=sys.prefix)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """Of each program: its status, and what it wrote."""
    if not hasattr(os, "fork"):  # the programs are about what a child inherits; Windows has no such thing
        pytest.skip("has no fork")
    folder = tmp_path_factory.mktemp("children")
    run(START.format(here=str(HERE)) + CHILDREN.format(programs=[*PROGRAMS.values()], folder=str(folder)))
    found = {}
    for k, name in enumerate(PROGRAMS):
        status, written, complaints = ((folder / f"{k}.{end}").read_text() for end in ("status", "1", "2"))
        found[name] = status, written, complaints
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_end_well(outcomes: dict[str, tuple[str, str, str]], name: str) -> None:
    assert outcomes[name] == ("0", WRITES[name], "")


SUBINTERPRETER = """
import importlib.util

spec = importlib.util.spec_from_file_location("cutfuse._C", {module!r})
try:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
except ImportError as error:
    assert "subinterpreter" in str(error), error
else:
    raise AssertionError("was imported")
"""


@pytest.mark.parametrize("first", ["before", "only"])
def test_a_subinterpreter_is_refused(first: str) -> None:
    """Whether or not the first interpreter has the module, which goes on working there."""
    pytest.importorskip("_testcapi")
    program = f"""
        import importlib.util
        import _testcapi

        def load():
            spec = importlib.util.spec_from_file_location("cutfuse._C", {core.__file__!r})
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        if {first == "before"}:
            load()
        for _ in range(3):
            assert _testcapi.run_in_subinterp({SUBINTERPRETER.format(module=core.__file__)!r}) == 0
        module = load()
        assert module.recognise(None) == 1
        assert module.new_callable_number() > 1
        """
    run(textwrap.dedent(program))
