"""The types of an epilogue's values, as PyTorch would give them: found by asking PyTorch itself.

All arithmetic is fp32 (fp64 for fp64), whatever these types are. They decide what `z.dtype` is, what a cast means,
which type the result has, and what is refused because floating-point arithmetic would not give PyTorch's result.

Under autocast they are those that it gives on the call's device. Autocast decides by a tensor's device, before a kernel
of that device runs. So a tensor that has the device in name, and computes on the CPU, is given the types of that
device, also in a process that lacks it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.table import describe_callable
from cutfuse.precision import autocast_dtype


class Autocast(NamedTuple):
    """An autocast that is enabled: for tensors on which type of device, and to which type it casts."""

    device_type: str
    dtype: torch.dtype


def autocast_on(device_type: str) -> Autocast | None:
    """The one under which tensors on such a device are now, or None."""
    dtype = autocast_dtype(device_type)
    return None if dtype is None else Autocast(device_type, dtype)


class ValueType(NamedTuple):
    """What PyTorch's type promotion asks of a value."""

    dtype: torch.dtype | None = None  # None: not known, in an epilogue that is traced ahead of time
    is_scalar: bool = False  # of a tensor without dimensions: values with dimensions decide the result's type
    in_fp64: bool = False  # of an input: the arithmetic of its call is fp64
    like: str = ""  # not known, but the same as that of z or of an operand, named as `r0`
    is_number: bool = False  # of a Python number: tensors, also those without dimensions, decide the result's type
    autocast: Autocast | None = None  # of z: what its call runs under
    rounds: bool = False  # of z: every function rounds its value to its type, as in eager mode

    def promotes_as(self, other: ValueType) -> bool:
        """Whether it is the same to PyTorch."""
        return self == other or self._replace(in_fp64=False) == other._replace(in_fp64=False)

    @property
    def is_boolean(self) -> bool:
        return self.dtype is torch.bool

    @property
    def is_integer(self) -> bool:
        return self.dtype is not None and not (self.is_boolean or self.dtype.is_floating_point or self.dtype.is_complex)


UNKNOWN = ValueType()
INPUTS = ValueType(like="z")
BOOLEAN = ValueType(torch.bool)
NUMBERS = {
    bool: ValueType(torch.bool, True, is_number=True),
    int: ValueType(torch.int64, True, is_number=True),
    float: ValueType(torch.float64, True, is_number=True),
}

ValueTypes = tuple[ValueType, ...]


def unknown_types(operand_count: int) -> ValueTypes:
    """Of z and that many operands, ahead of time."""
    return (INPUTS, *[UNKNOWN] * operand_count)


def type_of(tensor: torch.Tensor) -> ValueType:
    return ValueType(tensor.dtype, tensor.dim() == 0)


def types_of(z: torch.Tensor, *operands: torch.Tensor) -> ValueTypes:
    """Of a call on these tensors, with the autocast that it runs under."""
    first = ValueType(z.dtype, z.dim() == 0, autocast=autocast_on(z.device.type))
    return (first, *[type_of(tensor) for tensor in operands])


def input_types(types: ValueTypes) -> ValueTypes:
    """The types of a call's inputs, with whether it computes in fp64: see `evaluate.arithmetic_dtype`.

    Without what is for `under_autocast`.
    """
    types = (types[0]._replace(autocast=None, rounds=False), *types[1:])
    has_dimensions = any(not item.is_scalar for item in types)
    in_fp64 = types[0].dtype is torch.float64 or any(
        item.dtype is torch.float64 and not (item.is_scalar and has_dimensions) for item in types
    )
    return tuple([item._replace(in_fp64=in_fp64) for item in types]) if in_fp64 else types


class InputDtype:
    """`z.dtype` where an epilogue is traced ahead of time, for tensors of every type. Only casts take it."""

    def _refuse(self, *_: Any) -> NoReturn:
        refuse_unknown_type()

    __eq__ = __ne__ = __hash__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_unknown_type()

    def __repr__(self) -> str:
        return "the dtype of z"


INPUT_DTYPE = InputDtype()


def refuse_unknown_type() -> NoReturn:
    raise EpilogueError(
        "the epilogue asks for a type, which is not known when an Epilogue is traced ahead of time, as it serves every "
        "type (z.dtype may be cast to, no more): pass the function itself as epilogue=, which is traced for the types "
        "of the call"
    )


class _Thread(threading.local):
    autocast: Autocast | None = None  # what the call whose values are typed runs under
    rounds = False  # whether that call rounds every value
    at_start: tuple[Autocast | None, ...] = ()  # for the devices of `_devices`, when the trace under way began


_thread = _Thread()


def _devices() -> tuple[str, ...]:
    """Whose autocast is watched: the call's device, where it runs under autocast, and else those that have kernels."""
    return ("cuda", "cpu") if _thread.autocast is None else (_thread.autocast.device_type,)


@contextlib.contextmanager
def under_autocast(
    types: ValueTypes, watched: bool = False, at_start: tuple[Autocast | None, ...] = ()
) -> Iterator[tuple[Autocast | None, ...]]:
    """A context in which values have the types that the autocast of a call gives, for the types of its inputs.

    watched: whether the callable runs in it, which may enter or leave an autocast of its own. at_start: what such an
    earlier context of the same trace gave.
    """
    before = _thread.autocast, _thread.at_start, _thread.rounds
    _thread.autocast, _thread.rounds = types[0].autocast, types[0].rounds
    _thread.at_start = at_start or (tuple(map(autocast_on, _devices())) if watched else ())
    try:
        yield _thread.at_start
    finally:
        _thread.autocast, _thread.at_start, _thread.rounds = before


def rounds_values() -> bool:
    """Whether the call whose values are typed rounds each as PyTorch does in eager mode."""
    return _thread.rounds


def check_autocast(evaluate: Callable[[], Any], found: Any) -> None:
    """Raises EpilogueError where the callable has entered or left an autocast that would change a value's type.

    evaluate: what gave the value `found`.
    """
    for autocast in _entered_autocasts():
        with under_autocast((ValueType(autocast=autocast),)):
            other = evaluate()
        type: ValueType = found.type
        if type.dtype is None or type != other.type:
            types = "its type may differ" if type.dtype is None else f"it is {other.type.dtype}, and not {type.dtype}"
            raise EpilogueError(
                f"the epilogue computes {found!r} within a torch.autocast of its own, where {types}: an epilogue has "
                "the types of the autocast that its call runs under. Enter torch.autocast around the call, or cast the "
                "values in the epilogue (.float(), .half())"
            )


def _entered_autocasts() -> list[Autocast | None]:
    """What the callable has entered since its trace began, of the devices on which its call may run."""
    if not _thread.at_start:
        return []
    now = tuple(map(autocast_on, _devices()))
    if now == _thread.at_start:
        return []
    return [found for found, before in zip(now, _thread.at_start, strict=True) if found != before]


def promote(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> ValueType:
    """The type of a PyTorch function's result. `arguments` have a ValueType in place of each symbolic value.

    Raises EpilogueError where PyTorch refuses these types, and where its result is of an integer type: it would be
    exact and wrap around, which floating-point arithmetic does not.
    """
    everything = (*arguments, *keywords.values())
    for item in everything:
        if item is INPUT_DTYPE or (isinstance(item, ValueType) and item.dtype is None):
            return UNKNOWN
    # 1, 1.0 and True are equal, but not to type promotion.
    decisive = tuple(map(type, everything)), torch.get_default_dtype()
    key = function, arguments, tuple(keywords.items()), _thread.autocast, decisive
    try:
        return _promote(*key)
    except EpilogueError:
        raise
    except TypeError:  # an argument that is not hashable
        return _promote.__wrapped__(*key)


@functools.lru_cache(maxsize=4096)
def _promote(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
    autocast: Autocast | None,
    decisive: tuple[Any, ...],
) -> ValueType:
    """decisive: what the result depends on besides, for the cache."""
    called, keywords = function, dict(named)

    def described() -> str:
        return f"{describe_callable(called)} of {describe_types(given)}"

    given = [item for item in (*arguments, *keywords.values()) if isinstance(item, ValueType)]
    if function is torch.div and len(arguments) == 2 and not keywords and _is_number(arguments[0]):
        function, arguments = torch.Tensor.__rtruediv__, arguments[::-1]  # 1 / z is a reciprocal, which autocast casts
    try:
        result = _ask(function, arguments, keywords, autocast)
        wraps = len(given) == 1 and given[0].is_integer and _wraps_around(function, arguments, keywords, result)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EpilogueError(f"PyTorch refuses {described()}: {reason}") from None
    found = type_of(result)
    if wraps:
        raise EpilogueError(
            f"{described()} computes with integers on the way in PyTorch, modulo the type's range, "
            "and an epilogue with floating-point numbers: convert to them first (.float()), or compute this before"
        )
    if found.is_integer:
        raise EpilogueError(
            f"{described()} gives {found.dtype} in PyTorch, exact and modulo the type's range, and "
            "an epilogue computes with floating-point numbers: convert to them first (.float(), 1.0 for 1), or "
            "compute this before"
        )
    return found


def _is_number(value: Any) -> bool:
    return value.is_number if isinstance(value, ValueType) else isinstance(value, int | float)


def _ask(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], autocast: Autocast | None
) -> torch.Tensor:
    """What the function gives for values of the types, under that autocast."""
    try:
        with asking(autocast):
            return _call(function, arguments, keywords, autocast)
    except RuntimeError:
        if autocast is None or autocast.device_type == "cpu":
            raise
    # Some functions, such as torch.where of a number, make tensors on the device. Autocast knows none of them.
    with asking(None):
        return _call(function, arguments, keywords, None)


def _wraps_around(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], result: torch.Tensor
) -> bool:
    """Whether a function of one integer has another floating-point result at the ends of its range than of a float."""
    if not result.is_floating_point():
        return False

    def call(end: int, as_dtype: torch.dtype | None) -> torch.Tensor:
        def probe(item: Any) -> Any:
            return torch.full((1,), end, dtype=as_dtype or item.dtype) if isinstance(item, ValueType) else item

        value: torch.Tensor = function(*map(probe, arguments), **{name: probe(item) for name, item in keywords.items()})
        return value.to(result.dtype)

    given = next(item for item in (*arguments, *keywords.values()) if isinstance(item, ValueType))
    assert given.dtype is not None
    limits = torch.iinfo(given.dtype)
    ends = (limits.min, limits.max) if limits.bits <= 16 else (limits.min,)  # exact in fp32
    with asking(None):
        return not all(
            torch.allclose(call(end, None), call(end, torch.float64), rtol=0.01, atol=1e-3, equal_nan=True)
            for end in ends
        )


def describe_types(types: list[ValueType]) -> str:
    return ", ".join("a number" if item.is_number else str(item.dtype) for item in types)


def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], autocast: Autocast | None
) -> torch.Tensor:
    """The function on tensors of the types. Numbers are numbers, or tensors where it takes nothing else."""

    def call(numbers: dict[torch.dtype, Any]) -> torch.Tensor:
        named = {key: _probe(value, numbers, autocast) for key, value in keywords.items()}
        result: torch.Tensor = function(*[_probe(value, numbers, autocast) for value in arguments], **named)
        return result

    try:
        return call({torch.bool: True, torch.int64: 1, torch.float64: 1.0})
    except TypeError:
        if not any(isinstance(value, ValueType) and value.is_number for value in (*arguments, *keywords.values())):
            raise
        dtypes = {torch.bool: torch.bool, torch.int64: torch.int64, torch.float64: torch.get_default_dtype()}
        return call({kind: probe((), dtype, autocast, fill=1) for kind, dtype in dtypes.items()})


def _probe(value: Any, numbers: dict[torch.dtype, Any], autocast: Autocast | None) -> Any:
    """A tensor of the type, of no elements or no dimensions. Anything else as it is."""
    if not isinstance(value, ValueType):
        return value
    if value.is_number and value.dtype is not None:
        return numbers[value.dtype]
    assert value.dtype is not None
    return probe(() if value.is_scalar else (0,), value.dtype, autocast)


def probe(shape: tuple[int, ...], dtype: torch.dtype, autocast: Autocast | None, fill: float = 0) -> torch.Tensor:
    """A tensor on the device of the autocast, for `asking` about that; on the CPU for none."""
    tensor = torch.full(shape, fill, dtype=dtype, device="cpu")
    return tensor if autocast is None or autocast.device_type == "cpu" else _Elsewhere.of(tensor, autocast.device_type)


@contextlib.contextmanager
def asking(autocast: Autocast | None) -> Iterator[None]:
    """A context in which functions of probes give the types of that autocast, whatever modes are active.

    Those are for the user's values, not for probes, whose types are remembered.
    """
    # The faster one would keep calls from `_Elsewhere` too.
    is_elsewhere = autocast is not None and autocast.device_type != "cpu"
    modes_off: Callable[[], Any] = _disable_current_modes if is_elsewhere else torch._C._DisableTorchDispatch
    asked = contextlib.nullcontext() if autocast is None else _autocast(*autocast)
    with torch._C.DisableTorchFunction(), modes_off(), _autocast("cpu", None), asked:
        yield


@contextlib.contextmanager
def _autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast of that device to the type, or off for None.

    `torch.autocast` itself stays off for a device that the process lacks.
    """
    enabled, before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, before)


class _Elsewhere(torch.Tensor):
    """A tensor on the CPU that says it is on another device."""

    tensor: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor, device_type: str) -> _Elsewhere:
        device = torch.device(device_type)
        found = torch.Tensor._make_wrapper_subclass(_Elsewhere, tensor.shape, dtype=tensor.dtype, device=device)
        found.tensor = tensor
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as in TracedTensor
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        devices: set[str] = set()

        def to_cpu(value: _Elsewhere) -> torch.Tensor:
            devices.add(value.device.type)
            return value.tensor

        given, named = tree_map_only(_Elsewhere, to_cpu, (args, {**(kwargs or {})}))
        if named.get("device") is not None:
            named["device"] = torch.device("cpu")
        result = function(*given, **named)
        (device_type,) = devices
        return tree_map_only(torch.Tensor, lambda tensor: _Elsewhere.of(tensor, device_type), result)
