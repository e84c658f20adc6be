"""The bits suite: whether rows have the bits that they have alone, and what batch invariance takes of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.format import MISSING, note_on, ratio
from bench.goals import MEAN, WORST, median, quotient
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import Table, times_columns
from bench.timing import interleave
from bench.workloads import PRECISIONS, Shape, dimensions, random_tensor

DEFAULT, INVARIANT = CONTENDERS = ("default", "batch-invariant")
EQUAL_SHARE = 1.0
MEAN_AT_MOST, WORST_AT_MOST = 1.04, 1.3
ROWS, SMALL_ROWS = (1, 8, 64, 256, 1024, 8192), (1, 8)
WEIGHTS, SMALL_WEIGHTS = ((4096, 4096), (14336, 4096), (1024, 3072)), ((32, 64),)  # N, K
MOST_ALONE = 64  # rows of a batch that are computed alone too


@dataclass(frozen=True)
class Layer:
    """What follows the product: a chain, which may read a residual like the result, and a reduction of rows."""

    name: str
    chain: Callable[..., Tensor] | None
    has_residual: bool = False
    reduction: str | None = None

    def build(self, shape: Shape, precision: str, device: torch.device) -> Callable[[slice], Tensor]:
        """The layer of some rows."""
        m, n, k = shape
        x, weight = (random_tensor(own, precision, device, seed) for seed, own in enumerate(((m, k), (n, k))))
        bias = random_tensor((n,), precision, device, 2)
        operands = [random_tensor((m, n), precision, device, 3)] if self.has_residual else []

        def call(rows: slice) -> Tensor:
            own = [operand[rows] for operand in operands]
            return cutfuse.linear(x[rows], weight, bias, epilogue=self.chain, operands=own, reduce=self.reduction)

        return call


LAYERS = (
    Layer("plain", None),
    Layer("gelu", F.gelu),
    Layer("silu, residual", lambda z, r: F.silu(z) + r, has_residual=True),
    Layer("tanh, logsumexp", torch.tanh, reduction="logsumexp"),
)


def equal_share(call: Callable[[slice], Tensor], rows: int) -> float:
    """Of some rows of a batch and of its halves, the share that has the same bits in a batch of its own."""
    whole = call(slice(0, rows))
    step = max(rows // MOST_ALONE, 1)
    parts = [slice(row, row + 1) for row in range(0, rows, step)]
    parts += [slice(0, rows // 2), slice(rows // 2, rows)] if rows > 1 else []
    return sum(torch.equal(call(part), whole[part]) for part in parts) / len(parts)


def prepare(layer: Layer, shape: Shape, precision: str, session: Session) -> Turn:
    """The share of equal rows in each mode, and what takes the times."""
    call = layer.build(shape, precision, session.device)
    entries: dict[str, dict[str, Any]] = {}

    def launch(name: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad(), cutfuse.batch_invariant(name == INVARIANT):
                return call(slice(0, shape[0]))

        return run

    def timed() -> Figures:
        launches = {name: launch(name) for name, entry in entries.items() if "equal" in entry}
        with PRECISIONS[precision].active():
            for name, timing in interleave(launches, session.clock, session.effort, session.seed).items():
                entries[name].update(asdict(timing))
        return {"contenders": entries}

    with PRECISIONS[precision].active():
        for name in session.contenders:
            try:
                with torch.no_grad(), cutfuse.batch_invariant(name == INVARIANT), cutfuse.specialization("now"):
                    entries[name] = {"equal": equal_share(call, shape[0])}
            except Exception as error:  # One contender's failure must not lose the other's.
                entries[name] = note_on(error)
    return timed


def bits_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Every layer for each weight, number of rows and precision."""
    del seed
    weights, rows = (SMALL_WEIGHTS, SMALL_ROWS) if small else (WEIGHTS[:1] if quick else WEIGHTS, ROWS)
    for layer, (n, k), m, precision in product(LAYERS, weights, rows, PRECISIONS):
        shape = m, n, k
        yield Case("linear", layer.name, dimensions(shape), precision, partial(prepare, layer, shape, precision))


def over_default(case: Figures) -> float | None:
    """The mode's time over the default's; None where one was not measured."""
    return quotient(median(case, INVARIANT), median(case, DEFAULT))


def share_of(case: Figures, contender: str = INVARIANT) -> float | None:
    """The share of rows of a contender that are equal; None where it was not measured."""
    share: float | None = case["contenders"].get(contender, {}).get("equal")
    return share


def goals() -> Iterator[Goal]:
    """Of all precisions together, and without a limit of each."""
    yield Goal("equal rows", "1", lambda case: True, share_of, EQUAL_SHARE, WORST, is_least=True)
    for name in ("", *PRECISIONS):

        def covers(case: Figures, name: str = name) -> bool:
            return name in ("", case["precision"])

        for measure, at_most in ((MEAN, MEAN_AT_MOST), (WORST, WORST_AT_MOST)):
            limit = None if name else at_most
            yield Goal(f"time, {name or 'all precisions'}", DEFAULT, covers, over_default, limit, measure)


def cases_table(results: Results) -> Table:
    """Every case with both times, and the shares of rows that are equal."""
    cases = results["cases"]
    shares = {
        f"{name}: equal rows": [MISSING if (own := share_of(case, name)) is None else f"{own:.2f}" for case in cases]
        for name in CONTENDERS
    }
    columns = {
        "layer": [case["variant"] for case in cases],
        "shape": [case["shape"] for case in cases],
        "precision": [case["precision"] for case in cases],
        "ratio": [ratio(over_default(case)) for case in cases],
        **times_columns(cases, {name: name for name in CONTENDERS}),
        **shares,
    }
    return Table("Every case", columns)


SUITE = Suite(
    name="bits",
    cases=lambda *kind: list(bits_cases(*kind)),
    goals=tuple(goals()),
    contenders=CONTENDERS,
    tables=lambda results: [cases_table(results)],
    about=(
        f"Equal rows: of up to {MOST_ALONE} single rows and the halves of a batch, the share with the same bits in a "
        "batch of its own.",
        "Ratio: the time of a whole batch within cutfuse.batch_invariant() over that outside of it.",
    ),
    left_out=lambda is_cuda, is_quick: () if is_cuda else (INVARIANT,),
    time_limit_s=600.0,
)
