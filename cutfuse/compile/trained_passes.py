"""A trained layer of 16 bits whose backward pass needs the pre-activation: kernels of ours behind cuBLAS's products.

torch.compile's kernels compute in fp32 to its full accuracy, which bounds those of activations, and sum the columns of
the gradient for the bias in a kernel of its own. Ours take short forms, whose error 16 bits hide, and sum the columns
where they compute the gradient.
"""

from __future__ import annotations

from torch import Tensor

from ..planning.traced import compare_traced_passes, seen_elements
from .absorption import absorbed_bytes
from .differentiation import needs_gradient
from .region import Region


def why_generated(region: Region, z: Tensor, operands: list[Tensor], otherwise: str) -> str:
    """Why torch.compile's own kernels compute what follows a trained product; empty where ours are faster.

    otherwise: the reason where there is nothing to compare.
    """
    trained = [operand.requires_grad for operand in operands]
    if z.element_size() != 2 or region.reduction != "none" or region.product.part is not None:
        return otherwise
    if any(is_trained and not _is_of_size(z, t) for t, is_trained in zip(operands, trained, strict=True)):
        return otherwise  # the gradient of what is broadcast is summed, with what is around it
    if absorbed_bytes(region) is not None:
        return otherwise
    bias = region.product.bias
    sums_columns = bias is not None and needs_gradient(bias)
    found = compare_traced_passes(z, operands, region.epilogue.program, region.out_dtype, trained, sums_columns)
    if isinstance(found, str):
        return found
    own, generated = found
    if own < generated:
        return ""
    return (
        f"{otherwise}, and its kernels behind the products are predicted to take {generated:.1f} us, ours {own:.1f} us"
    )


def _is_of_size(z: Tensor, operand: Tensor) -> bool:
    elements = seen_elements(z)
    return elements is not None and seen_elements(operand) == elements
