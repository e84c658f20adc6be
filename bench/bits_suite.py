"""The bits suite: whether rows have the bits that they have alone, and what batch invariance takes of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.goals import MEAN, WORST, cases_with, every, over, value_of
from bench.launches import Checked, interleaved
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import Table, case_table, of, ratio_of, times_of
from bench.timing import Launch
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
    checked: Checked[Launch] = Checked(session)

    def check(name: str, entry: Figures) -> Launch:
        def launch() -> Tensor:
            with cutfuse.batch_invariant(name == INVARIANT):
                return call(slice(0, shape[0]))

        with cutfuse.batch_invariant(name == INVARIANT), cutfuse.specialization("now"):
            entry["equal"] = equal_share(call, shape[0])
        return launch

    for name in session.contenders:
        checked.add(name, partial(check, name))
    return partial(interleaved, checked)


def bits_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Every layer for each weight, number of rows and precision."""
    del seed
    weights, rows = (SMALL_WEIGHTS, SMALL_ROWS) if small else (WEIGHTS[:1] if quick else WEIGHTS, ROWS)
    for layer, (n, k), m, precision in product(LAYERS, weights, rows, PRECISIONS):
        shape = m, n, k
        yield Case("linear", layer.name, dimensions(shape), precision, partial(prepare, layer, shape, precision))


over_default = over((INVARIANT,), (DEFAULT,))


def goals() -> Iterator[Goal]:
    """Of all precisions together, and without a limit of each."""
    yield Goal("equal rows", "1", every, value_of(INVARIANT, "equal"), EQUAL_SHARE, WORST, is_least=True)
    for name in ("", *PRECISIONS):
        covers = cases_with(precision=name)
        for measure, at_most in ((MEAN, MEAN_AT_MOST), (WORST, WORST_AT_MOST)):
            limit = None if name else at_most
            yield Goal(f"time, {name or 'all precisions'}", DEFAULT, covers, over_default, limit, measure)


def cases_table(results: Results) -> Table:
    """Every case with both times, and the shares of rows that are equal."""
    columns = {
        "layer": "variant",
        "shape": "shape",
        "precision": "precision",
        "ratio": ratio_of(over_default),
        **times_of({name: name for name in CONTENDERS}),
        **{f"{name}: equal rows": of(name, "equal", "{:.2f}".format) for name in CONTENDERS},
    }
    return case_table("Every case", results["cases"], columns)


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
