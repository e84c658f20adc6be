"""Whether cutfuse and PyTorch agree on a call: on its type or refusal, its values and its gradients.

Values are compared twice. What cutfuse computes has to be what PyTorch computes: both run in fp64, cutfuse by the
program that it makes for the call's types, PyTorch on `WideTensor`s, and there is no error but fp64's. And the result
has to be a rounding of what the same program gives in fp64: the error is within what roundings of its operations make
of it. So neither PyTorch's own roundings nor how far a chain amplifies them is in question.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_calls import Function
from rounding import Recorded, Rounding, differentiated_forwards, find_wrong, round_wide, scatter
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from wide_tensor import WideTensor, computed, wide_of, widen

from cutfuse import EpilogueError, native
from cutfuse.epilogue.program import arithmetic_dtype

Mask = Callable[[Tensor, Tensor], Tensor]

REFUSALS = (EpilogueError, TypeError, ValueError, IndexError)
# A refusal of what PyTorch computes names a type, a limit or a function.
NAMED = (
    r"torch\.|boolean|cutfuse\.\w+|operator|instructions|exceeds|casts to|[Aa]n? \w+ is not|refuses|limit"
    r"|asks for a type|not depend on"
)


def agree(
    ours: Function,
    reference: Function,
    tensors: Sequence[Tensor],
    ahead: bool = False,
    lazy: bool = False,
    eager: Function | None = None,
    signs: bool = False,
    mask: Mask | None = None,
) -> None:
    """Compares two functions of tensors: their values, types and refusals.

    ahead: of an Epilogue that is traced ahead of time, which may take what PyTorch refuses, as what no result comes
    from is not computed, and numbers are values like others. lazy: of a compiled function, which may for the first of
    these reasons. eager: the calls of `ours` without a transform of them. signs: whether those of zeros are compared.
    mask: what is not compared, of a result and the expected one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of conditions of type uint8
        expected, error = attempt(reference, tensors)
        recorded = Recorded()
        with recorded.recording():
            actual, refusal = attempt(eager or ours, tensors)
        if eager is not None:
            actual, refusal = attempt(ours, tensors)
        if refusal is not None:
            # The callable's own error, of a number; Dynamo reports any as one of its own.
            own = isinstance(refusal, AttributeError | TorchDynamoException) and error is not None
            # Two values that Dynamo computes by itself: their stand-ins, of different shapes, have no sum.
            own |= isinstance(refusal, TorchDynamoException) and bool(re.search(r"size=\(\d+, 0\)", str(refusal)))
            assert own or (isinstance(refusal, REFUSALS) and str(refusal)), repr(refusal)
            assert own or error is not None or re.search(NAMED, str(refusal)), f"no type, limit or function: {refusal}"
        elif error is None:
            assert actual.dtype == expected.dtype, f"{actual.dtype}, PyTorch has {expected.dtype}"
            assert actual.shape == expected.shape, f"{actual.shape}, PyTorch has {expected.shape}"
            in_fp64 = recorded.in_fp64(eager or ours)
            exact = assert_meaning(in_fp64, lambda *given: wide_of(reference(*map(widen, given))), tensors, signs, mask)
            assert_rounded(actual, exact, in_fp64, tensors, signs, mask)
        else:
            assert ahead or lazy, f"PyTorch refuses it, {error}, but the result is {actual}"


def assert_meaning(
    ours: Function, reference: Function, tensors: Sequence[Tensor], signs: bool = False, mask: Mask | None = None
) -> Tensor:
    """What cutfuse computes is what PyTorch computes: both in fp64. Returns cutfuse's."""
    got, expected = ours(*tensors).detach(), reference(*tensors)

    def run(seed: int, size: float) -> tuple[Tensor, Tensor]:
        if seed % 2:
            with Rounding(seed // 2, 4 * size, torch.float64, torch.float64):
                return got, ours(*tensors).detach()
        with computed(round_wide(seed, 4 * size), scatter if seed // 2 % 2 else torch.clone):
            return expected, reference(*tensors)

    wrong = find_wrong(got, expected, 1e-13 * expected.abs(), run, signs)
    fail_at(wrong, got, expected, "in fp64", mask)
    return got


def assert_rounded(
    actual: Tensor,
    exact: Tensor,
    ours: Function,
    tensors: Sequence[Tensor],
    signs: bool = False,
    mask: Mask | None = None,
    stored: torch.dtype | None = None,
    is_forwards: bool = False,
) -> None:
    """What cutfuse computes is a rounding of what it computes in fp64.

    is_forwards: of gradients, by derivatives that are computed forwards.
    """
    dtype = working_dtype(tensors)
    product_dtype = tensors[0].dtype if tensors[0].is_floating_point() else dtype

    stored = stored or actual.dtype

    def run(seed: int, size: float) -> tuple[Tensor, Tensor]:
        with Rounding(seed, size, dtype, product_dtype):
            other = ours(*tensors).detach()
        if is_forwards:
            with differentiated_forwards():
                center = ours(*tensors)
                with Rounding(seed, size, dtype, product_dtype):
                    other = other + (ours(*tensors) - center).nan_to_num(0.0, 0.0, 0.0)
        return overflowed(exact, stored), overflowed(other, stored)

    expected, base = exact, torch.zeros_like(exact)
    if actual.is_floating_point():
        info = torch.finfo(stored)
        expected = exact.to(stored).double()
        base = (4 * torch.finfo(dtype).eps + info.eps) * expected.abs() + 2 * info.tiny * info.eps
        base = base.nan_to_num(0.0, 0.0, 0.0)
    wrong = find_wrong(actual, expected, base, run, signs)
    fail_at(wrong, actual, expected, "rounded", mask)


def overflowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value, and infinities where it has none in the type that it is stored in."""
    narrow = value.to(dtype).double() if dtype.is_floating_point else value
    return torch.where(narrow.isinf(), narrow, value)


def working_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """In which type a call of these computes; the operators store fp32 for x of any other type than fp64."""
    if native.operators_everywhere and tensors[0].dtype != torch.float64:
        return torch.float32
    # x is expanded to the operands, and a layer's x has dimensions anyway.
    has_dimensions = any(tensor.dim() for tensor in tensors)
    return arithmetic_dtype(
        tensors[0].expand(1) if has_dimensions and not tensors[0].dim() else tensors[0], tensors[1:]
    )


def fail_at(wrong: Tensor, actual: Tensor, expected: Tensor, how: str, mask: Mask | None) -> None:
    if mask is not None and wrong.any():
        wrong = wrong & ~mask(actual, expected)
    if wrong.any():
        raise AssertionError(
            f"{how}, at {wrong.nonzero()[:4].tolist()}: {actual[wrong][:4]}, PyTorch has {expected[wrong][:4]}"
        )


def attempt(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Exception | None]:
    try:
        return fn(*tensors), None
    except Exception as error:
        return None, error


def differentiate(
    fn: Function,
    tensors: Sequence[Tensor],
    directions: Sequence[Tensor],
    places: Sequence[int],
    batched: bool = False,
) -> Tensor:
    """The gradients by the tensors at `places`, for each direction: [directions, elements]. 0 where there is none."""
    leaves = [tensor.detach().requires_grad_(k in places) for k, tensor in enumerate(tensors)]
    wanted = [leaves[k] for k in places]
    y = fn(*leaves)
    if not y.requires_grad:
        return torch.zeros(len(directions), sum(leaf.numel() for leaf in wanted), dtype=torch.float64)
    like = widen if isinstance(y, WideTensor) else torch.clone

    def backward(direction: Tensor) -> Tensor:
        found = torch.autograd.grad(
            y, wanted, direction, is_grads_batched=batched, retain_graph=True, allow_unused=True
        )
        count = len(direction) if batched else 1
        rows = [leaf.new_zeros(count, leaf.numel()) if f is None else f for f, leaf in zip(found, wanted, strict=True)]
        return torch.cat([wide_of(row).reshape(count, -1) for row in rows], 1)

    given = [like(direction[: y.numel()].reshape(y.shape).to(y.dtype)) for direction in directions]
    return backward(torch.stack(given)) if batched else torch.cat([backward(direction) for direction in given])


def find_read(fn: Function, tensors: Sequence[Tensor]) -> list[int]:
    """Which tensors the result comes from."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = fn(*leaves)
    if not y.requires_grad:
        return []
    found = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return [k for k, gradient in enumerate(found) if gradient is not None]


# Numbers of every type.
DIRECTIONS = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)).bfloat16().double().unbind()


def check_differentiated(
    ours: Function,
    reference: Function,
    tensors: Sequence[Tensor],
    batched: bool,
    is_reordered: bool = False,
) -> None:
    """Gradients by the tensors.

    A sum that is reordered, `is_reordered`, may have another of the values that are not finite, but no finite one.

    Of the tensors that the result comes from: for others PyTorch has no gradient, and the operators 0 times what comes
    from above, which may be NaN.
    """
    if native.operators_everywhere and tensors[0].dtype == torch.float64:
        return  # the operators' derivatives are fp32; nothing but tests takes fp64 there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        places, error = attempt(lambda *given: find_read(reference, given), tensors)
        if error is not None or not places:
            return  # no value, or no derivative; the values' test has the first
        recorded = Recorded()
        with recorded.recording():
            got, refusal = attempt(lambda *given: differentiate(ours, given, DIRECTIONS, places, batched), tensors)
        if refusal is not None:
            assert isinstance(refusal, EpilogueError), repr(refusal)
            assert re.search(NAMED, str(refusal)), f"no type, limit or function: {refusal}"
            return
        summed = is_summed([tensors[k] for k in places], reference(*tensors).numel())
        is_empty = tensors[0].numel() == 0

        def unknown(got: Tensor, expected: Tensor) -> Tensor:
            found = got.isnan() & expected.isinf() & summed
            if is_empty:  # the sum of nothing is 0, which PyTorch multiplies by the derivatives of what it comes from
                found |= (got == 0) & expected.isnan()
            return found | both_infinite(got, expected) if is_reordered else found

        def own(*given: Tensor) -> Tensor:
            in_fp64 = recorded.in_fp64(ours)
            return differentiate(in_fp64, [tensor.double() for tensor in given], DIRECTIONS, places)

        def torchs(*given: Tensor) -> Tensor:
            return differentiate(reference, [widen(tensor) for tensor in given], DIRECTIONS, places)

        exact = assert_meaning(own, torchs, tensors, mask=unknown)
        is_forwards = native.operators_everywhere and not batched
        assert_rounded(got, exact, own, tensors, mask=unknown, stored=tensors[0].dtype, is_forwards=is_forwards)


def is_summed(tensors: Sequence[Tensor], columns: int) -> Tensor:
    """Of each element of the gradients, whether it is a sum over what the tensor is broadcast to.

    An infinite derivative is multiplied by what comes from above before that sum, which may then be inf - inf. PyTorch
    may sum first.
    """
    return torch.cat([torch.full((tensor.numel(),), tensor.numel() < columns) for tensor in tensors])


def both_infinite(got: Tensor, expected: Tensor) -> Tensor:
    return ~got.isfinite() & ~expected.isfinite()
