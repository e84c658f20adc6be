"""torch.compile(fullgraph=True), torch.library.opcheck, torch.export and sizes that change: on the CPU, both paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_nn import MODELS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cutfuse
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere

# Raised by PyTorch itself: when Dynamo meets an autograd.Function, and when Inductor or export is imported.
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
]

X, W, B, R = (
    torch.randn(shape, generator=torch.Generator().manual_seed(k))
    for k, shape in enumerate(((5, 7), (6, 7), (6,), (5, 6)))
)
C = R[:, :1].abs() + 0.5

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: cutfuse.linear(
        x, w, b, epilogue=lambda z, r, s: torch.relu(z) * s + r, operands=(R, 0.5)
    ),
    "linear_of_3d": lambda x, w, b: cutfuse.linear(x.unsqueeze(1), w, b, epilogue=F.silu),
    "linear_sum": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=torch.sigmoid, reduce="sum"),
    "linear_logsumexp": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=F.gelu, reduce="logsumexp", keepdim=True),
    "linear_amax": lambda x, w, b: cutfuse.linear(x, w, b, reduce="amax", out_dtype=torch.float64),
    "matrix_vector": lambda x, w, b: cutfuse.linear(x, w, b, epilogue=lambda z: z / 2 * 1.5, reduce="sum"),
    "matrix_vector_with_operands": lambda x, w, b: cutfuse.linear(
        x, w, b, epilogue=lambda z, c, r: c * z * r + r / c, operands=(C, B), reduce="mean"
    ),
    "pointwise": lambda x, w, b: cutfuse.pointwise(lambda z, r: torch.where(z > r, z, 0.1), x, 0.2),
    "sigmoid": lambda x, w, b: cutfuse.sigmoid(x.t()),
    "reduce": lambda x, w, b: cutfuse.reduce(x, 0, "amax"),
    "reduce_with_prologue": lambda x, w, b: cutfuse.reduce(x, (0, 1), "mean", prologue=lambda z: z * z),
    "sum": lambda x, w, b: cutfuse.sum(x, 1, keepdim=True),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in CALLS), ("linear_sum", "inductor"), ("matrix_vector", "inductor")],
)
def test_compiles_to_one_graph(name: str, backend: str, path: str) -> None:
    """Values and gradients of the compiled call are those of the call."""
    call = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X, W, B), call(X, W, B))
    inputs = [t.clone().requires_grad_() for t in (X, W, B)]
    kwargs = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(call(*inputs).square().sum(), inputs, **kwargs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).square().sum(), inputs, **kwargs), expected)


@pytest.mark.parametrize("name", MODELS)
def test_drop_ins_compile(name: str, path: str) -> None:
    arguments, shape, _ = MODELS[name]
    module, x = getattr(cutfuse.nn, name)(*arguments), torch.randn(shape)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def test_reductions_of_integers_compile() -> None:
    x = torch.arange(12).view(3, 4)
    for reduce in (lambda x: cutfuse.sum(x, 1), lambda x: cutfuse.reduce(x, 0, "amax"), cutfuse.nn.SumReduction(1)):
        assert torch.equal(torch.compile(reduce, fullgraph=True, backend="eager")(x), reduce(x))


# Epilogues and operands that are refused, and a part of the message.
REFUSED: dict[str, tuple[Callable[..., object] | None, tuple, str]] = {
    "function": (lambda z: torch.cumsum(z, 0), (), "torch.cumsum is not in the epilogue language"),
    "method": (lambda z: z.cumsum(0), (), "Tensor.cumsum is not in the epilogue language"),
    "in place": (lambda z: z.add_(1), (), "add_ works in place"),
    "branch": (lambda z: z if z > 0 else -z, (), "branches on data"),
    "length": (lambda z: z * len(z), (), "takes the length of a symbolic value"),
    "shift": (lambda z: z << 1, (), "the operator << is not in the epilogue language"),
    "captured tensor": (lambda z: z + B, (), "captures a tensor"),
    "constant": (lambda z: 1.0, (), "does not depend on its arguments"),
    "too long": (lambda z: sum((torch.sin(z * k) for k in range(40)), z), (), "a program has at most 32"),
    "class of modules": (nn.ReLU, (), "is the class torch.nn.ReLU; pass an instance"),
    "literal's value": (F.gelu, (B,), "approximate has to be one of 'none', 'tanh', got r0"),
    "no epilogue": (None, (B,), "1 operand, but no epilogue that takes any"),
    "prebuilt epilogue": (cutfuse.Epilogue(torch.add), (), "takes 1 operand, and is given 0"),
    "prebuilt epilogue's numbers": (cutfuse.Epilogue(torch.add), (1.0, 2.0), "takes 1 operand, and is given 2"),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_an_epilogue_error_reaches_the_user_as_itself(name: str, fullgraph: bool) -> None:
    epilogue, operands, message = REFUSED[name]
    if name == "length" and torch.__version__.startswith("2.8."):
        pytest.skip("Dynamo of torch 2.8 cannot trace len() of any subclass of Tensor with __torch_function__")

    def call(x: Tensor) -> Tensor:
        return cutfuse.linear(x, W, B, epilogue=epilogue, operands=operands)

    error: type[Exception] = cutfuse.EpilogueError
    if name == "branch" and fullgraph:  # Dynamo takes the branch for its own affair, and says what it is
        error, message = torch._dynamo.exc.Unsupported, "Data-dependent branching"
    with pytest.raises(error, match=message):
        torch.compile(call, fullgraph=fullgraph, backend="eager")(X)


def test_what_an_epilogue_captures_is_guarded(path: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return cutfuse.linear(x, W, B, epilogue=lambda z: torch.tanh(z) * self.scale)

    module = Scaled()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for scale in (2.0, 3.0, 4.5, 2.0):
        module.scale = scale
        torch.testing.assert_close(compiled(X), torch.tanh(F.linear(X, W, B)) * scale)


def test_changing_numbers(path: str) -> None:
    for epilogue in (lambda z, s, r: torch.relu(z) * s + r, cutfuse.Epilogue(lambda z, s, r: torch.relu(z) * s + r)):

        def call(x: Tensor, s: float, epilogue=epilogue) -> Tensor:
            return cutfuse.linear(x, W, B, epilogue=epilogue, operands=(s, R))

        compiled = torch.compile(call, fullgraph=True, backend="eager")
        for scale in (0.5, 2.0, 3.5, 1):
            torch.testing.assert_close(compiled(X, scale), torch.relu(F.linear(X, W, B)) * scale + R)


def test_a_long_epilogue_is_given_up_at_the_limit() -> None:
    """Dynamo takes 10 ms for an operation, so 3000 of them would be half a minute."""

    def squarings(z: Tensor) -> Tensor:
        for _ in range(3000):
            z = z * z
        return z

    call = torch.compile(lambda x: cutfuse.pointwise(squarings, x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="takes 33 instructions, and a program has at most 32"):
        call(X)


PROGRAM = "operands=1; tanh z; mul prev r0"
LAYERS = [(X, W, B, [R], PROGRAM, torch.float32), (X, W, None, [B[None]], PROGRAM, torch.bfloat16)]
OPERATOR_INPUTS = {
    "linear": [
        *((*given, "none", out_dtype) for *given, out_dtype in LAYERS),
        (X, W, B, [R], PROGRAM, "sum", torch.float32),
        (X, W, None, [C], PROGRAM, "amax", torch.half),
    ],
    "linear_with_pre_activation": LAYERS,
    "layer": [
        (X.unsqueeze(1), W, B, [R.unsqueeze(1)], PROGRAM, "none", False, torch.float32),
        (X, W, None, [C], PROGRAM, "logsumexp", True, torch.bfloat16),
    ],
    "layer_cross_entropy": [
        (X, W, B, torch.tensor([0, 5, -100, 2, 3]), -100, "mean", 0.0, 0.0, 1.0, torch.float32),
        (X.unsqueeze(1), W, None, torch.tensor([0, 5, 1, 2, 3]), 2, "none", 0.1, 5.0, 0.5, torch.float32),
    ],
    "joined": [(X, [W, W + 1], [B, None]), (X, [W], [None])],
    "product": [(X, W, ""), (X.t(), R.t(), "ieee")],
    "pointwise": [
        (X, [X], PROGRAM, torch.float32),
        (X.t(), [C[:, 0]], PROGRAM, torch.bfloat16),
        (X[:, ::2], [torch.ones(())], PROGRAM, torch.float32),
        (X, [], "operands=0", torch.float32),
    ],
    "reduce": [
        (X, [], "operands=0", "sum", [1], torch.float32),
        (R.reshape(5, 2, 3), [torch.ones(3)], PROGRAM, "logsumexp", [0, 2], torch.bfloat16),
        (R.reshape(5, 2, 3).permute(2, 0, 1), [], "operands=0", "mean", [1], torch.float32),
    ],
    "pointwise_backward": [
        (R, R, [B], PROGRAM, "none", None, [0, 1], True),
        (C, R.t().contiguous().t(), [C], PROGRAM, "logsumexp", C, [1, 0], False),
        (C, R, [C], PROGRAM, "amax", (torch.tanh(R) * C).amax(1, keepdim=True), [], True),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, arguments) for name, several in OPERATOR_INPUTS.items() for arguments in several]
)
def test_opcheck(name: str, arguments: tuple) -> None:
    torch.library.opcheck(getattr(schema, name), arguments)


def test_every_operator_is_checked() -> None:
    registered = {
        name for name in dir(torch.ops.cutfuse) if isinstance(getattr(schema, name, None), torch._ops.OpOverload)
    }
    assert set(OPERATOR_INPUTS) == registered == {schema_text.partition("(")[0] for schema_text in schema.SCHEMAS}


# A batch size that changes makes no graph of its own: no more of them than PyTorch's own operations make.

BATCHES = (4, 5, 6, 9)  # 6 is the width of the result too

# What an operand's shape is for [batch, 3, 6]; -1 is the batch.
OPERANDS = {
    "full": (-1, 3, 6),
    "column": (-1, 3, 1),
    "outer": (-1, 1, 6),
    "outer_column": (-1, 1, 1),
    "inner": (1, 3, 6),
    "matrix": (3, 6),
    "inner_column": (3, 1),
    "row": (6,),
    "scalar": (),
}

# A call of x of [batch, 3, width] and an operand, and the width.
Call = Callable[[Tensor, Tensor], Tensor]
BATCHED: dict[str, tuple[Call, int]] = {
    "linear": (lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,)), 7),
    "linear_logsumexp": (
        lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: torch.tanh(z) * r, operands=(r,), reduce="logsumexp"),
        7,
    ),
    "matrix_vector": (
        lambda x, r: cutfuse.linear(x, W, epilogue=lambda z, r: z * 2 + r, operands=(r,), reduce="mean", keepdim=True),
        7,
    ),
    "pointwise": (lambda x, r: cutfuse.pointwise(lambda z, r: torch.sigmoid(z) * r, x, r), 6),
    "reduce_batch": (
        lambda x, r: cutfuse.reduce(x, (0, 2), "sum", prologue=lambda z, r: torch.sigmoid(z) * r, operands=(r,)),
        6,
    ),
    "reduce_rows": (
        lambda x, r: cutfuse.reduce(x, 2, "amax", prologue=lambda z, r: torch.sigmoid(z) * r, operands=(r,)),
        6,
    ),
}


class Model(nn.Module):
    """torch.export takes modules only."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.call(x, r)


def inputs(operand: str, batch: int, width: int) -> tuple[Tensor, Tensor]:
    shape = [batch if size == -1 else size for size in OPERANDS[operand]]
    return torch.randn(batch, 3, width), torch.randn(shape)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", BATCHED)
def test_an_exported_batch_stays_a_symbol(name: str, operand: str, path: str) -> None:
    """Under fake tensors alone, without Dynamo; export raises where a size declared dynamic becomes a number."""
    call, width = BATCHED[name]
    batch = torch.export.Dim("batch")
    dynamic = {"x": {0: batch}, "r": {0: batch} if OPERANDS[operand][:1] == (-1,) else {}}
    exported = torch.export.export(Model(call), inputs(operand, 5, width), dynamic_shapes=dynamic, strict=False)
    for size in BATCHES:
        x, r = inputs(operand, size, width)
        torch.testing.assert_close(exported.module()(x, r), call(x, r))


@pytest.mark.parametrize(
    ("name", "operand", "mark"),
    [
        *[(name, "full", mark) for name in BATCHED for mark in (False, True)],
        *[(name, "row", False) for name in ("linear", "matrix_vector")],
    ],
)
def test_batches_make_as_many_graphs_as_pytorchs(name: str, operand: str, mark: bool, path: str) -> None:
    """One for all sizes that are marked, and otherwise a second one, of a size that is a symbol."""
    call, width = BATCHED[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for size in BATCHES:
        tensors = [t.requires_grad_() for t in inputs(operand, size, width)]
        for t in tensors if mark else ():
            if t.dim() == 3 and t.shape[0] == size:
                torch._dynamo.mark_dynamic(t, 0)
        y = compiled(*tensors)
        torch.testing.assert_close(y, call(*tensors))
        y.sum().backward()
    assert counter.frame_count == (1 if mark else 2)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("operand", ["full", "column", "inner", "row"])
@pytest.mark.parametrize("name", BATCHED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_number_of_rows_that_depends_on_data(name: str, operand: str, exported: bool) -> None:
    """Whether such a number is 1 is unknown, and asking for it ends a graph."""
    call, width = BATCHED[name]
    x, r = inputs(operand, 9, width)
    masks = [torch.arange(9) < count for count in (4, 1, 7)]

    class Selecting(Model):
        def forward(self, x: Tensor, r: Tensor, mask: Tensor) -> Tensor:
            rows = mask.nonzero().squeeze(1)
            return self.call(x[rows], r[rows] if OPERANDS[operand][:1] == (-1,) else r)

    with use_operators_everywhere():
        if exported:
            compiled = torch.export.export(Selecting(call), (x, r, masks[0]), strict=False).module()
        else:
            compiled = torch.compile(Selecting(call), backend="aot_eager", fullgraph=True)
        found = [compiled(x, r, mask) for mask in masks]
    torch.testing.assert_close(found, [Selecting(call)(x, r, mask) for mask in masks])
