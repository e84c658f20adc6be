"""Which build requirements a build with CUDA kernels adds. Knows nothing of scikit-build-core."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping

from toolchain import find_nvcc

CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
# The metapackage pins a matching set; nvidia-cuda-nvcc alone resolves an nvvm that does not fit its ptxas.
NVCC_REQUIREMENT = "cuda-toolkit[nvcc,cudart,cccl]==13.0.*"

ConfigSettings = Mapping[str, "str | list[str]"]


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def cmake_variable(name: str, config_settings: ConfigSettings | None) -> str:
    """The value that the user gives a CMake variable, or "": by config settings first, then by the environment.

    Read are `cmake.define.NAME=value`, `cmake.args=-DNAME=value`, SKBUILD_CMAKE_DEFINE, SKBUILD_CMAKE_ARGS and
    CMAKE_ARGS: all the ways in which scikit-build-core hands CMake a variable.
    """
    settings = config_settings or {}
    for prefix in ("", "skbuild."):
        values = _as_list(settings.get(f"{prefix}cmake.define.{name}"))
        if values:
            return values[-1]
    arguments = [part for prefix in ("", "skbuild.") for part in _as_list(settings.get(f"{prefix}cmake.args"))]
    arguments += [f"-D{define}" for define in os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")]
    arguments += os.environ.get("SKBUILD_CMAKE_ARGS", "").split(";")
    arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    matches = (re.fullmatch(rf"-D{name}(?::\w+)?=(.*)", argument) for argument in arguments)
    return next((match[1] for match in matches if match), "")


def cuda_requirements(config_settings: ConfigSettings | None) -> list[str]:
    """CUTLASS where there is an nvcc to compile it, and nvcc itself only for a user who opted in and has none.

    Raises ToolchainError where the user names a compiler that does not run.
    """

    def is_set(name: str, *values: str) -> bool:
        return cmake_variable(name, config_settings).upper() in values

    if is_set("CUTFUSE_CUDA", "OFF", "0", "FALSE", "NO") or cmake_variable("CUTFUSE_PREBUILT_KERNELS", config_settings):
        return []
    requirements = []
    if not find_nvcc(cmake_variable("CMAKE_CUDA_COMPILER", config_settings)):
        if not is_set("CUTFUSE_NVCC_WHEELS", "ON", "1", "TRUE", "YES"):
            return []
        requirements.append(NVCC_REQUIREMENT)
    if not (cmake_variable("CUTLASS_DIR", config_settings) or os.environ.get("CUTLASS_DIR")):
        requirements.append(CUTLASS_REQUIREMENT)
    return requirements
