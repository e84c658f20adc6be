"""Functions and chains of them at ties, zeros of both signs, infinities and NaN: values and gradients are PyTorch's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from host_program import run_on_host
from torch import Tensor
from torch_answers import derivatives, values

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError
from cutfuse.native import use_operators_everywhere

Function = Callable[..., torch.Tensor]

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.0, 0.0625]

# PyTorch has no derivative of these.
NOT_DIFFERENTIABLE: dict[str, Function] = {
    "isnan": torch.isnan,
    "isinf": lambda z: z.isinf(),
    "isfinite": torch.isfinite,
    "isposinf": torch.isposinf,
    "isneginf": torch.Tensor.isneginf,
    "signbit": torch.signbit,
    "isclose": lambda z, r: torch.isclose(z, r, 0.5, 0.25),
    "isclose_nan": lambda z, r: z.isclose(r, equal_nan=True),
    "logical_xor": torch.logical_xor,
    "bitwise": lambda z, r: torch.bitwise_xor(z > 0, r > 0) & torch.bitwise_or(z > 1, torch.bitwise_not(r < 0)),
    "bitwise_and": lambda z, r: torch.bitwise_and(z > 0, r > 0),
    "heaviside": torch.heaviside,
    "floor_divide": lambda z, r: z // r,
    "floor_divide_number": lambda z: torch.floor_divide(z, 0.1),
    "reflected_floor_divide": lambda z: 2 // z,
    "reflected_modulo": lambda z: 3 % z,
}
FUNCTIONS: dict[str, Function] = {
    "divide_floor": lambda z, r: torch.div(z, r, rounding_mode="floor"),
    "divide_trunc": lambda z, r: z.div(r, rounding_mode="trunc"),
    "modulo": lambda z, r: z % r,
    "modulo_number": lambda z: z % 0.75,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "nan_to_num_numbers": lambda z: torch.nan_to_num(z, 0.5, posinf=3, neginf=-2),
    "log2": torch.log2,
    "log10": torch.log10,
    "tan": torch.tan,
    "atan": torch.arctan,
    # Not at the origin, where the derivatives became 0 after PyTorch 2.8.
    "atan2": lambda z, r: torch.arctan2(z, torch.where((z == 0) & (r == 0), 1.0, r)),
    "asin": torch.arcsin,
    "acos": torch.arccos,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.arcsinh,
    "acosh": torch.arccosh,
    "atanh": torch.arctanh,
    "erfc": torch.special.erfc,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "copysign": torch.copysign,
    "copysign_number": lambda z: torch.copysign(z, -1.0),
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "hypot": torch.hypot,
    "xlogy": torch.xlogy,
    "xlogy_numbers": lambda z: torch.xlogy(z, 2.0) + torch.special.xlogy(0.5, z),
    "xlog1py": torch.special.xlog1py,
    "xlogy_of_nan": lambda z: torch.xlogy(z, math.nan),
    "xlog1py_of_nan": lambda z: torch.special.xlog1py(z, math.nan),
    "entr": torch.special.entr,
    "ndtr": torch.special.ndtr,
    "lerp": torch.lerp,
    "lerp_number": lambda z, r: torch.lerp(z, r, 0.25) + torch.lerp(z, r, 0.75),
    "lerp_negative": lambda z, r: torch.lerp(z, r, -0.75),
    "addcmul": lambda z, r, s: torch.addcmul(z, r, s, value=0.5),
    "addcdiv": lambda z, r, s: torch.addcdiv(z, r, s, value=-2),
    "threshold": lambda z: torch.threshold(z, 0.5, 20.0),
    "masked_fill": lambda z: torch.masked_fill(z, z > 0, 2.0),
    "rsub": lambda z, r: torch.rsub(z, r, alpha=2),
    "frac": torch.frac,
    "angle": torch.angle,
    "real": lambda z: torch.real(z) + z.conj_physical(),
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "sinc": torch.special.sinc,
    "logit": torch.logit,
    "logit_margin": lambda z: torch.special.logit(z, 0.125),
    "ldexp": torch.ldexp,
    "round_decimals": lambda z: torch.round(z, decimals=2) + z.round(decimals=-1) + z.round(decimals=0),
    "zeros_like": lambda z: z + torch.zeros_like(z) * 2,
    "ones_like": lambda z: torch.where(z > 0, torch.ones_like(z), z),
    "full_like": lambda z: torch.full_like(z, 2.0) - z,
    "clamp_tensor": lambda z, r, s: torch.clamp(z, r, s),
    "clamp_lower_tensor": lambda z, r: z.clamp(r),
    "clamp_upper_tensor": lambda z, r: torch.clip(z, max=r),
    "clamp_lower_number": lambda z: z.clamp(0.5),
    "clamp_upper_number": lambda z: z.clamp(max=-0.5),
    "clamp_to_infinity": lambda z: z.clamp(0.5, math.inf),
    "clamp_from_infinity": lambda z: z.clamp(-math.inf, 0.5),
    "clamp_between_infinities": lambda z: z.clamp(-math.inf, math.inf),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "clamp_number_and_tensor": lambda z, r: torch.clamp(z, torch.zeros_like(r), r),
    "clamp_the_same": lambda z, r: z.clamp(r, r),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "tanhshrink": F.tanhshrink,
    "prelu": lambda z: F.prelu(z, torch.tensor(0.25, dtype=torch.float64)),
    "rrelu": F.rrelu,
    "dropout": lambda z: F.dropout(z, 0.5, training=False),
    "power_-2": lambda z: z**-2,
    "power_-1": lambda z: z**-1,
    "power_0": lambda z: z**0,
    "power_3": lambda z: z**3,
    "power_of_tensor": torch.pow,
}
# Zeros that come from masks and zeros that come from arithmetic, under derivatives that are infinite.
CHAINS: dict[str, Function] = {
    "root_of_relu": lambda z: torch.relu(z).sqrt(),
    "root_of_softshrink": lambda z: F.softshrink(z) ** 0.5,
    "reciprocal_of_softshrink": lambda z: 1 / F.softshrink(z),
    "root_of_hardshrink": lambda z: F.hardshrink(z).sqrt(),
    "root_of_abs": lambda z: z.abs().sqrt(),
    "root_of_square": lambda z: (z * z).sqrt(),
    "root_of_clamp": lambda z: z.clamp(0, 1).sqrt() + F.relu6(z).sqrt() + F.hardtanh(z, 0.0, 2.0).sqrt(),
    "root_of_hardsigmoid": lambda z: F.hardsigmoid(z * 9).sqrt() + F.hardswish(z * 9 + 1).log(),
    "root_of_floor": lambda z: z.floor().sqrt() + z.trunc().sqrt() + z.round().rsqrt() + z.sign().sqrt(),
    "root_of_maximum": lambda z, r: torch.maximum(z, r * 0).sqrt(),
    "floor_of_root": lambda z: z.sqrt().floor(),
    "relu_of_root": lambda z: F.relu(z.sqrt()),
    "where_of_root": lambda z: torch.where(z > 0, z.sqrt(), 0.0),
    "where_inside_root": lambda z: torch.where(z > 0, z, 0.0).sqrt(),
    "where_twice": lambda z: torch.where(z > 0, torch.where(z > 0, z, 0.0).sqrt(), z.rsqrt()),
    "compared_root": lambda z: torch.where(z.sqrt() > 0.75, z, -z),
    "root_of_comparison": lambda z: (z > 0).float().sqrt() + z,
    "root_of_zero": lambda z: (z * 0.0).sqrt(),
    "root_of_negated_mask": lambda z: (-2.0 * torch.relu(z) + 0.0).neg().sqrt(),
    "root_of_other": lambda z, r: (torch.relu(z) + r.abs()).sqrt(),
    "root_of_two_masks": lambda z, r: (torch.relu(z) + torch.relu(r)).sqrt(),
    "masked_product": lambda z, r: (torch.relu(z) * r).sqrt(),
    "power_by_number": lambda z: torch.relu(z) ** 0.75,
    "remainder_of_root": lambda z, r: (z.sqrt() % r) * 2,
}


def make_arguments(count: int) -> list[torch.Tensor]:
    values = SPECIAL if count < 3 else SPECIAL[:8]
    return list(torch.tensor(list(itertools.product(values, repeat=count)), dtype=torch.float64).unbind(-1))


def count_arguments(fn: Function) -> int:
    return 1 + next(count for count in range(3) if _takes(fn, count))


def _takes(fn: Function, operand_count: int) -> bool:
    try:
        fn(*torch.ones(1 + operand_count, 1, dtype=torch.float64))
    except TypeError:
        return False
    return True


def check(fn: Function, differentiable: bool) -> None:
    """The program in fp64 and the native interpreter in fp32 against PyTorch's fp64 on the callable itself."""
    arguments = make_arguments(count_arguments(fn))
    epilogue = Epilogue(fn, len(arguments) - 1)
    expected, known = values(fn, arguments)
    got, same = values(epilogue, arguments)
    assert_same(got, expected, known & same, 1e-12)
    native = run_on_host(epilogue.program, arguments[0], arguments[1:])
    assert_same(native, expected, known, 3e-6)
    zeros = known & (expected == 0) & (native == 0)
    assert torch.equal(native.signbit()[zeros], expected.signbit()[zeros])
    if not differentiable:
        return
    pairs = zip(derivatives(fn, arguments), derivatives(epilogue, arguments), strict=True)
    unknown = torch.stack(arguments).isnan().any(0) if fn in GIVES_NAN_A_GRADIENT else torch.tensor(False)
    for wrt, ((want, known), (have, same)) in enumerate(pairs):
        known = known & ~unknown
        assert_same(have, want, known & same, 1e-12)
        assert_same(run_on_host(epilogue.program, arguments[0], arguments[1:], wrt), want, known, 1e-5)


def _gives_nan_a_gradient(fn: Function) -> bool:
    nan, one = (torch.tensor(value, requires_grad=True) for value in (math.nan, 1.0))
    return bool(torch.autograd.grad(fn(nan, one), nan)[0].item() == 1.0)


# PyTorch 2.14 hands the gradient to both arguments where one is NaN; 2.13 and 2.15 to the one that is the result.
GIVES_NAN_A_GRADIENT = [fn for fn in (torch.fmax, torch.fmin) if _gives_nan_a_gradient(fn)]


def test_atan2_has_no_derivative_at_the_origin() -> None:
    zeros = torch.zeros(2)
    for wrt in range(2):
        assert run_on_host(Epilogue(torch.atan2).program, zeros, [zeros], wrt).tolist() == [0.0, 0.0]


def assert_same(got: torch.Tensor, expected: torch.Tensor, known: torch.Tensor, tolerance: float) -> None:
    got, expected = got[known], expected[known].to(got.dtype)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_at_special_values(name: str) -> None:
    check(FUNCTIONS[name], differentiable=True)


@pytest.mark.parametrize("name", NOT_DIFFERENTIABLE)
def test_functions_without_a_derivative_at_special_values(name: str) -> None:
    check(NOT_DIFFERENTIABLE[name], differentiable=False)


@pytest.mark.parametrize("name", CHAINS)
def test_chains_with_infinite_derivatives(name: str) -> None:
    check(CHAINS[name], differentiable=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_to_num_has_the_limits_of_the_type(dtype: torch.dtype) -> None:
    z = torch.tensor([math.nan, math.inf, -math.inf, 1.5], dtype=dtype)
    assert torch.equal(cutfuse.pointwise(torch.nan_to_num, z), torch.nan_to_num(z))
    assert torch.equal(cutfuse.pointwise(lambda z: z.nan_to_num(), z), torch.nan_to_num(z))
    assert torch.equal(Epilogue(lambda z: torch.nan_to_num(z, 0, 1, -1))(z), torch.nan_to_num(z, 0, 1, -1))
    with pytest.raises(EpilogueError, match="pass the function itself"):
        Epilogue(torch.nan_to_num)


@pytest.mark.parametrize(("function", "slope"), [(F.elu, 1.0), (F.selu, 1.0507009873554805), (F.celu, 1.0)])
def test_the_slope_at_nan_is_that_of_cudas_kernels(function: Callable[[Tensor], Tensor], slope: float) -> None:
    """PyTorch's kernels of a CPU give it in a tensor's last elements, and NaN in those that they take by vectors."""
    z = torch.full((3,), math.nan, requires_grad=True)
    with use_operators_everywhere():
        y = cutfuse.pointwise(function, z)
    (gradient,) = torch.autograd.grad(y.sum(), z)
    assert y.isnan().all()
    assert torch.equal(gradient, torch.full((3,), slope))


@pytest.mark.parametrize("z", [-0.3, -0.0, 0.0, 0.5])
def test_softshrink_has_no_negative_zero(z: float) -> None:
    """As PyTorch's kernels of a GPU, and of a CPU where they take elements by vectors."""
    y = cutfuse.pointwise(F.softshrink, torch.full((3,), z))
    assert torch.equal(y.signbit(), torch.zeros(3, dtype=torch.bool))
