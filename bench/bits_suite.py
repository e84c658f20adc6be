"""The bits suite: whether rows have the bits that they have alone, and layers those of PyTorch's own operations, and
what batch invariance and `rounding="eager"` take of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

import cutfuse
from bench.chains import FULL, Chain, Operand, operands_of
from bench.goals import MEAN, WORST, Value, cases_with, figure_of, over, value_of
from bench.launches import check_all, interleaved
from bench.random_suite import FORWARD, SIZES, SMALL_SIZES, Layer, drawn_layers
from bench.random_suite import ROWS as DRAWN_ROWS
from bench.random_suite import SMALL_ROWS as FEW_ROWS
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import Table, of, ratio_of, table_of, times_of
from bench.timing import Launch
from bench.workloads import PRECISIONS, Shape, dimensions, layer_tensors

DEFAULT, INVARIANT, ROUNDED, PYTORCH = CONTENDERS = ("default", "batch-invariant", "eager rounding", "PyTorch")
ALIKE, ROUNDING = "linear", "rounding"  # groups
EQUAL_SHARE = 1.0
MEAN_AT_MOST, WORST_AT_MOST = 1.04, 1.3
DRAWN, FEW_DRAWN = 400, 16  # layers
DRAWN_EFFORT = 0.2
ROWS, SMALL_ROWS = (1, 8, 64, 256, 1024, 8192), (1, 8)
WEIGHTS, SMALL_WEIGHTS = ((4096, 4096), (14336, 4096), (1024, 3072)), ((32, 64),)  # N, K
MOST_ALONE = 64  # rows of a batch that are computed alone too


# What follows the product, if anything does.
CHAINS = (
    Chain("plain", 0, (), ("return z",)),
    Chain("gelu", 1, (), ("return F.gelu(z)",)),
    Chain("silu, residual", 2, (Operand(FULL),), ("return F.silu(z) + a",)),
    Chain("tanh, logsumexp", 1, (), ("return torch.tanh(z)",), "logsumexp"),
)


def equal_share(call: Callable[[slice], Tensor], rows: int) -> float:
    """Of some rows of a batch and of its halves, the share that has the same bits in a batch of its own."""
    whole = call(slice(0, rows))
    step = max(rows // MOST_ALONE, 1)
    parts = [slice(row, row + 1) for row in range(0, rows, step)]
    parts += [slice(0, rows // 2), slice(rows // 2, rows)] if rows > 1 else []
    return sum(torch.equal(call(part), whole[part]) for part in parts) / len(parts)


def prepare(chain: Chain, shape: Shape, precision: str, session: Session) -> Turn:
    """The share of equal rows in each mode, and what takes the times."""
    x, weight, bias = layer_tensors(shape, precision, session.device)
    operands = operands_of(chain, *shape[:2], precision, session.device)
    epilogue = chain.function if chain.ops else None

    def call(rows: slice) -> Tensor:
        own = [operand[rows] for operand in operands]
        return cutfuse.linear(x[rows], weight, bias, epilogue=epilogue, operands=own, reduce=chain.reduce)

    def check(name: str, entry: Figures) -> Launch:
        def launch() -> Tensor:
            with cutfuse.batch_invariant(name == INVARIANT):
                return call(slice(0, shape[0]))

        with cutfuse.batch_invariant(name == INVARIANT), cutfuse.specialization("now"):
            entry["equal"] = equal_share(call, shape[0])
        return launch

    names = [name for name in session.contenders if name in (DEFAULT, INVARIANT)]
    return partial(interleaved, check_all(session, names, check))


def prepare_drawn(layer: Layer, precision: str, session: Session) -> Turn:
    """Whether a layer has the bits of PyTorch's own operations and a kernel computes it, and what takes the times."""
    tensors = layer.tensors(precision, session.device)

    def check(name: str, entry: Figures) -> Launch:
        call = layer.eager if name == PYTORCH else layer.fused

        def launch() -> Tensor:
            with cutfuse.rounding("eager" if name == ROUNDED else "once"):
                return call(*tensors)

        with cutfuse.specialization("now"):
            y = launch()
        if name == ROUNDED:
            entry["equal"] = float(torch.equal(y, layer.eager(*tensors)))
            x, weight, bias, operands = layer.given(*tensors)
            with cutfuse.rounding("eager"):
                epilogue = layer.chain.function
                found = cutfuse.explain(cutfuse.linear, x, weight, bias, epilogue=epilogue, operands=operands)
            entry["kernel"] = float(found.path != "composed")
        return launch

    names = [name for name in session.contenders if name != INVARIANT]
    return partial(interleaved, check_all(session, names, check), DRAWN_EFFORT)


def bits_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Every layer for each weight, number of rows and precision, and layers drawn by the seed."""
    weights, rows = (SMALL_WEIGHTS, SMALL_ROWS) if small else (WEIGHTS[:1] if quick else WEIGHTS, ROWS)
    for chain, (n, k), m, precision in product(CHAINS, weights, rows, PRECISIONS):
        shape = m, n, k
        yield Case(ALIKE, chain.name, dimensions(shape), precision, partial(prepare, chain, shape, precision))
    ranges = (FEW_ROWS, SMALL_SIZES) if small else (DRAWN_ROWS, SIZES)
    for number, drawn in enumerate(drawn_layers(FORWARD, FEW_DRAWN if small or quick else DRAWN, *ranges, seed=seed)):
        own, name = ("bf16", "fp16")[number % 2], f"{number:03} {drawn.label}"
        yield Case(ROUNDING, name, dimensions(drawn.shape), own, partial(prepare_drawn, drawn, own))


over_default = over((INVARIANT,), (DEFAULT,))
rounded_over_default, rounded_over_pytorch = over((ROUNDED,), (DEFAULT,)), over((ROUNDED,), (PYTORCH,))


def by_kernel(value: Value) -> Value:
    """A goal's value, of the layers alone that a kernel of cutfuse computes, and not PyTorch's operations."""
    return lambda case: value(case) if figure_of(case, ROUNDED, "kernel") == 1 else None


def goals() -> Iterator[Goal]:
    """Of all precisions together, and without a limit of each."""
    yield Goal(
        "equal rows", "1", cases_with(group=ALIKE), value_of(INVARIANT, "equal"), EQUAL_SHARE, WORST, is_least=True
    )
    for name in ("", *PRECISIONS):
        covers = cases_with(group=ALIKE, precision=name)
        for measure, at_most in ((MEAN, MEAN_AT_MOST), (WORST, WORST_AT_MOST)):
            limit = None if name else at_most
            yield Goal(f"time, {name or 'all precisions'}", DEFAULT, covers, over_default, limit, measure)
    drawn = cases_with(group=ROUNDING)
    yield Goal("PyTorch's bits", "1", drawn, value_of(ROUNDED, "equal"), EQUAL_SHARE, WORST, is_least=True)
    # No limit, as which layers a kernel computes is known with their times alone.
    for rival, value in ((DEFAULT, rounded_over_default), (PYTORCH, rounded_over_pytorch)):
        for measure in (MEAN, WORST):
            yield Goal("eager rounding, by a kernel", rival, drawn, by_kernel(value), None, measure)


def shares_table(results: Results) -> Table:
    """Of the layers that were drawn, the shares with PyTorch's bits and that a kernel computes."""
    shares = {}
    for title, name in (("PyTorch's bits", "equal"), ("by a kernel", "kernel")):
        values = [found for case in results["cases"] if (found := figure_of(case, ROUNDED, name)) is not None]
        if values:
            shares[title] = [f"{sum(values) / len(values):.4f} of {len(values)}"]
    return Table("Layers with eager rounding", shares)


COLUMNS = {
    "ratio": ratio_of(lambda case: over_default(case) or rounded_over_default(case)),
    "over PyTorch": ratio_of(rounded_over_pytorch),
    **times_of({name: name for name in CONTENDERS}),
    **{f"{name}: equal rows": of(name, "equal", "{:.2f}".format) for name in (DEFAULT, INVARIANT)},
    "PyTorch's bits": of(ROUNDED, "equal", "{:.0f}".format),
    "kernel": of(ROUNDED, "kernel", "{:.0f}".format),
}
SUITE = Suite(
    name="bits",
    cases=bits_cases,
    goals=tuple(goals()),
    contenders=CONTENDERS,
    tables=(shares_table, table_of("Every case", COLUMNS)),
    about=(
        f"Equal rows: of up to {MOST_ALONE} single rows and the halves of a batch, the share with the same bits in a "
        "batch of its own.",
        "Ratio: the time of a whole batch within cutfuse.batch_invariant(), or of a layer drawn by the seed within "
        'cutfuse.rounding("eager"), over that outside of it.',
    ),
    left_out=lambda is_cuda, is_quick: () if is_cuda else (INVARIANT,),
    time_limit_s=1200.0,
)
