"""Whether a region is predicted to be faster as kernels of ours than as cuBLAS's product and a kernel of Inductor's.

Inductor computes what follows a product in a kernel that it generates anyway, such as that of the next norm. If the
region is fused, that kernel reads the region's result instead of the product's and of the operands, and stores less.

What follows a trained layer of 16 bits whose backward pass needs the pre-activation runs as kernels of ours behind
cuBLAS's products, or as torch.compile's. Those compute in fp32 to its full accuracy, which bounds those of activations,
and sum the columns of the gradient for the bias in a kernel of its own. Ours take short forms, whose error 16 bits
hide, and sum the columns where they compute the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .. import arguments, native
from ..epilogue import Program
from ..epilogue.program import arithmetic_dtype
from ..epilogue.table import ADDITIVE
from ..head import PART_BYTES
from ..layer import schema
from ..layer.planner import (
    UNKNOWN_SIZES,
    LinearArguments,
    compare_traced_passes,
    decisive,
    lies_in_rows,
    plan_traced,
    precision_of,
    seen_elements,
    seen_size,
)
from ..layer.training_step import IDENTITY
from ..matrix_vector import split
from .layer import why_kept
from .lifting import COPIES, PERMUTATIONS, ROW_VIEWS, inverse, is_evaluated_dropout
from .nodes import DROPOUTS, any_example, example_of, is_call, name_of, needs_gradient, tensor_of
from .products import SPLITS, Product, find_product, same
from .regions import BARE, Comparison, Region, Search, Times

if TYPE_CHECKING:
    from .._C import Alternative, LinearPlan

TRAINED = "torch.compile differentiates it, and fuses what follows with its gradient: {}"


def why_left(region: Region) -> str:
    """Why a region is left to the compiler; empty where it is not."""
    z, operands = example_of(region.product.node), _operand_examples(region)
    inputs = [*region.product.inputs, *(operand.source for operand in region.operands)]
    for node, example in zip(inputs, [*map(example_of, region.product.inputs), *operands], strict=True):
        if arguments.is_wrapper(type(example)):
            return arguments.described_wrapper(node.name, example)
    if native.operators_everywhere:
        return BARE if region.is_bare else ""
    reason = arguments.why_composed(z, arithmetic_dtype(z, operands))
    if reason or _needs_no_product(region, operands):
        return reason
    if region.is_bare:
        return _why_slower(region, z, operands) if z.dtype == torch.float32 else BARE
    if region.cross_entropy is not None and needs_gradient(region.out):
        return _why_logits_fit(z)
    kept_because = _why_kept(region, z, operands)
    if kept_because:
        reason = why_generated(region, z, operands, kept_because)
        return TRAINED.format(reason) if reason else _why_copied(region, z, operands)
    return _why_copied(region, z, operands) or _why_slower(region, z, operands)


def _why_kept(region: Region, z: Tensor, operands: list[Tensor]) -> str:
    """Why the backward pass needs more than a fused layer keeps; empty where it does not, or where there is none."""
    trains = not region.is_bare and needs_gradient(region.out)
    return why_kept(z.dtype, region.reduction, region.epilogue, operands) if trains else ""


def _why_logits_fit(z: Tensor) -> str:
    """Why a trained head is left as it is; empty where it is fused.

    Fused, it has the logits' gradient in parts. Where one part would hold it all, no memory is saved.
    """
    elements = seen_elements(z)
    if elements is None or elements * z.element_size() > PART_BYTES:
        return ""
    size = elements * z.element_size() / 1e6
    return TRAINED.format(f"the logits take {size:.0f} MB, and in parts of them up to {PART_BYTES / 1e6:.0f} MB")


def times_of(search: Search) -> Times | None:
    """What is predicted of a product and its region; of one that is left, with the region that was considered first.

    None where nothing is predicted.
    """
    region, product = search.region or search.refused, search.product
    z = example_of(product.node)
    if native.operators_everywhere or arguments.why_composed(z, z.dtype):
        return None
    if any(arguments.is_wrapper(type(example_of(node))) for node in product.inputs):
        return None
    if region is not None:
        z, operands = example_of(region.product.node), _operand_examples(region)
        if _needs_no_product(region, operands):
            return None
        is_step = bool(_why_kept(region, z, operands))
        found = compare_steps(region, z, operands) if is_step else _compare(region, z, operands)
        if isinstance(found, Comparison):
            return Times(found.otherwise, found.own if search.region else found.otherwise, is_step)
    given = _arguments(product, z, [], IDENTITY, "none", z.dtype)
    plan = plan_traced(given, precision_of(given))
    alone = None if plan is None or plan.ruled_out else plan.alternatives[-1].compared
    return None if alone is None or search.region else Times(alone, alone)


def own_arguments(node: fx.Node) -> LinearArguments:
    """What a node that calls an operator of cutfuse's computes: `linear` and its like, by their schemas."""
    given: tuple[Any, ...] = node.args
    x, weight, bias, operands, program, *rest = given
    return LinearArguments(
        example_of(x),
        example_of(weight),
        None if bias is None else example_of(bias),
        list(map(example_of, operands)),
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
            return _why_rejected(kernels)
        two = f"cuBLAS and another kernel are predicted to take {cublas.compared:.1f} us, a fused one {best:.1f} us"
        if region.is_bare:
            two = f"cuBLAS is predicted to take {cublas.compared:.1f} us, a kernel of cutfuse's {best:.1f} us"
        return Comparison(best, cublas.compared, two)
    fused = plan.alternatives[plan.chosen].compared
    spared_bytes = absorbed_bytes(region) if region.reduction == "none" else None
    if spared_bytes is None:
        return Comparison(fused, cublas.compared)
    given = _arguments(region.product, z, [], IDENTITY, "none", z.dtype)
    bare = plan_traced(given, precision)
    alone = 0.0 if bare is None else bare.alternatives[-1].compared
    spared = _predict_spared(z, spared_bytes)
    return Comparison(
        fused,
        alone + spared,
        f"Inductor fuses it with what follows, and cuBLAS's product alone is predicted to take {alone:.1f} us, a fused "
        f"one {fused:.1f} us, with {abs(spared):.1f} us {'less' if spared >= 0 else 'more'} in Inductor's kernel",
    )


def _why_rejected(kernels: Sequence[Alternative]) -> str:
    reasons = {f"a fused kernel {one.rejection}" if one.microseconds else one.rejection for one in decisive(kernels)}
    return "; ".join(sorted(reasons))


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
    given = _arguments(region.product, z, [], IDENTITY, "none", z.dtype)
    bare = plan_traced(given, precision)
    whole = plan_traced(given._replace(weight=_weight(region.product, z.dtype), bias=None), precision)
    if bare is None or whole is None:
        return UNKNOWN_SIZES
    runnable = [kernel.compared for kernel in plan.alternatives[:-1] if not kernel.rejection]
    if not runnable:
        return _why_rejected(plan.alternatives[:-1])
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
    weight = _of_type(example_of(product.weight), dtype)
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
    x, weight = _of_type(example_of(product.x), z.dtype), _weight(product, z.dtype)
    bias = None if product.bias is None else _of_type(example_of(product.bias), z.dtype)
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


def _operand_examples(region: Region) -> list[Tensor]:
    return [_operand_example(region, k) for k in range(len(region.operands))]


def _operand_example(region: Region, index: int) -> Tensor:
    """An example of an operand; of a row of a batch norm the running variance, which has its shape."""
    operand = region.operands[index]
    if not operand.part:
        example = example_of(operand.source)
        if not operand.axes or example.dim() == 0:
            return example
        with torch.no_grad():
            return example[(None,) * (len(operand.axes) - example.dim())].permute(inverse(operand.axes))
    node = operand.source
    return example_of(node.args[2] if len(node.args) > 2 else node.kwargs["running_var"])


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
    x = example_of(region.product.x)
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


# What Inductor calls and does not generate, so that nothing is fused into it; besides, all of other libraries.
_CALLED = (
    "attention",
    "conv",
    "bmm",
    "matmul",
    "einsum",
    "linear",
    "lstm",
    "gru",
    "sort",
    "topk",
    "multinomial",
    "fft",
)
# What gives the same elements, or some of them: Inductor generates no kernel for it alone.
_PIECES = {"expand", "expand_as", "view_as", "narrow", "select", "unbind", "getitem", "__getitem__", "detach"}
_VIEWS = ROW_VIEWS | PERMUTATIONS | SPLITS | _PIECES
# What gives the same elements where the type stays.
_COPIES = COPIES | {"to", "type", "float", "half", "bfloat16"}
_BEHIND_READERS = 32  # nodes that may belong to the same kernel as the last reader of the result


def absorbed_bytes(region: Region) -> float | None:
    """The bytes of matrices that generated kernels do not move if the region is fused; below 0 if they move more.

    None if no kernel would compute what is fused: none reads the result, and none computes an operand for it alone.
    """
    computed = _computed_for(region)
    readers = {region.out: _readers(region.out)} | {source: _readers(_base(source)) for source in _matrices(region)}
    nearby = _followers(region.out, readers.values())
    of_result = readers.pop(region.out)
    near = [reader for reader in of_result if reader in nearby]
    if not near and not computed:
        return None
    # What a norm or an activation reads it keeps for its gradient.
    is_stored = len(near) < len(of_result) or needs_gradient(region.out)
    read = [source for source, own in readers.items() if source not in computed and nearby.isdisjoint(own)]
    moved = _bytes(region.product.node) + sum(map(_bytes, read)) - sum(map(_bytes, computed))
    return moved + _bytes(region.out) * (is_stored - bool(near))


def _matrices(region: Region) -> list[fx.Node]:
    """The operands that are full matrices."""
    count = _elements(region.out)
    return [operand.source for operand in region.operands if operand.is_matrix and _elements(operand.source) == count]


def _computed_for(region: Region) -> list[fx.Node]:
    """The matrices that a generated kernel computes and nothing but the region reads, so that nothing stores them."""
    covered = {*region.cone, region.out}
    matrices = [operand.source for operand in region.operands if operand.is_matrix]
    bases = [(source, _base(source)) for source in matrices]
    return [source for source, base in bases if _is_generated(base) and covered.issuperset(_readers(base))]


def _base(node: fx.Node) -> fx.Node:
    """What a view, or a copy of the same type, is of."""
    while _passes(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _followers(out: fx.Node, readers: Iterable[list[fx.Node]]) -> set[fx.Node]:
    """The generated nodes that a kernel which reads `out` can compute: what they read does not come from a later call.

    The search ends with the last of the readers, and soon behind the last one of `out`, which comes first.
    """
    first, *others = ({reader for reader in own if out < reader and reader.op != "output"} for own in readers)
    pending, more = set().union(first, *others), _BEHIND_READERS
    near, far = {out}, set()
    node = out.next
    while pending and more and node.op != "output":
        inputs = node.all_input_nodes
        if any(source in far for source in inputs):
            far.add(node)
        elif any(source in near for source in inputs):
            (near if _is_generated(node) or _passes(node) else far).add(node)
        pending.discard(node)
        first.discard(node)
        more -= not first
        node = node.next
    return near - {out}


def _readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a value, or with views of it: not what asks for its size."""
    found = []
    for user in node.users:
        if _passes(user):  # of another argument than the first one it takes the shape
            found += _readers(user) if user.args[0] is node else []
        elif user.op == "output" or _gives_tensors(user):
            found.append(user)
    return found


def _gives_tensors(node: fx.Node) -> bool:
    example = any_example(node)
    return example is None or any(isinstance(item, Tensor) for item in tree_leaves(example))


def _passes(node: fx.Node) -> bool:
    """Whether a node gives elements of its first argument as they are."""
    if not is_call(node) or not node.args:
        return False
    name = name_of(node)
    if name in _VIEWS:
        return True
    source, example = tensor_of(node.args[0]), tensor_of(node)
    if name not in _COPIES or source is None or example is None or source.dtype != example.dtype:
        return False
    return name not in DROPOUTS or is_evaluated_dropout(node)


def _is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates a kernel for it."""
    if not is_call(node) or _passes(node) or find_product(node) is not None:
        return False
    name = name_of(node)
    if "." in name or "::" in name or node.target in (schema.layer, schema.layer_cross_entropy):
        return False
    return not any(part in name for part in _CALLED)


def _bytes(node: fx.Node) -> float:
    example = tensor_of(node)
    return 0.0 if example is None else float(_elements(node) * example.element_size())


def _elements(node: fx.Node) -> int:
    """How many a tensor has in the call that is traced; 0 where that is not known."""
    example = tensor_of(node)
    return 0 if example is None else math.prod(seen_size(size) or 0 for size in example.shape)
