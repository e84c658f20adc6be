"""Whom cutfuse helps, and by how much: the README's table and chart, from the committed results.

Each kind of work is compared with the fastest of PyTorch in the same run: eager, torch.compile, and its max-autotune
where that was measured. Eager code is compared with eager PyTorch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from bench import host_suite
from bench.chain_suite import LINEAR, SIXTEEN_BITS
from bench.fp32_suite import PRODUCT
from bench.goals import Chosen, Value, cases_with, over
from bench.host_suite import over_pytorch
from bench.launches import COMPILERS, EAGER, FUSED, MM, SPECIALIZED
from bench.model_suite import CUTFUSE, FASTER, GPU, PRECISIONS
from bench.model_suite import over as over_all
from bench.model_zoo import FORWARD, TRAINING
from bench.results import committed

SUITES = ("fp32", "models", "chains", "host")  # whose results are read
NOTHING = 0.05  # a mean as near to 1 as this is no gain
NAMES = {
    (FORWARD, "fp32"): "whole models in fp32",
    (TRAINING, "fp32"): "training of whole models in fp32",
    (FORWARD, "bf16"): "whole models in bf16",
    (TRAINING, "bf16"): "training of whole models in bf16",
}
EAGER_NAMES = {
    host_suite.FORWARD.name: "eager MLP blocks in bf16, over eager PyTorch alone",
    host_suite.TRAINING_BLOCKS.name: "training of eager MLP blocks in bf16, over eager PyTorch alone",
}


@dataclass(frozen=True)
class Gain:
    """A kind of work. times: how many times as fast as PyTorch cutfuse is, case by case: by the device's time, and in
    eager code by the whole time."""

    name: str
    times: list[float]

    @property
    def mean(self) -> float:
        """The geometric mean of the cases."""
        return statistics.geometric_mean(self.times)


def gains() -> Iterator[Gain]:
    """Every kind of work that the committed results have."""

    def gain(name: str, suite: str, covers: Chosen, value_of: Value) -> Gain:
        ratios = [value_of(case) for case in committed(suite)["cases"] if covers(case)]
        return Gain(name, [1 / value for value in ratios if value is not None])

    yield gain('fp32 products, over PyTorch\'s at "highest"', "fp32", cases_with(group=PRODUCT), over((FUSED,), (MM,)))
    for precision in reversed(PRECISIONS):
        for kind in (FORWARD, TRAINING):
            own, value = cases_with(variant=kind, precision=precision), partial(over_all, CUTFUSE, FASTER, GPU)
            yield gain(NAMES[kind, precision], "models", own, value)
    layers = cases_with(group=LINEAR, precision=SIXTEEN_BITS)
    yield gain("layers in bf16 and fp16", "chains", layers, over((SPECIALIZED,), (EAGER, *COMPILERS)))
    for group, name in EAGER_NAMES.items():
        yield gain(name, "host", cases_with(group=group), over_pytorch)


def table() -> str:
    """Whom it helps, and whom not, best first."""
    rows = []
    for gain in sorted(gains(), key=lambda gain: -gain.mean):
        verdict = "faster" if gain.mean > 1 else "slower"
        verdict = verdict if abs(gain.mean - 1) >= NOTHING else "nothing gained"
        spread = f"{min(gain.times):.2f} to {max(gain.times):.2f}"
        rows.append(f"| {gain.name} | **{gain.mean:.2f}** | {spread} | {verdict} |")
    machine = committed("models")["machine"]
    return "\n".join(
        [
            "| On an H200, times as fast as the faster of eager PyTorch and torch.compile | mean | worst to best | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"Geometric means of drawn and of named cases, measured with cutfuse {machine['cutfuse']} and PyTorch "
            f"{machine['torch'].partition('+')[0]}. The eager MLP blocks have two `cutfuse.nn.FusedLinear` each; "
            "`cutfuse.nn.MLP` (`cutfuse.mlp`) is both layers in one. On GPUs other than Hopper's (H100, H200) "
            "nothing is fused into a product.",
        ]
    )
