"""One call of each kind that cutfuse has, beside what PyTorch computes op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse

_GENERATOR = torch.Generator().manual_seed(0)
# x [M, K], a weight [N, K], a bias [N] and an operand [N], by the letters that `Call.tensors` has.
TENSORS = {
    name: 0.5 * torch.randn(shape, generator=_GENERATOR)
    for name, shape in {"x": (4, 8), "w": (6, 8), "b": (6,), "r": (6,)}.items()
}
_CLASSES = torch.tensor([5, 0, 3, 1])


class Call(NamedTuple):
    """tensors: the letters of those that both functions are given."""

    tensors: str
    own: Callable[..., Tensor]
    eager: Callable[..., Tensor]

    def given(self) -> list[Tensor]:
        return [TENSORS[name] for name in self.tensors]


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.tanh(z) * r


def _own_head(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    classes = _CLASSES[: len(x)]
    logprob, entropy = cutfuse.linear_logprob(x, w, classes, b, softcap=20.0, entropy=True)
    loss = cutfuse.linear_cross_entropy(x, w, classes, b, reduction="none", label_smoothing=0.1)
    return loss + logprob + entropy


def _head(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    classes, logits = _CLASSES[: len(x)], F.linear(x, w, b)
    found = torch.log_softmax(20.0 * torch.tanh(logits / 20.0), -1)
    logprob, entropy = found.gather(-1, classes[:, None]).squeeze(-1), -(found.exp() * found).sum(-1)
    return F.cross_entropy(logits, classes, reduction="none", label_smoothing=0.1) + logprob + entropy


def _gated_mlp(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    hidden = F.silu(F.linear(x, w, b)) * F.linear(x, w.cos(), r)
    return F.linear(hidden, w.t()) + x


CALLS: dict[str, Call] = {
    "linear": Call(
        "xwbr",
        lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=gated, operands=(r,)),
        lambda x, w, b, r: gated(F.linear(x, w, b), r),
    ),
    "plain linear": Call("xwb", lambda x, w, b: cutfuse.linear(x, w, b), F.linear),
    "recomputed linear": Call(
        "xwbr",
        lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=gated, operands=(r,), recompute=True),
        lambda x, w, b, r: gated(F.linear(x, w, b), r),
    ),
    "rows": Call(
        "xwb",
        lambda x, w, b: cutfuse.linear(x, w, b, epilogue=torch.tanh, reduce="amax"),
        lambda x, w, b: torch.tanh(F.linear(x, w, b)).amax(-1),
    ),
    "affine rows": Call(
        "xwbr",
        lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=lambda z, r: z * r, operands=(r,), reduce="sum"),
        lambda x, w, b, r: (F.linear(x, w, b) * r).sum(-1),
    ),
    "pointwise": Call("xr", lambda x, r: cutfuse.pointwise(gated, x[:, :6], r), lambda x, r: gated(x[:, :6], r)),
    "sigmoid": Call("x", lambda x: cutfuse.sigmoid(x), torch.sigmoid),
    "reduce": Call(
        "xr",
        lambda x, r: cutfuse.reduce(x[:, :6], -1, "logsumexp", prologue=gated, operands=(r,)),
        lambda x, r: gated(x[:, :6], r).logsumexp(-1),
    ),
    "sum": Call("x", lambda x: cutfuse.sum(x, 1), lambda x: x.sum(1)),
    "mlp": Call(
        "xwb",
        lambda x, w, b: cutfuse.mlp(x, w, b, w.t(), None, activation=F.gelu),
        lambda x, w, b: F.linear(F.gelu(F.linear(x, w, b)), w.t()),
    ),
    "gated mlp": Call(
        "xwbr",
        lambda x, w, b, r: cutfuse.mlp(x, (w, w.cos()), (b, r), w.t(), None, activation=F.silu, gate=True, residual=x),
        _gated_mlp,
    ),
    "head": Call("xwb", _own_head, _head),
}
