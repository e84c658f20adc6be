"""What the contenders of one case run on, an fp64 reference, how far a result is from it, and the least time needed."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse

# fp64 references are computed in pieces of at most this many elements (0.5 GB), so that they fit beside the outputs.
CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Precision:
    """The type of the data and PyTorch's setting for fp32 matrix products that go with a precision's name."""

    dtype: torch.dtype
    fp32_products: str = "highest"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """PyTorch's process-wide settings for fp32 products, put back afterwards.

        By default cuDNN takes tf32 for convolutions of fp32, which is not the precision that a suite names.
        """
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(self.fp32_products)
        torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)
            torch.backends.cudnn.allow_tf32 = convolutions


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, "high"),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}


Shape = tuple[int, ...]
Result = Tensor | tuple[Tensor, ...]
Function = Callable[..., Result]


def random_tensor(shape: Shape, precision: str, device: torch.device, seed: int) -> Tensor:
    """Normal values. Zeros would run up to 13% faster on an H200: they toggle fewer bits, which saves power."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, dtype=PRECISIONS[precision].dtype, device=device, generator=generator)


def element_size(precision: str) -> int:
    """Bytes of one element."""
    return PRECISIONS[precision].dtype.itemsize


def dimensions(shape: Shape) -> str:
    """A shape as tables print it."""
    return "x".join(str(size) for size in shape)


@dataclass(frozen=True)
class Reference:
    """The result in fp64, by slices of the output's first dimension, of which it has `rows`."""

    compute: Callable[[int, int], Tensor]
    rows: int
    elements_per_row: int

    @staticmethod
    def of(exact: Tensor) -> Reference:
        """Of a result that is there as a whole."""
        exact = torch.atleast_1d(exact.detach())
        return Reference(lambda start, stop: exact[start:stop], len(exact), exact.numel() // max(1, len(exact)))

    @property
    def step(self) -> int:
        """Rows to compute at a time."""
        return max(1, CHUNK_ELEMENTS // max(1, self.elements_per_row))


Exact = Reference | Tensor | tuple[Tensor, ...]  # of a result, or of each of several


@dataclass(frozen=True)
class Workload:
    """One case's tensors and calls. Every contender gets the same `arguments`.

    `eager` and `fused` are called with `arguments`; `explain` with nothing, and describes what `fused` runs.
    `product` holds x `[M, K]` and weight `[N, K]` where a bare `torch.mm` makes sense.
    `extras` make the calls of contenders that are the case's own, by their names; or None where there is none.
    """

    arguments: tuple[Tensor, ...]
    eager: Callable[..., Result]
    fused: Callable[..., Result]
    exact: Exact
    explain: Callable[[], Any] | None = None
    product: tuple[Tensor, Tensor] | None = None
    extras: Mapping[str, Callable[[], Run | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A call that gives a contender's result, what the result should be, and what `cutfuse.explain` says of it."""

    launch: Callable[[], Any]
    exact: Exact
    explain: Callable[[], Any] | None = None


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
}


def product_rows(x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` of `x @ weight.T + bias` in fp64, with only a piece of the weight upcast at a time."""
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    rows = x[start:stop].double()
    z = torch.cat([rows @ piece.double().t() for piece in weight.split(step)], dim=1)
    return z if bias is None else z.add_(bias.double())


def product_reference(x: Tensor, weight: Tensor) -> Reference:
    """The fp64 reference of the bare product."""
    return Reference(
        lambda start, stop: product_rows(x, weight, None, start, stop), x.shape[0], max(weight.shape[0], x.shape[1])
    )


# A result this far off is wrong, not imprecise: by type of the data, well above what rounding explains.
WRONG_ABOVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 5e-2, "fp16": 1e-2}


def parts_of(result: Any) -> tuple[Any, ...]:
    """A call's results, or what they should be."""
    return result if isinstance(result, tuple) else (result,)


def pairs_of(result: Result, exact: Exact) -> list[tuple[Tensor, Reference]]:
    """Each of a call's results, and what it should be; raises ValueError where their number differs."""
    parts, wanted = parts_of(result), parts_of(exact)
    if len(parts) != len(wanted):
        raise ValueError(f"the number of results is {len(parts)}, and should be {len(wanted)}")
    references = (own if isinstance(own, Reference) else Reference.of(own) for own in wanted)
    return [(torch.atleast_1d(part.detach()), own) for part, own in zip(parts, references, strict=True)]


def exact_of(function: Function, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a function gives of the same tensors in fp64."""
    wide = (tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return tuple(part.detach() for part in parts_of(function(*wide)))


def squares(result: Result, exact: Exact) -> Iterator[tuple[Tensor, Tensor]]:
    """By slices of rows of each result: the squares of the differences to what is exact, and of that.

    Raises ValueError where a shape differs.
    """
    for whole, reference in pairs_of(result, exact):
        for start in range(0, reference.rows, reference.step):
            stop = min(start + reference.step, reference.rows)
            expected = reference.compute(start, stop)
            piece = whole[start:stop]
            if piece.shape != expected.shape or whole.shape[0] != reference.rows:
                raise ValueError(
                    f"the result has shape {tuple(whole.shape)}, but its rows {start}:{stop} should be of shape "
                    f"{tuple(expected.shape)} out of {reference.rows} rows"
                )
            yield (piece.double() - expected).square_(), expected.double().square()


def relative_error(result: Result, exact: Exact) -> float:
    """The Frobenius norm of the difference over that of what is exact, of several results as if they were one.

    Infinite where one is not a number, or where there is a difference to nothing.
    """
    difference = torch.zeros((), dtype=torch.float64, device=parts_of(result)[0].device)
    norm = torch.zeros_like(difference)
    for own, square in squares(result, exact):
        difference += own.sum()
        norm += square.sum()
    error = (difference / norm).sqrt().item() if norm.item() or difference.item() else 0.0
    return error if math.isfinite(error) else math.inf


def errors_of(result: Result, exact: Exact) -> list[float]:
    """The relative error of each of a call's results."""
    return [relative_error(*pair) for pair in pairs_of(result, exact)]


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def note_errors(entry: dict[str, Any], errors: Sequence[float], precision: str) -> None:
    """Note a contender's error, the worst of its gradients', which follow the result, and whether one is wrong."""
    entry["error"] = errors[0]
    if len(errors) > 1:
        entry["gradient_error"] = max(errors[1:])
    note_wrong(entry, max(errors), precision)


def note_wrong(entry: dict[str, Any], error: float, precision: str, of: str = "against fp64") -> None:
    """Note in a contender's entry that its result is wrong, where its error says so: it is then not timed."""
    if error > WRONG_ABOVE[precision]:
        entry["note"] = f"wrong: relative error {error:.1e} {of}"


# An fp32 product at fp32 accuracy takes three products of 16-bit parts on tensor cores; on the H200 that is five times
# faster than the card's fp32 units, so the floor of "highest" is a third of the 16-bit rate.
SPLIT_PRODUCTS = 3


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one card: bytes per second, and floating-point operations per second by precision."""

    device: str
    copy: float
    read: float
    product: dict[str, float]
    source: str


CEILINGS = (
    Ceilings(
        device="NVIDIA H200",
        copy=4.28e12,
        read=4.36e12,
        product={"bf16": 790e12, "fp16": 790e12, "tf32": 409e12, "fp32": 790e12 / SPLIT_PRODUCTS},
        source="measured with torch 2.11.0+cu130 on random data: a device-to-device copy of 8.6 GB counting bytes read "
        "and written, a read-only sum, an 8192x8192x8192 cuBLAS product; fp32 = three 16-bit products",
    ),
)


@dataclass(frozen=True)
class Work:
    """The least that a case must move and compute: each input read once, each output written once."""

    read_bytes: int
    written_bytes: int
    flops: int = 0


def ceilings_for(device_name: str) -> Ceilings | None:
    """The ceilings of the card called `device_name`, or None where none were measured."""
    return next((ceilings for ceilings in CEILINGS if ceilings.device == device_name), None)


def floor_us(work: Work, precision: str, ceilings: Ceilings | None) -> float | None:
    """The least time in microseconds for `work` at `precision`, or None where the ceilings are not known."""
    if ceilings is None:
        return None
    # Writes share the bus with reads and cost turnarounds: the read-only rate holds only where they are negligible.
    bandwidth = ceilings.copy if work.written_bytes > 0.01 * work.read_bytes else ceilings.read
    memory = (work.read_bytes + work.written_bytes) / bandwidth
    compute = work.flops / ceilings.product[precision] if work.flops else 0.0
    return 1e6 * max(memory, compute)


def parameter_tensors(shape: Shape, precision: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Weight `[N, K]` and bias `[N]`; the weight is scaled so that the product is about normal."""
    _, n, k = shape
    weight = random_tensor((n, k), precision, device, seed).mul_(k**-0.5)
    return weight, random_tensor((n,), precision, device, seed + 1)


def layer_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, K]`, weight and bias."""
    m, _, k = shape
    return [random_tensor((m, k), precision, device, seed=1), *parameter_tensors(shape, precision, device, seed=2)]


def product_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and weight."""
    return layer_tensors(shape, precision, device)[:2]


def result_tensor(shape: Shape, precision: str, device: torch.device, seed: int = 4) -> Tensor:
    """One of the result's shape, `[M, N]`."""
    return random_tensor(shape[:2], precision, device, seed)


def training_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x, weight and bias, which need gradients, and the gradient that arrives, `[M, N]`."""
    leaves = [tensor.requires_grad_() for tensor in layer_tensors(shape, precision, device)]
    return [*leaves, result_tensor(shape, precision, device)]


def training_step(layer: Callable[..., Tensor], count: int | None = None) -> Function:
    """Of the layer's tensors and the gradient that arrives: its result, and the gradients of its first `count` tensors.

    None: of all.
    """

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        *own, gradient = tensors
        y = layer(*own)
        return y, *torch.autograd.grad(y, own[:count], gradient)

    return step


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer and what follows it."""
    return F.gelu(F.linear(x, weight, bias))


def fused_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with cutfuse, with a lambda that is new on each call."""
    return cutfuse.linear(x, weight, bias, epilogue=lambda z: F.gelu(z))


@dataclass(frozen=True)
class Range:
    """Sizes to draw from, evenly by their logarithms: as many from 1 to 8 as from 512 to 4096."""

    least: int
    most: int

    def draw(self, generator: random.Random, multiple: int) -> int:
        """A size, rounded to `multiple`, by which `least` and `most` are to be divisible."""
        size = self.least * (self.most / self.least) ** generator.random()
        return max(round(size / multiple) * multiple, self.least)


SHAPE_SEED = 12


ALIGNED = 8  # elements: 16 bytes in bf16, which kernels need of N and K


def drawn_shapes(count: int, rows: Range, sizes: Range, odd_ones: bool, seed: int = SHAPE_SEED) -> list[Shape]:
    """M, N, K at random, the same ones for a seed. N and K are multiples of 8, but in every fourth with `odd_ones`."""
    generator = random.Random(seed)
    shapes = []
    for index in range(count):
        multiple = 1 if odd_ones and index % 4 == 3 else ALIGNED
        shapes.append((rows.draw(generator, 1), sizes.draw(generator, multiple), sizes.draw(generator, multiple)))
    return shapes
