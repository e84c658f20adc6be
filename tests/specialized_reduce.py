"""Reductions with a program compiled in, and kernels that interpret it: their PTX, run on the CPU as on a GPU."""

from __future__ import annotations

import functools
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ptx_parser import Function, find_kernel
from specialized_kernels import CSRC, compile_ptx, operand_types
from specialized_pointwise import Matrix, Memory
from torch import Tensor

from cutfuse.epilogue import Program
from cutfuse.native import module

PLAN = 24  # where ReducePlan begins in the parameters, behind the extents


class Plan(NamedTuple):
    """What ReducePlan says of how rows and columns are shared out."""

    splits: int
    lanes: int
    vector: int
    height: int

    @classmethod
    def read(cls, parameters: bytes) -> Plan:
        splits, lanes, vector = struct.unpack_from("<8xq8xi4xi", parameters, PLAN)
        return cls(splits, lanes, vector, *struct.unpack_from("<4xi", parameters, PLAN + 56))


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
        memory = Memory(self.text)
        given = problem_of(memory, program, x, operands, reduction, self.columns)
        _, (outer, _, inner), matrix, _, code = given
        rows, kinds = outer * inner, operand_types([torch.empty(0, dtype=out_dtype)])
        out = memory.add_result([rows], out_dtype)
        workspace_bytes = module().reduce_workspace(given[1], matrix[1], code, multiprocessors)
        workspace = memory.add_result([workspace_bytes], torch.uint8) if workspace_bytes else 0
        problem = module().ReduceProblem(*given, kinds[0], out=out, workspace=workspace)
        name = template_name(x.dtype, reduction, self.columns)
        assert problem.kernel == name, "the launch would interpret it"
        parameters, blocks, threads = module().reduce_parameters(problem, multiprocessors)
        plan = Plan.read(parameters)
        memory.launch(
            self.function, self.given(parameters), blocks, threads, first=workspace if plan.splits > 1 else out
        )
        if plan.splits > 1:
            states = (plan.splits, rows, 2 if reduction == "logsumexp" else 1)
            return memory.result(workspace, states, torch.float32), plan
        return memory.result(out, [rows], out_dtype), plan


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


@functools.cache
def interpreting_reduce(columns: bool) -> InterpretingReduce:
    """The interpreting kernel, compiled here with its options but for its functions, which become part of its body."""
    file = CSRC / "reduce" / f"{'strided' if columns else 'row'}_reduce_program.cu"
    source = file.read_text() if file.exists() else ""
    assert "__noinline__" in source or not source
    options = ["-arch=compute_80", "--jump-table-density=50"]
    with tempfile.TemporaryDirectory() as folder:
        return InterpretingReduce(compile_ptx(source.replace("__noinline__", "__forceinline__"), Path(folder), options))


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
    problem = module().ReduceProblem(*problem_of(Memory(), program, x, operands, reduction, columns), 0)
    return [kind.name for kind in problem.operand_kinds]


def turned(matrix: Matrix, dimensions: int) -> Matrix:
    """Strides of (outer, inner, reduced) or (1, outer, reduced) as those of (outer, reduced, inner)."""
    address, code, outer, row, column = matrix
    return (address, code, outer, column, row) if dimensions == 3 else (address, code, row, column, 0)
