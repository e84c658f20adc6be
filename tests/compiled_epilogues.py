"""A compiler in the CUDA driver's place, for tests of specialized epilogues on a CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from emulated_device import EmulatedLaunches

import cutfuse
from cutfuse import native
from cutfuse.layer.specialize import background

core = native.module()


class FakeCompiler:
    """Gives each kernel a number of its own.

    `compiled`: kernel, device and program of each, in order. `asked`: the kernel, the length of the program and the
    types of its operands, in order, of those that it fails to compile too.
    """

    def __init__(self, fails: Callable[[str], bool] = lambda kernel: False) -> None:
        self.compiled: list[tuple[str, int, Any]] = []
        self.asked: list[tuple[str, int, list[int]]] = []
        self.fails = fails
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, kernel: str, device: int, program: Any, types: list[int]) -> int:
        self.asked.append((kernel, len(program), types))
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        if self.fails(kernel):
            raise RuntimeError("no driver for this")
        with self._lock:
            self.compiled.append((kernel, device, program))
            return 0x1000 + len(self.compiled)


@contextlib.contextmanager
def compiled_by(compiler: FakeCompiler, mode: str = "background") -> Iterator[FakeCompiler]:
    """Within it, epilogues are compiled by `compiler`, and none has been before."""
    core.forget_specializations()
    core.forget_calls()
    core.use_compiler(compiler)
    before = cutfuse.get_specialization()
    cutfuse.set_specialization(mode)
    try:
        yield compiler
    finally:
        compiler.may_go_on.set()
        background.wait(30)
        background._reset()
        core.use_compiler(None)
        cutfuse.set_specialization(before)
        core.forget_specializations()
        core.forget_calls()


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    with compiled_by(FakeCompiler()) as found:
        yield found


def kernels_of(launches: EmulatedLaunches) -> list[int]:
    """What each product since the last time was launched as: 0 for the kernel that interprets."""
    found = [launch.specialized for launch in launches.launches if launch.function.startswith("gemm")]
    launches.launches.clear()
    return found
