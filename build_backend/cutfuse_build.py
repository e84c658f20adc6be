"""The PEP 517 backend: scikit-build-core's, with the requirements that only a build of the CUDA kernels has."""

from __future__ import annotations

import cuda_requirements
from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403 (every hook that is not wrapped below)
from toolchain import ToolchainError


def get_requires_for_build_wheel(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return _backend.get_requires_for_build_wheel(config_settings) + _cuda_requirements(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, str | list[str]] | None = None) -> list[str]:
    return _backend.get_requires_for_build_editable(config_settings) + _cuda_requirements(config_settings)


def _cuda_requirements(config_settings: dict[str, str | list[str]] | None) -> list[str]:
    try:
        return cuda_requirements.cuda_requirements(config_settings)
    except ToolchainError as error:
        raise SystemExit(f"cutfuse: {error}") from None  # without a traceback, which pip would print above the message
