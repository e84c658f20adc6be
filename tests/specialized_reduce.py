"""Reductions with a program compiled in: their PTX, run on the CPU as a GPU would launch it, and what it is to give.

What it is to give is what row_reduce_program and strided_reduce_program do, written down a second time: the elements
of a thread in their order, and how they and the threads are folded.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ptx_arithmetic import APPROXIMATIONS, exact_sum, flushed, to_single
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import Function, find_kernel
from specialized_kernels import operand_types
from specialized_pointwise import Matrix, Memory
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

THREADS = 256
FRAGMENT = 16
COLUMN_FRAGMENT = 4
STRIDED = 2  # ReducePath
WARP = 32
PLAN = 24  # where ReducePlan begins in the parameters, behind the extents
Array = np.ndarray


class Plan(NamedTuple):
    """What ReducePlan says of how rows and columns are shared out."""

    is_strided: bool
    splits: int
    chunk: int
    lanes: int
    vector: int
    width: int
    height: int

    @classmethod
    def read(cls, parameters: bytes) -> Plan:
        path, splits, chunk, lanes, _, vector = struct.unpack_from("<i4xqqiii", parameters, PLAN)
        return cls(path == STRIDED, splits, chunk, lanes, vector, *struct.unpack_from("<ii", parameters, PLAN + 56))


def kernel_text(
    program: Program,
    x: torch.dtype,
    reduction: str,
    operands: Sequence[Tensor] = (),
    columns: bool = False,
    kinds: Sequence[str] = (),
) -> str:
    """Operands are strided unless kinds are given."""
    template = module().kernel_template(template_name(x, reduction, columns))
    assert template
    named = [module().OperandKind.__members__[kind] for kind in kinds]
    return module().specialize_kernel(template, program.native.without_chain, operand_types(operands), kinds=named)


def template_name(x: torch.dtype, reduction: str, columns: bool = False) -> str:
    fold = "sum" if reduction == "mean" else reduction
    return f"{'strided' if columns else 'row'}_reduce_{fold}_{str(x).removeprefix('torch.')}"


class SpecializedReduce:
    """A specialized kernel.

    `run` gives its result for x `[rows, reduced]` or `[outer, inner, reduced]`, and of one that reduces columns for x
    `[reduced, inner]` or `[outer, reduced, inner]`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns = ".entry strided_reduce_" in text
        self.function: Function = find_kernel(text, "strided_reduce_" if self.columns else "row_reduce_")

    def given(self, parameters: bytes) -> bytes:
        """What the kernel is given."""
        return parameters

    def run(
        self,
        program: Program,
        x: Tensor,
        operands: Sequence[Tensor] = (),
        reduction: str = "sum",
        multiprocessors: int = 1,
        out_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Plan]:
        """The result, or the partial states of each split where a second kernel folds them, and the plan."""
        memory = Memory()
        symbols = memory.add_tables(self.text)
        problem = problem_of(memory, program, x, operands, reduction, self.columns)
        _, (outer, _, inner), matrix, _, code = problem
        name = template_name(x.dtype, reduction, self.columns)
        assert module().reduce_kernel(*problem) == name, "the launch would interpret it"
        rows, kinds = outer * inner, operand_types([torch.empty(0, dtype=out_dtype)])
        out = memory.add(b"\xff" * (rows * out_dtype.itemsize))
        workspace_bytes = module().reduce_workspace(problem[1], matrix[1], code, multiprocessors)
        workspace = memory.add(b"\xff" * workspace_bytes) if workspace_bytes else 0
        parameters, blocks, threads = module().reduce_parameters(*problem, out, kinds[0], workspace, multiprocessors)
        plan = Plan.read(parameters)
        width = 2 if reduction == "logsumexp" else 1
        start = (workspace if plan.splits > 1 else out) - MEMORY_BASE
        size = plan.splits * rows * width * 4 if plan.splits > 1 else rows * out_dtype.itemsize
        lanes = np.arange(blocks * threads)
        special = {"%tid.x": lanes % threads, "%ctaid.x": lanes // threads, "%ntid.x": np.full_like(lanes, threads)}
        stores = range(start, start + size)
        machine = Machine(len(lanes), bytes(memory.image), symbols, special, stores, threads)
        row = np.frombuffer(self.given(parameters), np.uint8)
        machine.run(self.function, [np.broadcast_to(row, (len(lanes), len(row)))])
        result = torch.from_numpy(machine.memory[start : stores.stop].copy())
        if plan.splits > 1:
            return result.view(torch.float32).view(plan.splits, rows, width), plan
        return result.view(out_dtype).view(rows), plan


class InterpretingReduce(SpecializedReduce):
    """A kernel of row_reduce_program.cu or strided_reduce_program.cu, what it calls in its body, for such calls."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns = "strided_reduce_program" in text
        self.function = find_kernel(
            text, rf"\w*{'strided_reduce_programILi8E' if self.columns else 'row_reduce_program'}"
        )

    def given(self, parameters: bytes) -> bytes:
        """Of rows, RowProgramParameters: a shift follows, of lines whose neighbours fill a vector."""
        return (
            parameters
            if self.columns
            else parameters + struct.pack("<i12x", Plan.read(parameters).vector.bit_length() - 1)
        )


Problem = tuple[Any, tuple[int, int, int], Matrix, list[Matrix], int]


def problem_of(
    memory: Memory, program: Program, x: Tensor, operands: Sequence[Tensor], reduction: str, columns: bool
) -> Problem:
    """A launch's arguments, of tensors that are put into the memory."""
    extents = [*([1] * (3 - x.dim())), *x.shape]
    fields = [memory.add_tensor(tensor, extents) for tensor in (x, *operands)]
    outer, reduced, inner = extents
    if not columns:
        fields = [turned(matrix, x.dim()) for matrix in fields]
        outer, inner, reduced = extents if x.dim() == 3 else (extents[1], 1, extents[2])
    return program.native, (outer, reduced, inner), fields[0], fields[1:], module().reductions()[reduction]


def kinds_of(program: Program, x: Tensor, operands: Sequence[Tensor], reduction: str, columns: bool) -> list[str]:
    """How the operands lie along the threads' lines, which a launch has compiled in."""
    problem = problem_of(Memory(), program, x, operands, reduction, columns)
    return [kind.name for kind in module().reduce_operand_kinds(*problem)]


def turned(matrix: Matrix, dimensions: int) -> Matrix:
    """Strides of (outer, inner, reduced) or (1, outer, reduced) as those of (outer, reduced, inner)."""
    address, code, outer, row, column = matrix
    return (address, code, outer, column, row) if dimensions == 3 else (address, code, row, column, 0)


State = tuple[Array, Array]


def fold_in_order(values: Tensor, reduction: str, plan: Plan) -> Tensor:
    """The states of rows `[rows, reduced]` of fp32: finished, or `[splits, rows, width]` where there are several."""
    fold = FOLDS[reduction]
    columns = values.numpy()
    chunks = [columns[:, begin : begin + plan.chunk] for begin in range(0, columns.shape[1], plan.chunk)]
    fold_chunk = fold_column if plan.is_strided else fold_row
    with np.errstate(all="ignore"):
        states = [fold_chunk(fold, chunk, plan) for chunk in chunks]
        if plan.splits > 1:
            return torch.from_numpy(np.stack([fold.partial(state) for state in states]))
        return torch.from_numpy(fold.finish(states[0], np.float32(columns.shape[1]), reduction))


class Total:
    fill = np.float32(0)
    start = np.float32(0)

    @staticmethod
    def add(state: State, x: Array) -> State:
        a, b = state
        total = a + x
        added = total - a
        return total, b + ((a - (total - added)) + (x - added))

    @classmethod
    def take(cls, state: State, values: list[Array]) -> State:
        while len(values) > 1:
            values = [values[k] + values[k + 1] for k in range(0, len(values), 2)]
        return cls.add(state, values[0])

    @classmethod
    def combine(cls, x: State, y: State) -> State:
        a, b = cls.add(x, y[0])
        return a, b + y[1]

    @classmethod
    def total(cls, state: State) -> Array:
        total = state[0] + state[1]
        return np.where(total - total == 0, total, state[0])

    @classmethod
    def partial(cls, state: State) -> Array:
        return cls.total(state)[:, None]

    @classmethod
    def finish(cls, state: State, count: np.float32, reduction: str) -> Array:
        return cls.total(state) / count if reduction == "mean" else cls.total(state)


class Extreme:
    def __init__(self, choose: Callable[[Array, Array], Array], fill: float) -> None:
        self.choose = choose
        self.fill = self.start = np.float32(fill)

    def take(self, state: State, values: list[Array]) -> State:
        a = state[0]
        for value in values:
            a = self.choose(a, value)
        return a, state[1]

    def combine(self, x: State, y: State) -> State:
        return self.choose(x[0], y[0]), np.zeros_like(x[0])

    def partial(self, state: State) -> Array:
        return state[0][:, None]

    def finish(self, state: State, count: np.float32, reduction: str) -> Array:
        return state[0]


class Exponentials:
    fill = start = np.float32(-np.inf)

    @staticmethod
    def relative(x: Array, reference: Array) -> Array:
        exponent = flushed((x - reference) * np.float32(1.4426950408889634))
        return flushed(APPROXIMATIONS["ex2"](exponent.astype(np.float64)).astype(np.float32))

    @staticmethod
    def reference(maximum: Array) -> Array:
        return np.where(np.isinf(maximum), np.float32(0), maximum)

    @classmethod
    def take(cls, state: State, values: list[Array]) -> State:
        maximum = functools.reduce(np.maximum, values, state[0])
        reference = cls.reference(maximum)
        carried = state[1].astype(np.float64) * cls.relative(state[0], reference)
        total = to_single(exact_sum(carried, cls.relative(values[0], reference).astype(np.float64)), "rn")
        for value in values[1:]:
            total = total + cls.relative(value, reference)
        return maximum, total

    @classmethod
    def combine(cls, x: State, y: State) -> State:
        maximum = np.maximum(x[0], y[0])
        reference = cls.reference(maximum)
        return maximum, x[1] * cls.relative(x[0], reference) + y[1] * cls.relative(y[0], reference)

    @staticmethod
    def partial(state: State) -> Array:
        return np.stack(state, axis=-1)

    @staticmethod
    def finish(state: State, count: np.float32, reduction: str) -> Array:
        return state[0] + np.log(state[1].astype(np.float64)).astype(np.float32)  # its last bit may differ


Fold = Total | Extreme | Exponentials
FOLDS: dict[str, Fold] = {
    "sum": Total(),
    "mean": Total(),
    "amax": Extreme(np.maximum, -np.inf),
    "amin": Extreme(np.minimum, np.inf),
    "logsumexp": Exponentials(),
}


def fold_row(fold: Fold, chunk: Array, plan: Plan) -> State:
    return fold_threads(fold, [take_lane(fold, chunk, plan, lane) for lane in range(plan.lanes)])


def fold_column(fold: Fold, chunk: Array, plan: Plan) -> State:
    """Threads above each other, each of which takes a few rows at once, and then pairs of them as combine_height."""
    states = [
        take_places(fold, chunk, range(y, chunk.shape[1], plan.height), COLUMN_FRAGMENT) for y in range(plan.height)
    ]
    while len(states) > 1:
        half = (len(states) + 1) // 2
        states = [fold.combine(*states[k::half]) if k + half < len(states) else states[k] for k in range(half)]
    return states[0]


def take_lane(fold: Fold, chunk: Array, plan: Plan, lane: int) -> State:
    """What one thread of each row takes: vectors that lie `lanes` vectors apart, in fragments."""
    vectors = range(lane * plan.vector, chunk.shape[1], plan.lanes * plan.vector)
    return take_places(fold, chunk, [first + k for first in vectors for k in range(plan.vector)], FRAGMENT)


def take_places(fold: Fold, chunk: Array, places: Sequence[int], fragment: int) -> State:
    rows = len(chunk)
    state = np.full(rows, fold.start), np.zeros(rows, np.float32)
    for first in range(0, len(places), fragment):
        values = [chunk[:, place] for place in places[first : first + fragment]]
        state = fold.take(state, values + [np.full(rows, fold.fill)] * (fragment - len(values)))
    return state


def fold_threads(fold: Fold, states: list[State]) -> State:
    """As combine_threads: pairs of a warp at growing distances, then one warp after another."""
    lanes = len(states)
    distance = 1
    while distance < min(lanes, WARP):
        states = [fold.combine(states[k], states[k ^ distance]) for k in range(lanes)]
        distance *= 2
    state = states[0]
    for first in range(WARP, lanes, WARP):
        state = fold.combine(state, states[first])
    return state
