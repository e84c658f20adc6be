"""Activations that PyTorch lacks, composed of the epilogue language's operations: one with parameters, one without.

`python examples/compose_an_operation.py`
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse


def star_relu(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale * relu(z)^2 + shift`: its two parameters are learnt, so they are operands."""
    return scale * F.relu(z).square() + shift


def serf(z: Tensor) -> Tensor:
    """`z * erf(log(1 + exp(z)))`: three functions of the table."""
    return z * torch.erf(F.softplus(z))


class StarReLULinear(cutfuse.nn.FusedLinear):
    """A layer with the activation's own parameters."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, epilogue=star_relu)
        self.scale = torch.nn.Parameter(torch.tensor(0.8944))
        self.shift = torch.nn.Parameter(torch.tensor(-0.4472))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # it passes its operands itself
        return super().forward(x, self.scale, self.shift)


def show_derivatives() -> None:
    """Derivatives come from the rows of the table that the expression is made of: nobody writes a backward pass."""
    x, w, b = torch.randn(16, 32), torch.randn(24, 32, requires_grad=True), torch.randn(24)
    torch.testing.assert_close(cutfuse.linear(x, w, b, epilogue=serf), serf(F.linear(x, w, b)), rtol=1e-4, atol=1e-4)
    (ours,) = torch.autograd.grad(cutfuse.linear(x, w, b, epilogue=serf).sum(), w)
    (theirs,) = torch.autograd.grad(serf(F.linear(x, w, b)).sum(), w)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    print("serf: values and gradients agree with PyTorch's. Its program:")
    print(cutfuse.explain(x, w.detach(), b, epilogue=serf).program.pretty())


def show_parameters() -> None:
    """Gradients flow to the operands: the activation learns."""
    layer = StarReLULinear(32, 24)
    x = torch.randn(16, 32)
    expected = star_relu(F.linear(x, layer.weight, layer.bias), layer.scale, layer.shift)
    y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    parameters = [layer.scale, layer.shift, layer.weight]
    ours, theirs = (torch.autograd.grad(result.square().sum(), parameters) for result in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    print("\nstar_relu: the gradients of scale and shift agree too.")


def show_the_limit() -> None:
    """What the table cannot spell needs a row of it: see "Adding an op" in CONTRIBUTING.md."""
    try:
        cutfuse.Epilogue(torch.special.bessel_j0)
    except cutfuse.EpilogueError as error:
        print(f"\nA function that the table lacks:\n{error}")
    else:
        raise AssertionError("bessel_j0 is a row of the table now: name another function here")


def main() -> None:
    torch.manual_seed(0)
    show_derivatives()
    show_parameters()
    show_the_limit()


if __name__ == "__main__":
    main()
