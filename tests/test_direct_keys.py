"""What the plan of a direct call depends on: a call that differs in it from one that is remembered has no plan yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_device import EmulatedLaunches, direct_calls, emulated_device
from emulated_device import launches_of_each_reader as launches_of_each_reader
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import call_plans, calls

core = native.module()
ROWS, COLUMNS, DEPTH = 6, 8, 16


def add(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) + r


def multiply(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) * r


def linear_arguments(**changes: Any) -> tuple[Any, ...]:
    given: dict[str, Any] = {
        "x": torch.randn(ROWS, DEPTH),
        "weight": torch.randn(COLUMNS, DEPTH),
        "bias": torch.randn(COLUMNS),
        "epilogue": add,
        "operands": (torch.randn(ROWS, COLUMNS),),
        "reduce": None,
        "keepdim": False,
        "out_dtype": None,
        **changes,
    }
    return tuple(given.values())


def run_linear(given: tuple[Any, ...]) -> Tensor:
    x, weight, bias, epilogue, operands, reduce, keepdim, out_dtype = given
    return cutfuse.linear(
        x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduce, keepdim=keepdim, out_dtype=out_dtype
    )


def transposed(rows: int, columns: int) -> Tensor:
    return torch.randn(columns, rows).t()


def padded(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns + 4)[:, :columns]


def misaligned(*shape: int) -> Tensor:
    size = torch.Size(shape).numel()
    return torch.randn(size + 1)[1:].view(shape)


def number(value: float) -> dict[str, Any]:
    return {"operands": (value,)}


# Each is the smallest change: one stride, one type, one flag; of what a call has else, where that is not the default.
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "rows of x": lambda: {"x": torch.randn(ROWS + 1, DEPTH), "operands": (torch.randn(ROWS + 1, COLUMNS),)},
    "strides of x": lambda: {"x": transposed(ROWS, DEPTH)},
    "pitch of x": lambda: {"x": padded(ROWS, DEPTH)},
    "dimensions of x": lambda: {"x": torch.randn(1, ROWS, DEPTH)},
    "alignment of x": lambda: {"x": misaligned(ROWS, DEPTH)},
    "strides of the weight": lambda: {"weight": transposed(COLUMNS, DEPTH)},
    "pitch of the weight": lambda: {"weight": padded(COLUMNS, DEPTH)},
    "alignment of the weight": lambda: {"weight": misaligned(COLUMNS, DEPTH)},
    "stride of the bias": lambda: {"bias": torch.randn(2 * COLUMNS)[::2]},
    "no bias": lambda: {"bias": None},
    "types": lambda: {
        "x": torch.randn(ROWS, DEPTH).half(),
        "weight": torch.randn(COLUMNS, DEPTH).half(),
        "bias": torch.randn(COLUMNS).half(),
    },
    "type of an operand": lambda: {"operands": (torch.randn(ROWS, COLUMNS).half(),)},
    "strides of an operand": lambda: {"operands": (transposed(ROWS, COLUMNS),)},
    "pitch of an operand": lambda: {"operands": (padded(ROWS, COLUMNS),)},
    "an operand of one row": lambda: {"operands": (torch.randn(1, COLUMNS),)},
    "an operand of one column": lambda: {"operands": (torch.randn(ROWS, 1),)},
    "an expanded operand": lambda: {"operands": (torch.randn(1, COLUMNS).expand(ROWS, COLUMNS),)},
    "a number as operand": lambda: number(2.0),
    "another number": lambda: number(3.0),
    "a number of another type": lambda: number(2),
    "a boolean": lambda: number(True),
    "the sign of zero": lambda: number(-0.0),
    "epilogue": lambda: {"epilogue": multiply},
    "reduction": lambda: {"reduce": "amax"},
    "another reduction": lambda: {"reduce": "amin"},
    "a mean in a sum's place": lambda: {"reduce": "mean"},
    "the reduced dimension": lambda: {"reduce": "amax", "keepdim": True},
    "type of the result": lambda: {"out_dtype": torch.bfloat16},
    "gradient of x": lambda: {"x": torch.randn(ROWS, DEPTH, requires_grad=True)},
    "gradient of the weight": lambda: {"weight": torch.randn(COLUMNS, DEPTH, requires_grad=True)},
    "gradient of the bias": lambda: {"bias": torch.randn(COLUMNS, requires_grad=True)},
    "gradient of an operand": lambda: {"operands": (torch.randn(ROWS, COLUMNS, requires_grad=True),)},
}


# What the call has that a change is one of; the defaults for others.
CHANGED: dict[str, dict[str, Any]] = {
    "another number": number(2.0),
    "a number of another type": number(2.0),
    "a boolean": number(1.0),
    "the sign of zero": number(0.0),
    "another reduction": {"reduce": "amax"},
    "a mean in a sum's place": {"reduce": "sum"},
    "the reduced dimension": {"reduce": "amax"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_linear_layer_that_differs_has_no_plan(launches: EmulatedLaunches, change: str) -> None:
    before = CHANGED.get(change, {})
    given, changed = linear_arguments(**before), linear_arguments(**CHANGES[change]())
    run_linear(given)
    assert isinstance(core.call_linear(*given), Tensor)
    assert core.call_linear(*linear_arguments(**before)) is not NotImplemented, "other memory is no change"
    assert core.call_linear(*changed) is NotImplemented
    x, weight, bias, epilogue, (operand,), reduce, keepdim, _ = changed
    z = torch.nn.functional.linear(x.double(), weight.double(), _double(bias))
    reference = epilogue(z, _double(operand))
    reference = getattr(torch, reduce)(reference, dim=-1, keepdim=keepdim) if reduce else reference
    for _ in range(2):
        torch.testing.assert_close(run_linear(changed).double(), reference, rtol=6e-2, atol=6e-2)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def held(get: Callable[[], Any], set_to: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default type": lambda: held(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "precision of a context": lambda: cutfuse.precision("split6"),
    "precision of the process": lambda: held(cutfuse.get_precision, cutfuse.set_precision, "split6"),
    "PyTorch's precision": lambda: held(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "batch invariance of a context": lambda: cutfuse.batch_invariant(),
    "batch invariance of the process": lambda: held(cutfuse.get_batch_invariant, cutfuse.set_batch_invariant, True),
    "rounding of a context": lambda: cutfuse.rounding("eager"),
    "rounding of the process": lambda: held(cutfuse.get_rounding, cutfuse.set_rounding, "eager"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_in_another_setting_there_is_no_plan(launches: EmulatedLaunches, setting: str) -> None:
    given = linear_arguments()
    run_linear(given)
    assert isinstance(core.call_linear(*given), Tensor)
    with SETTINGS[setting]():
        assert core.call_linear(*given) is NotImplemented
    assert isinstance(core.call_linear(*given), Tensor)


def test_no_gradient_is_wanted_where_gradients_are_off(launches: EmulatedLaunches) -> None:
    given = linear_arguments(weight=torch.randn(COLUMNS, DEPTH, requires_grad=True))
    for _ in range(2):
        with torch.no_grad():
            assert not run_linear(given).requires_grad
        assert run_linear(given).requires_grad


# What is called while a plan is made, of a layer with an epilogue and of one without, and while a number is found.
MAKERS: list[tuple[str, Any, Any, str]] = [
    *((setting, add, call_plans, "plan_call") for setting in SETTINGS if setting != "default type"),
    *((setting, None, core, "product_call") for setting in SETTINGS if setting != "default type"),
    ("default type", add, calls, "_number_of"),
]


@pytest.mark.parametrize(("setting", "epilogue", "module", "name"), MAKERS)
def test_a_setting_that_changes_while_a_plan_is_made_leaves_none(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, setting: str, epilogue: Any, module: Any, name: str
) -> None:
    """As another thread may change it: what was planned in one setting is not found in the other."""
    given = linear_arguments(epilogue=epilogue, operands=() if epilogue is None else (torch.randn(ROWS, COLUMNS),))
    make = getattr(module, name)
    with contextlib.ExitStack() as stack:

        def change_after(*arguments: Any) -> Any:
            result = make(*arguments)
            stack.enter_context(SETTINGS[setting]())
            return result

        with monkeypatch.context() as patch:
            patch.setattr(module, name, change_after)
            run_linear(given)
        assert core.call_linear(*given) is NotImplemented


def test_a_precision_is_known_by_what_it_says(launches: EmulatedLaunches) -> None:
    """Not by where its string lies: another one may lie there later."""
    given = torch.randn(16, 64), torch.randn(64, 64), None, torch.relu, (), None, False, None
    for mode in ("split3", "split6"):
        with cutfuse.precision(mode):
            run_linear(given)  # caches hold this string, and none of those below
    core.forget_calls()
    digit_at: dict[int, str] = {}
    reused = 0
    for digit in "3366" * 20:
        mode = "".join(["split", digit])
        reused += digit_at.get(id(mode), digit) != digit
        digit_at[id(mode)] = digit
        with cutfuse.precision(mode):
            run_linear(given)
            launches.launches.clear()
            assert core.call_linear(*given) is not NotImplemented
        assert digit in launches.launches[-1].kernel
        del mode
    assert reused > 0


@pytest.mark.parametrize("place", ["x", "weight", "bias", "operand"])
def test_zeros_that_are_stored_nowhere_are_the_general_paths(launches: EmulatedLaunches, place: str) -> None:
    """PyTorch's autograd makes tensors of zeros that have no memory."""
    given = linear_arguments()
    run_linear(given)
    shapes = {"x": (ROWS, DEPTH), "weight": (COLUMNS, DEPTH), "bias": (COLUMNS,), "operand": (ROWS, COLUMNS)}
    zeros = torch._efficientzerotensor(shapes[place])
    zero_given = linear_arguments(**({"operands": (zeros,)} if place == "operand" else {place: zeros}))
    assert core.call_linear(*zero_given) is None
    z = torch.nn.functional.linear(*zero_given[:3])
    for _ in range(2):
        torch.testing.assert_close(run_linear(zero_given), add(z, zero_given[4][0]), rtol=1e-4, atol=1e-4)


def test_nans_as_operands_are_the_general_paths(launches: EmulatedLaunches) -> None:
    """A callable may tell two of them apart, which a plan could not."""

    def fn(z: Tensor, a: float, b: float) -> Tensor:
        return z * 2 if a in (b,) else z * 3

    x, one, other = torch.randn(ROWS, COLUMNS), float("nan"), float("nan")
    for b, factor in ((one, 2.0), (other, 3.0), (one, 2.0)):
        torch.testing.assert_close(cutfuse.pointwise(fn, x, one, b), x * factor)


POINTWISE_CHANGES: dict[str, tuple[Any, ...]] = {
    "strides of x": (add, transposed(ROWS, COLUMNS), (torch.randn(ROWS, COLUMNS),), None),
    "strides of an operand": (add, torch.randn(ROWS, COLUMNS), (transposed(ROWS, COLUMNS),), None),
    "alignment": (add, misaligned(ROWS, COLUMNS), (torch.randn(ROWS, COLUMNS),), None),
    "type of the result": (add, torch.randn(ROWS, COLUMNS), (torch.randn(ROWS, COLUMNS),), torch.bfloat16),
    "function": (multiply, torch.randn(ROWS, COLUMNS), (torch.randn(ROWS, COLUMNS),), None),
}


@pytest.mark.parametrize("change", POINTWISE_CHANGES)
def test_a_pointwise_call_that_differs_has_no_plan(launches: EmulatedLaunches, change: str) -> None:
    x, r = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    cutfuse.pointwise(add, x, r)
    assert isinstance(core.call_pointwise(add, x, (r,), None), Tensor)
    assert core.call_pointwise(*POINTWISE_CHANGES[change]) is NotImplemented
    fn, x, operands, out_dtype = POINTWISE_CHANGES[change]
    for _ in range(2):
        y = cutfuse.pointwise(fn, x, *operands, out_dtype=out_dtype)
        torch.testing.assert_close(y.float(), fn(x, *operands), rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize(
    "changed",
    [(0, "sum", False), (None, "sum", False), ((-1,), "sum", False), (-1, "mean", False), (-1, "sum", True)],
)
def test_a_reduction_that_differs_has_no_plan(launches: EmulatedLaunches, changed: tuple[Any, str, bool]) -> None:
    x = torch.randn(ROWS, COLUMNS)
    cutfuse.reduce(x, -1, "sum")
    assert isinstance(core.call_reduce(x, -1, "sum", False, None, (), None), Tensor)
    before = direct_calls()
    assert core.call_reduce(x, *changed, None, (), None) is NotImplemented
    assert direct_calls() == before
    dim, op, keepdim = changed
    expected = getattr(torch, op)(x, dim=(0, 1) if dim is None else dim, keepdim=keepdim)
    for _ in range(2):
        torch.testing.assert_close(cutfuse.reduce(x, dim, op, keepdim), expected)


def test_another_device_is_forgotten_with_its_plans() -> None:
    given = linear_arguments()
    with emulated_device():
        run_linear(given)
        assert core.remembered_calls() > 0
    assert core.remembered_calls() == 0
    assert core.call_linear(*given) is None
