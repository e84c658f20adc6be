"""Whom cutfuse helps, and by how much: the README's table and chart, from the committed results.

Each kind of work is compared with the fastest of PyTorch in the same run: eager, torch.compile, and its max-autotune
where that was measured. Eager code is compared with eager PyTorch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from bench import host_suite
from bench.chain_suite import LINEAR, SIXTEEN_BITS
from bench.contenders import COMPILERS, EAGER, FUSED, SPECIALIZED
from bench.fp32_suite import PRODUCT, speed_up
from bench.goals import over as fastest_over
from bench.host_suite import over_pytorch
from bench.model_run import CUTFUSE, FASTER
from bench.model_suite import GPU, PRECISIONS, over
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
    products = [speed_up(FUSED, case) for case in committed("fp32")["cases"] if case["group"] == PRODUCT]
    yield Gain('fp32 products, over PyTorch\'s at "highest"', [value for value in products if value is not None])
    models = committed("models")["cases"]
    for precision in reversed(PRECISIONS):
        for kind in (FORWARD, TRAINING):
            own = [case for case in models if (case["variant"], case["precision"]) == (kind, precision)]
            found = [value for case in own if (value := over(CUTFUSE, FASTER, GPU, case)) is not None]
            yield Gain(NAMES[kind, precision], [1 / value for value in found])
    layers = [
        case for case in committed("chains")["cases"] if case["group"] == LINEAR and case["precision"] in SIXTEEN_BITS
    ]
    over_pytorchs = fastest_over((SPECIALIZED,), (EAGER, *COMPILERS))
    ratios = [over_pytorchs(case) for case in layers]
    yield Gain("layers in bf16 and fp16", [1 / value for value in ratios if value is not None])
    for group, name in EAGER_NAMES.items():
        found = [
            value for case in committed("host")["cases"] if case["group"] == group if (value := over_pytorch(case))
        ]
        yield Gain(name, [1 / value for value in found])


def verdict(gain: Gain) -> str:
    """What a mean says."""
    if gain.mean >= 1 + NOTHING:
        return "faster"
    return "slower" if gain.mean <= 1 - NOTHING else "nothing gained"


def table() -> str:
    """Whom it helps, and whom not, best first."""
    rows = [
        f"| {gain.name} | **{gain.mean:.2f}** | {min(gain.times):.2f} to {max(gain.times):.2f} | {verdict(gain)} |"
        for gain in sorted(gains(), key=lambda gain: -gain.mean)
    ]
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
