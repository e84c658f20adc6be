"""Drop-in modules: a plain model's layers are replaced, its weights stay, and its results too.

`python examples/drop_in_modules.py`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


class Plain(nn.Module):
    """An MLP with a score for each row: what PyTorch runs as five kernels after its products."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.score = cutfuse.models.LinearSigmoidSum(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.down(F.gelu(self.up(x)))
        return self.score(x)


class Fused(Plain):
    """The same model with what follows each product inside of it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.up = cutfuse.nn.FusedLinear(width, hidden, epilogue=F.gelu)
        self.down = cutfuse.nn.FusedLinear(hidden, width, epilogue=lambda z, x: x + 0.5 * z)
        self.score = cutfuse.nn.LinearSigmoidSum(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.down(self.up(x), x))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain, fused = Plain(256, 1024).to(device), Fused(256, 1024).to(device)
    fused.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(64, 256, device=device)

    with torch.no_grad():
        expected, y = plain(x), fused(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    difference, largest = (y - expected).abs().max().item(), expected.abs().max().item()
    print(f"The results agree: the largest difference is {difference:.1e} of {largest:.1f}.")

    plain(x).sum().backward()
    fused(x).sum().backward()
    for (name, parameter), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-3, msg=f"the gradient of {name}")
    print("So do the gradients of every parameter.")

    with torch.no_grad():
        for name, layer, arguments in (("up", fused.up, (x,)), ("score", fused.score, (x,))):
            print(f"\n{name}:\n{cutfuse.explain(layer, *arguments)}")


if __name__ == "__main__":
    main()
