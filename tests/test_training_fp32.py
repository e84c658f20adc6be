"""Small fp32 layers, and their training: whose products are ours, in which precision, on which path; on a CPU."""

from __future__ import annotations

import pytest
import torch
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from test_training_products import Layer, assert_near, direct_step, fused, gelu, kernels_of, made, plain, step

import cutfuse
from cutfuse.direct import training
from cutfuse.gradients import autograd


def test_a_small_layer_is_one_kernel(launches: EmulatedLaunches) -> None:
    x, weight, bias = torch.randn(16, 64), torch.randn(64, 64), torch.randn(64)
    cutfuse.linear(x, weight, bias, epilogue=gelu)  # the first call is not direct, and on a CPU launches nothing
    y = cutfuse.linear(x, weight, bias, epilogue=gelu)
    (launch,) = launches.launches
    assert (launch.function, launch.kernel) == ("gemm", "sm90_fp32_8x8x1024")
    assert (launch.a, launch.b, launch.d) == (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    torch.testing.assert_close(y, gelu(torch.nn.functional.linear(x, weight, bias)))


@pytest.mark.parametrize("mode", ["ieee", "tf32", "split3"])
def test_the_mode_of_the_forward_pass_is_the_backwards(launches: EmulatedLaunches, mode: str) -> None:
    """In fp32 kernels of ours multiply in "guarded" alone."""
    tensors, grad = made(torch.float32, 37), torch.randn(37, 24)
    with cutfuse.precision(mode):
        y = fused(gelu)(*tensors)
    launches.launches.clear()
    torch.autograd.grad(y, tensors, grad)
    assert not any("fp32" in str(launch.kernel) for launch in launches.launches if launch.function == "gemm")


@pytest.mark.parametrize("epilogue", [gelu, torch.add])
def test_the_backward_pass_multiplies_as_the_forward_pass_did(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, epilogue: Layer
) -> None:
    """Where the forward pass was in a context, and where PyTorch's setting has changed since."""
    tensors, grad = made(torch.float32, 37, residual=epilogue is torch.add), torch.randn(37, 24)
    modes: list[str] = []
    product = autograd.schema.product
    monkeypatch.setattr(
        autograd.schema, "product", lambda a, b, mode, issuer: modes.append(mode) or product(a, b, mode, issuer)
    )
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with cutfuse.precision("guarded"):
            y = fused(epilogue)(*tensors)
        torch.autograd.grad(y, tensors, grad)
        torch.set_float32_matmul_precision("highest")
        for _ in range(2):
            y = fused(epilogue)(*tensors)
        torch.set_float32_matmul_precision("high")
        torch.autograd.grad(y, tensors, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    assert modes == ["guarded"] * 4


def test_a_layer_with_nothing_after_it_is_pytorchs_in_every_call(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (autograd, training):
        monkeypatch.setattr(module, "is_forced", lambda x, mode="": True)
    tensors, grad = made(torch.float32, 37), torch.randn(37, 24)
    for _ in range(3):
        y = cutfuse.linear(*tensors)
        assert type(y.grad_fn).__name__ == "AddmmBackward0"
        torch.autograd.grad(y, tensors, grad)
    assert not launches.launches


def test_fp32_of_any_address_is_multiplied_by_kernels(launches: EmulatedLaunches) -> None:
    """They read single elements where x or the weight does not begin at a multiple of 16 bytes."""
    x, weight, bias = made(torch.float32, 37)
    moved = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape) for t in (x, weight)]
    tensors, grad = [*(t.requires_grad_() for t in moved), bias], torch.randn(37, 24)
    found = direct_step(launches, lambda: step(fused(gelu), tensors, grad))
    assert kernels_of(launches)[1:] == ["pointwise_backward", "reduce", "_nn_", "_tn_"]
    assert_near(found, step(plain(gelu), tensors, grad))


def test_fp32_has_pytorchs_products(launches: EmulatedLaunches) -> None:
    tensors, grad = made(torch.float32, 37), torch.randn(37, 24)
    with cutfuse.precision("ieee"):
        assert_near(step(fused(gelu), tensors, grad), step(plain(gelu), tensors, grad))
    assert "gemm" not in [launch.function for launch in launches.launches]
