"""Trains a small language model whose loss needs no logits, beside the same model with the logits in memory.

`python examples/train_language_model.py`; `--words 128256 --width 2048 --tokens 2048` shows on a GPU what it saves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse


class LanguageModel(nn.Module):
    """Gives the hidden states from which a head, tied to the embedding, guesses the next word."""

    def __init__(self, words: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        return self.norm(self.block(self.embedding(words), src_mask=mask, is_causal=True))


def loss_with_logits(model: LanguageModel, words: Tensor) -> Tensor:
    logits = model.head(model(words[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def loss_without_logits(model: LanguageModel, words: Tensor) -> Tensor:
    return cutfuse.linear_cross_entropy(model(words[:, :-1]), model.head.weight, words[:, 1:])


def train(
    loss_of: Callable[[LanguageModel, Tensor], Tensor], words: Tensor, options: argparse.Namespace
) -> list[float]:
    torch.manual_seed(0)
    model = LanguageModel(options.words, options.width).to(words.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=2000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Text in which every word says what the next one is.
    first = torch.randint(options.words, (options.batch, 1), generator=torch.Generator().manual_seed(0))
    words = ((first + 7 * torch.arange(options.tokens + 1)) % options.words).to(device)

    curves = {}
    for name, loss_of in (("with logits", loss_with_logits), ("without", loss_without_logits)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        curves[name] = train(loss_of, words, options)
        peak = f", at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB" if device.type == "cuda" else ""
        print(f"{name:>12}: loss {curves[name][0]:.3f} -> {curves[name][-1]:.3f}{peak}")

    usual, own = (torch.tensor(curve) for curve in curves.values())
    torch.testing.assert_close(own, usual, rtol=2e-2, atol=1e-3)
    if own[-1] > 0.7 * own[0]:
        raise SystemExit(f"the loss fell from {own[0]:.3f} to {own[-1]:.3f} only")


if __name__ == "__main__":
    main()
