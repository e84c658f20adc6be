"""Plans what a training step of a linear layer runs where the device waits for the host to issue its launches.

There kernels of ours compute the two products of the backward pass too: the host issues one in 7 us and PyTorch's
product in 13, and the whole step of a 16-bit layer with gelu in 140 us beside eager's 173 (an H100's host). In fp32
these kernels multiply on CUDA cores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .. import dynamo, native
from ..epilogue import Program
from ..native import stands_in_for
from ..precision import GUARDED, SPLIT_MODES, allows_tf32, product_mode
from .layouts import NOT_CUDA, device_facts, dtype_codes
from .linear_plan import plan_call
from .planner import LinearArguments, MatrixLayout, layout_of, plan_product, turned

if TYPE_CHECKING:
    from .._C import LinearPlan


IDENTITY = Program((), 0)


class BackwardProducts(NamedTuple):
    """The plans of the gradients of x and of the weight; None where PyTorch multiplies.

    is_weight_turned: the weight's is planned as `x.T @ grad_z`, laid out as the weight is, and not as `grad_z.T @ x`.
    """

    of_x: LinearPlan | None
    of_weight: LinearPlan | None
    is_weight_turned: bool = False


def issuer_of_products(rows: int, weight: Tensor, mode: str = "") -> str:
    """Who issues the products of the backward pass of a layer of so many rows, as the planner names it. mode: the
    precision of the forward pass."""
    return "training" if _is_small(rows, weight, mode) else "call"


def plan_backward_products(x: Tensor, weight: Tensor, issuer: str = "", mode: str = "") -> BackwardProducts:
    """Of x `[M, K]` and weight `[N, K]`, of one type, with a contiguous gradient of z `[M, N]`.

    issuer: the layer's, by `issuer_of_products`, where that is known. mode: the precision of the forward pass.

    Kernels of ours multiply layers that wait for the host, fp32 matrices by parts of their numbers, and matrices that
    have to be copied because their rows do not begin at multiples of 16 bytes: cuBLAS's kernels for those are slow.
    """
    rows, columns = x.shape[0], weight.shape[0]
    precision = product_mode(mode) if x.dtype == torch.float32 else "tf32"
    issuer = issuer or issuer_of_products(rows, weight, mode)
    only_copies = issuer == "call" and not (x.dtype == torch.float32 and precision in SPLIT_MODES)

    def find(a: MatrixLayout, b: MatrixLayout) -> LinearPlan | None:
        plan = plan_product(a, b, x.dtype, x.device, precision, issuer)
        return plan if plan.is_fused and (not only_copies or _copies_rows(plan)) else None

    grad_z = rows, columns, columns, 1, True
    is_turned = is_turned_weight(weight)
    pair = turned(layout_of(x).of_matrix), turned(grad_z)
    of_weight = find(*pair) if is_turned else find(*pair[::-1])
    return BackwardProducts(find(grad_z, turned(layout_of(weight).of_matrix)), of_weight, is_turned)


def is_turned_weight(weight: Tensor) -> bool:
    """Whether it is `w.T` of `x @ w`, whose parameter is w: autograd copies a gradient that is laid out otherwise."""
    return weight.stride(0) == 1 and weight.stride(1) != 1


def product_arguments(a: Tensor, b: Tensor, issuer: str = "call") -> LinearArguments:
    """Of `a @ b.T`."""
    return LinearArguments(a, b, None, (), IDENTITY, "none", a.dtype, issuer=issuer)


def _copies_rows(plan: LinearPlan) -> bool:
    return any(isinstance(launch, native.core.AlignedCopy) for launch in plan.launches)


def needs_planes(arguments: LinearArguments) -> bool:
    """Whether one of the three products of a training step in fp32 runs over planes, by several kernels."""
    x, weight, bias = arguments.x, arguments.weight, arguments.bias
    issuer = issuer_of_products(x.shape[0], weight)
    forward = plan_call(product_arguments(x, weight, issuer)._replace(bias=bias))
    products = plan_backward_products(x, weight, issuer)
    plans = (forward, products.of_x, products.of_weight)
    return any(plan is not None and plan.is_fused and not _is_one_kernel(plan) for plan in plans)


def _is_one_kernel(plan: LinearPlan) -> bool:
    return plan.is_fused and plan.workspace_bytes == 0


def storing(arguments: LinearArguments, issuer: str = "") -> LinearArguments:
    """Those of the forward pass that stores the pre-activation beside the result. issuer: where it is known."""
    issuer = issuer or issuer_of_products(arguments.x.shape[0], arguments.weight)
    return arguments._replace(stores_pre_activation=True, issuer=issuer)


def takes_few_launches(arguments: LinearArguments) -> bool:
    """Whether a training step that waits for the host is faster by kernels of ours: by one for the forward pass.

    Operands of which a gradient is wanted have the result's shape: others' gradients have to be summed.
    """
    x, weight, _, operands, *_ = arguments
    if is_traced(x, weight, *operands) or not _is_small(x.shape[0], weight):
        return False
    shape = (x.shape[0], weight.shape[0])
    if any(operand.requires_grad and operand.shape != shape for operand in operands):
        return False
    if not _is_sum(arguments):
        return _is_fused(storing(arguments, "training"))
    products = plan_backward_products(x, weight, "training")
    multiplies = any(plan is not None and _is_one_kernel(plan) for plan in (products.of_x, products.of_weight))
    # Planned as any call, because the operator that computes it on the general path is.
    return _is_fused(arguments) and multiplies


def hands_gradient_on(arguments: LinearArguments) -> bool:
    """Whether the backward pass of such a layer takes the gradient that arrives for those of z and the operands."""
    return _is_sum(arguments) and takes_few_launches(arguments)


def _is_fused(arguments: LinearArguments) -> bool:
    plan = plan_call(arguments)
    return _is_one_kernel(plan) and not plan.copies_bias


def _is_sum(arguments: LinearArguments) -> bool:
    dtypes = {arguments.out_dtype, arguments.x.dtype, *(operand.dtype for operand in arguments.operands)}
    return len(dtypes) == 1 and arguments.reduction == "none" and arguments.program.is_sum


def is_traced(*tensors: Tensor) -> bool:
    """Whether tensors have no memory that a plan could ask for, or mean more than they hold, as subclasses do.

    Fake ones have that of the card that is predicted for.
    """
    if dynamo.is_tracing():
        return True
    others = [t for t in tensors if type(t) not in (Tensor, torch.nn.Parameter)]
    return any(not (isinstance(t, FakeTensor) and stands_in_for(t.device)) for t in others)


def _is_small(rows: int, weight: Tensor, mode: str = "") -> bool:
    """Whether the layer waits for the host, in a precision in which kernels of ours multiply in every layout."""
    has_kernels = weight.dtype.itemsize == 2 or (weight.dtype == torch.float32 and product_mode(mode) == GUARDED)
    return has_kernels and waits_for_host(rows, weight)


def waits_for_host(rows: int, weight: Tensor) -> bool:
    """Whether the device is done with the training step of a layer of so many rows before the host has issued it.

    False for sizes that are symbols and for types and devices without kernels.
    """
    n, k = weight.shape
    if weight.dtype not in dtype_codes() or not all([isinstance(size, int) for size in (rows, n, k)]):
        return False
    facts, dtype = device_facts(weight.device), weight.dtype
    return facts != NOT_CUDA and _waits(rows, n, k, dtype, facts[2], dtype == torch.float32 and allows_tf32())


def mlp_waits_for_host(x: Tensor, rows: int, last: Tensor) -> bool:
    """The same of an MLP as one node. x `[..., K]`; rows: of the first layer's weight, with a gate of both its halves;
    last: the weight of the last layer."""
    facts = device_facts(x.device)
    if x.dtype not in dtype_codes() or facts == NOT_CUDA or not x.shape[-1]:
        return False
    m, (columns, width) = x.numel() // x.shape[-1], last.shape
    code, as_tf32 = dtype_codes()[x.dtype], x.dtype == torch.float32 and allows_tf32()
    return native.core.mlp_waits_for_host((m, rows, x.shape[-1]), (m, columns, width), code, facts[2], as_tf32)


@functools.lru_cache(maxsize=4096)
def _waits(m: int, n: int, k: int, dtype: torch.dtype, multiprocessors: int, as_tf32: bool) -> bool:
    return native.core.training_waits_for_host((m, n, k), dtype_codes()[dtype], multiprocessors, as_tf32)
