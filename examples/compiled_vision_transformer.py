"""A small vision transformer with fused MLPs, compiled by torch.compile, beside the same one in plain PyTorch.

`python examples/compiled_vision_transformer.py`; `--backend inductor` compiles kernels too, which needs a compiler.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


class MLP(nn.Module):
    """The plain MLP of a block, with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.down(F.gelu(self.up(x)))


class FusedMLP(MLP):
    """The same parameters: GELU is in the first product's kernel, the residual in the second's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up = cutfuse.nn.FusedLinear(width, 4 * width, epilogue=F.gelu)
        self.down = cutfuse.nn.FusedLinear(4 * width, width, epilogue=torch.add)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.down(self.up(x), residual)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, mlp: type[MLP]) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return self.mlp(self.norms[1](x), x)


class VisionTransformer(nn.Module):
    """Square images to classes, by the mean of the tokens."""

    def __init__(self, mlp: type[MLP], size: int = 32, patch: int = 8, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, mlp) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile; aot_eager needs no compiler")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plain, fused = VisionTransformer(MLP).to(device), VisionTransformer(FusedMLP).to(device)
    fused.load_state_dict(plain.state_dict(), strict=True)
    compiled = torch.compile(fused, backend=options.backend, fullgraph=True)
    images = torch.randn(16, 3, 32, 32, device=device)

    with torch.no_grad():
        torch.testing.assert_close(compiled(images), plain(images), rtol=1e-4, atol=1e-4)
    print("The compiled model is one graph and gives the plain model's results.")

    labels = torch.randint(10, (16,), device=device)
    for model in (plain, compiled):
        F.cross_entropy(model(images), labels).backward()
    for (name, parameter), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=f"the gradient of {name}")
    print("Its gradients agree with the plain model's too.")

    with torch.no_grad():
        tokens = torch.randn(16, 16, 64, device=device)
        print(cutfuse.explain(fused.blocks[0].mlp.up, tokens))


if __name__ == "__main__":
    main()
