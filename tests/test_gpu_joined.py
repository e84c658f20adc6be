"""Products of one x with several weights by one kernel, on a GPU: values, memory and models."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from fused_products import dtype_of, out_dtype_of, placed, reduction_of, run_plan
from gpu_tensors import guarded_results
from test_model_joining import Attention
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer import schema
from cutfuse.layer.call_plans import joined_call
from cutfuse.layer.planner import LinearArguments, layout_of, plan_joined, plan_linear

pytestmark = pytest.mark.gpu

KERNELS = [name for name in native.module().gemm_kernels() if "_joined_" in name]
ERRORS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
WIDTHS = [(128, 128), (256, 128, 384), (1024, 128, 128)]


def inputs(
    m: int, k: int, widths: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Every second weight has a bias; rows have a pitch of their own."""
    torch.manual_seed(m + k)
    x = torch.randn(m, k + 8, device="cuda").to(dtype)[:, :k]
    weights = [torch.randn(n, k + 16, device="cuda").to(dtype)[:, :k] for n in widths]
    biases = [torch.randn(n, device="cuda").to(dtype) if place % 2 == 0 else None for place, n in enumerate(widths)]
    return x, weights, biases


def expected_of(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    parts = [
        F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat(parts, 1)


def error_of(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize(("m", "k"), [(1, 64), (77, 136), (300, 1160), (2500, 72)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values(kernel: str, m: int, k: int, widths: tuple[int, ...]) -> None:
    """Into memory of NaNs, between numbers that stay."""
    dtype = dtype_of(kernel)
    x, weights, biases = inputs(m, k, widths, dtype)
    plan = plan_joined(layout_of(x).of_matrix, [layout_of(w).of_matrix for w in weights], dtype, x.device, only=kernel)
    assert plan is not None
    with guarded_results(margin=7.0):
        for _ in range(2):
            y = joined_call(plan, x, weights, biases).run([x, *weights, *(b for b in biases if b is not None)], 1)
            assert error_of(y, expected_of(x, weights, biases)) < ERRORS[dtype]


@pytest.mark.parametrize("expanded", ["x", "weight"])
def test_rows_that_are_one(expanded: str) -> None:
    """Their stride is zero."""
    x, weights, biases = inputs(65, 128, (128, 256), torch.bfloat16)
    if expanded == "x":
        x = x[:1].expand(65, -1)
    else:
        weights[1] = weights[1][:1].expand(256, -1)
    for _ in range(2):
        assert error_of(schema.joined(x, weights, biases), expected_of(x, weights, biases)) < ERRORS[torch.bfloat16]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # of the first one in a process
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model(dtype: torch.dtype, mode: str | None) -> None:
    model = Attention(64, 32).cuda().to(dtype).eval()
    model.query, model.key = torch.nn.Linear(256, 512), torch.nn.Linear(256, 256, bias=False)
    model.value, model.out = torch.nn.Linear(256, 256), torch.nn.Linear(512, 256)
    model = model.cuda().to(dtype)
    x = torch.randn(2, 100, 256, device="cuda").to(dtype)
    with torch.no_grad():
        expected = model.double()(x.double())
        model = model.to(dtype)
        plain = error_of(model(x), expected)
        compiled = torch.compile(model, backend="cutfuse", mode=mode)
        for _ in range(4):
            y = compiled(x).clone()
    assert error_of(y, expected) < 1.1 * plain


PINGPONG = [name for name in native.module().gemm_kernels() if name.endswith("_pingpong") and "_joined_" not in name]
# Five tiles of 128x128 for each of 132 multiprocessors, ragged in M and N; K is shorter than the epilogue.
SIZES = 4200, 2552, 136
RUNS = 4


def slow(z: Tensor, row: Tensor, column: Tensor, full: Tensor) -> Tensor:
    value = torch.tanh(z * row) + torch.sigmoid(z + column)
    for _ in range(3):
        value = torch.nn.functional.gelu(value) * 1.25 + full
    return value


def arguments_for(name: str) -> LinearArguments:
    m, n, k = SIZES
    x, weight, bias, row, column, full = (
        torch.randn(*shape, device="cuda").to(dtype_of(name))
        for shape in ((m, k), (n, k), (n,), (1, n), (m, 1), (m, n))
    )
    given = placed(x, name, is_weight=False), placed(weight * k**-0.5, name, is_weight=True)
    program = Epilogue(slow, 3).program
    return LinearArguments(*given, bias, (row, column, full), program, reduction_of(name), out_dtype_of(name))


def exact_of(arguments: LinearArguments) -> Tensor:
    x, weight, bias = (arguments.x.double(), arguments.weight.double(), arguments.bias.double())
    y = slow(torch.addmm(bias, x, weight.t()), *(operand.double() for operand in arguments.operands))
    return y.sum(1) if arguments.reduction == "sum" else y


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("name", PINGPONG)
def test_epilogues_that_run_beside_each_other(name: str, mode: str) -> None:
    torch.manual_seed(0)
    arguments = arguments_for(name)
    with cutfuse.specialization(mode):
        plan = plan_linear(arguments, "tf32", only=name)
        results = [run_plan(plan, arguments) for _ in range(RUNS)]
    for later in results[1:]:
        assert torch.equal(results[0], later)
    expected = exact_of(arguments)
    error = ((results[0].double() - expected).norm() / expected.norm()).item()
    assert error < {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-3}[arguments.x.dtype]


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("name", PINGPONG)
def test_a_warpgroup_without_a_tile(name: str, tiles: int) -> None:
    """Fewer tiles than twice the multiprocessors: some blocks have one warpgroup with one tile, and one with none."""
    torch.manual_seed(0)
    whole = arguments_for(name)
    rows = 128 * tiles - (8 if "_tn_" in name else 5)  # which are copied in whole vectors where x lies by columns
    row, column, full = whole.operands
    part = whole._replace(x=whole.x[:rows], operands=(row, column[:rows], full[:rows]))
    with cutfuse.specialization("now"):
        got = run_plan(plan_linear(part, "tf32", only=name), part)
        expected = run_plan(plan_linear(whole, "tf32", only=name), whole)
    assert torch.equal(got, expected[:rows])
