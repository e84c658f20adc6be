"""Every function that PyTorch calls pointwise is in the op table, composed of it, or refused with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.overrides import get_overridable_functions

from cutfuse.epilogue import Epilogue, EpilogueError, op_table
from cutfuse.epilogue.errors import refusal_of, refused_functions
from cutfuse.epilogue.table import compositions

HOMES = (torch, torch.nn.functional, torch.special, torch.Tensor)

# "Pointwise Ops" and the elementwise part of "Comparison Ops" in the documentation of torch.
DOCUMENTED = """
    abs absolute acos arccos acosh arccosh add addcdiv addcmul angle asin arcsin asinh arcsinh atan arctan atanh
    arctanh atan2 arctan2 bitwise_not bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ceil
    clamp clip conj_physical copysign cos cosh deg2rad div divide digamma erf erfc erfinv exp exp2 expm1
    fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fix float_power floor floor_divide fmod frac
    frexp gradient imag ldexp lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit hypot i0 igamma igammac mul multiply mvlgamma nan_to_num neg negative nextafter polygamma
    positive pow quantized_batch_norm rad2deg real reciprocal remainder round rsqrt sigmoid sign sgn signbit sin sinc
    sinh softmax sqrt square sub subtract tan tanh true_divide trunc xlogy eq fmax fmin ge greater greater_equal gt
    isclose isfinite isinf isposinf isneginf isnan isreal le less less_equal lt maximum minimum ne not_equal where
    masked_fill rsub heaviside zeros_like ones_like full_like
"""
# "Non-linear activation functions" in the documentation of torch.nn.functional.
ACTIVATIONS = """
    threshold relu hardtanh hardswish relu6 elu selu celu leaky_relu prelu rrelu glu gelu logsigmoid hardshrink
    tanhshrink softsign softplus softmin softmax softshrink gumbel_softmax log_softmax tanh sigmoid hardsigmoid silu
    mish normalize dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
"""
# Tagged pointwise in PyTorch, but no names of the language: in-place operators, which it has none of.
IN_PLACE_OPERATORS = {"__ixor__", "__iand__", "__ior__"}


def find_functions(name: str) -> list[Callable[..., Any]]:
    found = [getattr(home, name.removeprefix("special_"), None) for home in HOMES]
    return [function for function in found if callable(function)]


def is_tagged_pointwise(name: str) -> bool:
    packets = [getattr(torch.ops.aten, spelling, None) for spelling in (name, f"special_{name}")]
    packets = [packet for packet in packets if isinstance(packet, torch._ops.OpOverloadPacket)]
    tags = [getattr(packet, overload).tags for packet in packets for overload in packet.overloads()]
    return any(torch.Tag.pointwise in item for item in tags)


def tagged_pointwise() -> Iterator[str]:
    """The functions that __torch_function__ sees and whose operator PyTorch tags pointwise, without in-place ones."""
    for functions in get_overridable_functions().values():
        for function in functions:
            name = getattr(function, "__name__", "")
            in_place = name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
            if name and not in_place and is_tagged_pointwise(name):
                yield name


def names() -> list[str]:
    special = [name for name in vars(torch.special) if not name.startswith("_") and is_tagged_pointwise(name)]
    return sorted({*DOCUMENTED.split(), *ACTIVATIONS.split(), *special, *tagged_pointwise()})


def has(name: str) -> bool:
    """Whether every function of the name that this PyTorch has is in the language."""
    functions = find_functions(name)
    return bool(functions) and all(item in op_table().callables or item in compositions() for item in functions)


@pytest.mark.parametrize("name", names())
def test_every_pointwise_function_is_known_or_refused(name: str) -> None:
    known, refused = has(name), refusal_of(name) is not None
    assert known or refused, f"{name} is pointwise, but neither in the language nor refused with a reason"
    assert not (known and refused), f"{name} is in the language, but refused too"


@pytest.mark.parametrize(
    "path", ["special.bessel_j0", "special.erfcx", "linalg.norm", "fft.fft", "erfinv", "lgamma", "frexp", "isreal"]
)
def test_refusals_name_functions_as_users_do(path: str) -> None:
    with pytest.raises(EpilogueError, match=rf"^torch\.{re.escape(path)} is not in the epilogue language"):
        Epilogue(lambda z: attrgetter(path)(torch)(z))


def test_pytorch_tags_its_pointwise_functions() -> None:
    """The list is found by itself: what it would show for a new function it shows for these."""
    assert {"atan2", "nan_to_num", "special_airy_ai", "logit", "copysign"} <= set(tagged_pointwise())


def test_refused_functions_are_functions_of_pytorch() -> None:
    """So that no misspelt name stands there; some are in some versions only."""
    homes = (*HOMES, torch.nn)
    assert [name for name in refused_functions() if not any(hasattr(home, name) for home in homes)] == []
