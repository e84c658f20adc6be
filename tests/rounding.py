"""cutfuse's own results in fp64, and how far rounding may take a result from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cutfuse import arguments, composed, native
from cutfuse.epilogue import Epilogue, Program, evaluate, op_table
from cutfuse.epilogue.table import CONDITION

Function = Callable[..., Tensor]

# Operations whose terms and partial sums are rounded.
_SUMS = {"sum", "mean", "logsumexp", "mm", "addmm", "mv", "addmv", "dot", "bmm", "baddbmm", "linear"}
# 1 - 2^-60 is 1 in fp64 too, and the tails of what is computed from it are 0.
_SATURATING = {"tanh", "erf", "sigmoid"}
_TAILED = {"gelu", "gelu_backward", "silu_backward", "mish", "mish_backward"}
# Operations in several steps, of which the last may be a difference that is small.
_CANCELLING = {"lerp", "addcmul", "addcdiv", "logaddexp", "logaddexp2", "logit"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_PRODUCTS = {"mm", "addmm", "mv", "addmv", "dot", "bmm", "baddbmm", "linear"}


class Recorded:
    """The epilogues of a function's calls, in order, so that it can run again with these in fp64.

    The types that decide which casts an epilogue has, and what it is, are then those of the first run.
    """

    def __init__(self) -> None:
        self._epilogues: list[Epilogue] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        resolve = arguments.resolve_epilogue

        def record(*args: Any) -> Epilogue:
            self._epilogues.append(resolve(*args))
            return self._epilogues[-1]

        with mock.patch.object(arguments, "resolve_epilogue", record):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """With PyTorch's own operations, and results that are not rounded."""
        resolve, remaining = arguments.resolve_epilogue, iter(self._epilogues)

        def replay(*args: Any) -> Epilogue:
            return next(remaining, None) or resolve(*args)

        with (
            mock.patch.object(arguments, "resolve_epilogue", replay),
            mock.patch.object(arguments, "resolve_out_dtype", return_value=torch.float64),
            mock.patch.object(native, "operators_everywhere", False),
        ):
            yield

    def in_fp64(self, ours: Function) -> Function:
        """The function with the recorded epilogues, of the same tensors in fp64."""

        def again(*tensors: Tensor) -> Tensor:
            with self.replaying():
                return ours(*[tensor.double() for tensor in tensors]).double()

        return again


class _Forwards(torch.autograd.Function):
    """A program whose derivatives are computed forwards, as the kernels do it: by each input, then times the gradient.

    Terms that cancel before anything multiplies them backwards are multiplied, and rounded, first.
    """

    @staticmethod
    def forward(ctx: Any, program: Program, *inputs: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in inputs]
        ctx.save_for_backward(
            *(_tangent(program, inputs, k) if needed else None for k, needed in enumerate(ctx.needs_input_grad[1:]))
        )
        return evaluate(program, inputs[0], inputs[1:]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.shapes, strict=True)
        return None, *(None if t is None else (gradient * t).sum_to_size(shape) for t, shape in pairs)


def _tangent(program: Program, inputs: Sequence[Tensor], index: int) -> Tensor:
    """The derivative of a program's result by an input, instruction by instruction."""
    names = ["z", *(f"r{k}" for k in range(len(inputs) - 1))]
    values = {name: tensor.expand_as(inputs[0]) for name, tensor in zip(names, inputs, strict=True)}
    values["prev"] = inputs[0]
    zero = torch.zeros_like(inputs[0])
    tangents = {name: zero + 1 if k == index else zero for k, name in enumerate(names)}
    tangents["prev"] = tangents["z"]
    for item in program.instructions:
        op = op_table().op(item.op)
        given = [values[a] if isinstance(a, str) else torch.full_like(zero, a) for a in item.arguments]
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        with torch.enable_grad():
            named = zip(op.tensors, leaves, strict=True)
            y = op.compose([leaf != 0 if name == CONDITION else leaf for name, leaf in named], item.parameters)
        tangent = zero
        if y.requires_grad:
            slopes = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True, materialize_grads=True)
            for slope, a in zip(slopes, item.arguments, strict=True):
                if isinstance(a, str):
                    tangent = tangent + torch.where(tangents[a] == 0, 0.0, slope * tangents[a])
        for name in ("prev", *([] if item.slot is None else [f"s{item.slot}"])):
            values[name], tangents[name] = y.detach().double(), tangent
    return tangents["prev"]


@contextlib.contextmanager
def differentiated_forwards() -> Iterator[None]:
    """Within it, the composed path's programs have derivatives that are computed forwards."""

    def apply(program: Program, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
        return _Forwards.apply(program, x.double(), *operands)

    with mock.patch.object(composed, "apply", apply):
        yield


class Rounding(TorchDispatchMode):
    """Runs fp64 operations as ones of a narrower type `dtype` may round them, by chance.

    Every operation has an error of `size` roundings, and that of PyTorch's own operation of that type. Where PyTorch's
    result is not finite or a zero, and the exact one is otherwise, one of both is taken. What rounding does not change
    has no error. By the seed PyTorch's loops are vectorised or not, results are numbers of the type or between these,
    and numbers near the end of fp32's range leave it, as they may where factors are multiplied in another order.
    """

    def __init__(self, seed: int, size: float, dtype: torch.dtype, product_dtype: torch.dtype) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._size = size
        self._takes_torchs = seed % 2 == 0
        self._scatters = seed // 2 % 2 == 0
        self._has_margin = seed // 4 % 2 == 1
        self._dtype = dtype
        self._product_dtype = product_dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None
        if is_view or name == "_to_copy":
            return func(*args, **kwargs)
        # A fused derivative takes its function anew, where autograd's is of the rounded result.
        if name in _SUMS or name.endswith("_backward"):
            args = tree_map_only(Tensor, self._perturb, args)
        if name in _COMPARISONS:
            args = self._meet(*args)
        exact = func(*args, **kwargs)
        if not isinstance(exact, Tensor):
            return exact
        dtype = self._product_dtype if name in _PRODUCTS else self._dtype
        given = tree_map_only(Tensor, lambda item: _narrow(item, dtype), (args, kwargs))
        torchs, same = self._run_narrow(func, dtype, given, exact)
        if exact.dtype != torch.float64:  # a comparison
            return torchs if self._takes_torchs else exact
        exact = same if self._takes_torchs else exact
        noisy = self._disturb(exact, torchs - same, name, dtype)
        if name in _CANCELLING:
            noisy = self._stored(noisy + self._noise(exact) * torch.finfo(dtype).eps * _largest(exact, args), dtype)
        if name in _TAILED and not self._takes_torchs:  # whose tails may be 0
            noisy = self._disturb_tail(noisy, [item for item in args if isinstance(item, Tensor)])
        if self._has_margin:
            noisy = torch.where((noisy.abs() > 1e30) & (noisy.abs() < math.inf), noisy.sign() * math.inf, noisy)
            noisy = torch.where(noisy.abs() < 1e-30, noisy * 0, noisy)
        return torch.where(_kind(torchs) != _kind(same), torchs if self._takes_torchs else exact, noisy)

    def _run_narrow(
        self, func: Any, dtype: torch.dtype, given: tuple[tuple, dict], exact: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What PyTorch's operation of the narrower type gives, and that of fp64 on the same arguments."""
        args, kwargs = tree_map_only(Tensor, scatter, given) if self._scatters else given
        if kwargs.get("dtype") == torch.float64:
            kwargs = {**kwargs, "dtype": dtype}
        try:
            torchs = func(*args, **kwargs).to(exact.dtype)
        except RuntimeError:  # it has none
            return exact, exact
        args, kwargs = tree_map_only(Tensor, _widen, (args, kwargs))
        return torchs, func(*args, **({**kwargs, "dtype": torch.float64} if "dtype" in kwargs else kwargs))

    def _disturb(self, exact: Tensor, torchs_error: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        info = torch.finfo(dtype)
        local = 4 * torchs_error.abs().nan_to_num(0.0, 0.0, 0.0)
        noise = self._noise(exact)
        noisy = self._stored(exact + noise * (info.eps * exact.abs() + info.tiny * info.eps + local), dtype)
        short = exact.to(torch.float32 if dtype == torch.float64 else dtype).double()
        noisy = torch.where((short == exact) & (local == 0), exact, noisy)
        return _unsaturated(noisy, noise) if name in _SATURATING else noisy

    def _meet(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Two numbers, which by chance are equal where they are a few roundings apart."""
        if not (isinstance(left, Tensor) and left.dtype == torch.float64):
            return left, right
        other = torch.as_tensor(right, dtype=torch.float64)
        largest = torch.maximum(left.abs(), other.abs())
        near = (left - other).abs() <= 4 * self._size * torch.finfo(self._dtype).eps * largest
        return torch.where(near & (self._noise(near) > 0), other, left), right

    def _stored(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A number of the type, which may be equal to another one, or one between these."""
        return value.to(dtype).double() if self._takes_torchs else value

    def _disturb_tail(self, value: Tensor, arguments: list[Tensor]) -> Tensor:
        *gradient, x = (item.abs() for item in arguments)
        scale = 2**-52 * x * (gradient[0] if gradient else 1.0)
        return torch.where(x > 3, value + self._noise(value) * scale, value)

    def _noise(self, like: Tensor) -> Tensor:
        noise = torch.empty(like.shape, dtype=torch.float64)
        return noise.normal_(generator=self._generator).mul_(self._size)

    def _perturb(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float64:
            return tensor
        return tensor * (1 + torch.finfo(self._dtype).eps * self._noise(tensor))


def _largest(result: Tensor, arguments: tuple) -> Tensor:
    """The largest finite magnitude among a result and what it is made of, or 1."""
    tensors = [item.double() for item in arguments if isinstance(item, Tensor)]
    magnitudes = [item.abs().nan_to_num(0.0, 0.0, 0.0).expand(result.shape) for item in (result, *tensors)]
    return torch.stack([torch.ones_like(result), *magnitudes]).amax(0)


def _unsaturated(value: Tensor, noise: Tensor) -> Tensor:
    """Numbers just below 1 where a value is 1."""
    return torch.where(value.abs() == 1, value - value.sign() * noise.abs() * 2**-53, value)


def _kind(tensor: Tensor) -> Tensor:
    """NaN, infinite, a number, or a zero of either sign."""
    zero = torch.where(tensor.signbit(), 1, 2)
    return torch.where(tensor == 0, zero, torch.where(tensor.isnan(), 3, torch.where(tensor.isinf(), 4, 5)))


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float64 else tensor


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def scatter(tensor: Tensor) -> Tensor:
    """The tensor with gaps between its elements, so that PyTorch's loops are not vectorised."""
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.dim() else tensor


def round_wide(seed: int, size: float) -> Callable[[Tensor, str, tuple], Tensor]:
    """How a `WideTensor` may be rounded in fp64 by an operation. Short numbers count as exact."""
    generator = torch.Generator().manual_seed(seed)

    def rounded(exact: Tensor, name: str, args: tuple) -> Tensor:
        if exact.dtype != torch.float64:
            return exact
        noise = torch.empty(exact.shape, dtype=torch.float64).normal_(generator=generator)
        error = size * torch.finfo(torch.float64).eps * noise
        if name in _CANCELLING:
            largest = _largest(exact, args)
            noisy = exact + error * largest
            # What cancels may also be 0.
            return noisy if seed // 4 % 2 else torch.where(noisy.abs() < 2**-48 * largest, 0.0 * noisy, noisy)
        noisy = torch.where(exact.float() == exact, exact, exact * (1 + error))
        return _unsaturated(noisy, noise) if name in _SATURATING else noisy

    return rounded


def find_wrong(
    actual: Tensor, expected: Tensor, base: Tensor, run: Callable[[int, float], tuple[Tensor, Tensor]], signs: bool
) -> Tensor:
    """Where `actual` is not the expected result, however operations are rounded.

    run: from a seed and the size of errors to a result and what chance has made of it. base: an error that is right in
    any case. signs: whether the signs of zeros count.

    An element that rounding takes from a finite number to one that is not, or to the other side of a jump, is not
    known.
    """
    got = actual.double()
    allowed, known = base, torch.ones_like(got, dtype=torch.bool)
    signs_known = known & signs
    wrong = known
    # Most are right at once. A few errors show most of what rounding does, many show all.
    for seed in range(-1, 100):
        if seed >= 0:
            size = (0.5, 1.0, 2.0, 4.0)[seed // 4 % 4]
            center, other = run(seed, size)
            same = (other == center) | (other.isnan() & center.isnan())
            known = known & (same | (other.isfinite() & center.isfinite()))
            signs_known = signs_known & same & (other.signbit() == center.signbit())
            difference = torch.where(same, 0.0, (other - center).abs()).nan_to_num(0.0, 0.0, 0.0)
            allowed = torch.maximum(allowed, 8 * difference / min(size, 1.0))
        right = (got == expected) | (got.isnan() & expected.isnan()) | ((got - expected).abs() <= allowed)
        swapped = (got == 0) & (expected == 0) & (got.signbit() != expected.signbit())
        wrong = (known & ~right) | (signs_known & swapped)
        if not wrong.any():
            break
    return wrong
