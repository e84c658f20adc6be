"""A drop-in for the loss module of Liger-Kernel, which need not be installed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..head import linear_cross_entropy


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """`liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss` by `cutfuse.linear_cross_entropy`.

    Args:
        ignore_index, label_smoothing, reduction, softcap: as of `cutfuse.linear_cross_entropy`.
        lse_square_scale: its `z_loss`.
        accum_dtype: None or fp32. Gradients of 16 bits are sums in fp32 in any case, which are rounded once.
        ce_weight, return_z_loss, use_token_scaling, return_token_accuracy, return_predicted_tokens: as by default.

    Raises NotImplementedError for another value of those.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        hint = 'take the losses of cutfuse.linear_cross_entropy with reduction="none"'
        refused = {
            "ce_weight": (ce_weight is not None, f"{hint}, and multiply them by the weights of their targets"),
            "return_z_loss": (return_z_loss, "call cutfuse.linear_cross_entropy with z_loss and without"),
            "accum_dtype": (accum_dtype not in (None, torch.float32), "leave it out: sums are in fp32"),
            "use_token_scaling": (use_token_scaling, f"{hint}, and scale them"),
            "return_token_accuracy": (return_token_accuracy, "compute it of the logits, where it is needed"),
            "return_predicted_tokens": (return_predicted_tokens, "compute them of the logits, where they are needed"),
        }
        for name, (is_refused, advice) in refused.items():
            if is_refused:
                raise NotImplementedError(
                    f"cutfuse.integrations.liger: LigerFusedLinearCrossEntropyLoss has no {name}; {advice}"
                )
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        """lin_weight: `[V, H]`; _input: `[BT, H]`; target: `[BT]`; bias: `[V]`."""
        return linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.lse_square_scale,
            softcap=self.softcap,
        )
