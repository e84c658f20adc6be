"""Bad input: an error that names the values and says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cutfuse
from cutfuse import native

X, W, B = torch.randn(6, 7), torch.randn(5, 7), torch.randn(5)


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
    "integers": (call(x=X.long(), weight=W.long(), bias=None), TypeError, "floating-point type, got torch.int64"),
    "complex": (
        call(x=X.cfloat(), weight=W.cfloat(), bias=None),
        TypeError,
        "floating-point type, got torch.complex64",
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
    "operand's type": (call(epilogue=torch.add, operands=("1",)), TypeError, "operand 0 .* got str"),
    "complex operand": (call(epilogue=torch.add, operands=(B.cfloat(),)), TypeError, "operand 0 is complex"),
    "operands": (call(epilogue=torch.add, operands=B), TypeError, r"operands=\(r,\)"),
    "operands without epilogue": (call(epilogue=None, operands=(B,)), cutfuse.EpilogueError, "no function"),
    "reduction": (call(reduce="max"), ValueError, "'max'; choose one of 'sum', 'mean', 'amax', 'amin', 'logsumexp'"),
    "reduction's type": (call(reduce=1), ValueError, "unknown reduction 1"),
    "out_dtype": (call(out_dtype=torch.int32), TypeError, "out_dtype .* got torch.int32"),
    "epilogue's type": (call(epilogue="sigmoid"), TypeError, "callable or a cutfuse.Epilogue, got str"),
    "five operands": (
        call(epilogue=lambda z, a, b, c, d, e: z, operands=(B,) * 5),
        cutfuse.EpilogueError,
        "5 operands exceed the limit of 4",
    ),
    "epilogue's operands": (
        call(epilogue=lambda z, r: z + r),
        cutfuse.EpilogueError,
        "called with 1 arguments",
    ),
    "prebuilt epilogue's operands": (
        call(epilogue=cutfuse.Epilogue(lambda z, r: z + r)),
        cutfuse.EpilogueError,
        "takes 1 operands",
    ),
    "prebuilt epilogue's numbers": (
        call(epilogue=cutfuse.Epilogue(lambda z, r: z + r), operands=(1.0, 2.0)),
        cutfuse.EpilogueError,
        "takes 1 operands",
    ),
    "branch": (call(epilogue=lambda z: z if z > 0 else -z), cutfuse.EpilogueError, "branches on data.*torch.where"),
    "unknown function": (call(epilogue=lambda z: torch.softmax(z, -1)), cutfuse.EpilogueError, "softmax"),
    "constant": (call(epilogue=lambda z: 1.0), cutfuse.EpilogueError, "does not depend on its arguments"),
    "two results": (call(epilogue=lambda z: (z, z)), cutfuse.EpilogueError, "returns 2 values"),
    "captured tensor": (call(epilogue=lambda z: z + B), cutfuse.EpilogueError, "operands="),
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
    "reduce's op": (lambda: cutfuse.reduce(X, 1, "prod"), ValueError, "'prod'; choose one of 'sum'"),
    "reduce's op for integers": (lambda: cutfuse.reduce(X.long(), 1, "prod"), ValueError, "choose one of"),
    "reduce's dim": (lambda: cutfuse.reduce(X, 2), IndexError, "dim 2 is out of range for 2 dimensions"),
    "reduce's negative dim": (lambda: cutfuse.reduce(X, -3), IndexError, "dim -3 is out of range"),
    "reduce's dim twice": (lambda: cutfuse.reduce(X, (1, -1)), ValueError, r"\(1, -1\) names a dimension twice"),
    "reduce's operands": (
        lambda: cutfuse.reduce(X, 1, prologue=torch.add, operands=(torch.randn(2, 6, 7),)),
        ValueError,
        r"shape \(2, 6, 7\) do not broadcast against x's \(6, 7\)",
    ),
    "reduce's prologue": (lambda: cutfuse.reduce(X, 1, prologue="exp"), TypeError, "got str"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_pointwise_and_reduce(name: str) -> None:
    function, error, message = OTHERS[name]
    with pytest.raises(error, match=message):
        function()


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
