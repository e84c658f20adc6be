"""What whole models have fused: the products, chains, operands, views and reductions of a region, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS, Collector, compare, draw
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import cutfuse
from cutfuse.compile.lifting import recognise
from cutfuse.epilogue import input, op_table
from cutfuse.epilogue.expression import apply
from cutfuse.epilogue.trace import trace
from cutfuse.epilogue.types import ValueType

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.usefixtures("everything_fuses"),
]


X, W, B, R, C = draw(6, 32), draw(16, 32), draw(16), draw(6, 16), draw(6, 1)
X3, R3 = draw(2, 3, 32), draw(2, 3, 16)
X4 = draw(2, 3, 4, 32)

PRELU = "where((z > 0), z, (r0 * where((z > 0), 0, z)))"


class Case(NamedTuple):
    function: Callable[..., Any]
    programs: list[str]
    inputs: tuple[Any, ...] = (X, W, B)


def gate_of_one_product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    left, right = F.linear(x, w, b).chunk(2, dim=-1)
    return left * F.gelu(right)


def gate_of_a_transposed_weight(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    left, right = (x @ w.t()).split([4, 12], -1)
    return left.sum() + torch.sigmoid(right)


def gate_whose_half_is_read_elsewhere(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    left, right = F.linear(x, w, b).chunk(2, dim=-1)
    return left * F.gelu(right), left


def two_layers(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b)), w.t()) + x


def rows_in_another_shape(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w, b).view(2, 3, 16) + r).reshape(6, 16) * 2


def operands_at_two_shapes(x: Tensor, w: Tensor, b: Tensor, r: Tensor, r3: Tensor) -> Tensor:
    return (F.linear(x, w, b) + r).view(2, 3, 16) * r3


def largest_and_where(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    values, places = F.linear(x, w, b).max(-1)
    return values, places


def conv1d_of_gpt2(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.addmm(b, x.view(-1, 32), w.t())
    return F.gelu(y.view(2, 3, 16), approximate="tanh")


def addmm_that_reads_nothing(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return torch.relu(torch.addmm(r * float("nan"), x, w.t(), beta=0))  # r needs no gradient


def channels_last(x: Tensor, w: Tensor, b: Tensor, gamma: Tensor, r: Tensor) -> Tensor:
    """The end of a ConvNeXt's block; r is [B, N, H, W] in channels_last."""
    y = F.linear(x, w, b).permute(0, 3, 1, 2)
    return y * gamma.reshape(1, -1, 1, 1) + r


def transposed_and_back(x: Tensor, w: Tensor, b: Tensor, r: Tensor, c: Tensor) -> Tensor:
    y = F.linear(x, w, b).t() * r
    return (y + c.t()).transpose(0, 1) * c


def added_to_its_own_transpose(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)[:16]
    z = F.linear(x[:16], w, b)
    return (z + z.t()) * y.sum()


TARGET = torch.tensor([3, 15, -100, 0, 7, 7])


def too_many_operands(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = F.linear(x, w) * b
    for factor in range(2, 7):
        y = y + r * factor
    return y


def too_long(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    for step in range(40):
        y = torch.sin(y + step)
    return y


CASES = {
    "bias and activation": Case(lambda x, w, b: F.gelu(F.linear(x, w, b)), ["gelu(z)"]),
    "three dimensions": Case(lambda x, w, b, r: F.linear(x, w, b) + r, ["(z + r0)"], (X3, W, B, R3)),
    "a column": Case(lambda x, w, b, c: F.linear(x, w, b) * c, ["(z * r0)"], (X, W, B, C)),
    "a row that is the bias": Case(lambda x, w, b: torch.tanh(x @ w.t() + b), ["tanh(z)"]),
    "a row on the left": Case(lambda x, w, b: torch.tanh(b + torch.mm(x, w.t())), ["tanh(z)"]),
    "a parameter without dimensions": Case(
        lambda x, w, b, s: F.linear(x, w, b) * s.exp(), ["(z * r0)"], (X, W, B, torch.tensor(0.3))
    ),
    "gate": Case(lambda x, w, b: F.silu(F.linear(x, w)) * F.linear(x, w * 2, b), ["(silu(z) * r0)"]),
    "gate of one product": Case(gate_of_one_product, ["(r0 * gelu(z))"]),
    "gate of unequal parts": Case(gate_of_a_transposed_weight, []),
    "gate whose half is read elsewhere": Case(gate_whose_half_is_read_elsewhere, []),
    "two layers": Case(two_layers, ["gelu(z)", "(z + r0)"], (X, W, B, R)),
    "rows in another shape": Case(rows_in_another_shape, ["(relu((z + r0)) * 2)"], (X, W, B, R3)),
    "flattened": Case(
        lambda x, w, b, r: (F.linear(x, w, b).flatten(0, 1) * r).unflatten(0, (2, 3)).unsqueeze(0) + 1,
        ["((z * r0) + 1)"],
        (X3, W, B, R),
    ),
    "operands at two shapes": Case(operands_at_two_shapes, ["(z + r0)"], (X, W, B, R, R3)),
    "sum": Case(lambda x, w, b: torch.sigmoid(F.linear(x, w, b)).sum(-1), ["sum(sigmoid(z), -1)"]),
    "mean that keeps the dimension": Case(
        lambda x, w, b: F.linear(x, w, b).mean(dim=-1, keepdim=True) * 2, ["mean(z, -1)"]
    ),
    "logsumexp in another shape": Case(
        lambda x, w, b, r: (F.linear(x, w, b).view(2, 3, 16) + r).logsumexp(2),
        ["logsumexp((z + r0), -1)"],
        (X, W, B, R3),
    ),
    "an argument by its name": Case(lambda x, w, b: torch.tanh(input=F.linear(x, w, b)) * 2, ["(tanh(z) * 2)"]),
    "max": Case(lambda x, w, b: F.linear(x, w, b).max(-1).values, ["amax(z, -1)"]),
    "max with its place": Case(largest_and_where, []),
    "sum of columns": Case(lambda x, w, b: torch.relu(F.linear(x, w, b)).sum(0), ["relu(z)"]),
    "Conv1D": Case(conv1d_of_gpt2, ["gelu_tanh(z)"]),
    "addmm with factors": Case(
        lambda x, w, b, r: torch.relu(torch.addmm(r, x, w.t(), beta=0.5, alpha=3)),
        ["relu(((z * 3) + (r0 * 0.5)))"],
        (X, W, B, R),
    ),
    "addmm that reads nothing": Case(addmm_that_reads_nothing, ["relu(z)"], (X, W, B, torch.arange(16))),
    "norm in evaluation": Case(
        lambda x, w, b, mean, variance: torch.relu(F.batch_norm(F.linear(x, w), mean, variance, b, b, eps=0.1)),
        ["relu(((z * r0) + r1))"],
        (X, W, B, B.clone(), B.abs() + 0.5),
    ),
    "prelu of one slope": Case(lambda x, w, b, a: F.prelu(F.linear(x, w, b), a), [PRELU], (X3, W, B, draw(1))),
    "prelu of a slope for each column": Case(
        lambda x, w, b, a: F.linear(x, w, b).prelu(a), [PRELU], (X, W, B, draw(16))
    ),
    "prelu of slopes along another dimension": Case(
        lambda x, w, b, a: F.prelu(F.linear(x, w, b), a), [], (draw(2, 16, 32), W, B, draw(16))
    ),
    "channels last": Case(
        channels_last, ["((z * r0) + r1)"], (X4, W, B, B, draw(2, 16, 3, 4).to(memory_format=torch.channels_last))
    ),
    "residual in another layout": Case(
        lambda x, w, b, r: r + torch.tanh(F.linear(x, w, b)).permute(0, 3, 1, 2),
        ["tanh(z)"],
        (X4, W, B, draw(2, 16, 3, 4)),
    ),
    "transposed and back": Case(transposed_and_back, ["(((z * r0) + r1) * r2)"], (X, W, B, draw(6), R)),
    "added to its own transpose": Case(added_to_its_own_transpose, [], (draw(20, 32), W, B)),
    "sum of columns by a transposition": Case(lambda x, w, b: torch.relu(F.linear(x, w, b)).t().sum(-1), ["relu(z)"]),
    "view of a permutation": Case(
        lambda x, w, b: F.linear(x, w, b).transpose(0, 1).reshape(-1, 16) * 2, [], (X3, W, B)
    ),
    "loss of a language model": Case(
        lambda x, w, b: F.cross_entropy(F.linear(x, w).float().view(-1, 16), TARGET),
        ["cross_entropy(z, target)"],
        (X3, W, B),
    ),
    "loss of scaled logits": Case(
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b) * 2, TARGET), ["cross_entropy((z * 2), target)"]
    ),
    "loss of capped logits": Case(
        lambda x, w, b: F.cross_entropy(5 * torch.tanh(F.linear(x, w, b) / 5), TARGET, reduction="sum"),
        ["cross_entropy((5 * tanh((z / 5))), target)"],
    ),
    "loss of other logits": Case(lambda x, w, b: F.cross_entropy(F.linear(x, w, b).relu(), TARGET), ["relu(z)"]),
    "sum of shifted rows": Case(lambda x, w, b: (F.linear(x, w, b)[:, :-1] * 2).sum(-1), [], (X3, W, B)),
    "weighted loss": Case(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), TARGET, b.detach().abs()), []),
    "loss of probabilities": Case(
        lambda x, w, b, r: F.cross_entropy(F.linear(x, w, b), r.softmax(-1)), [], (X, W, B, R)
    ),
    "sum of a view": Case(lambda x, w, b: F.linear(x, w, b).view(2, 3, 16).sum(-1), ["sum(z, -1)"]),
    "too many operands": Case(too_many_operands, ["((((z * r0) + r1) + r2) + r3)"], (X, W, B, R)),
    "too long": Case(too_long, ["sin("], (X, W, B)),
    "dropout in evaluation": Case(
        lambda x, w, b: F.dropout(F.relu(F.linear(x, w, b)), 0.5, training=False) + 1, ["(relu(z) + 1)"]
    ),
    "type of an operand": Case(
        lambda x, w, b, r: F.linear(x, w, b) + r, ["(z + r0)"], (X.bfloat16(), W.bfloat16(), B.bfloat16(), R)
    ),
}


UNTRAINED = {"norm in evaluation", "max"}  # the gradient of max's values is not that of amax


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("needs_gradient", [False, True], ids=["forward", "training"])
def test_region(name: str, needs_gradient: bool) -> None:
    case = CASES[name]
    inputs = [
        t.clone().requires_grad_() if needs_gradient and t.is_floating_point() and name not in UNTRAINED else t
        for t in case.inputs
    ]
    collector = compare(case.function, inputs)
    assert len(collector.programs) == len(case.programs), collector.reports
    for program, expected in zip(collector.programs, case.programs, strict=True):
        assert program == expected or (expected.endswith("(") and program.startswith(expected)), program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


def test_it_tells_of_each_product() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 5), nn.Softmax(-1))
    found = cutfuse.explain_model(model, X3)
    assert [product.module for product in found.products] == ["0.first", "0.second", "1.first", "1.second", "2"]
    assert [product[1:5] for product in found.products[:2]] == [(6, 64, 32, torch.float32), (6, 32, 64, torch.float32)]
    assert found.fused == 4
    assert found.products[1].ended_at == "layer_norm"
    assert found.products[4].ended_at == "softmax"
    assert found.products[4].reason == "torch.nn.functional.softmax is not in the epilogue language"
    headline, _, _, row, *rest = str(found).splitlines()
    assert headline == "4 of 5 products are fused, in 1 graph"
    assert row.split() == ["fused", "0.first", "2x"]
    assert rest[:2] == [
        "        6 x 64 x 32 float32: gelu(z)",
        "        ends at linear: it is the next product",
    ]


def test_it_tells_why_slopes_end_a_region() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(8))
    (product,) = cutfuse.explain_model(model, torch.randn(2, 8, 8)).products
    assert product.ended_at == "prelu"
    assert product.reason == "prelu has a slope for each index of dimension 1, which are no columns of the product"


def test_layers_in_front_of_convolutions_are_alike() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.conv = nn.Linear(8, 8), nn.Conv1d(6, 6, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(F.relu(self.layer(x)))

    found = cutfuse.explain_model(nn.Sequential(Pair(), Pair()), torch.randn(2, 6, 8))
    assert {product.reason for product in found.products} == {"torch.conv1d is not in the epilogue language"}
    assert ["fused", "0.layer", "2x"] in [line.split() for line in str(found).splitlines()]


def test_it_tells_of_the_reference_models() -> None:
    models = {
        cutfuse.models.LinearSigmoidSum(7, 6): ["sum(sigmoid(z), -1)"],
        cutfuse.models.GemmDivideSumScale(7, 6, 1.5): ["sum((z / 2), -1)"],
        cutfuse.models.GemmSigmoidScaleResidual(7, 6, 2.0): ["((sigmoid(z) * 2) + z)"],
        cutfuse.models.Sigmoid(): [],
        cutfuse.models.SumReduction(1): [],
    }
    for model, programs in models.items():
        assert [product.program for product in cutfuse.explain_model(model, draw(5, 7)).products] == programs


def test_it_tells_why_a_region_ends() -> None:
    found = cutfuse.explain_model(operands_at_two_shapes, X, W, B, R, R3)
    assert found.products[0].reason == "operands belong to different views of the rows"
    found = cutfuse.explain_model(largest_and_where, X, W, B)
    assert found.products[0].ended_at == "max"


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [two_layers, rows_in_another_shape, gate_of_one_product], ids=lambda f: f.__name__)
def test_batch_sizes_make_no_more_graphs(dynamic: bool | None, function: Callable[..., Any]) -> None:
    class Layer(nn.Module):
        """Parameters, of which Dynamo knows that their sizes do not change."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(W), nn.Parameter(B)

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            if function is rows_in_another_shape:
                y = F.linear(x, self.weight, self.bias).view(-1, 3, 16) + r
                return torch.relu(y).reshape(-1, 16) * 2
            given = (r,) if function is two_layers else ()
            return function(x, self.weight, self.bias, *given)

    shaped, fusing, counting = Layer(), Collector(), CompileCounter()
    for backend in (fusing, counting):
        torch._dynamo.reset()
        compiled = torch.compile(shaped, backend=backend, dynamic=dynamic)
        for batch in (2, 3, 5, 8, 11):
            x, r = draw(3 * batch, 32), draw(batch, 3, 16)
            torch.testing.assert_close(compiled(x, r), shaped(x, r), rtol=1e-4, atol=1e-4)
    assert len(fusing.graphs) == counting.frame_count
    assert len(fusing.programs) == len(fusing.graphs) * (2 if function is two_layers else 1)


WRITTEN_OUT: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "erf over a root": ("gelu(z)", lambda z, r: 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))),
    "erf times a number": ("gelu(z)", lambda z, r: z * 0.5 * (1.0 + torch.erf(z * 0.70710678))),
    "tanh and a power": (
        "(gelu_tanh((z + r0)) * r0)",
        lambda z, r: 0.5 * (z + r) * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + r + 0.044715 * (z + r) ** 3))) * r,
    ),
    "tanh and a square": (
        "gelu_tanh(z)",
        lambda z, r: 0.5 * z * (1 + torch.tanh(z * 0.7978845608 * (1 + 0.044715 * z * z))),
    ),
    "sigmoid": ("(silu(z) + r0)", lambda z, r: z * torch.sigmoid(z) + r),
    "exp": ("silu(z)", lambda z, r: z / (1 + torch.exp(-z))),
    "softplus": ("mish(z)", lambda z, r: z * torch.tanh(F.softplus(z))),
    "another sigmoid": ("(z * sigmoid((z * 1.702)))", lambda z, r: z * torch.sigmoid(1.702 * z)),
    "another value's sigmoid": ("(z * sigmoid(r0))", lambda z, r: z * torch.sigmoid(r)),
    "a wrong digit": (
        "((z * 0.5) * (erf((z * 0.7072)) + 1))",
        lambda z, r: z * 0.5 * (1.0 + torch.erf(z * 0.7072)),
    ),
    "rounded in between": (
        "(z * copy(bfloat16(sigmoid(z))))",
        lambda z, r: z * torch.sigmoid(z).bfloat16().float(),
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_activations_that_are_written_out(name: str) -> None:
    expected, function = WRITTEN_OUT[name]
    expression = trace(function, (ValueType(torch.float32), ValueType(torch.float32)))
    assert repr(recognise(expression)) == expected


@pytest.mark.parametrize("name", [op.name for op in op_table().ops if op.arity == 1])
def test_ops_themselves_are_not_rewritten(name: str) -> None:
    op = op_table().op(name)
    value = apply(op, (input(ValueType(torch.float32)),), tuple(1.0 for _ in op.parameters), ValueType(torch.float32))
    expression = value * 2 + value
    assert recognise(expression) is expression
