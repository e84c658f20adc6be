"""Whether cutfuse's kernels run on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import native
from .layer.planner import why_no_kernels


@dataclass(frozen=True)
class Availability:
    """What `cutfuse.is_available` returns: true or false in conditions, and printed with the reason.

    reason: why no kernel runs, or where some do, why none multiplies; empty where all run.
    """

    is_available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.is_available

    def __repr__(self) -> str:
        return f"{self.is_available}: {self.reason}" if self.reason else str(self.is_available)


def is_available(device: torch.device | str | int | None = None) -> Availability:
    """Whether cutfuse's kernels run on a device. Where they do not, PyTorch's own operations compute every call.

    It is true on CUDA devices from sm_80 on. The kernels that multiply and apply the epilogue in one are for sm_90: on
    others the result is true, with that as the reason. What runs for a call, `cutfuse.explain` says.

    Args:
        device: as PyTorch names it, or the index of a CUDA device; by default the current CUDA device.

    Returns:
        An object that is true or false in conditions, has the reason as `reason`, a str that is empty where all kernels
        run, and prints as, for example, `False: this build of cutfuse has no CUDA kernels`.

    Raises:
        RuntimeError: `device` is not the name of a device.
    """
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    try:
        native.module()
    except ImportError as error:
        return Availability(False, str(error))
    why = _why_missing(asked)
    if why:
        return Availability(False, why)
    if asked.type == "cuda" and asked.index is None:
        asked = torch.device("cuda", torch.cuda.current_device())
    why = native.why_unserved(asked)
    return Availability(not why, why or why_no_kernels(asked))


def _why_missing(device: torch.device) -> str:
    """Why a CUDA device is not there; empty where it is, and for other devices."""
    if device.type != "cuda":
        return ""
    if torch.version.cuda is None:
        return native.without_cuda()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "PyTorch finds no CUDA device"
    return "" if (device.index or 0) < count else f"PyTorch finds {count} CUDA devices, and no {device}"
