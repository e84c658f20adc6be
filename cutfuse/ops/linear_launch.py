"""Runs a fused linear layer's plan: allocates its result and its workspace once, and makes its launches in order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import native
from .device import dtype_codes, on_device, reduction_codes, stream_of
from .linear_plan import LinearArguments
from .planes import Flags, PlaneAddresses, Planes, split_matrix

if TYPE_CHECKING:
    from .._C import FoldPartials, FusedProduct, LinearPlan, Piece, SplitPass
    from .._C import Program as NativeProgram

WORD = 4  # bytes of a flag, and of what counts arrivals

Matrix: TypeAlias = tuple[int, int, int, int, int]  # address, type and strides, as the binding takes them
EpilogueArguments: TypeAlias = "tuple[int, int, int, NativeProgram, list[Matrix]]"
Place = tuple[int, int]  # which memory, and the offset into it
NOWHERE: Place = (-1, 0)  # of a piece without bytes: a null pointer
Launcher: TypeAlias = "Callable[[_Call], None]"


class _Call(NamedTuple):
    """One run of a plan."""

    arguments: LinearArguments
    memories: tuple[int, int, int]  # addresses, by the numbers of the planner's kinds of memory, and null
    result: int
    operands: list[Matrix]
    stream: int

    def at(self, place: Place) -> int:
        memory, offset = place
        return self.memories[memory] + offset

    def flags_at(self, flags: tuple[tuple[Place, int], ...]) -> list[Flags]:
        return [(self.at(place), count) for place, count in flags]

    def epilogue(self, partials: Place | None) -> EpilogueArguments:
        """What the binding takes after the operands of a product; `partials` where it reduces rows."""
        bias = 0 if self.arguments.bias is None else self.arguments.bias.data_ptr()
        result, states = (self.result, 0) if partials is None else (0, self.at(partials))
        return bias, result, states, self.arguments.program.native, self.operands


def launch_fused(plan: LinearPlan, arguments: LinearArguments, planes: Planes | None = None) -> Tensor:
    """The result of a fused plan. `planes`: the weight's, where the plan reads them."""
    x, bias = arguments.x, arguments.bias
    if plan.copies_bias and bias is not None:
        arguments = arguments._replace(bias=bias.clone(memory_format=torch.contiguous_format))
    y = torch.empty(plan.output_shape, dtype=arguments.out_dtype, device=x.device)
    nbytes, workspace, index = plan.workspace_bytes, 0, x.device.index
    if nbytes:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=x.device)  # held until everything is launched
        workspace = memory.data_ptr()
    m, n = x.shape[0], arguments.weight.shape[0]
    operands = [_operand(t, m, n) for t in arguments.operands]
    memories = workspace, 0 if planes is None else planes.memory.data_ptr(), 0
    with on_device(index):
        call = _Call(arguments, memories, y.data_ptr(), operands, stream_of(index))
        for launcher in _launchers(plan):
            launcher(call)
    return y


@functools.lru_cache(maxsize=4096)
def _launchers(plan: LinearPlan) -> tuple[Launcher, ...]:
    """What runs each launch, with all that it needs of the plan read once."""
    core = native.core
    makers: dict[type, Callable[..., Launcher]] = {
        core.SplitPass: _split_pass,
        core.FusedProduct: _fused_product,
        core.FoldPartials: _fold_partials,
    }
    return tuple(makers[type(launch)](launch) for launch in plan.launches)


def _split_pass(launch: SplitPass) -> Launcher:
    scheme, is_weight = int(launch.scheme), launch.is_weight
    values, scales, flags = (
        _place(piece) for piece in (launch.planes.values, launch.planes.scales, launch.planes.flags)
    )
    cleared, cleared_count = _place(launch.cleared), launch.cleared.bytes // WORD
    guard = _flags(launch.guard)

    def run(call: _Call) -> None:
        matrix = call.arguments.weight if is_weight else call.arguments.x
        to = PlaneAddresses(call.at(values), call.at(scales), call.at(flags))
        zeros = call.at(cleared), cleared_count
        split_matrix(call.stream, matrix, scheme, to, is_weight, call.flags_at(guard) or None, zeros)

    return run


def _fused_product(launch: FusedProduct) -> Launcher:
    problem, kernel, when = launch.problem, launch.kernel, launch.when
    partials = _place(launch.partials) if launch.partials.bytes else None
    if not launch.x.values.bytes:

        def run_directly(call: _Call) -> None:
            x, weight = call.arguments.x.data_ptr(), call.arguments.weight.data_ptr()
            native.core.gemm(call.stream, problem, kernel, x, weight, *call.epilogue(partials))

        return run_directly

    x_values, x_scales = _place(launch.x.values), _place(launch.x.scales)
    values, scales = _place(launch.weight.values), _place(launch.weight.scales)
    sums, arrivals = _place(launch.sums), _place(launch.arrivals)
    flags, flag_count = _place(launch.weight_flags), launch.weight_flags.bytes // WORD
    guard = _flags(launch.guard)
    has_planes, pitch = launch.weight.values.bytes > 0, problem.ldb

    def run_over_planes(call: _Call) -> None:
        x = call.at(x_values), call.at(x_scales)
        slices = call.at(sums), call.at(arrivals)
        rest = slices, call.flags_at(guard), when, *call.epilogue(partials)
        if has_planes:
            weight = call.at(values), call.at(scales)
            native.core.gemm_planes(call.stream, problem, kernel, x, weight, *rest)
        else:
            given = call.arguments.weight
            split_here = given.data_ptr(), pitch, given.shape[1], call.at(flags), flag_count
            native.core.gemm_convert(call.stream, problem, kernel, x, split_here, *rest)

    return run_over_planes


def _fold_partials(launch: FoldPartials) -> Launcher:
    partials, tiles = _place(launch.partials), launch.tiles

    def run(call: _Call) -> None:
        arguments = call.arguments
        m, n = arguments.x.shape[0], arguments.weight.shape[0]
        reduction, output = reduction_codes()[arguments.reduction], dtype_codes()[arguments.out_dtype]
        native.core.finalize_partials(call.stream, call.at(partials), tiles, m, reduction, n, call.result, output)

    return run


def _place(piece: Piece) -> Place:
    return (int(piece.memory), piece.offset) if piece.bytes else NOWHERE


def _flags(pieces: list[Piece]) -> tuple[tuple[Place, int], ...]:
    return tuple((_place(piece), piece.bytes // WORD) for piece in pieces)


def _operand(tensor: Tensor, m: int, n: int) -> Matrix:
    """Address, type and strides, 0 where the operand is broadcast."""
    rows, columns = tensor.shape
    if rows not in (1, m) or columns not in (1, n):
        raise ValueError(f"cutfuse: an operand of shape {(rows, columns)} does not broadcast against {(m, n)}")
    row_stride = tensor.stride(0) if rows == m and m > 1 else 0
    column_stride = tensor.stride(1) if columns == n and n > 1 else 0
    return tensor.data_ptr(), dtype_codes()[tensor.dtype], 0, row_stride, column_stride
