"""What a traced callable does besides calling functions of PyTorch that decides gradients and types: modes that it
enters, and functions with a backward of their own. A program is differentiated by its formula, which has neither."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import torch

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr
from cutfuse.epilogue.types import check_autocast

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
    evaluate: Callable[..., Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    start: Modes,
    now: Modes,
) -> Any:
    """What `evaluate` gives for a call, with the modes when the trace began and those of the call.

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
    found = evaluate(function, given, named)
    if isinstance(found, Expr):
        check_autocast(lambda: evaluate(function, given, named), found)
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


def refuse_applied_function(base: CodeType) -> None:
    """Raises EpilogueError where the caller runs in `Function.apply`, called by what runs in a frame of code `base`."""
    codes: list[CodeType] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not base:
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
