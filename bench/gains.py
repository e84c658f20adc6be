"""Whom cutfuse helps, and by how much: the README's sentence and chart, from the committed results.

Each kind of work is compared with the fastest of PyTorch in the same run: eager, torch.compile, and its max-autotune
where that was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench import chain_suite
from bench.chain_suite import LINEAR, SIXTEEN_BITS
from bench.contenders import COMPILERS, EAGER, FUSED
from bench.fp32_suite import PRODUCT, speed_up
from bench.model_contenders import CUTFUSE, FASTER
from bench.model_suite import GPU, PRECISIONS, over
from bench.model_zoo import FORWARD, TRAINING
from bench.results import committed

SUITES = ("fp32", "models", "chains")  # whose results are read
NOTHING = 0.05  # a mean as near to 1 as this is no gain
NAMES = {
    (FORWARD, "fp32"): "whole models in fp32",
    (TRAINING, "fp32"): "their training in fp32",
    (FORWARD, "bf16"): "whole models in bf16",
    (TRAINING, "bf16"): "their training in bf16",
}


@dataclass(frozen=True)
class Gain:
    """A kind of work. times: how many times as fast as PyTorch cutfuse is, case by case, by the device's time."""

    name: str
    times: list[float]

    @property
    def mean(self) -> float:
        """The geometric mean of the cases."""
        return statistics.geometric_mean(self.times)


def gains() -> Iterator[Gain]:
    """Every kind of work that the committed results have."""
    products = [speed_up(FUSED, case) for case in committed("fp32")["cases"] if case["group"] == PRODUCT]
    yield Gain("fp32 products at full accuracy", [value for value in products if value is not None])
    models = committed("models")["cases"]
    for precision in reversed(PRECISIONS):
        for kind in (FORWARD, TRAINING):
            own = [case for case in models if (case["variant"], case["precision"]) == (kind, precision)]
            found = [value for case in own if (value := over(CUTFUSE, FASTER, GPU, case)) is not None]
            yield Gain(NAMES[kind, precision], [1 / value for value in found])
    layers = [
        case for case in committed("chains")["cases"] if case["group"] == LINEAR and case["precision"] in SIXTEEN_BITS
    ]
    ratios = [chain_suite.over_fastest(case, (EAGER, *COMPILERS)) for case in layers]
    yield Gain("layers in bf16 and fp16", [1 / value for value in ratios if value is not None])


def sentence() -> str:
    """Whom it helps, and whom not."""
    found = list(gains())
    helped, others = ([gain for gain in found if (gain.mean >= 1 + NOTHING) is is_gain] for is_gain in (True, False))
    gained, not_gained = (
        ", ".join(f"{gain.name} {gain.mean:.2f} ({min(gain.times):.2f} to {max(gain.times):.2f})" for gain in own)
        for own in (helped, others)
    )
    return (
        "On an H200, times as fast as the fastest of eager, torch.compile and, where that was measured, its "
        f"max-autotune, in geometric means (worst to best): {gained}; nothing gained yet: {not_gained or 'none'}; "
        "on GPUs other than Hopper's (H100, H200) nothing is fused into a product."
    )
