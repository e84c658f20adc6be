"""The models suite's cases: which model, what is measured of it, on which batch and in which precision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.model_zoo import FORWARD, MODELS, TRAINING, Model

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


def key_of(figures: dict[str, Any]) -> tuple[str, ...]:
    """What tells a case's figures from another's."""
    return tuple(figures[name] for name in ("group", "variant", "shape", "precision"))


def title_of(figures: dict[str, Any]) -> str:
    """A case's title, of its figures."""
    return " ".join(key_of(figures))


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


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts, counted from 1."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "1/4"; raises ValueError for what is no part."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        index, count = (int(number) for number in found.groups()) if found else (0, 0)
        if not 1 <= index <= count:
            raise ValueError(f"a shard is written as 1/4 or 4/4, not {text}")
        return cls(index, count)

    def of(self, cases: Sequence[Case]) -> list[Case]:
        """Its cases: every `count`-th, so that each part has some of each model."""
        return list(cases[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def select(*, is_small: bool, filters: Sequence[str], shard: Shard) -> list[Case]:
    """The shard of those cases whose model is installed and whose title holds all of `filters`, case ignored."""
    wanted = [
        case
        for case in all_cases(is_small)
        if case.model.is_installed and all(text.lower() in case.title.lower() for text in filters)
    ]
    return shard.of(wanted)
