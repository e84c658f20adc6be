"""The native module, and whether its CUDA kernels can serve a device."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from . import dynamo, prediction

HOW_TO_GET_KERNELS = (
    "install nvcc (CUDA 12.8 or later, or set CUDACXX to it) and run "
    "`pip install --force-reinstall --no-deps .` in cutfuse's source tree"
)

OLDEST_CAPABILITY = (8, 0)  # what the pointwise and reduction kernels are built for, and newer


if TYPE_CHECKING:
    from . import _C

    core = _C


def __getattr__(name: str) -> ModuleType:
    """`native.core` is what `module()` gives, with types: those of a module are known under a name only."""
    if name == "core":
        return module()
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
        return "" if prediction.stands_in_for(device) else "kernels are for CUDA devices"
    if not has_kernels():
        return "this build of cutfuse has no CUDA kernels" if torch.version.cuda else without_cuda()
    if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        major, minor = OLDEST_CAPABILITY
        return f"the kernels are for sm_{major}{minor} and later"
    return ""


def without_cuda() -> str:
    return f"PyTorch {torch.__version__} is built without CUDA"
