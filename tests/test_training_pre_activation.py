"""Training steps whose forward pass is one kernel that stores the pre-activation too, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_epilogues import FakeCompiler
from compiled_epilogues import compiler as compiler
from emulated_device import core, direct_calls, emulated_device, paused
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from plan_cases import plan
from torch import Tensor

import cutfuse
from cutfuse.layer import training
from cutfuse.layer.planner import LinearArguments, plan_linear

SHAPE = 37, 24, 16


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes take the first kernel that can, as behind a product of a long K."""

    def plan_by_a_kernel(arguments: LinearArguments) -> Any:
        *kernels, _ = plan_linear(arguments, "tf32").alternatives
        name = next(kernel.name for kernel in kernels if not kernel.rejection)
        return plan_linear(arguments, "tf32", only=name)

    monkeypatch.setattr(training, "plan_call", plan_by_a_kernel)


def gated(z: Tensor, r: Tensor) -> Tensor:
    return F.gelu(z) * r + torch.sigmoid(z)


def tensors_of(dtype: torch.dtype, has_bias: bool = True) -> list[Tensor]:
    m, n, k = SHAPE
    made = [torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n), torch.randn(m, n)]
    return [tensor.to(dtype).requires_grad_() for tensor in (made if has_bias else made[:2] + made[3:])]


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_is_that_of_the_general_path(launches: EmulatedLaunches, dtype: torch.dtype, has_bias: bool) -> None:
    tensors = tensors_of(dtype, has_bias)
    grad = torch.randn(SHAPE[:2]).to(dtype)

    def step() -> list[Tensor]:
        x, weight, *bias, r = tensors
        y = cutfuse.linear(x, weight, *bias, epilogue=gated, operands=[r])
        return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

    with paused():
        expected = step()
    step()
    launches.launches.clear()
    before = direct_calls()
    found = step()
    assert direct_calls() == before + 1
    gemm, backward, *_ = launches.launches
    assert (gemm.function, backward.function) == ("gemm", "pointwise_backward")
    assert gemm.pre_activation == backward.x[0] != gemm.d
    for y, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(y.float(), wanted.float(), rtol=6e-2, atol=6e-2)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("is_fused", [False, True])
def test_each_operand_gets_its_own_gradient(is_fused: bool, request: pytest.FixtureRequest) -> None:
    if is_fused:
        request.getfixturevalue("one_kernel")
    tensors = [*tensors_of(torch.bfloat16), torch.randn(SHAPE[:2]).bfloat16().requires_grad_()]
    grad = torch.randn(SHAPE[:2]).bfloat16()

    def chain(z: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return F.gelu(z) * r + torch.tanh(s) * 3

    def step() -> tuple[Tensor, ...]:
        x, weight, bias, r, s = tensors
        return torch.autograd.grad(cutfuse.linear(x, weight, bias, epilogue=chain, operands=[r, s]), tensors, grad)

    step()
    before = direct_calls()
    found = step()
    assert direct_calls() == before + 1
    x, weight, bias, r, s = tensors
    expected = torch.autograd.grad(chain(F.linear(x, weight, bias), r, s), tensors, grad)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own.float(), wanted.float(), rtol=6e-2, atol=6e-2)


@pytest.mark.usefixtures("one_kernel")
def test_a_tensor_that_is_none_raises(launches: EmulatedLaunches) -> None:
    x, weight, bias, r = tensors_of(torch.bfloat16)
    handles = []
    original = core.training_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "training_plan", lambda *given: handles.append(original(*given)) or handles[-1])
        cutfuse.linear(x, weight, bias, epilogue=gated, operands=[r])
    y, z = core.training_linear(handles[0], x, weight, bias, r)
    assert y.shape == z.shape == SHAPE[:2]
    for given in ([None, weight, bias, r], [x, weight, bias], [x, weight, bias, r.t()], [x, weight, 1.0, r]):
        with pytest.raises(RuntimeError, match="a tensor is not as the plan has it"):
            core.training_linear(handles[0], *given)


# Microseconds on an H200 of the fastest kernel with the pre-activation, and of cuBLAS with a kernel behind it; of relu.
# The device had nothing to do before: behind other work, as it is predicted, each takes up to 4 us less.
MEASURED = [
    ((12608, 3072, 768), 120, 135),
    ((8192, 4096, 1024), 125, 139),
    ((2048, 2304, 768), 25, 23),
    ((4096, 8192, 8192), 743, 745),
    ((16384, 4096, 4096), 757, 797),
]


@pytest.mark.parametrize(("shape", "fused", "unfused"), MEASURED)
def test_what_is_stored_beside_the_result_takes_time(shape: tuple[int, int, int], fused: int, unfused: int) -> None:
    options: dict[str, Any] = {"specialized_cost": 0.023, "epilogue_cost": 1.0}
    plain = plan(*shape, **options)
    storing = plan(*shape, **options, stores_pre_activation=True)
    best, *_, cublas = storing.alternatives
    assert best.microseconds > plain.alternatives[0].microseconds
    assert best.microseconds == pytest.approx(fused, rel=0.15, abs=4.5)
    assert cublas.microseconds == pytest.approx(unfused, rel=0.15, abs=4.5)
    if abs(fused - unfused) > 0.01 * unfused:  # either is right where they take as long
        assert storing.is_fused == (fused < unfused)


def test_no_kernel_stores_it_beside_reduced_rows_or_in_part_of_a_vector() -> None:
    options = {"stores_pre_activation": True, "specialized_cost": 1.0}
    for shape, own, words in (
        ((1024, 8192, 512), {"reduction": "sum"}, "stores no matrix, and so no pre-activation"),
        ((1024, 8196, 512), {"output": "float32"}, "N is 8196 bfloat16 elements"),
    ):
        *kernels, _ = plan(*shape, **options, **own).alternatives
        assert kernels
        assert all(words in kernel.rejection for kernel in kernels)
        *kernels, _ = plan(*shape, **own).alternatives
        assert not all(kernel.rejection for kernel in kernels)


def test_a_kernel_behind_cublas_leaves_the_product() -> None:
    for stores in (False, True):
        found = plan(2048, 2304, 768, epilogue_cost=40.0, stores_pre_activation=stores)
        *_, launch = found.launches
        assert not found.is_fused
        assert launch.in_place != stores


@pytest.mark.usefixtures("one_kernel", "compiler", "launches")
@pytest.mark.parametrize(("first", "kind"), [(8, "source"), (4, "strided")])
def test_the_copy_engine_is_given_aligned_operands_alone(
    monkeypatch: pytest.MonkeyPatch, first: int, kind: str
) -> None:
    found: list[Any] = []
    find = training.find_epilogues

    def find_and_note(*given: Any) -> Any:
        found.extend(find(*given))
        return found

    monkeypatch.setattr(training, "find_epilogues", find_and_note)
    m, n, _ = SHAPE
    x, weight, *_ = tensors_of(torch.bfloat16)
    cutfuse.linear(x, weight, epilogue=gated, operands=[torch.randn(m, n + 16).bfloat16()[:, first : first + n]])
    assert [[own.name for own in epilogue.operand_kinds] for epilogue in found] == [[kind]]


@pytest.mark.usefixtures("one_kernel")
def test_a_captured_step_takes_the_path_that_waits_for_its_epilogues(compiler: FakeCompiler) -> None:
    """Others run directly while they are interpreted."""
    tensors = tensors_of(torch.bfloat16, has_bias=False)
    captures: list[bool] = []

    def step() -> list[int]:
        launches.launches.clear()
        y = cutfuse.linear(*tensors[:2], epilogue=gated, operands=tensors[2:])
        torch.autograd.grad(y, tensors, torch.ones_like(y))
        return [launch.specialized for launch in launches.launches if hasattr(launch, "specialized")][:2]

    with emulated_device(is_capturing=lambda: bool(captures)) as launches:
        compiler.may_go_on.clear()
        step()
        before = direct_calls()
        assert step() == [0, 0]
        assert direct_calls() == before + 1
        captures.append(True)
        step()
        assert direct_calls() == before + 1
        compiler.may_go_on.set()
        cutfuse.wait(30)
        assert sorted(step()) == [0x1001, 0x1002]
        assert direct_calls() == before + 2
