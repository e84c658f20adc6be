"""Elementwise functions of PyTorch that the epilogue language lacks, and why."""

from __future__ import annotations

import functools

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
_DIMENSION = "it combines elements along a dimension, which an epilogue does not see; apply it after the call"
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
    _COMPLEX: "complex imag polar view_as_complex view_as_real",
    _DIMENSION: """
        argsort batch_norm cummax cummin cumprod cumsum cumulative_trapezoid diff flip fliplr flipud glu group_norm
        gumbel_softmax instance_norm layer_norm local_response_norm log_softmax logcumsumexp normalize renorm rms_norm
        roll rot90 softmax softmin sort msort topk
    """,
    _REDUCTION: """
        all any argmax argmin aminmax count_nonzero cosine_similarity dist dot inner kthvalue median mode nanmean
        nanmedian nanquantile nansum norm prod quantile std std_mean trace trapezoid trapz var var_mean vdot
    """,
    _TENSOR: "equal frexp gradient is_same_size",
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
    """Why the language lacks the function or method of this name, or None where nothing special is to say."""
    bare = name.removeprefix("special_").removeprefix("linalg_")
    return refused_functions().get(bare)
