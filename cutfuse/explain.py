"""Explains which kernels a call would run, and why, by asking the dispatcher itself; and whether a device has any."""

from __future__ import annotations

import html
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import native
from .composed import PyTorchCall
from .epilogue import Program
from .epilogue.errors import EpilogueError
from .head import linear_cross_entropy, linear_logprob
from .invariance import is_batch_invariant, require
from .layer import autograd
from .layer.autograd import needs_gradient
from .layer.call_plans import lay_out_pointwise, lay_out_reduction
from .layer.eager import known_bits
from .layer.layouts import dtype_codes, reduction_codes
from .layer.linear_plan import (
    KEEPS,
    FusedExplanation,
    explain_fused,
    matrices_of,
    plan_call,
    predicted,
    rejected,
    require_kernel,
)
from .layer.planner import LinearArguments, why_no_kernels
from .layer.prepared import Planes
from .layer.specialize import Epilogues, explain_pass, find_alone
from .layer.training_step import IDENTITY, plan_backward_products, storing
from .linear import EAGER, LinearCall, describe_linear, for_operators, is_plain, linear, operator_of
from .mlp import MLPCall, mlp, normalise_mlp
from .native import check_devices, describe_prediction, predicting
from .nn.linear_cross_entropy import LinearCrossEntropy
from .pointwise import PointwiseCall, normalise_pointwise, pointwise, sigmoid
from .precision import product_mode
from .prepare import PreparedWeight
from .pytorch_operation import BEHIND_CUBLAS
from .reduce import ReduceCall, normalise_reduce, reduce
from .reduce import sum as sum_

if TYPE_CHECKING:
    from ._C import LinearPlan

_NO_KERNEL = "nothing: PyTorch's own operations run"
_NO_PROGRAM = "nothing: the sums take the program's factors as weights, and do not run it"
_STEP = "a step, because {} gradients; within torch.no_grad() it would be the forward pass alone"
_EAGER = "{}; eager PyTorch, which runs a kernel for each operation, is not predicted"
_INVARIANT = "a row has the same bits in every batch: kernels add in an order that the number of rows does not decide"
_TERMINAL_WIDTH = 107  # 120 with the titles
_HTML_CALL = "text-align: left; font-weight: bold"
_HTML_TITLE = "text-align: left; vertical-align: top"
_HTML_ENTRY = "text-align: left; font-family: monospace; white-space: pre-wrap"


@dataclass(frozen=True)
class Explanation:
    """What a call would run.

    path: "fused" (one kernel computes the product and the epilogue), "product" (a kernel of cutfuse's computes the
    product, and nothing follows), "unfused" (cuBLAS, then one kernel), "matrix-vector" (no matrix product is needed),
    "kernel" (the call has no product) or "composed" (PyTorch's own operations). steps: what runs, in order. reasons:
    why this path was chosen. program: the epilogue as the kernels interpret it; the identity where PyTorch runs it as
    it stands. bytes: the least that the call reads and writes. flops: multiplications and additions of its products.
    workspace_bytes: what a fused product allocates beside its result and frees again. compiles: what is compiled into a
    kernel because of this call, and when; or why nothing is. device: the card that this is predicted for, None where it
    is about the tensors' own device. trained: which tensors need gradients, so that a backward pass follows. baseline:
    with what the predicted times were compared; empty where none were. bits: what holds of the result's bits within
    `cutfuse.batch_invariant()`; empty outside of it.
    """

    call: str
    path: str
    steps: tuple[str, ...]
    reasons: tuple[str, ...]
    program: Program
    bytes: int
    flops: int
    workspace_bytes: int = 0
    compiles: str = ""
    device: str | None = None
    trained: tuple[str, ...] = ()
    baseline: str = ""
    bits: str = ""

    def __str__(self) -> str:
        lines = [self.call]
        for title, entries in self._sections():
            wrapped = [part for entry in entries for part in _wrapped(entry)]
            lines += [f"  {title if k == 0 else '':10} {line}" for k, line in enumerate(wrapped)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks. It has no colour of its own, so that it can be read on light and dark pages."""
        rows = []
        for title, entries in self._sections():
            listed = "<br>".join(html.escape(entry) for entry in entries)
            rows.append(f'<tr><th style="{_HTML_TITLE}">{title}</th><td style="{_HTML_ENTRY}">{listed}</td></tr>')
        caption = f'<caption style="{_HTML_CALL}">{html.escape(self.call)}</caption>'
        return f"<table>{caption}<tbody>{''.join(rows)}</tbody></table>"

    def _sections(self) -> list[tuple[str, Sequence[str]]]:
        """What is shown, in order: titles and lines. A title without lines is left out."""
        is_composed = self.path == "composed"
        has_program = self.program.instructions or not is_composed
        quantities = f"{_quantity(self.bytes, 'B')} moved, {_quantity(self.flops, 'FLOP')} in products"
        sections = [
            ("device", () if self.device is None else (describe_prediction(self.device),)),
            ("training", (_STEP.format(_listed(self.trained)),) if self.trained else ()),
            ("path", (self.path,)),
            ("runs", self.steps),
            ("because", self.reasons),
            ("bits", (self.bits,) if self.bits else ()),
            ("baseline", (self.baseline,) if self.baseline else ()),
            ("program", self.program.pretty().splitlines() if has_program else ()),
            ("compiles", () if is_composed else self.compiles.splitlines()),
            ("at least", (quantities,)),
            ("workspace", (_quantity(self.workspace_bytes, "B"),) if self.workspace_bytes else ()),
        ]
        return [(title, entries) for title, entries in sections if entries]


def explain(*args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What a call would run and why, without running it; print the result.

    Takes a function of cutfuse or a module of `cutfuse.nn` and the arguments of its call: `explain(module, x)`,
    `explain(cutfuse.linear, x, w, epilogue=torch.relu)`. Or the arguments alone, of `linear` (a tensor, then a weight),
    `reduce` (a tensor, then a dimension) or `pointwise` (a function, then a tensor). A module's hooks do not run.

    device: "H200" or "H100", to predict for such a card, which this machine need not have. The tensors are on the CPU
    then, or have no values: on the meta device, or fake. Without a GPU PyTorch turns `torch.autocast("cuda")` off, with
    a warning: `torch.autocast("cpu", dtype=torch.bfloat16)` stands for it, with tensors on the CPU.

    Raises what the call raises; TypeError where it is no call of cutfuse; ValueError for another device, and where the
    tensors are on a CUDA device that is no such card.
    """
    with predicting("explain", device) as card:
        call = normalise_call(args, kwargs)
        tensors = call.tensors[:1] if isinstance(call, PyTorchCall) else [call.x]
        check_devices("explain", card, (t.device for t in tensors))
        trained = tuple(name for name, tensor in _named(call) if needs_gradient(tensor))
        return replace(_explain(call), device=card, trained=trained, bits=_bits(call))


def _bits(call: Call) -> str:
    """What a row's bits depend on within `cutfuse.batch_invariant()`, where the call may raise, or whose they are with
    `rounding="eager"`; empty elsewhere."""
    if not is_batch_invariant():
        return _eager_bits(call)
    if (isinstance(call, PyTorchCall) and call.bits) or (
        isinstance(call, LinearCall) and call.epilogue.program.is_eager
    ):
        require(EAGER)
    if isinstance(call, PyTorchCall):
        require(call.because)
    elif isinstance(call, PointwiseCall | ReduceCall):
        require(call.composed_because)
    layers = [layer for _, layer in call.forward] if isinstance(call, MLPCall) else []
    for layer in [call] if isinstance(call, LinearCall) else layers:
        require(layer.composed_because)
        is_trained = needs_gradient(layer.x, layer.weight, layer.bias, *layer.operands)
        arguments = _product_of(layer) if layer.reduction != "none" and is_trained else operator_of(layer)
        require_kernel(plan_call(arguments), arguments)
    return _INVARIANT


def _eager_bits(call: Call) -> str:
    if isinstance(call, PyTorchCall):
        return call.bits
    if not isinstance(call, LinearCall) or not call.epilogue.program.is_eager:
        return ""
    arguments = operator_of(call)
    plan = plan_call(arguments)
    if not plan.is_fused:
        return "PyTorch's own: cuBLAS multiplies, and the kernel behind it rounds as PyTorch does"
    is_same = known_bits(arguments, plan.alternatives[plan.chosen].name)
    if is_same is None:
        return "PyTorch's own: the first call compares the kernel's product with cuBLAS's, which runs if they differ"
    if is_same:
        return "PyTorch's own: the kernel's product of random matrices had the bits of cuBLAS's"
    return "PyTorch's own: cuBLAS multiplies, whose bits the kernel's product of random matrices did not have"


def _named(call: Call) -> list[tuple[str, Tensor]]:
    """The tensors of a call with their names."""
    if isinstance(call, PyTorchCall):
        return list(zip(("x", "weight"), call.tensors, strict=False))
    if isinstance(call, MLPCall):
        return [(name, tensor) for name, tensor in call.tensors._asdict().items() if tensor is not None]
    named: list[tuple[str, Tensor | None]] = [("x", call.x)]
    if isinstance(call, LinearCall):
        named += [("weight", call.weight), ("bias", call.bias)]
    named += [(f"operand {k}", tensor) for k, tensor in enumerate(call.operands)]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _explain(call: Call) -> Explanation:
    if isinstance(call, LinearCall):
        return _explain_linear(call)
    if isinstance(call, MLPCall):
        return _explain_mlp(call)
    if isinstance(call, PyTorchCall):
        return _explain_pytorch(call)
    program = call.epilogue.program if isinstance(call, PointwiseCall) else call.prologue.program
    inputs = [call.x, *call.operands]
    if isinstance(call, PointwiseCall):
        header = f"pointwise of {_described('x', call.x)}"
        kernel, stored = "pointwise kernel: one read, one write", call.x.numel()
    else:
        header = f"{call.op} of {_described('x', call.x)} over {_dims(call.dims)}"
        kernel = f"reduction kernel ({call.op}): one read; a small second kernel if thread blocks share a result"
        stored = math.prod(size for d, size in enumerate(call.x.shape) if d not in call.dims)
    composed = call.composed_because
    backward = ["backward: pointwise_backward kernel"] if needs_gradient(*inputs) and not composed else []
    return Explanation(
        call=header,
        path="composed" if composed else "kernel",
        steps=("PyTorch's own operations",) if composed else (kernel, *backward),
        reasons=(composed,) if composed else (),
        program=program,
        bytes=_bytes(inputs) + stored * call.out_dtype.itemsize,
        flops=0,
        compiles=_NO_KERNEL
        if composed
        else explain_pass(program, isinstance(call, ReduceCall), lambda: _compiled(call)),
    )


def _compiled(call: PointwiseCall | ReduceCall) -> Epilogues:
    """The program in the kernel of a call that is not composed."""
    if isinstance(call, PointwiseCall):
        y = torch.empty_like(call.x, dtype=call.out_dtype, device="meta")
        pointwise = lay_out_pointwise(call.x, call.operands, call.epilogue.program, y)
        return [] if pointwise is None else pointwise[1]
    program = call.prologue.program
    reduction = lay_out_reduction(call.x, call.operands, program, call.op, call.dims, call.out_dtype)
    return [] if reduction is None else reduction[1]


def _explain_pytorch(call: PyTorchCall) -> Explanation:
    described = map(_described, ("x", "weight"), call.tensors)
    over = f" over {_dims(call.dims)}" if call.dims else ""
    return Explanation(
        call=f"{call.name} of {', '.join(described)}{over}",
        path="composed",
        steps=("PyTorch's own operations",),
        reasons=(call.because,),
        program=IDENTITY,
        bytes=_bytes(call.tensors),
        flops=call.flops,
    )


def _explain_linear(call: LinearCall) -> Explanation:
    rows, depth = call.x.shape
    columns = call.weight.shape[0]
    inputs = [t for t in (call.x, call.weight, call.bias, *call.operands) if t is not None]
    weight = "weight" if call.prepared is None else "prepared weight"
    described = [_described("x", call.x), _described(weight, call.weight)]
    described += [_described(f"operand {k}", t) for k, t in enumerate(call.operands)]
    reduced = "" if call.reduction == "none" else f", {call.reduction} over the last dimension"
    path, steps, reasons, workspace_bytes, compiles, baseline = _linear_path(call)
    stored = rows if reduced else rows * columns
    products = 2 * (rows + columns) * depth if path == "matrix-vector" else 2 * rows * columns * depth
    return Explanation(
        call=f"linear of {', '.join(described)}{' with bias' if call.bias is not None else ''}{reduced}",
        path=path,
        steps=tuple(steps),
        reasons=(*reasons, *_about_planes(call, (*steps, *reasons))),
        program=call.epilogue.program,
        bytes=_bytes(inputs) + stored * call.out_dtype.itemsize,
        flops=products,
        workspace_bytes=workspace_bytes,
        compiles=compiles,
        baseline=baseline,
    )


def _explain_mlp(call: MLPCall) -> Explanation:
    """Of the layers forwards and, where one node runs, what it keeps and what is particular about its backward pass."""
    named = [*call.forward]
    if call.derivative is not None:
        named.append(("backward, hidden layer's gradient", call.derivative))
    with torch.no_grad():
        explained = [(what, _explain_linear(layer)) for what, layer in named]
    steps = [f"{what}: {step}" for what, layer in explained for step in layer.steps]
    reasons = [f"{what}: {reason}" for what, layer in explained for reason in layer.reasons]
    if call.is_sooner_by_layers:
        reasons.append(
            "a node for each layer, which keep what eager PyTorch keeps: the device would wait for the host, which "
            "takes longer to issue one node; recompute=True has one that keeps nothing of the hidden width"
        )
    (rows, _), hidden = call.forward[-1][1].x.shape, call.forward[-1][1].weight.shape[1]
    if call.keeps is not None:
        matrix = rows * hidden * call.x.element_size()
        kept = "nothing, and computes it again" if call.recompute else _quantity(call.keeps * matrix, "B")
        steps.append(f"kept of the hidden width {hidden} for the backward pass: {kept}")
        if call.has_pass:
            steps.append("backward, hidden layer's gradient: torch.mm, pointwise_backward kernel")
        steps.append("backward: products for the weights and x")
    layers = [layer for _, layer in explained[: len(call.forward)]]
    compiles: dict[str, list[str]] = {}
    for what, layer in explained:
        if layer.compiles != _NO_KERNEL:
            compiles.setdefault(layer.compiles, []).append(what)
    return Explanation(
        call=f"mlp of {', '.join(_described(*item) for item in _named(call))}",
        path=layers[-2].path,
        steps=tuple(steps),
        reasons=tuple(reasons),
        program=call.forward[-2][1].epilogue.program,
        bytes=sum(layer.bytes for layer in layers),
        flops=sum(layer.flops for layer in layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        compiles=_of_layers(compiles) or _NO_KERNEL,
        baseline=layers[-2].baseline,
    )


def _of_layers(compiles: dict[str, list[str]]) -> str:
    """What is compiled; a line for each where layers differ, with the layers of which that holds."""
    if len(compiles) < 2:
        return "".join(compiles)
    return "\n".join(f"{', '.join(layers)}: {what}" for what, layers in compiles.items())


def _about_planes(call: LinearCall, said: Sequence[str]) -> list[str]:
    """Why a prepared weight's planes are not used, unless `said` has that they are."""
    prepared = call.prepared
    if prepared is None or KEEPS in said:
        return []
    if prepared.without_planes:
        return [f"the prepared weight has no planes: {prepared.without_planes}"]
    return [f'the weight is prepared for "{prepared.mode}", but this call does not read its planes']


class _Path(NamedTuple):
    name: str
    steps: Sequence[str]
    reasons: Sequence[str]
    workspace_bytes: int = 0
    compiles: str = ""
    baseline: str = ""


def _baseline(call: LinearCall, fused: FusedExplanation) -> str:
    """What the times of kernels are compared with; empty where nothing is predicted."""
    if not fused.steps and fused.cublas is None:
        return ""
    if not _has_epilogue(call):
        return "cuBLAS's product, which is eager PyTorch's too"
    return _EAGER.format("cuBLAS and one kernel of cutfuse's behind it")


def _has_epilogue(call: LinearCall) -> bool:
    return bool(call.epilogue.program.instructions) or call.reduction != "none"


def _linear_path(call: LinearCall) -> _Path:
    composed = call.composed_because
    arguments = operator_of(call)
    if call.matrix_vector is not None:
        kernel = "PyTorch's own operations" if composed else "reduction kernels"
        steps = [f"weighted sum of weight over N: {kernel}", f"its product with x: {kernel}"]
        affine = "the epilogue is affine and summed over N, so no matrix product is needed"
        reasons = [affine, *([composed] if composed else [])]
        return _Path("matrix-vector", steps, reasons, compiles=_NO_PROGRAM)
    if is_plain(call):
        return _Path(
            "composed", ["torch.nn.functional.linear"], ["nothing follows the linear layer"], compiles=_NO_KERNEL
        )
    if composed:
        reasons = [composed]
        if composed == BEHIND_CUBLAS:
            ours = _explain_product(call, arguments)
            reasons += [*([] if ours.cublas is None else [rejected(ours.cublas)]), *ours.reasons]
        steps = ["torch.nn.functional.linear", "PyTorch's own operations"]
        return _Path("composed", steps, reasons, compiles=_NO_KERNEL)
    after = "pointwise kernel, in place" if call.reduction == "none" else f"reduction kernel ({call.reduction})"
    product = "cuBLAS: torch.addmm" if call.bias is not None else "cuBLAS: torch.mm"
    inputs = (call.x, call.weight, call.bias, *call.operands)
    if needs_gradient(*inputs):
        return _training_path(call, product, after.removesuffix(", in place"))
    fused = _explain_product(call, arguments)
    baseline = _baseline(call, fused)
    if not fused.steps:
        steps = [product, _timed(after, fused)]
        return _Path("unfused", steps, fused.reasons, compiles=fused.compiles, baseline=baseline)
    name = "fused" if _has_epilogue(call) else "product"
    return _Path(name, fused.steps, fused.reasons, fused.workspace_bytes, fused.compiles, baseline)


def _timed(after: str, fused: FusedExplanation) -> str:
    """What follows cuBLAS, with what both are predicted to take, if that is why nothing is fused."""
    return after if fused.cublas is None else f"{after}: {predicted(fused.cublas)} with the product"


def _training_path(call: LinearCall, product: str, after: str) -> _Path:
    """Of a call that autograd records. product, after: cuBLAS and what follows it, where that runs."""
    forced, program = autograd.is_forced(call.x), call.epilogue.program
    needs = "the backward pass needs the pre-activation, which a kernel that reduces rows does not store"
    reasons, fused, recomputed_because = [needs], None, ""
    arguments = operator_of(call)
    keeps = autograd.what_is_kept(arguments, call.recompute)
    if keeps == autograd.NOTHING:
        reasons = ["what is added has the gradient that arrives, so that the backward pass needs no pre-activation"]
        fused = _explain_product(call, arguments)
    elif keeps == autograd.INPUTS:
        recomputed_because = "recompute=True: the backward pass computes the pre-activation again"
        reasons = [recomputed_because]
        fused = _explain_product(call, arguments)
    elif call.reduction == "none" and program.instructions:
        reasons = ["the kernel stores the pre-activation too, which the backward pass needs"]
        fused = _explain_product(call, storing(arguments))
    backward = _backward_step(call, keeps)
    if fused is not None and fused.steps:
        steps, reasons = [*fused.steps, backward], [*reasons, *fused.reasons]
        baseline = _baseline(call, fused)
        return _Path("fused", steps, reasons, fused.workspace_bytes, fused.compiles, baseline)
    if fused is not None:
        after = _timed(after, fused)
        reasons = [*([recomputed_because] if recomputed_because else []), *fused.reasons]
    if forced:
        product = f'product in precision "{product_mode()}"'
        if KEEPS in _explain_product(call, _product_of(call)).steps:
            reasons = [*reasons, KEEPS]
    compiles = _explain_reduction(call, arguments) if fused is None else fused.compiles
    baseline = "" if fused is None else _baseline(call, fused)
    return _Path("unfused", [product, after, backward], reasons, compiles=compiles, baseline=baseline)


def _explain_reduction(call: LinearCall, arguments: LinearArguments) -> str:
    """What the kernel that reduces the rows of a stored pre-activation has compiled."""
    m, n, program = call.x.shape[0], call.weight.shape[0], call.epilogue.program

    def find() -> Epilogues:
        codes, reduction = dtype_codes(), reduction_codes()[call.reduction]
        operands = [(address, code, row, column, 0) for address, code, _, row, column in matrices_of(arguments)]
        x, out = (0, codes[call.x.dtype], n, 1, 0), codes[torch.float32]
        problem = native.core.ReduceProblem(program.native, (m, n, 1), x, operands, reduction, out)
        return find_alone(problem, call.x.device.index or 0)

    return explain_pass(program, call.reduction != "none", find)


def _backward_step(call: LinearCall, keeps: str) -> str:
    """What the backward pass runs."""
    forced = autograd.is_forced(call.x)
    products = f'products in precision "{product_mode()}"' if forced else "torch.mm"
    runs = [f"{products} for the pre-activation again"] if keeps == autograd.INPUTS else []
    has_sum = call.bias is not None and call.bias.requires_grad
    if keeps != autograd.NOTHING:
        runs.append("pointwise_backward kernel" + (" (with the bias gradient's sum)" if has_sum else ""))
    elif has_sum:
        runs.append("reduction kernel (the bias gradient's sum)")
    own = plan_backward_products(call.x, call.weight)
    of_x, of_weight = (products if plan is None else _kernel_of(plan) for plan in (own.of_x, own.of_weight))
    runs.append(f"{of_x} for x and weight" if of_x == of_weight else f"{of_x} for x, {of_weight} for weight")
    return f"backward: {', '.join(runs)}"


def _kernel_of(plan: LinearPlan) -> str:
    name: str = plan.alternatives[plan.chosen].name
    return name


def _product_of(call: LinearCall) -> LinearArguments:
    """The pre-activation alone, in x's type."""
    return operator_of(call)._replace(operands=[], program=IDENTITY, reduction="none", out_dtype=call.x.dtype)


def _explain_product(call: LinearCall, arguments: LinearArguments) -> FusedExplanation:
    _, planes, scheme = for_operators(call)
    return explain_fused(arguments, None if planes is None else Planes(scheme, planes))


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} need" if first else f"{last} needs"


def _described(name: str, tensor: Tensor) -> str:
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _dims(dims: tuple[int, ...]) -> str:
    return f"dim {dims[0]}" if len(dims) == 1 else f"dims {dims}"


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes that reading each tensor once moves. Broadcast dimensions count once."""
    total = 0
    for t in tensors:
        elements = math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride != 0 or size == 0)
        total += elements * t.element_size()
    return total


def _wrapped(entry: str) -> list[str]:
    """A line of an explanation, as several where it is longer than a terminal is wide."""
    return textwrap.wrap(entry, _TERMINAL_WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _quantity(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError


Call = LinearCall | MLPCall | PointwiseCall | ReduceCall | PyTorchCall
Normaliser = Callable[..., Call]  # takes what a call takes, and gives its normal form without running it

NORMALISERS: dict[Callable[..., Tensor], Normaliser] = {
    linear: describe_linear,
    mlp: normalise_mlp,
    pointwise: normalise_pointwise,
    sigmoid: lambda x: normalise_pointwise(torch.sigmoid, x),
    reduce: normalise_reduce,
    sum_: lambda x, dim=None, keepdim=False: normalise_reduce(x, dim, "sum", keepdim),
}
_WRITE = (
    "write explain(module, x), explain(cutfuse.linear, x, weight), explain(x, weight), explain(x, dim) or "
    "explain(fn, x)"
)
_WHOLE_MODELS = "for a whole model use cutfuse.explain_model(model, x)"


@runtime_checkable
class NormalisesCalls(Protocol):
    """A module whose `forward` makes one call of cutfuse, which `normalise_call` gives instead of making it.

    Both are defined by the same class: a subclass that has another `forward` cannot be explained without its own.
    """

    def normalise_call(self, *args: Any, **kwargs: Any) -> Call: ...


def normalise_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call that `explain` is given. Raises what the call raises; TypeError where it is no call of cutfuse."""
    called, normalise, arguments = _find_normaliser(args, kwargs)
    _check_signature(called, normalise, arguments, kwargs)
    return normalise(*arguments, **kwargs)


def _find_normaliser(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Normaliser, tuple[Any, ...]]:
    """The function or module that is called, what gives the normal form of its calls, and the arguments of this one."""
    first = args[0] if args else None
    if isinstance(first, torch.nn.Module):
        _refuse_compiled(first)
    if isinstance(first, torch.nn.Module) and isinstance(first, NormalisesCalls):
        _check_forward(first)
        return first, first.normalise_call, args[1:]
    if isinstance(first, LinearCrossEntropy) or first is linear_cross_entropy or first is linear_logprob:
        raise TypeError(
            "cutfuse.explain: the head of a language model makes several calls of cutfuse.linear; that of the forward "
            'pass is explain(cutfuse.linear, x, weight, bias, reduce="logsumexp")'
        )
    if inspect.isfunction(first) and first.__module__.startswith("cutfuse."):
        if first not in NORMALISERS:
            raise TypeError(f"cutfuse.explain: {first.__name__} makes no call that can be explained; {_WRITE}")
        return first, NORMALISERS[first], args[1:]
    if callable(first) and not isinstance(first, Tensor):
        return pointwise, _normalise_function, args
    second = args[1] if len(args) > 1 else kwargs.get("weight")
    function: Callable[..., Tensor] = linear if isinstance(second, Tensor | PreparedWeight) else reduce
    return function, NORMALISERS[function], args


def _refuse_compiled(module: torch.nn.Module) -> None:
    """Raises TypeError for what torch.compile made of a module: only until Python 3.11 does a protocol see in it the
    attributes of the one inside."""
    dynamo = sys.modules.get("torch._dynamo")  # which takes 1 s to import, and is there where something is compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise TypeError(
            f"cutfuse.explain: the module is compiled ({type(module).__name__}); explain the one that torch.compile "
            f"was given, or {_WHOLE_MODELS}"
        )


def _check_forward(module: torch.nn.Module) -> None:
    """Raises TypeError where `normalise_call` is of another forward than the one that runs."""
    name = type(module).__name__
    own = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if "forward" in vars(module) or "normalise_call" not in vars(own):
        raise TypeError(
            f"cutfuse.explain: {name} has another forward than cutfuse's. Either PyTorch's own operations compute it, "
            "or it makes calls of cutfuse: explain those"
        )


def _check_signature(called: Any, normalise: Normaliser, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    is_module = isinstance(called, torch.nn.Module)
    try:
        inspect.signature(normalise if is_module else called).bind(*arguments, **kwargs)
    except TypeError as error:
        name = type(called).__name__ if is_module else called.__name__
        raise TypeError(f"cutfuse.explain: {error} in a call of {name}; {_WRITE}") from None


def _normalise_function(fn: Callable[..., Any], *given: Any, **options: Any) -> PointwiseCall:
    """Of `explain(fn, x)`, which asks about `pointwise(fn, x)`."""
    try:
        return normalise_pointwise(fn, *given, **options)
    except EpilogueError as error:
        if isinstance(fn, torch.nn.Module):
            what = f"{type(fn).__name__} is no module of cutfuse.nn; {_WHOLE_MODELS}"
        else:
            what = f"{getattr(fn, '__name__', type(fn).__name__)} is no function of cutfuse"
        raise EpilogueError(
            f"cutfuse.explain: {what}. cutfuse.pointwise, which takes elementwise functions, refuses it: {error}"
        ) from error


@dataclass(frozen=True)
class Availability:
    """What `cutfuse.is_available` returns: true or false in conditions, and printed with the reason.

    reason: why no kernel runs, or where some do, why none multiplies; empty where all run.
    """

    is_available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.is_available

    def __repr__(self) -> str:
        return f"{self.is_available}: {self.reason}" if self.reason else str(self.is_available)


def is_available(device: torch.device | str | int | None = None) -> Availability:
    """Whether cutfuse's kernels run on a device. Where they do not, PyTorch's own operations compute every call.

    It is true on CUDA devices from sm_80 on. The kernels that multiply and apply the epilogue in one are for sm_90: on
    others the result is true, with that as the reason. What runs for a call, `cutfuse.explain` says.

    Args:
        device: as PyTorch names it, or the index of a CUDA device; by default the current CUDA device.

    Returns:
        An object that is true or false in conditions, has the reason as `reason`, a str that is empty where all kernels
        run, and prints as, for example, `False: this build of cutfuse has no CUDA kernels`.

    Raises:
        RuntimeError: `device` is not the name of a device.
    """
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    try:
        native.module()
    except ImportError as error:
        return Availability(False, str(error))
    why = _why_missing(asked)
    if why:
        return Availability(False, why)
    if asked.type == "cuda" and asked.index is None:
        asked = torch.device("cuda", torch.cuda.current_device())
    why = native.why_unserved(asked)
    return Availability(not why, why or why_no_kernels(asked))


def _why_missing(device: torch.device) -> str:
    """Why a CUDA device is not there; empty where it is, and for other devices."""
    if device.type != "cuda":
        return ""
    if torch.version.cuda is None:
        return native.without_cuda()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return "PyTorch finds no CUDA device"
    return "" if (device.index or 0) < count else f"PyTorch finds {count} CUDA devices, and no {device}"
