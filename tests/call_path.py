"""The check that calls of tests on a GPU are direct (csrc/call), and give the bits of a call that is planned anew.

Every test that is marked `gpu` runs below this check, unless it is marked `no_path`. The first call of its kind in a
test is planned, and made again, which is direct as a rule, and then has to give the same bits: the test gets that
result. Later calls of its kind are direct at once. Tests all of whose calls are planned anew are marked `general_path`;
in any other one a call has to be direct.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulated_device import direct_calls
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue.resolve import IDENTITY
from cutfuse.layer import calls, cuda

core = native.module()
LARGE = 8 << 30  # bytes that a test leaves to the next ones
MANY = 1 << 28  # elements of which a comparison takes a part at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_checked(node: pytest.Item) -> bool:
    """Whether a test runs below the check."""
    return node.get_closest_marker("gpu") is not None and node.get_closest_marker("no_path") is None


def expected_reason(item: pytest.Item) -> str:
    """Why no call of the test is direct; empty for tests with such a call."""
    for marker in item.iter_markers("general_path"):
        (reason,), when = marker.args, marker.kwargs.get("when")
        if when is None or when(item.callspec.params):  # type: ignore[attr-defined]
            return reason
    return ""


@contextlib.contextmanager
def direct(reason: str = "") -> Iterator[None]:
    """Within it, public functions are checked; at its end, whether any was direct. reason: of `expected_reason`."""
    with checked_calls() as paths:
        yield
    paths.check(reason)
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > LARGE:
        torch.cuda.empty_cache()  # other processes test on the same device


@contextlib.contextmanager
def checked_calls() -> Iterator[CheckedCalls]:
    """Within it, calls are to be direct."""
    core.forget_calls()  # so that each kind of call is planned and made again
    paths = CheckedCalls()
    with pytest.MonkeyPatch.context() as patch:
        for function in ("linear", "pointwise", "reduce"):
            native_call = getattr(calls, f"call_{function}")
            patch.setattr(calls, f"call_{function}", functools.partial(paths.call, function, native_call))
        # Below it run calls of `linear`, which are checked themselves.
        patch.setattr(calls, "call_mlp", functools.partial(paths.call_operator, calls.call_mlp))
        for operator in ("linear", "joined", "pointwise", "reduce", "backward"):
            native_call = getattr(cuda, f"call_{operator}_operator")
            patch.setattr(cuda, f"call_{operator}_operator", functools.partial(paths.call_operator, native_call))
        yield paths


def is_result(answer: Any) -> bool:
    """Whether the native module has made a call: it answers None or NotImplemented elsewhere."""
    return answer is not None and answer is not NotImplemented


def is_captured() -> bool:
    """Whether calls are captured in a graph at this moment."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Call:
    """A call of a public function. given: the arguments, as `call_linear` and its like take them."""

    function: str  # "linear", "pointwise" or "reduce"
    given: tuple[Any, ...]

    def make(self) -> Tensor:
        """Calls the public function."""
        if self.function == "pointwise":
            fn, x, operands, out_dtype = self.given
            return cutfuse.pointwise(fn, x, *operands, out_dtype=out_dtype)
        if self.function == "reduce":
            *given, operands, out_dtype = self.given
            return cutfuse.reduce(*given, operands=operands, out_dtype=out_dtype)
        options = dict(zip(("epilogue", "operands", "reduce", "keepdim", "out_dtype"), self.given[3:], strict=True))
        return cutfuse.linear(*self.given[:3], **options)

    @property
    def has_key(self) -> bool:
        """Whether the native module has a key for the call, whatever the callable."""
        return core.call_key(getattr(core.CallFunction, self.function), self.given, IDENTITY) is not None

    def __str__(self) -> str:
        return f"cutfuse.{self.function} of {[describe(value) for value in self.given]}"


def describe(value: Any) -> str:
    """A tensor by what its key has; anything else by its repr."""
    if isinstance(value, tuple | list):
        return str([describe(item) for item in value])
    if not isinstance(value, Tensor):
        return repr(value)
    grad = ", requires_grad" if value.requires_grad else ""
    return f"{type(value).__name__}{list(value.shape)} {value.stride()} {value.dtype} {value.device}{grad}"


class CheckedCalls:
    """Stands before the native functions of calls.

    direct: how many calls of public functions were; operators: how many of operators, in compiled code or below a call
    that was not; general: how many calls were not direct.
    """

    def __init__(self) -> None:
        self.direct = self.operators = self.general = 0
        self._before = direct_calls()
        self._counting = threading.Lock()
        self._inside = threading.local()

    def call(self, function: str, native_call: Callable[..., Any], *given: Any) -> Any:
        """The result of a call, on whichever path."""
        if self._is_inside():
            return self._inside.answer
        y = native_call(*given)
        is_direct = is_result(y)
        if not is_direct:
            y, is_direct = self._make_first(Call(function, given), native_call, y)
        with self._counting:
            self.direct += is_direct
            self.general += not is_direct
        return y

    def call_operator(self, native_call: Callable[..., Any], *given: Any) -> Any:
        """The same of an operator's implementation, which takes the general path below a call on that path."""
        y = None if self._is_inside() else native_call(*given)
        with self._counting:
            self.operators += is_result(y)
        return y

    def _is_inside(self) -> bool:
        return getattr(self._inside, "is_so", False)

    def _make_generally(self, call: Call, answer: Any) -> Tensor:
        """The result of a call on the general path, which remembers it where the answer is NotImplemented."""
        self._inside.is_so, self._inside.answer = True, answer
        try:
            return call.make()
        finally:
            self._inside.is_so = False

    def _make_first(self, call: Call, native_call: Callable[..., Any], answer: Any) -> tuple[Tensor, bool]:
        """The result of a call that was not direct at once, and whether the next one is."""
        expected = self._make_generally(call, answer)
        if is_captured():  # a second call, and its comparison, would be captured too
            return expected, False
        y = native_call(*call.given)
        if y is None and call.has_key:  # its epilogue may be compiled in the background meanwhile
            with cutfuse.specialization("now"):
                self._make_generally(call, NotImplemented)
            y = native_call(*call.given)
        if not is_result(y):
            return expected, False
        check_same(call, y, expected)
        return y, True

    def check(self, reason: str) -> None:
        """Whether there were direct calls; with a reason, whether there were none."""
        counted = direct_calls() - self._before
        if counted != self.direct + self.operators:
            raise AssertionError(
                f"the native module counted {counted} direct calls; {self.direct} of public functions and "
                f"{self.operators} of operators were seen"
            )
        if reason and self.direct:
            raise AssertionError(
                f"{self.direct} calls were direct, but the test is marked general_path: {reason}. Mark it no longer"
            )
        if not reason and not self.direct:
            raise AssertionError(
                f"none of {self.general} calls was direct. Mark a test of such calls general_path, and one of no "
                "public functions no_path"
            )


def check_same(call: Call, y: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where a direct result is not the general path's, to the bit; one NaN is another."""
    facts, wanted = (
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, t.is_inference()) for t in (y, expected)
    )
    if facts != wanted:
        raise AssertionError(f"{call}: the direct result is {facts}, the general path's {wanted}")
    count = sum(count_different(*parts) for parts in zip(*map(parts_of, (y, expected)), strict=True))
    if count:
        raise AssertionError(f"{call}: {count} of {y.numel()} elements of the direct result have other bits")


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Rows of a large tensor, apart: a comparison allocates as much as it looks at."""
    tensor = tensor.detach()
    return tensor.chunk(64) if tensor.numel() > MANY and tensor.dim() else (tensor,)


def count_different(y: Tensor, expected: Tensor) -> int:
    bits, wanted = (t.view(INTEGERS[t.element_size()]) for t in (y, expected))
    if torch.equal(bits, wanted):
        return 0
    return int(((bits != wanted) & ~(y.isnan() & expected.isnan())).sum())
