"""The check that a call takes the path that a test is for, on CPU memory that stands for a GPU's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import call_path
import pytest
import torch
from call_path import DIRECT, GENERAL, check_paths, checked_calls, expected_reason, has_path, taken
from emulated_device import direct_calls, emulated_device
from threads import run_in_threads
from torch import Tensor

import cutfuse
from cutfuse import arguments, native
from cutfuse.layer import calls
from cutfuse.layer.call_plans import general

core = native.module()
FP64 = "float64; kernels compute in fp32"


def why_composed(x: Tensor, arithmetic: torch.dtype) -> str:
    """As on a GPU."""
    return FP64 if arithmetic is torch.float64 else "a transform" if arguments._is_transformed() else ""


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with emulated_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", why_composed)
        yield


def whole(*shape: int) -> Tensor:
    """-1, 0 and 1, of which the emulated kernels make the bits that PyTorch does."""
    return torch.randint(-1, 2, shape).float()


def sample(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return whole(16, 32).to(dtype), whole(24, 32).to(dtype)


def limited(z: Tensor) -> Tensor:
    return (z * 2).clamp(-9, 9)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return cutfuse.linear(x, weight, epilogue=limited)


def module() -> cutfuse.nn.FusedLinear:
    made = cutfuse.nn.FusedLinear(32, 24, epilogue=limited).requires_grad_(False)
    made.load_state_dict({"weight": whole(24, 32), "bias": whole(24)})
    return made


CALLS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: layer(*sample()),
    "linear, reduced": lambda: cutfuse.linear(*sample(), epilogue=limited, reduce="amax", keepdim=True),
    "PyTorch's own layer": lambda: cutfuse.linear(*sample()),
    "an operation behind it": lambda: cutfuse.linear(*sample(), epilogue=torch.relu),
    "pointwise": lambda: cutfuse.pointwise(lambda z, r: limited(z) - r, whole(4, 8), whole(8)),
    "sigmoid": lambda: cutfuse.sigmoid(torch.zeros(4, 8)),
    "reduce": lambda: cutfuse.reduce(whole(4, 8), 1, "sum", prologue=limited, operands=()),
    "sum": lambda: cutfuse.sum(whole(4, 8), 0),
    "module": lambda: module()(whole(16, 32)),
}


@pytest.mark.parametrize("path", [GENERAL, DIRECT])
@pytest.mark.parametrize("name", CALLS)
def test_public_functions_take_the_path(name: str, path: str) -> None:
    before = direct_calls()
    with taken(path):
        CALLS[name]()
    assert (direct_calls() > before) == (path == DIRECT)


def test_the_result_is_the_direct_call_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [t.requires_grad_() for t in sample()]
    with taken(DIRECT):
        y = layer(*tensors)
        gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert y.grad_fn is not None
    assert type(y.grad_fn).__name__ == "DirectLinearBackward"
    assert [g.shape for g in gradients] == [t.shape for t in tensors]


def test_the_first_call_of_a_kind_is_made_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    monkeypatch.setattr(call_path, "check_same", lambda *given: compared.append(1))
    x, weight = sample()
    with checked_calls() as paths:
        for _ in range(3):
            layer(x, weight)
        layer(x[:8], weight)
    assert (paths.direct, len(compared)) == (4, 2)
    paths.check("")


def test_a_direct_call_on_the_general_path_fails() -> None:
    x, weight = sample()

    def is_direct() -> None:
        core.pause_calls(False)
        try:
            for _ in range(2):
                layer(x, weight)
        finally:
            core.pause_calls(True)

    with pytest.raises(AssertionError, match="1 calls were direct on the general path"), taken(GENERAL):
        is_direct()


def test_a_call_that_is_not_direct_for_no_reason_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = sample()
    monkeypatch.setattr(calls, "remember", lambda *given: None)
    said = r"(?s)cutfuse.linear\(Tensor\[16, 32\] \(32, 1\) torch.bfloat16 cpu, .*was not direct.*NotImplemented"
    with pytest.raises(AssertionError, match=said), taken(DIRECT):
        layer(x, weight)


def test_epilogues_are_compiled_before_the_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of theirs takes the general path until then."""
    modes: list[str] = []
    native_call, remember = calls.call_linear, calls.remember_linear

    def until_compiled(*given: Any) -> Any:
        y = native_call(*given)
        return None if isinstance(y, Tensor) and "now" not in modes else y

    def noting(*given: Any) -> None:
        modes.append(core.specialization_mode().name)
        remember(*given)

    monkeypatch.setattr(calls, "call_linear", until_compiled)
    monkeypatch.setattr(calls, "remember_linear", noting)
    with checked_calls() as paths:
        layer(*sample())
    assert modes == ["background", "now"]
    assert (paths.direct, dict(paths.general)) == (1, {})


@pytest.mark.parametrize("name", ["linear", "pointwise", "reduce"])
def test_a_call_that_is_marked_general_for_no_reason_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, f"plan_{name}_call", lambda *given: general())
    with pytest.raises(AssertionError, match=r"(?s)was not direct.*native answer: None"), taken(DIRECT):
        CALLS[name]()


def test_training_that_is_marked_general_for_no_reason_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "plan_training_call", lambda *given: general())
    x, weight = sample()
    with pytest.raises(AssertionError, match=r"(?s)requires_grad.*was not direct"), taken(DIRECT):
        layer(x.requires_grad_(), weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.view(torch.int16).view(-1)[:1].bitwise_xor_(1), "1 of 384 elements .* have other bits"),
        (lambda y: y.view(-1)[:2].fill_(torch.nan), "2 of 384 elements"),
        (lambda y: y.resize_(24, 16), "the direct result is"),
    ],
    ids=["a bit", "NaN", "shape"],
)
def test_another_result_fails(change: Callable[[Tensor], Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native_call = calls.call_linear

    def changed(*given: Any) -> Any:
        y = native_call(*given)
        if isinstance(y, Tensor):
            change(y)
        return y

    monkeypatch.setattr(calls, "call_linear", changed)
    x, weight = sample()
    with pytest.raises(AssertionError, match=said), taken(DIRECT):
        layer(x, weight)


def test_the_sign_of_a_zero_is_another_bit_and_nan_is_nan() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert call_path.count_different(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert call_path.count_different(nan, nan.flip(0)) == 0


def test_parts_of_a_large_result_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_path, "MANY", 100)
    assert len(call_path.parts_of(torch.zeros(80, 2))) > 1
    with taken(DIRECT):
        CALLS["linear"]()


def test_tests_without_direct_calls_are_marked() -> None:
    x, weight = sample()
    with pytest.raises(AssertionError, match=r"no call was direct.*empty"), taken(DIRECT):
        layer(x[:0], weight)
    with taken(DIRECT, "no rows"):
        layer(x[:0], weight)
    with pytest.raises(AssertionError, match="no call was direct"), taken(DIRECT):
        pass


def test_a_mark_that_is_stale_fails() -> None:
    said = "1 calls were direct, but the test is marked general_path: fp64"
    with pytest.raises(AssertionError, match=said), taken(DIRECT, "fp64"):
        layer(*sample())


def test_a_direct_call_that_nobody_saw_fails() -> None:
    x, weight = sample()
    given = x, weight, None, torch.relu, (), None, False, None
    with checked_calls() as paths:
        cutfuse.linear(x, weight, epilogue=torch.relu)
        assert core.call_linear(*given) is not None
    with pytest.raises(AssertionError, match="counted 2 direct calls; 1 of public functions and 0 of operators"):
        paths.check("")


def test_a_failure_of_the_test_is_its_own() -> None:
    for path in (GENERAL, DIRECT):
        with pytest.raises(ZeroDivisionError), taken(path):
            raise ZeroDivisionError
    assert calls.call_linear is core.call_linear
    assert isinstance(layer(*sample()), Tensor)


class Plain(Tensor):
    """Is no plain tensor."""


def wants_gradient(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


X, ROW = whole(16, 32), whole(24)
REASONS: dict[str, tuple[Callable[[], object], str]] = {
    "trained in fp64": (lambda: layer(*map(wants_gradient, sample(torch.float64))), FP64),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16)(layer)(*sample()), "autocast is active"),
    "transform": (lambda: torch.func.vmap(cutfuse.sigmoid)(X), "a transform of torch.func is active"),
    "subclass": (lambda: cutfuse.sigmoid(X.as_subclass(Plain)), "Plain is no plain tensor"),
    "negated": (lambda: cutfuse.sigmoid(torch.zeros(4, dtype=torch.complex64).conj().imag), "is negated"),
    "prepared": (lambda: cutfuse.linear(X, cutfuse.prepare(whole(8, 32))), "PreparedWeight is no plain tensor"),
    "gradient of pointwise": (lambda: cutfuse.sigmoid(wants_gradient(X)), "a gradient is wanted"),
    "gradient of a reduction": (
        lambda: cutfuse.linear(wants_gradient(X), X, epilogue=torch.tanh, reduce="amax"),
        "a gradient is wanted",
    ),
    "cast result": (lambda: cutfuse.pointwise(torch.tanh, X, out_dtype=torch.float64), "cast to torch.float64"),
    "integers": (lambda: cutfuse.sigmoid(torch.arange(3)), "not floating-point"),
    "sum of integers": (lambda: cutfuse.sum(torch.arange(3)), "not floating-point"),
    "mask": (lambda: cutfuse.pointwise(lambda z, m: z.tanh() * m, X, X > 0), "cast or copied"),
    "empty": (lambda: cutfuse.sigmoid(torch.empty(0, 3)), "empty"),
    "raises": (lambda: cutfuse.linear(X, whole(4, 5)), "it raises ValueError"),
    "many dimensions": (
        lambda: cutfuse.pointwise(torch.mul, whole(2, 3, 4, 5), whole(3, 1, 5)),
        "common layout",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_general_paths_calls_have_a_reason(name: str) -> None:
    call, reason = REASONS[name]
    with checked_calls() as paths:
        try:
            call()
        except ValueError:
            assert name == "raises"
    assert any(reason in found for found in paths.general), paths.general


def test_threads() -> None:
    x, weight = sample()
    with checked_calls() as paths:
        run_in_threads([lambda: [layer(x, weight) for _ in range(20)] for _ in range(8)])  # type: ignore[misc]
    assert paths.direct == 160
    paths.check("")
    assert threading.active_count() < 50


def test_compiled_code_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    x, weight = sample(torch.float32)
    with taken(DIRECT, "compiled code alone"):
        y = torch.compile(layer, backend="eager", fullgraph=True)(x, weight)
    torch.testing.assert_close(y, layer(x, weight), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


def item(*marks: Any, **parameters: Any) -> Any:
    """A test with marks and parameters."""

    def iterate(name: str) -> Iterator[Any]:
        return (mark.mark for mark in marks if mark.name == name)

    return SimpleNamespace(
        nodeid="test_it",
        callspec=SimpleNamespace(params=parameters),
        iter_markers=iterate,
        get_closest_marker=lambda name: next(iterate(name), None),
    )


def test_tests_on_a_gpu_run_on_both_paths_or_say_why_not() -> None:
    gpu, none = pytest.mark.gpu, pytest.mark.no_path("no call")
    assert [has_path(each) for each in (item(gpu), item(), item(gpu, none))] == [True, False, False]
    check_paths([item(gpu, call_path=GENERAL), item(gpu, call_path=DIRECT), item(), item(gpu, none)])
    with pytest.raises(pytest.UsageError, match="test_it is marked gpu, but runs on no path"):
        check_paths([item(gpu)])


def test_a_reason_holds_for_cases() -> None:
    some = pytest.mark.general_path("fp64", when=lambda case: case["dtype"] is torch.float64)
    assert expected_reason(item(some, dtype=torch.float64)) == "fp64"
    assert expected_reason(item(some, dtype=torch.float32)) == ""
    assert expected_reason(item(some, pytest.mark.general_path("all"), dtype=torch.float32)) == "all"
