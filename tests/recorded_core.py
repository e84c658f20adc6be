"""The native module, but that launches are written down instead of made: for tests of what is launched, on a CPU."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cutfuse
from cutfuse import native

LAUNCHES = ("split", "gemm", "gemm_planes", "gemm_convert", "finalize_partials", "pointwise", "reduce")


def signatures() -> dict[str, inspect.Signature]:
    """Of the functions that launch, which a build without kernels lacks: from the stub."""
    tree = ast.parse(Path(cutfuse.__file__).with_name("_C.pyi").read_text())
    found = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in LAUNCHES}
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    result = {}
    for name, arguments in found.items():
        required = len(arguments.args) - len(arguments.defaults)
        defaults = [empty] * required + [ast.literal_eval(default) for default in arguments.defaults]
        parameters = [
            inspect.Parameter(a.arg, kind, default=default) for a, default in zip(arguments.args, defaults, strict=True)
        ]
        result[name] = inspect.Signature(parameters)
    return result


class RecordedCore:
    """`launches`: their arguments by name, and the function's as `function`, in order."""

    def __init__(self) -> None:
        self._signatures = signatures()
        self.launches: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> Any:
        if name not in LAUNCHES:
            return getattr(native.module(), name)

        def launch(*arguments: Any) -> None:
            bound = self._signatures[name].bind(*arguments)
            bound.apply_defaults()
            self.launches.append(SimpleNamespace(function=name, **bound.arguments))

        return launch

    @property
    def names(self) -> list[str]:
        return [launch.function for launch in self.launches]
