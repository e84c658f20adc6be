"""Which call `cutfuse.explain` is asked about, and what prepares it without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .composed import PyTorchCall
from .epilogue.errors import EpilogueError
from .head import linear_cross_entropy, linear_logprob
from .linear import LinearCall, linear, prepare_linear
from .nn.linear_cross_entropy import LinearCrossEntropy
from .pointwise import PointwiseCall, pointwise, prepare_pointwise, prepare_sigmoid, sigmoid
from .prepare import PreparedWeight
from .reduce import ReduceCall, prepare_reduce, prepare_sum, reduce
from .reduce import sum as sum_

Call = LinearCall | PointwiseCall | ReduceCall | PyTorchCall
Preparation = Callable[..., Call]  # takes what a call takes

PREPARATIONS: dict[Callable[..., Tensor], Preparation] = {
    linear: prepare_linear,
    pointwise: prepare_pointwise,
    sigmoid: prepare_sigmoid,
    reduce: prepare_reduce,
    sum_: prepare_sum,
}
_WRITE = (
    "write explain(module, x), explain(cutfuse.linear, x, weight), explain(x, weight), explain(x, dim) or "
    "explain(fn, x)"
)
_WHOLE_MODELS = "for a whole model use cutfuse.explain_model(model, x)"


@runtime_checkable
class PreparesCalls(Protocol):
    """A module whose `forward` makes one call of cutfuse, which `prepare_call` gives instead of making it.

    Both are defined by the same class: a subclass that has another `forward` cannot be explained without its own.
    """

    def prepare_call(self, *args: Any, **kwargs: Any) -> Call: ...


def prepare_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call that `explain` is given. Raises what the call raises; TypeError where it is no call of cutfuse."""
    called, prepare, arguments = _find_preparation(args, kwargs)
    _check_signature(called, prepare, arguments, kwargs)
    return prepare(*arguments, **kwargs)


def _find_preparation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Preparation, tuple[Any, ...]]:
    """The function or module that is called, what prepares its calls, and the arguments of this one."""
    first = args[0] if args else None
    if isinstance(first, torch.nn.Module):
        _refuse_compiled(first)
    if isinstance(first, torch.nn.Module) and isinstance(first, PreparesCalls):
        _check_forward(first)
        return first, first.prepare_call, args[1:]
    if isinstance(first, LinearCrossEntropy) or first is linear_cross_entropy or first is linear_logprob:
        raise TypeError(
            "cutfuse.explain: the head of a language model makes several calls of cutfuse.linear; that of the forward "
            'pass is explain(cutfuse.linear, x, weight, bias, reduce="logsumexp")'
        )
    if inspect.isfunction(first) and first.__module__.startswith("cutfuse."):
        if first not in PREPARATIONS:
            raise TypeError(f"cutfuse.explain: {first.__name__} makes no call that can be explained; {_WRITE}")
        return first, PREPARATIONS[first], args[1:]
    if callable(first) and not isinstance(first, Tensor):
        return pointwise, _prepare_function, args
    second = args[1] if len(args) > 1 else kwargs.get("weight")
    function: Callable[..., Tensor] = linear if isinstance(second, Tensor | PreparedWeight) else reduce
    return function, PREPARATIONS[function], args


def _refuse_compiled(module: torch.nn.Module) -> None:
    """Raises TypeError for what torch.compile made of a module: only until Python 3.11 does a protocol see in it the
    attributes of the one inside."""
    dynamo = sys.modules.get("torch._dynamo")  # which takes 1 s to import, and is there where something is compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise TypeError(
            f"cutfuse.explain: the module is compiled ({type(module).__name__}); explain the one that torch.compile "
            f"was given, or {_WHOLE_MODELS}"
        )


def _check_forward(module: torch.nn.Module) -> None:
    """Raises TypeError where `prepare_call` is of another forward than the one that runs."""
    name = type(module).__name__
    own = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if "forward" in vars(module) or "prepare_call" not in vars(own):
        raise TypeError(
            f"cutfuse.explain: {name} has another forward than cutfuse's. Either PyTorch's own operations compute it, "
            "or it makes calls of cutfuse: explain those"
        )


def _check_signature(called: Any, prepare: Preparation, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    is_module = isinstance(called, torch.nn.Module)
    try:
        inspect.signature(prepare if is_module else called).bind(*arguments, **kwargs)
    except TypeError as error:
        name = type(called).__name__ if is_module else called.__name__
        raise TypeError(f"cutfuse.explain: {error} in a call of {name}; {_WRITE}") from None


def _prepare_function(fn: Callable[..., Any], *given: Any, **options: Any) -> PointwiseCall:
    """Of `explain(fn, x)`, which asks about `pointwise(fn, x)`."""
    try:
        return prepare_pointwise(fn, *given, **options)
    except EpilogueError as error:
        if isinstance(fn, torch.nn.Module):
            what = f"{type(fn).__name__} is no module of cutfuse.nn; {_WHOLE_MODELS}"
        else:
            what = f"{getattr(fn, '__name__', type(fn).__name__)} is no function of cutfuse"
        raise EpilogueError(
            f"cutfuse.explain: {what}. cutfuse.pointwise, which takes elementwise functions, refuses it: {error}"
        ) from error
