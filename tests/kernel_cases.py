"""Tensors in every layout that the pointwise and reduction kernels tell apart, and direct calls of these kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp")
IDENTITY = Program((), 0)

Shape = tuple[int, int, int]
Layout = Callable[[Shape, torch.dtype], Tensor]


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=DEVICE).to(dtype)


def contiguous(shape: Shape, dtype: torch.dtype) -> Tensor:
    return random(shape, dtype)


def offset(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Contiguous, but not on a 16-byte boundary."""
    a, b, c = shape
    return random((a * b * c + 3,), dtype)[3:].view(shape)


def pitched(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Rows with a gap after each, of a length that keeps no alignment."""
    a, b, c = shape
    return random((a, b, c + 5), dtype)[:, :, :c]


def pitched_aligned(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, b, c + 16 - c % 8), dtype)[:, :, :c]


def stepped(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, b, 2 * c), dtype)[:, :, ::2]


def middle_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, c, b), dtype).transpose(1, 2)


def outer_last(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((b, c, a), dtype).permute(2, 0, 1)


def repeated(shape: Shape, dtype: torch.dtype) -> Tensor:
    a, b, c = shape
    return random((a, 1, c), dtype).expand(a, b, c)


LAYOUTS: tuple[Layout, ...] = (
    contiguous,
    offset,
    pitched,
    pitched_aligned,
    stepped,
    middle_last,
    outer_last,
    repeated,
)


def dtype_code(dtype: torch.dtype) -> int:
    return module().dtypes()[str(dtype).removeprefix("torch.")]


def matrix(tensor: Tensor, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    """As the binding takes it: pointer, dtype, strides; broadcast to shape."""
    return (tensor.data_ptr(), dtype_code(tensor.dtype), *tensor.expand(tuple(shape)).stride())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def guarded(shape: Sequence[int], dtype: torch.dtype, margin: int = 64) -> tuple[Tensor, Tensor]:
    """An aligned tensor filled with a mark, and the buffer around it, whose margins have to keep the mark."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * margin,), -77.0, dtype=dtype, device=DEVICE)
    return buffer[margin : margin + size].view(tuple(shape)), buffer


def check_margins(inside: Tensor, buffer: Tensor, margin: int = 64) -> None:
    assert (buffer[:margin] == -77).all(), "written before the start"
    assert (buffer[margin + inside.numel() :] == -77).all(), "written past the end"


def call_reduce(
    x: Tensor,
    reduction: str,
    out_dtype: torch.dtype,
    program: Program = IDENTITY,
    operands: Sequence[Tensor] = (),
) -> Tensor:
    """Over the middle one of three dimensions."""
    a, _, c = x.shape
    code = module().reductions()[reduction]
    size = module().reduce_workspace(tuple(x.shape), dtype_code(x.dtype), code, multiprocessors())
    workspace, workspace_buffer = guarded((size // 4,), torch.float32)
    out, buffer = guarded((a, c), out_dtype)
    module().reduce(
        stream(),
        program.native,
        tuple(x.shape),
        matrix(x, x.shape),
        [matrix(operand, x.shape) for operand in operands],
        code,
        out.data_ptr(),
        dtype_code(out_dtype),
        workspace.data_ptr() if size else 0,
        None,
    )
    check_margins(out, buffer)
    check_margins(workspace, workspace_buffer)
    return out


def call_pointwise(x: Tensor, program: Program, operands: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    out, buffer = guarded(x.shape, out_dtype)
    module().pointwise(
        stream(),
        program.native,
        tuple(x.shape),
        matrix(x, x.shape),
        [matrix(operand, x.shape) for operand in operands],
        out.data_ptr(),
        dtype_code(out_dtype),
        None,  # interpreted
    )
    check_margins(out, buffer)
    return out


def call_backward(
    grad: Tensor,
    x: Tensor,
    program: Program,
    operands: Sequence[Tensor],
    wanted: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    column_sums: bool = False,
    reduction: str = "none",
    row_result: Tensor | None = None,
    tie_count: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """The wanted derivatives, and the partial column sums of the one with respect to x."""
    _, rows, columns = x.shape
    outputs = [guarded(x.shape, dtype) for _ in wanted]
    blocks = module().pointwise_backward_row_blocks(rows, columns)
    partials, partials_buffer = guarded((blocks, columns), torch.float32)
    module().pointwise_backward(
        stream(),
        program.native,
        tuple(x.shape),
        matrix(grad, x.shape),
        matrix(x, x.shape),
        [matrix(operand, x.shape) for operand in operands],
        [(wrt, out.data_ptr(), dtype_code(dtype)) for wrt, (out, _) in zip(wanted, outputs, strict=True)],
        partials.data_ptr() if column_sums else 0,
        {"none": 0, **module().reductions()}[reduction],
        0 if row_result is None else row_result.data_ptr(),
        0 if tie_count is None else tie_count.data_ptr(),
        None,
    )
    for out, buffer in outputs:
        check_margins(out, buffer)
    check_margins(partials, partials_buffer)
    return [out for out, _ in outputs], partials if column_sums else None


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """`bound` beside one rounding of actual's type; NaN and infinities have to be the same."""
    assert actual.shape == expected.shape
    rounding = torch.finfo(actual.dtype).eps / 2 * expected.abs() * 1.001 + torch.finfo(actual.dtype).tiny
    got = actual.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    close = (got - expected).abs() <= rounding + bound
    wrong = (~(same | close)).nonzero()
    assert not wrong.numel(), (
        f"{len(wrong)} of {actual.numel()} wrong, first at {wrong[0].tolist()}: {got[tuple(wrong[0])]} for "
        f"{expected[tuple(wrong[0])]}"
    )
