"""Which precision a product of fp32 matrices has: PyTorch's own setting, or one forced here.

A mode is "ieee" (cuBLAS in fp32), "guarded", "split6" or "split3" (products of 16-bit parts: split3 where the operands'
range allows it and split6 elsewhere, or either without a guard), "tf32", or None for what PyTorch's setting says:
"guarded" at "highest", tf32 below. A thread's innermost `with precision(mode)` decides, then the process's
`set_precision`, then PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar, Token

import torch

from . import dynamo

# split3 where the operands' range allows it, and split6 elsewhere.
GUARDED = "guarded"
SPLIT_MODES = (GUARDED, "split6", "split3")
MODES = ("ieee", *SPLIT_MODES, "tf32")
# What PyTorch's "highest" means: its error is no worse than cuBLAS fp32's.
HIGHEST = GUARDED
_NOTHING = contextlib.nullcontext()
_INSIDE = "a compiled function reads cutfuse.precision when it runs: enter it around the call of the compiled function"


class _Process:
    """What has been asked for in this process. Dynamo guards what it reads of it, so that compiled code follows."""

    opted_in = False  # to a mode that is not PyTorch's setting, ever


process = _Process()
_INHERITED = "inherited"  # no context: the process's mode holds. None is a context's mode of its own
_process_mode: str | None = None
_context_mode: ContextVar[str | None] = ContextVar("cutfuse.precision", default=_INHERITED)


@dynamo.disable_because(_INSIDE)
def precision(mode: str | None) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread's products of fp32 matrices run in `mode`; None follows PyTorch's setting.

    Contexts nest, and the result decorates functions too. A backward pass takes the mode of its forward, unless it is
    to be differentiated again: that one follows PyTorch's setting. A compiled function reads the mode when it runs:
    enter the context around it, not inside of it. Its backward pass is on threads of autograd's, which are in no
    context, and takes `set_precision`'s mode; a compiled layer with nothing after it stays PyTorch's own.

    Raises:
        ValueError: `mode` is not "ieee", "guarded", "split6", "split3", "tf32" or None.
    """
    return _entered(checked_mode(mode))


def set_precision(mode: str | None) -> None:
    """Makes `mode` what every thread's products of fp32 matrices run in, outside of `precision`'s contexts.

    Raises:
        ValueError: `mode` is not "ieee", "guarded", "split6", "split3", "tf32" or None (PyTorch's setting).
    """
    global _process_mode
    _process_mode = checked_mode(mode)
    process.opted_in |= mode is not None


def get_precision() -> str | None:
    """The mode that `set_precision` was given last, whatever context this is; None follows PyTorch's setting."""
    return _process_mode


def module_variables() -> dict[str, object]:
    """This module's variables, of which direct calls read the process's mode."""
    return globals()


def product_mode(captured: str = "") -> str:
    """What a product of fp32 matrices runs in now: "ieee", "tf32", "split6", "split3" or "guarded".

    `captured` is what `captured_mode` gave the forward of a backward that asks: autograd's threads are in no context.
    """
    if captured:
        return captured
    mode = _context_mode.get()
    if mode == _INHERITED:
        mode = _process_mode
    if mode is not None:
        return mode
    return "tf32" if allows_tf32() else HIGHEST


def captured_mode() -> str:
    """The mode that a forward hands to its backward; empty while torch.compile traces, whose graph serves every mode.

    The operators of a compiled backward then read the mode themselves, on autograd's threads: the process's.
    """
    return "" if dynamo.is_tracing() else product_mode()


def in_captured_mode(x: torch.Tensor, mode: str) -> contextlib.AbstractContextManager[None]:
    """Within it, fp32 products of x run in a mode that a forward pass captured; an empty one is the mode that holds.

    No gradient is recorded, and autocast is off: the tensors were cast before. In most passes all of that holds,
    and each context would take 5 us of the host's time.
    """
    mode = mode if mode and x.dtype == torch.float32 and mode != product_mode() else ""
    if not mode and not torch.is_grad_enabled() and autocast_dtype(x.device.type) is None:
        return _NOTHING
    return _in_mode(x.device.type, mode)


@contextlib.contextmanager
def _in_mode(device_type: str, mode: str) -> Iterator[None]:
    """Without gradients and autocast, and in a mode unless it is empty."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device_type, enabled=False))
        if mode:
            stack.enter_context(precision(mode))
        yield


def checked_mode(mode: str | None) -> str | None:
    """The mode as it stands in MODES: direct calls know it by identity, which another string may have later."""
    if mode is not None and mode not in MODES:
        choices = ", ".join(f'"{choice}"' for choice in MODES)
        raise ValueError(f"cutfuse: a precision is one of {choices} or None (PyTorch's setting), got {mode!r}")
    return None if mode is None else MODES[MODES.index(mode)]


@contextlib.contextmanager
def _entered(mode: str | None) -> Iterator[None]:
    token = _enter(mode)
    try:
        yield
    finally:
        _context_mode.reset(token)


@dynamo.disable_because(_INSIDE)
def _enter(mode: str | None) -> Token[str | None]:
    process.opted_in |= mode is not None
    return _context_mode.set(mode)


def allows_tf32() -> bool:
    """True where PyTorch lets cuBLAS multiply fp32 matrices as tf32.

    `torch.set_float32_matmul_precision("high" | "medium")`, `torch.backends.cuda.matmul.allow_tf32 = True` and
    `torch.backends.cuda.matmul.fp32_precision = "tf32"` all say so. torch 2.9 brought the last one; read the others
    through it where it exists, because reading the older ones after setting it may warn or raise.
    """
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if setting is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(setting == "tf32")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast gives a matrix product on `device_type`, or None outside of autocast."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # "meta" is no device type to autocast
        return None
    return torch.get_autocast_dtype(device_type)
