"""Measures one case of the host suite: builds both calls, compares them with fp64, and times them in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from bench import specialized
from bench.accuracy import WRONG_ABOVE, frobenius_error
from bench.format import one_line
from bench.host_calls import Result
from bench.suite import Figures, Session
from bench.timing import Effort, Launch, in_rounds, spread, without_collector
from bench.workloads import PRECISIONS

HOST, WHOLE, IN_A_ROW = "host", "whole", "in a row"


@dataclass(frozen=True)
class Turn:
    """What a contender does when it is its turn: `warm_calls` that are not timed, then `timed_calls`.

    The device is waited for afterwards, so a turn begins with an empty queue. waits_inside: of how many timed calls the
    device is waited for within their time, and before them too; 0 leaves its time out.
    """

    warm_calls: int
    timed_calls: int
    waits_inside: int = 0


# A device queues about a thousand launches, and the host waits from then on. The largest call that is timed by the host
# alone, a training step of fp32, had 19 launches: 12 of them stay far below.
TURNS = {
    HOST: Turn(warm_calls=2, timed_calls=10),
    WHOLE: Turn(warm_calls=1, timed_calls=2, waits_inside=1),
    IN_A_ROW: Turn(warm_calls=2, timed_calls=20, waits_inside=20),
}


@dataclass(frozen=True)
class CallTime:
    """Microseconds of one call: the median and percentiles over turns, of each of which the mean counts."""

    median_us: float
    p10_us: float
    p90_us: float


def wait_for(device: torch.device) -> Callable[[], object]:
    """A function that returns when the device has done what the current stream holds."""
    # Cheaper for the host than torch.cuda.synchronize, which changes the device and back.
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None


def take_turn(call: Launch, turn: Turn, wait: Callable[[], object], now: Callable[[], int]) -> float:
    """The mean time of a timed call in microseconds; `now` gives nanoseconds."""
    for _ in repeat(None, turn.warm_calls):
        call()
    if turn.waits_inside:
        wait()
    in_a_row = turn.waits_inside or turn.timed_calls
    began = now()
    for _ in repeat(None, turn.timed_calls // in_a_row):
        for _ in repeat(None, in_a_row):
            call()
        if turn.waits_inside:
            wait()
    ended = now()
    wait()
    return 1e-3 * (ended - began) / turn.timed_calls


def time_in_turns(
    calls: Mapping[str, Launch],
    turn: Turn,
    wait: Callable[[], object],
    effort: Effort,
    seed: int,
    now: Callable[[], int] = time.perf_counter_ns,
) -> tuple[dict[str, CallTime], int]:
    """Give every call its turns, and say of how many rounds their times are."""

    def run_round(names: list[str]) -> dict[str, float]:
        return {name: take_turn(calls[name], turn, wait, now) for name in names}

    with without_collector():
        samples = in_rounds(calls, run_round, effort, seed, now=lambda: 1e-9 * now())
    return {name: CallTime(*spread(values)) for name, values in samples.items()}, len(next(iter(samples.values()), ()))


PYTORCH, CUTFUSE = "pytorch", "cutfuse"


@dataclass(frozen=True)
class Calls:
    """Without arguments: PyTorch's call, cutfuse's, and PyTorch's of the same tensors in fp64."""

    pytorch: Callable[[], Result]
    cutfuse: Callable[[], Result]
    exact: Callable[[], Result]


@dataclass(frozen=True)
class Group:
    """Cases that are alike: their name, what PyTorch runs, and which time is taken.

    With `compiles`, both calls are of functions that torch.compile compiled.
    """

    name: str
    rival: str
    time: str = HOST
    needs_grad: bool = False
    compiles: bool = False


def parts_of(result: Result) -> tuple[Tensor, ...]:
    """A call's results, without their graph."""
    return tuple(part.detach() for part in (result if isinstance(result, tuple) else (result,)))


def error_of(result: Result, exact: Result) -> float:
    """The largest relative error among a call's results; raises ValueError where their number or a shape differs."""
    parts, expected = parts_of(result), parts_of(exact)
    shapes, exact_shapes = ([tuple(part.shape) for part in own] for own in (parts, expected))
    if shapes != exact_shapes:
        raise ValueError(f"the results have shapes {shapes}, but should have {exact_shapes}")
    return max(frobenius_error(part, whole) for part, whole in zip(parts, expected, strict=True))


def note_on(call: Callable[[], Result], exact: Result, precision: str) -> str:
    """Why a call is not to be timed: it fails, or its result is wrong. Empty where it is right."""
    try:
        error = error_of(call(), exact)
    except Exception as failure:  # One contender's failure must not lose the other's figure.
        return f"failed: {one_line(failure)}"
    return f"wrong: relative error {error:.1e} against fp64" if error > WRONG_ABOVE[precision] else ""


def prepare(
    group: Group, precision: str, build: Callable[[torch.device], Calls], session: Session
) -> Callable[[], Figures]:
    """Build and check both calls; what times those that are right."""
    with torch.set_grad_enabled(group.needs_grad), PRECISIONS[precision].active():
        built = build(session.device)
        calls = {PYTORCH: built.pytorch, CUTFUSE: built.cutfuse}
        exact = built.exact()
        notes = {name: note_on(call, exact, precision) for name, call in calls.items()}
        specialized.wait()  # A kernel that is compiled meanwhile slows every call, and then runs in part of them.
    right = {name: call for name, call in calls.items() if not notes[name]}
    return partial(timed, group, precision, right, notes, session)


def timed(
    group: Group, precision: str, calls: Mapping[str, Launch], notes: dict[str, str], session: Session
) -> Figures:
    """Both calls' times; the case's figures as JSON holds them."""
    with torch.set_grad_enabled(group.needs_grad), PRECISIONS[precision].active():
        wait = wait_for(session.device)
        times, rounds = time_in_turns(calls, TURNS[group.time], wait, session.effort, session.seed)
    entries = {name: {"note": note} if note else asdict(times[name]) for name, note in notes.items()}
    return {"rounds": rounds, "contenders": entries}
