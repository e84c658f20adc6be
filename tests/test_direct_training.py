"""Training steps that run directly: the same launches as the general path's, and PyTorch's gradients, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_device import direct_calls, emulated_device, paused
from emulated_device import launches_of_each_reader as launches_of_each_reader
from emulated_launches import EmulatedLaunches, RecordedLaunches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import cutfuse
from cutfuse.layer import autograd, cuda, schema, training

EPILOGUES: dict[int, list[Callable[..., Tensor]]] = {
    0: [lambda z: z, lambda z: F.gelu(z) * 2, lambda z: torch.sigmoid(z) * z + z],
    1: [lambda z, r: z + r, lambda z, r: torch.tanh(z) * r, lambda z, r: F.silu(z * r) + r],
    2: [lambda z, r, s: torch.relu(z) * r + s, lambda z, r, s: (z + r) * torch.sigmoid(s)],
}
FULL, ROW, ROW_MATRIX, COLUMN, SCALAR = "full", "row", "row matrix", "column", "scalar"


def operand_shape(kind: str, leading: tuple[int, ...], n: int) -> tuple[int, ...]:
    return {FULL: (*leading, n), ROW: (n,), ROW_MATRIX: (1, n), COLUMN: (*leading, 1), SCALAR: ()}[kind]


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general path has the operators' CUDA implementations, and fp32 products are those of PyTorch's "highest"."""
    for name in ("linear", "linear_with_pre_activation", "product", "pointwise", "reduce", "pointwise_backward"):
        monkeypatch.setattr(schema, name, getattr(cuda, name))
    for module in (autograd, training):
        monkeypatch.setattr(module, "is_forced", lambda x, mode="": x.dtype == torch.float32)


@pytest.fixture
def recorded(like_a_gpu: None) -> Iterator[RecordedLaunches]:
    """What both paths launch; nothing is computed."""
    found = RecordedLaunches()
    with emulated_device(launches=found):
        yield found


def described(launch: SimpleNamespace) -> dict[str, Any]:
    """A launch without the addresses of its tensors, of which it says whether there are any.

    Of one that computes gradients element by element, what it stores: the paths merge other dimensions of its layout.
    """

    def of(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [of(item) for item in value]
        return "an address" if type(value) is int and value >= 1 << 20 else value

    fields = {name: of(value) for name, value in vars(launch).items()}
    if launch.function == "pointwise_backward":
        fields = {name: fields[name] for name in ("function", "outputs", "column_partials")}
    if launch.function == "reduce" and launch.extents[1] == 1:  # of one block's sums; which dimension they are along
        del fields["extents"], fields["x"]
    program = fields.pop("program", None)
    fields["program"] = None if program is None else (len(program), program.operand_count)
    fields["problem"] = repr(fields.get("problem"))
    return fields


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_it_launches_what_the_general_path_does(recorded: RecordedLaunches, data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    leading = draw(st.sampled_from([(2,), (37,), (512,), (2, 3), (4, 128)]))
    n, k = (draw(st.sampled_from([8, 64, 264, 1024])) for _ in range(2))
    x, weight = torch.zeros(*leading, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)
    if draw(st.booleans()):
        weight = torch.zeros(k, n, dtype=dtype).t()
    bias = torch.zeros(n, dtype=dtype) if draw(st.booleans()) else None
    kinds = draw(st.lists(st.sampled_from([FULL, ROW, ROW_MATRIX, COLUMN, SCALAR]), max_size=2))
    operands = [torch.zeros(operand_shape(kind, leading, n), dtype=dtype) for kind in kinds]
    epilogue = draw(st.sampled_from(EPILOGUES[len(kinds)]))
    tensors = [t for t in (x, weight, bias, *operands) if t is not None]
    trained = [t.requires_grad_() for t in tensors if t is weight or draw(st.booleans())]
    grad = torch.zeros(*leading, n, dtype=dtype)

    def step() -> tuple[list[str], list[Any]]:  # launches in any order
        recorded.launches.clear()
        y = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        found = torch.autograd.grad(y, trained, grad, allow_unused=True)
        results = [None if t is None else (t.shape, t.stride(), t.dtype) for t in (y, *found)]
        return sorted(str(described(launch)) for launch in recorded.launches), results

    with paused():
        expected = step()
    step()
    before = direct_calls()
    assert step() == expected
    assert direct_calls() == before + 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broadcast_operands_have_pytorchs_gradients(launches: EmulatedLaunches, data: st.DataObject) -> None:
    draw = data.draw
    leading = draw(st.sampled_from([(1,), (5,), (130,), (2, 3)]))
    n, k = draw(st.sampled_from([(8, 16), (24, 8), (1, 8), (72, 40)]))
    kinds = draw(st.lists(st.sampled_from([FULL, ROW, ROW_MATRIX, COLUMN, SCALAR]), min_size=1, max_size=2))
    epilogue = draw(st.sampled_from(EPILOGUES[len(kinds)]))
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in kinds]
    x, weight, bias = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((*leading, k), (n, k), (n,)))
    operands = [
        torch.randn(operand_shape(kind, leading, n)).to(dtype).requires_grad_()
        for kind, dtype in zip(kinds, dtypes, strict=True)
    ]
    tensors, grad = [x, weight, bias, *operands], torch.randn(*leading, n).bfloat16()

    def layer() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, out_dtype=torch.bfloat16)

    layer()
    before = direct_calls()
    y = layer()
    assert direct_calls() == before + 1
    found = torch.autograd.grad(y, tensors, grad)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = epilogue(F.linear(*wide[:3]), *wide[3:])
    for own, tensor, right in zip(found, tensors, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        # z is kept in bf16, and so is what is multiplied again.
        torch.testing.assert_close(own.double(), right, rtol=0.05, atol=0.05 * (1 + right.abs().max().item()))


def test_products_of_parts_run_directly(recorded: RecordedLaunches) -> None:
    """Of fp32 matrices at PyTorch's "highest", also behind nothing: forwards, and both products backwards."""
    x, weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((1024, 2048), (4096, 2048), (4096,)))
    for epilogue, elements in ((None, ["reduce"]), (lambda z: torch.sigmoid(z) * z, ["pointwise_backward", "reduce"])):
        names = []
        for _ in range(2):
            recorded.launches.clear()
            before = direct_calls()
            y = cutfuse.linear(x, weight, bias, epilogue=epilogue)
            forward = recorded.names
            torch.autograd.grad(y, [x, weight, bias], torch.zeros_like(y))
            names.append((forward, recorded.names[len(forward) :]))
        assert direct_calls() == before + 1
        assert names[0] == names[1]
        forward, backward = ([name for name in part if "gemm" in name or name in elements] for part in names[1])
        # Each guarded: a product of three parts, and one of six that runs instead where that would lose accuracy.
        assert forward == ["gemm_planes", "gemm_convert"]
        assert [name.partition("_")[0] for name in backward] == [name.partition("_")[0] for name in elements] + [
            "gemm"
        ] * 4


@pytest.mark.parametrize("is_tripped", [False, True])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_products_of_parts_have_pytorchs_gradients(like_a_gpu: None, is_tripped: bool, data: st.DataObject) -> None:
    """Where K is sliced or not, whichever product the guards choose."""
    draw = data.draw
    leading = draw(st.sampled_from([(300,), (1024,), (4, 192)]))
    n, k = draw(st.sampled_from([(1000, 2048), (2048, 1032), (1540, 2020)]))
    kinds = draw(st.lists(st.sampled_from([FULL, ROW, COLUMN, SCALAR]), max_size=1))
    epilogue = draw(st.sampled_from(EPILOGUES[len(kinds)]))
    x, weight = torch.randn(*leading, k).requires_grad_(), (torch.randn(n, k) / 32).requires_grad_()
    bias = torch.randn(n).requires_grad_()
    operands = [torch.randn(operand_shape(kind, leading, n)).requires_grad_() for kind in kinds]
    tensors, grad = [x, weight, bias, *operands], torch.randn(*leading, n)
    with emulated_device(launches=EmulatedLaunches(is_tripped)) as launches:
        cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        before = direct_calls()
        launches.launches.clear()
        y = cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands)
        assert direct_calls() == before + 1
        found = torch.autograd.grad(y, tensors, grad)
    assert "split" in launches.names
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = epilogue(F.linear(*wide[:3]), *wide[3:])
    for own, right in zip((y, *found), (exact, *torch.autograd.grad(exact, wide, grad.double())), strict=True):
        assert own.shape == right.shape
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("presented", ["rows with gaps", "a strided bias", "another precision"])
def test_what_is_presented_otherwise_runs_directly(like_a_gpu: None, presented: str) -> None:
    """Rows that are multiplied as a matrix, a bias that is copied, and products in another precision than PyTorch's."""
    shapes = {"rows with gaps": (2, 3, 24), "a strided bias": (16, 64), "another precision": (5, 16)}
    x, weight = torch.randn(shapes[presented]), torch.randn(64, 64 if presented == "a strided bias" else 16)
    x, bias = x[..., : weight.shape[1]], torch.randn(128)[::2]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if presented == "another precision" else "highest")
    tensors = [t.requires_grad_() for t in (x.detach(), weight, bias.detach())]
    grad = torch.randn(*x.shape[:-1], 64)
    try:
        with emulated_device(), cutfuse.precision("split3" if presented == "a strided bias" else "ieee"):
            for _ in range(2):
                count = direct_calls()
                y = cutfuse.linear(*tensors, epilogue=lambda z: torch.sigmoid(z) * z)
                found = torch.autograd.grad(y, tensors, grad)
            assert direct_calls() == count + 1
            assert type(y.grad_fn).__name__ == "DirectLinearBackward"
    finally:
        torch.set_float32_matmul_precision(before)
    expected = torch.autograd.grad(F.silu(F.linear(*tensors)), tensors, grad)
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)
