"""Direct calls where something else is in the way: modes, subclasses, devices, streams, and other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from direct_layers import call_of
from emulated_device import (
    READERS,
    EmulatedLaunches,
    direct_calls,
    directly,
    emulated_device,
    needs_exchange_api,
    paused,
)
from emulated_device import launches_of_each_reader as launches_of_each_reader
from several_devices import SeveralDevices
from threads import run_in_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watchers import Functions, Operators, autocast, check, profiled

import cutfuse
from cutfuse import native

core = native.module()


def relu_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return cutfuse.linear(x, weight, bias, epilogue=torch.relu)


@pytest.fixture
def layer(launches: EmulatedLaunches) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layer whose next call runs directly."""
    given = torch.randn(6, 16), torch.randn(8, 16), torch.randn(8)
    relu_of(*given)
    directly(lambda: relu_of(*given))
    return given


@pytest.mark.parametrize("watcher", [Functions, Operators, autocast, profiled])
def test_calls_whose_operations_are_watched_take_the_general_path(
    layer: tuple[Tensor, Tensor, Tensor], watcher: Callable[[], Any]
) -> None:
    before = direct_calls()
    with watcher() as watching:
        y = relu_of(*layer)
    assert direct_calls() == before
    with paused(), watcher() as general:
        expected = relu_of(*layer)
    if watcher in (Functions, Operators):
        assert set(watching.seen) >= set(general.seen) != set(), "and reads of attributes"
    check(y, expected)
    check(directly(lambda: relu_of(*layer)), torch.relu(F.linear(*layer)))


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_mode_sees_a_plain_layer_as_of_pytorch(launches: EmulatedLaunches, mode: Callable[[], Any]) -> None:
    x, weight = torch.randn(6, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    with mode() as watching:
        y = cutfuse.linear(x, weight)
    with mode() as general:
        expected = F.linear(x, weight)
    assert set(watching.seen) >= set(general.seen) != set()
    check(y, expected)


def call_directly(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    return core.call_linear(x, weight, bias, torch.relu, (), None, False, None)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms_take_the_general_path(layer: tuple[Tensor, Tensor, Tensor], transform: Any) -> None:
    """For tensors that the transform has wrapped, and for those that it has not."""
    x, weight, bias = layer
    found: list[Any] = []

    def run(wrapped: Tensor) -> Tensor:
        found.extend((call_directly(wrapped, weight, bias), call_directly(x, weight, bias)))
        return wrapped.sum()

    transform(run)(torch.stack([x]) if transform is torch.func.vmap else x)
    assert found == [None, None]
    assert isinstance(call_directly(x, weight, bias), Tensor)


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # PyTorch 2.15 itself, in its forward-mode formulas
def test_forward_derivatives_take_the_general_path(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = layer
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn_like(x))
        assert call_directly(dual, weight, bias) is None
        assert call_directly(x, weight, bias) is None
    assert isinstance(call_directly(x, weight, bias), Tensor)


def test_a_negated_view_is_read_as_pytorch_reads_it(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """Its memory holds the negative, in the layout of a tensor that has a plan."""
    x, weight, bias = layer
    negated = torch._neg_view
    for given in ((negated(x), weight, bias), (x, negated(weight), bias), (x, weight, negated(bias))):
        check(relu_of(*given), torch.relu(F.linear(*given)))
    r, s = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(2):
        cutfuse.pointwise(torch.add, r, s)
        cutfuse.reduce(r, -1, "sum")
        cutfuse.linear(x, weight, epilogue=torch.add, operands=(r,))
    check(cutfuse.pointwise(torch.add, negated(r), s), s - r)
    check(cutfuse.pointwise(torch.add, r, negated(s)), r - s)
    check(cutfuse.reduce(negated(r), -1, "sum"), -r.sum(-1))
    check(cutfuse.linear(x, weight, epilogue=torch.add, operands=(negated(r),)), F.linear(x, weight) - r)


def test_results_of_inference_mode_are_inference_tensors(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    with torch.inference_mode():
        assert directly(lambda: relu_of(*layer)).is_inference()
    assert not directly(lambda: relu_of(*layer)).is_inference()


class Tagged(Tensor):
    """A subclass as PyTorch's own: its operations give Tagged tensors, and are counted."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Tagged.count += 1
        return super().__torch_function__(func, types, args, kwargs)


class TaggedParameter(nn.Parameter):
    pass


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_subclass_takes_the_general_path(layer: tuple[Tensor, Tensor, Tensor], place: int) -> None:
    given = [*layer]
    given[place] = given[place].as_subclass(Tagged)
    before, Tagged.count = direct_calls(), 0
    for _ in range(2):
        y = relu_of(*given)
        with paused():
            expected = relu_of(*given)
        check(y, expected)
        assert type(y) is type(torch.relu(F.linear(*given)))
    assert direct_calls() == before
    assert Tagged.count > 0


def test_a_subclass_as_operand_takes_the_general_path(launches: EmulatedLaunches) -> None:
    x, r = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(2):
        cutfuse.pointwise(torch.add, x, r)
    before = direct_calls()
    for given in ((x.as_subclass(Tagged), r), (x, r.as_subclass(Tagged))):
        assert type(cutfuse.pointwise(torch.add, *given)) is Tagged
    assert type(cutfuse.reduce(x.as_subclass(Tagged), -1, "sum")) is Tagged
    assert direct_calls() == before


def test_parameters_are_plain_and_their_subclasses_are_not(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias = layer
    y = directly(lambda: relu_of(x, nn.Parameter(weight, requires_grad=False), bias))
    check(y, torch.relu(F.linear(*layer)))
    before = direct_calls()
    relu_of(x, TaggedParameter(weight, requires_grad=False), bias)
    assert direct_calls() == before


@pytest.fixture(params=READERS)
def devices(request: pytest.FixtureRequest) -> Iterator[tuple[SeveralDevices, EmulatedLaunches]]:
    found = SeveralDevices()
    functions = dict(found.functions)
    if request.param == "attributes":
        functions.pop("exchange_api", None)
    with emulated_device(request.param, **functions) as launches:
        yield found, launches


@pytest.mark.parametrize("kind", ["linear", "pointwise", "reduce"])
def test_launches_are_on_the_stream_of_the_thread(devices: tuple[SeveralDevices, EmulatedLaunches], kind: str) -> None:
    here, launches = devices
    call, reference = call_of(kind)
    call()
    launches.launches.clear()
    before = direct_calls()

    def work(stream: int) -> None:
        with here.stream(stream):
            for _ in range(3):
                torch.testing.assert_close(call(), reference(), rtol=1e-4, atol=1e-4)

    streams = range(1, 9)
    run_in_threads([lambda stream=stream: work(stream) for stream in streams])  # type: ignore[misc]
    assert direct_calls() == before + 24
    assert sorted(launch.stream for launch in launches.launches) == [1000 + s for s in streams for _ in range(3)]


def test_a_backward_pass_launches_on_the_stream_of_now(devices: tuple[SeveralDevices, EmulatedLaunches]) -> None:
    """Which autograd has set to the forward's."""
    here, launches = devices
    x, weight, bias = torch.randn(6, 16), torch.randn(8, 16, requires_grad=True), torch.randn(8, requires_grad=True)
    for _ in range(2):
        relu_of(x, weight, bias)
    launches.launches.clear()
    with here.stream(5):
        relu_of(x, weight, bias).sum().backward()
    assert launches.launches
    assert {launch.stream for launch in launches.launches} == {1005}


def test_a_call_on_another_device_than_the_current_one_is_the_general_paths(
    devices: tuple[SeveralDevices, EmulatedLaunches],
) -> None:
    """In a thread, too, that has called `torch.cuda.set_device`."""
    here, _ = devices
    given = torch.randn(6, 16), torch.randn(8, 16)
    expected = torch.relu(F.linear(*given))
    for _ in range(2):
        relu_of(*given)
    before = direct_calls()

    def work() -> None:
        with here.device(1):
            assert core.call_linear(*given, None, torch.relu, (), None, False, None) is None
            check(relu_of(*given), expected)

    run_in_threads([work])
    assert direct_calls() == before
    check(directly(lambda: relu_of(*given)), expected)


@needs_exchange_api
def test_each_device_has_plans_and_streams_of_its_own() -> None:
    here = SeveralDevices()
    with emulated_device("exchange", **here.functions) as launches:
        first = torch.randn(6, 16), torch.randn(8, 16)
        second = here.put(torch.randn(6, 16), 1), here.put(torch.randn(8, 16), 1)
        rest = None, torch.relu, (), None, False, None
        relu_of(*first)
        assert core.call_linear(*first, *rest) is not NotImplemented
        with here.device(1):
            assert core.call_linear(*second, *rest) is NotImplemented
            assert core.call_linear(second[0], first[1], *rest) is NotImplemented
            relu_of(*second)
            launches.launches.clear()
            check(relu_of(*second), torch.relu(F.linear(*second)))
        assert [launch.stream for launch in launches.launches] == [2000]
        assert core.call_linear(*second, *rest) is None


@pytest.mark.usefixtures("launches")
def test_modes_are_of_the_thread_that_entered_them() -> None:
    """A mode, autocast or a device of one thread changes nothing for the calls of another."""
    given = torch.randn(6, 16), torch.randn(8, 16)
    expected = torch.relu(F.linear(*given))
    for _ in range(2):
        relu_of(*given)
    entered, called = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def watch() -> None:
        with contextlib.ExitStack() as stack:
            for context in (Functions(), Operators(), autocast(), torch.no_grad()):
                stack.enter_context(context)
            entered.set()
            assert called.wait(60)
            found.append(relu_of(*given))

    def call() -> None:
        assert entered.wait(60)
        try:
            check(directly(lambda: relu_of(*given)), expected)
        finally:
            called.set()

    run_in_threads([watch, call])
    assert found[0].dtype == torch.bfloat16


def test_a_checkpoint_ends_a_plain_layer_that_it_computes_again() -> None:
    """By an exception of its hooks, which the direct path hands on: the general path would call them once more."""
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((6, 16), (8, 16), (8,)))

    def layer() -> Tensor:
        return cutfuse.linear(torch.sin(x), weight, bias)

    for _ in range(2):
        y: Tensor = checkpoint(layer, use_reentrant=False)
        found, right = (torch.autograd.grad(of.sum(), [x, weight, bias]) for of in (y, layer()))
        assert all(map(torch.equal, found, right))
    with pytest.raises(ValueError, match="x has to be"):
        cutfuse.linear(x, torch.randn(8, 15))
