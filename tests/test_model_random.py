"""Random models against PyTorch: values, types, layouts, writes and gradients of what the fusion pass makes of them.

A fault is reported with the source of its model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model_checks import aot_saving
from random_models import Program, build, make_program
from random_runs import check_seeds, is_ordinary
from torch import Tensor, fx

from cutfuse.compile.fusion import fuse
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere

# Among the first are models that find planted faults: modes that are crossed, operands that are read at another view or
# kept though they are written, addmm's factors, detach, results of comparisons. The last finds that writes are crossed.
SEEDS = (*range(36), 95)
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass
class Outcome:
    """What a run of a model gives: its results, and what it leaves in its inputs and modules. None: no gradient."""

    results: list[Tensor]
    written: list[Tensor]
    gradients: list[Tensor | None]
    error: str = ""


class FusingBackend:
    """AOTAutograd behind the fusion pass; no C++ compiler runs. layers: how many layers were fused."""

    def __init__(self) -> None:
        self.layers = 0

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fuse(module)
        inner = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
        found = sum(node.target is schema.layer for part in inner for node in part.graph.nodes)
        self.layers += found
        if not found:
            return module.forward  # it is PyTorch's own
        return aot_saving(module, inputs)


def run(
    program: Program, backend: Backend | None = None, is_reference: bool = False, noise: float = 0.0, grad: bool = True
) -> Outcome:
    """One run of a model, on inputs of its own; with torch.compile where there is a backend."""
    built = build(program, is_reference=is_reference, noise=noise)
    model, inputs, modules = built.model, built.inputs, built.modules
    leaves = [value for value in inputs if value.requires_grad]
    leaves += [parameter for module in modules for parameter in module.parameters()]
    if backend is not None:
        torch._dynamo.reset()
        model = torch.compile(model, backend=backend, dynamic=program.is_dynamic or None)
    torch.manual_seed(0)
    results = list(model(*inputs))
    written = [*inputs, *(value for module in modules for value in module.state_dict().values())]
    outcome = Outcome(results, [value.detach().clone() for value in written], [])
    try:
        outcome.gradients = _gradients(results, leaves) if grad else []
    except RuntimeError as error:
        outcome.error = str(error)
    return outcome


def _gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    ends = [value for value in results if value.requires_grad]
    if not ends or not leaves:
        return []
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(value.shape, generator=generator).to(value.dtype) for value in ends]
    return list(torch.autograd.grad(ends, leaves, given, allow_unused=True, materialize_grads=True))


def find_differences(program: Program, got: Outcome, expected: Outcome) -> list[str]:
    """How a run differs from PyTorch's, a line for each tensor that does."""
    differences = []
    for kind in ("results", "written", "gradients"):
        if kind == "gradients" and (differences or got.error != expected.error):
            return differences + [f"the backward pass fails: {got.error}"] * bool(got.error)
        pairs = zip(getattr(got, kind), getattr(expected, kind), strict=True)
        for index, (value, other) in enumerate(pairs):
            found = _describe_difference(value, other, kind)
            if found == "values" and _is_rounding(program, kind, index, value, other):
                found = ""
            if found:
                differences.append(f"{kind}[{index}] differs in its {found}: {value}\nPyTorch has {other}")
    return differences


def _describe_difference(value: Tensor, other: Tensor, kind: str) -> str:
    if value.dtype != other.dtype:
        return f"type, {value.dtype} for {other.dtype}"
    if value.shape != other.shape:
        return f"shape, {tuple(value.shape)} for {tuple(other.shape)}"
    if kind == "results" and value.requires_grad != other.requires_grad:
        return f"requires_grad, {value.requires_grad} for {other.requires_grad}"
    if kind == "results" and _strides(value) != _strides(other):
        return f"strides, {value.stride()} for {other.stride()}"
    value, other = value.detach(), other.detach()
    if not value.is_floating_point():
        return "" if torch.equal(value, other) else "values"
    bound = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 4e-3}[value.dtype]
    atol = bound * max(1.0, float(other.abs().max()) if other.numel() else 0.0)
    return "" if torch.allclose(value, other, rtol=bound, atol=atol, equal_nan=True) else "values"


def _strides(value: Tensor) -> list[int]:
    """The strides that say something."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1 and value.numel()]


def _is_rounding(program: Program, kind: str, index: int, value: Tensor, other: Tensor) -> bool:
    """Whether a value is as near to the exact one as PyTorch's, or as near as the conditioning of the model lets it.

    Fused chains round less often than PyTorch's operations, hence differently.
    """

    if not value.is_floating_point() or not value.isfinite().all():
        return False

    def again(is_reference: bool, noise: float = 0.0) -> Tensor | None:
        try:
            found = getattr(run(program, is_reference=is_reference, noise=noise), kind)
        except RuntimeError:  # in fp64 a value is a view, to which autograd refuses to write
            return None
        return found[index].detach().double() if index < len(found) else None

    narrowest = torch.float32 if "F32" in program.source else value.dtype
    noise = 2.0**-9 if program.is_rounded else torch.finfo(narrowest).eps
    value, other, reference = value.detach().double(), other.detach().double(), again(is_reference=True)
    if reference is None:  # a cast that is none in fp64 gives its argument, which is written to
        return _size(value - other) <= 30 * noise * _size(other)
    # PyTorch's own error, of the inputs and of others that are as wrong as they may be.
    errors = [found - reference for k in range(1, 7) if (found := again(False, noise * k / 3)) is not None]
    own = max(map(_size, (other - reference, *errors)))
    return _size(value - reference) <= max(1.1 * _size(other - reference), 2 * own) + 2 * noise * _size(reference)


def _size(value: Tensor) -> float:
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def check(program: Program, backend: FusingBackend) -> str:
    """What is wrong with a fused program; empty if nothing is, or where PyTorch's own compiler is wrong too."""
    torch.manual_seed(0)
    eager = run(program)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _compare(program, backend, eager)
    warned = [str(item.message) for item in caught if "cutfuse" in str(item.message)]
    if warned:
        return "\n".join(warned)
    if not found or _compare(program, aot_saving, eager):
        return ""
    # PyTorch fails likewise where an input is written that needs no gradient with one that does.
    return "" if "CopyBackwards" in found[0] else "\n".join(found)


def _compare(program: Program, backend: Backend, eager: Outcome) -> list[str]:
    try:
        outcome = run(program, backend, grad=not eager.error)
        return find_differences(program, outcome, eager)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.fixture(autouse=True)
def _operators(one_thread: None) -> Iterator[None]:
    """Everything that can be fused is, and nothing that was compiled before is found again."""
    torch._dynamo.reset()
    with use_operators_everywhere(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def test_random_models(request: pytest.FixtureRequest) -> None:
    backend = FusingBackend()

    def find(seed: int) -> str:
        program = make_program(seed)
        found = check(program, backend)
        return f"{program.source}\n\n{found}" if found else ""

    check_seeds(request, "models", SEEDS, find)
    if is_ordinary(request.config):
        assert backend.layers > len(SEEDS)
