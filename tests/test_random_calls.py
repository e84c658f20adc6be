"""Random calls against PyTorch: values, gradients, reductions, layers, transforms and compiled functions.

`pytest tests/test_random_calls.py --random-minutes 20` looks for new faults, each test for its share of the time.
"""

from __future__ import annotations

import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from generators import REDUCTIONS, eager_reduce
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_calls import OPS, TYPED, WRITTEN, Chain, Source, chains, find_wrong, sources
from test_epilogue_types import FLOATS
from torch import Tensor
from torch._dynamo.exc import Unsupported

import cutfuse
from cutfuse import Epilogue, EpilogueError
from cutfuse.ops import switch

REFUSALS = (EpilogueError, TypeError, ValueError, IndexError)
# A refusal of what PyTorch computes names a type, a limit or a function.
NAMED = (
    r"torch\.|boolean|cutfuse\.\w+|operator|instructions|exceeds|casts to|[Aa]n? \w+ is not|refuses|limit"
    r"|asks for a type|not depend on"
)


def agree(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], tensors: Sequence[Tensor], ahead: bool = False
) -> None:
    """Compares two functions of tensors: their values, types and refusals.

    Ahead of time cutfuse may take what PyTorch refuses: what no result comes from is not computed, and numbers are
    values like others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of conditions of type uint8
        expected, error = attempt(reference, tensors)
        actual, refusal = attempt(ours, tensors)
        if refusal is not None:
            # The callable's own error, of a number; Dynamo reports any as one of its own.
            own = isinstance(refusal, AttributeError | Unsupported) and error is not None
            assert own or (isinstance(refusal, REFUSALS) and str(refusal)), repr(refusal)
            assert error is not None or re.search(NAMED, str(refusal)), f"no type, limit or function: {refusal}"
        elif error is None:
            # A composition of ops is typed as these are ahead of time, which gives way to no x without dimensions.
            if ahead and tensors[0].dim() == 0 and actual.dtype != expected.dtype:
                return
            assert actual.dtype == expected.dtype, f"{actual.dtype}, PyTorch has {expected.dtype}"
            # The operators' arithmetic is fp32, and that beside fp64 operands without dimensions.
            is_wide = all(tensor.dtype == torch.float64 for tensor in tensors)
            assert_found(actual, reference, tensors, None if is_wide else torch.float32)
        else:
            assert ahead, f"PyTorch refuses it, {error}, but the result is {actual}"


def attempt(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Exception | None]:
    try:
        return fn(*tensors), None
    except Exception as error:
        return None, error


def assert_found(
    actual: Tensor,
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    narrow: torch.dtype | None = None,
    eager: Tensor | None = None,
) -> None:
    wrong = find_wrong(actual, reference, tensors, narrow, eager)
    if wrong.any():
        expected = reference(*tensors).expand(actual.shape)
        raise AssertionError(
            f"at {wrong.nonzero()[:4].tolist()}: {actual[wrong][:4]}, PyTorch has {expected[wrong][:4]}"
        )


def bind(chain: Chain, ahead: bool, operand_count: int) -> Chain | Epilogue:
    return Epilogue(chain, operand_count) if ahead else chain


@st.composite
def calls(draw: Callable, operand: st.SearchStrategy[Source], **chain: object) -> tuple[Chain, list[Source]]:
    return draw(chains(**chain)), draw(st.lists(operand, max_size=3))


def check_values(call: tuple[Chain, list[Source]], x: Source, ahead: bool) -> None:
    chain, operands = call
    tensors = [source.make() for source in (x, *operands)]
    agree(lambda *given: cutfuse.pointwise(bind(chain, ahead, len(operands)), *given), chain, tensors, ahead)


VALUES = st.tuples(calls(sources()), sources(FLOATS), st.booleans())


def check_compiled(call: tuple[Chain, list[Source]], x: Source, ahead: bool) -> None:
    chain, operands = call
    torch._dynamo.reset()

    def ours(*tensors: Tensor) -> Tensor:
        fn = bind(chain, ahead, len(operands))
        compiled = torch.compile(lambda *given: cutfuse.pointwise(fn, *given), fullgraph=True, backend="aot_eager")
        return compiled(*tensors)

    agree(ours, chain, [source.make() for source in (x, *operands)], ahead)


def differentiate(
    fn: Callable[..., Tensor], tensors: Sequence[Tensor], directions: Tensor, batched: bool = False
) -> Tensor:
    """The gradients by every tensor, for each direction: [directions, elements]. 0 where there is none."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = fn(*leaves)
    if not y.requires_grad:
        return directions.new_zeros(len(directions), sum(leaf.numel() for leaf in leaves))
    directions = directions.to(y.dtype)[:, : y.numel()].reshape(len(directions), *y.shape)

    def backward(direction: Tensor) -> Tensor:
        found = torch.autograd.grad(
            y, leaves, direction, is_grads_batched=batched, retain_graph=True, allow_unused=True
        )
        count = len(direction) if batched else 1
        zeros = [leaf.new_zeros(count, leaf.numel()) for leaf in leaves]
        return torch.cat([g if f is None else f.reshape(count, -1) for f, g in zip(found, zeros, strict=True)], 1)

    return backward(directions) if batched else torch.cat([backward(direction) for direction in directions])


def find_read(fn: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[int]:
    """Which tensors the result comes from."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = fn(*leaves)
    if not y.requires_grad:
        return []
    found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return [k for k, gradient in enumerate(found) if gradient is not None]


def check_differentiated(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    batched: bool,
    is_reordered: bool = False,
) -> None:
    """Gradients in the tensors' type against PyTorch's in fp64.

    A sum that is reordered, `is_reordered`, may have another of the values that are not finite, but no finite one.

    Of the tensors that the result comes from: for others PyTorch has no gradient, and the operators 0 times what comes
    from above, which may be NaN.
    """
    if switch.everywhere and tensors[0].dtype == torch.float64:
        return  # the operators' derivatives are fp32; nothing but tests takes fp64 there
    directions = torch.randn(2, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def complete(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def completed(*some: Tensor) -> Tensor:
            given = dict(zip(places, some, strict=True))
            return fn(*(given.get(k, tensor.to(some[0].dtype)) for k, tensor in enumerate(tensors)))

        return completed

    def exact(*some: Tensor) -> Tensor:
        return differentiate(complete(reference), some, directions.to(some[0].dtype))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        places, error = attempt(lambda *wide: find_read(reference, wide), [tensor.double() for tensor in tensors])
        if error is not None or not places:
            return  # no value, or no derivative; the values' test has the first
        read = [tensors[k] for k in places]
        wide = [tensor.double() for tensor in read]
        got, refusal = attempt(
            lambda *some: differentiate(complete(ours), some, directions.to(some[0].dtype), batched), read
        )
        if refusal is not None:
            assert isinstance(refusal, EpilogueError), repr(refusal)
            assert re.search(NAMED, str(refusal)), f"no type, limit or function: {refusal}"
            return
        expected = exact(*wide)
        is_unknown = got.isnan() & expected.isinf() & is_summed(read, complete(reference))
        if is_reordered:
            is_unknown |= ~got.isfinite() & ~expected.isfinite()
        got = torch.where(is_unknown, expected.to(got.dtype), got)
        if tensors[0].dtype == torch.float64:
            assert_found(got, exact, wide)
        else:
            assert_found(got, exact, wide, torch.float32, exact(*read))


def is_summed(tensors: Sequence[Tensor], reference: Callable[..., Tensor]) -> Tensor:
    """Of each element of the gradients, whether it is a sum over what the tensor is broadcast to.

    An infinite derivative is multiplied by what comes from above before that sum, which may then be inf - inf. PyTorch
    may sum first.
    """
    columns = reference(*tensors).numel()
    return torch.cat([torch.full((tensor.numel(),), tensor.numel() < columns) for tensor in tensors])


def check_gradients(call: tuple[Chain, list[Source]], x: Source, batched: bool) -> None:
    chain, operands = call
    dtype = x.dtype
    tensors = [x.make(), *(source.make().to(dtype) for source in operands)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    check_differentiated(
        lambda *given: cutfuse.pointwise(chain, *given), lambda *given: chain(*given).expand(shape), tensors, batched
    )


WIDE = (torch.float64, torch.float32)
SMOOTH = sources(WIDE, has_special=False)
GRADIENTS = st.tuples(calls(SMOOTH, pool=(*OPS, *WRITTEN)), SMOOTH, st.booleans())
ROWS = sources(WIDE, shapes=((64,),))
# Not the language's: several paths of one function through an infinite derivative.
SINGLE = (*OPS, *(name for name in WRITTEN if name.startswith("function.")))
SPECIAL_GRADIENTS = st.tuples(calls(ROWS, pool=SINGLE, longest=1), ROWS, st.booleans())


@st.composite
def reductions(draw: Callable, dtypes: Sequence[torch.dtype], pool: Sequence[str], longest: int) -> tuple:
    shape = draw(st.sampled_from([(5, 16), (3, 4, 8), (16,), (), (2, 0), (1, 3)]))
    rank = len(shape)
    dims = range(-rank, rank) if rank else (0, -1)
    several = st.lists(st.sampled_from(dims), unique_by=lambda d: d % max(rank, 1)).map(tuple)
    dim = draw(st.none() | st.sampled_from(dims) | several)
    shapes = [shape, shape[rank - 1 :], (*shape[: rank - 1], 1) if rank else (), ()]
    call = draw(calls(sources(dtypes, shapes), pool=pool, longest=longest) | st.none())
    return draw(sources(dtypes[-2:], [shape])), dim, draw(st.sampled_from(REDUCTIONS)), draw(st.booleans()), call


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
    check_differentiated(
        lambda x: ours(x, *operands),
        lambda x: reference(x, *(operand.to(x.dtype) for operand in operands)),
        [x.make()],
        batched=keepdim,
    )


ANY_REDUCTION = reductions((torch.bool, torch.int64, torch.uint8, *FLOATS), (*OPS, *WRITTEN, *TYPED), 3)
# Without a derivative that is infinite or selects: those are the special gradients'.
TAME = [f"op.{name}" for name in ("add", "sub", "neg", "sigmoid", "tanh", "softsign")]
REDUCTION_GRADIENTS = reductions(WIDE, TAME, 2)


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
        z = F.linear(*given[:count])
        y = chain(z, *given[count:]).expand(z.shape)
        return y if reduce is None else eager_reduce(y, -1, reduce, keepdim)

    return ours, reference


def check_layers(tensors: list[Source], call: tuple, reduce: str | None, keepdim: bool) -> None:
    ours, reference = make_layer(len(tensors), call[0], reduce, keepdim)
    agree(ours, reference, [source.make() for source in (*tensors, *call[1])])


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

    def vmapped(*given: Tensor) -> Tensor:
        def inner(*slices: Tensor) -> Tensor:
            if differentiated:
                return torch.func.grad(lambda *again: cutfuse.pointwise(chain, *again).sum())(*slices)
            return cutfuse.pointwise(chain, *slices)

        return torch.func.vmap(inner, tuple(in_dims))(*given)

    def loop(*given: Tensor) -> Tensor:
        pairs = list(zip(given, in_dims, strict=True))
        rows = []
        for k in range(4):
            slices = [t if d is None else t.select(d, k) for t, d in pairs]
            shape = torch.broadcast_shapes(*(item.shape for item in slices))
            if differentiated:
                leaf = slices[0].detach().requires_grad_()
                y = chain(leaf, *slices[1:]).expand(shape).sum()
                rows.append(torch.autograd.grad(y, leaf, materialize_grads=True)[0] if y.requires_grad else leaf * 0)
            else:
                rows.append(chain(*slices).expand(shape))
        return torch.stack(rows)

    if differentiated and attempt(loop, tensors)[1] is not None:
        return  # PyTorch has no derivative of it
    agree(vmapped, loop, tensors)


SQUARE = sources(WIDE, shapes=((4, 4),), has_special=False)
VMAP = st.tuples(
    calls(SQUARE, pool=(*OPS, *WRITTEN), longest=3),
    SQUARE,
    st.lists(st.sampled_from([0, 1, None]), min_size=3, max_size=3),
    st.booleans(),
)

# What is drawn, what is checked, and how many examples in an ordinary run.
CHECKS: dict[str, tuple[st.SearchStrategy[tuple], Callable[..., None], int]] = {
    "values": (VALUES, check_values, 40),
    "gradients": (GRADIENTS, check_gradients, 25),
    "special_gradients": (SPECIAL_GRADIENTS, check_gradients, 25),
    "reductions": (ANY_REDUCTION, check_reductions, 25),
    "reduction_gradients": (REDUCTION_GRADIENTS, check_reduction_gradients, 20),
    "layers": (layers(FLOATS, (*OPS, *WRITTEN, *TYPED)), check_layers, 20),
    "layer_gradients": (layers(WIDE, (*OPS, *WRITTEN)), check_layer_gradients, 15),
    "vmap": (VMAP, check_vmap, 10),
    "compiled": (VALUES, check_compiled, 2),
}


@pytest.mark.parametrize("name", CHECKS)
def test_random_calls(name: str, path: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> None:
    strategy, check, examples = CHECKS[name]
    count = 0

    def counted(drawn: tuple) -> None:
        nonlocal count
        count += 1
        check(*drawn)

    quick = settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
    minutes = request.config.getoption("--random-minutes")
    if not minutes:
        quick(given(strategy)(counted))()
        return
    end, seeds, failures = time.monotonic() + 60 * minutes / (2 * len(CHECKS)), [], []
    while time.monotonic() < end:
        seeds.append(random.getrandbits(32))
        # Shrinking takes minutes, in which nothing new is drawn.
        phases = (Phase.generate,)
        long = settings(quick, max_examples=100, derandomize=False, database=None, phases=phases)
        try:
            seed(seeds[-1])(long(given(strategy)(counted)))()
        except Exception:
            failures.append(f"seed {seeds[-1]}\n{traceback.format_exc(limit=-2)}")
    with capsys.disabled():
        print(f"\n{name}, {path}: {count} calls, {len(failures)} faults, seeds {seeds}")
    assert not failures, "\n".join(failures)


def test_a_wrong_value_is_found() -> None:
    """The checks see what they are for: a value that is wrong by a hundred roundings, and a type."""
    x = Source(torch.float32, (64,), 0)
    for wrong in (lambda z: torch.sigmoid(z) * (1 + 1e-5), lambda z: torch.sigmoid(z).double()):
        with pytest.raises(AssertionError, match="PyTorch has"):
            agree(wrong, torch.sigmoid, [x.make()])
