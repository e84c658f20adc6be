"""Runs the cases of a suite: build, check against fp64, time, and keep to the time limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.accuracy import WRONG_ABOVE, relative_error, rounding
from bench.cases import TARGET_DEVICE, Case
from bench.ceilings import Ceilings, ceilings_for, floor_us
from bench.contenders import CONTENDERS, Contender
from bench.contenders.fused import KEPT
from bench.progress import Progress
from bench.timing import Clock, Effort, Launch, clock_for, interleave, percentile
from bench.workloads import PRECISIONS, Workload

# First guess of what a case takes without compilers: tensors, the fp64 check of each contender, one second of timing.
CASE_GUESS_S = 2.0


@dataclass(frozen=True)
class Options:
    """How a suite is run."""

    device: torch.device
    contenders: tuple[str, ...]
    effort: Effort
    time_limit_s: float
    seed: int = 0


@dataclass
class Budget:
    """Decides what still fits. Compilers go first, the slowest soonest, so that every case keeps its eager figure."""

    limit_s: float
    began: float = field(default_factory=time.perf_counter)
    spent: dict[str, list[float]] = field(default_factory=dict)

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def note(self, name: str, seconds: float) -> None:
        """Remember what something took."""
        self.spent.setdefault(name, []).append(seconds)

    def expected(self, name: str, guess: float) -> float:
        """The median of what was noted, or the guess."""
        noted = self.spent.get(name)
        return percentile(noted, 0.5) if noted else guess

    def allows(self, contender: Contender, others: list[Contender], cases_left: int) -> bool:
        """Whether compiling fits beside this and the `cases_left` later cases with every cheaper compiler."""
        cheaper = [other for other in others if other.compile_guess_s < contender.compile_guess_s]
        base = self.expected("case", CASE_GUESS_S)
        compiling = sum(self.expected(other.name, other.compile_guess_s) for other in cheaper)
        own = self.expected(contender.name, contender.compile_guess_s)
        return self.elapsed() + own + base + cases_left * (base + compiling) <= self.limit_s

    def exhausted(self) -> bool:
        """Whether no further case is to be begun."""
        return self.elapsed() > self.limit_s


def one_line(error: BaseException) -> str:
    """An exception as a note in a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def check(case: Case, contender: Contender, workload: Workload, clock: Clock) -> tuple[dict[str, Any], Launch | None]:
    """Run a contender once (which compiles it) and compare with fp64: its entry, and the launch if it may be timed."""
    entry: dict[str, Any] = {}
    try:
        before = time.perf_counter()
        run = contender.prepare(workload)
        if run is None:
            return {}, None
        result = workload.collect(run.launch())
        clock.wait()
        if contender.compile_guess_s:
            entry["compile_s"] = time.perf_counter() - before
        entry["error"] = relative_error(result, run.reference)
        entry["rounding"] = rounding(result.dtype)
    except Exception as error:  # One contender's failure (out of memory, no compiler) must not lose the others'.
        return {"note": f"failed: {one_line(error)}"}, None
    if entry["error"] > WRONG_ABOVE[case.precision]:
        return {**entry, "note": f"wrong: relative error {entry['error']:.1e} against fp64"}, None
    return entry, run.launch


def judge(case: Case, entries: dict[str, dict[str, Any]], device_name: str) -> dict[str, Any]:
    """cutfuse's ratios to the others, whether its error is within eager's, and the verdicts on the targets."""
    medians = {name: entry["median_us"] for name, entry in entries.items() if "median_us" in entry}
    compiled = [medians[name] for name in ("compile", "max-autotune") if name in medians]
    ratios: dict[str, float] = {}
    if "cutfuse" in medians:
        rivals = {"compile": min(compiled, default=None), "mm": medians.get("mm"), "eager": medians.get("eager")}
        ratios = {name: medians["cutfuse"] / median for name, median in rivals.items() if median is not None}
    accurate = None
    if "error" in entries.get("cutfuse", {}) and "error" in entries.get("eager", {}):
        accurate = entries["cutfuse"]["error"] <= entries["eager"]["error"] + entries["cutfuse"]["rounding"]
    targets = []
    for target in case.targets if device_name == TARGET_DEVICE else ():
        ratio = ratios.get(target.against)
        verdict = "not measured" if ratio is None else "met" if ratio <= target.at_most else "missed"
        targets.append({**asdict(target), "verdict": verdict})
    return {"ratios": ratios, "accurate": accurate, "targets": targets}


def chosen_path(workload: Workload) -> tuple[str, list[str]]:
    """What cutfuse.explain says would run first, and why nothing faster does."""
    try:
        explanation = workload.explain()
    except Exception as error:  # The explanation is a label in the table; its failure is shown there.
        return f"explain failed: {one_line(error)}", []
    return ": ".join((explanation.path, *explanation.steps[:1])), list(explanation.reasons)


def contenders_of(case: Case, options: Options) -> list[Contender]:
    """Those of the run's that take part in `case`."""
    return [CONTENDERS[name] for name in options.contenders if case.contenders is None or name in case.contenders]


def run_case(
    case: Case, options: Options, clock: Clock, budget: Budget, cases_left: int, progress: Progress
) -> dict[str, Any]:
    """Build, check and time one case; its figures as JSON holds them."""
    contenders = contenders_of(case, options)
    entries: dict[str, dict[str, Any]] = {}
    launches: dict[str, Launch] = {}
    path, reasons = None, []
    with torch.no_grad(), PRECISIONS[case.precision].active():
        workload = case.build(options.device)
        for contender in contenders:
            if contender.compile_guess_s and not budget.allows(contender, contenders, cases_left):
                entries[contender.name] = {"note": "left out: time limit"}
                continue
            progress.stage(contender.label)
            entry, launch = check(case, contender, workload, clock)
            if "compile_s" in entry:
                budget.note(contender.name, entry["compile_s"])
            if entry:
                entries[contender.name] = entry
            if launch is not None:
                launches[contender.name] = launch
        if "cutfuse" in options.contenders:
            path, reasons = chosen_path(workload)
        if workload.kept and KEPT.name in entries:
            entries[KEPT.name]["path"], entries[KEPT.name]["reasons"] = chosen_path(workload.kept)
        progress.stage("timing")
        effort = options.effort.scaled(case.effort)
        for name, timing in interleave(launches, clock, effort, options.seed).items() if launches else ():
            entries[name].update(asdict(timing))
    return {"path": path, "reasons": reasons, "contenders": entries}


def release(device: torch.device) -> None:
    """Free what a case allocated, and what torch.compile keeps: its limit is eight graphs for one function."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_something(device: torch.device, progress: Progress) -> None:
    """Compile something small: the first compilation also starts the compiler's processes, which is no case's cost."""
    progress.stage("starting the compiler")
    try:
        torch.compile(torch.nn.functional.softplus)(torch.ones(64, device=device))
    except Exception as error:  # Without a C++ compiler, say: each case then shows it.
        progress.stage(one_line(error))


def start_compiler(options: Options, progress: Progress) -> None:
    """The same, where a contender compiles."""
    if any(CONTENDERS[name].compile_guess_s for name in options.contenders):
        compile_something(options.device, progress)


def run_suite(
    cases: list[Case],
    options: Options,
    device_name: str,
    progress: Progress,
    on_case: Callable[[dict[str, Any]], None],
) -> tuple[Ceilings | None, list[str]]:
    """Run `cases`, handing each one's figures to `on_case`; returns the floors' source and the cases left out."""
    clock = clock_for(options.device)
    budget = Budget(options.time_limit_s)
    ceilings = ceilings_for(device_name)
    start_compiler(options, progress)
    for index, case in enumerate(cases):
        if budget.exhausted():
            return ceilings, [case.title for case in cases[index:]]
        progress.begin(case.title)
        before = time.perf_counter()
        figures: dict[str, Any] = {
            "group": case.group,
            "variant": case.variant,
            "shape": case.shape,
            "precision": case.precision,
            "floor_us": floor_us(case.work, case.precision, ceilings),
        }
        try:
            # Time is held back for the later cases that take compilers too.
            alike = sum(later.contenders == case.contenders for later in cases[index + 1 :])
            figures.update(run_case(case, options, clock, budget, alike, progress))
        except Exception as error:  # Out of memory while building, say: later cases may still fit.
            figures.update({"path": None, "reasons": [], "contenders": {}, "note": f"failed: {one_line(error)}"})
        figures.update(judge(case, figures["contenders"], device_name))
        release(options.device)
        seconds = time.perf_counter() - before
        compiling = sum(entry.get("compile_s", 0.0) for entry in figures["contenders"].values())
        budget.note("case", seconds - compiling)
        figures["seconds"] = seconds
        on_case(figures)
        progress.finish(figures)
    return ceilings, []
