"""Facts about the machine, the libraries and the code, for the results file. No host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import cutfuse
from cutfuse import native

# Beside PyTorch, those whose code results depend on.
PACKAGES = ("triton", "timm", "transformers", "liger-kernel", "cut-cross-entropy", "quack-kernels")


def command_output(*arguments: str) -> str | None:
    """The first line that a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""


def cpu_name() -> str:
    """The processor's name as Linux gives it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def installed_version(package: str) -> str | None:
    """A package's version, without importing it; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts(device: torch.device, commit: str | None) -> dict[str, object]:
    """Everything that the results of a run depend on; `commit` for where the code is not a git checkout.

    A commit is marked where tracked files differ from it.
    """
    head = command_output("git", "rev-parse", "HEAD")
    if head and command_output("git", "status", "--porcelain", "--untracked-files=no"):
        head = f"{head} with changes"
    found: dict[str, object] = {
        "device": device_name(device),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or head,
        "cutfuse": cutfuse.__version__,
        "cutfuse_kernels": bool(native.core.cuda_build),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: installed_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found.update(
            driver=command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
        )
    return found
