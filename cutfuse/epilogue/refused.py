"""Functions of PyTorch that the epilogue language lacks, and why: what users may expect of it, elementwise or not."""

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
