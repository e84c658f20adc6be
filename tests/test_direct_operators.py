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

DIRECT: dict[str, Call] = {
    "pointwise": lambda: pointwise(drawn(6, 16)),
    "pointwise in fp32": lambda: pointwise(drawn(6, 16, dtype=FP32), out=FP32),
    "pointwise of another type": lambda: pointwise(drawn(6, 16), out=FP32),
    "pointwise of columns": lambda: pointwise(turned(6, 16)),
    "pointwise of three dimensions": lambda: pointwise(drawn(2, 3, 16)[:, :2]),
    "pointwise with a matrix": lambda: pointwise(drawn(6, 16), drawn(6, 16)),
    "pointwise with a row": lambda: pointwise(drawn(6, 16), drawn(16, dtype=FP32)),
    "pointwise with a column": lambda: pointwise(drawn(6, 16), drawn(6, 1)),
    "pointwise with a scalar": lambda: pointwise(drawn(6, 16), drawn()),
    "sum of rows": lambda: reduce(drawn(6, 16), [1]),
    "sum of columns": lambda: reduce(drawn(6, 16), (0,)),
    "sum of all": lambda: reduce(drawn(6, 16), [0, 1]),
    "amax with a prologue": lambda: reduce(drawn(6, 16), [1], drawn(6, 16), reduction="amax"),
    "backward": lambda: backward(drawn(6, 16)),
    "backward with a column sum": lambda: backward(drawn(6, 16), sums=True),
    "backward of columns": lambda: backward(turned(6, 16)),
    "backward of a gradient of columns": lambda: backward(drawn(6, 16), grad=turned(6, 16)),
    "backward of an expanded gradient": lambda: backward(drawn(6, 16), grad=drawn().expand(6, 16), sums=True),
    "backward of both": lambda: backward(drawn(6, 16), drawn(6, 16), wanted=(0, 1), sums=True),
    "backward of the operand": lambda: backward(drawn(6, 16), drawn(6, 16, dtype=FP32), wanted=(1,)),
    "backward with a row": lambda: backward(drawn(6, 16), drawn(16)),
    "backward of three dimensions": lambda: backward(drawn(2, 3, 16)),
    "backward of a row": lambda: backward(drawn(6, 16), drawn(16), wanted=(0, 1), sums=True),
    "backward of a row alone": lambda: backward(drawn(6, 16), drawn(1, 16), wanted=(1,)),
    "backward of a column in fp32": lambda: backward(drawn(6, 16), drawn(6, 1, dtype=FP32), wanted=(0, 1)),
    "backward of a scalar": lambda: backward(turned(6, 16), drawn(), wanted=(0, 1)),
    "backward of a matrix in three dimensions": lambda: backward(drawn(2, 3, 16), drawn(3, 16), wanted=(1,)),
    "pointwise of four dimensions that do not merge": lambda: pointwise(drawn(3, 4, 5, 6)[:2, :3, :4, :5]),
    "a result in another order": lambda: reduce(drawn(2, 3, 4).permute(2, 0, 1), [1]),
    "no gradient": lambda: backward(drawn(6, 16), wanted=(), sums=True),
    "linear": lambda: linear(512, 2048, 64),
    "linear, reduced": lambda: linear(4096, 4104, 8, reduction="amax"),
    "linear and one more kernel": lambda: linear(16, 63, 63),
    "linear and a reduction": lambda: linear(4, 65_537, 2, reduction="amax"),
    "linear and a reduction that are faster": lambda: linear(256, 256, 8192, reduction="amax"),
    "linear over planes": lambda: linear(128, 256, 512, FP32, mode="split3"),
    "linear in slices of K": lambda: linear(16, 64, 8192, FP32, mode="split6"),
    "linear, guarded": lambda: linear(128, 4096, 4096, FP32, mode="guarded"),
    "linear, guarded and reduced": lambda: linear(128, 4096, 4096, FP32, "amax", "guarded"),
}
# What is launched of layers, by whichever path.
LAUNCHED = {
    "linear": ["gemm"],
    "linear, reduced": ["gemm", "finalize_partials"],
    "linear and one more kernel": ["pointwise"],
    "linear and a reduction": ["reduce"],
    "linear and a reduction that are faster": ["reduce"],
    "linear over planes": ["split", "gemm_convert"],
    "linear in slices of K": ["split", "split", "gemm_planes"],
    "linear, guarded": ["split", "gemm_convert"] * 2,
    "linear, guarded and reduced": [*["split", "gemm_convert"] * 2, "finalize_partials"],
}

GENERAL: dict[str, Call] = {
    "nothing, pointwise": lambda: pointwise(drawn(0, 16)),
    "nothing, reduced": lambda: reduce(drawn(0, 16), [0]),
    "nothing, backward": lambda: backward(drawn(0, 16), sums=True),
    "nothing, linear": lambda: linear(0, 16, 16),
    "an operand's gradient that is summed in two steps": lambda: backward(drawn(2, 3, 16), drawn(3, 1), wanted=(1,)),
    "an operand with a dimension less": lambda: backward(drawn(1, 16), drawn(16), wanted=(1,)),
    "a column sum of columns": lambda: backward(turned(6, 16), sums=True),
}


# The launches of a call that no plan expresses may be calls of their own, as many.
STEPS = {"an operand's gradient that is summed in two steps": 2}


def of(call: Call, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    result = call()
    return result if isinstance(result, list) else [result]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for y, exact in zip(found, expected, strict=True):
        assert (y.shape, y.stride(), y.dtype) == (exact.shape, exact.stride(), exact.dtype)
        assert torch.equal(y, exact)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", [*DIRECT, *GENERAL])
def test_it_gives_what_the_general_path_gives(reader: str, case: str) -> None:
    """By as many launches, and as much memory."""
    call, launches = (DIRECT | GENERAL)[case], EmulatedLaunches()

    def made() -> tuple[list[Tensor], list[str], list[int]]:
        launches.launches.clear()
        launches.allocated.clear()
        return of(call, 1), launches.names, sorted(size for _, size, _ in launches.allocated)

    with emulated_device(reader, launches, empty_strided=launches.allocate):
        of(call, 0)
        before = direct_calls()
        found, *direct = made()
        assert direct_calls() - before == STEPS.get(case, case in DIRECT)
        with paused():
            expected, *general = made()
    assert direct == general
    assert direct[0] == LAUNCHED.get(case, direct[0])
    check_same(found, expected)


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
    layout, row, result = (0, 0, 16, 1), (0, 0, 0, 1), ((6, 16), (16, 1), FP32)
    program = cutfuse.Epilogue(lambda z, r: z * r, 1).program.native
    given, outputs = ((1, 6, 16), layout, layout, program), [(1, result, 0, None), (0, result, 0, None)]
    assert core.backward_call(*given, [layout], outputs, None, None, in_place=[0])
    for operand, place, message in ((layout, 1, "x's and the last one, got 1"), (layout, 2, "got 2")):
        with pytest.raises(ValueError, match=message):
            core.backward_call(*given, [operand], outputs, None, None, in_place=[place])
    with pytest.raises(ValueError, match="has to be contiguous"):
        core.backward_call(*given, [row], outputs[::-1], None, None, in_place=[1])
    with pytest.raises(ValueError, match="of its shape and type"):
        core.backward_call(*given, [(1, *layout[1:])], outputs[::-1], None, None, in_place=[1])


def test_gradients_beyond_the_limit_are_refused() -> None:
    layout, result = (0, 0, 16, 1), ((6, 16), (16, 1), FP32)
    program = cutfuse.Epilogue(torch.sigmoid).program.native
    given = (1, 6, 16), layout, layout, program, []
    assert core.backward_call(*given, [(0, result, 0, None)], None, None)
    with pytest.raises(ValueError, match="6 outputs, and the limit is 5"):
        core.backward_call(*given, [(0, result, 0, None)] * 6, None, None)
    sums = result, ((1, 6, 16), (0, 0, 16, 1), 0, ((16,), (1,), FP32), 0)
    with pytest.raises(ValueError, match="the outer extent is 2"):
        core.backward_call((2, 6, 16), *given[1:], [(0, result, 0, None)], sums, None)
