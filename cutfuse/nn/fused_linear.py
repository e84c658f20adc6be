"""A linear layer with what follows it, and what the modules with a matrix product have in common.

Their weight can be prepared, and they take the weight and bias of a layer inside of them where these say all of it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments
from ..composed import PyTorchCall
from ..epilogue import Epilogue
from ..epilogue.errors import EpilogueError, OperandCountError, evaluated_while_compiling
from ..epilogue.table import REDUCTIONS
from ..epilogue.types import ValueType, autocast_on, type_of
from ..invariance import require
from ..linear import LinearCall, describe_linear, describe_unfused, linear
from ..prepare import PreparedWeight, is_exporting, prepare
from ..rounding import is_eager

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(layer: nn.Module) -> bool:
    """Not of an adapter around the layer, or of one of 8 bits in its place, or of one with hooks."""
    if type(layer).forward is not nn.Linear.forward or "forward" in layer.__dict__:
        return False
    return not has_hooks(layer)


def has_hooks(layer: nn.Module) -> bool:
    """Of the kinds in `_HOOKS`. Written out, which takes a third of the time of a loop, in every call of a module."""
    # Lengths, as Dynamo of PyTorch 2.8 knows no bool() of a dictionary of hooks.
    count = len(layer._forward_pre_hooks) + len(layer._forward_hooks)
    return count + len(layer._backward_pre_hooks) + len(layer._backward_hooks) > 0


def registered_parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, unless they are computed from others. nn.Module looks for parameters last, which takes longer
    than a direct call."""
    own = layer.__dict__
    registered = own["_parameters"]
    if "weight" in own or "bias" in own or "weight" not in registered or "bias" not in registered:
        return None
    return registered["weight"], registered["bias"]


def why_not_plain(layer: nn.Module) -> str:
    """For messages; empty where it is plain. Dynamo need not trace it."""
    if is_plain(layer):
        return ""
    kind = type(layer).__name__
    hooks = [hook for name in _HOOKS for hook in getattr(layer, name).values()]
    if not hooks:
        return f"{kind} has a forward of its own"
    names = [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]
    return f"{kind} has hooks: {', '.join(names)}"


def check_is_linear(function: str, linear: Any, name: str = "linear") -> None:
    """Raises where another layer, made by a function of cutfuse's, cannot have its parameters and compute the same."""
    kind = type(linear).__name__
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"cutfuse.{function}: {name} has to be an nn.Linear, got {kind}")
    reason = why_not_plain(linear)
    if reason:
        raise ValueError(
            f"cutfuse.{function}: {reason}, which the new layer would not run; give it an nn.Linear without that"
        )
    for name in ("weight", "bias"):
        if name not in linear._parameters:
            raise ValueError(
                f"cutfuse.{function}: the {name} of {kind} is computed and no parameter to share; remove its "
                "parametrization first, by torch.nn.utils.parametrize.remove_parametrizations"
            )


_Module = TypeVar("_Module", bound="PreparesWeight")


class PreparesWeight(nn.Module):
    """Before the model among a module's bases."""

    _prepared: PreparedWeight | None = None

    def prepare(self: _Module, mode: str | None = None) -> _Module:
        """Prepares the weight by `cutfuse.prepare`, and gives the module itself.

        In training mode too. Calls raise RuntimeError where the weight has changed since, or is another one: prepare
        again. `train()` gives the memory back.
        """
        self._prepared = prepare(self._plain_weight(), mode)
        return self

    def train(self: _Module, mode: bool = True) -> _Module:
        """As `nn.Module.train`. `train()` drops what is prepared, and `eval()` keeps it."""
        if mode:
            self._prepared = None
        return super().train(mode)

    def _plain_weight(self) -> Tensor:
        """The weight itself, prepared or not; each kind of module says which it is."""
        raise NotImplementedError

    def _weight(self) -> Tensor | PreparedWeight:
        """What `cutfuse.linear` takes."""
        weight, prepared = self._plain_weight(), self._prepared
        if prepared is None or is_exporting():  # an exported program has the weight alone
            return weight
        if prepared.weight is not weight:
            raise RuntimeError(
                f"cutfuse.nn.{type(self).__name__}: the weight is another tensor than the one that was prepared; "
                "call prepare() again, or train() to have none prepared"
            )
        return prepared


_Result = TypeVar("_Result")
_Layer = TypeVar("_Layer", bound="FusedLinear")


class FusedLinear(PreparesWeight):
    """`reduce(epilogue(linear(x), *operands))`: a linear layer with what follows it.

    It has the parameters, the initialisation and the `state_dict` of `nn.Linear`, and is no `nn.Linear`, with an
    epilogue or without: what adapts, quantizes or replaces the `nn.Linear`s of a model would drop the epilogue or add
    behind it, and so leaves it or refuses it. `from_linear` makes one of an `nn.Linear`.

    An epilogue that is a module with parameters or buffers adds them to the `state_dict`. One with parameters runs
    unfused, after a warning: pass parameters to `forward` as operands instead.

    Args:
        in_features, out_features, bias, device, dtype: as of `nn.Linear`.
        epilogue: a function of the pre-activation and the operands that `forward` is given, or a `cutfuse.Epilogue`.
        reduce: "sum", "mean", "amax", "amin" or "logsumexp" over the last dimension, or None.
        keepdim: keep the reduced dimension, of size 1. No effect without `reduce`.
        recompute: compute the pre-activation again in the backward pass instead of keeping it.
        rounding: "eager", "once", or None for what `cutfuse.rounding` says.

    `epilogue`, `reduce`, `keepdim`, `recompute` and `rounding` are attributes that may be assigned. An epilogue that
    cannot be traced, or that exceeds a program's limits, runs as PyTorch runs it, after one warning. Whether it does is
    found out again after an assignment, and for each type of x and each choice of numbers and tensors as operands.

    `prepare()` keeps what an fp32 product needs of the weight (see `cutfuse.prepare`), until `train()`.

    Raises what `cutfuse.linear` raises where the arguments do not fit, and what the epilogue raises.
    """

    in_features: int
    out_features: int
    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]
    _unfused: Set[tuple[Any, ...]] = frozenset()  # the kinds of calls that could not be fused
    _has_warned = False
    # Of a module that was pickled before it had these settings.
    recompute = False
    rounding: str | None = None
    _has_plain_parameters = True  # whether `weight` and `bias` are what is registered under these names

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._has_plain_parameters = not _defined(cls) & _GIVES_PARAMETERS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        epilogue: Callable[..., Tensor] | Epilogue | None = None,
        reduce: str | None = None,
        keepdim: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        rounding: str | None = None,
    ) -> None:
        super().__init__()
        _check_places({"in_features": in_features, "out_features": out_features}, bias, epilogue, reduce, keepdim)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self.epilogue = epilogue
        self.reduce = reduce
        self.keepdim = keepdim
        self.recompute = recompute
        self.rounding = rounding

    @classmethod
    def from_linear(
        cls: type[_Layer],
        linear: nn.Linear,
        epilogue: Callable[..., Tensor] | Epilogue | None = None,
        reduce: str | None = None,
        keepdim: bool = False,
        *,
        recompute: bool = False,
        rounding: str | None = None,
    ) -> _Layer:
        """A layer that shares the parameters of `linear`, and is in its mode: training or evaluation.

        The other arguments are those of the constructor. A subclass whose constructor has others cannot be made so.

        Raises TypeError where `linear` is no `nn.Linear`, and ValueError where it has a forward of its own, as a layer
        of 8 bits has, or hooks, or a parametrization.
        """
        check_is_linear("nn.FusedLinear.from_linear", linear)
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            epilogue,
            reduce,
            keepdim,
            device="meta",
            recompute=recompute,
            rounding=rounding,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        return layer

    def reset_parameters(self) -> None:
        """As of `nn.Linear`: weight and bias uniform within 1 / sqrt(in_features)."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]  # it asks for weight and bias alone

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS:
            _SETTINGS[name](value)
            self.__dict__.update(_unfused=frozenset(), _has_warned=False)
        if name == "epilogue" and not isinstance(value, nn.Module):
            self._modules.pop(name, None)  # nn.Module lets nothing but a module take a module's place
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> FusedLinear:
        """As `nn.Module.train`. `train()` drops what is prepared, and `eval()` keeps it.

        Whether the epilogue can be fused is found out again: one with dropout can be in evaluation only.
        """
        self.__dict__["_unfused"] = frozenset()
        return super().train(mode)

    def forward(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        """x `[..., in_features]` and operands that broadcast against `[..., out_features]`."""
        if torch.compiler.is_dynamo_compiling():
            # An exception while Dynamo traces the epilogue could not be caught here.
            if self._is_unfused_when_compiled((_input_type(x), *[_encode(operand) for operand in operands])):
                return self._forward_unfused(x, *operands)
            return self._call(linear, self._weight(), self.bias, x, operands)
        if self._unfused and _kinds(x, operands) in self._unfused:
            return self._forward_unfused(x, *operands)
        try:
            return self._call(linear, *self._weight_and_bias(), x, operands)
        except Exception as error:
            reason = self._why_failed(error, x, operands)
            if not reason:
                raise
            y = self._forward_unfused(x, *operands)
        # from nn.Module's two wrappers of forward up to the caller
        self._warn(reason, stacklevel=5)
        self.__dict__["_unfused"] = self._unfused | {_kinds(x, operands)}
        return y

    def normalise_call(self, x: Tensor, *operands: Tensor | float) -> LinearCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        try:
            return self._call(describe_linear, *self._weight_and_bias(), x, operands)
        except Exception as error:
            reason = self._why_failed(error, x, operands)
            if not reason:
                raise
        return describe_unfused(x, *self._weight_and_bias(), f"the epilogue runs unfused: {reason}", operands)

    def _call(
        self,
        function: Callable[..., _Result],
        weight: Tensor | PreparedWeight,
        bias: Tensor | None,
        x: Tensor,
        operands: tuple[Tensor | float, ...],
    ) -> _Result:
        epilogue, reduce, keepdim = self.epilogue, self.reduce, self.keepdim
        options = {"epilogue": epilogue, "operands": operands, "reduce": reduce, "keepdim": keepdim}
        if self.recompute:
            options["recompute"] = True
        if self.rounding is not None:
            options["rounding"] = self.rounding
        return function(x, weight, bias, **options)

    def _weight_and_bias(self) -> tuple[Tensor | PreparedWeight, Tensor | None]:
        """What `cutfuse.linear` takes."""
        found = registered_parameters(self) if self._has_plain_parameters and self._prepared is None else None
        return (self._weight(), self.bias) if found is None else found

    @evaluated_while_compiling
    def _is_unfused_when_compiled(self, types: tuple[Any, ...]) -> bool:
        """types: of the pre-activation and the operands, encoded. A tuple, as Dynamo hands a NamedTuple over empty."""
        z, *encoded = types
        operands = [float.fromhex(value) if isinstance(value, str) else value for value in encoded]
        reason = self._why_unfused(z, operands)
        if reason:
            self._warn(reason, stacklevel=3)
        return bool(reason)

    def _why_failed(self, error: Exception, x: Any, operands: Sequence[Any]) -> str:
        """Why a call that raised cannot be fused; empty where the error is the caller's, which then names the layer."""
        is_callers = self.epilogue is None or not _are_arguments(x, operands)
        reason = "" if is_callers else self._why_unfused(_input_type(x), operands)
        if not reason and str(error).startswith("cutfuse.linear:"):
            error.args = (str(error).replace("cutfuse.linear:", "cutfuse.nn.FusedLinear:", 1),)
        return reason

    def _why_unfused(self, z: ValueType, operands: Sequence[Any]) -> str:
        """Why the epilogue does not become a program for such operands, or their types; empty where it does.

        Raises OperandCountError where it takes another number of them.
        """
        numbers = tuple([operand if isinstance(operand, int | float) else None for operand in operands])
        types = [_type(operand) for operand in operands if not isinstance(operand, int | float)]
        try:
            arguments.resolve_epilogue(_OWNER, self.epilogue, numbers, (z, *types))
        except OperandCountError as error:
            raise error from None
        except Exception as error:  # whatever the user's code makes of a symbolic value
            return str(error) if isinstance(error, EpilogueError) else f"{type(error).__name__}: {error}"
        return ""

    def _warn(self, reason: str, stacklevel: int) -> None:
        if not self._has_warned:
            self.__dict__["_has_warned"] = True
            text = f"cutfuse.nn.FusedLinear runs its epilogue unfused: {reason}"
            warnings.warn(text, UserWarning, stacklevel=stacklevel)

    def _plain_weight(self) -> Tensor:
        return self.weight

    def _forward_unfused(self, x: Tensor, *operands: Tensor | float) -> Tensor:
        epilogue: Callable[..., Tensor] | None = self.epilogue
        require("the layer's epilogue runs unfused")
        z = F.linear(x, self.weight, self.bias)
        y = z if epilogue is None else epilogue(z, *operands)
        return y if self.reduce is None else REDUCTIONS[self.reduce](y, -1, keepdim=self.keepdim)

    def extra_repr(self) -> str:
        parts = [f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"]
        if self.epilogue is not None:
            parts.append(f"epilogue={getattr(self.epilogue, '__name__', self.epilogue)!s}")
        if self.reduce is not None:
            parts.append(f"reduce={self.reduce!r}, keepdim={self.keepdim}")
        if self.recompute:
            parts.append("recompute=True")
        if self.rounding is not None:
            parts.append(f"rounding={self.rounding!r}")
        return ", ".join(parts)


_GIVES_PARAMETERS = {"weight", "bias", "_weight", "__getattr__", "__getattribute__"}
_OWNER = "nn.FusedLinear"
# The attributes that may be assigned, and what raises for another value.
_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "epilogue": lambda value: arguments.check_epilogue(_OWNER, value),
    "reduce": lambda value: None if value is None else arguments.check_reduction(_OWNER, value),
    "keepdim": lambda value: arguments.check_flag(_OWNER, "keepdim", value),
    "recompute": lambda value: arguments.check_flag(_OWNER, "recompute", value),
    "rounding": is_eager,
}


def _check_places(sizes: dict[str, Any], bias: Any, epilogue: Any, reduce: Any, keepdim: Any) -> None:
    """Raises TypeError for an argument in another's place: `nn.Linear` has device and dtype where an epilogue is."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__"):
            hint = "; FusedLinear.from_linear makes a layer of it" if isinstance(size, nn.Linear) else ""
            raise TypeError(
                f"cutfuse.nn.FusedLinear: {name} has to be an integer, got {size!r} of type {type(size).__name__}{hint}"
            )
    places = {"bias": bias, "epilogue": epilogue, "reduce": reduce, "keepdim": keepdim}
    for name, value in places.items():
        meant = "dtype" if isinstance(value, torch.dtype) else "device" if _is_device(value) else ""
        if name == "bias" and callable(value):
            meant = "epilogue"
        if meant:
            raise TypeError(
                f"cutfuse.nn.FusedLinear: {name} cannot be {value!r}; pass the {meant} by its name, as {meant}="
            )


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:  # no device has the name
        return False


def _defined(cls: type) -> set[str]:
    """What classes between this one and `FusedLinear` define."""
    return {name for base in cls.__mro__[: cls.__mro__.index(FusedLinear)] for name in vars(base)}


def _are_arguments(x: Any, operands: Sequence[Any]) -> bool:
    """Whether these can be a call's arguments; otherwise its error says what is wrong with them."""
    if not isinstance(x, Tensor) or _input_type(x).dtype not in arguments.FLOATING_DTYPES:
        return False
    return all(isinstance(operand, Tensor | int | float) for operand in operands)


def _input_type(x: Tensor) -> ValueType:
    """The type of the pre-activation."""
    autocast = autocast_on(x.device.type)
    return ValueType(x.dtype if autocast is None else autocast.dtype, autocast=autocast)


def _type(operand: Any) -> ValueType:
    return type_of(operand) if isinstance(operand, Tensor) else operand


def _kinds(x: Tensor, operands: Sequence[Any]) -> tuple[Any, ...]:
    """What decides whether an epilogue can be traced, besides the epilogue itself."""
    return _input_type(x), *[None if isinstance(operand, int | float) else _type(operand) for operand in operands]


def _encode(operand: Tensor | float) -> int | str | ValueType:
    """A constant for Dynamo, which may hold a number as a symbol: a float as its digits, a tensor as its type."""
    if isinstance(operand, float):
        return operand.hex()
    return operator.index(operand) if isinstance(operand, int) else type_of(operand)
