"""Random models that are trained: values and gradients may be as wrong as PyTorch's own and no more.

Memory is poisoned before each step and before its backward pass (`poison.py`): a result that nobody wrote, or that is
read at the wrong place, is no right one by chance. Planted faults are found in the models.
"""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from model_checks import PYTORCH_WARNINGS, aot_saving
from poison import poison
from random_models import CPU_SIZES, DEVICE_SIZES, PRECISIONS, Program, build, make_trained_program
from random_runs import check_seeds
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import cutfuse  # noqa: F401  # registers the backend
from cutfuse.compile import fusion
from cutfuse.compile.report import ProductReport
from cutfuse.native import use_operators_everywhere

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("one_thread")]

Backend = str | Callable[..., Any]
Results = dict[str, Tensor | None]

STEPS = 4  # on two inputs in turn
PYTORCH, OWN = "inductor", "cutfuse"
_FACTOR = 3.0  # of PyTorch's error, in tensors of _MANY elements and more
_PEAK_FACTOR = 5.0  # of the error of its worst element
_MANY = 64
_KEPT_MEMORY = 2 << 30  # what a process keeps of a device for its next model
# In what a gradient depends on a comparison.
JUMPS = ("relu", "hardswish", "abs()", "clamp", "elu(", "where", "maximum", "torch.min(", "softsign")


@dataclass
class Verdict:
    """Of a model. faults: a line each; pytorchs: where torch.compile is wrong itself; skipped: why it is not judged."""

    seed: int
    faults: list[str] = field(default_factory=list)
    pytorchs: list[str] = field(default_factory=list)
    skipped: str = ""
    products: int = 0
    tensors: int = 0


@dataclass
class _Errors:
    """Of a tensor, relative to the size of the exact one: of all elements together, and of the worst."""

    all: float = 0.0
    peak: float = 0.0

    def add(self, other: _Errors) -> None:
        self.all, self.peak = max(self.all, other.all), max(self.peak, other.peak)


def check(seed: int, device: str, pytorch: Backend = PYTORCH, own: Backend = OWN) -> Verdict:
    """Builds, runs and judges the model of a seed. pytorch, own: the backends of torch.compile that are compared."""
    program = make_trained_program(seed, CPU_SIZES if device == "cpu" else DEVICE_SIZES)
    verdict = Verdict(seed)
    fuse = fusion.fuse

    def fuse_and_count(module: fx.GraphModule) -> list[ProductReport]:
        found = fuse(module)
        verdict.products += len(found)
        return found

    with (
        _settings(program, device),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        patch.setattr(fusion, "fuse", fuse_and_count)
        warnings.simplefilter("always")
        try:
            _judge(program, device, pytorch, own, verdict)
        except torch.OutOfMemoryError as error:
            verdict.skipped = str(error).partition(".")[0]
    verdict.faults += sorted({str(item.message) for item in caught if "cutfuse" in str(item.message)})
    return verdict


@contextlib.contextmanager
def _settings(program: Program, device: str) -> Iterator[None]:
    """The program's precision, nothing compiled before; on a CPU also the operators, and the padding that GPUs have."""
    from torch._inductor import config

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[program.precision].matmul)
    is_cpu = device == "cpu"
    operators = use_operators_everywhere() if is_cpu else contextlib.nullcontext()
    try:
        with operators, config.patch(disable_padding_cpu=not is_cpu and config.disable_padding_cpu):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch._dynamo.reset()
        if not is_cpu and torch.cuda.memory_reserved() > _KEPT_MEMORY:
            gc.collect()
            torch.cuda.empty_cache()


class _Run:
    """A program's tensors and modules on a device.

    noise: by how much, relatively, those of the reference in fp64 are wrong; None: it is no reference.
    """

    def __init__(self, program: Program, device: str, noise: float | None = None) -> None:
        self.seed, self.device, self.is_reference = program.seed, device, noise is not None
        self.built = build(program, device, self.is_reference, noise or 0.0)
        self.names = program.names

    def step(self, call: Callable[..., Any], index: int) -> Results:
        """A training step, of whose two inputs one has the rows of the other in reverse: results and gradients."""
        inputs = [(t.flip(0) if not k and index else t).detach().clone() for k, t in enumerate(self.built.inputs)]
        for tensor, own in zip(inputs, self.built.inputs, strict=True):
            tensor.requires_grad_(own.requires_grad)
        leaves = dict(zip(self.names, inputs, strict=True))
        for place, module in enumerate(self.built.modules):
            module.zero_grad(set_to_none=True)
            leaves.update({f"{name} of module {place}": parameter for name, parameter in module.named_parameters()})
        if not self.is_reference:
            poison(self.device)
        results = list(call(*inputs))
        ends = [y for y in results if y.requires_grad]
        given = _arriving(ends, self.seed + index)
        if not self.is_reference:
            poison(self.device)
        if ends:
            torch.autograd.backward(ends, given)
        found: Results = {f"result {k}": y.detach() for k, y in enumerate(results)}
        found.update({f"gradient of {name}": leaf.grad for name, leaf in leaves.items()})
        return found


def _arriving(ends: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Gradients that arrive at the ends: the same in every type but for their rounding to bf16, the coarsest."""
    generator = torch.Generator(ends[0].device if ends else "cpu").manual_seed(seed)
    given = [torch.randn(y.shape, device=y.device, generator=generator) for y in ends]
    return [grad.bfloat16().clamp(-4, 4).to(y.dtype) for y, grad in zip(ends, given, strict=True)]


def _has_jumps(program: Program) -> bool:
    """Whether a gradient depends on a comparison."""
    return any(word in program.source for word in JUMPS)


def _judge(program: Program, device: str, pytorch: Backend, own: Backend, verdict: Verdict) -> None:
    unit = PRECISIONS[program.precision].unit
    # Few gradients of a comparison fall on the other side of it in fp32: noise has to be large to show what they are.
    noise = unit * (64 if _has_jumps(program) and program.precision == "fp32" else 2)
    exact = _steps_of(_Run(program, device, 0.0))
    allowed = {name: _Errors() for name in exact[0]}
    eager = _Run(program, device)
    for found in (_steps_of(_Run(program, device, noise)), _steps_of(eager)):
        _add_errors(allowed, found, exact)
    try:
        compiled = _compiled_steps(eager, pytorch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        verdict.pytorchs.append(f"torch.compile: {_line_of(error)}")
        compiled = []
    if compiled:
        _add_errors(allowed, compiled, exact)
        verdict.pytorchs += [f"torch.compile: {name} is not finite" for name in allowed if _is_unknown(allowed[name])]
    try:
        found = _compiled_steps(eager, own)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if compiled:
            verdict.faults.append(_line_of(error))
        return
    for name, errors in allowed.items():
        verdict.tensors += 1
        verdict.faults += _faults_of(program, name, errors, found, exact, compiled)


def _steps_of(run: _Run) -> list[Results]:
    return [run.step(run.built.model, index) for index in range(2)]


def _compiled_steps(run: _Run, backend: Backend) -> list[Results]:
    torch._dynamo.reset()
    compiled = torch.compile(run.built.model, backend=backend)
    return [run.step(compiled, step % 2) for step in range(STEPS)]


def _line_of(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _is_unknown(errors: _Errors) -> bool:
    return not math.isfinite(errors.all)


def _add_errors(allowed: dict[str, _Errors], steps: Sequence[Results], exact: Sequence[Results]) -> None:
    for k, step in enumerate(steps):
        for name, errors in allowed.items():
            errors.add(_errors_of(step[name], exact[k % 2][name]))


def _errors_of(found: Tensor | None, exact: Tensor | None) -> _Errors:
    """Infinite where a value is not finite, and where there is a gradient that the reference has not."""
    if found is None or exact is None:
        is_same = found is None and exact is None
        return _Errors() if is_same else _Errors(math.inf, math.inf)
    differences = found.double() - exact
    size, peak, scale = torch.stack(
        [differences.square().mean().sqrt(), differences.abs().amax(), exact.square().mean().sqrt()]
    ).tolist()
    if not math.isfinite(size + peak):
        return _Errors(math.inf, math.inf)
    scale = scale or 1.0
    return _Errors(size / scale, peak / scale)


def _faults_of(
    program: Program,
    name: str,
    allowed: _Errors,
    found: Sequence[Results],
    exact: Sequence[Results],
    compiled: Sequence[Results],
) -> list[str]:
    """What is wrong with one tensor of the four steps: a line, or none."""
    reference = exact[0][name]
    if reference is None or _is_unknown(allowed):
        return []
    unit = PRECISIONS[program.precision].unit
    # Errors of few elements differ by chance: of a single number PyTorch's may be next to nothing.
    chance = max(1.0, (_MANY / reference.numel()) ** 0.5)
    most = _FACTOR * chance * allowed.all + unit
    most_peak = _PEAK_FACTOR * chance * allowed.peak + 8 * unit
    errors = [_errors_of(step[name], exact[k % 2][name]) for k, step in enumerate(found)]
    wrong = [
        error.all > most or (error.peak > most_peak and not _has_jumps(program)) or math.isinf(error.all)
        for error in errors
    ]
    if any(wrong):
        texts = " ".join(f"{error.all:.1e}" for error in errors)
        peaks = " ".join(f"{error.peak:.1e}" for error in errors)
        return [
            f"{name} {tuple(reference.shape)}: errors of four steps {texts}, PyTorch's at most {allowed.all:.1e}; "
            f"of the worst element {peaks}, PyTorch's {allowed.peak:.1e}"
        ]
    first = found[0][name]
    if compiled:
        expected = compiled[0][name]
        if first is not None and expected is not None and first.dtype != expected.dtype:
            return [f"{name} is of {first.dtype}, torch.compile's of {expected.dtype}"]
        if _repeats(compiled, name) and not _repeats(found, name):
            return [f"{name} {tuple(reference.shape)}: two steps on one input differ, and torch.compile's do not"]
    return []


def _repeats(steps: Sequence[Results], name: str) -> bool:
    """Whether steps on one input give the same bits."""
    pairs = [(steps[k][name], steps[k + 2][name]) for k in range(2)]
    return all((a is None and b is None) or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


# Each precision is among them, and so are gates, attention, checkpoints and tied weights.
CPU_SEEDS = (6, 9, 23, 30, 31, 46)
GPU_SEEDS = range(32)
SHARES = len(GPU_SEEDS)  # that processes of pytest-xdist take side by side
PLAIN = 8  # in fp32, without jumps


def fused(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd behind the fusion pass, without a compiler."""
    fusion.fuse(module)
    return aot_saving(module, inputs)


@pytest.mark.parametrize("seed", CPU_SEEDS)
def test_a_model_is_as_near_to_fp64_as_pytorchs(seed: int) -> None:
    verdict = check(seed, "cpu", aot_saving, fused)
    assert [verdict.faults, verdict.pytorchs, verdict.skipped] == [[], [], ""]
    assert verdict.products
    assert verdict.tensors > 2


@pytest.mark.gpu
@pytest.mark.no_path("compiled models call operators")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", range(SHARES))
def test_models_on_a_gpu(share: int, request: pytest.FixtureRequest) -> None:
    def find(seed: int) -> str:
        faults = check(seed, "cuda").faults
        return "\n".join((make_trained_program(seed).source, *faults)) if faults else ""

    check_seeds(request, f"trained models, {share}", GPU_SEEDS[share::SHARES], find)


def test_models_are_of_every_kind() -> None:
    programs = [make_trained_program(seed, CPU_SIZES) for seed in range(60)]
    assert {program.precision for program in programs} == set(PRECISIONS)
    text = "\n".join(program.source for program in programs)
    for word in ("chunk", "split", "torch.cat", "transpose", "view", "LayerNorm", "checkpoint", "softmax(-1) @"):
        assert word in text


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
    "unwritten": (unwritten, "errors of four steps"),
    "one element": (one_element, "errors of four steps"),
    "rounded": (lambda y, number: y.bfloat16().to(y.dtype), "errors of four steps"),
    "wrong once": (lambda y, number: y * (1.1 if number == 2 * STEPS - 1 else 1), "errors of four steps"),
    "not repeatable": (lambda y, number: y * (1 + number % 3 * 2.0**-23), "two steps on one input differ"),
    "failing": (lambda y, number: y.view(-1, y.shape[-1] + 1), "RuntimeError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    change, message = FAULTS[name]
    verdict = check(PLAIN, "cpu", aot_saving, planted(change))
    assert any(message in fault for fault in verdict.faults), verdict


def test_what_is_wrong_in_pytorchs_compiler_too_is_no_fault() -> None:
    verdict = check(PLAIN, "cpu", planted(lambda y, number: y * 1.1), planted(lambda y, number: y * 1.1))
    assert not verdict.faults
    verdict = check(PLAIN, "cpu", planted(lambda y, number: y * float("nan")), aot_saving)
    assert not verdict.faults
    assert verdict.pytorchs
