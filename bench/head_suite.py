"""The head suite: a linear layer to a vocabulary and its cross-entropy, in time and memory, beside other libraries."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.goals import MEAN, WORST, cases_with, over, share_of_error, value_of
from bench.launches import COMPILE, CONTENDERS, EAGER, FUSED, launch_case
from bench.suite import Case, Figures, Goal, Results, Suite
from bench.tables import Table, error, microseconds, of, ratio_of, table_of
from bench.timing import Effort
from bench.workloads import ALIGNED, CHUNK_ELEMENTS, Range, Run, Workload, dimensions, random_tensor

FORWARD, TRAINING = "forward", "training step"
IGNORED = -100
IGNORED_EVERY = 16  # rows: of prompts and padding
KEPT_BYTES = 1_400_000_000 - (1 << 28)  # of logits, beside a part of their gradient, where memory is not scarce
CASE_S = 12.0  # a first guess: five compilations, and the fp64 reference

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of x, weight and targets


@dataclass(frozen=True)
class Head:
    """A head with so many classes, for hidden states of so many features."""

    name: str
    classes: int
    width: int
    softcap: float | None = None

    def loss(self, x: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """As people write it, with the logits in fp32 or wider."""
        logits = F.linear(x, weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return F.cross_entropy(logits, target, ignore_index=IGNORED, reduction=reduction)

    def tensors(self, tokens: int, precision: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """x, a weight scaled so that logits are about normal, and targets of which some are ignored."""
        x = random_tensor((tokens, self.width), precision, device, seed=1)
        weight = random_tensor((self.classes, self.width), precision, device, seed=2).mul_(self.width**-0.5)
        generator = torch.Generator(device=device).manual_seed(3)
        target = torch.randint(self.classes, (tokens,), device=device, generator=generator)
        target[IGNORED_EVERY - 1 :: IGNORED_EVERY] = IGNORED
        return x, weight, target

    def exact(self, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """What a step gives in fp64, a few rows at a time."""
        wide = weight.detach().double().requires_grad_(weight.requires_grad)
        step, count = max(1, CHUNK_ELEMENTS // self.classes), (target != IGNORED).sum()
        total, gradients = wide.new_zeros(()), []
        for rows, targets in zip(x.detach().split(step), target.split(step), strict=True):
            part = rows.double().requires_grad_(x.requires_grad)
            loss = self.loss(part, wide, targets, reduction="sum") / count
            total += loss.detach()
            if x.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
                gradients.append(part.grad)
        return (total, torch.cat(gradients), wide.grad) if x.requires_grad else (total,)

    def build(self, tokens: int, precision: str, needs_grad: bool, device: torch.device) -> Workload:
        """The loss, with the gradients of x and weight where `needs_grad`, of every contender."""
        x, weight, target = self.tensors(tokens, precision, device)
        x.requires_grad_(needs_grad)
        weight.requires_grad_(needs_grad)
        exact = self.exact(x, weight, target)

        def run_of(name: str) -> Run | None:
            loss = LOSSES[name](self)
            return None if loss is None else Run(step_of(loss, x, weight, target), exact)

        steps = (step_of(loss, x, weight, target) for loss in (self.loss, fused(self)))
        return Workload((), *steps, exact, extras={name: partial(run_of, name) for name in LOSSES})


def compiled(head: Head, backend: str = "inductor") -> Loss:
    """The plain loss under torch.compile, for these sizes."""
    return torch.compile(head.loss, fullgraph=True, dynamic=False, backend=backend)


def chunked(head: Head) -> Loss | None:
    """PyTorch's own form in chunks of rows, from 2.13 on."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None or head.softcap is not None:
        return None
    return partial(F.linear_cross_entropy, ignore_index=IGNORED, options=options())


def liger(head: Head) -> Loss:
    """Liger's Triton kernel, which other trainers call."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, softcap=head.softcap)
    return lambda x, weight, target: loss(weight, x, target)


def cut_cross_entropy(head: Head) -> Loss:
    """Apple's Triton kernels."""
    from cut_cross_entropy import linear_cross_entropy

    return partial(linear_cross_entropy, ignore_index=IGNORED, softcap=head.softcap)


def quack(head: Head) -> Loss | None:
    """quack's kernels in CuTe."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return None if head.softcap is not None else partial(chunked_linear_cross_entropy, ignore_index=IGNORED)


def fused(head: Head, **options: int) -> Loss:
    """cutfuse's function."""
    return partial(cutfuse.linear_cross_entropy, ignore_index=IGNORED, softcap=head.softcap, **options)


LARGE, BACKEND = "cutfuse-large", "compile-cutfuse"
CHUNKED, LIGER, CUT, QUACK = "chunked", "liger", "cut-cross-entropy", "quack"
# What gives each contender's loss of a head, or None where it has none.
LOSSES: dict[str, Callable[[Head], Loss | None]] = {
    EAGER: lambda head: head.loss,
    COMPILE: compiled,
    CHUNKED: chunked,
    LIGER: liger,
    CUT: cut_cross_entropy,
    QUACK: quack,
    FUSED: fused,
    LARGE: partial(fused, kept_bytes=KEPT_BYTES),
    BACKEND: partial(compiled, backend="cutfuse"),
}
PACKAGES = {LIGER: "liger_kernel", CUT: "cut_cross_entropy", QUACK: "quack"}  # that have to be installed
OWN = (FUSED, LARGE)
NAMES = tuple(LOSSES)
RIVALS = (EAGER, COMPILE, CHUNKED, LIGER, CUT, QUACK)


def step_of(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call that gives the loss, and where x needs one the gradients of x and weight."""

    def step() -> tuple[Tensor, ...]:
        y = loss(x, weight, target)
        return (y.detach(), *torch.autograd.grad(y, (x, weight))) if x.requires_grad else (y,)

    return step


HEADS = (
    Head("Llama 3", 128256, 4096),
    Head("Qwen 3", 151936, 2048),
    Head("Gemma 2", 256000, 2304, softcap=30.0),
    Head("GPT-2", 50304, 768),
)
TOKENS = (8192, 2048, 16384, 1024)  # those that most goals are about come first
FP32_HEAD, FP32_TOKENS = Head("fp32", 50304, 2048), 4096
DRAWN = "drawn"
DRAWN_TOKENS, DRAWN_CLASSES, DRAWN_WIDTHS = Range(1, 16384), Range(4096, 262144), Range(256, 5120)
DRAWN_COUNT = 8


def drawn_heads(seed: int) -> Iterator[tuple[Head, int]]:
    """Heads at random with their tokens, the same ones for a seed; half of them have a softcap."""
    generator = random.Random(seed)
    for number in range(DRAWN_COUNT):
        multiple = 1 if number % 4 == 3 else ALIGNED
        classes = DRAWN_CLASSES.draw(generator, multiple)
        width = DRAWN_WIDTHS.draw(generator, ALIGNED)
        softcap = generator.choice((20.0, 30.0, 50.0)) if number % 2 else None
        yield Head(DRAWN, classes, width, softcap), DRAWN_TOKENS.draw(generator, 1)


def case_of(head: Head, tokens: int, variant: str, precision: str) -> Case:
    """One number of tokens."""
    key = (head.name, variant, dimensions((tokens, head.width, head.classes)), precision)
    needs_grad, about = variant == TRAINING, {"tokens": tokens}
    build = partial(head.build, tokens, precision, needs_grad)
    return launch_case(key, build, NAMES, weighs=True, seconds=CASE_S, about=about, needs_grad=needs_grad)


def head_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """The heads of known models, fp32, and heads drawn by the seed."""
    if small:
        for head in (Head("plain", 300, 16), Head("with softcap", 301, 24, softcap=30.0)):
            for variant in (FORWARD, TRAINING):
                yield case_of(head, 24, variant, "bf16")
        yield case_of(Head("fp32", 300, 16), 24, TRAINING, "fp32")
        return
    for tokens in TOKENS[:1] if quick else TOKENS:
        for head in HEADS:
            for variant in (FORWARD, TRAINING):
                yield case_of(head, tokens, variant, "bf16")
    yield case_of(FP32_HEAD, FP32_TOKENS, TRAINING, "fp32")
    for number, (head, tokens) in enumerate([] if quick else drawn_heads(seed)):
        yield case_of(head, tokens, (FORWARD, TRAINING)[number // 2 % 2], ("bf16", "fp16")[number // 4 % 2])


# In the faster of cutfuse's ways over torch.compile, and over the fastest other contender.
over_compiled, over_best = over(OWN, (COMPILE,)), over(OWN, RIVALS)


def goals() -> Iterator[Goal]:
    """Times and memory of the largest head, and ratios over all."""
    tokens, llama = TOKENS[0], HEADS[0].name

    def first(case: Figures) -> bool:
        return bool(case["tokens"] == tokens)

    of_many = cases_with(first, group=[head.name for head in HEADS], variant=TRAINING)
    forward, step = (cases_with(first, group=llama, variant=variant) for variant in (FORWARD, TRAINING))
    name = f"{llama}, {tokens} tokens"
    yield Goal(f"{name}, forward", "", forward, value_of(FUSED, "median_us", 1e3), 11.6, unit=" ms")
    for contender, label, at_most_ms, at_most_gb in ((FUSED, "", 48.0, 0.35), (LARGE, ", logits kept", 37.0, 1.4)):
        yield Goal(f"{name}, step{label}", "", step, value_of(contender, "median_us", 1e3), at_most_ms, unit=" ms")
        memory = value_of(contender, "extra_bytes", 1e9)
        yield Goal(f"{name}, step{label}, extra memory", "", step, memory, at_most_gb, unit=" GB")
    memory = over((FUSED,), (COMPILE,), "peak_bytes")
    yield Goal(f"steps of {tokens} tokens", "torch.compile", of_many, over_compiled, 0.88)
    yield Goal(f"steps of {tokens} tokens, peak memory", "torch.compile", of_many, memory, 0.25)
    yield Goal("every case", "the fastest other", cases_with(), over_best, 1.0, MEAN)
    yield Goal("every case", "the fastest other", cases_with(), over_best, 1.05, WORST)
    yield Goal("fp32 step", "torch.compile", cases_with(precision="fp32"), over_compiled, 0.30)
    error = partial(share_of_error, own=FUSED, base=EAGER)
    yield Goal("error against fp64", "eager's error and one rounding", cases_with(), error, 1.0)


def tables() -> Iterator[Callable[[Results], Table]]:
    """A table of each figure, with every contender."""
    for title, name, text in (
        ("Times in microseconds", "median_us", microseconds),
        ("Peak of memory in GB, with the gradients", "peak_bytes", lambda value: f"{value / 1e9:.3g}"),
        ("Error of the loss", "error", error),
        ("Error of the worst gradient", "gradient_error", error),
    ):
        ratios = {"cutfuse / fastest other": ratio_of(over_best)} if name == "median_us" else {}
        yield table_of(title, {**ratios, **{CONTENDERS[own].label: of(own, name, text) for own in NAMES}})


def left_out(is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """On a CPU the compilers take too long, and kernels in Triton are for GPUs; other packages may not be there."""
    del is_quick
    missing = [name for name, package in PACKAGES.items() if not importlib.util.find_spec(package)]
    return tuple(missing) if is_cuda else (COMPILE, BACKEND, LIGER, CUT, QUACK)


SUITE = Suite(
    name="head",
    cases=head_cases,
    goals=tuple(goals()),
    contenders=NAMES,
    left_out=left_out,
    tables=tuple(tables()),
    about=(
        "GPU times are medians in microseconds of one interleaved run; errors are relative, against fp64. Memory is "
        "counted without x and weight; extra memory also without the gradients. A training step gives the loss and the "
        "gradients of x and weight.",
        f"One row of {IGNORED_EVERY} is ignored. Eager and torch.compile have the logits in fp32, as models write it.",
    ),
    plots=("head",),
    effort=Effort(2.0, 5, 50),
    time_limit_s=540.0,
)
