"""Layers that PyTorch itself computes: which they are, and that they give what a kernel would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from emulated_device import READERS, direct_calls, emulated_device, paused
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import cutfuse
from cutfuse import native, pytorch_operation
from cutfuse.epilogue import Epilogue, Instruction, Program, evaluate, op_table
from cutfuse.epilogue.program import rounds_once
from cutfuse.epilogue.table import Op
from cutfuse.layer import linear_plan, planner, training, training_step
from cutfuse.layer.planner import LinearArguments

GENERATOR = torch.Generator().manual_seed(0)
H200 = (9, 0, 132)
A100 = (8, 0, 108)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).bfloat16()


def program_of(op: Op, *arguments: str | float) -> Program:
    parameters = tuple(default for _, default in op.parameters)
    return Program((Instruction(op.name, arguments, parameters),), op.arity - 1)


@pytest.mark.parametrize("name", [op.name for op in op_table().ops if rounds_once(op)])
def test_an_operation_in_16_bits_is_the_program_rounded_once(name: str) -> None:
    op = op_table().op(name)
    program = program_of(op, *("z", "r0")[: op.arity])
    found = program.operation
    assert found is not None
    for dtype in (torch.bfloat16, torch.float16):
        z, *operands = (values(4096).to(dtype) for _ in range(op.arity))
        expected = evaluate(program, z.float(), [t.float() for t in operands]).to(dtype)
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(found(z, operands), expected, rtol=step, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize(
    ("function", "count", "expected"),
    [
        (lambda z: 1 - z, 0, lambda z: 1 - z),
        (lambda z: z * 3, 0, lambda z: z * 3),
        (lambda z, r: r - z, 1, lambda z, r: r - z),
        (lambda z: F.gelu(z, approximate="tanh"), 0, lambda z: F.gelu(z, approximate="tanh")),
        (lambda z: F.leaky_relu(z, 0.3), 0, lambda z: F.leaky_relu(z, 0.3)),
        (lambda z, r: torch.mul(z, r), 1, lambda z, r: r * z),
    ],
)
def test_numbers_and_order(function: Callable[..., Tensor], count: int, expected: Callable[..., Tensor]) -> None:
    found = Epilogue(function, count).program.operation
    assert found is not None
    tensors = [values(8) for _ in range(1 + count)]
    assert torch.equal(found(tensors[0], tensors[1:]), expected(*tensors))


@pytest.mark.parametrize(
    "text",
    [
        "operands=0",
        "operands=0; tanh z; mul prev 2.0",
        "operands=0; gt z 0.0",
        "operands=2; mul r0 r1",
        "operands=0; maximum z 0.5",
        "operands=1; where z r0 0.0",
        "operands=0; half z",
        "operands=0; tanh z",
        "operands=1; div r0 z",
        "operands=0; div z 3.0",
        "operands=0; div 3.0 z",
    ],
)
def test_other_programs_are_no_operation(text: str) -> None:
    assert Program.parse(text).operation is None


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (training_step, planner, linear_plan):
        monkeypatch.setattr(module, "device_facts", lambda device: H200)
    training_step._waits.cache_clear()
    yield
    training_step._waits.cache_clear()


def is_found(m: int, n: int, k: int, function: Callable[..., Tensor], **options: object) -> bool:
    dtype = options.get("dtype", torch.bfloat16)
    x = torch.empty(m, k, dtype=dtype, device="meta", requires_grad=options.get("needs_grad", True))
    weight = torch.empty(n, k, dtype=dtype, device="meta")
    operands = options.get("operands", ())
    program = Epilogue(function, len(operands)).program
    reduction, out_dtype = options.get("reduction", "none"), options.get("out_dtype", dtype)
    arguments = LinearArguments(x, weight, None, operands, program, reduction, out_dtype)
    return pytorch_operation.find_pytorch_operation(arguments, x, operands) is not None


def test_which_layers_pytorch_trains() -> None:
    wide = torch.empty(8, 8, device="meta")
    residual = torch.empty(197, 1536, dtype=torch.bfloat16, device="meta")
    for dtype in (torch.bfloat16, torch.float16):
        assert not is_found(197, 1536, 384, F.gelu, dtype=dtype)  # kernels of ours compute all three products
        assert is_found(197, 1536, 385, F.gelu, dtype=dtype)  # no kernel takes rows of 385
    assert not is_found(197, 1536, 384, torch.add, operands=(residual,))
    assert not is_found(197, 1536, 384, torch.mul, operands=(residual,))
    for function in (lambda z: 1 - z, lambda z: z * 2.0, lambda z: z - 1):  # of which PyTorch keeps nothing
        assert is_found(197, 1536, 384, function)
    assert is_found(197, 1536, 384, torch.sub, operands=(residual,))

    assert not is_found(12608, 3072, 768, F.gelu)
    assert is_found(12608, 3072, 768, torch.add, operands=(wide.bfloat16(),))
    assert not is_found(12608, 3072, 768, torch.mul, operands=(wide.bfloat16(),))
    assert not is_found(8, 8, 8, lambda z: torch.tanh(z) * 2)
    for k in (384, 385):
        assert not is_found(197, 1536, k, F.gelu, dtype=torch.float32)
    assert not is_found(4096, 3072, 768, F.gelu, dtype=torch.float32)
    assert not is_found(8, 8, 8, F.gelu, out_dtype=torch.float32)
    assert not is_found(8, 8, 8, F.gelu, reduction="sum")
    assert not is_found(8, 8, 8, torch.add, operands=(wide,))


def test_pytorch_trains_what_no_direct_call_does() -> None:
    x = torch.empty(1, 5, 384, dtype=torch.bfloat16, device="meta", requires_grad=True)
    flat, weight = x.view(5, 384), torch.empty(1536, 384, dtype=torch.bfloat16, device="meta")
    program = Epilogue(torch.add, 1).program
    for shape, is_pytorchs in (((1, 5, 1536), False), ((5, 1536), True)):  # the second one's gradient has to be shaped
        operand = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        given = LinearArguments(flat, weight, None, (operand.view(5, 1536),), program, "none", torch.bfloat16)
        assert (pytorch_operation.find_pytorch_operation(given, x, (operand,)) is not None) == is_pytorchs
    turned, bias = x.expand(3, 5, 384).transpose(0, 1), torch.empty(1536, dtype=torch.bfloat16, device="meta")
    rows = turned.reshape(15, 384)
    given = LinearArguments(rows, weight, bias, (), Epilogue(F.gelu).program, "none", torch.bfloat16)
    assert pytorch_operation.find_pytorch_operation(given, turned, ()) is not None


@pytest.mark.parametrize(("sizes", "is_pytorchs"), [((13, 96, 64), True), ((2048, 4096, 4096), False)])
def test_forced_fp32_is_pytorchs_where_no_product_is_over_planes(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], is_pytorchs: bool
) -> None:
    residual = torch.empty(1, 1, device="meta", requires_grad=True)  # whose gradient has to be summed
    assert is_found(*sizes, torch.add, dtype=torch.float32, operands=(residual,))
    monkeypatch.setattr(training, "is_forced", lambda x: True)
    with cutfuse.precision("guarded"):
        assert is_found(*sizes, torch.add, dtype=torch.float32, operands=(residual,)) == is_pytorchs


def test_which_layers_pytorch_computes_without_a_gradient() -> None:
    residual = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert is_found(96, 14336, 5120, F.gelu, needs_grad=False)
    assert is_found(4096, 4096, 512, torch.mul, needs_grad=False, operands=(residual,))
    assert not is_found(96, 14336, 5120, lambda z: torch.tanh(z) * 2, needs_grad=False)
    assert not is_found(197, 1536, 384, F.gelu, needs_grad=False)  # fused
    assert not is_found(1024, 8192, 8192, torch.relu, needs_grad=False)
    assert not is_found(96, 14336, 5120, F.gelu, needs_grad=False, dtype=torch.float32)


@pytest.fixture(params=READERS)
def emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    with emulated_device(request.param):
        yield


LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "operand of rows in another order": lambda: (values(2, 3, 16), values(8, 3, 2).permute(2, 1, 0)),
    "operand of more dimensions": lambda: (values(3, 16), values(1, 3, 8)),
    "operand of more dimensions than a vector": lambda: (values(16), values(1, 8)),
    "operand of some leading dimensions": lambda: (values(2, 3, 16), values(3, 1)),
    "x of rows in another order": lambda: (values(3, 2, 16).transpose(0, 1), values(8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("function", [torch.mul, lambda z, r: r - z], ids=["mul", "r - z"])
def test_the_first_call_is_as_the_others(emulated: None, name: str, function: Callable[..., Tensor]) -> None:
    x, r = (tensor.requires_grad_() for tensor in LAYOUTS[name]())
    weight, bias = values(8, 16).requires_grad_(), values(8).requires_grad_()
    runs = []
    for _ in range(2):
        y = cutfuse.linear(x, weight, bias, epilogue=function, operands=(r,))
        assert y.shape == (*x.shape[:-1], 8)
        assert y.is_contiguous()
        grad = torch.linspace(0, 1, y.numel()).bfloat16().reshape(y.shape)
        runs.append((y, *torch.autograd.grad(y, (x, weight, bias, r), grad)))
    for first, later in zip(*runs, strict=True):
        torch.testing.assert_close(later, first, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_without_a_gradient(monkeypatch: pytest.MonkeyPatch, emulated: None, name: str) -> None:
    """On a GPU without fused kernels, where all are a product of cuBLAS's and what follows it."""
    for module in (planner, linear_plan):
        monkeypatch.setattr(module, "device_facts", lambda device: A100)
    x, r = LAYOUTS[name]()
    weight, bias = values(8, 16), values(8)
    expected = F.linear(x, weight, bias) * r
    for is_direct in (False, True):
        before = direct_calls()
        y = cutfuse.linear(x, weight, bias, epilogue=lambda z, r: z * r, operands=(r,))
        assert direct_calls() == before + is_direct
        assert y.is_contiguous()
        torch.testing.assert_close(y, expected.reshape(*x.shape[:-1], 8), rtol=0, atol=0)


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_rows_that_are_far_apart_have_one_rounding(
    monkeypatch: pytest.MonkeyPatch, emulated: None, needs_gradient: bool
) -> None:
    """PyTorch adds the bias of such an x of three dimensions to a rounded product; cutfuse's first call does not."""
    for module in (planner, linear_plan):
        monkeypatch.setattr(module, "device_facts", lambda device: A100)
    x = values(4, 10, 96).chunk(3, -1)[0]
    weight, bias = values(16, 32).requires_grad_(needs_gradient), values(16) * 30
    results = [cutfuse.linear(x, weight, bias, epilogue=lambda z: torch.tanh(z / 30) * 2) for _ in range(3)]
    for later in results[1:]:
        assert torch.equal(results[0], later)


def test_sizes_that_symbols_stand_for(emulated: None) -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, epilogue=F.gelu)

    weight = values(8, 16).requires_grad_()
    traced = make_fx(layer, tracing_mode="symbolic")(values(3, 16), weight)
    with paused():
        for rows in (3, 5):
            x = values(rows, 16)
            torch.testing.assert_close(traced(x, weight), layer(x, weight), rtol=1e-2, atol=1e-2)


def test_not_under_autocast_which_casts_an_operation() -> None:
    with torch.autocast("cpu"):
        x, weight = (torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        program = Epilogue(F.gelu, 0).program
        arguments = LinearArguments(x, weight, None, (), program, "none", torch.bfloat16)
        assert pytorch_operation.find_pytorch_operation(arguments, x, ()) is None


@pytest.mark.parametrize(
    ("multiprocessors", "sizes", "dtype", "as_tf32", "waits"),
    [
        (132, (197, 1536, 384), "bfloat16", False, True),
        (132, (4096, 8192, 4096), "bfloat16", False, False),
        (32, (1576, 3072, 768), "bfloat16", False, False),
        (132, (2366, 2304, 1152), "bfloat16", False, True),  # 104 us by prediction
        (132, (197, 1536, 384), "float32", False, True),
        (132, (350, 1536, 768), "float32", False, False),  # between 100 and 130 us
        (132, (1024, 1536, 768), "float32", False, False),
        (132, (1024, 1536, 768), "float32", True, True),
    ],
)
def test_when_a_training_step_waits_for_the_host(
    multiprocessors: int, sizes: tuple[int, int, int], dtype: str, as_tf32: bool, waits: bool
) -> None:
    code = native.core.dtypes()[dtype]
    assert native.core.training_waits_for_host(sizes, code, multiprocessors, as_tf32) == waits


def test_what_a_direct_call_refuses() -> None:
    for arguments in ([5], [-1], [0] * 9):
        with pytest.raises(ValueError, match="operation_call"):
            native.core.operation_call(torch.relu, arguments)


def test_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutfuse.arguments, "why_composed", lambda x, arithmetic: "")
    x, weight = values(8, 16).requires_grad_(), values(4, 16)
    assert "less host time to train a layer with one operation" in str(cutfuse.explain(x, weight, epilogue=F.gelu))
    x, weight = (torch.empty(size, 8192, dtype=torch.bfloat16) for size in (256, 4096))
    with_predictions = (
        r"PyTorch's own kernel of this one operation .*\n.*cuBLAS and one more kernel would take [\d.]+ us"
    )
    assert re.search(with_predictions, str(cutfuse.explain(x, weight, epilogue=F.gelu)))
