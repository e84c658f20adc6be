"""What the operators' CUDA implementations lay out and launch, whose launches PyTorch makes on CPU memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from emulated_device import EmulatedLaunches, direct_calls, emulated_device
from generators import EPILOGUES, LAYOUTS, REDUCTIONS, eager_linear, eager_reduce, operands_for
from torch import Tensor

from cutfuse import native
from cutfuse.epilogue import Epilogue, Program
from cutfuse.layer import autograd, cpu, cuda, planner, schema
from cutfuse.layer.layouts import NOT_CUDA
from cutfuse.layer.planner import LinearArguments, plan_linear
from cutfuse.native import use_operators_everywhere


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedLaunches]:
    """The CUDA implementations on CPU memory, behind the operators that `cutfuse.layer.autograd` calls."""
    for name in ("linear", "pointwise", "reduce", "pointwise_backward"):
        monkeypatch.setattr(schema, name, getattr(cuda, name))
    with emulated_device() as found:
        monkeypatch.setattr(planner, "device_facts", lambda device: NOT_CUDA)  # every product is PyTorch's
        yield found


def extents_of(launches: EmulatedLaunches) -> list[tuple[str, tuple[int, ...]]]:
    return [(launch.function, tuple(launch.extents)) for launch in launches.launches]


def text_of(function: Callable[..., Tensor], count: int = 0) -> str:
    return Epilogue(function, count).text


def check(actual: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: Sequence[Tensor]) -> None:
    """Values and gradients, with the tensors' own strides, of a call that is planned and of one that runs directly."""
    leaves = [t.detach().as_strided(t.shape, t.stride()).requires_grad_() for t in tensors]
    wanted = expected(*leaves)
    for is_direct in (False, True):
        before = direct_calls()
        y = actual(*leaves)
        torch.testing.assert_close(y, wanted)
        for grad in (torch.randn_like(wanted), torch.ones(()).expand(wanted.shape)):  # the second one is that of a sum
            gradients = [torch.autograd.grad(result, leaves, grad, retain_graph=True) for result in (y, wanted)]
            torch.testing.assert_close(*gradients)
        assert direct_calls() > before or not is_direct


BASE = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
VIEWS = {
    "contiguous": BASE,
    "permuted": BASE.permute(3, 1, 0, 2),
    "channels_last": BASE.permute(0, 3, 1, 2),
    "sliced": BASE[:, 1:3, ::2],
    "expanded": BASE[:, :1, :, :1].expand(3, 4, 5, 6),
    "expanded_first": BASE[0, :, :1].expand(3, 4, 5, 6),
    "narrow": BASE[:, :1, :, :1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_of_any_dimensions_and_strides(launches: EmulatedLaunches, reduction: str, view: str) -> None:
    x, program = VIEWS[view], text_of(lambda z: z * z - z)
    for count in range(1, 5):
        for dims in itertools.combinations(range(4), count):
            check(
                lambda x, dims=dims: autograd.reduce(x, (), program, reduction, dims, torch.float32),
                lambda x, dims=dims: eager_reduce(x * x - x, dims, reduction),
                [x],
            )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reduction", [None, "mean", "logsumexp", "amax"])
def test_operands_of_any_strides(launches: EmulatedLaunches, reduction: str | None, view: str) -> None:
    x = VIEWS[view]
    operands = [torch.randn(x.shape[1], 1, x.shape[3]), torch.randn(x.shape[2], 1), torch.randn_like(x)]
    function = lambda z, a, b, c: torch.tanh(z) * a + b * c  # noqa: E731
    program = text_of(function, 3)
    dims = (1, 3)

    def actual(x: Tensor, *rest: Tensor) -> Tensor:
        if reduction is None:
            return autograd.pointwise(x, rest, program, torch.float32)
        return autograd.reduce(x, rest, program, reduction, dims, torch.float32)

    def expected(x: Tensor, *rest: Tensor) -> Tensor:
        y = function(x, *rest)
        return y if reduction is None else eager_reduce(y, dims, reduction)

    check(actual, expected, [x, *operands])


@pytest.mark.parametrize("reduction", [None, *REDUCTIONS])
@pytest.mark.parametrize("name", [name for name in EPILOGUES if name != "where"])
def test_linear(launches: EmulatedLaunches, name: str, reduction: str | None) -> None:
    epilogue, count = EPILOGUES[name]
    program = text_of(epilogue, count)
    tensors = [torch.randn(6, 7), torch.randn(5, 7), torch.randn(5), *operands_for(count, 6, 5, torch.float32)]

    def actual(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
        rest = [t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1) for t in rest]
        return autograd.linear(x, weight, bias, rest, program, reduction or "none", torch.float32)

    check(actual, lambda x, w, b, *rest: eager_linear(x, w, b, epilogue, rest, reduction), tensors)
    with torch.no_grad():
        x, w, b, *rest = tensors
        torch.testing.assert_close(actual(x, w, b, *rest), eager_linear(x, w, b, epilogue, rest, reduction))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_formats_of_results(launches: EmulatedLaunches, layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(6, 5))
    y = cuda.pointwise(x, [], text_of(torch.sigmoid), torch.bfloat16)
    torch.testing.assert_close(y, torch.sigmoid(x).bfloat16())
    assert y.stride() == torch.empty_like(x).stride()


def test_what_is_contiguous_is_one_row(launches: EmulatedLaunches) -> None:
    for x in (BASE, BASE.permute(3, 1, 0, 2), BASE[1:2]):
        cuda.pointwise(x, [x, torch.ones(())], "operands=2; add z r0; mul prev r1", torch.float32)
    assert extents_of(launches) == [("pointwise", (1, 1, 360)), ("pointwise", (1, 1, 360)), ("pointwise", (1, 1, 120))]


@pytest.mark.parametrize(
    ("x", "dims", "extents"),
    [
        (BASE, (3,), [(60, 6, 1)]),
        (BASE, (1,), [(3, 4, 30)]),
        (BASE, (1, 2), [(3, 20, 6)]),
        (BASE, (0,), [(1, 3, 120)]),
        (BASE, (0, 1, 2, 3), [(1, 360, 1)]),
        (BASE, (0, 3), [(60, 6, 1), (1, 3, 20)]),
        (BASE.permute(0, 3, 1, 2), (2, 3), [(3, 20, 6)]),
        (BASE.permute(0, 3, 1, 2), (1,), [(60, 6, 1)]),
        (BASE.permute(3, 2, 1, 0), (0,), [(60, 6, 1)]),
        (BASE[0, 0].t(), (1,), [(1, 5, 6)]),
    ],
)
def test_reductions_take_the_fewest_launches(launches: EmulatedLaunches, x: Tensor, dims: tuple, extents: list) -> None:
    cuda.reduce(x, [], "operands=0", "sum", dims, torch.float32)
    assert extents_of(launches) == [("reduce", item) for item in extents]


def test_no_memory_but_the_result_and_partials(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction of a dense tensor never copies it."""

    def refuse(*_: object) -> None:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(cuda, "_dense_copies", refuse)
    for x in (VIEWS["contiguous"], VIEWS["permuted"], VIEWS["channels_last"]):
        for count in range(1, 5):
            for dims in itertools.combinations(range(4), count):
                cuda.reduce(x, [], "operands=0", "sum", dims, torch.float32)


def test_linear_writes_over_the_product(launches: EmulatedLaunches) -> None:
    x, weight = torch.randn(6, 7), torch.randn(5, 7)
    y = cuda.linear(x, weight, None, [], text_of(torch.relu), "none", torch.float32)
    torch.testing.assert_close(y, torch.relu(x @ weight.t()))
    assert launches.launches[0].x[0] == launches.launches[0].out == y.data_ptr()
    y = cuda.linear(x, weight, None, [], text_of(torch.relu), "none", torch.bfloat16)
    torch.testing.assert_close(y, torch.relu(x @ weight.t()).bfloat16())
    assert launches.launches[1].x[0] != launches.launches[1].out


def test_the_bias_gradient_comes_with_the_pointwise_kernel(launches: EmulatedLaunches) -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((600, 7), (5, 7), (5,)))
    y = autograd.linear(x, weight, bias, [], text_of(torch.sigmoid), "none", torch.float32)
    launches.launches.clear()
    torch.autograd.grad(y.sum(), (x, weight, bias))
    blocks = native.core.pointwise_backward_row_blocks(600, 5)
    assert extents_of(launches) == [("pointwise_backward", (1, 600, 5)), ("reduce", (1, blocks, 5))]


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("reduction", ["amax", "logsumexp"])
def test_column_sums_behind_a_reduction(launches: EmulatedLaunches, reduction: str, dims: tuple[int, ...]) -> None:
    """Of any dimensions: the kernel that sums columns reads a result for each of x's rows."""
    x, program = torch.randn(16, 8), text_of(lambda z: z * 2)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    result = cuda.reduce(x, [], program, reduction, dims, torch.float32).reshape(shape)
    given = torch.randn(result.shape), x, [], program, reduction, result, [0], True
    torch.testing.assert_close(cuda.pointwise_backward(*given), cpu.pointwise_backward(*given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives_with_column_sums(launches: EmulatedLaunches, layout: str) -> None:
    grad, x, r = (make(torch.randn(6, 8)) for make in (LAYOUTS[layout], LAYOUTS[layout], lambda t: t[0]))
    given = grad, x, [r], text_of(lambda z, r: torch.tanh(z) * r, 1), "none", None, [0, 1], True
    for _ in range(2):
        torch.testing.assert_close(cuda.pointwise_backward(*given), cpu.pointwise_backward(*given))


def test_tensors_without_elements(launches: EmulatedLaunches) -> None:
    x, program = torch.empty(0, 8), text_of(torch.sigmoid)
    assert cuda.pointwise(x, [], program, torch.float32).shape == (0, 8)
    assert torch.equal(cuda.reduce(x, [], program, "sum", (0,), torch.float32), torch.zeros(8))
    gradient, sums = cuda.pointwise_backward(x, x, [], program, "none", None, [0], True)
    assert gradient.shape == (0, 8)
    assert torch.equal(sums, torch.zeros(8))


def test_reductions_of_a_full_set_of_operands(launches: EmulatedLaunches) -> None:
    """No operand is left for the reduction's result, which the gradient needs."""
    epilogue, count = EPILOGUES["four_operands"]
    program = text_of(epilogue, count)
    for dims in ((0,), (1,)):
        for reduction in ("amax", "logsumexp"):
            check(
                lambda x, *rest, d=dims, r=reduction: autograd.reduce(x, rest, program, r, d, torch.float32),
                lambda x, *rest, d=dims, r=reduction: eager_reduce(epilogue(x, *rest), d, r),
                [torch.randn(6, 5), *operands_for(count, 6, 5, torch.float32)],
            )


def test_public_functions_come_to_the_kernels(launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch) -> None:
    import cutfuse
    from cutfuse import matrix_vector

    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)

    with use_operators_everywhere():
        cutfuse.sigmoid(BASE)
        cutfuse.sum(BASE, 1)
        cutfuse.linear(BASE, torch.randn(7, 6), epilogue=torch.relu, reduce="amax")
        cutfuse.linear(BASE, torch.randn(7, 6), epilogue=lambda z: z / 2, reduce="sum")
    assert launches.names == ["pointwise", "reduce", "reduce", "reduce", "reduce"]
    assert [extents for _, extents in extents_of(launches)[-2:]] == [(1, 7, 6), (60, 6, 1)]


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(1, 5), torch.zeros(5).bfloat16()])
def test_a_bias_that_kernels_would_read_beyond_its_end(bias: Tensor) -> None:
    """Operators are called without the public functions' checks too."""
    arguments = LinearArguments(
        torch.zeros(3, 4), torch.zeros(5, 4), bias, (), Program.parse("operands=0; relu z"), "none", torch.float32
    )
    with pytest.raises(ValueError, match=r"the bias has to be torch.float32 of shape \(5,\), got"):
        plan_linear(arguments, "tf32")
