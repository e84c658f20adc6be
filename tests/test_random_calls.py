"""Random calls against PyTorch: values, gradients, reductions, layers, transforms and compiled functions.

What counts as a fault is in `agreement.py`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import agree, attempt, both_infinite, check_differentiated
from generators import REDUCTIONS, eager_reduce
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_calls import OPS, POOL, TYPED, WRITTEN, Chain, Function, Source, chains, sources
from random_runs import check_seeds, is_ordinary
from test_epilogue_types import FLOATS
from torch import Tensor

import cutfuse
from cutfuse import Epilogue


def bind(chain: Chain, ahead: bool, operand_count: int) -> Chain | Epilogue:
    return Epilogue(chain, operand_count) if ahead else chain


@st.composite
def calls(draw: Callable, operand: st.SearchStrategy[Source], **chain: object) -> tuple[Chain, list[Source]]:
    count = draw(st.integers(0, 3))
    return draw(chains(**chain)), draw(st.lists(operand, min_size=count, max_size=count))


def check_values(call: tuple[Chain, list[Source]], x: Source, ahead: bool) -> None:
    chain, operands = call
    tensors = [source.make() for source in (x, *operands)]
    agree(
        lambda *given: cutfuse.pointwise(bind(chain, ahead, len(operands)), *given),
        expanded(chain, tensors),
        tensors,
        ahead,
        signs=True,
    )


def expanded(chain: Chain, tensors: Sequence[Tensor]) -> Function:
    """The chain, in the shape that all its arguments broadcast to."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return lambda *given: chain(*given).expand(shape)


VALUES = st.tuples(calls(sources()), sources(FLOATS), st.booleans())
# Dynamo makes an array of a NumPy number, whose value no trace has: the graph breaks there, which these calls forbid.
BREAKING = {"language.numpy_scalars"}
if torch.__version__.startswith("2.8."):
    BREAKING.add("language.threshold")  # whose code asks a class by hasattr, as Dynamo of torch 2.8 cannot
COMPILED = st.tuples(
    calls(sources(), pool=[name for name in POOL if name not in BREAKING]), sources(FLOATS), st.booleans()
)


def check_compiled(call: tuple[Chain, list[Source]], x: Source, ahead: bool) -> None:
    chain, operands = call
    torch._dynamo.reset()

    def ours(*tensors: Tensor) -> Tensor:
        fn = bind(chain, ahead, len(operands))
        compiled = torch.compile(lambda *given: cutfuse.pointwise(fn, *given), fullgraph=True, backend="aot_eager")
        return compiled(*tensors)

    def eager(*tensors: Tensor) -> Tensor:
        return cutfuse.pointwise(bind(chain, ahead, len(operands)), *tensors)

    tensors = [source.make() for source in (x, *operands)]
    agree(ours, expanded(chain, tensors), tensors, ahead, True, eager, signs=True)


def check_gradients(call: tuple[Chain, list[Source]], x: Source, batched: bool, is_reordered: bool = True) -> None:
    """Equal values of a chain are one in a program, so that their derivatives are added before they are multiplied."""
    chain, operands = call
    tensors = [x.make(), *(source.make().to(x.dtype) for source in operands)]
    check_differentiated(
        lambda *given: cutfuse.pointwise(chain, *given), expanded(chain, tensors), tensors, batched, is_reordered
    )


WIDE = (torch.float64, torch.float32)
SMOOTH = sources(WIDE, has_special=False)
# cutfuse's nan_to_num has no derivative where it replaces, and PyTorch's is multiplied by 0: NaN if it is infinite.
DIFFERENTIABLE = tuple(name for name in (*OPS, *WRITTEN) if "nan_to_num" not in name)
GRADIENTS = st.tuples(calls(SMOOTH, pool=DIFFERENTIABLE), SMOOTH, st.booleans())
ROWS = sources(WIDE, shapes=((64,),))
# Not the language's, nor a value twice: several paths through an infinite derivative, of which PyTorch multiplies each.
SINGLE = (*OPS, *(name for name in WRITTEN if name.startswith("function.")))


@st.composite
def single_calls(draw: Callable) -> tuple[Chain, list[Source]]:
    (step,) = draw(chains(SINGLE, longest=1)).steps
    count = len(step.picks)
    operands = draw(st.lists(ROWS, min_size=count - 1, max_size=count - 1))
    return Chain((replace(step, picks=tuple(draw(st.permutations(range(count))))),)), operands


SPECIAL_GRADIENTS = st.tuples(single_calls(), ROWS, st.booleans())


@st.composite
def reductions(
    draw: Callable,
    dtypes: Sequence[torch.dtype],
    pool: Sequence[str],
    longest: int,
    scales: Sequence[float] = (2.0,),
) -> tuple:
    shape = draw(st.sampled_from([(5, 16), (3, 4, 8), (16,), (), (2, 0), (1, 3)]))
    rank = len(shape)
    dims = range(-rank, rank) if rank else (0, -1)
    several = st.lists(st.sampled_from(dims), unique_by=lambda d: d % max(rank, 1)).map(tuple)
    dim = draw(st.none() | st.sampled_from(dims) | several)
    shapes = [shape, shape[rank - 1 :], (*shape[: rank - 1], 1) if rank else (), ()]
    call = draw(calls(sources(dtypes, shapes), pool=pool, longest=longest) | st.none())
    x = draw(sources(dtypes[-2:], [shape], scales=scales))
    return x, dim, draw(st.sampled_from(REDUCTIONS)), draw(st.booleans()), call


def as_functions(
    dim: int | tuple[int, ...] | None, op: str, keepdim: bool, call: tuple[Chain, list[Source]] | None
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """cutfuse's reduction and PyTorch's."""
    chain = None if call is None else call[0]

    def ours(x: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.reduce(x, dim, op, keepdim, chain, operands=operands)

    def reference(x: Tensor, *operands: Tensor) -> Tensor:
        y = x if chain is None else chain(x, *operands).expand(x.shape)
        return eager_reduce(y, tuple(range(x.dim())) if dim is None or dim == () else dim, op, keepdim)

    return ours, reference


def check_reductions(x: Source, dim: object, op: str, keepdim: bool, call: tuple | None) -> None:
    ours, reference = as_functions(dim, op, keepdim, call)
    agree(ours, reference, [source.make() for source in (x, *(call[1] if call else ()))])


def check_reduction_gradients(x: Source, dim: object, op: str, keepdim: bool, call: tuple | None) -> None:
    ours, reference = as_functions(dim, op, keepdim, call)
    operands = [source.make().to(x.dtype) for source in (call[1] if call else ())]
    check_differentiated(ours, reference, [x.make(), *operands], batched=keepdim)


ANY_REDUCTION = reductions((torch.bool, torch.int64, torch.uint8, *FLOATS), (*OPS, *WRITTEN, *TYPED), 3)
# Without a derivative that is infinite or selects: those are the special gradients'.
TAME = [f"op.{name}" for name in ("add", "sub", "neg", "sigmoid", "tanh", "softsign")]
REDUCTION_GRADIENTS = reductions(WIDE, TAME, 2, scales=(2.0, 100.0))  # exp(100) overflows


@st.composite
def layers(draw: Callable, dtypes: Sequence[torch.dtype], pool: Sequence[str]) -> tuple:
    leading = draw(st.sampled_from([(), (5,), (2, 3), (1, 4)]))
    dtype = draw(st.sampled_from(dtypes))
    columns, depth = draw(st.sampled_from([7, 16])), 8
    reduce = draw(st.none() | st.sampled_from(REDUCTIONS))
    shapes = [(*leading, columns), (columns,), (*leading, 1), ()]
    # The reordered sum of an affine epilogue has infinities where it has them.
    operands = sources((torch.bool, torch.uint8, *dtypes), shapes, has_special=reduce not in ("sum", "mean"))
    smooth = {"dtypes": (dtype,), "has_special": False}
    tensors = [draw(sources(shapes=(shape,), **smooth)) for shape in ((*leading, depth), (columns, depth), (columns,))]
    has_bias, keepdim = draw(st.booleans()), draw(st.booleans()) and reduce is not None
    return tensors[: 2 + has_bias], draw(calls(operands, pool=pool, longest=3)), reduce, keepdim


def make_layer(
    count: int, chain: Chain, reduce: str | None, keepdim: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """cutfuse's layer and PyTorch's, of `count` tensors and the operands."""

    def ours(*given: Tensor) -> Tensor:
        settings = {"epilogue": chain, "operands": given[count:], "reduce": reduce, "keepdim": keepdim}
        return cutfuse.linear(*given[:count], **settings)

    def reference(*given: Tensor) -> Tensor:
        # Of a vector F.linear squeezes its result in place, which a WideTensor does not follow.
        x, *rest = given[:count]
        z = F.linear(x, *rest) if x.dim() > 1 else F.linear(x.unsqueeze(0), *rest).squeeze(0)
        y = chain(z, *given[count:]).expand(z.shape)
        return y if reduce is None else eager_reduce(y, -1, reduce, keepdim)

    return ours, reference


def check_layers(tensors: list[Source], call: tuple, reduce: str | None, keepdim: bool) -> None:
    ours, reference = make_layer(len(tensors), call[0], reduce, keepdim)
    # The reordered sum of an affine epilogue has other values that are not finite.
    mask = both_infinite if reduce in ("sum", "mean") else None
    agree(ours, reference, [source.make() for source in (*tensors, *call[1])], mask=mask)


def check_layer_gradients(tensors: list[Source], call: tuple, reduce: str | None, keepdim: bool) -> None:
    ours, reference = make_layer(len(tensors), call[0], reduce, keepdim)
    given = [source.make().to(tensors[0].dtype) for source in (*tensors, *call[1])]
    _, unreduced = make_layer(len(tensors), call[0], None, keepdim)
    y, _ = attempt(unreduced, [tensor.double() for tensor in given])
    if y is not None and not y.isfinite().all():
        return  # one element that has no finite result takes its row and column of the gradients with it
    check_differentiated(ours, reference, given, batched=keepdim, is_reordered=True)


def check_vmap(call: tuple[Chain, list[Source]], x: Source, in_dims: list[int | None], differentiated: bool) -> None:
    """Over x and operands, of two dimensions each, against PyTorch on one slice after the other."""
    chain, operands = call
    tensors = [source.make().to(x.dtype) for source in (x, *operands)]
    in_dims = [0, *in_dims[: len(operands)]]

    def ours(*given: Tensor) -> Tensor:
        return cutfuse.pointwise(chain, *given)

    def vmapped(fn: Function) -> Function:
        inner = torch.func.grad(lambda *given: fn(*given).sum()) if differentiated else fn
        return torch.func.vmap(inner, tuple(in_dims))

    def loop(fn: Function) -> Function:
        def looped(*given: Tensor) -> Tensor:
            pairs = list(zip(given, in_dims, strict=True))
            rows = [[t if d is None else t.select(d, k) for t, d in pairs] for k in range(4)]
            return torch.stack([of_slices(fn, slices) for slices in rows])

        return looped

    def unknown(got: Tensor, expected: Tensor) -> Tensor:
        """Where PyTorch's transform of its own operations has no number and its autograd has one, or the reverse.

        torch.logit's derivative does outside of 0 to 1 for a negative eps.
        """
        own = vmapped(chain)(*tensors)
        return own.isfinite() != expected.isfinite()

    def of_slices(fn: Function, slices: list[Tensor]) -> Tensor:
        shape = torch.broadcast_shapes(*(item.shape for item in slices))
        if not differentiated:
            return fn(*slices).expand(shape)
        leaf = slices[0].detach().requires_grad_()
        y = fn(leaf, *slices[1:]).expand(shape).sum()
        return torch.autograd.grad(y, leaf, materialize_grads=True)[0] if y.requires_grad else leaf * 0

    if differentiated and attempt(loop(chain), tensors)[1] is not None:
        return  # PyTorch has no derivative of it
    agree(vmapped(ours), loop(chain), tensors, eager=loop(ours), mask=unknown if differentiated else None)


SQUARE = sources(WIDE, shapes=((4, 4),), has_special=False)
VMAP = st.tuples(
    calls(SQUARE, pool=DIFFERENTIABLE, longest=3),
    SQUARE,
    st.lists(st.sampled_from([0, 1, None]), min_size=3, max_size=3),
    st.booleans(),
)

# What is drawn, what is checked, and how many examples in an ordinary run.
CHECKS: dict[str, tuple[st.SearchStrategy[tuple], Callable[..., None], int]] = {
    "values": (VALUES, check_values, 40),
    "gradients": (GRADIENTS, check_gradients, 25),
    "special_gradients": (SPECIAL_GRADIENTS, partial(check_gradients, is_reordered=False), 25),
    "reductions": (ANY_REDUCTION, check_reductions, 25),
    "reduction_gradients": (REDUCTION_GRADIENTS, check_reduction_gradients, 20),
    "layers": (layers(FLOATS, (*OPS, *WRITTEN, *TYPED)), check_layers, 20),
    "layer_gradients": (layers(WIDE, DIFFERENTIABLE), check_layer_gradients, 15),
    "vmap": (VMAP, check_vmap, 10),
    "compiled": (COMPILED, check_compiled, 2),
}


@pytest.mark.parametrize("name", CHECKS)
def test_random_calls(name: str, path: str, request: pytest.FixtureRequest) -> None:
    strategy, check, examples = CHECKS[name]
    calls = given(strategy)(lambda drawn: check(*drawn))
    quick = settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
    if is_ordinary(request.config):
        quick(calls)()
        return
    # Shrinking takes minutes, in which nothing new is drawn.
    long = settings(quick, max_examples=100, derandomize=False, database=None, phases=(Phase.generate,))

    def find(number: int) -> str:
        try:
            seed(number)(long(calls))()
        except Exception:
            return traceback.format_exc(limit=-2)
        return ""

    check_seeds(request, f"{name}, {path}", (), find, share=1 / (2 * len(CHECKS)))


# What is wrong with each: a rounding that is missing and one that is too much, a value, a type, a tie, a zero, a NaN.
WRONG: dict[str, tuple[Function, Function]] = {
    "no rounding": (lambda z: z.half().float() * 3, lambda z: z * 3),
    "a rounding": (lambda z: z * 3, lambda z: z.half().float() * 3),
    "a value": (torch.sigmoid, lambda z: torch.sigmoid(z) * (1 + 1e-11)),
    "a type": (torch.sigmoid, lambda z: torch.sigmoid(z).half()),
    "a tie": (lambda z: torch.where(z > 0.5, z, -z), lambda z: torch.where(z >= 0.5, z, -z)),
    "a zero": (torch.trunc, lambda z: torch.trunc(z) + 0.0),
    "a nan": (torch.relu, lambda z: torch.where(z > 0, z, 0.0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_found(name: str) -> None:
    x = Source(torch.float32, (64,), 0).make()
    right, wrong = WRONG[name]
    agree(lambda z: cutfuse.pointwise(right, z), right, [x], signs=True)
    with pytest.raises(AssertionError, match="PyTorch has"):
        agree(lambda z: cutfuse.pointwise(wrong, z), right, [x], signs=True)


def test_a_wrong_derivative_is_found(path: str) -> None:
    x = Source(torch.float32, (64,), 0).make()
    at_a_tie = (torch.relu, lambda z: torch.where(z < 0, 0.0, z))
    for right, wrong in (at_a_tie, (torch.exp, lambda z: torch.exp(z) + 1e-9 * z)):
        with pytest.raises(AssertionError, match="PyTorch has"):
            check_differentiated(lambda z, fn=wrong: cutfuse.pointwise(fn, z), right, [x], False)
