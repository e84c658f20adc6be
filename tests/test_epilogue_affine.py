"""Which epilogues are affine in the pre-activation, and their slopes and intercepts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cutfuse.epilogue import Epilogue, Expr, evaluate

AFFINE: dict[str, tuple[Callable[..., torch.Tensor], object, object]] = {
    "identity": (lambda z: z, 1.0, 0.0),
    "divide_and_scale": (lambda z: (z / 2) * 1.5, 0.75, 0.0),
    "numbers": (lambda z: -(3 - z * 2) / 4 + z, 1.5, -0.75),
    "operand_slope": (lambda z, r: z * r, "r0", 0.0),
    "operand_intercept": (lambda z, r: r - z, -1.0, "r0"),
    "both": (lambda z, r, s: (z + r) * s, "r1", "(r0 * r1)"),
    "twice": (lambda z, r: z * r + z, "(r0 + 1)", 0.0),
    "any_function_of_operands": (lambda z, r: z / torch.exp(r) + r**2, "(1 / exp(r0))", "square(r0)"),
    "alpha": (lambda z, r: torch.add(r, z, alpha=2), 2.0, "r0"),
    "without_z": (lambda z, r: r, 0.0, "r0"),
    "copies": (lambda z: +z.contiguous(), 1.0, 0.0),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine(name: str) -> None:
    fn, slope, intercept = AFFINE[name]
    epilogue = Epilogue(fn)
    form = epilogue.affine
    assert form is not None
    assert describe(form.slope) == slope
    assert describe(form.intercept) == intercept
    z, r, s = (torch.randn(50, dtype=torch.float64) for _ in range(3))
    operands = (r, s)[: epilogue.operand_count]
    parts = [value_of(part, operands) for part in (form.slope, form.intercept)]
    torch.testing.assert_close(parts[0] * z + parts[1], fn(z, *operands))


def describe(part: Expr | float) -> object:
    return repr(part) if isinstance(part, Expr) else part


def value_of(part: Expr | float, operands: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
    if not isinstance(part, Expr):
        return part
    program = Epilogue.from_expression(part, len(operands)).program
    return evaluate(program, torch.zeros_like(operands[0]), operands)


def test_operands_of_the_parts() -> None:
    form = Epilogue(lambda z, a, b, c: (z + a) * b / torch.exp(c) + 1).affine
    assert form is not None
    assert form.slope_operands == (1, 2)
    assert form.intercept_operands == (0, 1, 2)
    assert Epilogue(lambda z: z * 2).affine.slope_operands == ()  # type: ignore[union-attr]
    assert repr(Epilogue(lambda z, r: z * 2 + r).affine) == "Affine(slope=2.0, intercept=r0)"


@pytest.mark.parametrize(
    "fn",
    [
        torch.sigmoid,
        lambda z: z * z,
        lambda z: 1 / z,
        lambda z: torch.square(z),
        lambda z: torch.where(z > 0, z, z),
        lambda z, r: torch.maximum(z, r),
        lambda z, r: r / (z + 1),
        # Affine for finite z only, where the product still has to be made: 0 * inf is NaN.
        lambda z: z * 0 + 1,
        lambda z: (z - z) * 2 + z,
        # Numbers whose product overflows or vanishes in fp32, where those with z may not.
        lambda z: z * 1e30 * 1e30,
        lambda z: z * 1e-30 / 1e30,
        lambda z: (z + 1e30) * 1e30,
    ],
)
def test_not_affine(fn: Callable[..., torch.Tensor]) -> None:
    assert Epilogue(fn).affine is None


def test_division_by_zero_is_left_to_the_program() -> None:
    form = Epilogue(lambda z: z / 0.0).affine
    assert form is not None
    z = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert (value_of(form.slope, (z,)) * z).tolist() == [torch.inf, -torch.inf]
