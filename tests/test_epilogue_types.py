"""Types inside an epilogue: what PyTorch would give, or a refusal that names the type."""

from __future__ import annotations

import itertools
import pickle
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse import Epilogue, EpilogueError
from cutfuse.arguments import _reduced_dtype
from cutfuse.epilogue import op_table, resolve
from cutfuse.epilogue.table import CONDITION, Op
from cutfuse.epilogue.types import Autocast, ValueType

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
X = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0])


@pytest.fixture(params=["eager", "compiled", "ahead"])
def pointwise(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    """cutfuse.pointwise as it is, in torch.compile, and with an Epilogue that was traced ahead of time."""
    torch._dynamo.reset()
    if request.param == "eager":
        yield cutfuse.pointwise
    elif request.param == "compiled":
        yield lambda fn, *tensors: torch.compile(
            lambda *inner: cutfuse.pointwise(fn, *inner), fullgraph=True, backend="eager"
        )(*tensors)
    else:
        yield lambda fn, *tensors: cutfuse.pointwise(Epilogue(fn, len(tensors) - 1), *tensors)
    torch._dynamo.reset()


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "isinstance": lambda z: z * 2 if isinstance(z, Tensor) else z * 3,
    "isinstance_of_result": lambda z: z * 2 if isinstance(z > 0, Tensor) else z * 3,
    "not_a_number": lambda z: z * 3 if isinstance(z, float | int) else z * 2,
    "is_tensor": lambda z: z * 2 if torch.is_tensor(z) else z * 3,
    "hasattr": lambda z: z * 2 if hasattr(z, "cumsum") else z * 3,
    "hasattr_missing": lambda z: z * 3 if hasattr(z, "absent") else z * 2,
    "is_floating_point": lambda z: z * 2 if z.is_floating_point() else z * 3,
    "is_floating_point_function": lambda z: z * 2 if torch.is_floating_point(z) else z * 3,
    "callable": lambda z: z * 3 if callable(z) else z * 2,
    "bool_is_no_float": lambda z: z * 3 if (z > 0).is_floating_point() else z * 2,
}
# What Dynamo of torch 2.8 cannot trace, for plain tensors either.
FAULTS_OF_DYNAMO_2_8 = {
    "hasattr": "Dynamo of torch 2.8 finds no method by hasattr",
    "not_a_number": "Dynamo of torch 2.8 cannot evaluate float | int",
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_on_what_a_value_is(
    name: str, pointwise: Callable[..., Tensor], request: pytest.FixtureRequest
) -> None:
    if name in FAULTS_OF_DYNAMO_2_8 and "compiled" in request.node.name and torch.__version__.startswith("2.8."):
        pytest.skip(FAULTS_OF_DYNAMO_2_8[name])
    torch.testing.assert_close(pointwise(BRANCHES[name], X), BRANCHES[name](X), rtol=0, atol=0)


@pytest.mark.parametrize("attribute", ["shape", "device", "ndim", "T", "is_cuda", "layout", "requires_grad"])
def test_attributes_that_a_value_lacks_are_refused(attribute: str, pointwise: Callable[..., Tensor]) -> None:
    with pytest.raises(EpilogueError, match=rf"reads Tensor\.{attribute} of a symbolic value"):
        pointwise(lambda z: z * 2 if getattr(z, attribute) else z, X)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_dtype_is_xs(dtype: torch.dtype) -> None:
    seen = []

    def fn(z: Tensor) -> Tensor:
        seen.extend([z.dtype, (z > 0).dtype, (z * 2).dtype, z.float().dtype])
        return z + torch.finfo(z.dtype).eps

    y = cutfuse.pointwise(fn, X.to(dtype))
    assert seen == [dtype, torch.bool, dtype, torch.float32]
    torch.testing.assert_close(y, fn(X.to(dtype)), rtol=0, atol=0)


# What PyTorch computes with integers or booleans; all of it is refused or PyTorch's.
MIXED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda z, p, q: (p + q) * z,
    "sub": lambda z, p, q: (p - q) * z,
    "mul": lambda z, p, q: p * q * z,
    "div": lambda z, p, q: (p / (q + z * 0 + 1)) * z,
    "and": lambda z, p, q: (p & q) * z,
    "or": lambda z, p, q: (p | q) * z,
    "xor": lambda z, p, q: (p ^ q) * z,
    "invert": lambda z, p, q: ~p * z + q,
    "neg": lambda z, p, q: -p * z + q,
    "abs": lambda z, p, q: torch.abs(p) * z + q,
    "plus_one": lambda z, p, q: (p + 1) * z + q,
    "plus_half": lambda z, p, q: (p + 0.5) * z + q,
    "square": lambda z, p, q: p**2 * z + q,
    "compare": lambda z, p, q: torch.where(p < q, z, -z),
    "compare_number": lambda z, p, q: torch.where(p == 1, z, q * z),
    "compare_z": lambda z, p, q: torch.where(p > z, z, q * z),
    "maximum": lambda z, p, q: torch.maximum(p, q) * z,
    "where": lambda z, p, q: torch.where(p, z, q),
    "logical": lambda z, p, q: torch.logical_and(p, q) * z,
    "sigmoid": lambda z, p, q: torch.sigmoid(p) * z + q,
    "float": lambda z, p, q: p.float() * q.float() + z,
    "to_type_of_z": lambda z, p, q: p.to(z.dtype) - q.to(z.dtype) + z,
    "bool": lambda z, p, q: torch.where(p.bool(), z, q.type_as(z)),
    "truth": lambda z, p, q: (z > 0) + (z < 0),
    "count": lambda z, p, q: (z > 0) * 1 + p,
    "masked_fill": lambda z, p, q: z.masked_fill(p, 2.0) + q,
    "clamp": lambda z, p, q: torch.clamp(z, p, q),
    "only_p": lambda z, p, q: p * (z == z),
}


def torchs(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor | None:
    """PyTorch's result, or None where it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a condition of type uint8
            return fn(*tensors)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


def check(pointwise: Callable[..., Tensor], fn: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether it was computed, as PyTorch computes it; otherwise it was refused, naming a type."""
    expected = torchs(fn, *tensors)
    try:
        actual = pointwise(fn, *tensors)
    except EpilogueError as error:
        if not re.search(r"torch\.|boolean", str(error)):
            raise
        return False
    assert expected is not None, "PyTorch refuses it"
    assert actual.dtype == expected.dtype
    # PyTorch rounds to the types on the way after every operation (fp32 for integers), cutfuse once.
    types = [t.dtype if t.dtype.is_floating_point else torch.float32 for t in (*tensors, expected)]
    tolerance = 4 * max(torch.finfo(dtype).eps for dtype in types)
    torch.testing.assert_close(
        actual, expected.expand(actual.shape), rtol=tolerance, atol=tolerance * 300, equal_nan=True
    )
    return True


def values_of(dtype: torch.dtype, size: int, generator: torch.Generator | None = None) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(max(limits.min, -130), min(limits.max + 1, 260), (size,), generator=generator).to(dtype)
    return torch.randint(-3, 4, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_operands_of_other_types(name: str, dtype: torch.dtype, pointwise: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    check(pointwise, MIXED[name], X, values_of(dtype, 5), values_of(dtype, 5))


@given(
    name=st.sampled_from(sorted(MIXED)),
    types=st.tuples(st.sampled_from(FLOATS), *[st.sampled_from((torch.bool, *INTEGERS, *FLOATS))] * 2),
    scalars=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 2**16),
)
def test_types_are_pytorchs(name: str, types: tuple, scalars: tuple, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [values_of(dtype, 7, generator) for dtype in types]
    tensors = [t[0] if is_scalar else t for t, is_scalar in zip(tensors, scalars, strict=True)]
    check(cutfuse.pointwise, MIXED[name], *tensors)
    check(lambda fn, *given: cutfuse.pointwise(Epilogue(fn, 2), *given), MIXED[name], *tensors)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[(name, torch.bool) for name in ("add", "mul", "and", "where")],
        *[("plus_half", torch.int64), ("float", torch.uint8), ("compare", torch.int16)],
        *[("compare_number", torch.int64), ("sigmoid", torch.int32)],
    ],
    ids=str,
)
def test_what_is_exact_in_fp32_is_computed(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert check(cutfuse.pointwise, MIXED[name], X, values_of(dtype, 5), values_of(dtype, 5))


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("add", torch.uint8, "add of torch.uint8, torch.uint8 gives torch.uint8"),
        ("sub", torch.bool, "does not subtract booleans|refuses torch.sub"),
        ("and", torch.int64, "got r0 of type torch.int64"),
        ("invert", torch.int32, "got r0 of type torch.int32"),
        ("compare", torch.int64, "torch.lt of torch.int64, torch.int64: PyTorch compares integers exactly"),
        ("where", torch.uint8, "got r0 of type torch.uint8"),
    ],
    ids=str,
)
def test_refusals_name_the_type(name: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        cutfuse.pointwise(MIXED[name], X, values_of(dtype, 5), values_of(dtype, 5))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64], ids=str)
def test_softsign_of_integers_is_refused(dtype: torch.dtype, pointwise: Callable[..., Tensor]) -> None:
    """PyTorch's |a| + 1 of int8 wraps around: softsign(-127) is positive."""
    operand = torch.tensor([-127, -128, 127, 0, 5]).to(dtype)
    with pytest.raises(EpilogueError, match=rf"(softsign|abs|add) of {dtype}.*modulo"):
        pointwise(lambda z, r: z + F.softsign(r), X, operand)
    torch.testing.assert_close(
        pointwise(lambda z, r: z + F.softsign(r.float()), X, operand), X + F.softsign(operand.float())
    )


def test_an_epilogue_keeps_its_masks_in_a_pickle() -> None:
    epilogue = pickle.loads(pickle.dumps(Epilogue(lambda z, p, q: (p & q) * z)))
    masks = torch.tensor([True, False, True, True, False])
    torch.testing.assert_close(epilogue(X, masks, masks), masks * X)
    with pytest.raises(EpilogueError, match=r"as a mask, which is torch\.bool, but it is torch\.int64"):
        epilogue(X, masks.long(), masks.long())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_casts_round_as_in_pytorch(dtype: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(200) * 10.0**k for k in range(-8, 8)]).to(dtype)
    for fn in (lambda z: z.to(target), lambda z: z.to(target).float() * 3, lambda z: z.type(target).to(z.dtype) - z):
        if target == torch.float64 and dtype != torch.float64:
            with pytest.raises(EpilogueError, match=r"to torch\.float64, but its arithmetic is fp32"):
                cutfuse.pointwise(fn, x)
            continue
        actual, expected = cutfuse.pointwise(fn, x), fn(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(expected.dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.float16, torch.float32], ids=str)
def test_narrow_operands_are_cast_to_fp64_where_x_is(dtype: torch.dtype, pointwise: Callable[..., Tensor]) -> None:
    x, operand = torch.linspace(-1, 1, 5, dtype=torch.float64), values_of(dtype, 5)
    for fn in (
        lambda z, r: z / 3 + r.to(z.dtype),
        lambda z, r: z * r.float().type_as(z),
        lambda z, r: torch.zeros_like(z, dtype=torch.float32).to(z.dtype) + r.double() * z,
    ):
        torch.testing.assert_close(pointwise(fn, x, operand), fn(x, operand), rtol=1e-15, atol=0)


def test_a_cast_in_a_chain_rounds_under_compile_too(pointwise: Callable[..., Tensor]) -> None:
    x = torch.linspace(0, 1, 101)
    for fn in (lambda z: z.to(torch.float16) * 3 - z, lambda z: z.bfloat16().float() * 3, lambda z: (z > 0).half() / 3):
        torch.testing.assert_close(pointwise(fn, x), fn(x), rtol=0, atol=1e-3)
    rounded = pointwise(lambda z: (z.half().float() - z) * 2048, x)
    torch.testing.assert_close(rounded, (x.half().float() - x) * 2048, rtol=1e-6, atol=1e-6)


def test_gradients_go_through_casts(path: str) -> None:
    x = torch.randn(50, requires_grad=True)
    (actual,) = torch.autograd.grad(cutfuse.pointwise(lambda z: torch.tanh(z.half()).float() * 3, x).sum(), x)
    (expected,) = torch.autograd.grad((torch.tanh(x.half()).float() * 3).sum(), x)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


PROMOTED: dict[str, tuple[Callable[..., Tensor], tuple[tuple[tuple[int, ...], torch.dtype], ...]]] = {
    "0-d x": (lambda z, r: z * r, (((), torch.float32), ((3,), torch.bfloat16))),
    "all 0-d": (lambda z, r: z * r, (((), torch.float16), ((), torch.float32))),
    "all 0-d, fp64": (lambda z, r: z * r / 3, (((), torch.float32), ((), torch.float64))),
    "0-d operand": (lambda z, r: z * r, (((3,), torch.float16), ((), torch.float32))),
    "fp64 operand": (lambda z, r: z * r, (((3,), torch.float16), ((3,), torch.float64))),
    "only compared": (lambda z, r: torch.where(r > 0, z, 0.0), (((3,), torch.float16), ((3,), torch.float32))),
    "cast": (lambda z: F.silu(z.float()), (((3,), torch.bfloat16),)),
    "cast of a result": (lambda z: torch.abs(z).float(), (((3,), torch.bfloat16),)),
    "cast of a wide result": (lambda z: torch.abs(z).float(), (((3,), torch.float64),)),
    "cast back": (lambda z: F.silu(z.float()).to(z.dtype), (((3,), torch.bfloat16),)),
    "comparison": (lambda z: z > 0, (((3,), torch.bfloat16),)),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_the_results_type(name: str, pointwise: Callable[..., Tensor]) -> None:
    fn, described = PROMOTED[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape, dtype in described]
    actual, expected = pointwise(fn, *tensors), fn(*tensors)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("x", [torch.arange(3), torch.tensor([True, False])], ids=str)
def test_an_epilogue_takes_integers_as_pointwise_does(x: Tensor) -> None:
    torch.testing.assert_close(Epilogue(lambda z: z / 2)(x), x / 2)


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
def test_reductions_of_comparisons(op: str, path: str) -> None:
    x, w = torch.randn(5, 8), torch.randn(70, 8)
    expected = torchs(lambda z: getattr(torch, op)(z > 0, dim=1), x @ w.t())
    for call in (
        lambda dtype: cutfuse.linear(x, w, epilogue=lambda z: z > 0, reduce=op, out_dtype=dtype),
        lambda dtype: cutfuse.reduce(x @ w.t(), 1, op, prologue=lambda z: z > 0, out_dtype=dtype),
    ):
        if expected is None:
            with pytest.raises(TypeError, match=r"no mean of torch\.bool"):
                call(None)
        else:
            actual = call(None)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        as_float = getattr(torch, op)((x @ w.t() > 0).float(), dim=1)
        torch.testing.assert_close(call(torch.float32), as_float)


def test_ahead_of_time_the_type_is_not_known() -> None:
    with pytest.raises(EpilogueError, match=r"pass the function itself"):
        Epilogue(lambda z: z + torch.finfo(z.dtype).eps)
    with pytest.raises(EpilogueError, match=r"pass the function itself"):
        Epilogue(lambda z: z if z.dtype == torch.float32 else -z)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("fill", [2, 0.1, -0.0])
def test_constants_have_the_type_of_an_operand(dtype: torch.dtype, fill: float) -> None:
    operand = values_of(dtype, 5)
    for fn in (
        lambda z, r: torch.full_like(r, fill) + z,
        lambda z, r: z * torch.full_like(r, fill) * r,
        lambda z, r: z * r.masked_fill(z > 0, fill),
    ):
        assert check(cutfuse.pointwise, fn, X, operand)
        assert check(lambda fn, *given: cutfuse.pointwise(Epilogue(fn), *given), fn, X, operand)


def test_constants_of_an_unknown_or_an_integer_type_are_refused() -> None:
    with pytest.raises(EpilogueError, match=r"pass the function itself"):
        Epilogue(lambda z, r: z + torch.zeros_like(z * r))
    for fn in (lambda z, r: z + torch.zeros_like(r), lambda z, r: z * torch.full_like(r, 2)):
        for epilogue in (fn, Epilogue(fn)):
            with pytest.raises(EpilogueError, match=r"_like of torch\.int16 gives torch\.int16"):
                cutfuse.pointwise(epilogue, X, torch.arange(5, dtype=torch.int16))


def test_a_boolean_is_filled_with_a_boolean(pointwise: Callable[..., Tensor]) -> None:
    fill = torch.tensor(2.5)
    for fn in (lambda z, r: z * (z > 0).masked_fill(z < 1, 2.5), lambda z, r: z * (z > 0).masked_fill(z < 1, r)):
        torch.testing.assert_close(pointwise(fn, X, fill), fn(X, fill))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_heaviside_has_the_type_of_its_argument_ahead_of_time_too(dtype: torch.dtype) -> None:
    for fn in (lambda z: torch.heaviside(z, z + 0.5), lambda z: torch.heaviside(torch.heaviside(z, z), z)):
        assert check(lambda fn, *given: cutfuse.pointwise(Epilogue(fn), *given), fn, X.to(dtype))


def test_integers_are_not_clamped_ahead_of_time() -> None:
    with pytest.raises(EpilogueError, match=r"clamp of torch\.int16 gives torch\.int16"):
        cutfuse.pointwise(Epilogue(lambda z, r: r.clamp(-1, 1) * z), X, torch.arange(5, dtype=torch.int16))


@pytest.mark.parametrize("is_pickled", [False, True])
def test_what_a_composition_gives_has_the_functions_type_ahead_of_time(is_pickled: bool) -> None:
    """Not that of the ops that spell it: where of a number and of integers gives floating-point numbers."""
    epilogue = Epilogue(lambda z, r: F.threshold(r, 0.5, 20.0) * z)
    epilogue = pickle.loads(pickle.dumps(epilogue)) if is_pickled else epilogue
    with pytest.raises(EpilogueError, match=r"torch\.int8 gives torch\.int8"):
        epilogue(X, torch.arange(5, dtype=torch.int8))
    for fn in (torch.logaddexp, torch.heaviside, lambda z, r: torch.tan(z) * F.softshrink(r)):
        for dtype in FLOATS:
            x, operand = torch.tensor(0.5), torch.linspace(-1, 1, 5).to(dtype)
            if dtype == torch.float32 or fn is not torch.heaviside:  # which takes no two types
                assert check(lambda fn, *given: cutfuse.pointwise(Epilogue(fn, 1), *given), fn, x, operand)
    assert repr(Epilogue(torch.tan)) == "Epilogue(z -> (sin(z) / cos(z)))"


def test_masks_without_dimensions_stay_so(pointwise: Callable[..., Tensor]) -> None:
    """With dimensions they would decide the type of a choice between numbers over that of x."""
    x = torch.tensor(0.25, dtype=torch.float64)
    for fn in (
        lambda z: torch.where((z > 0) & (z < 1), 1.0, -1.0) * z / 3,
        lambda z: torch.where((z > 0) | (z < 1), 1.0, -1.0) * z / 3,
        lambda z: torch.where((z > 0) ^ (z < 1), 1.0, -1.0) * z / 3,
        lambda z: torch.where(~(z > 0), 1.0, -1.0) * z / 3,
        lambda z: torch.where(torch.logical_and(z > 0, z < 1) & True, 1.0, -1.0) * z / 3,
    ):
        torch.testing.assert_close(pointwise(fn, x), fn(x), rtol=1e-15, atol=0)


def test_a_boolean_number_is_added_to_a_mask_as_one(pointwise: Callable[..., Tensor]) -> None:
    for fn in (lambda z: True + (z > 0), lambda z: ((z > 0) + True) * z, lambda z: torch.add(z > 0, False) * z):
        torch.testing.assert_close(pointwise(fn, X), fn(X), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_alpha_decides_no_type(dtype: torch.dtype, pointwise: Callable[..., Tensor]) -> None:
    for fn in (lambda z: torch.add(z, -1.5, alpha=2), lambda z: z.sub(-1.5, alpha=2)):
        assert check(pointwise, fn, torch.tensor(0.5, dtype=dtype))


UNDER_AUTOCAST: dict[torch.dtype, tuple[Callable[..., Tensor], ...]] = {
    torch.float32: (
        *(torch.acos, torch.asin, torch.cosh, torch.exp, torch.expm1, torch.log, torch.log10, torch.log1p, torch.log2),
        *(torch.reciprocal, torch.rsqrt, torch.sinh, F.softplus),
        lambda z: z**2,
        lambda z: z**2.5,
        lambda z: 1.5**z,
        lambda z: F.relu(z).pow(3),
        # Some functions make tensors of numbers themselves, and 1 / z is a reciprocal.
        lambda z: torch.where(z > 0, 1.0, 0.0) * z,
        lambda z: 1 / (1 + z * z),
        lambda z: 2.0 / z,
    ),
    torch.float16: (
        *(torch.relu, torch.sigmoid, torch.tanh, torch.sinc, F.gelu, F.silu),
        lambda z: z * 2 + 1,
        lambda z: torch.exp(z).half(),
        lambda z: torch.where(z > 0, z, 0.0),
        lambda z: z / 2,
    ),
}


def test_pytorchs_policy_is_found_on_every_device() -> None:
    """The lists of PyTorch's documentation, of functions that the language has; asked without a GPU."""
    z, wide = ValueType(torch.float16, autocast=Autocast("cuda", torch.float16)), ValueType(torch.float32)
    for expected, functions in UNDER_AUTOCAST.items():
        for fn in functions:
            assert resolve(fn, 0, (z,)).dtype is Epilogue(fn).for_types((z,)).dtype is expected
    for fn in (torch.atan2, lambda z, r: torch.addcmul(z, z, r), lambda z, r: z * r):  # the widest
        assert resolve(fn, 1, (z, wide)).dtype is torch.float32
        assert resolve(fn, 1, (z, z._replace(autocast=None))).dtype is torch.float16
    assert resolve(torch.exp, 0, (z._replace(autocast=None),)).dtype is torch.float16


def test_a_prebuilt_epilogue_has_autocasts_types_where_it_is_on() -> None:
    epilogue = Epilogue(lambda z, r: torch.exp(F.relu(z)) * r)
    plain = ValueType(torch.float16)
    cast = plain._replace(autocast=Autocast("cuda", torch.float16))
    for z, dtype in ((plain, torch.float16), (cast, torch.float32), (plain, torch.float16)):
        assert epilogue.for_types((z, plain)).dtype is dtype
    assert resolve(epilogue, 0, (cast,), (2.0,)).dtype is torch.float32


@pytest.mark.parametrize(
    ("device_type", "expected"),
    [
        ("cuda", {"sum": torch.float32, "mean": torch.float16, "amax": torch.float16, "logsumexp": torch.float32}),
        ("cpu", {"sum": torch.float16, "mean": torch.float16, "amax": torch.float16, "logsumexp": torch.float16}),
    ],
)
def test_reductions_have_autocasts_types(device_type: str, expected: dict[str, torch.dtype]) -> None:
    for reduction, dtype in expected.items():
        assert _reduced_dtype("linear", reduction, (torch.float16, Autocast(device_type, torch.float16))) is dtype


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [op for op in op_table().ops if CONDITION not in op.tensors], ids=lambda op: op.name)
def test_every_op_has_the_type_that_autocast_of_the_cpu_gives(op: Op, cast: torch.dtype) -> None:
    def fn(*tensors: Tensor) -> Tensor:
        return op.compose(tensors, [default for _, default in op.parameters])

    epilogue = Epilogue(fn, op.arity - 1)
    for dtypes in itertools.product(FLOATS[:3], repeat=op.arity):
        tensors = [torch.rand(3).to(dtype) for dtype in dtypes]
        with torch.autocast("cpu", cast):
            try:
                expected = fn(*tensors).dtype
            except RuntimeError:  # such as lerp of two types
                continue
            assert cutfuse.pointwise(fn, *tensors).dtype == epilogue(*tensors).dtype == expected


def test_prelu_is_cast_by_autocast(pointwise: Callable[..., Tensor]) -> None:
    """The one function of the language that autocast of the CPU casts."""

    def fn(z: Tensor, slope: Tensor) -> Tensor:
        return F.prelu(z, slope)

    x, slope = X.clone(), torch.tensor(0.25)
    assert pointwise(fn, x, slope).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = pointwise(fn, x, slope), fn(x, slope)
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


def test_an_autocast_of_an_epilogues_own_is_refused_where_it_matters() -> None:
    def off(z: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.prelu(z, torch.tensor(0.25))

    def off_for_fp32(z: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.exp(z.float())

    def on(z: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.prelu(z, torch.tensor(0.25))

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            EpilogueError, match=r"within a torch\.autocast of its own.*torch\.float32, and not torch\.bf"
        ):
            cutfuse.pointwise(off, X)
        for fn in (off_for_fp32, on):
            torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))
    torch.testing.assert_close(cutfuse.pointwise(off, X), off(X))
    for call in (lambda: cutfuse.pointwise(on, X), lambda: Epilogue(on)):
        with pytest.raises(EpilogueError, match=r"within a torch\.autocast of its own"):
            call()
