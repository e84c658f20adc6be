"""Which precision a product of fp32 matrices has: PyTorch's own setting, read and never written."""

from __future__ import annotations

import torch


def allows_tf32() -> bool:
    """True where PyTorch lets cuBLAS multiply fp32 matrices as tf32.

    `torch.set_float32_matmul_precision("high" | "medium")`, `torch.backends.cuda.matmul.allow_tf32 = True` and
    `torch.backends.cuda.matmul.fp32_precision = "tf32"` all say so. torch 2.9 brought the last one; read the others
    through it where it exists, because reading the older ones after setting it may warn or raise.
    """
    setting = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if setting is None:
        return torch.backends.cuda.matmul.allow_tf32
    return setting == "tf32"


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type that autocast gives a matrix product on `device_type`, or None outside of autocast."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # "meta" is no device type to autocast
        return None
    return torch.get_autocast_dtype(device_type)
