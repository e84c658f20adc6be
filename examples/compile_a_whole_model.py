"""A language model that knows nothing of cutfuse, compiled with its layers fused, and what became of each product.

`python examples/compile_a_whole_model.py` predicts for an H200 where there is no GPU. `--save report.html` writes the
table as a page; `--compile` runs the compiled model too, which needs a compiler, and on a CPU a model of `--width 64`.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


class GatedMLP(nn.Module):
    """The MLP of a Llama: both halves of the gate come from one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(width, 8 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norms[0](x)).view(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Words in, logits of the next words out."""

    def __init__(self, words: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(words))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--card", choices=("H200", "H100"), default="H200", help="what to predict for without a GPU")
    parser.add_argument("--save", help="a file of HTML for the same table")
    parser.add_argument("--compile", action="store_true", help="run the compiled model too")
    options = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    # Without a GPU the explanation is a prediction, for which a model on the meta device needs neither memory nor time.
    with torch.device("cuda" if on_gpu else "cpu" if options.compile else "meta"):
        model = LanguageModel(options.words, options.width, options.depth, options.heads)
        words = torch.randint(options.words, (options.batch, options.tokens))
    model = model.to(getattr(torch, options.dtype)).eval()
    with torch.no_grad():
        found = cutfuse.explain_model(model, words, device=None if on_gpu else options.card)
        print(found)
        if options.save:
            found.save(options.save)
        if options.compile:
            expected = model(words)
            error = (torch.compile(model, backend="cutfuse")(words) - expected).norm() / expected.norm()
            print(f"relative difference to eager PyTorch: {error:.1e}")


if __name__ == "__main__":
    main()
