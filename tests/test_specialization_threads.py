"""How many threads compile epilogues at once, what becomes of them, and the limits of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from compiled_epilogues import FakeCompiler, compiled_by, core

import cutfuse
from cutfuse.epilogue import Program
from cutfuse.layer import specialize
from cutfuse.layer.specialize import background, threads_of, threads_while_waited

THREADS = 4
HELD = "held"
SECONDS = 0.2
OPS = ("sin", "cos", "sinh", "exp", "erf", "tanh", "square", "abs", "neg", "floor")


class CountingCompiler(FakeCompiler):
    """`most_at_once`: in how many threads it ran at one time; it takes `seconds` each time, and for kernels that are
    called HELD until `held` is set."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.held = threading.Event()
        self.at_once = self.most_at_once = 0

    def __call__(self, kernel: str, device: int, program: Any, types: list[int]) -> int:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        assert kernel != HELD or self.held.wait(30)
        number = super().__call__(kernel, device, program, types)
        with self._lock:
            self.at_once -= 1
        return number


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "most_threads", THREADS)
    monkeypatch.setattr(background, "most_while_waited", 1)  # which is less, and has no part


@pytest.fixture
def compiler() -> Iterator[CountingCompiler]:
    found = CountingCompiler()
    with compiled_by(found):
        yield found
        found.held.set()


def epilogues(count: int, kernel: str = "any") -> specialize.Epilogues:
    """Of different programs in one kernel."""
    programs = [Program.parse(f"operands=0; {op} z; relu prev; sigmoid prev") for op in OPS[:count]]
    return [core.find_specialization(kernel, 0, program.native, []) for program in programs]


def own_threads() -> int:
    return sum(thread.name == "cutfuse-specialization" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("processors", "count", "while_waited"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 2), (7, 1, 3), (8, 2, 4), (15, 3, 7), (16, 4, 8), (128, 4, 8)],
)
def test_a_machine_of_many_processors_has_several(processors: int, count: int, while_waited: int) -> None:
    """A caller that waits has more."""
    assert (threads_of(processors), threads_while_waited(processors)) == (count, while_waited)


def test_more_are_compiled_at_once_while_a_caller_waits(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "most_threads", 1)
    monkeypatch.setattr(background, "most_while_waited", THREADS)
    compiler.may_go_on.clear()
    specialize.request(epilogues(9))
    assert own_threads() == 1
    for timeout, threads in ((0, 1), (0.05, THREADS)):
        with pytest.raises(TimeoutError, match="9 epilogues are still"):
            cutfuse.wait(timeout)
        assert own_threads() == threads
    started = [thread for thread in threading.enumerate() if thread.name == "cutfuse-specialization"]
    compiler.seconds = SECONDS  # of the kernels that come next
    compiler.may_go_on.set()
    deadline = time.monotonic() + 30
    while [thread.is_alive() for thread in started].count(True) > 1:  # nobody waits any more
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert cutfuse.wait(30) == 9
    assert compiler.most_at_once == THREADS


def test_a_thread_is_started_for_what_no_other_has(compiler: CountingCompiler) -> None:
    compiler.may_go_on.clear()
    found = epilogues(10)
    counts = []
    for epilogue in found:
        specialize.request([epilogue])
        counts.append(own_threads())
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    with pytest.raises(TimeoutError, match=r"10 epilogues are still being compiled after 0\.05 s"):
        cutfuse.wait(0.05)
    compiler.may_go_on.set()
    assert cutfuse.wait(30) == 10
    assert [epilogue.is_ready for epilogue in found] == [True] * 10


def test_what_many_threads_ask_for_is_compiled_once(compiler: CountingCompiler) -> None:
    """In both modes."""
    compiler.seconds = 0.01
    found = epilogues(10)

    def ask(mode: str) -> None:
        with cutfuse.specialization(mode):
            specialize.request(found)

    askers = [threading.Thread(target=ask, args=(mode,)) for mode in ("background", "now") * 4]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(30)
    assert cutfuse.wait(30) == 10
    assert len(compiler.compiled) == 10


def test_a_capture_waits_for_its_own_alone(compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are compiled for longer."""
    compiler.seconds = SECONDS
    (held,), (quick,) = epilogues(1, HELD), epilogues(1)
    specialize.request([held, quick])
    with monkeypatch.context() as patch:
        patch.setattr(specialize, "is_capturing", lambda: True)
        specialize.request([quick])
    assert quick.is_ready
    assert held.is_pending
    with pytest.raises(TimeoutError, match="1 epilogue is still"):
        cutfuse.wait(SECONDS)
    compiler.held.set()
    assert cutfuse.wait(30) == 2


def test_an_exception_in_one_thread_leaves_the_others_at_work(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued gets a thread in its place."""
    real, printed = background._compile, []

    def compile_or_raise(found: Any) -> None:
        real(found)
        if found.kernel == "broken":
            raise ZeroDivisionError

    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(background, "_compile", compile_or_raise)
    held = epilogues(THREADS - 1, HELD)
    specialize.request(held + epilogues(2, "broken") + epilogues(3))
    with pytest.raises(TimeoutError, match=f"{THREADS - 1} epilogues are still"):
        cutfuse.wait(1)
    assert own_threads() == THREADS - 1
    assert len(compiler.compiled) == 5
    compiler.held.set()
    assert cutfuse.wait(30) == THREADS - 1 + 5
    assert [given.exc_value.__class__ for given in printed] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("is_asked_again", [True, False])
def test_where_no_thread_can_be_started(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, is_asked_again: bool
) -> None:
    """A further call starts one, and a caller that waits compiles."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    found = epilogues(3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        specialize.request(found)
        with pytest.raises(TimeoutError, match="3 epilogues are still"):
            cutfuse.wait(0)
        if not is_asked_again:
            assert cutfuse.wait(30) == 3
    specialize.request(found)
    assert cutfuse.wait() == 3


def test_waiting_includes_what_other_callers_compile(compiler: CountingCompiler) -> None:
    compiler.may_go_on.clear()
    caller = threading.Thread(target=background.compile, args=epilogues(1))
    caller.start()
    assert compiler.has_begun.wait(30)
    with pytest.raises(TimeoutError, match="1 epilogue is still"):
        cutfuse.wait(0.05)
    compiler.may_go_on.set()
    assert cutfuse.wait(30) == 1
    caller.join(30)


def test_ever_new_chains(compiler: CountingCompiler) -> None:
    """Beyond the limit they are interpreted; nothing grows with their number."""
    compiler.may_go_on.clear()
    limit = core.most_specializations
    ops = ("relu", "neg", "abs", "square", "tanh", "sigmoid", "floor", "ceil")
    found = []
    for number in range(limit + 100):
        chain = "; ".join(f"{ops[number // 8**place % 8]} {'prev' if place else 'z'}" for place in range(5))
        found.append(core.find_specialization("any", 0, Program.parse(f"operands=0; {chain}; neg prev").native, []))
        specialize.request([] if found[-1] is None else [found[-1]])
    assert all(found[:limit])
    assert not any(found[limit:])
    assert core.specialization_count() == limit
    compiler.may_go_on.set()
    assert cutfuse.wait(60) == limit


def test_what_nobody_asks_for_has_a_limit_of_its_own(compiler: CountingCompiler) -> None:
    """Explanations find such epilogues."""
    program = Program.parse("operands=0; tanh z; neg prev").native
    limit = core.most_specializations
    assert all(core.find_specialization(f"kernel {number}", 0, program, []) for number in range(8 * limit))
    assert core.find_specialization("one more", 0, program, []) is None
