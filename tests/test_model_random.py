"""Random models against PyTorch: values, types, layouts, writes and gradients of what is compiled of them.

Small ones run behind the fusion pass on a CPU. Those that are trained take several steps, on a GPU with the whole
backend. Memory is poisoned before each of these and before its backward pass (`poison.py`): a result that nobody wrote,
or that is read at the wrong place, is no right one by chance. A fault is reported with the source of its model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from model_checks import PYTORCH_WARNINGS, aot_saving
from poison import poison
from random_models import CPU_SIZES, PRECISIONS, Program, build, make_program, make_trained_program
from random_runs import check_seeds, is_ordinary
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import cutfuse  # noqa: F401  # registers the backend
from cutfuse.compile.fusion import fuse
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere

pytestmark = [*PYTORCH_WARNINGS]

# Among the first are models that find planted faults: modes that are crossed, operands that are read at another view or
# kept though they are written, addmm's factors, detach, results of comparisons. The last finds that writes are crossed.
SEEDS = (*range(36), 95)
# Of models that are trained: each precision is among them, and so are gates, attention, checkpoints and tied weights.
CPU_SEEDS = (22, 31, 47, 48, 77, 78)
# The last are in fp32, and split products of three dimensions whose rows Inductor pads.
GPU_SEEDS = (*range(28), 51, 108, 224, 269)
SHARES = len(GPU_SEEDS)  # that processes of pytest-xdist take side by side
PLAIN = 8  # of a trained one in fp32, without kinks
STEPS = 4  # of those that are trained, on two inputs in turn
Backend = str | Callable[..., Any]
_KEPT_MEMORY = 2 << 30  # what a process keeps of a device for its next model
# In what a gradient depends on a comparison.
_KINKS = ("relu", "hardswish", "abs()", "clamp", "elu(", "where", "maximum", "torch.min(", "softsign")


@dataclass
class Outcome:
    """What a run of a model gives: its results, and what it leaves in its inputs and modules. None: no gradient."""

    results: list[Tensor] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    error: str = ""

    @property
    def repeats(self) -> bool:
        """Whether steps on one input give the same bits."""
        pairs = []
        for kind in (self.results, self.gradients):
            half = len(kind) // 2
            pairs += zip(kind[:half], kind[half:], strict=True)
        return all(first is second or torch.equal(first, second) for first, second in pairs)


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
    program: Program,
    device: str,
    backend: Backend | None = None,
    is_reference: bool = False,
    noise: float = 0.0,
    grad: bool = True,
) -> Outcome:
    """One run of a model, on inputs of its own, or steps; with torch.compile where there is a backend."""
    built = build(program, device, is_reference, noise)
    model, modules = built.model, built.modules
    if backend is not None:
        torch._dynamo.reset()
        model = torch.compile(model, backend=backend, dynamic=program.is_dynamic or None)
    outcome = Outcome()
    steps = 1 if not program.precision else 2 if is_reference or noise else STEPS
    for step in range(steps):
        inputs = built.inputs
        if program.precision:
            inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
            inputs[0].data = inputs[0].data.flip(0) if step % 2 else inputs[0].data
            poison(device)
        leaves = [value for value in inputs if value.requires_grad]
        leaves += [parameter for module in modules for parameter in module.parameters()]
        torch.manual_seed(0)
        results = list(model(*inputs))
        outcome.results += results
        if program.precision:
            poison(device)
        else:
            written = [*inputs, *(value for module in modules for value in module.state_dict().values())]
            outcome.written += [value.detach().clone() for value in written]
        try:
            outcome.gradients += _gradients(results, leaves, step) if grad else []
        except RuntimeError as error:
            outcome.error = str(error)
    return outcome


def _gradients(results: list[Tensor], leaves: list[Tensor], step: int) -> list[Tensor | None]:
    ends = [value for value in results if value.requires_grad]
    if not ends or not leaves:
        return []
    generator = torch.Generator().manual_seed(step % 2)
    # The same in every type but for their rounding to bf16, the coarsest.
    given = [torch.randn(value.shape, generator=generator).bfloat16().clamp(-4, 4).to(value) for value in ends]
    return list(torch.autograd.grad(ends, leaves, given, allow_unused=True, materialize_grads=True))


def find_differences(program: Program, device: str, got: Outcome, expected: Outcome) -> list[str]:
    """How a run differs from PyTorch's, a line for each tensor that does."""
    differences = []

    @functools.cache
    def again(is_reference: bool, noise: float = 0.0) -> Outcome | None:
        try:
            return run(program, device, is_reference=is_reference, noise=noise)
        except RuntimeError:  # in fp64 a value is a view, to which autograd refuses to write
            return None

    for kind in ("results", "written", "gradients"):
        if kind == "gradients" and (differences or got.error != expected.error):
            return differences + [f"the backward pass fails: {got.error}"] * bool(got.error)
        pairs = zip(getattr(got, kind), getattr(expected, kind), strict=True)
        for index, (value, other) in enumerate(pairs):
            found = _describe_difference(program, value, other, kind)
            if found == "values" and _is_rounding(program, kind, index, value, other, again):
                found = ""
            if found:
                differences.append(f"{kind}[{index}] differs in its {found}: {value}\nPyTorch has {other}")
    return differences


def _describe_difference(program: Program, value: Tensor, other: Tensor, kind: str) -> str:
    if value.dtype != other.dtype:
        return f"type, {value.dtype} for {other.dtype}"
    if value.shape != other.shape:
        return f"shape, {tuple(value.shape)} for {tuple(other.shape)}"
    if kind == "results" and value.requires_grad != other.requires_grad:
        return f"requires_grad, {value.requires_grad} for {other.requires_grad}"
    # torch.compile's own compiler lays results of trained models out otherwise.
    if kind == "results" and not program.precision and _strides(value) != _strides(other):
        return f"strides, {value.stride()} for {other.stride()}"
    value, other = value.detach(), other.detach()
    if not value.is_floating_point():
        return "" if torch.equal(value, other) else "values"
    bound = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}[value.dtype]
    atol = bound * max(0.0 if program.precision else 1.0, float(other.abs().max()) if other.numel() else 0.0)
    return "" if torch.allclose(value, other, rtol=bound, atol=atol, equal_nan=True) else "values"


def _strides(value: Tensor) -> list[int]:
    """The strides that say something."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1 and value.numel()]


_MANY = 16  # elements, whose error varies little


def _noise(program: Program, dtype: torch.dtype) -> float:
    """By how much inputs may be wrong, so as to see what roundings make of a model's results."""
    if program.precision:
        unit = PRECISIONS[program.precision].unit
        # Few gradients of a comparison fall on its other side in fp32: noise has to be large to show what they are.
        return unit * (64 if _has_kinks(program) and program.precision == "fp32" else 1)
    return 2.0**-9 if program.is_rounded else torch.finfo(torch.float32 if "F32" in program.source else dtype).eps


def _has_kinks(program: Program) -> bool:
    return any(word in program.source for word in _KINKS)


def _is_rounding(
    program: Program, kind: str, index: int, value: Tensor, other: Tensor, again: Callable[..., Outcome | None]
) -> bool:
    """Whether a value is as near to the exact one as PyTorch's, or as near as the conditioning of the model lets it.

    Fused chains round less often than PyTorch's operations, hence differently.
    """
    if not value.is_floating_point() or not value.isfinite().all():
        return bool(program.precision) and not other.isfinite().all()  # in 16 bits a model may overflow

    def found_of(outcome: Outcome | None) -> Tensor | None:
        found = getattr(outcome, kind) if outcome is not None else []
        if program.precision:  # two steps, which the others repeat
            return found[index % len(found)].detach().double()
        return found[index].detach().double() if index < len(found) else None

    noise = _noise(program, value.dtype)
    value, other, reference = value.detach().double(), other.detach().double(), found_of(again(True))
    if reference is None:  # a cast that is none in fp64 gives its argument, which is written to
        return _size(value - other) <= 30 * noise * _size(other)
    # PyTorch's own error, of the inputs and of others that are as wrong as they may be. Of few elements, as of a number
    # that a softmax cancels, one error says little of what another may be: they are all rounding.
    noises = [noise * k / 3 for k in ((3, 6) if program.precision and value.numel() >= _MANY else range(1, 9))]
    errors = [found - reference for k in noises if (found := found_of(again(False, k))) is not None]
    own = max(map(_size, (other - reference, *errors)))
    if program.precision and not _has_kinks(program):  # of the worst element too
        worst = max(float(error.abs().max()) for error in (other - reference, *errors))
        if float((value - reference).abs().max()) > 5 * worst + 8 * noise * _size(reference):
            return False
    return _size(value - reference) <= max(1.1 * _size(other - reference), 2 * own) + 2 * noise * _size(reference)


def _size(value: Tensor) -> float:
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def check(program: Program, backend: Backend, pytorch: Backend = aot_saving, device: str = "cpu") -> str:
    """What is wrong with a program as `backend` compiles it; empty if nothing is, or where `pytorch` is wrong too."""
    torch.set_float32_matmul_precision(PRECISIONS[program.precision].matmul if program.precision else "highest")
    torch.manual_seed(0)
    eager = run(program, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _compare(program, device, backend, eager)
    warned = [str(item.message) for item in caught if "cutfuse" in str(item.message)]
    if warned:
        return "\n".join(warned)
    if not found or _compare(program, device, pytorch, eager):
        return ""
    # PyTorch fails likewise where an input is written that needs no gradient with one that does.
    return "" if "CopyBackwards" in found[0] else "\n".join(found)


def _compare(program: Program, device: str, backend: Backend, eager: Outcome) -> list[str]:
    try:
        outcome = run(program, device, backend, grad=not eager.error)
        found = find_differences(program, device, outcome, eager)
    except torch.OutOfMemoryError:
        return []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    if program.precision and not found and eager.repeats and not outcome.repeats:
        return ["two steps on one input differ"]
    return found


@pytest.fixture(autouse=True)
def _operators(request: pytest.FixtureRequest, one_thread: None) -> Iterator[None]:
    """Everything that can be fused is, and nothing that was compiled before is found again."""
    is_on_cpu = request.node.get_closest_marker("gpu") is None
    torch._dynamo.reset()
    with use_operators_everywhere() if is_on_cpu else contextlib.nullcontext(), warnings.catch_warnings():
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


def test_trained_models() -> None:
    programs = [make_trained_program(seed, CPU_SIZES) for seed in CPU_SEEDS]
    assert {program.precision for program in programs} == set(PRECISIONS)
    backend = FusingBackend()
    for program in programs:
        assert not check(program, backend), program.source
    assert backend.layers > len(CPU_SEEDS)
    text = "\n".join(program.source for program in programs)
    for word in ("chunk", "unbind", "torch.cat", "LayerNorm", "checkpoint", "softmax(-1) @", "cross_entropy"):
        assert word in text


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", range(SHARES))
def test_trained_models_on_a_gpu(share: int, request: pytest.FixtureRequest) -> None:
    def find(seed: int) -> str:
        program = make_trained_program(seed)
        found = check(program, "cutfuse", "inductor", "cuda")
        if torch.cuda.memory_reserved() > _KEPT_MEMORY:
            gc.collect()
            torch.cuda.empty_cache()
        return f"{program.source}\n\n{found}" if found else ""

    check_seeds(request, f"trained models, {share}", GPU_SEEDS[share::SHARES], find)


def planted(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """A backend that changes the matrices of graphs, forwards and backwards. change is also given the run's number."""
    runs = iter(range(1000))

    def compile_graph(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> list[Any]:
            number = next(runs)
            return [
                change(y, number) if isinstance(y, Tensor) and y.dim() > 1 and y.is_floating_point() else y
                for y in graph(*inputs)
            ]

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compile_graph, partition_fn=default_partition)


def unwritten(y: Tensor, number: int) -> Tensor:
    found = torch.empty_like(y)
    found[..., :-1] = y[..., :-1]
    return found


def one_element(y: Tensor, number: int) -> Tensor:
    found = y.clone()
    found[(-1,) * y.dim()] += y.square().mean().sqrt()
    return found


FAULTS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "unwritten": (unwritten, "differs in its values"),
    "one element": (one_element, "differs in its values"),
    "rounded": (lambda y, number: y.bfloat16().to(y.dtype), "differs in its values"),
    "wrong once": (lambda y, number: y * (1.1 if number == 2 * STEPS - 1 else 1), "differs in its values"),
    "not repeatable": (lambda y, number: y * (1 + number % 3 * 2.0**-23), "two steps on one input differ"),
    "failing": (lambda y, number: y.view(-1, y.shape[-1] + 1), "RuntimeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    change, message = FAULTS[name]
    assert message in check(make_trained_program(PLAIN, CPU_SIZES), planted(change))


def test_what_is_wrong_in_pytorchs_compiler_too_is_no_fault() -> None:
    wrong = planted(lambda y, number: y * 1.1)
    assert not check(make_trained_program(PLAIN, CPU_SIZES), wrong, wrong)


@pytest.mark.parametrize(("found", "is_rounding"), [(-4.0e-7, True), (4.0e-6, False)])
def test_a_gradient_that_cancels_is_compared_with_many_roundings(found: float, is_rounding: bool) -> None:
    """As of a number that is added before a softmax: PyTorch's is any of these, for an exact one of 1e-15."""
    roundings = iter([6.7e-7, 1.7e-7, 3.0e-8, 4.5e-8, -8.9e-8, -3.9e-7, 8.9e-8, 1.2e-7])

    def again(is_reference: bool, noise: float = 0.0) -> Outcome:
        gradient = torch.tensor([1e-15 if is_reference else next(roundings)])
        return Outcome(gradients=[gradient, gradient])

    program = make_trained_program(PLAIN, CPU_SIZES)
    own, other = torch.tensor([found]), torch.tensor([-1.8e-7])
    assert _is_rounding(program, "gradients", 0, own, other, again) == is_rounding
