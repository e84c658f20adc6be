"""fp32 products over planes on a GPU: every shape, layout, epilogue, reduction and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from generators import EPILOGUES, LAYOUTS, REDUCTIONS, assert_no_worse, eager_linear, to_double
from plane_inputs import DEVICE, KERNELS, LARGE, SLACK, SPLIT_MODES, draw, normal
from torch import Tensor

import cutfuse

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("guarded_products")]

# Rows, columns, depth: single elements, parts of tiles and of blocks, one more than a whole number of each.
RAGGED = ((1, 4, 1), (3, 8, 5), (130, 260, 77), (257, 1000, 4097))


def seeds_of(shape: tuple[int, int, int]) -> Iterable[int]:
    """Of a few numbers the error is chance: many draws average out."""
    return range(0, 48, 3) if shape[0] < 10 else (0,)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_shapes(shape: tuple[int, int, int], mode: str) -> None:
    results: list[list[Tensor]] = [[], [], []]
    with cutfuse.precision(mode):
        for seed in seeds_of(shape):
            x, weight, bias = draw(*shape, seed)
            assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid).path == "fused"
            for found, value in zip(
                results,
                (cutfuse.linear(x, weight), torch.mm(x, weight.t()), torch.mm(x.double(), weight.double().t())),
                strict=True,
            ):
                found.append(value)
    assert_no_worse(*(torch.stack(each) for each in results), slack=SLACK)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_shapes_with_an_epilogue(shape: tuple[int, int, int], mode: str) -> None:
    rows, columns, _ = shape
    epilogue = EPILOGUES["residual"][0]
    results: list[list[Tensor]] = [[], [], []]
    for seed in seeds_of(shape):
        x, weight, bias = draw(*shape, seed)
        residual = normal(rows, columns, seed=seed)
        with cutfuse.precision(mode):
            results[0].append(cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=(residual,)))
        results[1].append(eager_linear(x, weight, bias, epilogue, (residual,)))
        results[2].append(eager_linear(*to_double(x, weight, bias), epilogue, to_double(residual)))
    assert_no_worse(*(torch.stack(each) for each in results), slack=SLACK)


def misaligned_rows(tensor: Tensor) -> Tensor:
    """Rows that start at every multiple of 4 bytes."""
    return F.pad(tensor, (1, 2))[:, 1:-2]


def doubly_strided(tensor: Tensor) -> Tensor:
    """Neither rows nor columns are contiguous."""
    return tensor.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3]


def transposed_misaligned(tensor: Tensor) -> Tensor:
    """Columns that start at every multiple of 4 bytes."""
    return misaligned_rows(tensor.t().contiguous()).t()


MATRIX_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **LAYOUTS,
    "misaligned rows": misaligned_rows,
    "doubly strided": doubly_strided,
    "transposed and misaligned": transposed_misaligned,
}


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("of_weight", MATRIX_LAYOUTS)
@pytest.mark.parametrize("of_x", MATRIX_LAYOUTS)
def test_every_layout_gives_the_same_bits(of_x: str, of_weight: str, mode: str) -> None:
    x, weight, bias = draw(130, 260, 77)
    x_laid_out, weight_laid_out = MATRIX_LAYOUTS[of_x](x), MATRIX_LAYOUTS[of_weight](weight)
    assert torch.equal(x_laid_out, x)
    assert torch.equal(weight_laid_out, weight)
    with cutfuse.precision(mode):
        expected = cutfuse.linear(x, weight, bias)
        for _ in range(3):
            assert torch.equal(cutfuse.linear(x_laid_out, weight_laid_out, bias), expected)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert_no_worse(expected, F.linear(x, weight, bias), exact, slack=SLACK)


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t[:1].expand(t.shape),
    "columns": lambda t: t[:, :1].expand(t.shape),
    "one element": lambda t: t[:1, :1].expand(t.shape),
    "rows of a transpose": lambda t: t.t().contiguous().t()[:1].expand(t.shape),
}


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("of_weight", EXPANSIONS)
@pytest.mark.parametrize("of_x", EXPANSIONS)
def test_expanded_matrices(of_x: str, of_weight: str, mode: str) -> None:
    x, weight, bias = draw(130, 260, 77)
    x, weight = EXPANSIONS[of_x](x), EXPANSIONS[of_weight](weight)
    with cutfuse.precision(mode):
        expected = cutfuse.linear(x.contiguous(), weight.contiguous(), bias)
        assert torch.equal(cutfuse.linear(x, weight, bias), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("layout", [lambda b: F.pad(b, (1, 0))[1:], lambda b: b.repeat_interleave(2)[::2]])
def test_bias_of_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    x, weight, bias = draw(130, 260, 77)
    with cutfuse.precision("split3"):
        expected = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid)
        assert torch.equal(cutfuse.linear(x, weight, layout(bias), epilogue=torch.sigmoid), expected)
        same = bias[:1].expand(bias.shape)
        expected = cutfuse.linear(x, weight, same.contiguous(), epilogue=torch.sigmoid)
        assert torch.equal(cutfuse.linear(x, weight, same, epilogue=torch.sigmoid), expected)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("name", ["sigmoid", "residual", "gelu_gate", "four_operands"])
def test_every_reduction(name: str, reduction: str | None, mode: str) -> None:
    epilogue, count = EPILOGUES[name]
    rows, columns, depth = 300, 520, 200
    x, weight, bias = draw(rows, columns, depth)
    operands = [normal(*shape, seed=3) for shape in ((rows, columns), (columns,), (rows, 1), ())[:count]]

    def call() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)

    with cutfuse.precision(mode):
        explanation = cutfuse.explain(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
        assert explanation.path == "fused"
        assert any(name in explanation.steps[0] for name in KERNELS[mode])
        runs = [call() for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    eager = eager_linear(x, weight, bias, epilogue, operands, reduction)
    exact = eager_linear(*to_double(x, weight, bias), epilogue, to_double(*operands), reduction)
    assert_no_worse(runs[0], eager, exact, slack=SLACK)


@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("shape", [(77, 131, 61), (33, 257, 1023), (128, 1022, 512), (64, 1, 64)], ids=str)
def test_columns_that_are_no_multiple_of_four(shape: tuple[int, int, int], mode: str) -> None:
    """The result's rows would not start at multiples of 16 bytes: cuBLAS takes it, unless it is reduced."""
    x, weight, bias = draw(*shape)
    with cutfuse.precision("ieee"):
        expected = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid)
    with cutfuse.precision(mode):
        assert torch.equal(cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid), expected)
        assert torch.equal(cutfuse.linear(x, weight, bias), F.linear(x, weight, bias))
        reduced = cutfuse.linear(x, weight, bias, epilogue=torch.sigmoid, reduce="sum")
        assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid).path == "unfused"
        assert cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid, reduce="sum").path == "fused"
    eager = eager_linear(x, weight, bias, torch.sigmoid, (), "sum")
    exact = eager_linear(*to_double(x, weight, bias), torch.sigmoid, (), "sum")
    assert_no_worse(reduced, eager, exact, slack=SLACK)


@pytest.mark.no_path("explains a call, and makes none")
def test_explain_says_why_columns_do_not_fit() -> None:
    x, weight, bias = draw(128, 1022, 512)
    with cutfuse.precision("split3"):
        explanation = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid)
    assert any("N is 1022" in reason for reason in explanation.reasons), explanation


@pytest.mark.parametrize("mode", [None, *SPLIT_MODES])
@pytest.mark.parametrize("reduction", [None, "amax", "amin", "logsumexp"])
def test_a_bias_and_an_operand_that_are_not_finite(reduction: str | None, mode: str | None) -> None:
    """They say nothing about the operands' range: the plan, and with it all other results, stay to the bit."""
    x, weight, bias = draw(*LARGE)
    residual = normal(LARGE[0], LARGE[1], seed=3)
    inf, nan = float("inf"), float("nan")

    def call() -> Tensor:
        with cutfuse.precision(mode):
            return cutfuse.linear(x, weight, bias, epilogue=torch.add, operands=(residual,), reduce=reduction)

    clean = call()
    residual[2, 7], residual[3, 5], residual[1000, 0] = inf, -inf, nan
    if reduction is None:
        bias[5], bias[6], bias[4001] = inf, nan, -inf
    actual, expected = call(), eager_linear(x, weight, bias, torch.add, (residual,), reduction)
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(same(actual), same(expected))
    assert not expected.isfinite().all()
    untouched = expected.isfinite()
    if reduction is not None:
        untouched[[2, 3, 1000]] = False
    assert torch.equal(actual[untouched], clean[untouched])


@pytest.mark.general_path("gradients of reductions", when=lambda case: case["reduction"] is not None)
@pytest.mark.parametrize("mode", SPLIT_MODES)
@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("shape", [(130, 520, 260), (256, 512, 1024)], ids=str)
def test_gradients(shape: tuple[int, int, int], reduction: str | None, mode: str) -> None:
    rows, columns, depth = shape
    x, weight, bias = draw(*shape)
    layer = cutfuse.nn.FusedLinear(depth, columns, epilogue=torch.sigmoid, reduce=reduction, device=DEVICE)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    x.requires_grad_()
    grad = normal(rows, columns, seed=4) if reduction is None else normal(rows, seed=4)

    def gradients(mode: str, leaves_context: bool) -> tuple[Tensor, ...]:
        with cutfuse.precision(mode):
            y = layer(x)
            if not leaves_context:
                return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)

    actual, again, ieee = gradients(mode, False), gradients(mode, True), gradients("ieee", False)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    if reduction not in ("amax", "amin"):  # sums of one term may round alike
        assert not torch.equal(actual[0], ieee[0])
        assert not torch.equal(actual[1], ieee[1])
    references = []
    for dtype in (torch.float32, torch.float64):
        tensors = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = eager_linear(*tensors, torch.sigmoid, (), reduction)
        references.append(torch.autograd.grad(y, tensors, grad.to(dtype)))
    for found, eager, exact in zip(actual, *references, strict=True):
        assert_no_worse(found, eager, exact, slack=SLACK)


@pytest.mark.general_path(
    "PyTorch's setting is changed for each product", when=lambda case: case["setting"] != "highest"
)
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_ieee_is_pytorchs_own_result(setting: str) -> None:
    x, weight, bias = draw(300, 520, 1000)
    grad = normal(300, 520, seed=4)
    with_gradient = [t.clone().requires_grad_() for t in (x, weight)]
    expected = F.linear(x, weight, bias), torch.mm(x, weight.t()), torch.mm(grad, weight), torch.mm(grad.t(), x)
    torch.set_float32_matmul_precision(setting)
    with cutfuse.precision("ieee"):
        found = [cutfuse.linear(x, weight, bias), cutfuse.linear(x, weight)]
        y = cutfuse.linear(*with_gradient)
    found += torch.autograd.grad(y, with_gradient, grad)
    assert torch.get_float32_matmul_precision() == setting
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(torch.mm(x, weight.t()), expected[1]) == (setting == "highest"), "the setting has no effect"


@pytest.mark.no_path("explains calls, and makes none")
def test_explain_names_kernel_and_guard() -> None:
    x, weight, bias = draw(*LARGE)
    explanation = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid)
    assert explanation.path == "fused"
    assert any(name in explanation.steps[0] for name in KERNELS["split3"])
    assert "us predicted" in explanation.steps[0]
    guards = [step for step in explanation.steps if step.startswith("guarded: ")]
    assert len(guards) == 1
    assert any(name in guards[0] for name in KERNELS["split6"])
    assert any("cuBLAS in fp32" in reason for reason in explanation.reasons)
    for mode in SPLIT_MODES:
        with cutfuse.precision(mode):
            forced = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid)
        assert any(name in forced.steps[0] for name in KERNELS[mode])
        assert not any("guarded" in step for step in forced.steps)
    with cutfuse.precision("ieee"):
        ieee = cutfuse.explain(x, weight, bias, epilogue=torch.sigmoid)
    assert ieee.path == "unfused"
    assert any('"ieee"' in reason for reason in ieee.reasons)
