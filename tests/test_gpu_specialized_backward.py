"""On a GPU: kernels with derivatives compiled in give the interpreting kernel's bits, and run when they are said to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from interpreted_and_compiled import assert_same_gradients, with_special_values
from random_programs import OPERANDS, Recipe, make_program, recipes
from specialized_backward import MASKS

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program, op_table
from cutfuse.layer import cuda

pytestmark = pytest.mark.gpu
calls_an_operator = pytest.mark.no_path("calls an operator's implementation, and no public function")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LONG = "; ".join(["tanh prev", "gelu prev", "softplus prev 1.0 20.0", "erf prev"] * 4)
GATED = "operands=1; sigmoid z -> s0; mul prev r0 -> s1; sub 1.0 s0; mul prev z; add prev s1"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    native.core.forget_specializations()
    native.core.forget_calls()


@calls_an_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [op.name for op in op_table().ops])
def test_every_op(name: str, dtype: torch.dtype) -> None:
    op = op_table().op(name)
    numbers = [repr(float(default)) for _, default in op.parameters]
    grad, x, *operands = with_special_values(4, (200, 264), dtype)
    alone = f"copy r1 -> s0; {' '.join([name, *('z', 'r0', 's0')[: op.arity], *numbers])}"
    inside = f"relu r1 -> s0; sqrt z; {' '.join([name, *('prev', 'r0', 's0')[: op.arity], *numbers])}; mul prev r1"
    for text in (alone, f"{inside}; relu prev"):
        program = Program.parse(f"operands=2; {text}")
        wanted = [k for k in (0, 1, 2) if k in program.inputs_with_gradient]
        if wanted:
            assert_same_gradients(program, grad, x, operands, wanted, False)


@calls_an_operator
@pytest.mark.parametrize("column_sum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", MASKS)
def test_masks(text: str, dtype: torch.dtype, column_sum: bool) -> None:
    grad, x, r = with_special_values(3, (200, 264), dtype)
    assert_same_gradients(Program.parse(text), grad, x, [r], [0, 1], column_sum)


@calls_an_operator
@pytest.mark.parametrize("column_sum", [False, True])
@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_and_operands(dtype: torch.dtype, length: str, column_sum: bool) -> None:
    """With a row, a column, a transposed and a full operand of three types."""
    tail = "mul prev r0; add prev r1; sub prev r2; mul prev r3"
    program = Program.parse(f"operands=4; {'tanh z' if length == 'short' else LONG.replace('prev', 'z', 1)}; {tail}")
    for shape in ((1, 8), (70, 24), (333, 264), (1000, 1032), (2048, 4096)):
        grad, x, full = with_special_values(3, shape, dtype)
        row, column = (torch.randn(size, device="cuda") for size in ((1, shape[1]), (shape[0], 1)))
        turned = torch.randn(shape[::-1], device="cuda").t()
        operands = (row.half(), column, turned.bfloat16(), full)
        assert_same_gradients(program, grad, x, operands, [0, 4], column_sum)


@calls_an_operator
@given(recipe=recipes())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_programs(recipe: Recipe) -> None:
    program = make_program(recipe)
    wanted = [k for k in range(1 + OPERANDS) if k in program.inputs_with_gradient]
    if not wanted or len(program.instructions) == 0:
        return
    for dtype in (torch.bfloat16, torch.float32):
        grad, x, *operands = with_special_values(2 + OPERANDS, (64, 264), dtype)
        for column_sum in (False, True):
            assert_same_gradients(program, grad, x, operands, wanted, column_sum)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_trained_layer_has_the_same_gradients_before_and_after(dtype: torch.dtype, bias: bool) -> None:
    x, weight, r = (torch.randn(shape, device="cuda").to(dtype) for shape in ((512, 256), (1024, 256), (512, 1024)))
    leaves = [t.requires_grad_() for t in (x, weight, r)]
    if bias:
        leaves.append(torch.randn(1024, device="cuda").to(dtype).requires_grad_())
    results = []
    for _ in range(3):
        y = cutfuse.linear(
            x, weight, leaves[3] if bias else None, epilogue=lambda z, r: torch.tanh(z) * r + z, operands=(r,)
        )
        results.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
        cutfuse.wait(60)
    assert native.core.compiled_count() == 2
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))


@pytest.mark.general_path("a profiler, and a gradient of pointwise")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_a_profiler_shows_the_program() -> None:
    x = torch.randn(256, 256, device="cuda").requires_grad_()
    cutfuse.set_specialization("now")
    try:
        with torch.profiler.profile() as profile:
            y = cutfuse.pointwise(lambda z: torch.tanh(z) * z, x)
            y.backward(torch.ones_like(y))
            torch.cuda.synchronize()
    finally:
        cutfuse.set_specialization("background")
    assert any("pointwise_backward_float32_d0__tanh_mul" in event.key for event in profile.key_averages())


@calls_an_operator
def test_a_graph_has_what_is_ready() -> None:
    program = Program.parse(GATED)
    grad, x, r = (torch.randn(256, 512, device="cuda").bfloat16() for _ in range(3))
    given = grad, x, [r], program.text, "none", None, [0, 1], True
    with cutfuse.specialization("now"):
        expected = cuda.pointwise_backward(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cuda.pointwise_backward(*given)
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))
