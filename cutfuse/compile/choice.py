"""Whether a region is predicted to be faster as one kernel than as cuBLAS's product and a kernel of Inductor's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from .. import arguments, native, routing
from ..epilogue import Program
from ..epilogue.evaluate import arithmetic_dtype
from ..matrix_vector import split
from ..ops import schema
from ..planning.linear_plan import LinearArguments, precision_of
from ..planning.traced import UNKNOWN_SIZES, lies_in_rows, plan_traced, seen_elements
from ..reductions import ADDITIVE
from .absorption import absorbed_bytes
from .differentiation import needs_gradient
from .lifting import inverse
from .nodes import tensor_of
from .products import Product, same
from .region import BARE, Comparison, Region, Search, Times
from .trained_layer import why_kept
from .trained_passes import compare_steps, why_generated

if TYPE_CHECKING:
    from .._C import LinearPlan

_IDENTITY = Program.parse(schema.IDENTITY)
TRAINED = "torch.compile differentiates it, and fuses what follows with its gradient: {}"


def why_left(region: Region) -> str:
    """Why a region is left to the compiler; empty where it is not."""
    z, operands = _example(region.product.node), _operand_examples(region)
    inputs = [*region.product.inputs, *(operand.source for operand in region.operands)]
    for node, example in zip(inputs, [*map(_example, region.product.inputs), *operands], strict=True):
        if arguments.is_wrapper(type(example)):
            return arguments.described_wrapper(node.name, example)
    if routing.everywhere:
        return BARE if region.is_bare else ""
    reason = arguments.why_composed(z, arithmetic_dtype(z, operands))
    if reason or _needs_no_product(region, operands):
        return reason
    if region.is_bare:
        return _why_slower(region, z, operands) if z.dtype == torch.float32 else BARE
    kept_because = _why_kept(region, z, operands)
    if kept_because:
        reason = why_generated(region, z, operands, kept_because)
        return TRAINED.format(reason) if reason else _why_copied(region, z, operands)
    return _why_copied(region, z, operands) or _why_slower(region, z, operands)


def _why_kept(region: Region, z: Tensor, operands: list[Tensor]) -> str:
    """Why the backward pass needs more than a fused layer keeps; empty where it does not, or where there is none."""
    trains = not region.is_bare and needs_gradient(region.out)
    return why_kept(z.dtype, region.reduction, region.epilogue, operands) if trains else ""


def times_of(search: Search) -> Times | None:
    """What is predicted of a product and its region; of one that is left, with the region that was considered first.

    None where nothing is predicted.
    """
    region, product = search.region or search.refused, search.product
    z = _example(product.node)
    if routing.everywhere or arguments.why_composed(z, z.dtype):
        return None
    if any(arguments.is_wrapper(type(_example(node))) for node in product.inputs):
        return None
    if region is not None:
        z, operands = _example(region.product.node), _operand_examples(region)
        if _needs_no_product(region, operands):
            return None
        is_step = bool(_why_kept(region, z, operands))
        found = compare_steps(region, z, operands) if is_step else _compare(region, z, operands)
        if isinstance(found, Comparison):
            return Times(found.otherwise, found.own if search.region else found.otherwise, is_step)
    given = _arguments(product, z, [], _IDENTITY, "none", z.dtype)
    plan = plan_traced(given, precision_of(given))
    alone = None if plan is None or plan.ruled_out else plan.alternatives[-1].compared
    return None if alone is None or search.region else Times(alone, alone)


def own_arguments(node: fx.Node) -> LinearArguments:
    """What a node that calls an operator of cutfuse's computes: `linear` and its like, by their schemas."""
    given: tuple[Any, ...] = node.args
    x, weight, bias, operands, program, *rest = given
    return LinearArguments(
        _example(x),
        _example(weight),
        None if bias is None else _example(bias),
        list(map(_example, operands)),
        Program.parse(program),
        rest[0] if isinstance(rest[0], str) else "none",
        next(item for item in rest if isinstance(item, torch.dtype)),
    )


def _needs_no_product(region: Region, operands: list[Tensor]) -> bool:
    """Whether the sum of an affine chain comes to a product of x and one row: see `matrix_vector`."""
    if region.reduction not in ADDITIVE:
        return False
    rows = [k for k, example in enumerate(operands) if not same(math.prod(example.shape[:-1]), 1)]
    columns = [k for k, example in enumerate(operands) if example.dim() and not same(example.shape[-1], 1)]
    return split(region.epilogue.text, tuple(rows), tuple(columns)) is not None


def _why_copied(region: Region, z: Tensor, operands: list[Tensor]) -> str:
    """Which operand would have to be copied or converted first; empty where none would."""
    rows, columns = z.shape[:-1], z.shape[-1]
    for operand, example in zip(region.operands, operands, strict=True):
        if not operand.is_matrix or same(example.numel(), columns):
            continue
        if example.dtype not in arguments.KERNEL_DTYPES and same(example.shape[-1], columns):
            return f"{operand.source.name} is a matrix of {example.dtype}, which would have to be converted first"
        count = math.prod(example.shape[:-1])
        if not (same(count, math.prod(rows)) or same(count, 1)):
            return f"{operand.source.name} of shape {tuple(example.shape)} would have to be copied to all rows"
        if same(count, math.prod(rows)) and same(example.shape[-1], columns) and not lies_in_rows(example):
            return f"{operand.source.name} with strides {tuple(example.stride())} would have to be copied into rows"
    return ""


def _why_slower(region: Region, z: Tensor, operands: list[Tensor]) -> str:
    found = _compare(region, z, operands)
    if isinstance(found, str):
        return found
    return "" if found.own <= found.otherwise else found.reason


def _compare(region: Region, z: Tensor, operands: list[Tensor]) -> Comparison | str:
    """A fused kernel and what would run otherwise; or why there is none."""
    program = region.epilogue.program
    fused_arguments = _arguments(region.product, z, operands, program, region.reduction, region.out_dtype)
    precision = precision_of(fused_arguments)
    plan = plan_traced(fused_arguments, precision)
    if plan is None:
        return UNKNOWN_SIZES
    if plan.ruled_out:  # of x @ w, the planner is given w.t()
        turned = region.product.is_transposed
        return plan.ruled_out.replace("weight has", "weight as [N, K] has") if turned else plan.ruled_out
    *kernels, cublas = plan.alternatives
    if region.product.part is not None:
        return _compare_parts(region, z, plan, precision)
    if not plan.is_fused:
        best = min((kernel.compared for kernel in kernels if not kernel.rejection), default=None)
        if best is None:
            return "; ".join(sorted({kernel.rejection for kernel in kernels}))
        two = f"cuBLAS and another kernel are predicted to take {cublas.compared:.1f} us, a fused one {best:.1f} us"
        return Comparison(best, cublas.compared, two)
    fused = plan.alternatives[plan.chosen].compared
    spared_bytes = absorbed_bytes(region) if region.reduction == "none" else None
    if spared_bytes is None:
        return Comparison(fused, cublas.compared)
    given = _arguments(region.product, z, [], _IDENTITY, "none", z.dtype)
    bare = plan_traced(given, precision)
    alone = 0.0 if bare is None else bare.alternatives[-1].compared
    spared = _predict_spared(z, spared_bytes)
    return Comparison(
        fused,
        alone + spared,
        f"Inductor fuses it with what follows, and cuBLAS's product alone is predicted to take {alone:.1f} us, a fused "
        f"one {fused:.1f} us, with {abs(spared):.1f} us {'less' if spared >= 0 else 'more'} in Inductor's kernel",
    )


def _predict_spared(z: Tensor, spared_bytes: float) -> float:
    """The microseconds that so many bytes less save Inductor's kernel; below 0 if it moves more. In any case it reads a
    matrix of z's size and writes another."""
    predict = native.core.predict_memory_microseconds
    kept = 2.0 * z.element_size() * (seen_elements(z) or 0)
    return predict(kept + max(spared_bytes, 0.0)) - predict(kept + max(-spared_bytes, 0.0))


def _compare_parts(region: Region, z: Tensor, plan: LinearPlan, precision: str) -> Comparison | str:
    """The parts of a product whose columns are split, one of them fused, and the whole product; or why it is whole."""
    part = region.product.part
    assert part is not None
    given = _arguments(region.product, z, [], _IDENTITY, "none", z.dtype)
    bare = plan_traced(given, precision)
    whole = plan_traced(given._replace(weight=_weight(region.product, z.dtype), bias=None), precision)
    if bare is None or whole is None:
        return UNKNOWN_SIZES
    runnable = [kernel.compared for kernel in plan.alternatives[:-1] if not kernel.rejection]
    if not runnable:
        return "; ".join(sorted({kernel.rejection for kernel in plan.alternatives[:-1]}))
    alone, split_off = bare.alternatives[-1].compared, len(part.siblings)
    parts = min(runnable) + split_off * alone
    together = whole.alternatives[-1].compared + plan.alternatives[-1].compared - alone
    return Comparison(
        parts,
        together,
        f"cuBLAS's product of all columns and another kernel are predicted to take {together:.1f} us, products of the "
        f"parts, one of them fused, {parts:.1f} us",
    )


def _weight(product: Product, dtype: torch.dtype) -> Tensor:
    """All of the weight, as `[N, K]`."""
    weight = _of_type(_example(product.weight), dtype)
    with torch.no_grad():
        return weight.t() if product.is_transposed else weight


def _arguments(
    product: Product,
    z: Tensor,
    operands: list[Tensor],
    program: Program,
    reduction: str,
    out_dtype: torch.dtype,
) -> LinearArguments:
    """What the planner is asked, with x and the weight in the type that autocast gives them."""
    x, weight = _of_type(_example(product.x), z.dtype), _weight(product, z.dtype)
    bias = None if product.bias is None else _of_type(_example(product.bias), z.dtype)
    part = product.part
    if part is not None:
        with torch.no_grad():
            weight = weight.narrow(0, part.start, part.length)
            bias = None if bias is None else bias.narrow(0, part.start, part.length)
    stored = arguments.kernel_out_dtype(out_dtype if program.instructions else z.dtype, z.dtype)
    return LinearArguments(x, weight, bias, operands, program, reduction, stored)


def _of_type(example: Tensor, dtype: torch.dtype) -> Tensor:
    if example.dtype == dtype:
        return example
    with torch.no_grad():
        return example.to(dtype)


def _example(node: fx.Node) -> Tensor:
    example = tensor_of(node)
    assert example is not None
    return example


def _operand_examples(region: Region) -> list[Tensor]:
    return [_operand_example(region, k) for k in range(len(region.operands))]


def _operand_example(region: Region, index: int) -> Tensor:
    """An example of an operand; of a row of a batch norm the running variance, which has its shape."""
    operand = region.operands[index]
    if not operand.part:
        example = _example(operand.source)
        if not operand.axes or example.dim() == 0:
            return example
        with torch.no_grad():
            return example[(None,) * (len(operand.axes) - example.dim())].permute(inverse(operand.axes))
    node = operand.source
    return _example(node.args[2] if len(node.args) > 2 else node.kwargs["running_var"])  # type: ignore[arg-type]
