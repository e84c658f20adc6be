"""The native module, whether its CUDA kernels serve a device, and the cards that are predicted for in its place."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import dynamo

HOW_TO_GET_KERNELS = (
    "install nvcc (CUDA 12.8 or later, or set CUDACXX to it) and run "
    "`pip install --force-reinstall --no-deps .` in cutfuse's source tree"
)

OLDEST_CAPABILITY = (8, 0)  # what the pointwise and reduction kernels are built for, and newer


if TYPE_CHECKING:
    from . import _C

    core = _C


def __getattr__(name: str) -> ModuleType:
    """`native.core` is what `module()` gives, with types: those of a module are known under a name only. A variable of
    this module from then on."""
    if name == "core":
        found = globals()[name] = module()
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.lru_cache(maxsize=1)
def module() -> ModuleType:
    """`cutfuse._C`. Raises ImportError, with what to do, where it was not built."""
    try:
        return importlib.import_module("cutfuse._C")
    except ImportError as error:
        raise ImportError(
            f"cutfuse's native module cannot be imported ({error}), beside {Path(__file__).parent}. If this is the "
            "source tree, run `pip install -e .` in it, or run Python elsewhere to get an installed cutfuse"
        ) from error


def direct_call(name: str) -> Callable[..., Any]:
    """A function of the native module that makes calls directly. Where that is missing, one that gives None: the
    general path raises an ImportError that tells what to do."""
    try:
        function: Callable[..., Any] = getattr(module(), name)
    except (ImportError, AttributeError):  # AttributeError: a module of an older build
        return lambda *given: None
    return function


def require_module() -> None:
    """For commands: exits with what to do, and without a traceback, where the module was not built."""
    try:
        module()
    except ImportError as error:
        sys.exit(f"error: {error}")


@functools.lru_cache(maxsize=1)
def has_kernels() -> bool:
    """True where the native module was built with CUDA kernels and this PyTorch talks to NVIDIA devices."""
    return bool(module().cuda_build) and torch.version.cuda is not None


@functools.lru_cache(maxsize=1)
def _warn_without_kernels() -> None:
    warnings.warn(
        "cutfuse was built without CUDA kernels, so CUDA tensors take PyTorch's own operations: same results, nothing "
        f"fused. To get the kernels: {HOW_TO_GET_KERNELS}.",
        UserWarning,
        stacklevel=4,
    )


@dynamo.assume_constant_result
def serves(device: torch.device) -> bool:
    """True where the kernels run on `device`, or on the card that is predicted for in its place.

    A CUDA device that they do not serve is warned about, once a process.
    """
    if device.type == "cuda" and not has_kernels() and torch.version.cuda is not None:
        _warn_without_kernels()
    return not why_unserved(device)


@dynamo.assume_constant_result
def why_unserved(device: torch.device) -> str:
    """Why the kernels do not run on `device`, which is there; empty where they do."""
    if device.type != "cuda":
        return "" if stands_in_for(device) else "kernels are for CUDA devices"
    if not has_kernels():
        return "this build of cutfuse has no CUDA kernels" if torch.version.cuda else without_cuda()
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        major, minor = OLDEST_CAPABILITY
        return f"the kernels are for sm_{major}{minor} and later"
    return ""


def without_cuda() -> str:
    return f"PyTorch {torch.__version__} is built without CUDA"


DeviceFacts = tuple[int, int, int]


class Card(NamedTuple):
    """What the planner asks of a device: compute capability and multiprocessors. caution: of its predicted times."""

    facts: DeviceFacts
    caution: str = ""


CARDS = {
    "H200": Card((9, 0, 132)),
    # The SXM module: 3.35 TB/s, where an H200 has 4.8.
    "H100": Card((9, 0, 132), ", with the times of an H200, whose memory is 1.4 times as fast"),
}

_predicted: ContextVar[DeviceFacts | None] = ContextVar("cutfuse_predicted", default=None)


@contextlib.contextmanager
def predicting(function: str, device: str | None) -> Iterator[str | None]:
    """Within it, calls of this thread on tensors outside of CUDA devices are planned as on this card; as ever for None.

    Gives the card's name as `CARDS` has it. Raises ValueError for a name that is none of them, in capitals or not.
    function: which one is called, for that error.
    """
    if device is None:
        yield None
        return
    card = device.upper() if isinstance(device, str) else ""
    if card not in CARDS:
        raise ValueError(
            f"cutfuse.{function}: device has to be one of {', '.join(map(repr, CARDS))}, or None for the tensors' own, "
            f"got {device!r}"
        )
    token = _predicted.set(CARDS[card].facts)
    try:
        with _autocast_of_card():
            yield card
    finally:
        _predicted.reset(token)


def _autocast_of_card() -> contextlib.AbstractContextManager[object]:
    """Autocast of CUDA devices, where that is on, for the tensors on the CPU that stand for the card's."""
    if not torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def predicted_facts() -> DeviceFacts | None:
    """Of the card that stands in for devices that are no CUDA devices; None where none does."""
    return _predicted.get()


@dynamo.assume_constant_result
def stands_in_for(device: torch.device) -> bool:
    """Whether a card is predicted for in the place of this device: CUDA devices answer for themselves."""
    return device.type != "cuda" and _predicted.get() is not None


def address_of(tensor: Tensor) -> int:
    """A tensor's address; on a card that is predicted for the offset in its storage, which PyTorch aligns there."""
    if _predicted.get() is None or tensor.is_cuda:
        return tensor.data_ptr()
    return int(tensor.storage_offset()) * tensor.element_size()


def check_devices(function: str, device: str | None, devices: Iterable[torch.device]) -> None:
    """Raises ValueError where tensors are on another CUDA device than the one that is asked about."""
    if device is None:
        return
    for own in devices:
        if own.type != "cuda":
            continue
        properties = torch.cuda.get_device_properties(own)
        facts = properties.major, properties.minor, properties.multi_processor_count
        if facts != CARDS[device].facts:
            raise ValueError(
                f"cutfuse.{function}: device={device!r} predicts for tensors outside of CUDA devices, but there is one "
                f'on {own}, a {properties.name}; move the call to the CPU or to device="meta", or leave device out'
            )


def describe_prediction(device: str) -> str:
    """What is to be read beside everything that is predicted for a card."""
    return f"a prediction for an {device}{CARDS[device].caution}; nothing ran on one"


operators_everywhere = False  # which way calls take where it is not theirs to say, for tests


@contextlib.contextmanager
def use_operators_everywhere() -> Iterator[None]:
    """Within it, every device and type takes the operators and the autograd built on them."""
    global operators_everywhere
    before, operators_everywhere = operators_everywhere, True
    module().pause_calls(True)  # direct calls do not look at what is set here
    try:
        yield
    finally:
        module().pause_calls(False)
        operators_everywhere = before
