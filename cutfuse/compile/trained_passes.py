"""A trained layer of 16 bits whose backward pass needs the pre-activation: kernels of ours behind cuBLAS's products.

torch.compile's kernels compute in fp32 to its full accuracy, which bounds those of activations, and sum the columns of
the gradient for the bias in a kernel of its own. Ours take short forms, whose error 16 bits hide, and sum the columns
where they compute the gradient.
"""

from __future__ import annotations

from torch import Tensor

from ..layer.planner import compare_traced_passes, seen_elements, seen_size
from .absorption import absorbed_bytes
from .differentiation import needs_gradient
from .nodes import tensor_of
from .region import Comparison, Region

# PyTorch keeps their results alone, which the next product keeps anyway.
_DIFFERENTIATED_BY_RESULT = {"tanh", "sigmoid", "exp", "sqrt", "rsqrt"}


def why_generated(region: Region, z: Tensor, operands: list[Tensor], otherwise: str) -> str:
    """Why torch.compile's own kernels compute what follows a trained product; empty where ours are faster.

    otherwise: the reason where there is nothing to compare.
    """
    found = compare_steps(region, z, operands)
    if found is None or isinstance(found, str):
        return found or otherwise
    return "" if found.own < found.otherwise else f"{otherwise}, and {found.reason}"


def compare_steps(region: Region, z: Tensor, operands: list[Tensor]) -> Comparison | str | None:
    """A training step with kernels of ours behind the products, and with torch.compile's; why the sizes or the device
    leave nothing to compare; or None where ours do not compute what follows."""
    program = region.epilogue.program
    if z.element_size() != 2 or region.reduction != "none" or region.product.part is not None:
        return None
    if not program.instructions or program.instructions[-1].op in _DIFFERENTIATED_BY_RESULT:
        return None
    # The gradient of what is broadcast is summed, with what is around it.
    trained = [operand.requires_grad for operand in operands]
    if any(is_trained and not _is_whole(z, t) for t, is_trained in zip(operands, trained, strict=True)):
        return None
    if any(operand.part for operand in region.operands) or absorbed_bytes(region) is not None:
        return None
    bias = region.product.bias
    sums_columns = bias is not None and needs_gradient(bias)
    x = tensor_of(region.product.x)
    assert x is not None, "a product has tensors"
    found = compare_traced_passes(x, z, operands, program, region.out_dtype, trained, sums_columns)
    if isinstance(found, str):
        return found
    own, generated = found
    return Comparison(
        own,
        generated,
        f"with its kernels behind the products a training step is predicted to take {generated:.1f} us, with ours "
        f"{own:.1f} us",
    )


def _is_whole(z: Tensor, operand: Tensor) -> bool:
    """Whether an operand has an element in memory for each of z's."""
    elements = seen_elements(z)
    layout = zip(operand.shape, operand.stride(), strict=True)
    is_repeated = any(seen_size(stride) == 0 and seen_size(size) != 1 for size, stride in layout)
    return elements is not None and seen_elements(operand) == elements and not is_repeated
