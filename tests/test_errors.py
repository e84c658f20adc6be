"""Bad input: an error that names the values and says what to do."""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import cutfuse
from cutfuse import native

X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)
FP8 = torch.float8_e4m3fn
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that these kinds of tensors are new, or on their way out
    NESTED = torch.nested.nested_tensor([X, X[:2]])
    JAGGED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    QUANTIZED = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    COMPRESSED = X.to_sparse_csr()


class _Doubled(torch.nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z * 2


def call(**changes: object) -> Callable[[], Tensor]:
    arguments: dict = {"x": X, "weight": W, "bias": B, "epilogue": torch.sigmoid, **changes}
    return lambda: cutfuse.linear(arguments.pop("x"), arguments.pop("weight"), arguments.pop("bias"), **arguments)


LINEAR = {
    "inner size": (call(x=torch.randn(6, 8)), ValueError, r"\(6, 8\) and \(5, 7\)"),
    "x without dimensions": (call(x=torch.tensor(1.0)), ValueError, r"shapes \(\) and \(5, 7\)"),
    "weight of one dimension": (call(weight=B), ValueError, r"weight \[N, K\].*\(5,\)"),
    "bias": (call(bias=torch.randn(6)), ValueError, r"bias has to be \[N\].*\(6,\) and \(5, 7\)"),
    "bias of two dimensions": (call(bias=torch.randn(1, 5)), ValueError, r"\(1, 5\) and \(5, 7\)"),
    "x is no tensor": (call(x=[1.0]), TypeError, "x has to be a tensor, got list"),
    "bias is no tensor": (call(bias=1.0), TypeError, "bias has to be a tensor, got float"),
    "types": (call(x=X.double()), TypeError, r"x torch.float64, weight torch.float32, bias.*autocast"),
    "bias's type": (call(bias=B.half()), TypeError, r"bias torch.float16"),
    "integers": (
        call(x=X.long(), weight=W.long(), bias=None),
        TypeError,
        "x has to be float64, float32, bfloat16 or float16, got torch.int64",
    ),
    "complex": (
        call(x=X.cfloat(), weight=W.cfloat(), bias=None),
        TypeError,
        "bfloat16 or float16, got torch.complex64",
    ),
    "weight's device": (call(weight=W.to("meta")), ValueError, "x is on cpu and weight on meta"),
    "bias's device": (call(bias=B.to("meta")), ValueError, "x is on cpu and bias on meta"),
    "operand's device": (
        call(epilogue=torch.add, operands=(B.to("meta"),)),
        ValueError,
        "operand 0 is on meta but the input is on cpu",
    ),
    "operand's shape": (
        call(epilogue=torch.add, operands=(torch.randn(6, 4),)),
        ValueError,
        r"operand 0 of shape \(6, 4\) does not broadcast against the result's \(6, 5\)",
    ),
    "operand's rows": (
        call(epilogue=torch.add, operands=(torch.randn(5, 5),)),
        ValueError,
        r"operand 0 of shape \(5, 5\)",
    ),
    "operand's rank": (
        call(epilogue=torch.add, operands=(torch.randn(2, 6, 5),)),
        ValueError,
        r"operand 0 of shape \(2, 6, 5\)",
    ),
    "row operand": (call(epilogue=torch.add, operands=(torch.randn(6),)), ValueError, r"operand 0 of shape \(6,\)"),
    "operand's type": (call(epilogue=torch.add, operands=("1",)), TypeError, "operand 0 .* got str$"),
    "an array as operand": (call(epilogue=torch.add, operands=(np.ones(5),)), TypeError, "got ndarray; .*as_tensor"),
    "an imaginary operand": (call(epilogue=torch.add, operands=(1j,)), TypeError, "got complex; .* real numbers"),
    "a layer as weight": (call(weight=torch.nn.Linear(7, 5)), TypeError, "weight .* got Linear; .* layer.weight"),
    "an epilogue as bias": (
        call(bias=torch.relu),
        TypeError,
        "bias has to be a tensor, got .*; .* epilogue= of linear",
    ),
    "linear in an epilogue": (
        call(epilogue=lambda z: cutfuse.linear(z, W)),
        cutfuse.EpilogueError,
        "an epilogue calls cutfuse.linear, which takes no symbolic values",
    ),
    "complex operand": (call(epilogue=torch.add, operands=(B.cfloat(),)), TypeError, "operand 0 is complex"),
    "operands": (call(epilogue=torch.add, operands=B), TypeError, r"operands=\(r,\)"),
    "operands without epilogue": (
        call(epilogue=None, operands=(B,)),
        cutfuse.EpilogueError,
        "1 operand, but no epilogue that takes any; pass ep",
    ),
    "reduction": (call(reduce="max"), ValueError, r"'max'; choose one of .*\(did you mean 'amax'\?\)$"),
    "reduction's type": (call(reduce=1), ValueError, "unknown reduction 1"),
    "reduction in a list": (call(reduce=["sum"]), ValueError, r"unknown reduction \['sum'\]; choose one of"),
    "keepdim": (call(reduce="sum", keepdim=1), TypeError, "keepdim has to be True or False, got 1 of type int"),
    "out_dtype": (call(out_dtype=torch.int32), TypeError, "out_dtype .* got torch.int32"),
    "x of 8 bits": (
        call(x=X.to(FP8), weight=W.to(FP8), bias=None, epilogue=None),
        TypeError,
        "x has to be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "out_dtype of 8 bits": (call(out_dtype=FP8), TypeError, "out_dtype has to be .* got torch.float8_e4m3fn"),
    "out_dtype's type": (
        call(out_dtype="float16"),
        TypeError,
        "torch.dtype such as torch.float16, got 'float16' of type",
    ),
    "nested x": (
        call(x=NESTED),
        TypeError,
        "x is a nested tensor; call with the dense",
    ),
    "jagged x": (
        call(x=JAGGED),
        TypeError,
        "x is a nested tensor; call with the dense",
    ),
    "sparse x": (call(x=X.to_sparse()), TypeError, "x has layout torch.sparse_coo; make it dense"),
    "sparse weight": (call(weight=W.to_sparse()), TypeError, "weight has layout torch.sparse_coo; make it dense"),
    "quantized x": (call(x=QUANTIZED), TypeError, "bfloat16 or float16, got torch.qint8"),
    "sparse operand": (
        call(epilogue=torch.add, operands=(torch.ones(6, 5).to_sparse(),)),
        TypeError,
        "operand 0 has layout torch.sparse_coo; make it dense",
    ),
    "quantized operand": (call(epilogue=torch.add, operands=(QUANTIZED[:, :5],)), TypeError, "operand 0 is quantized"),
    "complex NumPy operand": (
        call(epilogue=torch.add, operands=(np.complex64(1),)),
        TypeError,
        "operand 0 .*complex64",
    ),
    "epilogue's type": (call(epilogue="sigmoid"), TypeError, "callable or a cutfuse.Epilogue, got str 'sigmoid'"),
    "a class of modules": (
        call(epilogue=torch.nn.ReLU),
        cutfuse.EpilogueError,
        r"^cutfuse.linear: the epilogue is the class torch.nn.ReLU; pass an instance, such as torch.nn.ReLU\(\)$",
    ),
    "a class of the user's": (
        call(epilogue=_Doubled),
        TypeError,
        r"is the class test_errors._Doubled; pass an instance",
    ),
    "five operands": (
        call(epilogue=lambda z, a, b, c, d, e: z, operands=(B,) * 5),
        cutfuse.EpilogueError,
        "5 tensor operands exceed the limit of 4",
    ),
    "epilogue's operands": (
        call(epilogue=lambda z, r: z + r),
        cutfuse.EpilogueError,
        "called with the pre-activation and 0 operands",
    ),
    "prebuilt epilogue's operands": (
        call(epilogue=cutfuse.Epilogue(lambda z, r: z + r)),
        cutfuse.EpilogueError,
        "takes 1 operand, and is given",
    ),
    "prebuilt epilogue's numbers": (
        call(epilogue=cutfuse.Epilogue(lambda z, r: z + r), operands=(1.0, 2.0)),
        cutfuse.EpilogueError,
        "takes 1 operand, and is given",
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str) -> None:
    function, error, message = LINEAR[name]
    with pytest.raises(error, match=message):
        function()


OTHERS = {
    "pointwise of a list": (lambda: cutfuse.pointwise(torch.sigmoid, [1.0]), TypeError, "x has to be a tensor"),
    "pointwise of nothing": (lambda: cutfuse.pointwise(None, X), TypeError, "function of x, got None"),
    "pointwise of complex": (lambda: cutfuse.sigmoid(X.cfloat()), TypeError, "x is complex"),
    "pointwise's shapes": (
        lambda: cutfuse.pointwise(torch.add, X, torch.randn(5)),
        ValueError,
        r"shape \(5,\) do not broadcast with x's \(6, 7\)",
    ),
    "pointwise's out_dtype": (
        lambda: cutfuse.pointwise(torch.sigmoid, X, out_dtype=torch.int8),
        TypeError,
        "out_dtype",
    ),
    "pointwise's out_dtype of 8 bits": (
        lambda: cutfuse.pointwise(torch.sigmoid, X, out_dtype=FP8),
        TypeError,
        "out_dtype has to be .* got torch.float8_e4m3fn",
    ),
    "a layer's x of 8 bits": (
        lambda: cutfuse.nn.FusedLinear(7, 5, epilogue=torch.relu)(X.to(FP8)),
        TypeError,
        "x has to be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "pointwise's arguments turned round": (
        lambda: cutfuse.pointwise(X, torch.relu),
        TypeError,
        "x has to be a tensor, got .*; a function is the first argument of pointwise",
    ),
    "pointwise's operands in a tuple": (
        lambda: cutfuse.pointwise(torch.add, X, (X,)),
        TypeError,
        "operand 0 .*, got tuple; pass the tensors inside one by one",
    ),
    "a layer's operands in a tuple": (
        lambda: cutfuse.nn.FusedLinear(7, 5, epilogue=torch.add)(X, (B,)),
        TypeError,
        "^cutfuse.nn.FusedLinear: operand 0 .*, got tuple; pass the tensors inside one by one",
    ),
    "a layer's x": (
        lambda: cutfuse.nn.FusedLinear(7, 5)(X.T),
        ValueError,
        r"^cutfuse.nn.FusedLinear: x has to be .* got shapes \(7, 6\)",
    ),
    "a layer's operand's shape, explained": (
        lambda: cutfuse.explain(cutfuse.nn.FusedLinear(7, 5, epilogue=torch.add), X, torch.ones(4)),
        ValueError,
        r"^cutfuse.nn.FusedLinear: operand 0 of shape \(4,\)",
    ),
    **{
        f"a layer's arguments {name}": (
            lambda given=given: cutfuse.nn.FusedLinear(*given),
            TypeError,
            f"^cutfuse.nn.FusedLinear: {message}",
        )
        for name, (given, message) in {
            "as nn.Linear's": ((7, 5, True, "cuda"), "epilogue cannot be 'cuda'; pass the device by its name"),
            "with a device": ((7, 5, "cuda:1"), "bias cannot be 'cuda:1'; pass the device by its name, as device="),
            "with a type": ((7, 5, torch.float16), "bias cannot be torch.float16; pass the dtype by its name"),
            "with an epilogue": ((7, 5, torch.relu), "bias cannot be .*; pass the epilogue by its name, as epilogue="),
            "with a layer": ((torch.nn.Linear(7, 5), None), "in_features .* got Linear.*; FusedLinear.from_linear"),
            "with a float": ((7, 5.0), "out_features has to be an integer, got 5.0 of type float"),
        }.items()
    },
    "reduce's op": (lambda: cutfuse.reduce(X, 1, "prod"), ValueError, "'prod'; choose one of 'sum'.*'logsumexp'$"),
    "reduce's op in capitals": (lambda: cutfuse.reduce(X, 1, "Sum"), ValueError, r"\(did you mean 'sum'\?\)$"),
    "reduce's op as a function": (lambda: cutfuse.reduce(X, 1, torch.amin), ValueError, "did you mean 'amin'"),
    "reduce's op for integers": (lambda: cutfuse.reduce(X.long(), 1, "prod"), ValueError, "choose one of"),
    "reduce's dim": (lambda: cutfuse.reduce(X, 2), IndexError, "dim 2 is out of range for 2 dimensions"),
    "reduce's negative dim": (lambda: cutfuse.reduce(X, -3), IndexError, "dim -3 is out of range"),
    "reduce's dim twice": (lambda: cutfuse.reduce(X, (1, -1)), ValueError, r"\(1, -1\) names a dimension twice"),
    "reduce's operands": (
        lambda: cutfuse.reduce(X, 1, prologue=torch.add, operands=(torch.randn(2, 6, 7),)),
        ValueError,
        r"shape \(2, 6, 7\) do not broadcast against x's \(6, 7\)",
    ),
    "pointwise of a string": (
        lambda: cutfuse.pointwise("relu", X),
        TypeError,
        "a function of x, got 'relu' of type str",
    ),
    "pointwise of sparse": (
        lambda: cutfuse.pointwise(torch.relu, COMPRESSED),
        TypeError,
        "x has layout torch.sparse_csr; make it dense",
    ),
    "pointwise of mkldnn": (
        lambda: cutfuse.sigmoid(X.to_mkldnn()),
        TypeError,
        "x has layout torch._mkldnn; make it dense",
    ),
    "pointwise of quantized": (lambda: cutfuse.sigmoid(QUANTIZED), TypeError, "x is quantized .* dequantize"),
    "sum of quantized": (lambda: cutfuse.sum(QUANTIZED, 1), TypeError, "x is quantized .* dequantize"),
    "sum of nested": (
        lambda: cutfuse.sum(NESTED, 1),
        TypeError,
        "x is a nested tensor",
    ),
    "reduce's dim of a scalar twice": (
        lambda: cutfuse.sum(torch.tensor(1.0), (0, -1)),
        ValueError,
        r"\(0, -1\) names a dimension twice",
    ),
    "reduce's dim as a float": (
        lambda: cutfuse.sum(X, 1.0),
        TypeError,
        "dim has to be an integer.* got 1.0 of type float",
    ),
    "reduce's dims as floats": (lambda: cutfuse.sum(X, (0, 1.0)), TypeError, "dim has to be an integer.* got 1.0"),
    "reduce's dim as a bool": (
        lambda: cutfuse.sum(X, True),
        TypeError,
        "dim has to be an integer.* got True of type bool",
    ),
    "reduce's dim as a bool tensor": (
        lambda: cutfuse.sum(X, torch.tensor(True)),
        TypeError,
        "dim has to be an integer",
    ),
    "reduce's dim as a string": (
        lambda: cutfuse.sum(X, "1"),
        TypeError,
        "dim has to be an integer.* got '1' of type str",
    ),
    "reduce's keepdim": (lambda: cutfuse.sum(X, 1, keepdim=1), TypeError, "keepdim has to be True or False, got 1"),
    "reduce's keepdim for integers": (
        lambda: cutfuse.sum(X.long(), 1, 1),
        TypeError,
        "keepdim has to be True or False",
    ),
    "reduce's out_dtype": (lambda: cutfuse.reduce(X, 1, out_dtype="int8"), TypeError, "a torch.dtype .* got 'int8'"),
    "reduce's out_dtype for integers": (
        lambda: cutfuse.reduce(X.long(), 1, out_dtype="int8"),
        TypeError,
        "a torch.dtype .* got 'int8'",
    ),
    "mean of integers as integers": (
        lambda: cutfuse.reduce(X.long(), 1, "mean", out_dtype=torch.int32),
        TypeError,
        "the mean's out_dtype has to be float64, float32, bfloat16 or float16, got torch.int32",
    ),
    "real sum of complex": (
        lambda: cutfuse.reduce(X.cfloat(), 1, out_dtype=torch.float32),
        TypeError,
        "x is complex",
    ),
    "epilogue of a list": (lambda: cutfuse.Epilogue([1]), cutfuse.EpilogueError, r"got \[1\] of type list"),
    "operand_count's type": (
        lambda: cutfuse.Epilogue(torch.add, "1"),
        cutfuse.EpilogueError,
        "operand_count has to be an integer from 0 to 4, got '1'",
    ),
    "operand_count's sign": (
        lambda: cutfuse.Epilogue(lambda z: z, -1),
        cutfuse.EpilogueError,
        "operand_count has to be an integer from 0 to 4, got -1",
    ),
    "an integer beyond floats": (
        lambda: cutfuse.pointwise(cutfuse.Epilogue(torch.add), X, 10**400),
        cutfuse.EpilogueError,
        "beyond the range of floating-point numbers",
    ),
    "nothing to explain": (lambda: cutfuse.explain(), TypeError, r"cutfuse.explain: .*write explain\(module, x\)"),
    "half a call to explain": (lambda: cutfuse.explain(X), TypeError, "cutfuse.explain: .*'dim' in a call of reduce"),
    "reduce's prologue": (lambda: cutfuse.reduce(X, 1, prologue="exp"), TypeError, "the prologue has to be .* got str"),
    "reduce's prologue as a class": (
        lambda: cutfuse.reduce(X, 1, prologue=torch.nn.GELU),
        cutfuse.EpilogueError,
        "the prologue is the class torch.nn.GELU",
    ),
    "pointwise of a class": (
        lambda: cutfuse.pointwise(torch.nn.GELU, X),
        cutfuse.EpilogueError,
        "the function is the class torch.nn.GELU",
    ),
    "Epilogue of a class": (
        lambda: cutfuse.Epilogue(torch.nn.ReLU),
        cutfuse.EpilogueError,
        "the epilogue is the class torch.nn.ReLU",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_pointwise_and_reduce(name: str) -> None:
    function, error, message = OTHERS[name]
    with pytest.raises(error, match=message):
        function()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_epilogues() -> None:
    scripted = torch.jit.script(_scale)
    for fn in (scripted, torch.jit.script(torch.nn.GELU())):
        with pytest.raises(cutfuse.EpilogueError, match=r"is scripted .*pass the Python function or module"):
            cutfuse.pointwise(fn, X)
    with pytest.raises(cutfuse.EpilogueError, match=r"calls a scripted function .*call the Python function"):
        cutfuse.pointwise(lambda z: scripted(z) + 1, X)


def _scale(z: Tensor) -> Tensor:
    return z * 2


def test_compiled_epilogues(recwarn: pytest.WarningsRecorder) -> None:
    """Dynamo does not see symbolic values: it would warn about what computes them, and give the user's code up."""
    scale = torch.compile(_scale, backend="eager", fullgraph=True)
    for fn in (scale, torch.compile(torch.nn.GELU(), backend="eager")):
        for epilogue in (fn, lambda z, fn=fn: fn(z) + 1, torch.nn.Sequential(torch.nn.ReLU(), _Calling(fn))):
            found = cutfuse.pointwise(epilogue, X)
            torch.testing.assert_close(found, epilogue(X))
    assert not [item for item in recwarn if item.category is UserWarning]
    with torch.compiler.set_stance("fail_on_recompile"):  # which the trace leaves as it was, and the code is compiled
        cutfuse.pointwise(lambda z: scale(z) - 1, X)
        torch.testing.assert_close(scale(X), X * 2)
        with pytest.raises(RuntimeError, match="recompile"):
            torch.compile(_normalised, backend="eager")(X)


class _Calling(torch.nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, z: Tensor) -> Tensor:
        return self.fn(z)


def test_an_error_shows_the_line_of_the_epilogue() -> None:
    with pytest.raises(cutfuse.EpilogueError) as caught:
        cutfuse.linear(X, W, B, epilogue=_normalised)
    lines = [(entry.name, entry.line) for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert ("_normalised", "return torch.softmax(z * 2, -1)") in lines


def test_methods_of_other_types_are_called_as_they_are() -> None:
    upper = str.upper
    torch.testing.assert_close(cutfuse.pointwise(lambda z: z * len(upper("ab")), X), X * 2)


def _normalised(z: Tensor) -> Tensor:
    return torch.softmax(z * 2, -1)


def test_an_epilogue_is_called_with_tensors() -> None:
    halve = cutfuse.Epilogue(lambda z: z / 2)
    with pytest.raises(TypeError, match="called with tensors, got float"):
        halve(3.0)


class _WithoutKernels:
    cuda_build = False


def test_a_build_without_kernels_warns_once(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(native, "module", _WithoutKernels)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    native.has_kernels.cache_clear()
    native._warn_without_kernels.cache_clear()
    try:
        device = torch.device("cuda", 0)
        with pytest.warns(UserWarning, match=r"without CUDA kernels.*same results.*pip install"):
            assert not native.serves(device)
        assert not native.serves(device)
        assert not native.serves(torch.device("cpu"))
        assert not recwarn.list
    finally:
        native.has_kernels.cache_clear()
        native._warn_without_kernels.cache_clear()


# Epilogues that take another number of operands than they are given: the error names their parameters.


X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)


@pytest.mark.parametrize("operands", [(2.0,), (2.0, B), (2.0, 3.0, B)], ids=len)
def test_numbers_that_the_epilogue_has_no_parameter_for(operands: tuple) -> None:
    message = f"called with the pre-activation and {len(operands)} operand"
    with pytest.raises(cutfuse.EpilogueError, match=message):
        cutfuse.linear(X, W, B, epilogue=lambda z: z, operands=operands)


class _Scaled(torch.nn.Module):
    def forward(self, z: Tensor, scale: Tensor) -> Tensor:
        return z * scale


# Epilogues that have no signature of a Python function, how many operands they are given, and how an error names them.
MISCOUNTED: dict[str, tuple[Callable[..., Tensor], int, str]] = {
    "function of one tensor": (
        torch.nn.functional.gelu,
        1,
        r"torch.nn.functional.gelu\(input, \*, approximate='none'\)",
    ),
    "function of two tensors": (torch.add, 0, r"torch.add\(input, other, \*, alpha=1\)"),
    "composition": (torch.lerp, 1, r"torch.lerp\(input, end, weight\)"),
    "method": (torch.Tensor.relu, 1, r"torch.Tensor.relu\((input|self, /)\)"),
    "module": (torch.nn.GELU(), 1, r"GELU.forward\(input\)"),
    "module with an operand": (_Scaled(), 0, r"_Scaled.forward\(z, scale\)"),
    "partial of a function": (functools.partial(torch.add, alpha=2), 0, r"torch.add\(input, other, \*, alpha=1\)"),
    "partial of a lambda": (functools.partial(lambda s, z: z * s, 2.0), 1, r"<lambda>\(s, z\)"),
    "PyTorch's Python function": (
        torch.nn.functional.silu,
        2,
        r"torch.nn.functional.silu\(input, inplace=False\)",
    ),
}


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
@pytest.mark.parametrize("name", MISCOUNTED)
def test_an_epilogue_of_another_number_of_operands_is_named_with_its_parameters(name: str, kind: str) -> None:
    fn, count, described = MISCOUNTED[name]
    operands = (2.0 if kind == "numbers" else B,) * count
    message = rf"the epilogue {described} is called with the pre-activation and {count} operands?; make its parameters"
    layer = cutfuse.nn.FusedLinear(7, 5, epilogue=fn)
    takes: dict[str, Callable[[], Tensor]] = {
        r"^cutfuse.linear: .* and operands= agree$": lambda: cutfuse.linear(X, W, B, epilogue=fn, operands=operands),
        r"^cutfuse.nn.FusedLinear: .* operands of forward\(x, \*operands\) agree$": lambda: layer(X, *operands),
        r"^cutfuse.pointwise: .* of pointwise\(fn, x, \*operands\) agree$": lambda: cutfuse.pointwise(
            fn, X[:, :5], *operands
        ),
    }
    for place, take in takes.items():
        with pytest.raises(cutfuse.EpilogueError, match=place) as caught:
            take()
        assert re.search(message, str(caught.value))


def test_one_operand_is_no_plural() -> None:
    with pytest.raises(cutfuse.EpilogueError, match="the pre-activation and 1 operand; "):
        cutfuse.linear(X, W, B, epilogue=torch.relu, operands=(B,))


@pytest.mark.parametrize(("fn", "count"), [(torch.addcmul, 2), (torch.add, 1), (torch.relu, 0), (_Scaled(), 1)])
def test_an_epilogue_counts_the_operands_of_functions_and_modules(fn: Callable[..., Tensor], count: int) -> None:
    assert cutfuse.Epilogue(fn).operand_count == count


def test_an_epilogue_of_any_number_of_operands_is_asked_how_many() -> None:
    def weighted(*values: Tensor) -> Tensor:
        return values[0] * values[1]

    with pytest.raises(cutfuse.EpilogueError, match=r"any number of arguments.*Epilogue\(fn, operand_count=...\)"):
        cutfuse.Epilogue(weighted)
    torch.testing.assert_close(cutfuse.Epilogue(weighted, 1)(X, X), X * X)
    torch.testing.assert_close(cutfuse.Epilogue(lambda z, *unused: z * 2)(X), X * 2)
