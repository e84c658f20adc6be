"""The errors of an epilogue, how they get out of torch.compile, and why the language lacks what it lacks.

An entry of `_NAMES` says of a function of PyTorch that users may expect why no epilogue may call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from cutfuse import dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


class EpilogueError(ValueError, TypeError):
    """An epilogue that cannot be traced, does not fit a program or takes another number of operands than it is given.

    The message names the operation, the limit or the numbers, and what to do.
    """


class OperandCountError(EpilogueError):
    """An epilogue that takes another number of operands than it is given: users know it as an EpilogueError."""


class CompiledEpilogueError(EpilogueError, AssertionError):
    """An EpilogueError while torch.compile traces.

    Dynamo wraps what a function evaluated while tracing raises in an error of its own, but for few types. An
    AssertionError, the only public one of these, reaches the caller of the compiled function as it is.
    """


def counted(count: int, noun: str) -> str:
    """Such as "1 operand" or "2 operands"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def evaluated_while_compiling(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function` as Dynamo takes it: evaluated while it traces, its result a constant, its EpilogueError the user's."""

    @dynamo.assume_constant_result
    @functools.wraps(function)
    def evaluated(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except EpilogueError as error:
            if torch._guards.TracingContext.try_get() is None:  # called without Dynamo
                raise
            raise CompiledEpilogueError(str(error)) from error

    return evaluated


def refuse(message: str, kind: type[EpilogueError] = EpilogueError) -> NoReturn:
    """Raises an EpilogueError; also where Dynamo traces the caller, and a `raise` would end as an error of Dynamo's."""
    if torch.compiler.is_dynamo_compiling():
        _refuse_while_compiling(message)
    raise kind(message)


@evaluated_while_compiling
def _refuse_while_compiling(message: str) -> NoReturn:
    raise EpilogueError(message)


# An op needs a function in CUDA and one in C++.
_NO_CUDA = "CUDA has no fp32 function for it; compute it before or after with PyTorch"
_NO_HOST = "the host's C++ library has no function for it, although CUDA does; compute it before or after with PyTorch"
_NOT_ON_EVERY_HOST = (
    "some hosts' C++ libraries have no function for it, although CUDA does; compute it before or after with PyTorch"
)
_NO_DERIVATIVE = "its derivative is no function of the language; compute it before or after with PyTorch"
_POLYNOMIAL = "polynomials of a variable degree are not in it; write the one that you need with * and +"
_INTEGERS = "it is for integers, and an epilogue computes with floating-point numbers"
_INTEGER_CAST = "it casts to integers, with which an epilogue cannot compute; use torch.trunc or torch.floor"
_COMPLEX = "it is for complex numbers, and an epilogue computes with real ones"
_DIMENSION = (
    "it combines elements of a row or a column, and an epilogue computes each one alone; apply it after the call"
)
_BATCH_NORM = (
    "in training it takes statistics of columns, and an epilogue computes each element alone; apply it after the call. "
    "In evaluation it is a scale and a shift of each column, two rows: with s = bn.weight * torch.rsqrt(bn.running_var "
    "+ bn.eps) and t = bn.bias - bn.running_mean * s, write epilogue=lambda z, s, t: z * s + t and operands=(s, t)"
)
_LOSS = (
    "a loss reduces elements to one; write its formula for one element, with the target as an operand, and reduce= "
    "that or reduce after the call"
)
_SHAPE = "it moves or picks elements, and an epilogue computes each one where it is; apply it before or after the call"
_PRODUCT = (
    "it is a further product, and a call has one; apply it after the call, by cutfuse.linear too where it is a linear "
    "layer"
)
_RANDOM = "it draws random numbers, which an epilogue cannot; draw them before, and pass them through operands="
_DETACHED = (
    "an epilogue is differentiated as one formula; compute what carries no gradient before the call and pass it "
    "through operands=, detached, or apply what needs it after the call"
)
_PLACE = "an epilogue runs where x is; move x and the operands before the call"
_REDUCTION = (
    "it reduces elements to fewer, which an epilogue does not see one by one; apply it after the call, or to an "
    "operand before"
)
_TENSOR = "its result has another shape than its arguments, and an epilogue gives one value for each element"
_QUANTIZED = "its derivative is not that of its value; apply it after the call"

# By the name of the function in torch, torch.nn.functional, torch.special or Tensor.
_NAMES: dict[str, str] = {
    _NO_CUDA: """
        airy_ai gammainc gammaincc i0e i1e igamma igammac log_ndtr modified_bessel_k0 modified_bessel_k1
        scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 zeta
    """,
    _NO_HOST: "erfcx erfinv ndtri",
    _NOT_ON_EVERY_HOST: "bessel_j0 bessel_j1 bessel_y0 bessel_y1 i0 i1 modified_bessel_i0 modified_bessel_i1",
    _NO_DERIVATIVE: "digamma gammaln lgamma multigammaln mvlgamma polygamma psi",
    _POLYNOMIAL: """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w
    """,
    _INTEGERS: """
        __ilshift__ __irshift__ __lshift__ __rshift__ __rlshift__ __rrshift__ bitwise_left_shift bitwise_right_shift
        gcd lcm
    """,
    _INTEGER_CAST: "byte char int long short",
    _COMPLEX: "cdouble cfloat chalf complex imag polar view_as_complex view_as_real",
    _BATCH_NORM: "batch_norm BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm",
    _DIMENSION: """
        InstanceNorm1d InstanceNorm2d InstanceNorm3d
        argsort cummax cummin cumprod cumsum cumulative_trapezoid diff flip fliplr flipud glu group_norm
        gumbel_softmax instance_norm layer_norm local_response_norm log_softmax logcumsumexp normalize renorm rms_norm
        roll rot90 softmax softmin sort msort topk
    """,
    _REDUCTION: """
        all any argmax argmin aminmax count_nonzero cosine_similarity dist dot inner kthvalue median mode nanmean
        nanmedian nanquantile nansum norm prod quantile std std_mean trace trapezoid trapz var var_mean vdot
    """,
    _TENSOR: "equal frexp gradient is_same_size",
    _LOSS: """
        binary_cross_entropy binary_cross_entropy_with_logits cross_entropy huber_loss kl_div l1_loss mse_loss nll_loss
        smooth_l1_loss
    """,
    _SHAPE: """
        chunk expand expand_as flatten gather index_select masked_select movedim narrow pad permute repeat
        repeat_interleave reshape scatter select split squeeze swapaxes t take tile transpose tril triu unflatten
        unfold unsqueeze view view_as
    """,
    _PRODUCT: "addmm baddbmm bilinear bmm conv1d conv2d conv3d einsum linear matmul mm mv outer tensordot",
    _RANDOM: "bernoulli multinomial normal poisson rand_like randint_like randn_like",
    _DETACHED: "data detach",
    _PLACE: "cpu cuda",
    _QUANTIZED: "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine quantized_batch_norm",
    "its result is float64, and an epilogue computes in the type of its input; use torch.pow": "float_power",
    "it steps through the numbers of one type, and an epilogue computes in fp32 for 16-bit types too": "nextafter",
    "it is true for every real number": "isreal",
}


@functools.lru_cache(maxsize=1)
def refused_functions() -> dict[str, str]:
    """The reason by the name of each function."""
    return {name: reason for reason, names in _NAMES.items() for name in names.split()}


def reduces(reduction: str) -> str:
    """Why the language lacks a reduction that calls have, and what to do."""
    return (
        f'a reduction over elements, which an epilogue does not see one by one; use reduce="{reduction}" for the last '
        "dimension, reduce after the call, or reduce an operand before"
    )


def refusal_of(name: str) -> str | None:
    """Why the language lacks the function, method, attribute of Tensor or module of torch.nn of this name, or None
    where nothing special is to say."""
    bare = name.removeprefix("special_").removeprefix("linalg_")
    return refused_functions().get(bare)


NO_NUMBER = (
    "the epilogue is traced once, on a symbolic value that has no number: float(), int(), .item(), f-strings "
    "and functions of math and numpy cannot take it; use the torch function of the same name"
)
NO_BRANCH = (
    "the epilogue branches on data (if, while, and, or, not, min, max or a chained comparison of a symbolic value), "
    "but it is traced once for all elements; use torch.where(condition, a, b), torch.minimum, torch.maximum, and &, | "
    "and ~ between comparisons"
)
NO_BUILTIN = (
    "the epilogue gives round() or divmod() a symbolic value, and PyTorch has neither for tensors; use torch.round(z), "
    "or torch.div(z, d, rounding_mode='floor') and torch.remainder(z, d)"
)
NO_SEQUENCE = (
    "the epilogue indexes, iterates over or takes the length of a symbolic value, which stands for every element "
    "alike; pass other tensors through operands=, already sliced"
)
# Python's conversions of a tensor and what else needs its elements, by the method that PyTorch calls.
NEEDS_VALUES = {
    **dict.fromkeys(("__bool__", "is_nonzero"), NO_BRANCH),
    **dict.fromkeys(("__round__", "__divmod__", "__rdivmod__"), NO_BUILTIN),
    **dict.fromkeys(("__len__", "__iter__", "__getitem__", "__setitem__", "__contains__", "unbind"), NO_SEQUENCE),
    **dict.fromkeys(
        ("__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "numpy", "__format__"),
        NO_NUMBER,
    ),
}
# Methods that tell how a tensor lies in memory.
LAYOUT_METHODS = {
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous", "get_device"),
    *("element_size", "data_ptr", "storage", "untyped_storage"),
}


def refusal(reason: str) -> Callable[..., NoReturn]:
    """A method that raises EpilogueError."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EpilogueError(reason)

    return refuse


def refuse_list(function: str) -> NoReturn:
    raise EpilogueError(f"{function} of a list of values is not in the epilogue language: apply it after the call")


def refuse_augmented(symbol: str) -> NoReturn:
    raise EpilogueError(f"the epilogue changes a value in place with {symbol}=; write z = z {symbol} ... instead")


def refuse_attribute(name: str) -> NoReturn:
    """For an attribute of Tensor that says how a tensor lies in memory, where, or of what shape it is."""
    raise EpilogueError(
        f"the epilogue reads Tensor.{name} of a symbolic value, which stands for one element: it has a dtype, but no "
        "shape, device or memory. Take what depends on these from the tensors themselves, outside of the epilogue"
    )
