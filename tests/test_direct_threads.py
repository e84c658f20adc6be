"""Direct calls in many threads at once, of layers that differ and of a callable that one of them redefines."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from direct_layers import KINDS, call_of
from emulated_device import READERS, EmulatedLaunches, direct_calls, emulated_device
from threads import run_in_threads
from torch import Tensor

import cutfuse
from cutfuse import native

core = native.module()
SCALE = 1.0


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads take turns far more often than they do as a rule."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class ManyLaunches(EmulatedLaunches):
    """Keeps none."""

    def write_down(self, launch: Any) -> None:
        super().write_down(launch)
        self.launches.clear()


@pytest.mark.usefixtures("busy_threads", "one_thread")
@pytest.mark.parametrize("reader", READERS)
def test_64_threads_call_different_layers(reader: str) -> None:
    """Which have their plans made meanwhile, some forgotten again."""
    with emulated_device(reader, ManyLaunches()):
        calls = [call_of(KINDS[seed % 4], seed) for seed in range(64)]
        before = direct_calls()

        def work(seed: int) -> None:
            call, reference = calls[seed]
            expected = reference()
            for turn in range(6):
                torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
                if seed == 0 and turn == 2:
                    core.forget_calls()
                if seed == 1 and turn == 3:
                    core.forget_callables()

        run_in_threads([lambda seed=seed: work(seed) for seed in range(64)])  # type: ignore[misc]
        assert direct_calls() - before > 64 * 2


def redefined(z: Tensor) -> Tensor:
    return torch.relu(z) * SCALE


@pytest.mark.usefixtures("busy_threads", "one_thread")
@pytest.mark.parametrize("what", ["global", "cell", "default", "code"])
def test_a_callable_that_is_redefined_while_others_call(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each result is that of a definition which was there during the call, and the newest afterwards."""
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0)
    scale = 1.0
    by_cell = lambda z: torch.relu(z) * scale  # noqa: E731
    by_default = lambda z, s=1.0: torch.relu(z) * s  # noqa: E731
    by_code: Any = eval("lambda z: torch.relu(z) * 1.0", {"torch": torch})
    function = {"global": redefined, "cell": by_cell, "default": by_default, "code": by_code}[what]
    codes = {k: eval(f"lambda z: torch.relu(z) * {float(k)}").__code__ for k in range(1, 5)}

    def redefine(k: int) -> None:
        nonlocal scale
        if what == "global":
            sys.modules[__name__].SCALE = float(k)  # type: ignore[attr-defined]
        elif what == "cell":
            scale = float(k)
        elif what == "default":
            by_default.__defaults__ = (float(k),)
        else:
            by_code.__code__ = codes[k]

    x, weight = torch.rand(4, 8) + 1, torch.rand(8, 8) + 1
    z = F.linear(x, weight)
    finished, ended = threading.Event(), threading.Event()
    redefinitions = 0
    with emulated_device(launches=ManyLaunches()):
        expected = {k: z * k for k in range(1, 5)}

        def change() -> None:
            nonlocal redefinitions
            try:
                for k in itertools.cycle(range(1, 5)):
                    if finished.is_set():
                        return
                    redefine(k)
                    redefinitions += 1
                    y = cutfuse.linear(x, weight, epilogue=function)
                    torch.testing.assert_close(y, expected[k], rtol=1e-4, atol=1e-4)
            finally:
                ended.set()

        all_called = threading.Barrier(4, finished.set)

        def call() -> None:
            calls = 0
            try:
                # A busy machine may let the redefining thread wait; that may also have failed.
                while calls < 60 or (redefinitions < 8 and not ended.is_set()):
                    calls += 1
                    y = cutfuse.linear(x, weight, epilogue=function)
                    legal = round(float((y / z).mean()))
                    assert legal in expected
                    torch.testing.assert_close(y, expected[legal], rtol=1e-4, atol=1e-4)
            finally:
                all_called.wait()

        run_in_threads([change, *[call] * 4])
        for k in (3, 1, 4, 2):
            redefine(k)
            for _ in range(3):
                y = cutfuse.linear(x, weight, epilogue=function)
                torch.testing.assert_close(y, expected[k], rtol=1e-4, atol=1e-4)
