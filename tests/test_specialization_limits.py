"""Specialized epilogues at the limits of a process: ever new chains, and threads that fail or cannot be started."""

from __future__ import annotations

import pytest
from compiled_epilogues import FakeCompiler, core
from compiled_epilogues import compiler as compiler
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches

import cutfuse
from cutfuse.epilogue import Program
from cutfuse.layer import specialize


def test_ever_new_chains(compiler: FakeCompiler, launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit they are interpreted; nothing grows with their number."""
    compiler.may_go_on.clear()
    limit = core.most_specializations
    ops = ("relu", "neg", "abs", "square", "tanh", "sigmoid", "floor", "ceil")
    kernel = "sm90_bf16_128x128x64_2x1_cooperative"
    found = []
    for number in range(limit + 100):
        chain = "; ".join(f"{ops[number // 8**place % 8]} {'prev' if place else 'z'}" for place in range(5))
        found.append(core.find_specialization(kernel, 0, Program.parse(f"operands=0; {chain}; neg prev").native, []))
        specialize.request([] if found[-1] is None else [found[-1]])
    assert all(found[:limit])
    assert not any(found[limit:])
    assert core.specialization_count() == limit
    compiler.may_go_on.set()
    assert cutfuse.wait(60) == limit


def test_the_limit_is_of_what_is_asked_for(compiler: FakeCompiler) -> None:
    """Explanations find epilogues that nobody asks for, which have a limit of their own."""
    program = Program.parse("operands=0; tanh z; neg prev").native
    limit = core.most_specializations
    found = [core.find_specialization(f"kernel {number}", 0, program, []) for number in range(8 * limit)]
    assert all(found)
    assert core.find_specialization("one more", 0, program, []) is None
    core.forget_specializations()
    found = [core.find_specialization(f"kernel {number}", 0, program, []) for number in range(limit)]
    assert core.find_specialization("one more", 0, program, []) is not None
    for epilogue in found:
        epilogue.claim()
    assert core.find_specialization("another", 0, program, []) is None
