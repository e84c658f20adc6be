"""An fp32 MLP trained twice from the same weights: in plain PyTorch, and as one node of the autograd graph.

Both reach the same loss, within what rounding makes of 100 steps. The times are of the machine that it runs on: without
a GPU and kernels, cutfuse runs PyTorch's operations, and there is nothing to gain. `--width 4096
--rows 4096` is a size for a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


def make_plain(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def make_fused(width: int) -> cutfuse.nn.MLP:
    """The same parameters under other names."""
    return cutfuse.nn.MLP(width, 4 * width, activation=F.gelu)


class Training:
    """A model that is trained, with the loss and the seconds of each step."""

    def __init__(self, model: nn.Module, width: int) -> None:
        self.model = model
        # The loss is a mean over the width, so the wider the model, the smaller the gradients.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=width / 32)
        self.losses: list[float] = []
        self.times: list[float] = []

    @property
    def seconds(self) -> float:
        """The median of a step, without the first two, which warm up."""
        return statistics.median(self.times[2:])

    def step(self, x: Tensor, target: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.times.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain, fused = make_plain(options.width).to(device), make_fused(options.width).to(device)
    with torch.no_grad():
        for theirs, ours in zip(plain.parameters(), fused.parameters(), strict=True):
            ours.copy_(theirs)
    x = torch.randn(options.rows, options.width, device=device)
    target = torch.sin(3 * x)

    runs = {name: Training(model, options.width) for name, model in (("PyTorch", plain), ("cutfuse", fused))}
    for _ in range(options.steps):
        for run in runs.values():  # in turns, so that a change of the machine's load is both's
            run.step(x, target)
    for name, run in runs.items():
        print(f"{name}: loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}, {1e3 * run.seconds:.2f} ms a step")
    theirs, ours = runs.values()
    assert theirs.losses[-1] < 0.95 * theirs.losses[0], "nothing was learnt"
    # Each step amplifies the rounding of those before it.
    torch.testing.assert_close(ours.losses[:10], theirs.losses[:10], rtol=1e-3, atol=0)
    torch.testing.assert_close(ours.losses[-1], theirs.losses[-1], rtol=5e-2, atol=0)
    print("The losses of the first 10 steps agree to 0.1%, and that of the last to 5%.")
    print(f"On this machine ({device}) a step of cutfuse takes {ours.seconds / theirs.seconds:.2f} of PyTorch's time.")
    if device == "cpu":
        print("On a CPU cutfuse runs PyTorch's operations: there is nothing to gain here.")


if __name__ == "__main__":
    main()
