"""Training on a GPU: gradients of every op, epilogue and reduction through the kernels, against fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from generators import (
    EPILOGUES,
    FLOATS,
    REDUCTIONS,
    assert_no_worse,
    eager_linear,
    eager_reduce,
    operands_for,
    slack_for,
)
from gpu_tensors import DEVICE, randn
from torch import Tensor

import cutfuse
from cutfuse.epilogue.table import CONDITION, Op, op_table

pytestmark = pytest.mark.gpu

KWARGS = {"allow_unused": True, "materialize_grads": True}


def check(
    actual: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    *draws: Sequence[Tensor],
    slack: float | None = None,
) -> None:
    """Gradients with respect to all tensors are as near to fp64's as eager's are, over all draws of the tensors."""
    ours, eager, exact = (
        [gradients(function, tensors, cast) for tensors in draws]
        for function, cast in ((actual, None), (reference, None), (reference, torch.float64))
    )
    for index in range(len(draws[0])):
        stacked = [torch.stack([draw[index] for draw in each]) for each in (ours, eager, exact)]
        assert stacked[0].dtype == stacked[1].dtype
        assert_no_worse(*stacked, slack=slack or slack_for(stacked[0].dtype))


def gradients(function: Callable[..., Tensor], tensors: Sequence[Tensor], cast: torch.dtype | None) -> Sequence[Tensor]:
    own = [(t if cast is None else t.to(cast)).detach().requires_grad_() for t in tensors]
    y = function(*own)
    torch.manual_seed(1)
    grad = torch.randn(y.shape, device=DEVICE).to(tensors[0].dtype)
    return torch.autograd.grad(y, own, grad.to(y.dtype), **KWARGS)


# PyTorch rounds the gradient of a cast too: see test_casts.
UNCAST = [op for op in op_table().ops if not op.path.startswith("torch.Tensor.")]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", UNCAST, ids=lambda op: op.name)
def test_every_op(op: Op, dtype: torch.dtype) -> None:
    values = [randn(33 + k, 257, dtype=dtype)[:33] for k in range(op.arity)]

    def function(*tensors: Tensor) -> Tensor:
        pairs = zip(op.tensors, tensors, strict=True)
        arguments = [value > 0 if name == CONDITION else value for name, value in pairs]
        return op.compose(arguments, [default for _, default in op.parameters]) + tensors[0] * 0.0

    if op.name == "pow":
        values[0] = values[0].abs() + 0.25
    check(lambda *tensors: cutfuse.pointwise(function, *tensors), function, values, slack=3.0)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_casts(dtype: torch.dtype, target: torch.dtype) -> None:
    """Values bit for bit, at ties, overflow and subnormals too; a gradient that only the result's type rounds."""
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), device=DEVICE, dtype=torch.int64).int()
    x = bits.view(torch.float32).to(dtype).requires_grad_()
    y = cutfuse.pointwise(lambda z: z.to(target).float(), x)
    assert torch.equal(y.nan_to_num(nan=7.0), x.to(target).float().nan_to_num(nan=7.0))
    grad = torch.randn_like(y)
    (actual,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(actual, grad.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (129, 264, 72), (77, 131, 61), (513, 1000, 336)], ids=str)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "residual", "four_operands"])
def test_linear(name: str, dtype: torch.dtype, reduction: str | None, shape: tuple[int, int, int]) -> None:
    epilogue, count = EPILOGUES[name]
    rows, columns, depth = shape

    def draw(seed: int) -> list[Tensor]:
        x, weight, bias = (randn(*s, dtype=dtype, seed=seed) for s in ((rows, depth), (columns, depth), (columns,)))
        return [x, weight * depth**-0.5, bias, *operands_for(count, rows, columns, dtype, DEVICE)]

    def actual(x: Tensor, weight: Tensor, bias: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)

    def reference(x: Tensor, weight: Tensor, bias: Tensor, *operands: Tensor) -> Tensor:
        return eager_linear(x, weight, bias, epilogue, operands, reduction)

    # Of a single row the column operand's gradient is one number, whose error is chance: 16 of them average out.
    draws = [draw(seed) for seed in range(16 if rows == 1 else 1)]
    # in a 16-bit type several elements tie for a maximum that is single in fp64
    check(actual, reference, *draws, slack=2.0 if reduction in ("amax", "amin") else None)


@pytest.mark.parametrize("dim", [0, 1, 2, (0, 2), (1, 2), None])
@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce(dtype: torch.dtype, op: str, dim) -> None:
    tensors = [randn(9, 130, 33, dtype=dtype), randn(33, dtype=dtype), randn(130, 1, dtype=dtype)]

    def prologue(z: Tensor, r: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(z) * r + c

    def actual(x: Tensor, *operands: Tensor) -> Tensor:
        return cutfuse.reduce(x, dim, op, prologue=prologue, operands=operands)

    def reference(x: Tensor, *operands: Tensor) -> Tensor:
        return eager_reduce(prologue(x, *operands), (0, 1, 2) if dim is None else dim, op)

    check(actual, reference, tensors, slack=2.0)


@pytest.mark.parametrize("op", ["amax", "amin"])
@pytest.mark.parametrize("dim", [0, 1, 2, (0, 2)])
def test_ties_share_the_gradient_evenly(op: str, dim) -> None:
    """The kernels of both directions have to agree on the last bit of what they compare."""
    torch.manual_seed(0)
    x = (torch.randint(-3, 4, (17, 65, 33), device=DEVICE) / 3).requires_grad_()
    actual = cutfuse.reduce(x, dim, op, prologue=lambda z: torch.nn.functional.gelu(z) * 1.7)
    reference = x.detach().double().requires_grad_()
    expected = eager_reduce(torch.nn.functional.gelu(reference) * 1.7, dim, op)
    grad = torch.rand(expected.shape, device=DEVICE) + 0.5
    (found,), (wanted,) = torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, reference, grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    sums = found.ne(0).sum(dim)
    assert (sums > 0).all()


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("function", [torch.sigmoid, torch.nn.functional.mish, torch.nn.functional.gelu])
def test_every_maximum_is_found_again(op: str, function: Callable[[Tensor], Tensor]) -> None:
    """No row may lose its gradient because two kernels round differently."""
    x = randn(4096, 513).requires_grad_()
    (grad,) = torch.autograd.grad(cutfuse.reduce(x, 1, op, prologue=function).sum(), x)
    assert grad.isfinite().all()
    assert grad.ne(0).any(1).all()


@pytest.mark.parametrize("op", REDUCTIONS)
def test_special_values(op: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan], [1.0, inf], [1.0, -inf], [-inf, -inf], [inf, inf]], device=DEVICE, requires_grad=True)
    actual, expected = cutfuse.reduce(x, 1, op, prologue=lambda z: z * 2), eager_reduce(x * 2, 1, op)
    grad = torch.ones_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, x, grad), equal_nan=True
    )


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("epilogue", [torch.relu, lambda z: z.clamp(0, 1), lambda z: torch.relu(z) * 0.5])
def test_a_mask_hides_an_infinite_gradient(epilogue: Callable[[Tensor], Tensor], dtype: torch.dtype, mode: str) -> None:
    """Every sum is 0, where its square root has an infinite derivative. No value is 0, which clamp does not mask."""
    x, weight = (torch.rand(rows, 64, device=DEVICE, dtype=dtype) + 0.5 for rows in (96, 128))
    x = -x
    inputs = [t.requires_grad_() for t in (x, weight, torch.zeros(128, device=DEVICE, dtype=dtype))]
    with cutfuse.specialization(mode):
        for y in (
            cutfuse.linear(*inputs, epilogue=epilogue, reduce="sum"),
            cutfuse.reduce(x, 1, "sum", prologue=epilogue),
            cutfuse.pointwise(epilogue, x),
        ):
            gradients = torch.autograd.grad(y.sqrt().sum(), inputs, allow_unused=True, materialize_grads=True)
            assert all(gradient.eq(0).all() for gradient in gradients)


def test_two_runs_agree() -> None:
    tensors = [randn(513, 336).bfloat16(), randn(1000, 336).bfloat16(), randn(1000).bfloat16(), randn(1000).bfloat16()]
    x, weight, bias, row = (t.requires_grad_() for t in tensors)
    for reduction in (None, *REDUCTIONS):
        runs = []
        for _ in range(2):
            y = cutfuse.linear(
                x, weight, bias, epilogue=lambda z, r: torch.tanh(z) * r, operands=(row,), reduce=reduction
            )
            runs.append(torch.autograd.grad(y.float().square().sum(), (x, weight, bias, row)))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
