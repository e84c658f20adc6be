"""CPU memory as a GPU of the direct path: its tensors are an H200's, whose launches PyTorch makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from emulated_launches import EmulatedLaunches, RecordedLaunches, recorded
from torch import Tensor

from cutfuse import arguments, native
from cutfuse.layer import call_plans, calls, cuda, linear_plan, planner, training_step

Result = TypeVar("Result")
core = native.module()
# PyTorch 2.8 and 2.9 have no functions in C that read tensors: there the direct path reads their attributes.
needs_exchange_api = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch has no exchange API"
)
READERS = [pytest.param("exchange", marks=needs_exchange_api), "attributes"]


@contextlib.contextmanager
def emulated_device(
    reader: str | None = None, launches: RecordedLaunches | None = None, **functions: Any
) -> Iterator[Any]:
    """Within it, calls on CPU tensors run directly, and `launches` is given what is launched.

    `reader`: how tensors are read, by what this PyTorch has where it is None. `functions`: in place of PyTorch's own.
    """
    found = EmulatedLaunches() if launches is None else launches
    has_exchange_api = reader != "attributes" and hasattr(Tensor, "__dlpack_c_exchange_api__")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
        patch.setattr(cuda, "takes", lambda x: True)
        for module in (linear_plan, planner, training_step):
            patch.setattr(module, "device_facts", lambda device: (9, 0, 132))
        patch.setattr(call_plans, "on_device", lambda index: contextlib.nullcontext())
        patch.setattr(call_plans, "multiprocessors", lambda index: 132)
        core.connect_calls({**calls.torch_functions(calls.CPU, has_exchange_api=has_exchange_api), **functions})
        try:
            with recorded(found):
                yield found
        finally:
            calls.connect()


@pytest.fixture
def launches() -> Iterator[EmulatedLaunches]:
    """For a test within `emulated_device`."""
    with emulated_device() as found:
        yield found


@pytest.fixture(params=READERS, name="launches")
def launches_of_each_reader(request: pytest.FixtureRequest) -> Iterator[EmulatedLaunches]:
    """The same for a test of how tensors are read, with each way of that."""
    with emulated_device(request.param) as found:
        yield found


def direct_calls() -> int:
    """How many calls ran directly so far."""
    return core.direct_calls()


def directly(call: Callable[[], Result]) -> Result:
    """The result of a call that runs directly, as one like it has been planned before."""
    before = direct_calls()
    y = call()
    assert direct_calls() == before + 1
    return y


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Within it, every call takes the general path."""
    core.pause_calls(True)
    try:
        yield
    finally:
        core.pause_calls(False)
