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
from cutfuse import Epilogue, EpilogueError, native
from cutfuse.nn import FusedLinear

X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)
FP8 = torch.float8_e4m3fn
ADDING = FusedLinear(7, 5, epilogue=torch.add)
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


def added(operand: object) -> Callable[[], Tensor]:
    return call(epilogue=torch.add, operands=(operand,))


def fused(*given: object) -> Callable[[], object]:
    return lambda: FusedLinear(*given)


LAYER = "^cutfuse.nn.FusedLinear:"
# What the message says, and the call. First calls of linear, then others.
VALUE_ERRORS = [
    (r"\(6, 8\) and \(5, 7\)", call(x=torch.randn(6, 8))),
    (r"shapes \(\) and \(5, 7\)", call(x=torch.tensor(1.0))),
    (r"weight \[N, K\].*\(5,\)", call(weight=B)),
    (r"bias has to be \[N\].*\(6,\) and \(5, 7\)", call(bias=torch.randn(6))),
    (r"\(1, 5\) and \(5, 7\)", call(bias=torch.randn(1, 5))),
    ("x is on cpu and weight on meta", call(weight=W.to("meta"))),
    ("x is on cpu and bias on meta", call(bias=B.to("meta"))),
    ("operand 0 is on meta but the input is on cpu", added(B.to("meta"))),
    (r"operand 0 of shape \(6, 4\) does not broadcast against the result's \(6, 5\)", added(torch.randn(6, 4))),
    (r"operand 0 of shape \(5, 5\)", added(torch.randn(5, 5))),
    (r"operand 0 of shape \(2, 6, 5\)", added(torch.randn(2, 6, 5))),
    (r"operand 0 of shape \(6,\)", added(torch.randn(6))),
    (r"'max'; choose one of .*\(did you mean 'amax'\?\)$", call(reduce="max")),
    ("unknown reduction 1", call(reduce=1)),
    (r"unknown reduction \['sum'\]; choose one of", call(reduce=["sum"])),
    (rf"{LAYER} x has to be .* got shapes \(7, 6\)", lambda: FusedLinear(7, 5)(X.T)),
    (rf"{LAYER} operand 0 of shape \(4,\)", lambda: cutfuse.explain(ADDING, X, torch.ones(4))),
    (r"shape \(5,\) do not broadcast with x's \(6, 7\)", lambda: cutfuse.pointwise(torch.add, X, torch.randn(5))),
    (
        r"shape \(2, 6, 7\) do not broadcast against x's \(6, 7\)",
        lambda: cutfuse.reduce(X, 1, prologue=torch.add, operands=(torch.randn(2, 6, 7),)),
    ),
    ("'prod'; choose one of 'sum'.*'logsumexp'$", lambda: cutfuse.reduce(X, 1, "prod")),
    (r"\(did you mean 'sum'\?\)$", lambda: cutfuse.reduce(X, 1, "Sum")),
    ("did you mean 'amin'", lambda: cutfuse.reduce(X, 1, torch.amin)),
    ("'prod'; choose one of", lambda: cutfuse.reduce(X.long(), 1, "prod")),
    (r"\(1, -1\) names a dimension twice", lambda: cutfuse.reduce(X, (1, -1))),
    (r"\(0, -1\) names a dimension twice", lambda: cutfuse.sum(torch.tensor(1.0), (0, -1))),
]
INDEX_ERRORS = [
    ("dim 2 is out of range for 2 dimensions", lambda: cutfuse.reduce(X, 2)),
    ("dim -3 is out of range", lambda: cutfuse.reduce(X, -3)),
]
FLOATING = "has to be float64, float32, bfloat16 or float16, got"
TYPE_ERRORS = [
    ("x has to be a tensor, got list", call(x=[1.0])),
    ("bias has to be a tensor, got float", call(bias=1.0)),
    ("weight .* got Linear; .* layer.weight", call(weight=torch.nn.Linear(7, 5))),
    ("bias has to be a tensor, got .*; .* epilogue= of linear", call(bias=torch.relu)),
    (r"x torch.float64, weight torch.float32, bias.*autocast", call(x=X.double())),
    (r"bias torch.float16", call(bias=B.half())),
    (f"x {FLOATING} torch.int64", call(x=X.long(), weight=W.long(), bias=None)),
    (f"x {FLOATING} torch.complex64", call(x=X.cfloat(), weight=W.cfloat(), bias=None)),
    (f"x {FLOATING} torch.float8_e4m3fn", call(x=X.to(FP8), weight=W.to(FP8), bias=None, epilogue=None)),
    (f"x {FLOATING} torch.qint8", call(x=QUANTIZED)),
    (f"x {FLOATING} torch.float8_e4m3fn", lambda: ADDING(X.to(FP8), B)),
    ("x is a nested tensor; call with the dense", call(x=NESTED)),
    ("x is a nested tensor; call with the dense", call(x=JAGGED)),
    ("x has layout torch.sparse_coo; make it dense", call(x=X.to_sparse())),
    ("weight has layout torch.sparse_coo; make it dense", call(weight=W.to_sparse())),
    (r"operands=\(r,\)", call(epilogue=torch.add, operands=B)),
    ("operand 0 .* got str$", added("1")),
    ("got ndarray; .*as_tensor", added(np.ones(5))),
    ("operand 0 .*complex64", added(np.complex64(1))),
    ("got complex; .* real numbers", added(1j)),
    ("operand 0 is complex", added(B.cfloat())),
    ("operand 0 is quantized", added(QUANTIZED[:, :5])),
    ("operand 0 has layout torch.sparse_coo; make it dense", added(torch.ones(6, 5).to_sparse())),
    ("keepdim has to be True or False, got 1 of type int", call(reduce="sum", keepdim=1)),
    (f"out_dtype {FLOATING} torch.int32", call(out_dtype=torch.int32)),
    (f"out_dtype {FLOATING} torch.float8_e4m3fn", call(out_dtype=FP8)),
    ("torch.dtype such as torch.float16, got 'float16' of type", call(out_dtype="float16")),
    ("callable or a cutfuse.Epilogue, got str 'sigmoid'", call(epilogue="sigmoid")),
    (r"is the class test_errors._Doubled; pass an instance", call(epilogue=_Doubled)),
    (f"{LAYER} operand 0 .*, got tuple; pass the tensors inside one by", lambda: ADDING(X, (B,))),
    (f"{LAYER} epilogue cannot be 'cuda'; pass the device by its name", fused(7, 5, True, "cuda")),
    (f"{LAYER} bias cannot be 'cuda:1'; pass the device by its name, as device=", fused(7, 5, "cuda:1")),
    (f"{LAYER} bias cannot be torch.float16; pass the dtype by its name", fused(7, 5, torch.float16)),
    (f"{LAYER} bias cannot be .*; pass the epilogue by its name, as epilogue=", fused(7, 5, torch.relu)),
    (f"{LAYER} in_features .* got Linear.*; FusedLinear.from_linear", fused(torch.nn.Linear(7, 5), None)),
    (f"{LAYER} out_features has to be an integer, got 5.0 of type float", fused(7, 5.0)),
    ("x has to be a tensor, got .*; a function is the first argument", lambda: cutfuse.pointwise(X, torch.relu)),
    ("function of x, got None", lambda: cutfuse.pointwise(None, X)),
    ("a function of x, got 'relu' of type str", lambda: cutfuse.pointwise("relu", X)),
    ("operand 0 .*, got tuple; pass the tensors inside one by one", lambda: cutfuse.pointwise(torch.add, X, (X,))),
    (f"out_dtype {FLOATING} torch.int8", lambda: cutfuse.pointwise(torch.sigmoid, X, out_dtype=torch.int8)),
    ("x has layout torch.sparse_csr; make it dense", lambda: cutfuse.pointwise(torch.relu, COMPRESSED)),
    ("x has layout torch._mkldnn; make it dense", lambda: cutfuse.sigmoid(X.to_mkldnn())),
    ("x is complex", lambda: cutfuse.sigmoid(X.cfloat())),
    ("x is quantized .* dequantize", lambda: cutfuse.sigmoid(QUANTIZED)),
    ("x is quantized .* dequantize", lambda: cutfuse.sum(QUANTIZED, 1)),
    ("x is a nested tensor", lambda: cutfuse.sum(NESTED, 1)),
    ("dim has to be an integer.* got 1.0 of type float", lambda: cutfuse.sum(X, 1.0)),
    ("dim has to be an integer.* got 1.0", lambda: cutfuse.sum(X, (0, 1.0))),
    ("dim has to be an integer.* got True of type bool", lambda: cutfuse.sum(X, True)),
    ("dim has to be an integer", lambda: cutfuse.sum(X, torch.tensor(True))),
    ("keepdim has to be True or False, got 1", lambda: cutfuse.sum(X, 1, keepdim=1)),
    ("keepdim has to be True or False", lambda: cutfuse.sum(X.long(), 1, 1)),
    ("a torch.dtype .* got 'int8'", lambda: cutfuse.reduce(X, 1, out_dtype="int8")),
    ("a torch.dtype .* got 'int8'", lambda: cutfuse.reduce(X.long(), 1, out_dtype="int8")),
    (f"mean's out_dtype {FLOATING} torch.int32", lambda: cutfuse.reduce(X.long(), 1, "mean", out_dtype=torch.int32)),
    ("x is complex", lambda: cutfuse.reduce(X.cfloat(), 1, out_dtype=torch.float32)),
    ("the prologue has to be .* got str", lambda: cutfuse.reduce(X, 1, prologue="exp")),
    (r"cutfuse.explain: .*write explain\(module, x\)", lambda: cutfuse.explain()),
    ("cutfuse.explain: .*'dim' in a call of reduce", lambda: cutfuse.explain(X)),
    ("called with tensors, got float", lambda: Epilogue(lambda z: z / 2)(3.0)),
]
EPILOGUE_ERRORS = [
    ("an epilogue calls cutfuse.linear, which takes no symbolic values", call(epilogue=lambda z: cutfuse.linear(z, W))),
    ("1 operand, but no epilogue that takes any; pass ep", call(epilogue=None, operands=(B,))),
    (r"^cutfuse.linear: the epilogue is the class .*; pass .* as torch.nn.ReLU\(\)$", call(epilogue=torch.nn.ReLU)),
    ("5 tensor operands exceed the limit of 4", call(epilogue=lambda z, a, b, c, d, e: z, operands=(B,) * 5)),
    ("called with the pre-activation and 0 operands", call(epilogue=lambda z, r: z + r)),
    ("called with the pre-activation and 3 operands", call(epilogue=lambda z: z, operands=(2.0, 3.0, B))),
    ("takes 1 operand, and is given", call(epilogue=Epilogue(lambda z, r: z + r))),
    ("takes 1 operand, and is given", call(epilogue=Epilogue(lambda z, r: z + r), operands=(1.0, 2.0))),
    ("the prologue is the class torch.nn.GELU", lambda: cutfuse.reduce(X, 1, prologue=torch.nn.GELU)),
    ("the function is the class torch.nn.GELU", lambda: cutfuse.pointwise(torch.nn.GELU, X)),
    ("the epilogue is the class torch.nn.ReLU", lambda: Epilogue(torch.nn.ReLU)),
    (r"got \[1\] of type list", lambda: Epilogue([1])),
    ("operand_count has to be an integer from 0 to 4, got '1'", lambda: Epilogue(torch.add, "1")),
    ("operand_count has to be an integer from 0 to 4, got -1", lambda: Epilogue(lambda z: z, -1)),
    ("beyond the range of floating-point numbers", lambda: cutfuse.pointwise(Epilogue(torch.add), X, 10**400)),
]
BY_ERROR = {
    ValueError: VALUE_ERRORS,
    IndexError: INDEX_ERRORS,
    TypeError: TYPE_ERRORS,
    EpilogueError: EPILOGUE_ERRORS,
}


@pytest.mark.parametrize(
    ("error", "message", "function"), [(error, *row) for error, rows in BY_ERROR.items() for row in rows]
)
def test_wrong_arguments(error: type[Exception], message: str, function: Callable[[], object]) -> None:
    with pytest.raises(error, match=message):
        function()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_epilogues() -> None:
    scripted = torch.jit.script(_scale)
    for fn in (scripted, torch.jit.script(torch.nn.GELU())):
        with pytest.raises(EpilogueError, match=r"is scripted .*pass the Python function or module"):
            cutfuse.pointwise(fn, X)
    with pytest.raises(EpilogueError, match=r"calls a scripted function .*call the Python function"):
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
    with pytest.raises(EpilogueError) as caught:
        cutfuse.linear(X, W, B, epilogue=_normalised)
    lines = [(entry.name, entry.line) for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert ("_normalised", "return torch.softmax(z * 2, -1)") in lines


def test_methods_of_other_types_are_called_as_they_are() -> None:
    upper = str.upper
    torch.testing.assert_close(cutfuse.pointwise(lambda z: z * len(upper("ab")), X), X * 2)


def _normalised(z: Tensor) -> Tensor:
    return torch.softmax(z * 2, -1)


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
    counted = "1 operand" if count == 1 else f"{count} operands"
    message = rf"the epilogue {described} is called with the pre-activation and {counted}; make its parameters"
    layer = FusedLinear(7, 5, epilogue=fn)
    takes: dict[str, Callable[[], Tensor]] = {
        r"^cutfuse.linear: .* and operands= agree$": lambda: cutfuse.linear(X, W, B, epilogue=fn, operands=operands),
        rf"{LAYER} .* operands of forward\(x, \*operands\) agree$": lambda: layer(X, *operands),
        r"^cutfuse.pointwise: .* of pointwise\(fn, x, \*operands\) agree$": lambda: cutfuse.pointwise(
            fn, X[:, :5], *operands
        ),
    }
    for place, take in takes.items():
        with pytest.raises(EpilogueError, match=place) as caught:
            take()
        assert re.search(message, str(caught.value))


def test_an_epilogue_of_any_number_of_operands_is_asked_how_many() -> None:
    def weighted(*values: Tensor) -> Tensor:
        return values[0] * values[1]

    with pytest.raises(EpilogueError, match=r"any number of arguments.*Epilogue\(fn, operand_count=...\)"):
        Epilogue(weighted)
    torch.testing.assert_close(Epilogue(weighted, 1)(X, X), X * X)
    torch.testing.assert_close(Epilogue(lambda z, *unused: z * 2)(X), X * 2)
