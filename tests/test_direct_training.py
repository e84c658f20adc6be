"""Training steps that run directly have PyTorch's gradients, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from emulated_device import (
    EmulatedLaunches,
    Entered,
    RecordedLaunches,
    direct_calls,
    directly,
    emulated_device,
    needs_exchange_api,
)
from emulated_device import launches_of_each_reader as launches_of_each_reader
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
    """Operators have their CUDA implementations, and fp32 products are those of PyTorch's "highest"."""
    for name in ("linear", "linear_with_pre_activation", "product", "pointwise", "reduce", "pointwise_backward"):
        monkeypatch.setattr(schema, name, getattr(cuda, name))
    for module in (autograd, training):
        monkeypatch.setattr(module, "is_forced", lambda x, mode="": x.dtype == torch.float32)


@pytest.fixture
def recorded(like_a_gpu: None) -> Iterator[RecordedLaunches]:
    """What is launched; nothing is computed."""
    found = RecordedLaunches()
    with emulated_device(launches=found):
        yield found


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


def check_gradients(
    draw: st.DrawFn,
    launches: EmulatedLaunches,
    dtype: torch.dtype,
    leadings: list[tuple[int, ...]],
    sizes: list[tuple[int, int]],
    operand_dtypes: list[torch.dtype],
    tolerance: float,
    most_operands: int,
) -> None:
    """Of a layer whose second call runs directly: its result and its gradients are PyTorch's in fp64."""
    torch.manual_seed(1)  # sums that cancel to nothing have no relative error
    leading, (n, k) = draw(st.sampled_from(leadings)), draw(st.sampled_from(sizes))
    kinds = draw(st.lists(st.sampled_from([FULL, ROW, ROW_MATRIX, COLUMN, SCALAR]), max_size=most_operands))
    epilogue = draw(st.sampled_from(EPILOGUES[len(kinds)]))
    shapes = [(*leading, k), (n, k), (n,), *(operand_shape(kind, leading, n) for kind in kinds)]
    dtypes = [dtype] * 3 + [draw(st.sampled_from(operand_dtypes)) for _ in kinds]
    tensors = [torch.randn(shape).to(own) for shape, own in zip(shapes, dtypes, strict=True)]
    tensors[1] *= k**-0.5
    if draw(st.booleans()):
        tensors[1] = tensors[1].t().contiguous().t()
    x, weight, bias, *operands = tensors
    trained = [place for place, tensor in enumerate(tensors) if tensor is weight or draw(st.booleans())]
    for place in trained:
        tensors[place].requires_grad_()
    grad = torch.randn(*leading, n).to(dtype)

    def layer() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, out_dtype=dtype)

    layer()
    launches.launches.clear()
    y = directly(layer)
    found = torch.autograd.grad(y, [tensors[place] for place in trained], grad, create_graph=draw(st.booleans()))
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = epilogue(F.linear(*wide[:3]), *wide[3:])
    expected = torch.autograd.grad(exact, [wide[place] for place in trained], grad.double())
    least = 0.0 if dtype is torch.float32 else 1.0
    for own, like, right in zip(
        (y, *found), (grad, *(tensors[place] for place in trained)), (exact, *expected), strict=True
    ):
        assert (own.shape, own.dtype) == (like.shape, like.dtype)
        atol = tolerance * (least + right.abs().max().item())
        torch.testing.assert_close(own.double(), right, rtol=tolerance, atol=atol)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broadcast_operands_have_pytorchs_gradients(launches: EmulatedLaunches, data: st.DataObject) -> None:
    """z is kept in bf16, and so is what is multiplied again."""
    leadings: list[tuple[int, ...]] = [(1,), (5,), (130,), (2, 3)]
    sizes, operand_dtypes = [(8, 16), (24, 8), (1, 8), (72, 40)], [torch.float32, torch.bfloat16]
    check_gradients(data.draw, launches, torch.bfloat16, leadings, sizes, operand_dtypes, 0.05, 2)


@pytest.mark.parametrize("out_of_range", [[], [True], [False, True]])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_products_of_parts_have_pytorchs_gradients(
    like_a_gpu: None, out_of_range: list[bool], data: st.DataObject
) -> None:
    """Where K is sliced or not, whichever product the guards choose."""
    leadings: list[tuple[int, ...]] = [(300,), (1024,), (4, 192)]
    sizes = [(1000, 2048), (2048, 1032), (1540, 2020)]
    with emulated_device(launches=EmulatedLaunches(out_of_range)) as launches:
        check_gradients(data.draw, launches, torch.float32, leadings, sizes, [torch.float32], 1e-4, 1)
    assert "split" in launches.names


def highway(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return torch.tanh(s * 2.0 + (1 - s) * z)


@needs_exchange_api
@pytest.mark.parametrize(
    ("epilogue", "dtype", "limits"),
    [
        (F.gelu, torch.float32, {"call": (87, 21, 62), "step": (186, 23, 135)}),
        (highway, torch.float32, {"call": (87, 21, 61), "step": (148, 22, 105)}),
        (highway, torch.bfloat16, {"call": (85, 21, 59), "step": (139, 22, 94)}),
    ],
)
def test_what_first_calls_enter(
    epilogue: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    limits: dict[str, tuple[int, int, int]],
    recorded: RecordedLaunches,
) -> None:
    """Functions, files and changes of file, of a chain that was called before with other sizes."""
    weight, bias = torch.zeros((64, 64), dtype=dtype), torch.zeros(64, dtype=dtype)

    def call(rows: int) -> Tensor:
        return cutfuse.linear(torch.zeros((rows, 64), dtype=dtype), weight, bias, epilogue=epilogue)

    def step(rows: int) -> None:
        y = call(rows)
        torch.autograd.grad(y, [weight, bias], torch.zeros_like(y))

    for name, function in (("call", call), ("step", step)):
        weight.requires_grad_(name == "step")
        bias.requires_grad_(name == "step")
        function(8)
        with Entered() as found:
            function(16)
        figures = len(found.names), len(set(found.files)), found.changes_of_file
        assert all(own <= limit for own, limit in zip(figures, limits[name], strict=True)), (figures, found.names)


@needs_exchange_api
def test_what_an_operation_adds_to_a_first_call(recorded: RecordedLaunches) -> None:
    """To that of a chain that nobody has called: its trace, and its part of the program, in 56 functions."""
    x, weight = torch.zeros((8, 64)), torch.zeros((64, 64))
    scope = {"torch": torch, "F": F}
    counts = []
    for operations in (4, 12):
        body = "".join(
            "v = " + ("F.silu(v)", "v * 1.5", "torch.tanh(v)", "v + z")[k % 4] + "; " for k in range(operations)
        )
        exec(f"def chain(z):\n    v = z; {body}return v\n", scope)
        with Entered() as found:
            cutfuse.linear(x, weight, epilogue=scope["chain"])  # type: ignore[arg-type]
        counts.append(len(found.names))
    assert counts[1] - counts[0] <= 8 * 56, counts
