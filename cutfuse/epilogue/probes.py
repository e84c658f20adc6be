"""Tensors with which PyTorch is asked for the type of a function's result, also under the autocast of any device.

Autocast decides by a tensor's device, before a kernel of that device runs. So a tensor that has the device in name, and
computes on the CPU, is given the types of that device, also in a process that lacks it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from cutfuse.precision import autocast_dtype


class Autocast(NamedTuple):
    """An autocast that is enabled: for tensors on which type of device, and to which type it casts."""

    device_type: str
    dtype: torch.dtype


def autocast_on(device_type: str) -> Autocast | None:
    """The one under which tensors on such a device are now, or None."""
    dtype = autocast_dtype(device_type)
    return None if dtype is None else Autocast(device_type, dtype)


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
    with torch._C.DisableTorchFunction(), modes_off(), contextlib.ExitStack() as stack:
        stack.enter_context(_autocast("cpu", None))
        if autocast is not None:
            stack.enter_context(_autocast(*autocast))
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
