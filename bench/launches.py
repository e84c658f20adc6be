"""Who runs a workload: PyTorch's ways, cutfuse's, and what bounds a chain behind a product.

Then what measures one case on a device: builds it, checks its contenders against fp64, and times them in turns; or
counts the memory of their training steps.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

import cutfuse
from bench.machine import device_name
from bench.suite import Case, Figures, Session, Turn
from bench.tables import note_on, one_line
from bench.timing import TURNS, Launch, give_back, interleave, time_in_turns, wait_for
from bench.workloads import (
    Exact,
    Result,
    Run,
    Work,
    Workload,
    ceilings_for,
    errors_of,
    floor_us,
    note_errors,
    note_wrong,
    parts_of,
    product_reference,
    rounding,
    squares,
)

# The same kernels as mode "max-autotune" without its CUDA graphs. With graphs each launch first copies its inputs to
# fixed addresses (6.4 GB for the sigmoid), and the host time that graphs save is in no contender's figure.
MAX_AUTOTUNE_MODE = "max-autotune-no-cudagraphs"

MM, EAGER, PYTORCH, COMPILE, AUTOTUNE = "mm", "eager", "pytorch", "compile", "max-autotune"
FUSED, KEPT = "cutfuse", "cutfuse-kept"
INTERPRETED, SPECIALIZED = "interpreted", "specialized"
# What bounds a chain behind a product, where a target names it: the chain alone over z, and the product alone.
POINTWISE, PRODUCT = "pointwise", "product"
MODES = {INTERPRETED: "off", SPECIALIZED: "now"}  # of specialization
CUTFUSE = (FUSED, KEPT, *MODES)
COMPILERS = (COMPILE, AUTOTUNE)


LONGEST_WAIT_S = 120.0  # for what is compiled in the background

T = TypeVar("T")


def in_mode(mode: str, call: Callable[..., T]) -> Callable[..., T]:
    """The call with the process in a mode of specialization: a backward pass runs in another thread than its caller."""

    def run(*arguments: object) -> T:
        before = cutfuse.get_specialization()
        cutfuse.set_specialization(mode)
        try:
            return call(*arguments)
        finally:
            cutfuse.set_specialization(before)

    return run


def bare_product(workload: Workload) -> Run | None:
    """`torch.mm` of the product alone: what cuBLAS takes before anything follows."""
    if workload.product is None:
        return None
    x, weight = workload.product
    return Run(lambda: torch.mm(x, weight.t()), product_reference(x, weight))


def compiled(workload: Workload, mode: str | None = None) -> Run:
    """The plain PyTorch code under torch.compile, compiled for these sizes by the first call."""
    function = torch.compile(workload.eager, fullgraph=True, dynamic=False, mode=mode)
    return Run(partial(function, *workload.arguments), workload.exact)


def max_autotuned(workload: Workload) -> Run:
    """torch.compile with kernels chosen by measuring."""
    # Its tables of candidates would fill the screen.
    torch._inductor.config.autotune_num_choices_displayed = 0
    return compiled(workload, MAX_AUTOTUNE_MODE)


def run_in_mode(mode: str, workload: Workload) -> Run:
    """cutfuse's call in a mode of specialization."""
    return Run(in_mode(mode, partial(workload.fused, *workload.arguments)), workload.exact)


@dataclass(frozen=True)
class Contender:
    """`prepare` gives the call for a workload that has none of the contender's name, or None where there is none."""

    name: str
    label: str
    prepare: Callable[[Workload], Run | None] = lambda workload: None

    def run(self, workload: Workload) -> Run | None:
        """The call for a workload; None where there is nothing to run."""
        own = workload.extras.get(self.name)
        return own() if own else self.prepare(workload)


def slow_compilers(is_cuda: bool, is_quick: bool) -> tuple[str, ...]:
    """Those that take too long on a CPU, or in a quick run."""
    return () if is_cuda and not is_quick else (AUTOTUNE,) if is_cuda else COMPILERS


# In the tables' order.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(MM, "torch.mm", bare_product),
        Contender(EAGER, "eager", lambda own: Run(partial(own.eager, *own.arguments), own.exact)),
        Contender(PYTORCH, PYTORCH, lambda own: Run(partial(own.eager, *own.arguments), own.exact)),
        Contender(COMPILE, "torch.compile", compiled),
        Contender(AUTOTUNE, "max-autotune", max_autotuned),
        Contender("chunked", "torch in chunks"),
        Contender("liger", "Liger"),
        Contender("cut-cross-entropy", "cut-cross-entropy"),
        Contender("quack", "quack"),
        Contender(FUSED, "cutfuse", lambda own: Run(partial(own.fused, *own.arguments), own.exact, own.explain)),
        Contender(KEPT, "cutfuse, planes kept"),
        Contender("cutfuse-large", "cutfuse, logits kept"),
        Contender("compile-cutfuse", 'backend="cutfuse"'),
        *(Contender(name, name, partial(run_in_mode, mode)) for name, mode in MODES.items()),
        Contender(POINTWISE, "pointwise alone"),
        Contender(PRODUCT, "product alone"),
    )
}


# A row or column whose own norm is small is held to this share of the rows' or columns' mean.
LEAST_SHARE = 0.1
# More than the contenders before have left of free memory of this size.
SPARE_RESULTS = 4
# First guesses of what a case takes: tensors, the fp64 check of each contender, a second of timing; and its compilers.
CASE_S = 2.0
COMPILERS_S = {"compile": 5.0, "max-autotune": 40.0}


def poison(result: Any) -> None:
    """Fill a call's result with NaN, and spare memory of its size: the allocator hands one of them out next."""
    for part in parts_of(result):
        spare = [torch.empty_like(part) for _ in range(SPARE_RESULTS)]
        for memory in (part.detach(), *spare):
            memory.fill_(torch.nan)


def worst_ratio(differences: Tensor, norms: Tensor) -> float:
    """The largest relative error, of squared norms."""
    least = LEAST_SHARE**2 * norms.mean()
    error = (differences / norms.clamp_min(least)).max().sqrt().item()
    return error if math.isfinite(error) else math.inf


def worst_line_error(result: Result, exact: Exact) -> float:
    """The relative error of the worst row or column of a matrix: a wrong tile of 64 columns stands out in its rows.

    Of anything else it is the error of the whole.
    """
    if not isinstance(result, Tensor) or result.dim() != 2:
        return max(errors_of(result, exact))
    columns = [torch.zeros(result.shape[1], dtype=torch.float64, device=result.device) for _ in range(2)]
    rows: list[list[Tensor]] = [[], []]
    for both in squares(result, exact):
        for own, column, square in zip(rows, columns, both, strict=True):
            own.append(square.sum(1))
            column += square.sum(0)
    by_row = worst_ratio(*(torch.cat(own) for own in rows))
    return max(by_row, worst_ratio(*columns))


def chosen_path(explain: Callable[[], Any]) -> str:
    """What cutfuse.explain says would run first."""
    try:
        explanation = explain()
    except Exception as error:  # The explanation is a label in the results; its failure is shown there.
        return f"explain failed: {one_line(error)}"
    return ": ".join((explanation.path, *explanation.steps[:1]))


@dataclass
class Checked(Generic[T]):
    """A case's contenders: their entries, and of each that is right what is timed."""

    session: Session
    entries: dict[str, Figures] = field(default_factory=dict)
    timed: dict[str, T] = field(default_factory=dict)

    def add(self, name: str, check: Callable[[Figures], T | None]) -> None:
        """Have `check` compile a contender, run it and fill its entry; it gives what is timed, if there is anything."""
        entry: Figures = {}
        try:
            found = check(entry)
        except Exception as error:  # One contender's failure (out of memory, no compiler) must not lose the others'.
            entry, found = note_on(error), None
        if entry or found is not None:
            self.entries[name] = entry
        if "note" in entry:
            found = None
            give_back(self.session.device)  # what it has left, which nothing holds any more
        elif found is not None:
            self.timed[name] = found

    def figures(self, times: Mapping[str, Figures]) -> Figures:
        """The case's figures as JSON holds them. A contender may have failed while it was timed."""
        for name, own in times.items():
            if "note" not in self.entries[name]:
                self.entries[name].update(own)
        return {"contenders": self.entries}


def check_all(session: Session, names: Iterable[str], check: Callable[[str, Figures], T | None]) -> Checked[T]:
    """The contenders of these names, with the name given to `check` too."""
    checked: Checked[T] = Checked(session)
    for name in names:
        checked.add(name, partial(check, name))
    return checked


def interleaved(checked: Checked[Launch], effort: float = 1.0, turn: str = "") -> Figures:
    """Time the launches of a case, in `effort` of the session's time for one, or as calls of a turn of `TURNS`."""
    session, own = checked.session, checked.session.effort.scaled(effort)
    if turn:
        wait = wait_for(session.device)
        return checked.figures(time_in_turns(checked.timed, TURNS[turn], wait, own, session.seed))
    return checked.figures(interleave(checked.timed, session.clock, own, session.seed))


def guarded(launch: Launch, entry: Figures) -> Launch:
    """The launch, whose failure while the others hold memory too is noted, and which then does nothing."""

    def run() -> None:
        if "note" not in entry:
            try:
                launch()
            except torch.OutOfMemoryError as failure:
                entry.update(note_on(failure))

    return run


@dataclass(frozen=True)
class Comparison:
    """What the contenders of a case run, as `launch_case` has it."""

    build: Callable[[torch.device], Workload]
    precision: str
    contenders: Sequence[str]
    work: Work | None
    effort: float
    turn: str
    weighs: bool

    def check(self, workload: Workload, session: Session, contender: Contender, entry: Figures) -> Launch | None:
        """Run a contender once, which compiles it, and compare with fp64, cutfuse's chains again over memory of NaN.

        Gives its launch, if it has any; what cutfuse warns of is noted.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = time.perf_counter()
            run = contender.run(workload)
            if run is None:
                return None
            result = run.launch()
            session.clock.wait()
            if contender.name in COMPILERS:
                entry["compile_s"] = time.perf_counter() - before
            note_errors(entry, errors_of(result, run.exact), self.precision)
            entry["rounding"] = rounding(parts_of(result)[0].dtype)
            del result
            if "note" not in entry and contender.name in MODES:
                poison(run.launch())
                note_wrong(entry, worst_line_error(run.launch(), run.exact), self.precision, "of a row or column")
        if contender.name in CUTFUSE and caught:
            entry["warned"] = str(caught[-1].message)[:200]
        if run.explain and "note" not in entry:
            entry["path"] = chosen_path(run.explain)
        if not self.weighs:
            return run.launch
        cutfuse.wait(LONGEST_WAIT_S)
        run.launch()
        if session.device.type == "cuda":
            weigh(entry, run.launch, Meter(session.device))
        return guarded(run.launch, entry)

    def prepare(self, session: Session) -> Turn:
        """Build a case, and compile and check its contenders; what times them.

        max-autotune chooses its kernels by timing them, so it is compiled in the turn in which the case is timed.
        """
        names = [name for name in self.contenders if name in session.contenders]
        check = partial(self.check, self.build(session.device), session)
        checked: Checked[Launch] = Checked(session)
        for name in names:
            if name != AUTOTUNE:
                checked.add(name, partial(check, CONTENDERS[name]))
        # Without it nothing holds the exact results any more, whose memory the others may need.
        later = [partial(check, CONTENDERS[AUTOTUNE])] if AUTOTUNE in names else []

        def timed() -> Figures:
            for own in later:
                checked.add(AUTOTUNE, own)
            # Until its epilogues are compiled a call interprets them, and their compiling slows every other call.
            cutfuse.wait(LONGEST_WAIT_S)
            entries = interleaved(checked, self.effort, self.turn)["contenders"]
            figures: Figures = {"contenders": {name: entries[name] for name in CONTENDERS if name in entries}}
            if self.work is not None:
                figures["floor_us"] = floor_us(self.work, self.precision, ceilings_for(device_name(session.device)))
            return figures

        return timed


def launch_case(
    key: tuple[str, str, str, str],
    build: Callable[[torch.device], Workload],
    contenders: Sequence[str],
    work: Work | None = None,
    effort: float = 1.0,
    turn: str = "",
    weighs: bool = False,
    **about: Any,
) -> Case:
    """A case whose contenders are calls on one workload. `effort`: the share of a case's time that it is given.

    turn: of `TURNS`, where calls are timed as their caller sees them. weighs: the memory of each is measured too, and
    one that has none left is noted. about: the case's other fields.
    """
    seconds = CASE_S + sum(guess for name, guess in COMPILERS_S.items() if name in contenders)
    own = Comparison(build, key[3], tuple(contenders), work, effort, turn, weighs)
    return Case(*key, own.prepare, **{"seconds": seconds * effort, **about})


@dataclass(frozen=True)
class Meter:
    """PyTorch's own counters of a device's memory, in bytes."""

    device: torch.device

    def allocated(self) -> int:
        """What tensors hold, once the device has done its work."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most that tensors held since."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def weigh(entry: Figures, launch: Callable[[], Any], meter: Meter) -> None:
    """Note the peak of memory beside the inputs, and also beside the results."""
    before = meter.allocated()
    meter.restart_peak()
    results = launch()
    entry["peak_bytes"] = meter.peak() - before
    entry["extra_bytes"] = entry["peak_bytes"] - sum(result.nbytes for result in parts_of(results))


Forward = Callable[[], Tensor]
# Of contenders, their forward passes and the tensors that need gradients; the gradient that arrives.
Steps = tuple[Mapping[str, tuple[Forward, Sequence[Tensor]]], Tensor]
WARM_UP_STEPS = 2


def step_bytes(forward: Forward, leaves: Sequence[Tensor], grad: Tensor, meter: Meter) -> dict[str, int]:
    """What a step has kept after its forward pass, and its peak. `leaves` need gradients, and `grad` arrives."""
    before = meter.allocated()
    meter.restart_peak()
    y = forward()
    kept = meter.allocated() - before
    torch.autograd.grad(y, leaves, grad)
    return {"kept_bytes": kept, "peak_bytes": meter.peak() - before}


def memory_of(build: Callable[[torch.device], Steps], counts_result: bool, meter: Meter) -> Figures:
    """The figures of every contender's step once it is warm.

    Counted from what is allocated before the step: without the parameters and the inputs.
    """
    steps, grad = build(meter.device)
    found = {}
    for name, (forward, leaves) in steps.items():
        for _ in range(WARM_UP_STEPS):
            step_bytes(forward, leaves, grad, meter)
        cutfuse.wait()  # for kernels that are compiled in the background
        found[name] = step_bytes(forward, leaves, grad, meter)
        if not counts_result:
            found[name]["kept_bytes"] -= grad.untyped_storage().nbytes()
    return {"contenders": found}


def memory_case(
    key: tuple[str, str, str, str], build: Callable[[torch.device], Steps], counts_result: bool = True
) -> Case:
    """A case of the memory of training steps, by a GPU's counters. counts_result: whether a step keeps its result."""

    def own(session: Session) -> Turn:
        return partial(memory_of, build, counts_result, Meter(session.device))

    return Case(*key, own, needs_grad=True)
