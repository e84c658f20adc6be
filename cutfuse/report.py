"""`python -m cutfuse.report`: the build, versions, devices and settings that a bug report needs, as plain text.

With `--json` it is an object of sections, each an object of names and strings. Runs on every machine: what cannot be
found out is a line that says why. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

import cutfuse

from . import native
from .layer.layouts import caution_of, device_facts
from .layer.specialize import why_interpreted
from .precision import allows_tf32, get_precision, product_mode

Line = tuple[str, str]

# What changes results, kernels or their times in PyTorch, cuBLAS, the driver and the loader.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_CACHE_PATH",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHON_GIL",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_DISABLE",
)


def build_lines() -> list[Line]:
    """How the installed cutfuse was built."""
    lines = [("cutfuse", f"{cutfuse.__version__}, in {Path(__file__).parent}")]
    try:
        info = native.core.build_info()
    except (ImportError, AttributeError) as error:  # AttributeError: a module of an older build
        return [*lines, ("native module", f"BROKEN: {error}")]
    if not native.core.cuda_build:
        return [*lines, ("kernels", "none: a CPU-only build"), ("compiler", info["host_compiler"])]
    return [
        *lines,
        ("kernels", f"CUDA {info['cuda_compiler']}"),
        ("GEMM kernels", info["gemm_architectures"]),
        ("other kernels", info["portable_architectures"]),
        ("compiler", info["host_compiler"]),
    ]


def version_lines() -> list[Line]:
    """What cutfuse runs on."""
    implementation = f"{platform.python_implementation()} {platform.python_version()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        implementation += ", without the GIL"
    return [
        ("Python", implementation),
        ("platform", f"{platform.platform()}, {platform.machine()}"),
        ("torch", torch.__version__),
        ("torch's CUDA", torch.version.cuda or "none"),
        ("triton", _version_of("triton")),
        ("driver", _driver()),
    ]


def device_lines() -> list[Line]:
    """The GPUs, and what runs on each."""
    if not torch.cuda.is_available():
        return [("CUDA devices", "none that PyTorch can use")]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        major, minor, multiprocessors = device_facts(device)
        memory = properties.total_memory / 2**30
        what = f"{properties.name}, sm_{major}{minor}, {multiprocessors} multiprocessors, {memory:.0f} GiB"
        caution = caution_of(device)
        lines.append((f"cuda:{index}", f"{what}, {caution}" if caution else what))
    return lines


def setting_lines() -> list[Line]:
    """The settings that decide how precise a product is and which way a call takes."""
    matmul = torch.backends.cuda.matmul
    autocast = [name for name in ("cuda", "cpu") if torch.is_autocast_enabled(name)]
    return [
        ("cutfuse.set_precision", repr(get_precision())),
        ("fp32 products run in", product_mode()),
        ("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ("tf32 in cuBLAS", str(allows_tf32())),
        ("bf16 reduced precision", str(matmul.allow_bf16_reduced_precision_reduction)),
        ("fp16 reduced precision", str(matmul.allow_fp16_reduced_precision_reduction)),
        ("deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())),
        ("autocast", ", ".join(autocast) or "off"),
        ("default dtype", str(torch.get_default_dtype())),
    ]


def specialization_lines() -> list[Line]:
    """Whether epilogues are compiled into their kernels; if not, why."""
    why = why_interpreted()
    return [
        ("mode", cutfuse.get_specialization()),
        ("epilogues compiled", f"no: {why}" if why else "yes"),
    ]


def variable_lines() -> list[Line]:
    """The variables of VARIABLES that are set."""
    return [(name, os.environ[name]) for name in VARIABLES if name in os.environ] or [("none", "of those that matter")]


def path_lines() -> list[Line]:
    """Which fast paths calls take here; on a GPU by making a call twice."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    native.module()  # without it calls raise, and no operation of PyTorch's computes them
    if not devices:
        why = cutfuse.is_available().reason
        return [("kernels", f"inactive: {why}; PyTorch's operations compute every call")]
    return [(f"cuda:{index}", describe_paths(torch.device("cuda", index))) for index in devices]


def describe_paths(device: torch.device) -> str:
    """What runs on a CUDA device, and whether a call that is made again takes the direct path."""
    found = cutfuse.is_available(device)
    if not found:
        return f"PyTorch's operations: {found.reason}"
    x = torch.zeros(16, 16, device=device)
    cutfuse.pointwise(torch.tanh, x)
    before = native.core.direct_calls()
    cutfuse.pointwise(torch.tanh, x)
    direct = "on" if native.core.direct_calls() > before else "OFF"
    gemm = "through cuBLAS, then one kernel" if found.reason else "in one kernel"
    return f"linear layers {gemm}; direct path {direct}"


SECTIONS: dict[str, Callable[[], list[Line]]] = {
    "build": build_lines,
    "versions": version_lines,
    "devices": device_lines,
    "settings": setting_lines,
    "environment": variable_lines,
    "specialization": specialization_lines,
    "fast paths": path_lines,
}


def collect() -> dict[str, dict[str, str]]:
    """The sections' lines. A section that fails says with which error: reports of broken machines matter most."""
    found = {}
    for title, section in SECTIONS.items():
        try:
            lines = section()
        except Exception as error:
            lines = [("FAILED", f"{type(error).__name__}: {error}")]
        found[title] = {name: _as_one_line(value) for name, value in lines}
    return found


def report() -> str:
    """The whole report as text."""
    text = []
    for title, lines in collect().items():
        text += [title, *(f"  {name:26}{value}" for name, value in lines.items())]
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m cutfuse.report", description=__doc__.partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="an object of sections, in the place of text")
    options = parser.parse_args(arguments)
    print_lines([json.dumps(collect(), indent=1) if options.json else report()])
    return 0


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines. Exits with 1 and no traceback if nothing reads standard output any more."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it exits: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _as_one_line(value: str) -> str:
    """A value in printable ASCII, whose paths do not name the user."""
    home = os.path.expanduser("~")  # itself where there is none
    named = value if len(home) < 2 else value.replace(home + os.sep, "~" + os.sep)
    return named.encode("unicode_escape").decode().replace("\\\\", "\\")


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """The NVIDIA driver's version, asked of nvidia-smi: PyTorch knows no more than the CUDA version behind it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
    except OSError as error:
        return f"unknown: nvidia-smi does not run, {error.strerror}"
    except subprocess.TimeoutExpired:
        return "unknown: nvidia-smi takes more than 20 s"
    if result.returncode != 0:
        return f"unknown: nvidia-smi exits with {result.returncode}"
    return ", ".join(sorted(set(result.stdout.split())))


if __name__ == "__main__":
    sys.exit(main())
