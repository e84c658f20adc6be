"""A head whose vocabulary is sharded over ranks: what each rank's operators give, put together by one collective."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_OUT_OF_RANGE = "a target is no class of the vocabulary, nor the one that is ignored"


@dataclass(frozen=True)
class Shard:
    """A rank's classes of a vocabulary that a mesh of one dimension shares: `count` of `total`, from `first` on."""

    mesh: Any
    first: int
    count: int
    total: int

    def local(self, x: Any, weight: Any, bias: Any | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """All of x, and the rank's rows of weight and bias. Each rank gives a part of x's gradient, which is summed."""
        from torch.distributed.tensor import Partial, Replicate

        whole = x.redistribute(self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return whole, weight.to_local(), None if bias is None else bias.to_local()

    def own_classes(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """The rank's classes counted from its first, 0 in place of others, and which are the rank's own."""
        torch._assert_async(((classes >= 0) & (classes < self.total)).all(), _OUT_OF_RANGE)
        column = classes - self.first
        is_own = (column >= 0) & (column < self.count)
        return torch.where(is_own, column, 0), is_own

    def combine(
        self, logsumexp: Tensor, chosen: Tensor, mean: Tensor, entropy: Tensor, is_own: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `logit_statistics` gives of the whole vocabulary, of that of each rank's classes."""
        rows = [logsumexp, torch.where(is_own, chosen, 0.0)]
        if mean.numel():
            rows.append(mean * (self.count / self.total))
        if entropy.numel():
            rows.append(entropy)
        every = _Gather.apply(torch.stack(rows), self.mesh.get_group())
        whole = torch.logsumexp(every[:, 0], 0)
        logprob = (every[:, 0] - whole).clamp(min=torch.finfo(whole.dtype).min)  # of a rank's classes together
        total_mean = every[:, 2].sum(0) if mean.numel() else mean
        total_entropy = (logprob.exp() * (every[:, -1] - logprob)).sum(0) if entropy.numel() else entropy
        return whole, every[:, 1].sum(0), total_mean, total_entropy


class _Gather(torch.autograd.Function):
    """A tensor of every rank, by ranks. What follows is the same on all of them, hence so is its gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.rank = torch.distributed.get_rank(group)
        every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(every, own, group=group)
        return torch.stack(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank], None


def shard_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Shard | None:
    """The rank's part of a weight that is sharded by its rows, on a mesh of one dimension that x is on too.

    None for other tensors, and where a rank has no class.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor")  # which is there where a DTensor is
    given: list[Any] = [x, weight, *([] if bias is None else [bias])]
    if tensor is None or not all(isinstance(item, tensor.DTensor) for item in given):
        return None
    mesh = given[0].device_mesh
    if mesh.ndim != 1 or any(item.device_mesh != mesh for item in given):
        return None
    if any(not item.placements[0].is_shard(0) for item in given[1:]):
        return None
    total, ranks = weight.shape[0], mesh.size()
    most = -(-total // ranks)
    if most * (ranks - 1) >= total:
        return None
    first = most * mesh.get_local_rank()
    return Shard(mesh, first, min(most, total - first), total)


def whole_target(target: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """All of a target on every rank, as a plain tensor, where the vocabulary is sharded; else what was given."""
    is_sharded = hasattr(target, "full_tensor") and shard_of(x, weight, bias) is not None
    return target.full_tensor() if is_sharded else target
