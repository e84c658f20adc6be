"""`rounding="eager"`, without a GPU: programs that round as PyTorch does, and who computes a layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import emulated_device as emulation
import pytest
import torch
import torch.nn.functional as F
from compiled_epilogues import FakeCompiler, compiled_by
from emulated_device import EmulatedLaunches, core, direct_calls, directly
from emulated_device import launches as launches
from torch import Tensor

import cutfuse
from cutfuse.epilogue import EpilogueError, Program, evaluate, op_table
from cutfuse.epilogue.eager import without_last_rounding
from cutfuse.epilogue.errors import OperandCountError
from cutfuse.epilogue.lower import lower
from cutfuse.epilogue.resolve import resolve
from cutfuse.epilogue.types import types_of
from cutfuse.layer import eager, specialize
from cutfuse.layer.call_plans import plan_pointwise_call
from cutfuse.linear import linear_once
from cutfuse.rounding import process

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _nothing_compared() -> None:
    eager._same_bits.clear()


def program_of(function: Function, *tensors: Tensor) -> Program:
    """What kernels have compiled in that store the type of the function's value."""
    first, *others = types_of(*tensors)
    found = resolve(function, len(others), (first._replace(rounds=True), *others))
    assert found.dtype is not None
    return lower(without_last_rounding(found.expression, found.dtype), len(others), is_eager=True)


Z, R, WIDE = torch.randn(33, 16).bfloat16(), torch.randn(33, 16).bfloat16(), torch.randn(16)

PROGRAMS: list[tuple[Function, Sequence[Tensor], str]] = [
    (F.gelu, (Z,), "bfloat16 z; gelu prev"),
    (lambda z: F.gelu(z) + 1, (Z,), "bfloat16 z; gelu prev; bfloat16 prev; add prev 1.0"),
    (lambda z: z * 2 + 1, (Z,), "bfloat16 z; mul prev 2.0; bfloat16 prev; add prev 1.0"),
    # What is chosen of values of the type is one, and is not rounded again; a number that the type lacks is.
    (lambda z: -torch.relu(z) + 1, (Z,), "bfloat16 z; relu prev; neg prev; add prev 1.0"),
    (lambda z: F.hardtanh(z, -0.3, 1) + 1, (Z,), "bfloat16 z; hardtanh prev -0.3 1.0; bfloat16 prev; add prev 1.0"),
    (lambda z: torch.where(z > 0, z, 0.1), (Z,), "bfloat16 z -> s0; gt prev 0.0; where prev s0 0.1"),
    # PyTorch's kernels multiply by the reciprocal of a number.
    (lambda z: z / 3, (Z,), "bfloat16 z; mul prev 0.3333333432674408"),
    (lambda z: 3 / z, (Z,), "bfloat16 z; reciprocal prev; bfloat16 prev; mul prev 3.0"),
    # Functions that PyTorch makes of others round in each.
    (F.tanhshrink, (Z,), "bfloat16 z -> s0; tanh prev; bfloat16 prev; sub s0 prev"),
    (lambda z: z**3, (Z,), "bfloat16 z -> s0; square prev; bfloat16 prev; mul prev s0"),
    (lambda z: torch.pow(z, exponent=1.5, out=None), (Z,), "bfloat16 z; pow prev 1.5"),
    (lambda z: torch.round(z), (Z,), "bfloat16 z; round prev"),
    # A copy keeps a product in fp32 and a sum from being one multiply-add.
    (lambda z: z.float() * 0.5 + 1, (Z,), "bfloat16 z; mul prev 0.5; float prev; add prev 1.0"),
    (lambda z, r: z * r + 1, (Z, WIDE), "bfloat16 z; mul prev r0; float prev; add prev 1.0"),
    (lambda z: z.half() + 1, (Z,), "bfloat16 z; half prev; add prev 1.0"),
    (lambda z: z.half().sigmoid(), (Z.half(),), "half z; sigmoid prev"),
    (lambda z: F.dropout(z, training=False) + 1, (Z,), "bfloat16 z; add prev 1.0"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "tensors", "expected"), PROGRAMS)
def test_values_are_rounded_where_pytorch_rounds(function: Function, tensors: Sequence[Tensor], expected: str) -> None:
    program = program_of(function, *tensors)
    assert program.text == f"operands={len(tensors) - 1} eager; {expected}"


EXACT: dict[str, tuple[Function, Sequence[Tensor]]] = {
    "sums": (lambda z: z * 2.7 + 0.25 - z, (Z,)),
    "gate": (lambda z, r: torch.relu(z) * r + 0.7 * z, (Z, R)),
    "mask": (lambda z, r: torch.where(z > r, z * r, r - z) * 1.7, (Z, R)),
    "wide": (lambda z, r: (z * 1.1 + r) * r + 0.1, (Z, WIDE)),
    "casts": (lambda z: (z.float() * 1.1 + 0.1).bfloat16() * 1.1 + z, (Z,)),
    "clamp": (lambda z: torch.clamp(z, -0.3, 0.7) * 1.1, (Z,)),
    "half": (lambda z: z * 1.1 - z * z * 0.3, (Z.half(),)),
    "leaky": (lambda z: F.leaky_relu(z, 0.3) + z, (Z,)),
    "bounds": (lambda z, r: torch.maximum(z * 1.1, r) - torch.abs(z * r), (Z, R)),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_program_of_exact_ops_has_pytorchs_bits(name: str) -> None:
    function, (z, *operands) = EXACT[name]
    program, expected = program_of(function, z, *operands), function(z, *operands)
    assert not program.native.has_eager_formulas
    y = emulation.evaluate(program.native, z.float(), [t.float() for t in operands])
    assert torch.equal(y.to(expected.dtype), expected)
    plain = resolve(function, len(operands), types_of(z, *operands)).program
    once = evaluate(plain, z.float(), operands).to(expected.dtype)
    assert name in ("clamp", "wide", "casts") or not torch.equal(once, expected), "rounding once gives other bits"


REFUSED: list[tuple[Function, Sequence[Tensor], str]] = [
    (F.softshrink, (Z,), "it is not known where PyTorch rounds in it"),
    (torch.addcmul, (Z, R, R), "it is not known where"),
    (lambda z, r: torch.add(z, r, alpha=2), (Z, R), "PyTorch rounds once behind the product and the sum"),
    (lambda z, r: torch.lerp(z, r, 0.3), (Z, R), "it is not known where"),
    (torch.fmax, (Z, R), "it is not known where"),  # of -0 and 0 PyTorch's kernel gives 0
    (torch.fmin, (Z, R), "it is not known where"),
    (lambda z: z**-2, (Z,), "it is not known where"),
    (lambda z: 2**z, (Z,), "it is not known where"),
    (lambda z: torch.round(z, decimals=1), (Z,), "it is not known where"),
    (lambda z: torch.div(z, 3, rounding_mode="floor"), (Z,), "it is not known where"),
    (lambda z: z > 0.1, (Z,), "PyTorch rounds 0.1 to the type of the values"),
    (lambda z: torch.logit(z), (Z,), "the formula of PyTorch's kernels is not known"),
    (lambda z: z.float().sigmoid(), (Z,), "in float32 are not compared"),
    (lambda z, r: z * r, (Z, torch.tensor(0.1)), "a tensor without dimensions"),
]


@pytest.mark.parametrize(("function", "tensors", "reason"), REFUSED)
def test_what_is_not_known_is_refused(function: Function, tensors: Sequence[Tensor], reason: str) -> None:
    with pytest.raises(EpilogueError, match=reason):
        program_of(function, *tensors)
    assert resolve(function, len(tensors) - 1, types_of(*tensors)).program.instructions, "once it is not"


def test_no_interpreter_runs_pytorchs_formulas(launches: EmulatedLaunches) -> None:
    program = program_of(F.gelu, Z)
    assert Program.parse(program.text) == program
    assert not program.native.is_same(Program(program.instructions, 0).native)
    with pytest.raises(ValueError, match="PyTorch's own formulas"):
        emulation.evaluate(program.native, Z.float(), [])
    planned = plan_pointwise_call(Z, [], program, Z)
    assert planned is not None
    with pytest.raises(RuntimeError, match="no kernel interprets a program with PyTorch's own formulas"):
        planned.run([Z], 1)
    assert not launches.launches


def test_a_single_op_by_pytorchs_formula_is_no_chain_of_the_kernels() -> None:
    text = "operands=0{}; gelu prev"
    assert not Program.parse(text.format("")).native.is_interpreted
    assert Program.parse(text.format(" eager")).native.is_interpreted


def layer(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = torch.randn(24, 64), torch.randn(32, 64) / 8, torch.randn(32), torch.randn(24, 32)
    return tuple(t.to(dtype) for t in tensors)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", [None, "sum", "logsumexp"])
def test_without_a_kernel_pytorch_computes_the_layer(dtype: torch.dtype, reduction: str | None) -> None:
    x, weight, bias, r = layer(dtype)
    tensors = [t.requires_grad_() for t in (x, weight, bias, r)]

    def function(z: Tensor, r: Tensor, scale: Any) -> Tensor:
        return F.gelu(z) * r + scale

    expected = function(F.linear(x, weight, bias), r, 0.1)
    expected = expected if reduction is None else getattr(torch, reduction)(expected, -1, keepdim=True)
    gradients = torch.autograd.grad(expected.sum(), tensors)
    options: dict[str, Any] = {"operands": (r, 0.1), "reduce": reduction, "keepdim": True}
    for epilogue in (function, cutfuse.Epilogue(function, 2)):
        with cutfuse.rounding("eager"):
            found = [
                cutfuse.linear(x, weight, bias, epilogue=epilogue, **options, recompute=again)
                for again in (False, True)
            ]
        found.append(cutfuse.linear(x, weight, bias, epilogue=epilogue, **options, rounding="eager"))
        for y in found:
            assert torch.equal(y, expected)
            own = torch.autograd.grad(y.sum(), tensors)
            assert all(map(torch.equal, own, gradients))


def test_an_epilogue_of_the_operand_alone_has_the_results_shape() -> None:
    x, weight, bias, _ = layer()
    y = cutfuse.linear(
        x, weight, epilogue=lambda z, r: r * 2, operands=(bias,), rounding="eager", out_dtype=torch.float32
    )
    assert torch.equal(y, (bias * 2).expand(24, 32).float())


def test_a_modules_own_rounding_comes_before_that_of_the_context() -> None:
    x, *_ = layer()
    module = cutfuse.nn.FusedLinear(64, 32, epilogue=lambda z: F.gelu(z) * 1.7, dtype=torch.bfloat16, rounding="eager")
    expected = F.gelu(F.linear(x, module.weight, module.bias)) * 1.7
    assert "rounding='eager'" in repr(module)
    assert torch.equal(module(x), expected)
    module.rounding = "once"
    with cutfuse.rounding("eager"):
        assert not torch.equal(module(x), expected)
        module.rounding = None
        assert torch.equal(module(x), expected)
    with pytest.raises(ValueError, match='"eager" or "once", got'):
        module.rounding = "twice"


@pytest.mark.parametrize("choose", [cutfuse.rounding, cutfuse.set_rounding])
@pytest.mark.parametrize("mode", ["", "Eager", True])
def test_other_modes_are_refused(choose: Callable[[Any], object], mode: Any) -> None:
    with pytest.raises(ValueError, match='"eager" or "once", got'):
        choose(mode)
    assert cutfuse.get_rounding() == "once"


def residual(z: Tensor, r: Tensor) -> Tensor:
    return torch.relu(z) * r + 0.3 * z


@pytest.mark.parametrize("has_cublas_bits", [True, False])
def test_a_kernel_multiplies_where_its_product_has_cublas_bits(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch, has_cublas_bits: bool
) -> None:
    monkeypatch.setattr(eager, "_compare", lambda arguments, kernel: has_cublas_bits)
    x, weight, bias, r = layer()
    expected = residual(F.linear(x, weight, bias), r)
    with cutfuse.rounding("eager"):
        y = cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))
        again = directly(lambda: cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,)))
        text = cutfuse.explain(cutfuse.linear, x, weight, bias, epilogue=residual, operands=(r,)).bits
    assert launches.names == ["gemm" if has_cublas_bits else "pointwise"] * 2
    assert ("had the bits" if has_cublas_bits else "did not have") in text
    if not has_cublas_bits:  # the emulated product adds in another order than PyTorch's
        assert torch.equal(y, expected)
    assert torch.equal(again, y)
    once = cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))
    assert not torch.equal(once, y)


def test_pytorch_computes_the_layer_until_its_program_is_compiled(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, _, _ = layer()
    monkeypatch.setattr(eager, "_compare", lambda arguments, kernel: False)
    monkeypatch.setattr(specialize, "why_interpreted", lambda: "")
    monkeypatch.setattr(emulation, "evaluate", lambda program, z, operands: F.gelu(z.bfloat16()).float())
    expected = F.gelu(F.linear(x, weight))
    compiler = FakeCompiler()
    compiler.may_go_on.clear()

    def call() -> Tensor:
        y = cutfuse.linear(x, weight, epilogue=lambda z: F.gelu(z) + 0, rounding="eager")
        assert torch.equal(y, expected)
        return y

    with compiled_by(compiler):
        call()
        call()
        assert not launches.launches
        compiler.may_go_on.set()
        cutfuse.wait(30)
        call()
        assert launches.names == ["pointwise"]
        before = direct_calls()
        call()
        assert direct_calls() == before + 1
    with compiled_by(FakeCompiler(lambda kernel: True), "now"):
        launches.launches.clear()
        with pytest.warns(RuntimeWarning, match="no driver"):
            call()
        call()
        assert not launches.launches


PYTORCHS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "float32": lambda x, w, b, r: cutfuse.linear(x.float(), w.float(), epilogue=residual, operands=(r,)),
    "a reduction": lambda x, w, b, r: cutfuse.linear(x, w, epilogue=residual, operands=(r,), reduce="sum"),
    "a gradient": lambda x, w, b, r: cutfuse.linear(x, w.requires_grad_(), epilogue=residual, operands=(r,)),
    "an unknown function": lambda x, w, b, r: cutfuse.linear(x, w, epilogue=lambda z: F.softshrink(z) + 1),
    "too many operations": lambda x, w, b, r: cutfuse.linear(x, w, epilogue=longest),
    "a mask": lambda x, w, b, r: cutfuse.linear(x, w, epilogue=residual, operands=(r > 0,)),
    "nothing behind it": lambda x, w, b, r: cutfuse.linear(x, w, b),
    "autocast": lambda x, w, b, r: autocast(lambda: cutfuse.linear(x, w, epilogue=residual, operands=(r,))),
    "a captured tensor": lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=lambda z: z * r),
    "a row function": lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=lambda z: z.softmax(-1)),
    "an operand in columns": lambda x, w, b, r: cutfuse.linear(
        x, w, epilogue=residual, operands=(r.t().contiguous().t(),)
    ),
    "a strided batch": lambda x, w, b, r: cutfuse.linear(x.view(4, 6, -1).transpose(0, 1), w, b, epilogue=longest),
}


def autocast(call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call()


def longest(z: Tensor) -> Tensor:
    for k in range(12):
        z = z * (1 + 0.01 * k) + 0.1
    return z


@pytest.mark.parametrize("name", PYTORCHS)
def test_where_no_kernel_has_the_bits_pytorch_computes_the_layer(launches: EmulatedLaunches, name: str) -> None:
    tensors = layer()
    with cutfuse.rounding("eager"):
        first = PYTORCHS[name](*tensors)
        assert torch.equal(PYTORCHS[name](*tensors), first)
    assert not launches.launches
    if name in ("float32", "a gradient"):
        x, w, _, r = tensors
        own = (x.float(), w.float()) if name == "float32" else (x, w)
        assert torch.equal(first, residual(F.linear(*own), r))


def test_an_epilogue_that_is_not_traced_is_explained() -> None:
    x, weight, *_ = layer()
    explained = cutfuse.explain(cutfuse.linear, x, weight, epilogue=lambda z: z.softmax(-1), rounding="eager")
    assert "softmax" in explained.bits


REFUSED_CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], type[Exception], str]] = {
    "integers": (lambda x, w, r: cutfuse.linear(x.int(), w.int()), TypeError, "int32"),
    "two types": (lambda x, w, r: cutfuse.linear(x, w.float()), TypeError, "one type"),
    "operands that are no tuple": (
        lambda x, w, r: cutfuse.linear(x, w, epilogue=residual, operands=r),  # type: ignore[arg-type]
        TypeError,
        "has to be a tuple",
    ),
    "a word": (
        lambda x, w, r: cutfuse.linear(x, w, epilogue=residual, operands=("a",)),  # type: ignore[arg-type]
        TypeError,
        "operand 0",
    ),
    "an operand too few": (lambda x, w, r: cutfuse.linear(x, w, epilogue=residual), OperandCountError, "0 operands"),
    "an integer result": (
        lambda x, w, r: cutfuse.linear(x, w, epilogue=torch.relu, out_dtype=torch.int8),
        TypeError,
        "out_dtype",
    ),
    "nothing": (lambda x, w, r: cutfuse.linear(x, w, epilogue=lambda z: None), EpilogueError, "NoneType"),  # type: ignore[arg-type,return-value]
    "a number": (lambda x, w, r: cutfuse.linear(x, w, epilogue=lambda z: 2.0), EpilogueError, "float"),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_wrong_calls_are_refused_wherever_they_run(request: pytest.FixtureRequest, name: str, device: str) -> None:
    if device == "emulated":
        request.getfixturevalue("launches")
    call, error, text = REFUSED_CALLS[name]
    x, weight, _, r = layer()
    with cutfuse.rounding("eager"), pytest.raises(error, match=text):
        call(x, weight, r)


def test_an_operand_that_is_returned_is_copied() -> None:
    x, weight, _, r = layer()
    y = cutfuse.linear(x, weight, epilogue=lambda z, r: r, operands=(r,), rounding="eager")
    assert torch.equal(y, r)
    assert y.data_ptr() != r.data_ptr()


def test_the_rounding_of_one_call_is_none_of_other_threads() -> None:
    x, weight, *_ = layer()
    seen: list[bool] = []

    def epilogue(z: Tensor) -> Tensor:
        seen.append(process.holds_somewhere)
        return z * 1.5

    cutfuse.linear(x, weight, epilogue=epilogue, rounding="eager")
    with cutfuse.rounding("eager"):
        cutfuse.linear(x, weight, epilogue=epilogue)
    assert seen == [False, True], "compiled code of all threads is guarded by it"


@pytest.mark.parametrize("function", [F.gelu, F.silu, residual])
def test_a_kernel_of_the_product_computes_what_one_computes_otherwise(
    launches: EmulatedLaunches, function: Function
) -> None:
    x, weight, _, r = layer()
    operands = (r,) if function is residual else ()
    for rounding in ("once", "eager"):
        found = cutfuse.explain(
            cutfuse.linear, x, weight, epilogue=function, operands=operands, rounding=rounding, device="H200"
        )
        assert found.path == "fused", rounding


def test_no_formula_branches_to_divide() -> None:
    """nvcc makes of a / b a test and a call for each element, which took 8 us for a million in a product's epilogue."""
    assert [op.name for op in op_table().ops if " / " in op.eager] == []


def test_a_product_is_compared_once_for_matrices_like_these(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, r = layer()
    compared: list[str] = []

    def product(own: Tensor, *others: Tensor) -> Tensor:
        compared.append(str(own.data_ptr() % 256))
        return torch.addmm(others[1].float(), own.float(), others[0].float().t()).to(own.dtype)

    monkeypatch.setattr(F, "linear", product)
    state = torch.get_rng_state()
    with cutfuse.rounding("eager"):
        for _ in range(2):
            cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))
            cutfuse.linear(x, weight, bias, epilogue=lambda z: z * 2 + 1)
    assert len(compared) == 2
    assert compared[0] != compared[1], "it begins on two kinds of boundary"
    assert list(eager._same_bits.values()) == [True]
    assert torch.equal(torch.get_rng_state(), state)


def test_the_product_of_a_kernel_that_stores_fp32_is_rounded_to_be_compared(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, _, _ = layer()

    def call() -> Tensor:
        return cutfuse.linear(x, weight, epilogue=lambda z: z.float() * 0.3 + 1.0, rounding="eager")

    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b: linear(x.float(), w.float()).to(x.dtype))
    call()
    ((kernel, *_), is_same), *others = eager._same_bits.items()
    assert ("_f32_" in kernel, is_same, others) == (True, True, [])
    assert launches.names[-1] == "gemm"


def test_a_kernel_that_cannot_be_compared_does_not_run(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, r = layer()
    plan_linear = eager.plan_linear

    def refuse(arguments: Any, precision: str, only: str = "") -> Any:
        if not arguments.program.instructions:
            raise ValueError(f"{only} cannot run")
        return plan_linear(arguments, precision, only=only)

    monkeypatch.setattr(eager, "plan_linear", refuse)
    y = cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,), rounding="eager")
    assert torch.equal(y, residual(F.linear(x, weight, bias), r))
    assert launches.names == ["pointwise"]


def test_nothing_is_compared_while_a_graph_is_captured(
    launches: EmulatedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias, r = layer()
    monkeypatch.setattr(eager, "is_capturing", lambda: True)
    with cutfuse.rounding("eager"):
        y = cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))
        assert torch.equal(y, residual(F.linear(x, weight, bias), r))
        assert not launches.launches
        assert not eager._same_bits
        monkeypatch.undo()
        monkeypatch.setattr(eager, "_compare", lambda arguments, kernel: True)
        cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))
    assert launches.names == ["gemm"]


def test_other_functions_round_once(launches: EmulatedLaunches) -> None:
    x, weight, bias, _ = layer()
    expected, down = linear_once(x, weight, bias, epilogue=longest), weight.t().contiguous()
    with cutfuse.rounding("eager"):
        assert torch.equal(linear_once(x, weight, bias, epilogue=longest), expected)
        y = cutfuse.mlp(x, weight, bias, down, None, activation=F.gelu)
    assert torch.equal(y, cutfuse.mlp(x, weight, bias, down, None, activation=F.gelu))


def test_neither_mode_holds_with_batch_invariance() -> None:
    x, weight, bias, _ = layer()
    refused = pytest.raises(NotImplementedError, match="PyTorch's own operations may run")
    with cutfuse.batch_invariant(), cutfuse.rounding("eager"), refused:
        cutfuse.linear(x, weight, bias, epilogue=longest)


def test_compiled_code_has_pytorchs_operations() -> None:
    x, weight, bias, r = layer()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def function(x: Tensor, r: Tensor) -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,))

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    expected = residual(F.linear(x, weight, bias), r)
    compiled(x, r)
    with cutfuse.rounding("eager"):
        assert torch.equal(compiled(x, r), expected)
    assert len(graphs) == 2
    assert not [node for node in graphs[1].graph.nodes if "cutfuse" in str(node.target)]
    own = torch.compile(
        lambda x, r: cutfuse.linear(x, weight, bias, epilogue=residual, operands=(r,), rounding="eager"),
        backend=backend,
    )
    assert torch.equal(own(x, r), expected)
    torch._dynamo.reset()


def test_explanations_say_who_computes_the_bits() -> None:
    x, weight, _, r = layer()

    def bits(**options: Any) -> str:
        return cutfuse.explain(cutfuse.linear, x, weight, rounding="eager", device="H200", **options).bits

    assert "the first call compares" in bits(epilogue=residual, operands=(r,))
    assert bits(epilogue=F.softshrink).startswith("PyTorch's own, by its operations: torch.nn.functional.softshrink")
    assert "kernels compute sum in another order" in bits(epilogue=residual, operands=(r,), reduce="sum")
    module = cutfuse.nn.FusedLinear(64, 32, epilogue=F.gelu, dtype=torch.bfloat16, rounding="eager")
    assert "x is on cpu" in cutfuse.explain(module, x).bits
    assert not cutfuse.explain(cutfuse.linear, x, weight, epilogue=residual, operands=(r,)).bits


def test_an_eager_epilogue_is_pickled_as_one() -> None:
    found = cutfuse.Epilogue.from_text("operands=0 eager; gelu z")
    assert pickle.loads(pickle.dumps(found)).program == found.program
    assert core.Program([], 0, is_eager=True).has_eager_formulas is False
