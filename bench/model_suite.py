"""The models suite: what it is held to, the verdicts, and the run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.case_loop import go_on_after, run_cases
from bench.cases import TARGET_DEVICE
from bench.host_suite import MEAN, WORST
from bench.model_cases import COMPILATION, ERRORS, FULL_BATCH, SMALL_BATCH, Case, all_cases, key_of
from bench.model_contenders import (
    COMPILE,
    CUTFUSE,
    CUTFUSE_GRAPHS,
    EAGER,
    FASTER,
    FASTER_GRAPHS,
    OR,
    Contender,
    quick_compilers,
)
from bench.model_fusion import fusion_rows
from bench.model_run import Options, run_case
from bench.model_zoo import FORWARD, PACKAGES, TRAINING, installed_version
from bench.progress import Progress
from bench.runner import Budget, one_line, release
from bench.timing import Effort, clock_for

# Figures of a contender, by their names in the results file.
GPU, WALL, COLD, GRAPHS, ERROR, GRADIENT_ERROR = "gpu_us", "wall_us", "cold_s", "graphs", "error", "gradient_error"
FIGURES = {
    GPU: "GPU time",
    WALL: "wall time",
    COLD: "compile time",
    GRAPHS: "graphs of five batch sizes",
    ERROR: "error of outputs",
    GRADIENT_ERROR: "error of gradients",
}

EFFORT, QUICK_EFFORT = Effort(5.0, 7, 100), Effort(0.1, 3, 20)
COMPILATIONS, QUICK_COMPILATIONS = 2, 1
TIME_LIMIT_S = 4 * 3600.0
# First guesses of what a case takes: four compilations of a large model, and of a small one.
CASE_GUESS_S, QUICK_CASE_GUESS_S = 90.0, 5.0


@dataclass(frozen=True)
class Goal:
    """A line of the table: a figure of `own` over that of `rival` is to be `at_most`, in one kind of cases.

    `rival`: the name of a contender, or of several between " or ", of which each case takes the least figure.

    `measure`: of the cases, the geometric mean or the worst. `precision` and `load` choose among them. A case with
    `or_more` is also within its limit where `own` exceeds `rival` by no more than that.
    """

    line: int
    kind: str
    figure: str
    own: Contender
    rival: str
    at_most: float
    measure: str = WORST
    precision: str = ""
    load: str = ""
    or_more: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """What a line of the results begins with."""
        names = ("line", "kind", "figure", "at_most", "or_more", "measure", "precision", "load")
        own = {name: getattr(self, name) for name in names}
        return {**own, "own": self.own.name, "rival": self.rival}


def timed_goals(figure: str) -> tuple[Goal, ...]:
    """The limits on times, of the device and of the wall clock alike."""
    return (
        Goal(1, FORWARD, figure, CUTFUSE, FASTER, 0.93, MEAN, "bf16"),
        Goal(1, FORWARD, figure, CUTFUSE, FASTER, 1.01, WORST, "bf16"),
        Goal(2, FORWARD, figure, CUTFUSE_GRAPHS, FASTER_GRAPHS, 0.93, MEAN, "bf16"),
        Goal(2, FORWARD, figure, CUTFUSE_GRAPHS, FASTER_GRAPHS, 1.01, WORST, "bf16"),
        Goal(3, FORWARD, figure, CUTFUSE, FASTER, 0.45, MEAN, "fp32", FULL_BATCH),
        Goal(3, FORWARD, figure, CUTFUSE, FASTER, 0.80, WORST, "fp32", FULL_BATCH),
        Goal(4, FORWARD, figure, CUTFUSE, FASTER, 1.01, WORST, "fp32", SMALL_BATCH),
        Goal(5, TRAINING, figure, CUTFUSE, FASTER, 0.96, MEAN, "bf16"),
        Goal(6, TRAINING, figure, CUTFUSE, FASTER, 0.45, MEAN, "fp32"),
    )


GOALS = (
    *sorted((*timed_goals(GPU), *timed_goals(WALL)), key=lambda goal: goal.line),
    Goal(7, COMPILATION, COLD, CUTFUSE, COMPILE.name, 1.10, or_more=1.0),
    Goal(8, COMPILATION, GRAPHS, CUTFUSE, COMPILE.name, 1.0),
    Goal(9, ERRORS, ERROR, CUTFUSE, EAGER.name, 1.1),
    Goal(10, ERRORS, GRADIENT_ERROR, CUTFUSE, EAGER.name, 1.1),
)


def covers(line: dict[str, Any], case: dict[str, Any]) -> bool:
    """Whether a case belongs to a line, both as JSON holds them."""
    chosen = all(line[key] in ("", case[key]) for key in ("precision", "load"))
    return chosen and line["kind"] == case["variant"]


def pair_of(line: dict[str, Any], case: dict[str, Any]) -> tuple[float, float] | None:
    """A case's figure of the line's `own` and the least of its `rival`; None where one was not measured."""
    names = (line["own"], *line["rival"].split(OR))
    own, *rivals = (case["contenders"].get(name, {}).get(line["figure"]) for name in names)
    return None if None in (own, *rivals) else (own, min(rivals))


def ratio_of(line: dict[str, Any], case: dict[str, Any]) -> float | None:
    """The one figure over the other; 1 where both are nothing."""
    pair = pair_of(line, case)
    if pair is None:
        return None
    own, rival = pair
    return own / rival if rival else 1.0 if own == 0 else math.inf


def share_of_limit(line: dict[str, Any], case: dict[str, Any]) -> float:
    """How much of what the line allows a measured case takes: above 1 it is too much."""
    own, rival = pair_of(line, case) or (0.0, 0.0)
    limit = line["at_most"] * rival
    if line["or_more"]:
        limit = max(limit, rival + line["or_more"])
    return own / limit if limit else 0.0 if own == 0 else math.inf


def place_of(case: dict[str, Any]) -> str:
    """A case in a line's cell."""
    return f"{case['group']}, {case['shape']}, {case['precision']}"


def expected_cases(line: dict[str, Any]) -> int:
    """How many cases of the whole suite a line has; models that are not trained have no gradients."""
    cases = [case for case in all_cases(is_small=False) if covers(line, case.as_dict())]
    if line["figure"] == GRADIENT_ERROR:
        cases = [case for case in cases if case.model.batches.training is not None]
    return len(cases)


def judged(goal: Goal, cases: Sequence[dict[str, Any]], gives_verdict: bool) -> dict[str, Any]:
    """A line as JSON holds it; "not measured" where a case is missing or failed."""
    line = goal.as_dict()
    found = [case for case in cases if covers(line, case) and ratio_of(line, case) is not None]
    ratio, where, is_met = None, "", False
    if found and goal.measure == MEAN:
        ratio = statistics.geometric_mean(ratio_of(line, case) or 0.0 for case in found)
        is_met = ratio <= goal.at_most
    elif found:
        worst = max(found, key=lambda case: share_of_limit(line, case))
        ratio, where, is_met = ratio_of(line, worst), place_of(worst), share_of_limit(line, worst) <= 1
    expected = expected_cases(line)
    verdict = None
    if gives_verdict:
        verdict = "not measured" if len(found) < expected else "met" if is_met else "missed"
    return {**line, "cases": len(found), "expected": expected, "ratio": ratio, "where": where, "verdict": verdict}


def is_incomplete(line: dict[str, Any]) -> bool:
    """Whether a line has no verdict because some of its cases, but not all, are missing or failed."""
    return line["verdict"] == "not measured" and line["cases"] > 0


def verdict_of(line: dict[str, Any]) -> str | None:
    """A line's verdict as it is shown; None where there is none."""
    if is_incomplete(line):
        return f"incomplete, {line['cases']} of {line['expected']}"
    return line["verdict"]


def judge(cases: Sequence[dict[str, Any]], device_name: str, quick: bool) -> list[dict[str, Any]]:
    """Every line of the table; there are verdicts on the target device, and none for small models."""
    gives_verdict = device_name == TARGET_DEVICE and not quick
    return [judged(goal, cases, gives_verdict) for goal in GOALS]


def complete(results: dict[str, Any]) -> None:
    """Work out what follows from the cases: their order, the lines, and the table of what was fused."""
    quick = results["settings"]["quick"]
    order = [key_of(case.as_dict()) for case in all_cases(quick)]
    results["cases"].sort(key=lambda case: order.index(key_of(case)))
    results["lines"] = judge(results["cases"], str(results["machine"]["device"]), quick)
    results["fusion"] = fusion_rows(results["cases"])


def settings(quick: bool, contenders: Sequence[Contender], effort: Effort, seed: int) -> dict[str, Any]:
    """How the figures are measured: what runs of one results file have in common."""
    return {
        "quick": quick,
        "seed": seed,
        "contenders": [asdict(contender) for contender in contenders],
        "seconds_per_case": effort.seconds,
        "rounds": [effort.least_rounds, effort.most_rounds],
        **{name: installed_version(name) for name in PACKAGES},
    }


def effort_of(quick: bool, rounds: int | None) -> Effort:
    """How long each case is measured."""
    effort = QUICK_EFFORT if quick else EFFORT
    return Effort(effort.seconds, rounds, rounds) if rounds else effort


def free(device: torch.device) -> None:
    """Free a case's memory, CUDA graphs' too: PyTorch 2.8 keeps those when its compilers are reset."""
    if device.type == "cuda":
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        torch.cuda.synchronize(device)
        reset_cudagraph_trees()
    release(device)


def run_suite(
    cases: Sequence[Case],
    options: Options,
    budget: Budget,
    progress: Progress,
    on_case: Callable[[dict[str, Any]], None],
    line_of: Callable[[dict[str, Any]], str],
) -> list[str]:
    """Run `cases`, handing each one's figures to `on_case`; returns the titles of those that the time did not allow.

    `line_of` says on one line what came out of a case.
    """
    clock = clock_for(options.device)

    def fits(case: Case) -> bool:
        guess = QUICK_CASE_GUESS_S if case.is_small else CASE_GUESS_S
        return budget.elapsed() + budget.expected(case.kind, guess) <= budget.limit_s

    def after(case: Case, seconds: float) -> None:
        budget.note(case.kind, seconds)
        go_on_after(case.title, lambda: free(options.device))

    return run_cases(
        cases, lambda case: run_case(case, options, clock, progress), fits, after, progress, on_case, line_of
    )


def start_compiler(device: torch.device) -> None:
    """Compile something small: the first compilation also starts the compiler's processes, which is no case's cost."""
    try:
        with quick_compilers(device):
            torch.compile(torch.nn.functional.softplus)(torch.ones(64, device=device))
    except Exception as error:  # Without a C++ compiler, say: each case then shows it.
        print(f"torch.compile does not work here: {one_line(error)}")
