"""Gradients of programs as programs: PyTorch's own values, and what of the forward pass they read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_epilogue_functions import FUNCTIONS, count_arguments
from test_epilogue_language import LANGUAGE
from torch import Tensor

from cutfuse.epilogue import Epilogue
from cutfuse.epilogue.derivative import INPUT, NOTHING, OUTPUT, Derivative, derive

DERIVATIVE: Any = sys.modules["cutfuse.epilogue.derivative"]
UNARY = {name: function for name, (function, operands) in LANGUAGE.items() if operands == 0}
UNARY |= {name: function for name, function in FUNCTIONS.items() if count_arguments(function) == 1}
WITHOUT_GRADIENT = {"mask_to_float", "angle", "power_0", "round_decimals", "logit_margin"}
SPECIAL = [0.0, 0.5, 1.0, 3.0, 20.0, 200.0, torch.inf]
SPECIAL = [*SPECIAL, *(-value for value in SPECIAL), 6.0, torch.nan]


def values() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    near, far = torch.randn(200, generator=generator), 3.0 * torch.randn(800, generator=generator)
    return torch.cat([near / 100, far, torch.tensor([*SPECIAL, torch.inf, -torch.inf, torch.nan])])


def derived(epilogue: Epilogue) -> Derivative:
    found = derive(epilogue.text)
    assert found is not None
    return found


def gradients(epilogue: Epilogue, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The derivative's, of what it reads, and PyTorch's of the program."""
    derivative = derived(epilogue)
    z = z.detach().requires_grad_()
    y = epilogue(z)
    read = {NOTHING: (), OUTPUT: (y.detach(),), INPUT: (z.detach(),)}[derivative.reads]
    return derivative.epilogue(grad, *read), torch.autograd.grad(y, z, grad)[0]


@pytest.mark.parametrize("name", UNARY)
def test_the_whole_language_is_differentiated_as_by_pytorch(name: str) -> None:
    epilogue = Epilogue(UNARY[name])
    if name in WITHOUT_GRADIENT:
        assert derive(epilogue.text) is None
        return
    z = values()
    if name == "logit":  # at -0 PyTorch's is infinite with either sign, by where in the tensor the element lies
        z[z == 0] = 0.0
    grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    own, right = gradients(epilogue, z, grad)
    torch.testing.assert_close(own, right, rtol=1e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda z: z, NOTHING),
        (lambda z: 3.0 - z / 2, NOTHING),
        (F.relu, OUTPUT),
        (lambda z: F.relu(z).square(), OUTPUT),
        (lambda z: F.relu(z) ** 2 / 4, OUTPUT),
        (lambda z: F.relu(z) * F.relu(z), OUTPUT),
        (torch.sigmoid, OUTPUT),
        (lambda z: 30.0 * torch.tanh(z / 30.0), OUTPUT),
        (lambda z: -torch.exp(z), OUTPUT),
        (F.softplus, OUTPUT),
        (lambda z: F.leaky_relu(z, 0.1), OUTPUT),
        (F.gelu, INPUT),
        (F.silu, INPUT),
        (F.relu6, INPUT),  # at 6, and beyond it, the value is 6
        (torch.square, INPUT),  # of which -z and z are one
        (lambda z: F.relu(z) + 1000.0, INPUT),  # the sum's rounding is larger than relu
        (lambda z: F.relu(z) * 1e-6, INPUT),  # nothing is left of it in fp16
        (lambda z: F.leaky_relu(z, -0.1), INPUT),
        (lambda z: F.softplus(z, threshold=2.0), INPUT),  # it falls at 2, so that two values of z have one
    ],
)
def test_what_a_gradient_reads(function: Callable[..., Tensor], reads: str) -> None:
    epilogue = Epilogue(function)
    assert derived(epilogue).reads == reads
    z = values()
    torch.testing.assert_close(*gradients(epilogue, z, torch.ones_like(z)), rtol=1e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [F.relu, lambda z: F.relu(z).square(), torch.sigmoid, torch.tanh, F.softplus, lambda z: F.leaky_relu(z, 0.1)],
)
def test_an_output_of_16_bits_is_enough(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """The error beside fp64 is no larger than where the values are exact, by more than the type's rounding."""
    derivative = derived(Epilogue(function))
    assert derivative.reads == OUTPUT
    z = values()[:1000].to(dtype).double().requires_grad_()
    y = function(z)
    (exact,) = torch.autograd.grad(y.sum(), z)
    own = derivative.epilogue(torch.ones(1000), y.detach().to(dtype)).double()
    assert ((own - exact).abs() <= torch.finfo(dtype).eps * exact.abs().clamp_min(1.0)).all()


def test_modes_around_it_change_nothing() -> None:
    texts = [Epilogue(lambda z, c=c: F.gelu(z) * c).text for c in (1.25, 1.5, 1.75, 2.0)]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = derive(texts[0])
    with torch.inference_mode():
        second = derive(texts[1])
    found: list[Any] = [first, second]
    threads = [threading.Thread(target=lambda text=text: found.append(derive(text))) for text in texts[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lengths = {len(item.epilogue.program.instructions) for item in found}
    assert len(lengths) == 1


def test_threads_leave_no_dispatch_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's flag is one for all threads, and torch.compile compiles nothing while it is set."""
    inside, waits = threading.Event(), iter((0.1, 0.3))
    evaluate = DERIVATIVE.evaluate

    def slowly(*given: Any) -> Any:
        inside.set()
        time.sleep(next(waits))
        return evaluate(*given)

    monkeypatch.setattr(DERIVATIVE, "evaluate", slowly)
    programs = [Epilogue(function).text for function in (torch.sin, torch.cos)]
    first = threading.Thread(target=derive.__wrapped__, args=programs[:1])
    first.start()
    assert inside.wait(10)
    derive.__wrapped__(programs[1])
    first.join()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_a_gradient_longer_than_a_program_may_be_is_none() -> None:
    def long(z: Tensor) -> Tensor:
        for k in range(7):
            z = torch.sin(z * (k + 2)) * torch.cos(z)
        return z

    assert derive(Epilogue(long).text) is None
