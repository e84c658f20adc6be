"""The models suite's cases: which model, what is measured of it, on which batch and in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.model_zoo import FORWARD, MODELS, TRAINING, Model
from bench.run_files import Shard, title_of
from bench.run_files import key_of as key_of

COMPILATION, ERRORS = "compilation", "errors"
PASSES = (FORWARD, TRAINING)
SMALL_BATCH, FULL_BATCH = "small", "full"
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True)
class Case:
    """What is measured of a model: the time of a forward pass or of a training step, its compilation, or its errors.

    `is_small`: a model of less depth and width. `load` tells a small batch from one that fills the card.
    """

    model: Model
    kind: str
    precision: str
    batch: int
    load: str
    is_small: bool

    @property
    def title(self) -> str:
        """What `--filter` looks in."""
        return title_of(self.as_dict())

    @property
    def shape(self) -> str:
        """The batch as tables print it."""
        return f"batch {self.batch}"

    def as_dict(self) -> dict[str, Any]:
        """What its figures begin with."""
        return {
            "group": self.model.name,
            "variant": self.kind,
            "shape": self.shape,
            "precision": self.precision,
            "load": self.load,
        }


def cases_of(model: Model, is_small: bool) -> Iterator[Case]:
    """A model's cases: times first, the smaller batch before the larger."""
    batches = model.batches.reduced() if is_small else model.batches
    for precision in PRECISIONS:
        yield Case(model, FORWARD, precision, batches.small, SMALL_BATCH, is_small)
        yield Case(model, FORWARD, precision, batches.forward, FULL_BATCH, is_small)
        if batches.training is not None:
            yield Case(model, TRAINING, precision, batches.training, FULL_BATCH, is_small)
    yield Case(model, COMPILATION, "bf16", batches.small, SMALL_BATCH, is_small)
    for precision in PRECISIONS:
        yield Case(model, ERRORS, precision, batches.small, SMALL_BATCH, is_small)


def all_cases(is_small: bool) -> list[Case]:
    """Those of every model, installed or not, in the order in which they are run."""
    return [case for model in MODELS for case in cases_of(model, is_small)]


def select(*, is_small: bool, filters: Sequence[str], shard: Shard) -> list[Case]:
    """The shard of those cases whose model is installed and whose title holds all of `filters`, case ignored."""
    wanted = [
        case
        for case in all_cases(is_small)
        if case.model.is_installed and all(text.lower() in case.title.lower() for text in filters)
    ]
    return shard.of(wanted)
