"""The suites by their names on the command line. Nothing here imports torch, so that help is there at once."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """Where a suite is, and what the command line says of it."""

    module: str
    help: str


SUITES = {
    "reference": Entry("bench.reference", "five models with and without a product"),
    "fp32": Entry("bench.fp32_suite", "fp32 products beside PyTorch's"),
    "chains": Entry("bench.chain_suite", "chains of operations behind products, interpreted and specialized"),
    "accuracy": Entry("bench.accuracy_suite", "fp32 products of every precision against fp64"),
    "host": Entry("bench.host_suite", "the host's time of a call, and stacks of layers from end to end"),
    "random": Entry("bench.random_suite", "layers drawn anew for each --seed, beside eager PyTorch"),
    "head": Entry("bench.head_suite", "the loss of language models' heads, in time and memory, beside other libraries"),
    "mlp": Entry("bench.mlp_suite", "whole MLPs: forward, training step and what a step keeps"),
    "bits": Entry("bench.bits_suite", "whether rows have their own bits and layers PyTorch's, and what that takes"),
    "fit": Entry("bench.fit_suite", "every way of computing a layer, for the tables by which the planner chooses"),
    "models": Entry("bench.model_suite", "whole models through torch.compile, with cutfuse and without"),
}
