"""Tensors that record what is done with them: what the user's callable is given in place of the pre-activation.

They are tensors, so that `isinstance`, `torch.is_tensor` and `hasattr` take the branch that they take in PyTorch, and
what a callable does with them arrives at `__torch_function__`: functions, operators, methods and attributes.

A callable also enters modes, and applies functions with a backward of their own, which decide gradients and types. A
program is differentiated by its formula, which has neither.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable
from types import CodeType, MethodDescriptorType
from typing import Any, NamedTuple, NoReturn

import torch

from cutfuse.epilogue import calls
from cutfuse.epilogue.errors import (
    LAYOUT_METHODS,
    NEEDS_VALUES,
    EpilogueError,
    refusal,
    refusal_of,
    refuse_attribute,
    refuse_augmented,
    refuse_list,
)
from cutfuse.epilogue.expression import Expr
from cutfuse.epilogue.table import COMPARISONS, INFIX, PREFIX
from cutfuse.epilogue.types import INPUTS, check_autocast

# Of `torch.autograd.Function.apply`; None from PyTorch 2.14 on, where that is written in C.
_APPLY: CodeType | None = getattr(getattr(vars(torch.autograd.Function)["apply"], "__func__", None), "__code__", None)


class Modes(NamedTuple):
    """PyTorch's modes that decide gradients."""

    records_gradients: bool  # false in inference mode too
    hooks: Any  # those of saved tensors

    @classmethod
    def now(cls) -> Modes:
        return cls(torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True))


class WithoutGradient(NamedTuple):
    """A value that the callable computes where gradients are off: PyTorch's has no gradient, and the formula has."""

    value: Expr


def record_call(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], start: Modes, now: Modes
) -> Any:
    """What a call gives, with the modes when the trace began and those of the call.

    Without a gradient is what is computed where gradients are off, unless it has none anyway, as a comparison. Raises
    EpilogueError where a value without one becomes a part of a value that has one. Nothing is refused where gradients
    were off from the start, as no call differentiates that trace. Also raises one for an autocast of the callable's own
    that would change a type.
    """
    if now.hooks != start.hooks:
        raise EpilogueError(
            "the epilogue enters torch.autograd.graph.saved_tensors_hooks (or save_on_cpu), but the values that it "
            "computes are not saved, so that these hooks see none of them: enter them around the call"
        )
    given, named = tuple(map(_value, arguments)), {name: _value(item) for name, item in keywords.items()}
    found = evaluate_call(function, given, named)
    if isinstance(found, Expr):
        check_autocast(lambda: evaluate_call(function, given, named), found)
    if not start.records_gradients or not isinstance(found, Expr) or found.is_boolean or not found.reads:
        return found
    if not now.records_gradients:
        return WithoutGradient(found)
    for item in (*arguments, *keywords.values()):
        if isinstance(item, WithoutGradient):
            refuse_without_gradient(item)
    return found


def _value(item: Any) -> Any:
    return item.value if isinstance(item, WithoutGradient) else item


def refuse_without_gradient(found: WithoutGradient) -> NoReturn:
    raise EpilogueError(
        f"the epilogue computes {found.value!r} where gradients are off (torch.no_grad, torch.inference_mode or "
        "torch.set_grad_enabled(False)), but it is differentiated as one formula: compute what carries no gradient "
        "before the call and pass it through operands=, detached, or apply what needs it after the call"
    )


def check_end(start: Modes, now: Modes) -> None:
    """Raises EpilogueError where a callable has turned gradients off and left them so."""
    if start.records_gradients and not now.records_gradients:
        raise EpilogueError(
            "the epilogue turns gradients off and leaves them off (torch.set_grad_enabled(False)): set the mode around "
            "the call"
        )


def refuse_custom_function(function: type | None) -> NoReturn:
    """For a custom function, by its class, or None where that is not known."""
    name = "" if function is None else f" {function.__module__}.{function.__qualname__}"
    raise EpilogueError(
        f"the epilogue applies the torch.autograd.Function{name}, but it is traced to a formula and differentiated by "
        "that, not by the Function's own backward: apply the Function after the call, or write the arithmetic of its "
        "forward out in the epilogue if the gradient of that formula is what you want"
    )


def _refuse_applied_function() -> None:
    """Raises EpilogueError where the caller runs in `Function.apply`, called by what `run_symbolically` runs."""
    codes: list[CodeType] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not run_symbolically.__code__:
        if frame.f_code is _APPLY:
            refuse_custom_function(frame.f_locals["cls"])
        codes.append(frame.f_code)
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    applied = function_of_forward(codes) if _APPLY is None else None
    if applied is not None:
        refuse_custom_function(applied)


def function_of_forward(codes: list[CodeType]) -> type | None:
    """A class of functions whose `forward` has one of the codes."""
    kinds: list[type] = [torch.autograd.Function]
    for kind in kinds:  # grows while it is walked
        kinds.extend(kind.__subclasses__())
        forward: Any = getattr(kind, "forward", None)
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        if kind is not torch.autograd.Function and getattr(forward, "__code__", None) in codes:
            return kind
    return None


# Functions that ask for a value's type only.
_TYPE_QUERIES = {"is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"}


class RefusedError(Exception):
    """Carries an EpilogueError through PyTorch's operators: after a TypeError they would try the other operand."""

    def __init__(self, error: EpilogueError) -> None:
        super().__init__(str(error))
        self.error = error


class _Thread(threading.local):
    start: Modes | None = None  # when the trace under way began


_thread = _Thread()


def run_symbolically(fn: Callable[..., Any], arguments: list[Expr], start: Modes) -> Any:
    """What a callable gives for symbolic values. What these refuse is an EpilogueError."""
    before, _thread.start = _thread.start, start
    try:
        if isinstance(fn, MethodDescriptorType):  # PyTorch looks for missing arguments before it hands the call over
            return calls.call(fn, tuple(arguments), {})
        return fn(*map(wrap, arguments))
    except RefusedError as refused:
        # with the user's own lines
        raise refused.error.with_traceback(refused.__traceback__) from None
    finally:
        _thread.start = before


_CPU = torch.device("cpu")


class TracedTensor(torch.Tensor):
    """A tensor without elements that stands for an expression."""

    expression: Expr
    has_gradient = True

    @property  # type: ignore[misc]
    def __class__(self) -> type[torch.Tensor]:  # type: ignore[override]  # for isinstance; nothing sets it
        return torch.Tensor

    @staticmethod
    def of(expression: Expr, has_gradient: bool = True) -> TracedTensor:
        # This constructor bypasses the dispatcher, so that no TorchDispatchMode that is active sees it.
        dtype = expression.type.dtype or torch.float32
        traced = torch.Tensor._make_wrapper_subclass(TracedTensor, (), dtype=dtype, device=_CPU)
        traced.expression = expression
        if not has_gradient:
            traced.has_gradient = False
        return traced

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tuple([unwrap(item) for item in args])
        named = {name: unwrap(item) for name, item in (kwargs or {}).items()}
        now = Modes.now()
        try:
            _refuse_applied_function()
            return wrap(record_call(function, given, named, _thread.start or now, now))
        except EpilogueError as error:
            if _thread.start is not None:
                raise RefusedError(error) from None
            raise EpilogueError(f"an epilogue kept a symbolic value, which is used after its trace: {error}") from None

    # In Tensor this is a function that disables it; PyTorch calls a subclass's as a class method.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_applied_function()
        raise EpilogueError(
            f"{function} takes the elements of a symbolic value, which has none: {NEEDS_VALUES['item']}"
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # torch.Tensor.to would refuse an InputDtype, which is what z.dtype is where the type is not known.
        return self.__torch_function__(torch.Tensor.to, (), (self, *args), kwargs)

    def type(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(torch.Tensor.type, (), (self, *args), kwargs)

    def __dir__(self) -> list[str]:
        return dir(torch.Tensor)

    # mypy loses the name of a keyword of a special method, so that no override of Tensor's fits.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.expression)


# These do not come to `__torch_function__`.
for _name in ("__iter__", "__len__", "__round__", "__divmod__", "__rdivmod__"):
    setattr(TracedTensor, _name, refusal(NEEDS_VALUES[_name]))


def is_operator(function: Any) -> bool:
    """Whether a function is behind one of Python's operators on tensors."""
    return function in _operators()


def wrap(value: Any) -> Any:
    if isinstance(value, WithoutGradient):
        return TracedTensor.of(value.value, has_gradient=False)
    return TracedTensor.of(value) if isinstance(value, Expr) else value


def unwrap(value: Any) -> Any:
    if not isinstance(value, TracedTensor):
        return value
    return value.expression if value.has_gradient else WithoutGradient(value.expression)


def evaluate_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a call that reached `__torch_function__` gives: an expression, or for a question about a type its answer."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return _attribute(_attribute_name(function), arguments[0])
    if name == "__set__":
        raise EpilogueError(
            f"the epilogue sets Tensor.{_attribute_name(function)} of a symbolic value, which has values only"
        )
    if name in NEEDS_VALUES:
        raise EpilogueError(NEEDS_VALUES[name])
    if name in LAYOUT_METHODS:
        refuse_attribute(name)
    if name in _TYPE_QUERIES and len(arguments) == 1:
        return _answer(function, arguments[0])
    for item in arguments:
        if isinstance(item, list | tuple) and any(isinstance(part, torch.Tensor) for part in item):
            refuse_list(name)
    symbol, is_reflected = _operators().get(function, ("", False))
    if not symbol:
        return calls.call(function, arguments, keywords)
    if symbol.endswith("=") and symbol not in COMPARISONS:
        refuse_augmented(symbol[:-1])
    return calls.operate(symbol, arguments[::-1] if is_reflected else arguments)


def _attribute_name(accessor: Any) -> str:
    """The name of the attribute that a descriptor's bound `__get__` or `__set__` is about."""
    return str(accessor.__self__.__name__)


def _attribute(name: str, value: Expr) -> Any:
    if name == "dtype":
        return value.dtype
    method = getattr(torch.Tensor, name, None)
    if callable(method):
        calls.refuse_function(method)
    reason = refusal_of(name)
    if reason is not None:
        raise EpilogueError(f"torch.Tensor.{name} is not in the epilogue language: {reason}")
    return refuse_attribute(name)


def _answer(function: Callable[..., Any], value: Expr) -> bool:
    # z is floating-point also where its type is not known; `value.dtype` raises for other values of no known type.
    dtype: Any = torch.float32 if value.type == INPUTS else value.dtype
    return bool(function(torch.empty(0, dtype=dtype, device="cpu")))


@functools.lru_cache(maxsize=1)
def _operators() -> dict[Callable[..., Any], tuple[str, bool]]:
    """The symbol of the functions behind Python's operators, and whether their arguments are the other way round."""
    found: dict[Any, tuple[str, bool]] = {}

    def add(function: Any, symbol: str, is_reflected: bool = False) -> None:
        if function is not None:
            found.setdefault(function, (symbol, is_reflected))

    for symbol, name in (*INFIX.items(), *COMPARISONS.items(), *PREFIX.items()):
        add(getattr(torch.Tensor, f"__{name}__", None), symbol)
        add(getattr(operator, f"__{name}__", None), symbol)
    for symbol, name in INFIX.items():
        reflected = getattr(torch.Tensor, f"__r{name}__", None)
        if reflected is not getattr(torch.Tensor, f"__{name}__", None):
            add(reflected, symbol, True)
        for home in (torch.Tensor, operator):
            add(getattr(home, f"__i{name}__", None), f"{symbol}=")
    return found
