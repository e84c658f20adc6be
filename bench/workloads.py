"""What the contenders of one case run on, an fp64 reference, and how far a contender's result is from it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
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

    @property
    def step(self) -> int:
        """Rows to compute at a time."""
        return max(1, CHUNK_ELEMENTS // max(1, self.elements_per_row))


@dataclass(frozen=True)
class Workload:
    """One case's tensors and calls. Every contender gets the same `arguments`.

    `eager` and `fused` are called with `arguments`; `explain` with nothing, and describes what `fused` runs.
    `collect` makes one tensor, which is compared with the reference, of what a call returns.
    `in_mode` gives cutfuse's call in a mode of `bench.specialized`, where that is more than `fused` in this mode.
    `product` holds x `[M, K]` and weight `[N, K]` where a bare `torch.mm` makes sense.
    `extras` are the calls of contenders that are the case's own, by their names.
    """

    arguments: tuple[Tensor, ...]
    eager: Callable[..., Tensor]
    fused: Callable[..., Tensor]
    reference: Reference
    explain: Callable[[], Any] | None = None
    product: tuple[Tensor, Tensor] | None = None
    collect: Callable[[Any], Tensor] = lambda result: result
    in_mode: Callable[[str], Callable[[], Any]] | None = None
    extras: Mapping[str, Run] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A call that gives a contender's result, what the result should be, and what `cutfuse.explain` says of it."""

    launch: Callable[[], Any]
    reference: Reference
    explain: Callable[[], Any] | None = None


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": torch.logsumexp,
}


def rows_of(tensor: Tensor, dimensions: int, start: int, stop: int) -> Tensor:
    """Rows `start` to `stop` in fp64; a tensor of fewer than `dimensions` broadcasts along the rows and stays whole."""
    return (tensor[start:stop] if tensor.dim() == dimensions else tensor).double()


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


def reference_model(
    name: str, arguments: tuple[Any, ...], tail: Callable[[Tensor], Tensor], x: Tensor, device: torch.device
) -> Workload:
    """A reference model and its drop-in, sharing one set of parameters; `tail` is what follows the product, if any."""
    with device:
        module = getattr(cutfuse.models, name)(*arguments)
    module = module.to(x.dtype).requires_grad_(False).eval()
    with torch.device("meta"):
        fused = getattr(cutfuse.nn, name)(*arguments)
    fused.load_state_dict(module.state_dict(), strict=True, assign=True)
    fused.requires_grad_(False).eval()

    parameters = dict(module.named_parameters())
    weight = next((value for key, value in parameters.items() if key.endswith("weight")), None)
    bias = next((value for key, value in parameters.items() if key.endswith("bias")), None)

    def rows(start: int, stop: int) -> Tensor:
        return tail(x[start:stop].double() if weight is None else product_rows(x, weight, bias, start, stop))

    per_row = x[0].numel() if weight is None else max(weight.shape[0], x.shape[1])
    return Workload(
        arguments=(x,),
        eager=module,
        fused=fused,
        reference=Reference(rows, x.shape[0], per_row),
        explain=lambda: cutfuse.explain(fused, x),
        product=None if weight is None else (x, weight),
    )


# A result this far off is wrong, not imprecise: by type of the data, well above what rounding explains.
WRONG_ABOVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 5e-2, "fp16": 1e-2}


def squares(result: Tensor, reference: Reference) -> Iterator[tuple[Tensor, Tensor]]:
    """By slices of rows: the squares of the differences to the reference, and of the reference.

    Raises ValueError where the shapes differ.
    """
    for start in range(0, reference.rows, reference.step):
        stop = min(start + reference.step, reference.rows)
        expected = reference.compute(start, stop)
        piece = result[start:stop]
        if piece.shape != expected.shape or result.shape[0] != reference.rows:
            raise ValueError(
                f"the result has shape {tuple(result.shape)}, but its rows {start}:{stop} should be of shape "
                f"{tuple(expected.shape)} out of {reference.rows} rows"
            )
        yield (piece.double() - expected).square_(), expected.square()


def relative_error(result: Tensor, reference: Reference) -> float:
    """The Frobenius norm of `result` minus the reference over the reference's; infinite where one is not a number."""
    difference = torch.zeros((), dtype=torch.float64, device=result.device)
    norm = torch.zeros_like(difference)
    for own, exact in squares(result, reference):
        difference += own.sum()
        norm += exact.sum()
    error = (difference / norm).sqrt().item() if norm.item() else difference.sqrt().item()
    return error if math.isfinite(error) else math.inf


def frobenius_error(result: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference over that of `exact`; infinite where there is a difference to nothing."""
    norm, difference = exact.norm().item(), (result.double() - exact).norm().item()
    if not math.isfinite(difference):
        return math.inf
    return difference / norm if norm else math.inf if difference else 0.0


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def note_wrong(entry: dict[str, Any], error: float, precision: str, of: str = "against fp64") -> None:
    """Note in a contender's entry that its result is wrong, where its error says so: it is then not timed."""
    if error > WRONG_ABOVE[precision]:
        entry["note"] = f"wrong: relative error {error:.1e} {of}"
