"""The direct path on a GPU: bit for bit what the general path gives, on the stream and the device of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_device import READERS, direct_calls, directly, paused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_direct_calls import DTYPES, EPILOGUES, KINDS, make_operand
from threads import run_in_threads
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import calls

pytestmark = pytest.mark.gpu
core = native.module()


@pytest.fixture(autouse=True)
def _epilogues_are_compiled_at_once() -> None:
    """A call whose epilogue is being compiled takes the general path."""
    cutfuse.set_specialization("now")


QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Iterator[str]:
    """How tensors are read."""
    core.connect_calls(calls.torch_functions(has_exchange_api=request.param == "exchange"))
    yield request.param
    calls.connect()


def to_device(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


def check_direct(call: Callable[[], list[Tensor]]) -> None:
    """The general path's results, and those of a call that ran directly."""
    with paused():
        expected = call()
    call()
    for y, wanted in zip(directly(call), expected, strict=True):
        assert (y.shape, y.stride(), y.dtype, y.device) == (wanted.shape, wanted.stride(), wanted.dtype, wanted.device)
        torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


SHAPES = [((1,), 8, 16), ((130,), 264, 72), ((2, 65), 1024, 512), ((256,), 2048, 1024), ((7,), 5, 3)]


@QUICK
@given(data=st.data())
def test_linear(reader: str, data: st.DataObject) -> None:
    draw = data.draw
    leading, columns, depth = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    name = draw(st.sampled_from(sorted(EPILOGUES)))
    epilogue, count = EPILOGUES[name]
    x = torch.randn(*leading, depth).to(dtype).cuda()
    weight = torch.randn(columns, depth).to(dtype).cuda()
    bias = torch.randn(columns).to(dtype).cuda() if draw(st.booleans()) else None
    operands = [
        to_device(make_operand(draw(st.sampled_from(KINDS)), leading, columns, draw(st.sampled_from(DTYPES))))
        for _ in range(count)
    ]
    reduce = draw(st.sampled_from([None, None, "amax", "logsumexp"]))
    keepdim = draw(st.booleans())
    mode = draw(st.sampled_from([None, "ieee", "guarded", "split3", "split6"]))

    def call() -> list[Tensor]:
        return [cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduce, keepdim=keepdim)]

    with cutfuse.precision(mode):
        check_direct(call)


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.tanh(z) * r


@QUICK
@given(data=st.data())
def test_what_does_not_multiply(reader: str, data: st.DataObject) -> None:
    """Passes and reductions, and the operators that compiled code calls."""
    draw = data.draw
    leading, columns, _ = draw(st.sampled_from([shape for shape in SHAPES if len(shape[0]) == 1]))
    dtype = draw(st.sampled_from(DTYPES))
    x, grad, r = (torch.randn(*leading, columns).to(dtype).cuda() for _ in range(3))
    program, operands = draw(st.sampled_from([("operands=0; gelu z", []), ("operands=1; relu z; mul prev r0", [r])]))
    sums_columns = draw(st.booleans())
    passes: dict[str, Callable[[], Any]] = {
        "cutfuse.pointwise": lambda: [cutfuse.pointwise(gated, x, r)],
        "cutfuse.reduce": lambda: [cutfuse.reduce(x, 0, "amax", prologue=gated, operands=(r,))],
        "pointwise": lambda: [torch.ops.cutfuse.pointwise(x, operands, program, dtype)],
        "reduce": lambda: [torch.ops.cutfuse.reduce(x, operands, program, "sum", [0], torch.float32)],
        "pointwise_backward": lambda: torch.ops.cutfuse.pointwise_backward(
            grad, x, operands, program, "none", None, [*range(1 + len(operands))], sums_columns
        ),
    }
    check_direct(passes[draw(st.sampled_from(sorted(passes)))])


def test_a_fused_layer_is_the_first_work_of_a_thread(reader: str) -> None:
    """Its memory is there already: nothing that PyTorch does before makes a context current in the thread."""
    x, weight = (torch.randn(rows, 256).bfloat16().cuda() for rows in (64, 256))
    expected = cutfuse.linear(x, weight, epilogue=torch.relu)
    kept_by_the_allocator = torch.empty_like(expected)
    torch.cuda.synchronize()
    del kept_by_the_allocator
    found: list[Tensor] = []
    before = direct_calls()
    for _ in range(2):
        run_in_threads([lambda: found.append(cutfuse.linear(x, weight, epilogue=torch.relu))])
    torch.cuda.synchronize()
    assert direct_calls() == before + 2
    assert all(torch.equal(y, expected) for y in found)
