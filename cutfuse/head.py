"""The head of a language model: a linear layer and the cross-entropy, log-probability or entropy of its rows.

The matrix of logits `[M, V]` never exists. The forward pass is a product whose epilogue reduces its rows. The backward
pass multiplies again, a part of the vocabulary at a time: the epilogue of that product makes the part's gradient, from
which the gradients of x and of the part's weights are two more products. This is the method of Wijmans et al., "Cut
Your Losses in Large-Vocabulary Language Models", 2024, without its filter of small gradients: nothing is left out.
Parts whose logits are kept for the backward pass, where there is memory for them, are not multiplied again.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import arguments, dynamo, sharded
from .epilogue.program import arithmetic_dtype
from .invariance import is_batch_invariant, may_be_batch_invariant, require, without_batch_invariance
from .layer.autograd import composes_gradient, differentiate, needs_gradient
from .layer.linear_plan import plan_call
from .linear import autocast_inputs, normalise_linear, operator_of
from .linear import linear_once as linear
from .pointwise import pointwise
from .precision import captured_mode, in_captured_mode
from .reduce import reduce

PART_BYTES = 256 << 20  # of a part's gradient, by default
_PART_MULTIPLE = 128  # columns of the vocabulary: whole tiles
_DOT_ELEMENTS = 1 << 24  # of the rows whose targets' logits are computed at a time
_LOWEST = -1e30  # in place of a log-probability of minus infinity, where it is multiplied by a probability of 0
_REDUCTIONS = ("mean", "sum", "none")
_INTEGERS: tuple[type, ...] = numbers.Integral, torch.SymInt
_NUMBERS: tuple[type, ...] = numbers.Real, torch.SymInt, torch.SymFloat


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    part_bytes: int = PART_BYTES,
    kept_bytes: int = 0,
) -> Tensor:
    """`F.cross_entropy(logits, target)` of `logits = x @ weight.T + bias`, without the matrix of logits.

    Args:
        x: `[..., K]` in fp64, fp32, bf16 or fp16.
        weight: `[V, K]`, of x's type and on its device.
        target: `[...]` of int64, the class of each row of x: 0 to V - 1, or `ignore_index`.
        bias: `[V]`, of x's type, or None.
        ignore_index: the target of rows that have no loss and no gradient.
        reduction: "mean" over the rows that count, "sum", or "none".
        label_smoothing: the part of the target that all classes share, from 0 to 1.
        z_loss: adds `z_loss * logsumexp(logits) ** 2` to the loss of each row.
        softcap: a number c makes `c * tanh(logits / c)` of the logits; None leaves them.
        temperature: divides the logits, behind the softcap.
        part_bytes: memory for a part of the logits or of their gradient: the vocabulary is taken in as many parts as
            that needs. 256 MiB by default; more takes fewer launches.
        kept_bytes: memory for logits of whole parts, in x's type, that the forward pass keeps for the backward pass,
            which then need not compute them again: 0 keeps none.

    Returns:
        The loss in fp32 (fp64 for fp64): `[]`, or `[...]` for "none". NaN for the mean of no row, as in PyTorch.

    Gradients are those of x, weight and bias, as far as they are asked for. The forward pass makes one product, and the
    backward pass three: of the logits again where they were not kept, of x's gradient and of the weight's. Label
    smoothing behind a softcap takes one more where logits are not kept. Transforms of torch.func, gradients that are
    batched or differentiated again, and tensors that wrap others take PyTorch's own operations on the matrix of logits.
    A weight that is a `DTensor` sharded by its rows, on a mesh of one dimension with x and bias, is none of these: each
    rank computes its classes, and one collective puts the ranks' statistics together.

    A target's logit is a dot product of its own, in fp32, rounded to 16 bits where the other logits are, as those that
    are kept. Where fp32 products round more, as in tf32, a log-probability may be above 0 by that rounding.

    Raises:
        ValueError: shapes, devices, a reduction or a number that do not fit.
        TypeError: types that do not fit; targets that are probabilities.
    """
    function = "linear_cross_entropy"
    if reduction not in _REDUCTIONS:
        raise ValueError(f'cutfuse.{function}: reduction has to be "mean", "sum" or "none", got {reduction!r}')
    _check_number(function, "ignore_index", ignore_index, _INTEGERS)
    _check_number(function, "label_smoothing", label_smoothing)
    _check_number(function, "z_loss", z_loss)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"cutfuse.{function}: label_smoothing has to be from 0 to 1, got {label_smoothing}")
    target = sharded.whole_target(target, x, weight, bias)
    counts = target != ignore_index if isinstance(target, Tensor) else None
    is_smoothed = label_smoothing > 0.0
    given, options = (x, weight, bias, target), (softcap, temperature, part_bytes, kept_bytes)
    logsumexp, chosen, mean, _ = _statistics(function, given, counts, options, wants_mean=is_smoothed)
    losses = logsumexp - (1.0 - label_smoothing) * chosen
    if is_smoothed:
        losses = losses - label_smoothing * mean
    if z_loss != 0.0:
        losses = losses + z_loss * logsumexp.square()
    assert counts is not None
    losses = torch.where(counts, losses.reshape(target.shape), 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


def linear_logprob(
    x: Tensor,
    weight: Tensor,
    token: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    part_bytes: int = PART_BYTES,
    kept_bytes: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of a token in each row: `log_softmax(x @ weight.T + bias)[..., token]`, without the logits.

    Args:
        x, weight, bias, softcap, temperature, part_bytes, kept_bytes: as of `cutfuse.linear_cross_entropy`.
        token: `[...]` of int64, from 0 to V - 1.
        entropy: give the entropy of each row's distribution too, for one more product.

    Returns:
        `[...]` in fp32 (fp64 for fp64), or with `entropy` a pair of such tensors, in nats. Both have gradients.

    Raises what `cutfuse.linear_cross_entropy` raises.
    """
    arguments.check_flag("linear_logprob", "entropy", entropy)
    token = sharded.whole_target(token, x, weight, bias)
    given, options = (x, weight, bias, token), (softcap, temperature, part_bytes, kept_bytes)
    logsumexp, chosen, _, entropies = _statistics("linear_logprob", given, None, options, wants_entropy=entropy)
    logprob = (chosen - logsumexp).reshape(token.shape)
    return (logprob, entropies.reshape(token.shape)) if entropy else logprob


def _statistics(
    function: str,
    given: tuple[Tensor, Tensor, Tensor | None, Tensor],
    counts: Tensor | None,
    options: tuple[float | None, float, int, int],
    *,
    wants_mean: bool = False,
    wants_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `logit_statistics` gives of a call, which is checked.

    given: x, weight, bias and target. counts: which targets are classes; None for all. options: softcap, temperature,
    part_bytes and kept_bytes.
    """
    x, weight, bias, target = given
    softcap, temperature, part_bytes, kept_bytes = options
    target_name = "token" if function == "linear_logprob" else "target"
    arguments.check_layer(function, x, weight, bias)
    arguments.check_tensor(function, target_name, target)
    arguments.check_device(function, x, target_name, target)
    if target.dtype != torch.int64:
        hint = "; probabilities of all classes need the matrix of logits" if target.is_floating_point() else ""
        raise TypeError(f"cutfuse.{function}: the {target_name} has to be classes of int64, got {target.dtype}{hint}")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"cutfuse.{function}: the {target_name} has to be [...] for x [..., K], got shapes {tuple(target.shape)} "
            f"and {tuple(x.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"cutfuse.{function}: a weight of shape {tuple(weight.shape)} has no class")
    positive = {"softcap": 1.0 if softcap is None else softcap, "temperature": temperature, "part_bytes": part_bytes}
    for name, number in positive.items():
        _check_number(function, name, number, _INTEGERS if name == "part_bytes" else _NUMBERS)
        if not 0 < number < math.inf:
            raise ValueError(f"cutfuse.{function}: {name} has to be above 0 and finite, got {number}")
    _check_number(function, "kept_bytes", kept_bytes, _INTEGERS)
    if kept_bytes < 0:
        raise ValueError(f"cutfuse.{function}: kept_bytes has to be 0 or more, got {kept_bytes}")
    x, weight, bias = autocast_inputs(x, weight, bias)
    arguments.check_one_type(function, x, weight, bias)
    classes = (target if counts is None else torch.where(counts, target, 0)).reshape(-1)
    shard = None if arguments.why_transformed() else sharded.shard_of(x, weight, bias)
    if shard is not None:
        x, weight, bias = shard.local(x, weight, bias)
        classes, is_own = shard.own_classes(classes)
    matrix = x.reshape(target.numel(), x.shape[-1])
    call = matrix, weight, bias, classes, float(softcap or 0.0), float(temperature)
    if arguments.why_transformed() or arguments.why_wrapped((x, weight, bias), [classes]):
        require("PyTorch's own operations compute the logits")
        return _statistics_of_logits(*call, wants_mean, wants_entropy)
    kept_bytes = kept_bytes if needs_gradient(x, weight, bias) and not may_be_batch_invariant() else 0
    logsumexp, chosen, mean, entropy, _ = logit_statistics(
        *call, wants_mean, wants_entropy, part_bytes, kept_bytes, captured_mode()
    )
    if shard is not None:
        return shard.combine(logsumexp, chosen, mean, entropy, is_own)
    return logsumexp, chosen, mean, entropy


def _statistics_of_logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,
    softcap: float,
    temperature: float,
    wants_mean: bool,
    wants_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `logit_statistics` gives, by PyTorch's own operations on the logits: for transforms of torch.func,
    forward-mode derivatives, ONNX and tensors that wrap others, which know no operators of cutfuse, and for gradients
    that are batched or differentiated again."""
    z = F.linear(x, weight, bias).to(arithmetic_dtype(x))
    shape = _logits(softcap, temperature)
    logits = z if shape is None else shape(z)
    logsumexp = torch.logsumexp(logits, 1)
    mean = logits.mean(1) if wants_mean else logits.new_empty(0)
    entropy = logits.new_empty(0)
    if wants_entropy:
        entropy = -_entropy_terms(softcap, temperature)(z, logsumexp.unsqueeze(1)).sum(1)
    return logsumexp, logits.gather(1, classes.unsqueeze(1)).squeeze(1), mean, entropy


def _check_number(function: str, name: str, value: Any, kinds: tuple[type, ...] = _NUMBERS) -> None:
    """Raises TypeError for what is no number of these kinds, a tensor for example: it would have no gradient."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        arguments.refuse_type(function, name, "an integer" if kinds is _INTEGERS else "a number", value)


@functools.lru_cache(maxsize=64)
def _logits(softcap: float, temperature: float) -> Callable[[Tensor], Tensor] | None:
    """The logits of a pre-activation z; None where they are z itself."""
    scale = 1.0 / temperature
    if softcap:
        return lambda z: torch.tanh(z * (1.0 / softcap)) * (softcap * scale)
    return None if temperature == 1.0 else lambda z: z * scale


@functools.lru_cache(maxsize=64)
def _entropy_terms(softcap: float, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Probability times log-probability, of z and the row's logsumexp."""
    logits = _logits(softcap, temperature) or (lambda z: z)

    def terms(z: Tensor, logsumexp: Tensor) -> Tensor:
        logprob = logits(z) - logsumexp
        return torch.exp(logprob) * torch.clamp(logprob, min=_LOWEST)

    return terms


@functools.lru_cache(maxsize=64)
def _logit_gradient(softcap: float, temperature: float, has_mean: bool, has_entropy: bool) -> Callable[..., Tensor]:
    """The gradient of z, of z and of each row: the logsumexp, and what the row's gradients make of a logit's.

    With the log-probability l it is the sum of exp(l), times the logsumexp's gradient; one of V parts of the mean's
    gradient; and -exp(l) * (l + entropy), times the entropy's gradient.
    """
    scale = 1.0 / temperature

    def gradient(z: Tensor, logsumexp: Tensor, of_probability: Tensor, *more: Tensor) -> Tensor:
        inner = torch.tanh(z * (1.0 / softcap)) if softcap else z
        logprob = inner * ((softcap or 1.0) * scale) - logsumexp
        factor = of_probability
        if has_entropy:
            factor = factor + more[-1] * torch.clamp(logprob, min=_LOWEST)
        found = torch.exp(logprob) * factor
        if has_mean:
            found = found + more[0]
        return found * ((1.0 - inner * inner) * scale) if softcap else found * scale

    return gradient


@torch.library.custom_op("cutfuse::logit_statistics", mutates_args=())
def logit_statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,
    softcap: float,
    temperature: float,
    wants_mean: bool,
    wants_entropy: bool,
    part_bytes: int,
    kept_bytes: int,
    mode: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of each row of the logits, behind softcap and temperature: the logsumexp, the logit of its class, the mean and
    the entropy, `[M]` each, in fp32 or fp64; empty where not wanted. And what is kept of pre-activations: see `_parts`.

    classes: `[M]`. softcap: 0 for none. mode: the precision of fp32 products; empty for the one that holds.
    """
    dtype, logits = arithmetic_dtype(x), _logits(softcap, temperature)
    mean, entropy = (x.new_zeros(x.shape[0] if wanted else 0, dtype=dtype) for wanted in (wants_mean, wants_entropy))
    kept = x.new_empty(_kept_shape(x, weight, part_bytes, kept_bytes))
    with in_captured_mode(x, mode):
        # In parts of a size that the rows decide, a row would be summed in another order.
        parts = [_Part(weight, bias, None)] if is_batch_invariant() else _parts(x, weight, bias, part_bytes, kept)
        if wants_entropy and not is_batch_invariant():
            parts = _rounded_alike(x, parts, logits, _entropy_terms(softcap, temperature))
        for part in parts:
            part.keep(x)
        of_parts = [part.reduce(x, "logsumexp", logits) for part in parts]
        logsumexp = of_parts[0] if len(of_parts) == 1 else torch.logsumexp(torch.stack(of_parts), 0)
        logsumexp.masked_fill_(logsumexp == torch.inf, torch.nan)  # as log_softmax has it, and its gradients then
        for part in parts:
            if wants_mean:
                mean += part.reduce(x, "sum", logits)
            if wants_entropy:
                entropy -= part.reduce(x, "sum", _entropy_terms(softcap, temperature), logsumexp.unsqueeze(1))
        chosen = _chosen(x, weight, bias, classes)
        if x.dtype.itemsize == 2:
            chosen = torch.where(_are_rounded(x, classes, parts, logits), chosen.to(x.dtype).to(dtype), chosen)
    return logsumexp, chosen if logits is None else logits(chosen), mean.div_(weight.shape[0]), entropy, kept


class _Part(NamedTuple):
    """Some classes: rows of the weight and of the bias, and their pre-activations `[M, N]` where these are kept.

    is_rounded: every reduction reads pre-activations of x's type, which are computed for it where they are not kept.
    """

    weight: Tensor
    bias: Tensor | None
    kept: Tensor | None
    is_rounded: bool = False

    def keep(self, x: Tensor) -> None:
        """Computes the pre-activations, where they are to be kept."""
        if self.kept is None:
            return
        if x.dtype == torch.float32:
            self.kept.copy_(linear(x, self.weight, self.bias))
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=self.kept)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=self.kept)

    def reduce(self, x: Tensor, op: str, function: Callable[..., Tensor] | None, *operands: Tensor) -> Tensor:
        """`[M]` in fp32 or fp64: `op` of the function of each pre-activation and of columns."""
        dtype = arithmetic_dtype(x)
        z = linear(x, self.weight, self.bias) if self.is_rounded and self.kept is None else self.kept
        if z is not None:
            return reduce(z, 1, op, prologue=function, operands=operands, out_dtype=dtype)
        return linear(x, self.weight, self.bias, epilogue=function, operands=operands, reduce=op, out_dtype=dtype)

    def compute(self, x: Tensor, function: Callable[..., Tensor], operands: Sequence[Tensor]) -> Tensor:
        """`[M, N]` in x's type: the function of each pre-activation and of columns."""
        if self.kept is not None:
            return pointwise(function, self.kept, *operands, out_dtype=x.dtype)
        return linear(x, self.weight, self.bias, epilogue=function, operands=operands, out_dtype=x.dtype)


def _width(x: Tensor, weight: Tensor, part_bytes: int) -> int:
    """How many classes a part has, of whose logits one part fits into so many bytes in x's type."""
    fitting = part_bytes // max(x.shape[0] * x.element_size(), 1)
    return min(max(fitting // _PART_MULTIPLE * _PART_MULTIPLE, _PART_MULTIPLE), weight.shape[0])


def _kept_shape(x: Tensor, weight: Tensor, part_bytes: int, kept_bytes: int) -> tuple[int, int]:
    """For how many parts there is memory, and the elements of one."""
    if kept_bytes == 0:
        return 0, 0
    width = _width(x, weight, part_bytes)
    fitting = kept_bytes // max(x.shape[0] * width * x.element_size(), 1)
    return min(fitting, -(-weight.shape[0] // width)), x.shape[0] * width


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, part_bytes: int, kept: Tensor) -> list[_Part]:
    """The vocabulary in parts, the last one of fewer classes.

    kept: a row for each of the first parts, whose pre-activations it begins with.
    """
    width = _width(x, weight, part_bytes)
    weights = weight.split(width)
    biases = [None] * len(weights) if bias is None else bias.split(width)
    shapes = [(x.shape[0], own.shape[0]) for own in weights]
    rows = [row[: math.prod(shape)].view(shape) for row, shape in zip(kept, shapes, strict=False)]
    return [_Part(*part) for part in zip(weights, biases, [*rows, *[None] * (len(weights) - len(rows))], strict=True)]


def _are_rounded(x: Tensor, classes: Tensor, parts: list[_Part], logits: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Of which classes the logits are rounded to x's type: where they are kept, and where no kernel reduces the rows
    that it multiplies.

    A target's logit has to be rounded with the others of its row: the gradient of a probability near 1 is what is left
    of 1, which is as small as the rounding of a large logit in 16 bits. The last part, which is narrower, may be
    planned otherwise than the first.
    """
    first, last = (part.is_rounded or _rounds_logits(x, part, "logsumexp", logits) for part in (parts[0], parts[-1]))
    kept = sum(part.weight.shape[0] for part in parts if part.kept is not None)
    return torch.where(classes < sum(part.weight.shape[0] for part in parts[:-1]), first, last) | (classes < kept)


def _rounded_alike(
    x: Tensor, parts: list[_Part], logits: Callable[[Tensor], Tensor] | None, terms: Callable[[Tensor, Tensor], Tensor]
) -> list[_Part]:
    """The parts, whose two reductions are to read logits that are rounded alike: for the logsumexp and for the entropy.

    Probabilities of logits that are rounded otherwise than those of the logsumexp do not add up to 1: with bf16 logits
    of 30 the entropy of a row was 0.13 off, and below 0.
    """
    if x.dtype.itemsize != 2:
        return parts
    column = x.new_empty(x.shape[0], 1, dtype=arithmetic_dtype(x))
    ends = parts[0], parts[-1]
    rounds = [_rounds_logits(x, part, "logsumexp", logits) for part in ends]
    rounds += [_rounds_logits(x, part, "sum", terms, column) for part in ends]
    return [part._replace(is_rounded=True) for part in parts] if len(set(rounds)) > 1 else parts


def _rounds_logits(x: Tensor, part: _Part, op: str, function: Callable[..., Tensor] | None, *operands: Tensor) -> bool:
    """Whether the reduction of a part that keeps nothing reads logits of x's type."""
    call = normalise_linear(
        x, part.weight, part.bias, epilogue=function, operands=operands, reduce=op, out_dtype=arithmetic_dtype(x)
    )
    return bool(call.composed_because) or not plan_call(operator_of(call)).is_fused


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """The pre-activation of each row's class: a dot product of a row of x and one of the weight."""
    dtype, rows = arithmetic_dtype(x), max(_DOT_ELEMENTS // max(x.shape[1], 1), 1)
    found = x.new_empty(x.shape[0], dtype=dtype)
    for first in range(0, x.shape[0], rows):
        part = slice(first, first + rows)
        of_classes = weight.index_select(0, classes[part])  # refuses negative ones, as an index in brackets does not
        found[part] = reduce(x[part], 1, "sum", prologue=torch.mul, operands=(of_classes,), out_dtype=dtype)
    return found if bias is None else found + bias.index_select(0, classes).to(dtype)


@logit_statistics.register_fake
def _(x: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, ...]:
    wants_mean, wants_entropy, part_bytes, kept_bytes, _ = given[4:]
    rows, dtype = x.shape[0], arithmetic_dtype(x)
    sizes = rows, rows, rows if wants_mean else 0, rows if wants_entropy else 0
    kept = x.new_empty(_kept_shape(x, weight, part_bytes, kept_bytes))
    return *(x.new_empty(size, dtype=dtype) for size in sizes), kept


@torch.library.custom_op("cutfuse::logit_gradients", mutates_args=())
def logit_gradients(
    gradients: Sequence[Tensor],
    statistics: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Tensor,
    softcap: float,
    temperature: float,
    part_bytes: int,
    mode: str,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, of which those are `needed`; empty for the others.

    statistics: what `logit_statistics` gave. gradients: of all of that but the last, `[M]` or empty.
    """
    needs_x, needs_weight, needs_bias = needed
    of_x: Tensor | None = None
    of_weight = x.new_empty(weight.shape if needs_weight else (0,))
    of_bias = x.new_empty(weight.shape[:1] if needs_bias else (0,))
    with in_captured_mode(x, mode), without_batch_invariance():
        elements = _ElementGradients(gradients, statistics, weight.shape[0], softcap, temperature)
        first = 0
        for own in _parts(x, weight, bias, part_bytes, statistics[-1]):
            grad = elements.of_part(x, own, classes - first)
            rows = own.weight
            part = slice(first, first + rows.shape[0])
            if needs_x:
                before = () if of_x is None else (of_x,)
                plus = torch.add if before else None
                of_x = linear(grad, rows.t(), epilogue=plus, operands=before, out_dtype=arithmetic_dtype(x))
            if needs_weight and x.dtype == torch.float32:
                of_weight[part] = linear(grad.t(), x.t())
            elif needs_weight:
                torch.mm(grad.t(), x, out=of_weight[part])
            if needs_bias:
                of_bias[part] = grad.sum(0)
            del grad  # before the next part has one: the two would be the most that a step holds
            first += rows.shape[0]
    return x.new_empty(0) if of_x is None else of_x.to(x.dtype), of_weight, of_bias


class _ElementGradients:
    """The gradient of the pre-activation, a part of the vocabulary at a time."""

    def __init__(
        self,
        gradients: Sequence[Tensor],
        statistics: Sequence[Tensor],
        vocabulary: int,
        softcap: float,
        temperature: float,
    ) -> None:
        of_logsumexp, of_chosen, of_mean, of_entropy = gradients
        logsumexp, chosen, _, entropy, _ = statistics
        has_mean, has_entropy = of_mean.numel() > 0, of_entropy.numel() > 0
        is_zero = (of_logsumexp == 0) & (of_chosen == 0)
        # The probabilities of a row without gradients are 0, whatever its logits are.
        factor, logprob = of_logsumexp, chosen - logsumexp
        operands = []
        if has_mean:
            is_zero &= of_mean == 0
            operands.append(of_mean / vocabulary)
        if has_entropy:
            is_zero &= of_entropy == 0
            factor = factor - of_entropy * entropy
            operands.append(-of_entropy)
        factor = torch.where(is_zero, 0.0, factor)
        logsumexp = torch.where(is_zero, torch.inf, logsumexp)
        self.operands = [t.unsqueeze(1) for t in (logsumexp, factor, *operands)]
        self.epilogue = _logit_gradient(softcap, temperature, has_mean, has_entropy)
        if has_entropy:
            factor = factor - of_entropy * torch.clamp(logprob, min=_LOWEST)
        found = torch.where(is_zero, 0.0, torch.exp(logprob) * factor) + of_chosen
        inner = chosen * temperature / softcap if softcap else torch.zeros_like(chosen)
        slope = (1.0 - inner * inner) / temperature
        self.of_chosen = ((found + operands[0] if has_mean else found) * slope).unsqueeze(1)

    def of_part(self, x: Tensor, part: _Part, classes: Tensor) -> Tensor:
        """`[M, N]` in x's type, of a part with N classes. classes: of each row, counted from the part's first."""
        grad = part.compute(x, self.epilogue, self.operands)
        column = classes.unsqueeze(1)
        is_inside = (column >= 0) & (column < grad.shape[1])
        column = column.clamp(0, grad.shape[1] - 1)
        return grad.scatter_(1, column, torch.where(is_inside, self.of_chosen.to(grad.dtype), grad.gather(1, column)))


@logit_gradients.register_fake
def _(gradients: Any, statistics: Any, x: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, ...]:
    shapes = x.shape, weight.shape, weight.shape[:1]
    return tuple(x.new_empty(shape if is_needed else (0,)) for shape, is_needed in zip(shapes, given[-1], strict=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, classes, softcap, temperature, _, _, part_bytes, _, mode = inputs
    ctx.save_for_backward(x, weight, bias, classes, *output)
    ctx.options = softcap, temperature, part_bytes, mode
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # of what is kept they would take as much memory


def _differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, classes, *statistics = ctx.saved_tensors
    of_statistics = zip(given[:-1], statistics[:-1], strict=True)
    gradients = [torch.zeros_like(own) if grad is None else grad for grad, own in of_statistics]
    needed = [bool(is_needed) for is_needed in ctx.needs_input_grad[:3]]
    if not dynamo.is_tracing() and any(map(composes_gradient, gradients)):
        return *_differentiate_logits(ctx, gradients, statistics, needed), *[None] * 8
    found = logit_gradients(gradients, statistics, x, weight, bias, classes, *ctx.options, needed)
    return (*(grad if is_needed else None for grad, is_needed in zip(found, needed, strict=True)), *[None] * 8)


def _differentiate_logits(
    ctx: Any, gradients: Sequence[Tensor], statistics: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """PyTorch's own gradients of x, weight and bias, which may be batched or differentiated again."""
    x, weight, bias, classes, *_ = ctx.saved_tensors
    softcap, temperature, *_ = ctx.options
    wanted = [t.numel() > 0 for t in statistics[2:-1]]

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.cat(_statistics_of_logits(x, weight, bias, classes, softcap, temperature, *wanted))

    return differentiate(compute, (x, weight, bias), needed, torch.cat(list(gradients)))


logit_statistics.register_autograd(_differentiate, setup_context=_keep)
