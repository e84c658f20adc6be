"""The models suite's cases: which model, what is measured of it, on which batch and in which precision."""

from __future__ import annotations

from collections.abc import Iterator

from bench.model_run import COMPILATION, ERRORS, Subject
from bench.model_zoo import FORWARD, MODELS, TRAINING, Model
from bench.suite import Case

PASSES = (FORWARD, TRAINING)
SMALL_BATCH, FULL_BATCH = "small", "full"
PRECISIONS = ("bf16", "fp32")
# A model's need of memory and time beside the others', roughly: the MLPs are small, and Llama has most parameters.
SIZES = {"DLRM bottom MLP": 0.1, "DLRM top MLP": 0.1, "Llama 1B": 2.0, "Llama 1B, one token": 2.0}
# First guesses of what a forward pass in bf16 takes: its compilations, of a large model and of a small one.
CASE_S, SMALL_CASE_S = 45.0, 5.0


def case_of(subject: Subject, load: str) -> Case:
    """A case; `load` tells a small batch from one that fills the card."""
    size = 4.0 if subject.kind == TRAINING else 2.0 if load == FULL_BATCH else 1.0
    weight = size * (2.0 if subject.precision == "fp32" else 1.0) * SIZES.get(subject.model.name, 1.0)
    return Case(
        subject.model.name,
        subject.kind,
        f"batch {subject.batch}",
        subject.precision,
        subject.prepare,
        weight * (SMALL_CASE_S if subject.is_small else CASE_S),
        {"load": load},
        subject.model.package,
    )


def cases_of(model: Model, is_small: bool) -> Iterator[Case]:
    """A model's cases: times first, the smaller batch before the larger."""
    batches = model.batches.reduced() if is_small else model.batches

    def case(kind: str, precision: str, batch: int, load: str) -> Case:
        return case_of(Subject(model, kind, precision, batch, is_small), load)

    for precision in PRECISIONS:
        yield case(FORWARD, precision, batches.small, SMALL_BATCH)
        yield case(FORWARD, precision, batches.forward, FULL_BATCH)
        if batches.training is not None:
            yield case(TRAINING, precision, batches.training, FULL_BATCH)
    yield case(COMPILATION, "bf16", batches.small, SMALL_BATCH)
    for precision in PRECISIONS:
        yield case(ERRORS, precision, batches.small, SMALL_BATCH)


def all_cases(is_small: bool) -> list[Case]:
    """Those of every model, installed or not, in the order in which they are run."""
    return [case for model in MODELS for case in cases_of(model, is_small)]
