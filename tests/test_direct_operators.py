"""The direct path of the operators that compiled code calls: results, keys and epilogues as of the general path."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiled_epilogues import FakeCompiler, compiled_by
from emulated_device import READERS, EmulatedLaunches, core, direct_calls, directly, emulated_device, paused
from emulated_device import launches_of_each_reader as launches_of_each_reader
from torch import Tensor

import cutfuse
from cutfuse.layer import calls, cpu, cuda, fake

GELU = "operands=0; gelu z"
IDENTITY = "operands=0"
GATED = cutfuse.Epilogue(lambda z, r: torch.sigmoid(z) * r + z, 1).text
BF16, FP32 = torch.bfloat16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def turned(*shape: int) -> Tensor:
    """Columns that are contiguous."""
    return drawn(*shape[::-1]).t()


def pointwise(x: Tensor, *operands: Tensor, out: torch.dtype = BF16, program: str = "") -> Any:
    return cuda.pointwise(x, list(operands), program or (GATED if operands else GELU), out)


def reduce(x: Tensor, dims: Any, *operands: Tensor, reduction: str = "sum") -> Any:
    return cuda.reduce(x, list(operands), GATED if operands else IDENTITY, reduction, dims, FP32)


def backward(x: Tensor, *operands: Tensor, wanted: Any = (0,), sums: bool = False, grad: Tensor | None = None) -> Any:
    grad = drawn(*x.shape) if grad is None else grad
    program = GATED if operands else GELU
    return cuda.pointwise_backward(grad, x, list(operands), program, "none", None, list(wanted), sums)


def linear(m: int, n: int, k: int, dtype: torch.dtype = BF16, reduction: str = "none", mode: str | None = None) -> Any:
    given = drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype), drawn(n, dtype=dtype), [], GELU
    with cutfuse.precision(mode):
        return cuda.linear(*given, reduction, dtype if reduction == "none" else FP32)


Call = Callable[[], Any]

# Layers, and what is launched of each.
LAYERS: dict[str, tuple[Call, list[str]]] = {
    "a kernel": (lambda: linear(512, 2048, 64), ["gemm"]),
    "reduced": (lambda: linear(4096, 4104, 8, reduction="amax"), ["gemm", "finalize_partials"]),
    "and one more kernel": (lambda: linear(16, 63, 63), ["pointwise"]),
    "and a reduction": (lambda: linear(4, 65_537, 2, reduction="amax"), ["reduce"]),
    "and a reduction that are faster": (lambda: linear(256, 256, 8192, reduction="amax"), ["reduce"]),
    "over planes": (lambda: linear(128, 256, 512, FP32, mode="split3"), ["split", "gemm_convert"]),
    "in slices of K": (lambda: linear(16, 64, 8192, FP32, mode="split6"), ["split", "split", "gemm_planes"]),
    "guarded": (lambda: linear(128, 4096, 4096, FP32, mode="guarded"), ["split", "gemm_convert"] * 2),
    "guarded and reduced": (
        lambda: linear(128, 4096, 4096, FP32, "amax", "guarded"),
        [*["split", "gemm_convert"] * 2, "finalize_partials"],
    ),
}


def of(call: Call, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    result = call()
    return result if isinstance(result, list) else [result]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for y, exact in zip(found, expected, strict=True):
        assert (y.shape, y.stride(), y.dtype) == (exact.shape, exact.stride(), exact.dtype)
        assert torch.equal(y, exact)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_runs_directly_the_second_time(reader: str, case: str) -> None:
    """By the same launches."""
    call, launched = LAYERS[case]
    with emulated_device(reader) as launches:
        expected = of(call, 1)
        assert launches.names == launched
        launches.launches.clear()
        check_same(directly(lambda: of(call, 1)), expected)
        assert launches.names == launched


def with_operand(wanted: int) -> Any:
    return backward(drawn(6, 16), drawn(6, 16), wanted=(wanted,))


def with_gradient(made: Callable[..., Tensor]) -> Any:
    return backward(drawn(6, 16), grad=made(6, 16))


ALIKE: dict[str, list[Call]] = {
    "programs": [lambda: pointwise(drawn(6, 16)), lambda: pointwise(drawn(6, 16), program="operands=0; tanh z")],
    "types of the result": [lambda: pointwise(drawn(6, 16)), lambda: pointwise(drawn(6, 16), out=FP32)],
    "dimensions": [lambda: reduce(drawn(6, 6), [0]), lambda: reduce(drawn(6, 6), [1])],
    "numbers of dimensions": [lambda: reduce(drawn(6, 6), [0]), lambda: reduce(drawn(6, 6), [0, 1])],
    "reductions": [lambda: reduce(drawn(6, 6), [0]), lambda: reduce(drawn(6, 6), [0], reduction="amin")],
    "sums": [lambda: backward(drawn(6, 16)), lambda: backward(drawn(6, 16), sums=True)],
    "wanted": [partial(with_operand, wanted) for wanted in (0, 1)],
    "gradients' layouts": [partial(with_gradient, made) for made in (drawn, turned)],
    "operators": [lambda: pointwise(drawn(6, 6)), lambda: backward(drawn(6, 6))],
}


@pytest.mark.parametrize("case", ALIKE)
def test_calls_that_differ_have_plans_of_their_own(launches: EmulatedLaunches, case: str) -> None:
    for _ in range(2):
        for seed, call in enumerate(ALIKE[case]):
            found = of(call, seed)
            with paused():
                expected = of(call, seed)
            assert [y.shape for y in found] == [y.shape for y in expected]
            assert all(
                y.dtype == exact.dtype and torch.equal(y, exact) for y, exact in zip(found, expected, strict=True)
            )


@pytest.mark.parametrize("reduction", ["amax", "logsumexp"])
def test_gradients_behind_a_reduction_run_directly(launches: EmulatedLaunches, reduction: str) -> None:
    """With its result and its ties, which the kernel reads too; another reduction of the same tensors is another."""
    x, r, grad = drawn(6, 16), drawn(6, 16), drawn(6, 1)
    results = [cuda.reduce(x, [r], GATED, name, [1], FP32).unsqueeze(1) for name in ("amin", reduction)]

    def of_both() -> list[Tensor]:
        given = [(name, result, [0, 1], False) for name, result in zip(("amin", reduction), results, strict=True)]
        return [y for some in given for y in cuda.pointwise_backward(grad, x, [r], GATED, *some)]

    with paused():
        expected = of_both()
    of_both()
    before, made = direct_calls(), len(launches.launches)
    check_same(of_both(), expected)
    assert direct_calls() - before == len(launches.launches) - made
    assert launches.names[made:].count("pointwise_backward") == 2


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_column_sum_is_rounded_once(launches: EmulatedLaunches, dtype: torch.dtype) -> None:
    """To x's type, which is a bias's: nothing has to convert it."""
    x, grad = drawn(300, 16, dtype=dtype), drawn(300, 16, dtype=dtype)
    exact = (grad.double() * (x.double() > 0)).sum(0)
    given = grad, x, [], "operands=0; relu z", "none", None, [0], True
    for compute in (cuda.pointwise_backward, cuda.pointwise_backward, cpu.pointwise_backward):
        *_, found = compute(*given)
        assert found.dtype == dtype
        torch.testing.assert_close(found, exact.to(dtype), rtol=1e-5, atol=1e-5)
    *_, expected = fake.pointwise_backward(*given)
    assert expected.dtype == dtype


def kernels(launches: EmulatedLaunches, function: str) -> list[int]:
    return [launch.specialized for launch in launches.launches if launch.function == function]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("pointwise", lambda: pointwise(drawn(64, 64), drawn(64, 64))),
        ("pointwise_backward", lambda: backward(drawn(64, 64), drawn(64, 64), sums=True)),
    ],
)
def test_its_program_is_interpreted_until_it_is_compiled(launches: EmulatedLaunches, function: str, call: Call) -> None:
    compiler = FakeCompiler()
    compiler.may_go_on.clear()
    with compiled_by(compiler):
        of(call, 0)
        directly(lambda: of(call, 1))
        compiler.may_go_on.set()
        cutfuse.wait(30)
        directly(lambda: of(call, 2))
    first, second, third = kernels(launches, function)
    assert first == second == 0
    assert third != 0


def test_a_capture_waits_for_an_epilogue_on_the_general_path() -> None:
    compiler, is_capturing = FakeCompiler(), False
    compiler.may_go_on.clear()
    with emulated_device(is_capturing=lambda: is_capturing), compiled_by(compiler):
        pointwise(drawn(64, 64), drawn(64, 64))
        before, is_capturing = direct_calls(), True
        pointwise(drawn(64, 64), drawn(64, 64))
        assert direct_calls() == before
        compiler.may_go_on.set()
        cutfuse.wait(30)
        directly(lambda: pointwise(drawn(64, 64), drawn(64, 64)))


def test_what_no_thread_compiles_is_asked_for_again(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose kernel waits for a thread that could not be started is general, and starts one."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with compiled_by(FakeCompiler()) as compiler:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            pointwise(drawn(64, 64), drawn(64, 64))
        before = direct_calls()
        pointwise(drawn(64, 64), drawn(64, 64))
        assert direct_calls() == before
        assert cutfuse.wait(30) == 1
        directly(lambda: pointwise(drawn(64, 64), drawn(64, 64)))
        assert len(compiler.compiled) == 1


def test_a_subclass_has_no_direct_call(launches: EmulatedLaunches) -> None:
    class Plain(Tensor):
        pass

    x = drawn(6, 16)
    before = direct_calls()
    for _ in range(2):
        y = pointwise(x.as_subclass(Plain))
    assert direct_calls() == before
    assert y.shape == x.shape


FAILING: dict[str, Call] = {
    "pointwise": lambda: pointwise(drawn(6, 16)),
    "a reduction with a workspace": lambda: reduce(drawn(65536, 8), [0]),
    "backward with a column sum": lambda: backward(drawn(4096, 64), sums=True),
    "linear with a workspace": lambda: linear(4096, 4104, 8, reduction="amax"),
    "linear and a reduction with a workspace": lambda: linear(4, 65_537, 2, reduction="amax"),
}


@pytest.mark.parametrize("case", FAILING)
def test_memory_that_runs_out_is_told(case: str) -> None:
    """By PyTorch's own error, whichever of a call's allocations fails."""
    call, allocate = FAILING[case], calls.torch_functions(calls.CPU)["empty_strided"]
    left = [0] * 9

    def empty_strided(*given: Any) -> Tensor:
        if not left:
            raise torch.OutOfMemoryError("no memory is left")
        left.pop()
        y: Tensor = allocate(*given)
        return y

    with emulated_device(empty_strided=empty_strided):
        of(call, 0)
        left = [0] * 9
        directly(lambda: of(call, 0))
        for count in range(9 - len(left)):
            left = [0] * count
            with pytest.raises(torch.OutOfMemoryError):
                of(call, 0)


@pytest.mark.parametrize("sums", [False, True])
def test_gradients_in_place_of_what_they_are_of(launches: EmulatedLaunches, sums: bool) -> None:
    grad, z, other = drawn(6, 16), drawn(6, 16), drawn(6, 16)
    expected = backward(z.clone(), other.clone(), wanted=[0, 1], sums=sums, grad=grad)
    for _ in range(2):  # planned, and then by its key
        x, operand = z.clone(), other.clone()
        found = cuda.pointwise_backward(grad, x, [operand], GATED, "none", None, [0, 1], sums, in_place=[0, 1])
        assert (found[0].data_ptr(), found[1].data_ptr()) == (x.data_ptr(), operand.data_ptr())
        assert all(map(torch.equal, found, expected))


def test_gradients_in_place_of_what_is_read_again_are_refused() -> None:
    matrix, row, result = (0, 0, 0, 16, 1), (0, 0, 0, 0, 1), ((6, 16), (16, 1), FP32)
    program = cutfuse.Epilogue(lambda z, r: z * r, 1).program.native
    derivatives, outputs = [(1, 0, 0), (0, 0, 0)], [(result, None)] * 2

    def plan(operand: tuple[int, ...], wanted: list[tuple[int, int, int]], place: int) -> object:
        problem = core.PointwiseBackwardProblem(program, (1, 6, 16), matrix, matrix, [operand], wanted)
        return core.backward_call(problem, outputs, None, None, in_place=[place])

    assert plan(matrix, derivatives, 0)
    for place, message in ((1, "x's and the last one, got 1"), (2, "got 2")):
        with pytest.raises(ValueError, match=message):
            plan(matrix, derivatives, place)
    with pytest.raises(ValueError, match="has to be contiguous"):
        plan(row, derivatives[::-1], 1)
    with pytest.raises(ValueError, match="of its shape and type"):
        plan((0, 1, *matrix[2:]), derivatives[::-1], 1)


def test_gradients_beyond_the_limit_are_refused() -> None:
    matrix, result = (0, 0, 0, 16, 1), ((6, 16), (16, 1), FP32)
    program = cutfuse.Epilogue(torch.sigmoid).program.native

    def problem(outer: int, count: int) -> object:
        return core.PointwiseBackwardProblem(program, (outer, 6, 16), matrix, matrix, [], [(0, 0, 0)] * count)

    assert core.backward_call(problem(1, 1), [(result, None)], None, None)
    with pytest.raises(ValueError, match="6 outputs, and the limit is 5"):
        problem(1, 6)
    with pytest.raises(ValueError, match="the problem has 1 outputs, got 2"):
        core.backward_call(problem(1, 1), [(result, None)] * 2, None, None)
    total = core.ReduceProblem(program, (1, 6, 16), matrix, [], 1, 0)
    with pytest.raises(ValueError, match="the outer extent is 2"):
        core.backward_call(problem(2, 1), [(result, None)], (result, (total, 0, ((16,), (1,), FP32))), None)
