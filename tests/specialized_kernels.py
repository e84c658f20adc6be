"""Kernels around a specialized epilogue: their PTX, what ptxas says of it, and their epilogue's values on the CPU."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from ptx_machine import MEMORY_BASE, Machine
from ptx_parser import Function, find_function

from cutfuse.epilogue import Program
from cutfuse.native import module

FRAGMENT = 16
# A thread's elements in the matrix, relative to its first: sm90_epilogue_function.h.
ROWS = np.array([i // 2 % 2 * 8 for i in range(FRAGMENT)])
COLUMNS = np.array([i // 4 * 8 + i % 2 for i in range(FRAGMENT)])
FIRST_COLUMNS = 128  # of neighbouring threads are this far apart
MATRIX_ROWS = 9

# sm90::EpilogueParams: the program, four operands of an address, three strides and a type, two pointers, rows, columns,
# and what is staged for a tile, whose elements lie behind.
PARAMS_BYTES = 1264

ACCUMULATORS = 96  # that a thread still holds of its 128 in the epilogue of a 128x256 tile, after two of eight calls


def head() -> str:
    """The first lines of the snippets' PTX, which the kernels of one build share."""
    lines = module().op_snippets().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith((".version", ".target", ".address_size")))


def signature(name: str, source_bytes: int = 0) -> str:
    parameters = [f".param .b64 {name}_param_0", f".param .b32 {name}_param_1", f".param .b32 {name}_param_2"]
    parameters.append(f".param .align 16 .b8 {name}_param_3[64]")
    if source_bytes:
        parameters.append(f".param .align 4 .b8 {name}_param_4[{source_bytes}]")
    return f".func  (.param .align 16 .b8 func_retval0[64]) {name}(\n\t" + ",\n\t".join(parameters) + "\n)\n"


def staging_mark() -> list[str]:
    """The line by which this build's kernels say that they stage operands, of a register of its own."""
    template = module().kernel_template("sm90_bf16_128x128x64_2x1_pingpong")
    (line,) = [line.strip() for line in template.splitlines() if "operands are staged" in line]
    return [".reg .b32 %staged;", "mov.u32 %staged, 0;", re.sub(r"%r\d+", "%staged", line)]


def make_kernel(primitives: str, number: int = 0, source_bytes: int = 0, stages: bool = False) -> str:
    """A kernel of 168 registers a thread like the GEMMs', which holds values of its own across the epilogue's call.

    source_bytes: of the fragment that it fetches ahead, if it does. stages: says that it stages operands.
    """
    name, kernel = f"run_epilogue{number}_{primitives}Primitives", f"kernel{number}"
    held = range(ACCUMULATORS)
    lines = [f".reg .f32 %f<{FRAGMENT + ACCUMULATORS}>;", ".reg .b64 %rd<3>;", *(staging_mark() if stages else ())]
    lines += [f"ld.param.u64 %rd1, [{kernel}_param_0];", f"ld.param.u64 %rd2, [{kernel}_param_1];"]
    lines += [f"ld.f32 %f{i}, [%rd2+{4 * i}];" for i in range(FRAGMENT + ACCUMULATORS)]
    lines += ["{", ".param .b64 param0;", ".param .b32 param1;", ".param .b32 param2;"]
    lines += [".param .align 16 .b8 param3[64];", ".param .align 16 .b8 retval0[64];"]
    lines += ["st.param.b64 [param0+0], %rd1;", "st.param.b32 [param1+0], 3;", "st.param.b32 [param2+0], 5;"]
    lines += [f"st.param.f32 [param3+{4 * i}], %f{i};" for i in range(FRAGMENT)]
    if source_bytes:
        lines += [f".param .align 4 .b8 param4[{source_bytes}];"]
        lines += [f"st.param.f32 [param4+{4 * i}], %f{FRAGMENT + i};" for i in range(source_bytes // 4)]
    lines += [f"call.uni (retval0), {name}, (param0, param1, param2, param3{', param4' * bool(source_bytes)});"]
    lines += [f"ld.param.f32 %f{i}, [retval0+{4 * i}];" for i in range(FRAGMENT)]
    lines += ["}", *(f"st.f32 [%rd2+{4 * i}], %f{i};" for i in range(FRAGMENT))]
    lines += [f"st.f32 [%rd2+{4 * (FRAGMENT + i)}], %f{FRAGMENT + i};" for i in held]
    entry = f".visible .entry {kernel}(.param .b64 {kernel}_param_0, .param .b64 {kernel}_param_1)\n"
    entry += ".maxntid 384, 1, 1\n.minnctapersm 1\n{\n" + "\n".join(lines) + "\nret;\n}\n"
    declared = signature(name, source_bytes)
    return f"{head()}\n{declared};\n\n{entry}\n{declared}{{\n\tret;\n}}\n"


def operand_types(operands: Sequence[torch.Tensor]) -> list[int]:
    return [module().dtypes()[str(operand.dtype).removeprefix("torch.")] for operand in operands]


def specialize(
    kernel: str, program: Program, types: Sequence[int] | None = None, snippets: str = "", kinds: Sequence[str] = ()
) -> str:
    """The kernel's text with this program; operands are fp32 unless types are given, and strided unless kinds are."""
    types = [module().dtypes()["float32"]] * program.operand_count if types is None else types
    named = [module().OperandKind.__members__[kind] for kind in kinds]
    return module().specialize_kernel(kernel, program.native, types, snippets, named)


def merge(kernels: Sequence[str]) -> str:
    """One module of many kernels, which has the first lines and each table once."""
    tables = {line for kernel in kernels for line in kernel.splitlines() if line.startswith(".global")}
    bodies = [kernel.removeprefix(head()) for kernel in kernels]
    bodies = ["\n".join(line for line in body.splitlines() if line not in tables) for body in bodies]
    return head() + "\n".join([*sorted(tables), *bodies]) + "\n"


def find_ptxas() -> str | None:
    return shutil.which("ptxas", path="/usr/local/cuda/bin") or shutil.which("ptxas")


needs_ptxas = pytest.mark.skipif(find_ptxas() is None, reason="there is no ptxas here")


@dataclass(frozen=True)
class Report:
    """What ptxas -v says of each function: bytes of spills, and registers of the kernel."""

    spills: dict[str, int]
    registers: dict[str, int]
    warnings: list[str]


def assemble(ptx: str, folder: Path, architecture: str = "sm_90a") -> Report:
    ptxas = find_ptxas()
    assert ptxas is not None
    source = folder / "kernels.ptx"
    source.write_text(ptx)
    command = [ptxas, "-v", f"-arch={architecture}", "-O3", str(source), "-o", str(folder / "kernels.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]
    text = result.stderr
    properties = re.findall(
        r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", text
    )
    spills = {name: int(stores) + int(loads) for name, stores, loads in properties}
    registers = dict(re.findall(r"Compiling entry function '(\S+)' [^U]*?Used (\d+) registers", text, re.DOTALL))
    warnings = [line for line in text.splitlines() if "warning" in line.lower() or re.search(r"\bC75\d\d", line)]
    return Report(spills, {name: int(count) for name, count in registers.items()}, warnings)


def assemble_without_spills(ptx: str, folder: Path, architecture: str = "sm_90a", *what: object) -> Report:
    """And without warnings. what: what is assembled, for the message of a failure."""
    report = assemble(ptx, folder, architecture)
    assert not report.warnings, what
    assert not any(report.spills.values()), (*what, report)
    return report


def assert_roundings(ptx: str) -> None:
    """Each operation says how it is rounded, so that ptxas fuses none."""
    assert not re.search(r"\b(add|sub|mul|mad)(\.ftz)?\.f(32|64)\b", ptx), "a rounding is left open"


def spread(values: torch.Tensor) -> torch.Tensor:
    """The matrix in which `Epilogue.run` finds an element of [threads, 16] values for each of its own."""
    threads = len(values)
    matrix = torch.zeros(MATRIX_ROWS, threads * FIRST_COLUMNS, dtype=values.dtype)
    matrix[places(threads)] = values
    return matrix


def gather(operand: torch.Tensor, threads: int) -> torch.Tensor:
    """The elements of a matrix, or of what broadcasts to one, that the threads' fragments have."""
    return operand.broadcast_to(MATRIX_ROWS, threads * FIRST_COLUMNS)[places(threads)]


def places(threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.arange(threads)[:, None] * FIRST_COLUMNS
    return torch.from_numpy(ROWS).expand(threads, FRAGMENT), first + torch.from_numpy(COLUMNS)


def tables_of(ptx: str) -> dict[str, bytes]:
    """The arrays of bytes that a module declares with their values, by name."""
    found = re.findall(r"^\.global [^\n]* (\w+)\[\d+\] = \{([\d, ]*)\};", ptx, re.MULTILINE)
    return {name: bytes(int(number) for number in numbers.split(",")) for name, numbers in found}


class SpecializedEpilogue:
    """A kernel's epilogue function, run by as many threads as there are fragments."""

    def __init__(self, kernel: str, name: str = "run_epilogue") -> None:
        self.kernel = kernel
        self.function: Function = find_function(kernel, name)

    def run(
        self,
        program: Program,
        z: torch.Tensor,
        operands: Sequence[torch.Tensor] = (),
        columns: int | None = None,
        source: torch.Tensor | None = None,
        tile: tuple[int, int] = (0, 0),
        staged: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """z is [threads, 16], as the fragments of a source are. Operands are matrices, or broadcast to one: rows,
        columns, numbers.

        The matrix ends behind the last thread, or after this many columns. tile, staged: as of `memory`.
        """
        threads = len(z)
        memory, symbols = self.memory(program, operands, columns or threads * FIRST_COLUMNS, tile, staged)
        machine = Machine(threads, memory, symbols)
        first = (np.arange(threads) * FIRST_COLUMNS).astype(np.uint32)
        parameters = [np.full(threads, MEMORY_BASE, np.uint64), np.zeros(threads, np.uint32), first]
        rows = [np.ascontiguousarray(value).view(np.uint8).reshape(threads, -1) for value in parameters]
        fragments = [
            t.contiguous().view(torch.uint8).numpy().reshape(threads, -1) for t in (z, source) if t is not None
        ]
        return torch.from_numpy(machine.run(self.function, [*rows, *fragments]).view(np.float32))

    def memory(
        self,
        program: Program,
        operands: Sequence[torch.Tensor],
        columns: int,
        tile: tuple[int, int] = (0, 0),
        staged: torch.Tensor | None = None,
    ) -> tuple[bytes, dict[str, int]]:
        """EpilogueParams, what is staged, then the operands, then the tables of the kernel.

        staged: [4, the longer side of the tile] in fp32.
        """
        head, tail = bytes(program.native), b"" if staged is None else staged.numpy().tobytes()
        records = b""
        for operand, kind in zip(operands, operand_types(operands), strict=True):
            address = MEMORY_BASE + PARAMS_BYTES + len(tail)
            strides = operand.broadcast_to(MATRIX_ROWS, columns).stride()
            records += struct.pack("<Qqqqb7x", address, 0, *strides, kind)
            tail += torch.empty(0, dtype=torch.uint8).set_(operand.untyped_storage()).numpy().tobytes()
            tail += bytes(-len(tail) % 16)
        params = head + records.ljust(4 * 40, b"\0") + struct.pack("<QQii4x2H", 0, 0, MATRIX_ROWS, columns, *tile)
        assert len(params) == PARAMS_BYTES, len(params)
        symbols, memory = {}, params + tail
        for name, table in tables_of(self.kernel).items():
            symbols[name] = len(memory)
            memory += table + bytes(-len(memory + table) % 16)
        return memory, symbols


# The PTX of kernels that interpret programs, which tests compile from the source tree as the build does.


ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
sys.path.append(str(ROOT / "build_backend"))


def compile_ptx(source: str, folder: Path, options: Sequence[str]) -> str:
    """What nvcc makes of a source. Skips the test where there is no source tree, as beside a wheel, or no nvcc."""
    if not CSRC.is_dir():
        pytest.skip("the interpreter's source is only in the source tree")
    import toolchain

    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    (folder / "interpreter.cu").write_text(source)
    own = ["-std=c++17", "-O3", "-DNDEBUG", f"-I{CSRC}", "--expt-relaxed-constexpr", *options]
    result = subprocess.run([nvcc, *own, "-ptx", "interpreter.cu"], cwd=folder, capture_output=True, text=True)
    if "jump-table-density" in result.stderr:  # an option of CUDA 13
        return compile_ptx(source, folder, [option for option in options if "jump-table-density" not in option])
    assert result.returncode == 0, result.stderr
    return (folder / "interpreter.ptx").read_text()
