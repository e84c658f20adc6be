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
# A model's need of memory and time beside the others', roughly: the MLPs are small, and Llama has most parameters.
SIZES = {"DLRM bottom MLP": 0.1, "DLRM top MLP": 0.1, "Llama 1B": 2.0, "Llama 1B, one token": 2.0}


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


def weight_of(case: Case) -> float:
    """A case's need of memory and time beside the others', roughly."""
    load = 4.0 if case.kind == TRAINING else 2.0 if case.load == FULL_BATCH else 1.0
    return load * (2.0 if case.precision == "fp32" else 1.0) * SIZES.get(case.model.name, 1.0)


def select(*, is_small: bool, filters: Sequence[str], shard: Shard) -> list[Case]:
    """The shard of those cases whose model is installed and whose title holds all of `filters`, case ignored.

    Shards need about as much time: each has as many heavy cases as the others.
    """
    wanted = [
        case
        for case in all_cases(is_small)
        if case.model.is_installed and all(text.lower() in case.title.lower() for text in filters)
    ]
    chosen = set(shard.of(sorted(wanted, key=weight_of, reverse=True)))
    return [case for case in wanted if case in chosen]
