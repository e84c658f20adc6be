"""`cutfuse.pointwise` on a GPU: every op and type, against fp64. Layouts and reductions are test_kernels_gpu.py's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from generators import FLOATS, assert_no_worse, to_double
from gpu_tensors import DEVICE, randn
from torch import Tensor

import cutfuse
from cutfuse.epilogue.table import CONDITION, Op, op_table

pytestmark = pytest.mark.gpu

SPECIAL = (
    float("nan"),
    float("inf"),
    float("-inf"),
    0.0,
    -0.0,
    1e-40,
    1e-6,
    -1e-6,
    1.0,
    -1.0,
    20.5,
    -20.5,
    88.8,
    -88.8,
    6e4,
)


def pointwise_op(op: Op, *values: Tensor) -> Tensor:
    """In a kernel. The direct path recognises an Epilogue by its expression, and no function that reads the op."""
    fn = cutfuse.Epilogue(lambda *tensors: call_op(op, *tensors), op.arity - 1)
    return cutfuse.pointwise(fn, *values)


def call_op(op: Op, *values: Tensor) -> Tensor:
    """The op on tensors, with its parameters at their defaults, as floats."""
    tensors = [value > 0 if name == CONDITION else value for name, value in zip(op.tensors, values, strict=True)]
    return op.compose(tensors, [default for _, default in op.parameters]) * 1.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op(op: Op, dtype: torch.dtype) -> None:
    values = [randn(33 + k, 257, dtype=dtype)[:33] * 2 for k in range(op.arity)]
    actual = pointwise_op(op, *values)
    eager, exact = call_op(op, *values).to(dtype), call_op(op, *to_double(*values)).double()
    assert_no_worse(actual, eager, exact, slack=1.0 if dtype != torch.float32 else 3.0)


@pytest.mark.parametrize("op", op_table().ops, ids=lambda op: op.name)
def test_every_op_at_special_values(op: Op) -> None:
    tensors = [t.to(DEVICE) for t in torch.tensor(list(itertools.product(SPECIAL, repeat=op.arity))).unbind(-1)]
    actual, expected = pointwise_op(op, *tensors), call_op(op, *tensors)
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-30)


# Functions that have short forms where 16 bits are stored.
SHORT = (
    *("exp", "expm1", "elu", "selu", "celu", "sigmoid", "silu", "mish", "gelu", "gelu_tanh", "tanh", "erf"),
    *("log", "log1p", "logsigmoid", "softplus", "softsign"),
)


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("name", SHORT)
def test_short_forms_of_functions_are_exact_to_16_bits(name: str, mode: str) -> None:
    """Within 2e-5 of the value: 2% of gelu's results are not the rounded exact ones, and fewer of others."""
    x = torch.linspace(-12, 12, 1 << 14, device=DEVICE).half()
    x = x[x > {"log": 0, "log1p": -0.99}.get(name, -13)]
    with cutfuse.specialization(mode):
        actual = pointwise_op(op_table().op(name), x)
    expected = call_op(op_table().op(name), x.double()).half()
    # Integers that neighbouring numbers are neighbours in.
    places = [
        torch.where(bits < 0, -(bits & 0x7FFF), bits)
        for bits in (t.view(torch.int16).int() for t in (actual, expected))
    ]
    apart = (places[0] - places[1]).abs()
    assert apart.max() <= 1
    assert (apart > 0).double().mean() < 0.05


# Of one argument: rows of the op table, and compositions.
FUNCTIONS = {
    **{op.name: op.function for op in op_table().ops if op.arity == 1 and not op.parameters},
    **{
        function.__name__: function
        for function in (F.elu, F.selu, F.celu, F.leaky_relu, F.hardtanh, F.softplus, F.softshrink, F.hardshrink)
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_at_special_points_are_pytorchs(name: str, dtype: torch.dtype) -> None:
    """NaN, infinities and zeros, with their signs, are those of PyTorch's kernels of a GPU."""
    points = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 0.25, -0.25, 1.0, -1.0], dtype=dtype)
    given, own = (points.to(DEVICE).requires_grad_() for _ in range(2))
    expected, found = FUNCTIONS[name](given), cutfuse.pointwise(FUNCTIONS[name], own)
    torch.testing.assert_close(found, expected, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(found.signbit()[zeros], expected.signbit()[zeros])
    if not expected.requires_grad:
        return
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y, x in ((found, own), (expected, given))]
    torch.testing.assert_close(*slopes, equal_nan=True)
