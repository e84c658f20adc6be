"""Measures one case of the host suite: builds both calls, compares them with fp64, and times them in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from bench import specialized
from bench.accuracy import WRONG_ABOVE, frobenius_error
from bench.format import one_line
from bench.host_calls import Result
from bench.host_timing import HOST, TURNS, time_in_turns, wait_for
from bench.suite import Figures, Session, Turn
from bench.timing import Launch
from bench.workloads import PRECISIONS

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


def prepare(group: Group, precision: str, build: Callable[[torch.device], Calls], session: Session) -> Turn:
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
