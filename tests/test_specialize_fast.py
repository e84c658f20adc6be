"""The short forms of functions of 16-bit tensors: how accurate they are in compiled kernels, without a GPU."""

from __future__ import annotations

import pytest
import torch
from specialized_backward import SpecializedBackward, backward_text
from specialized_kernels import FRAGMENT, SpecializedEpilogue, make_kernel, specialize

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)


def op_call(name: str) -> str:
    parameters = " ".join(repr(float(default)) for _, default in op_table().op(name).parameters)
    return f"{name} z {parameters}".rstrip()


def _exact(name: str, z: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return z * torch.special.ndtr(z)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return torch.where(z > 20, z, function(z)) if name == "softplus" else function(z)


# Relative to the value, or absolute: a few parts of what 16 bits round away, 2^-12 of it.
@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [
        ("gelu", 1.6e-5, 2.2e-8),
        ("tanh", 3e-6, 0),
        ("mish", 4e-6, 0),
        ("expm1", 3e-6, 0),
        ("elu", 3e-6, 0),
        ("selu", 3e-6, 0),
        ("celu", 3e-6, 0),
        ("log", 4e-6, 0),
        ("log1p", 4e-6, 0),
        ("logsigmoid", 6e-6, 0),
        ("softplus", 6e-6, 0),
        ("softsign", 1e-6, 0),
        ("erf", 8e-6, 0),
    ],
)
def test_fast_functions_are_exact_to_16_bits(name: str, relative: float, absolute: float) -> None:
    z = torch.cat([torch.linspace(-12, 12, 512 * FRAGMENT), 10.0 ** -torch.linspace(0, 30, 4 * FRAGMENT)])
    z = z[z > 0] if name == "log" else z[z > -0.999] if name == "log1p" else z
    z = z[: len(z) // FRAGMENT * FRAGMENT]
    exact = _exact(name, z.double())
    program = Program.parse(f"operands=0; {op_call(name)}")
    function = SpecializedEpilogue(specialize(make_kernel("Fast"), program))
    got = function.run(program, z.view(-1, FRAGMENT), []).reshape(-1)
    wrong = (got - exact).abs() > relative * exact.abs() + absolute
    assert not wrong.any(), (z[wrong][:4], got[wrong][:4], exact[wrong][:4])


@pytest.mark.parametrize("op", ["sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "mish", "elu", "erf", "softplus"])
def test_derivatives_of_fast_functions_are_exact_to_16_bits(op: str) -> None:
    """Those of 16-bit inputs: within 1e-5 of what PyTorch computes in fp64, before they are rounded."""
    x = torch.linspace(-12, 12, 4096).bfloat16().view(16, 256)
    exact = x.double().requires_grad_()
    functions = {"gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh")}
    function = functions.get(op) or getattr(torch.special if op == "erf" else torch.nn.functional, op)
    (expected,) = torch.autograd.grad(function(exact).sum(), exact)
    program = Program.parse(f"operands=0; {op_call(op)}")
    grad = torch.ones_like(x)
    (got,) = SpecializedBackward(backward_text(program, x.dtype)).run(program, grad, x, dtypes=[torch.float32]).of
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-6)
