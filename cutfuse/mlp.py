"""An MLP as one node of the autograd graph: two linear layers, or three with a gate, and what is between them.

A node that knows both layers keeps one matrix of the hidden width for its backward pass, where one node for each layer
keeps two: what the activation's derivative reads. Where that is the hidden layer, the derivative is the epilogue of the
product that gives the hidden layer's gradient, which so is never in memory. Where it is the pre-activation, one pass
over that and the hidden layer's gradient gives all that is computed element by element: the pre-activation's gradient,
its sum and the hidden layer again, in the memory of what it reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import arguments, composed
from .epilogue import Epilogue
from .epilogue.derivative import INPUT, OUTPUT, Derivative, derive
from .epilogue.errors import EpilogueError
from .epilogue.expression import operand
from .epilogue.program import Program, arithmetic_dtype
from .epilogue.types import types_of
from .invariance import without_batch_invariance
from .layer import calls, cuda, schema
from .layer.autograd import (
    Multiplication,
    composes_gradient,
    differentiate,
    element_gradients,
    needs_gradient,
    sum_of_rows,
    wanted_inputs,
    weight_gradient,
)
from .layer.training_step import is_traced, issuer_of_products, mlp_waits_for_host
from .linear import LinearCall, autocast_inputs, normalise_linear
from .linear import linear_once as linear
from .precision import captured_mode, in_captured_mode

Weights = Tensor | tuple[Tensor, Tensor] | list[Tensor]
Gate = bool | Callable[[Tensor, Tensor], Tensor]
_Function = Callable[..., Tensor] | Epilogue | None  # of the hidden layer's pre-activations


class _Tensors(NamedTuple):
    """What an MLP computes with, of one type but for the residual.

    up, up_bias: of the layer beside the first one. None without a gate, and where w1 and b1 have both layers' rows.
    """

    x: Tensor  # [..., K]
    w1: Tensor  # [H, K], or [2 H, K]
    b1: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    w2: Tensor  # [N, H]
    b2: Tensor | None
    residual: Tensor | None  # [..., N]


def mlp(
    x: Tensor,
    w1: Weights,
    b1: Weights | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: Callable[..., Tensor] | Epilogue | None = None,
    gate: Gate = False,
    residual: Tensor | None = None,
    recompute: bool = False,
) -> Tensor:
    """`activation(x @ w1.T + b1) @ w2.T + b2 + residual`, as one node of the autograd graph.

    Args:
        x: `[..., K]` in fp64, fp32, bf16 or fp16.
        w1: `[H, K]`, of x's type and on its device. With a gate the two weights, `[H, K]` each: a pair, or one matrix
            `[2 H, K]` with one below the other, as many models store them.
        b1: `[H]`, or as w1 a pair or `[2 H]`; None for none.
        w2, b2: `[N, H]` and `[N]`; b2 may be None.
        activation: a function of the hidden layer's pre-activation, as the epilogue of `cutfuse.linear`, or a
            `cutfuse.Epilogue`. None is the identity.
        gate: True makes the hidden layer `activation(x @ gate.T) * (x @ up.T)`, with w1's first weight as the gate. A
            function of the two pre-activations, such as `lambda a, b: a * torch.sigmoid(b)`, is the hidden layer
            itself; it takes no activation beside it.
        residual: a tensor of the result's shape that is added to it, or None.
        recompute: keep no matrix of the hidden width for the backward pass, which computes it again by the first
            product. In compiled functions torch.compile decides what is kept.

    Returns:
        `[..., N]`, in x's type, or in what PyTorch promotes it and the residual's to.

    The hidden layer has x's type. Under autocast everything but the residual is cast as `F.linear` casts it.

    One node runs on a GPU in fp32, bf16 and fp16 where a gradient is needed. It keeps x, the weights and, of each row,
    H numbers: the hidden layer, where its derivative can be written in that, as those of relu, relu squared, sigmoid,
    tanh and leaky relu; otherwise the pre-activation. With a gate it keeps both pre-activations. Compiled functions,
    transforms of torch.func, fp64, other devices and tensors that wrap others, such as `DTensor`, take `cutfuse.linear`
    for each layer, and so do steps that would wait for the host to issue one node, unless they recompute. So do
    gradients that are batched or differentiated again, in PyTorch's own operations.

    Raises:
        ValueError: shapes or devices that do not fit; an activation beside a gate that is a function.
        TypeError: types that do not fit.
        EpilogueError: an activation or a gate that cannot be traced or exceeds a program's limits.
    """
    has_gate, hidden = gate is not False, hidden_function(activation, gate)
    given = None if torch.compiler.is_dynamo_compiling() else _unpacked(x, w1, b1, w2, b2, residual)
    y: Tensor | None = None if given is None else calls.call_mlp(hidden, has_gate, recompute, *given)
    if y is not None and y is not NotImplemented:
        return y
    tensors = _prepared(x, w1, b1, w2, b2, gate, residual, recompute)
    if given is not None and y is NotImplemented:
        epilogue = None if hidden is None else _resolved(tensors.x, hidden, has_gate)
        y = _run_as_planned(given, hidden, epilogue, has_gate, recompute)
        if y is not None:
            return y
        hidden = epilogue
    if _takes_one_node(tensors, recompute):
        # Kernels read memory, in which the numbers of a negated view have their other sign.
        plain = [t if t is None else t.resolve_neg() for t in tensors]
        return _node_of(tensors, hidden, has_gate, recompute)(*plain)
    return _run_by_layers(hidden, has_gate, recompute, *tensors)


def _run_as_planned(
    given: _Tensors, hidden: _Function, epilogue: Epilogue | None, has_gate: bool, recompute: bool
) -> Tensor | None:
    """The result by a plan that the next calls like this one run directly; None where the call has no key.

    epilogue: of `hidden`, which may read what changes. The plan holds nothing else of it.
    """

    def make_function() -> Callable[..., Tensor]:
        if _takes_one_node(given, recompute):
            return _node_of(given, epilogue, has_gate, recompute)
        return functools.partial(_run_by_layers, epilogue, has_gate, recompute and needs_gradient(*given))

    return calls.remember_mlp((hidden, has_gate, recompute, *given), epilogue, make_function)


def _unpacked(
    x: Tensor, w1: Weights, b1: Weights | None, w2: Tensor, b2: Tensor | None, residual: Tensor | None
) -> _Tensors | None:
    """The tensors of a call, unchecked; None where weights or biases are no pairs that go together."""
    up = up_bias = None
    if isinstance(w1, (tuple, list)):
        if len(w1) != 2 or not (b1 is None or (isinstance(b1, (tuple, list)) and len(b1) == 2)):
            return None
        w1, up = w1
        b1, up_bias = (None, None) if b1 is None else b1
    return None if isinstance(b1, (tuple, list)) else _Tensors(x, w1, b1, up, up_bias, w2, b2, residual)


class MLPCall(NamedTuple):
    """A call as `explain` describes it.

    forward: its layers in their order, with what each of them is. derivative: the product that gives the hidden layer's
    gradient, where its epilogue differentiates. has_pass: whether a pass of its own does. keeps: how many matrices of
    the hidden width are kept, or None where that is not for one node to say. is_sooner_by_layers: why it is not.
    """

    tensors: _Tensors
    forward: list[tuple[str, LinearCall]]
    derivative: LinearCall | None
    has_pass: bool
    keeps: int | None
    recompute: bool
    is_sooner_by_layers: bool = False

    @property
    def x(self) -> Tensor:
        return self.tensors.x


def normalise_mlp(*args: Any, **kwargs: Any) -> MLPCall:
    """Of a call of `mlp` with these arguments, which is checked and not run."""
    given = inspect.signature(mlp).bind(*args, **kwargs)
    given.apply_defaults()
    activation = given.arguments.pop("activation")
    gate, recompute = given.arguments["gate"], given.arguments["recompute"]
    hidden, tensors = hidden_function(activation, gate), _prepared(**given.arguments)
    if not _takes_one_node(tensors, recompute):
        is_sooner = _can_be_one_node(tensors)
        forward = _describe_forward(tensors, hidden, gate is not False)
        return MLPCall(tensors, forward, None, False, None, recompute, is_sooner)
    call = _call_of(tensors, hidden, gate is not False, recompute)
    needed = _needed_of(tensors)
    has_pass = needed.has_pass(call.derivative)
    keeps = 1 + call.has_gate if call.keeps_pre_activation else int(call.keeps_hidden)
    with torch.no_grad():
        forward, product = _describe_forward(tensors, hidden, call.has_gate), None
        if call.derivative is not None and needed.trains_hidden and not has_pass:
            z, grad = (tensors.x.new_empty(*tensors.x.shape[:-1], size) for size in reversed(tensors.w2.shape))
            read = (z,) * call.derivative.epilogue.operand_count
            epilogue = call.derivative.epilogue
            product = normalise_linear(grad, tensors.w2.t(), epilogue=epilogue, operands=read, out_dtype=z.dtype)
    return MLPCall(tensors, forward, product, has_pass, keeps, recompute)


def _describe_forward(tensors: _Tensors, hidden: _Function, has_gate: bool) -> list[tuple[str, LinearCall]]:
    x, *_, w2, b2, residual = tensors
    (weight, bias), *others = _layers(tensors, has_gate)
    z = x.new_empty(*x.shape[:-1], w2.shape[1])
    first = normalise_linear(x, weight, bias, epilogue=hidden, operands=[z for _ in others], out_dtype=x.dtype)
    added: dict[str, Any] = {} if residual is None else {"epilogue": _plus, "operands": (residual,)}
    return [
        *(("beside the gate", normalise_linear(x, *other)) for other in others),
        ("hidden layer", first),
        ("result", normalise_linear(z, w2, b2, **added)),
    ]


def _prepared(
    x: Tensor,
    w1: Weights,
    b1: Weights | None,
    w2: Tensor,
    b2: Tensor | None,
    gate: Gate,
    residual: Tensor | None,
    recompute: bool,
) -> _Tensors:
    """The tensors of a call, checked and cast."""
    arguments.check_flag("mlp", "recompute", recompute)
    given = _checked(x, w1, b1, w2, b2, residual, has_gate=gate is not False)
    return _autocast(given)


def _takes_one_node(tensors: _Tensors, recompute: bool) -> bool:
    return _can_be_one_node(tensors) and not _is_sooner_by_layers(tensors, recompute)


def _can_be_one_node(tensors: _Tensors) -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    present = [t for t in tensors if t is not None]
    if not needs_gradient(*present) or arguments.why_wrapped((), present):
        return False
    operands = () if tensors.residual is None else (tensors.residual,)
    return not (is_traced(*present) or arguments.why_composed(tensors.x, arithmetic_dtype(tensors.x, operands)))


def _is_sooner_by_layers(tensors: _Tensors, recompute: bool) -> bool:
    """Whether the device would wait for the host to issue one node, which takes longer than a node for each layer."""
    rows = tensors.w1.shape[0] + (0 if tensors.up is None else tensors.up.shape[0])
    return not recompute and mlp_waits_for_host(tensors.x, rows, tensors.w2)


def _run_by_layers(hidden: _Function, has_gate: bool, recompute: bool, *given: Tensor | None) -> Tensor:
    """By a node for each layer. given: as `_Tensors`."""
    tensors = _Tensors(*given)  # type: ignore[arg-type]
    x = tensors.x
    (weight, bias), *others = _layers(tensors, has_gate)
    operands = [linear(x, *other) for other in others]
    h = linear(x, weight, bias, epilogue=hidden, operands=operands, out_dtype=x.dtype, recompute=recompute)
    return _last_layer(h, tensors.w2, tensors.b2, tensors.residual)


def _node_of(tensors: _Tensors, hidden: _Function, has_gate: bool, recompute: bool) -> Callable[..., Tensor]:
    """A function of a call's tensors, by one node."""
    call = _call_of(tensors, hidden, has_gate, recompute)
    # Views of x and of the result would be nodes of the graph too.
    return functools.partial(_apply if tensors.x.dim() == 2 else _apply_to_rows, call)


def _apply_to_rows(call: _Call, *given: Tensor | None) -> Tensor:
    tensors = _Tensors(*given)  # type: ignore[arg-type]
    x, residual, columns = tensors.x, tensors.residual, tensors.w2.shape[0]
    rows = arguments.rows_of(x)
    matrices = tensors._replace(
        x=x.reshape(rows, x.shape[-1]), residual=None if residual is None else residual.reshape(rows, columns)
    )
    y: Tensor = _apply(call, *matrices)
    return y.reshape(*x.shape[:-1], columns)


class _Call(NamedTuple):
    """What a call is beside its tensors.

    derivative: the hidden layer's; None where that is no program of one matrix. mode: the precision of fp32 products.
    keeps_pre_activation, keeps_hidden: for the backward pass. issuers: of the products with the first layer's weight
    and with the last one's, as `issuer_of_products` names them.
    """

    hidden: Epilogue
    derivative: Derivative | None
    has_gate: bool
    recompute: bool
    mode: str
    keeps_pre_activation: bool
    keeps_hidden: bool
    issuers: tuple[str, str]

    def multiplication(self, k: int, operators: Any) -> Multiplication:
        """Of the first layer (0) or the last one (1)."""
        return Multiplication(self.mode, self.issuers[k], operators)


def _call_of(tensors: _Tensors, hidden: _Function, has_gate: bool, recompute: bool) -> _Call:
    epilogue, needed = _resolved(tensors.x, hidden, has_gate), _needed_of(tensors)
    derivative = None if has_gate else derive(epilogue.text)
    reads_z, mode, rows = needed.reads_pre_activation(derivative), captured_mode(), arguments.rows_of(tensors.x)
    weights = _layers(tensors, has_gate)[0][0], tensors.w2
    of_first, of_last = (issuer_of_products(rows, weight, mode) for weight in weights)
    return _Call(
        epilogue,
        derivative,
        has_gate,
        recompute,
        mode,
        keeps_pre_activation=reads_z and not recompute,
        keeps_hidden=not reads_z and not recompute and needed.reads_hidden(derivative),
        issuers=(of_first, of_last),
    )


def _resolved(x: Tensor, hidden: _Function, has_gate: bool) -> Epilogue:
    return arguments.resolve_epilogue("mlp", hidden, (None,) * has_gate, types_of(x, *[x] * has_gate))


class _Hidden(NamedTuple):
    """What there is of the hidden layer: itself, and the pre-activations of the first layer and the one beside it."""

    h: Tensor | None = None
    z: Tensor | None = None
    up: Tensor | None = None


class _MLP(torch.autograd.Function):
    """Of matrices, in the order of `_Tensors`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: Tensor | None) -> Tensor:
        tensors = _Tensors(*given)  # type: ignore[arg-type]
        with in_captured_mode(tensors.x, call.mode):
            hidden = _compute_hidden(call, tensors, call.keeps_pre_activation)
            assert hidden.h is not None
            y = _last_layer(hidden.h, tensors.w2, tensors.b2, tensors.residual)
        # Where there are pre-activations, the backward pass computes the hidden layer of them.
        kept = hidden if call.keeps_hidden else (None, *hidden[1:])
        ctx.call = call
        ctx.residual_dtype = None if tensors.residual is None else tensors.residual.dtype
        # Hooks may hand out the very tensors that are saved here, and hold them.
        ctx.has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        ctx.save_for_backward(*tensors[:-1], *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        hidden = _Hidden(*saved[-3:])
        del saved[-3:]
        needed = _Needed(*ctx.needs_input_grad[1:])
        of_residual = grad.to(ctx.residual_dtype) if needed.residual else None
        tensors = _Tensors(*saved, None)  # type: ignore[call-arg]  # all others
        grad = grad if grad.dtype == tensors.x.dtype else grad.to(tensors.x.dtype)
        if composes_gradient(grad):
            return None, *differentiate(_composed(ctx.call), saved, needed[:-1], grad), of_residual
        is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
        grad = grad.resolve_neg()
        ctx.maybe_clear_saved_tensors()  # so that a matrix of the hidden width is freed where it is read last
        work = _Backward(ctx.call, tensors, hidden, needed, is_last and not ctx.has_hooks)
        del hidden
        with in_captured_mode(tensors.x, ctx.call.mode), without_batch_invariance():
            return None, *work.gradients(grad), of_residual


# Calls the C++ apply directly: Function.apply's checks were made already.
_apply = super(torch.autograd.Function, _MLP).apply


class _Needed(NamedTuple):
    """Of which of `_Tensors` a gradient is needed."""

    x: bool
    w1: bool
    b1: bool
    up: bool
    up_bias: bool
    w2: bool
    b2: bool
    residual: bool

    @property
    def trains_hidden(self) -> bool:
        """Whether a gradient goes through the hidden layer."""
        return self.x or self.w1 or self.b1 or self.up or self.up_bias

    def reads_pre_activation(self, derivative: Derivative | None) -> bool:
        return self.trains_hidden and (derivative is None or derivative.reads == INPUT)

    def has_pass(self, derivative: Derivative | None) -> bool:
        """Whether a pass differentiates, which gives the hidden layer again too, and not a product's epilogue."""
        return self.reads_pre_activation(derivative) and (derivative is None or self.w2)

    def reads_hidden(self, derivative: Derivative | None) -> bool:
        return self.w2 or (self.trains_hidden and derivative is not None and derivative.reads == OUTPUT)


def _needed_of(tensors: _Tensors) -> _Needed:
    return _Needed(*(t is not None and t.requires_grad for t in tensors))


def _operators(x: Tensor) -> Any:
    """Who computes the operators for x, by their names."""
    return cuda if cuda.takes(x) else schema


def _compute_hidden(call: _Call, tensors: _Tensors, gives_pre_activation: bool) -> _Hidden:
    """The hidden layer, and the pre-activations where they are asked for."""
    x = tensors.x
    (weight, bias), *others = _layers(tensors, call.has_gate)
    operands = [linear(x, *other) for other in others]
    if not gives_pre_activation:
        return _Hidden(linear(x, weight, bias, epilogue=call.hidden, operands=operands, out_dtype=x.dtype))
    h, z = _operators(x).linear_with_pre_activation(x, weight, bias, operands, call.hidden.text, x.dtype)
    return _Hidden(h, z, *operands)


class _Backward:
    """A backward pass, which holds each matrix of the hidden width until it is read last.

    overwrites: whether gradients may take the memory of what the forward pass kept, which nobody reads again.
    """

    def __init__(self, call: _Call, tensors: _Tensors, hidden: _Hidden, needed: _Needed, overwrites: bool) -> None:
        self.call, self.tensors, self.hidden, self.needed, self.overwrites = call, tensors, hidden, needed, overwrites
        self.operators = _operators(tensors.x)

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Those of all tensors but the residual. grad: that of the result, a matrix of x's type."""
        call, needed, w2 = self.call, self.needed, self.tensors.w2
        if call.recompute:
            self._recompute()
        h = self.hidden.h
        of_pre_activations: list[Tensor] = []
        of_b1: Tensor | None = None
        multiply = call.multiplication(1, self.operators)
        trains_hidden, has_pass = needed.trains_hidden, needed.has_pass(call.derivative)
        if has_pass:
            of_pre_activations, h, of_b1 = self._differentiate(multiply(grad, w2))
        of_w2 = None if h is None or not needed.w2 else weight_gradient(grad, h, w2, multiply)
        del h
        if trains_hidden and not has_pass:
            assert call.derivative is not None
            of_pre_activations = [self._multiply_and_differentiate(grad, call.derivative)]
        self.hidden = _Hidden()
        of_b2 = self._sum(grad) if needed.b2 else None
        of_first = self._first_gradients(of_pre_activations, of_b1) if trains_hidden else (None,) * 5
        return *of_first, of_w2, of_b2

    def _recompute(self) -> None:
        """What the forward pass would have kept."""
        call, needed, x = self.call, self.needed, self.tensors.x
        self.overwrites = True
        if needed.reads_pre_activation(call.derivative):
            layers = _layers(self.tensors, call.has_gate)
            self.hidden = _Hidden(None, *(linear(x, *layer) for layer in layers))
        elif needed.reads_hidden(call.derivative):
            self.hidden = _compute_hidden(call, self.tensors, gives_pre_activation=False)

    def _sum(self, grad: Tensor) -> Tensor:
        return sum_of_rows(grad, grad.dtype, self.operators)

    def _multiply_and_differentiate(self, grad: Tensor, derivative: Derivative) -> Tensor:
        """The pre-activation's gradient, by one product."""
        h, z, _ = self.hidden
        read = {INPUT: z, OUTPUT: h}.get(derivative.reads)
        given = () if read is None else (read,)
        return linear(grad, self.tensors.w2.t(), epilogue=derivative.epilogue, operands=given, out_dtype=grad.dtype)

    def _differentiate(self, of_h: Tensor) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """The pre-activations' gradients, of the hidden layer's; that layer again and the first bias's gradient, where
        they are wanted and come with it.

        One pass computes all of it: the gradients of the program times `of_h`, of which the one with respect to `of_h`
        is the hidden layer.
        """
        needed, program, (_, z, up) = self.needed, self.call.hidden.text, self.hidden
        assert z is not None
        self.hidden = _Hidden()
        operands = [] if up is None else [up]
        last = 1 + len(operands)
        planned = _weighted(program, needed.w2)
        if planned is None:  # the program has no room for one more operand
            reached = wanted_inputs([True] * last, program)
            h = self.operators.pointwise(z, operands, program, z.dtype) if needed.w2 else None
            found, _ = element_gradients(of_h, z, operands, program, "none", None, reached)
            return _of_each(found, z, last), h, None
        weighted, wanted = planned
        sums_columns = needed.b1 and 0 in wanted
        given = z, [*operands, of_h], weighted, "none", None, wanted, sums_columns
        outputs: list[Tensor]
        if self.operators is cuda:
            places = [k for k in wanted if (k == 0 and self.overwrites) or k == last]
            outputs = cuda.pointwise_backward(cuda.row_of_ones(z), *given, in_place=places)
        else:
            outputs = schema.pointwise_backward(z.new_ones(1, z.shape[1]), *given)
        of_b1 = outputs.pop() if sums_columns else None
        found = dict(zip(wanted, outputs, strict=True))
        return _of_each(found, z, last), found.get(last), of_b1

    def _first_gradients(self, of_pre_activations: list[Tensor], of_b1: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of x, of the first layer and of the one beside it. of_b1: of its bias, where it is known."""
        x, w1, needed = self.tensors.x, self.tensors.w1, self.needed
        (weight, _), *others = _layers(self.tensors, self.call.has_gate)
        is_packed = bool(others) and self.tensors.up is None
        multiply = self.call.multiplication(0, self.operators)
        # Of both layers' rows, each multiplied to its place where PyTorch multiplies.
        whole = None
        if is_packed and needed.w1 and multiply.is_pytorch(x) and w1.is_contiguous():
            whole = torch.empty_like(w1)
            for of_rows, part in zip(of_pre_activations, whole.chunk(2), strict=True):
                torch.mm(of_rows.t(), x, out=part)
        needs_weights = needed.w1 and whole is None
        of_z = of_pre_activations.pop(0)
        of_x: Tensor | None = multiply(of_z, weight) if needed.x else None
        of_weights = [weight_gradient(of_z, x, weight, multiply) if needs_weights else None]
        of_biases = [self._sum(of_z) if needed.b1 and of_b1 is None else of_b1]
        del of_z
        for of_up, (up, _) in zip(of_pre_activations, others, strict=True):
            if of_x is not None and multiply.is_pytorch(x):
                of_x.addmm_(of_up, up)
            elif of_x is not None:
                of_x = linear(of_up, up.t(), epilogue=_plus, operands=(of_x,), out_dtype=x.dtype)
            of_weights.append(
                weight_gradient(of_up, x, up, multiply) if (needs_weights if is_packed else needed.up) else None
            )
            of_biases.append(self._sum(of_up) if (needed.b1 if is_packed else needed.up_bias) else None)
        if not is_packed:
            second = (of_weights[1], of_biases[1]) if others else (None, None)
            return of_x, of_weights[0], of_biases[0], *second
        both = [None if a is None or b is None else torch.cat([a, b]) for a, b in (of_weights, of_biases)]
        return of_x, both[0] if whole is None else whole, both[1], None, None


def _of_each(found: dict[int, Tensor], z: Tensor, count: int) -> list[Tensor]:
    """The gradients of so many pre-activations like z, of which a gate may leave one out."""
    return [found[k] if k in found else torch.zeros_like(z) for k in range(count)]


@functools.lru_cache(maxsize=1024)
def _weighted(program: str, by_weight: bool) -> tuple[str, tuple[int, ...]] | None:
    """The program times one more operand, and which gradients of it there are; None where that exceeds a limit of
    programs. by_weight: also the one with respect to that operand, which is the program's value."""
    parsed = Program.parse(program)
    value: Any = parsed.expression
    try:
        weighted = Epilogue.from_expression(value * operand(parsed.operand_count), parsed.operand_count + 1).text
    except EpilogueError:
        return None
    return weighted, tuple(wanted_inputs([True] * (1 + parsed.operand_count) + [by_weight], weighted))


def _composed(call: _Call) -> Callable[..., Tensor]:
    """A function of the tensors but the residual, by PyTorch's own operations."""

    def compute(*given: Tensor | None) -> Tensor:
        tensors = _Tensors(*given, None)  # type: ignore[arg-type,call-arg]  # x, w1 and w2 are there
        (weight, bias), *others = _layers(tensors, call.has_gate)
        operands = [F.linear(tensors.x, *other) for other in others]
        program, dtype = call.hidden.program, tensors.x.dtype
        h = composed.linear(tensors.x, weight, bias, operands, program, "none", dtype)
        return F.linear(h, tensors.w2, tensors.b2)

    return compute


def _layers(tensors: _Tensors, has_gate: bool) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of the first layer and, with a gate, of the one beside it."""
    _, w1, b1, up, up_bias, *_ = tensors
    if not has_gate:
        return [(w1, b1)]
    if up is not None:
        return [(w1, b1), (up, up_bias)]
    biases = (None, None) if b1 is None else b1.chunk(2)
    return list(zip(w1.chunk(2), biases, strict=True))


def _last_layer(h: Tensor, w2: Tensor, b2: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is None:
        return linear(h, w2, b2)
    return linear(h, w2, b2, epilogue=_plus, operands=(residual,))


def _plus(z: Tensor, other: Tensor) -> Tensor:
    return z + other


def hidden_function(
    activation: Callable[..., Tensor] | Epilogue | None, gate: Gate
) -> Callable[..., Tensor] | Epilogue | None:
    """The hidden layer of its pre-activation or, with a gate, of both.

    Raises ValueError where both are functions.
    """
    if gate is False:
        return activation
    if gate is not True:
        if callable(gate) and activation is not None:
            raise ValueError(
                "cutfuse.mlp: a gate that is a function takes no activation; call it in the gate's function"
            )
        return gate
    if activation is None:
        return _times

    def gated(z: Tensor, up: Tensor) -> Tensor:
        return activation(z) * up

    return gated


def _times(z: Tensor, up: Tensor) -> Tensor:
    return z * up


def _checked(
    x: Tensor,
    w1: Weights,
    b1: Weights | None,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None,
    has_gate: bool,
) -> _Tensors:
    """The tensors of a call. Raises ValueError or TypeError where they do not fit."""
    up = up_bias = None
    is_pair = isinstance(w1, (tuple, list))
    if b1 is not None and isinstance(b1, (tuple, list)) != is_pair:
        raise ValueError("cutfuse.mlp: w1 and b1 have to be both pairs or both tensors; pass None for no bias")
    if isinstance(w1, (tuple, list)):
        if not has_gate or len(w1) != 2 or (isinstance(b1, (tuple, list)) and len(b1) != 2):
            raise ValueError(f"cutfuse.mlp: w1 and b1 are pairs with a gate, got {len(w1)} weights and gate={has_gate}")
        w1, up = w1
    if isinstance(b1, (tuple, list)):
        b1, up_bias = b1
    names = {"up": "w1[1]", "up_bias": "b1[1]", **({"w1": "w1[0]", "b1": "b1[0]"} if is_pair else {})}
    # Written out, as Dynamo of PyTorch 2.8 does not trace `_asdict`.
    given = {"x": x, "w1": w1, "b1": b1, "up": up, "up_bias": up_bias, "w2": w2, "b2": b2, "residual": residual}
    for key, tensor in given.items():
        name = names.get(key, key)
        if tensor is None and key not in ("x", "w1", "w2"):
            continue
        arguments.check_tensor("mlp", name, tensor)
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"cutfuse.mlp: {name} is on {tensor.device} and x on {x.device}; move one of them")
    _check_shapes(x, w1, w2, given, names, has_gate)
    return _Tensors(x, w1, b1, up, up_bias, w2, b2, residual)


def _check_shapes(
    x: Tensor, w1: Tensor, w2: Tensor, given: dict[str, Tensor | None], names: dict[str, str], has_gate: bool
) -> None:
    if x.dim() == 0 or w1.dim() != 2 or w2.dim() != 2:
        raise ValueError(
            f"cutfuse.mlp: x has to be [..., K], w1 [H, K] and w2 [N, H], got shapes {tuple(x.shape)}, "
            f"{tuple(w1.shape)} and {tuple(w2.shape)}"
        )
    columns, width = w2.shape
    first = 2 * width if has_gate and given["up"] is None else width
    expected = {
        "w1": (first, x.shape[-1]),
        "b1": (first,),
        "up": (width, x.shape[-1]),
        "up_bias": (width,),
        "b2": (columns,),
        "residual": (*x.shape[:-1], columns),
    }
    for name, shape in expected.items():
        tensor = given[name]
        if tensor is not None and tuple(tensor.shape) != shape:
            gate = " and a gate" if has_gate else ""
            raise ValueError(
                f"cutfuse.mlp: {names.get(name, name)} has to be of shape {shape} for x {tuple(x.shape)}, w2 "
                f"{tuple(w2.shape)}{gate}, got {tuple(tensor.shape)}"
            )


def _autocast(given: _Tensors) -> _Tensors:
    """The tensors in the types that autocast gives them. Raises TypeError where these differ."""
    x, w1, b1, up, up_bias, w2, b2, residual = given
    x, w1, b1 = autocast_inputs(x, w1, b1)
    x, w2, b2 = autocast_inputs(x, w2, b2)
    if up is not None:
        x, up, up_bias = autocast_inputs(x, up, up_bias)
    arguments.check_floating("mlp", "x", x.dtype)
    types = [t.dtype for t in (w1, b1, up, up_bias, w2, b2) if t is not None]
    if any(dtype != x.dtype for dtype in types):
        raise TypeError(
            f"cutfuse.mlp: x, weights and biases have to be of one type, got {x.dtype} and "
            f"{', '.join(map(str, types))}; cast them or use autocast"
        )
    return _Tensors(x, w1, b1, up, up_bias, w2, b2, residual)
