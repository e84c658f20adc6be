"""Epilogues inside torch.compile(fullgraph=True): every way to pass one, and no stale program in a compiled region."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_epilogue_language import (
    Reverse,
    StraightThrough,
    WithContextApart,
    between_set_grad_enabled,
    gate,
    in_inference_mode,
    in_no_grad,
)
from torch import nn
from torch._dynamo.exc import Unsupported

import cutfuse
from cutfuse.epilogue import Epilogue, op_table
from cutfuse.native import use_operators_everywhere

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTOR = 2.0
X = torch.linspace(-3, 3, 31)
EYE = torch.eye(31)


def module_level(z: torch.Tensor) -> torch.Tensor:
    return z + FACTOR * torch.sigmoid(z)


def with_helper(z: torch.Tensor) -> torch.Tensor:
    return module_level(z) * math.sqrt(2)


class Holder(nn.Module):
    def __init__(self, epilogue: Callable[..., torch.Tensor] | Epilogue | None) -> None:
        super().__init__()
        self.epilogue = epilogue

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cutfuse.linear(x, EYE, epilogue=self.epilogue)


OUTSIDE = lambda z: F.silu(z) * 2  # noqa: E731
PREBUILT = Epilogue(lambda z: torch.tanh(z) * 2)
SILU = nn.SiLU()
SEQUENTIAL = nn.Sequential(nn.SiLU(), nn.Tanh())

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "module_level": lambda x: cutfuse.pointwise(module_level, x),
    "helper": lambda x: cutfuse.pointwise(with_helper, x),
    "lambda_outside": lambda x: cutfuse.pointwise(OUTSIDE, x),
    "lambda_inside": lambda x: cutfuse.pointwise(lambda z: z * 2 + torch.tanh(z), x),
    "prebuilt": lambda x: cutfuse.pointwise(PREBUILT, x),
    "none": lambda x: cutfuse.linear(x, EYE, epilogue=None),
    "torch_function": lambda x: cutfuse.pointwise(torch.sigmoid, x),
    "functional": lambda x: cutfuse.pointwise(F.softsign, x),
    "module": lambda x: cutfuse.pointwise(SILU, x),
    "sequential": lambda x: cutfuse.pointwise(SEQUENTIAL, x),
    "held_epilogue": Holder(PREBUILT),
    "held_module": Holder(nn.GELU("tanh")),
    "held_function": Holder(OUTSIDE),
    "operands": lambda x: cutfuse.pointwise(lambda z, r: torch.sigmoid(z) * 2 + r, x, x),
    "where": lambda x: cutfuse.pointwise(lambda z: torch.where(z > 0, z, 0.1 * z), x),
    "methods": lambda x: cutfuse.pointwise(lambda z: z.sigmoid().clamp(min=0.5) ** 2, x),
    "keywords": lambda x: cutfuse.pointwise(lambda z: torch.add(z, 1 - z, alpha=2), x),
    "default": lambda x: cutfuse.pointwise(lambda z, scale=2.5: scale * z, x),
    "dropout": lambda x: cutfuse.pointwise(lambda z: F.dropout(z, training=False) * 2, x),
    "operators": lambda x: cutfuse.pointwise(lambda z: -z + abs(z) * ((z > 0) & ~(z > 1)).float(), x),
    "reflected": lambda x: cutfuse.pointwise(lambda z: 2 - 3 / (1 + 2**z), x),
    "constants": lambda x: cutfuse.pointwise(lambda z: torch.where(z > -math.inf, z / math.pi, 1), x),
}


def compiled(fn: Callable, backend: str | Callable = "aot_eager") -> Callable:
    return torch.compile(fn, fullgraph=True, backend=backend)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    torch.testing.assert_close(compiled(FORMS[form])(X), FORMS[form](X))


def test_the_graph_uses_the_program_only() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        graphs.append(graph)
        return graph

    with use_operators_everywhere():
        compiled(lambda x: cutfuse.pointwise(lambda z: torch.sigmoid(z) * FACTOR, x), backend)(X)
    graphs[0].graph.eliminate_dead_code()
    (call,) = [node for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert "operands=0; sigmoid z; mul prev 2.0" in call.args


def test_a_numpy_number_breaks_the_graph() -> None:
    """Dynamo makes an array of it, whose value is not known while it traces."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(z) * np.float32(0.5) + np.int64(3)

    torch.testing.assert_close(torch.compile(lambda x: cutfuse.pointwise(fn, x), backend="aot_eager")(X), fn(X))
    with pytest.raises(Unsupported):
        compiled(lambda x: cutfuse.pointwise(fn, x))(X)


def test_a_changed_global(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = compiled(lambda x: cutfuse.pointwise(with_helper, x))
    for factor in (2.0, 3.0, 4.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        torch.testing.assert_close(fn(X), with_helper(X))


def test_a_changed_closure() -> None:
    """Floats that change become symbols in Dynamo; the program still gets their values."""

    def make(scale: float) -> Callable[..., torch.Tensor]:
        return lambda z: z * scale

    passed = compiled(lambda x, fn: cutfuse.pointwise(fn, x))
    inline = compiled(lambda x, scale: cutfuse.pointwise(lambda z: z * scale, x))
    for scale in (1.5, 2.5, 3.5, 1.5, 3, 4, 5, math.inf):
        torch.testing.assert_close(passed(X, make(scale)), X * scale, equal_nan=True)
        torch.testing.assert_close(inline(X, scale), X * scale, equal_nan=True)


def test_a_changed_attribute() -> None:
    holder = Holder(nn.LeakyReLU(0.1))
    fn = compiled(holder)
    for slope in (0.1, 0.2, 0.3):
        holder.epilogue.negative_slope = slope  # type: ignore[union-attr]
        torch.testing.assert_close(fn(X), F.leaky_relu(X, slope))
    holder = Holder(OUTSIDE)
    fn = compiled(holder)
    for epilogue in (OUTSIDE, PREBUILT, Epilogue(torch.relu), None):
        holder.epilogue = epilogue
        torch.testing.assert_close(fn(X), X if epilogue is None else epilogue(X))


def _unary_functions() -> list[Callable[..., torch.Tensor]]:
    """Those of torch.nn.functional, as Dynamo hands not all of them to the trace, and abs()."""
    ops = [op for op in op_table().ops if op.arity == 1 and not op.literals]
    named = (getattr(F, op.function.__name__, None) for op in ops)
    return [abs, *dict.fromkeys(function for function in named if function is not None)]


def test_functions_that_dynamo_calls_itself() -> None:
    functions = _unary_functions()
    assert {F.sigmoid, F.tanh, F.hardswish, F.hardsigmoid} <= set(functions)
    results = compiled(lambda x: [cutfuse.pointwise(function, x) for function in functions])(X)
    for function, actual in zip(functions, results, strict=True):
        torch.testing.assert_close(actual, function(X), msg=str(function))


def hypot_where_positive(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Dynamo compares y by itself too, and nothing takes the result before y comes back."""
    mask = (y > 0) & (z < 2)
    return torch.where(mask, torch.hypot(y, z), z)


def difference_of_two(y: torch.Tensor, other: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Two values of one shape are held when the first one comes back."""
    return torch.maximum(other, z) - torch.minimum(y, z)


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: F.hardswish(z) + F.sigmoid(z) * 2,
        lambda z: torch.maximum(abs(z), torch.exp(z)) - F.tanh(z),
        lambda z: torch.exp(abs(z)) * torch.exp(F.tanh(z)) + torch.sigmoid(abs(z)),
        lambda z: z * torch.tensor(0.5) + torch.tensor(2.0),
        lambda z: torch.where(z > 0, z, torch.tensor(torch.finfo(z.dtype).min, dtype=z.dtype)),
        nn.Sequential(nn.Hardswish(), nn.Tanh(), nn.Hardsigmoid()),
        lambda z: hypot_where_positive(F.hardswish(z), z),
        lambda z: (
            torch.maximum(F.hardswish(z), z) - torch.minimum(abs(z), F.hardsigmoid(z)) * torch.exp(F.hardswish(z))
        ),
        lambda z: difference_of_two(F.hardswish(z), F.hardsigmoid(z), z),
    ],
    ids=["sum", "mixed", "in a chain", "numbers", "least number", "modules", "compared", "equal twice", "both held"],
)
def test_plain_tensors_in_a_trace_are_what_made_them(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.testing.assert_close(compiled(lambda x: cutfuse.pointwise(fn, x))(X), fn(X))


def test_types_of_values_and_types_by_name_in_one_epilogue() -> None:
    """PyTorch 2.13 made a guard of both that could not be evaluated."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        return (z * 2).to(z.dtype).to(torch.bfloat16)

    torch.testing.assert_close(compiled(lambda x: cutfuse.pointwise(fn, x))(X), fn(X))


# Dynamo makes an instance of what it traces, of which PyTorch warns.
OF_DYNAMO = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class ReverseView(StraightThrough):
    """Its forward is not in the language."""

    @staticmethod
    def forward(ctx: object, z: torch.Tensor) -> torch.Tensor:
        return z.view_as(z)


@OF_DYNAMO
@pytest.mark.parametrize("function", [StraightThrough, Reverse, WithContextApart, ReverseView])
def test_a_function_with_a_backward_of_its_own_is_refused(function: type[torch.autograd.Function]) -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    for fn in (lambda z: function.apply(z), lambda z: function.apply(torch.tanh(z)) * 2):
        with pytest.raises(cutfuse.EpilogueError, match=rf"autograd.Function \S*\.{function.__name__},"):
            compiled(lambda fn=fn: cutfuse.linear(x, weight, epilogue=fn))()


@OF_DYNAMO
def test_a_function_outside_of_an_epilogue_is_no_matter() -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = StraightThrough.apply(x.detach())
        return StraightThrough.apply(cutfuse.pointwise(lambda z, r: torch.tanh(z) * r, StraightThrough.apply(x), scale))

    (actual,) = torch.autograd.grad(compiled(fn)(x).sum(), x)
    torch.testing.assert_close(actual, torch.autograd.grad(fn(x).sum(), x)[0])


@pytest.mark.parametrize(
    "fn",
    [lambda z: z * gate(z), gate, in_no_grad, in_inference_mode, between_set_grad_enabled],
    ids=["helper", "all", "with", "inference_mode", "set_grad_enabled"],
)
def test_what_is_computed_without_gradients_is_refused(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, requires_grad=True)
    function = compiled(lambda x: cutfuse.pointwise(fn, x))
    with torch.no_grad():  # no gradient is lost here
        torch.testing.assert_close(function(x), fn(x))
    with pytest.raises(cutfuse.EpilogueError, match="where gradients are off"):
        function(x)


def masked_in_no_grad(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mask = abs(z) > 0.5
    return torch.where(mask, z, 0.1 * z)


def test_a_mode_that_changes_no_gradient_is_no_matter() -> None:
    x = torch.randn(9, requires_grad=True)
    function = compiled(lambda x: cutfuse.pointwise(masked_in_no_grad, x))
    (actual,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (function, masked_in_no_grad))
    torch.testing.assert_close(actual, expected)


def test_a_compiled_function_follows_autocast() -> None:
    def fn(z: torch.Tensor) -> torch.Tensor:
        return F.prelu(z, torch.tensor(0.5))  # which autocast of the CPU casts

    function, x = compiled(lambda x: cutfuse.pointwise(fn, x)), torch.randn(4)
    for dtype in (None, torch.bfloat16, torch.float16, None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert function(x).dtype == fn(x).dtype == (dtype or torch.float32)


def test_reductions_and_layers_are_compiled_under_autocast() -> None:
    layer = cutfuse.nn.FusedLinear(8, 3, epilogue=lambda z: torch.exp(z) * 2, reduce="sum")
    x = torch.randn(4, 8)
    calls = (
        layer,
        lambda x: cutfuse.linear(x, layer.weight, reduce="logsumexp"),
        lambda x: cutfuse.reduce(x, 1, "mean"),
    )
    with torch.autocast("cpu", torch.bfloat16):
        for call in calls:
            torch.testing.assert_close(compiled(call)(x), call(x))


def test_an_autocast_of_an_epilogues_own_is_refused_where_it_matters() -> None:
    def matters(z: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.prelu(z, torch.tensor(0.5))

    def does_not_matter(z: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.exp(z)

    x = torch.randn(4)
    with pytest.raises(cutfuse.EpilogueError, match=r"torch\.autocast of its own"):
        compiled(lambda: cutfuse.pointwise(matters, x))()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(lambda: cutfuse.pointwise(does_not_matter, x))(), does_not_matter(x))
