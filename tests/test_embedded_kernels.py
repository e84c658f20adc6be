"""What the kernels that are embedded in a build have to have so that what is documented as faster happens.

Nothing but time tells whether a mark is found, a call is put in its place or a load is as wide as it may be. Each of
these tests fails where one of that is off in the text that ships.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_products import dtype_of
from plan_cases import plan, transposed
from specialized_kernels import (
    Report,
    assemble,
    assemble_without_spills,
    assert_roundings,
    core,
    needs_ptxas,
    specialized,
)

from cutfuse.epilogue import Program

if not core.cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

RELU = Program.parse("operands=0; relu z")
# All but those of several weights, which run no program.
KERNELS = [kernel for kernel in core.gemm_kernels() if "_joined_" not in kernel]
ON_TENSOR_CORES = [kernel for kernel in KERNELS if "_fp32_" not in kernel]
REDUCING = [kernel for kernel in KERNELS if "_rows_" in kernel]
OVER_PLANES = [kernel for kernel in KERNELS if re.search("_(split|convert)[36]_", kernel)]
FOLDS = {name: code for name, code in core.reductions().items() if name != "none"}
TYPES = ("float32", "float16", "bfloat16")
REDUCTIONS = ("sum", "amax", "amin", "logsumexp")  # the first of each fold


def find_cuobjdump() -> str | None:
    """That of the toolkit or, which has as much of it as it needs, of Triton."""
    found = importlib.util.find_spec("triton")
    folders = [Path(folder) / "backends/nvidia/bin" for folder in (found and found.submodule_search_locations) or ()]
    return next(
        (path for folder in ("/usr/local/cuda/bin", *folders) if (path := shutil.which("cuobjdump", path=folder))), None
    )


needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason="there is no cuobjdump here")


def cuobjdump(*options: str, file: Path | None = None) -> str:
    """What it says of the native module, or of another file."""
    command = [str(find_cuobjdump()), *options, str(file or core.__file__)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fetches_operand(kernel: str) -> bool:
    """Whether the copy engine brings one."""
    return "_param_4[" in core.kernel_template(kernel).split("run_epilogue", 1)[1]


def kind_of_a_matrix(kernel: str) -> str:
    """How the planner has the kernel take a matrix that is laid out as the result."""
    m, n, k = 512, 2048, 1024
    dtype = str(dtype_of(kernel)).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": dtype, "reduction": "sum" if "_rows_" in kernel else "none"}
    if re.search("_b?f16_f32_", kernel):
        options["output"] = "float32"
    if "_tf32_" in kernel:
        options["precision"] = "tf32"
    if kernel in OVER_PLANES:
        options["precision"] = "split" + re.findall("_(?:split|convert)([36])_", kernel)[0]
    if re.search("_[nt]n_", kernel):
        options["weight"] = transposed(n, k)
    if "_tn_" in kernel:
        options["x"] = transposed(m, k)
    found = plan(m, n, k, only=kernel, epilogue_cost=4.0, specialized_cost=1.0, **options)
    program = Program.parse("operands=1; tanh z; mul prev r0")
    (epilogue,) = core.find_epilogues(found, 0, program.native, [(1 << 20, core.dtypes()[dtype], 0, n, 1)])
    kind: str = epilogue.operand_kinds[0].name
    return kind


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_a_kernel_brings_to_shared_memory_is_what_its_epilogue_reads(kernel: str) -> None:
    """Rows, columns and single elements that kernels of the pingpong schedule stage, and a matrix that is fetched."""
    is_fetched = kind_of_a_matrix(kernel) == "source"
    assert fetches_operand(kernel) == is_fetched
    program = Program.parse("operands=4; mul z r0; add prev r1; maximum prev r2; sub prev r3")
    text = specialized(kernel, program, ("row", "column", "scalar", "source" if is_fetched else "scalar"))
    (tile,) = re.findall(r"ld\.v2\.u16\s.*(\[.*\]);", snippet("load_staged_row"))
    assert text.count(tile) - core.kernel_template(kernel).count(tile) == ("pingpong" in kernel) * (4 - is_fetched)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_short_program_stands_in_the_place_of_its_calls(kernel: str) -> None:
    """One of 40 instructions an element, with every kind of operand that is not loaded as a matrix."""
    program = Program.parse("operands=2; mul z r0; silu prev; mul prev 0.5; clamp_open prev -1.0 1.0; add prev r1")
    kept = specialized(kernel, program, ("row", "column"))
    assert re.search(r"call\.uni \(retval0\),\s+\w*run_epilogue", kept)
    assert "run_epilogue" not in specialized(kernel, program, ("row", "column"), inlines=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_stands_in_the_place_of_the_calls_of_a_bare_product(kernel: str) -> None:
    empty = Program.parse("operands=0")
    assert re.search(r"call\.uni \(retval0\),\s+\w*run_epilogue", specialized(kernel, empty))
    assert "run_epilogue" not in specialized(kernel, empty, inlines=True)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in REDUCING])
def test_a_kernel_that_stores_no_pre_activation_never_asks_for_its_address(kernel: str) -> None:
    """The two texts differ in one line for each call of the program."""
    asking = specialized(kernel, RELU).splitlines()
    knowing = specialized(kernel, RELU, stores_pre_activation=False).splitlines()
    calls = len(re.findall(r"call\.uni \(retval0\),\s+\w*run_epilogue", "\n".join(asking)))
    assert len(asking) == len(knowing)
    changed = [instead for line, instead in zip(asking, knowing, strict=True) if line != instead]
    assert len(changed) == calls > 0
    assert all(re.fullmatch(r"\s*mov\.b64 %rd\d+, 0;", line) for line in changed)


@pytest.mark.parametrize("reduction", FOLDS.values(), ids=FOLDS)
@pytest.mark.parametrize("kernel", REDUCING)
def test_a_reduction_stands_in_the_place_of_its_calls(kernel: str, reduction: int) -> None:
    """Its number is known where states begin, where elements are folded in, and where states are folded."""
    asking = specialized(kernel, RELU, inlines=True)
    knowing = specialized(kernel, RELU, inlines=True, reduction=reduction)
    assert "reduce_rows" in asking
    assert "reduce_rows" not in knowing
    asked = re.findall(r"mov\.b32 (%r\d+), \1; // reduction", core.kernel_template(kernel))
    assert len(asked) == 3
    assert {f"\tmov.b32 {register}, {reduction};" for register in asked} <= set(knowing.splitlines())


@pytest.mark.parametrize("kernel", KERNELS)
def test_functions_are_fast_where_16_bits_are_stored(kernel: str) -> None:
    is_fast = dtype_of(kernel) != torch.float32 and "_f32_" not in kernel
    (name,) = set(re.findall(r"(Fast|Accurate)Primitives", core.kernel_template(kernel)))
    assert name == ("Fast" if is_fast else "Accurate")


@pytest.mark.parametrize("kernel", ON_TENSOR_CORES)
def test_products_are_asynchronous_and_the_copy_engine_loads(kernel: str) -> None:
    text = core.kernel_template(kernel)
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text
    assert {"setmaxnreg.inc", "setmaxnreg.dec"} <= set(re.findall(r"setmaxnreg\.\w+", text))


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in ON_TENSOR_CORES])
def test_products_on_cuda_cores_load_vectors(kernel: str) -> None:
    text = core.kernel_template(kernel)
    is_dot = "_8x8x" in kernel
    assert re.search(r"ld\.global\.(nc\.)?v4\.f32" if is_dot else r"cp\.async\.c[ag]\.shared\.global", text)


# Of PTX and of machine code: what touches global memory, leaves, or goes where the text does not say.
PTX_ACCESS = re.compile(
    r"\b(?:ld|st)\.(?!param|shared|const|local)[\w.:]+|\b(?:red|atom|cp|call|ret|exit|brx)\b[\w.:]*"
)
CODE_ACCESS = re.compile(r"\b(?:LDG?|STG?|LDGSTS|REDG?|ATOMG?|UTMA[LS]\w+|UBLK\w+|CALL|RET|EXIT|BRX)\b[\w.]*")


def done_before_waiting(body: str) -> list[str]:
    """What a thread of this kernel may do to global memory before the previous kernel has ended.

    All that stands before the instruction that waits counts, and every branch from there to behind it.
    """
    before, waits, _ = body.partition("griddepcontrol.wait;")
    assert waits, "never waits for the previous kernel"
    branches = re.findall(r"\bbra(?:\.uni)?\s+([\w$]+);", before)
    return PTX_ACCESS.findall(before) + [f"bra {label}" for label in branches if f"{label}:" not in before]


def check_start(body: str) -> None:
    assert done_before_waiting(body) == []
    assert "griddepcontrol.launch_dependents;" in body.partition("griddepcontrol.wait;")[0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_read_or_written_before_the_previous_kernel_ends(kernel: str) -> None:
    """By a GEMM kernel, which starts early: all its threads wait, with a program compiled in as without."""
    for text in (core.kernel_template(kernel), specialized(kernel, RELU), specialized(kernel, RELU, inlines=True)):
        check_start(re.split(r"\.entry\s[^{]*\{", text)[1])


@needs_cuobjdump
def test_other_kernels_of_the_build_wait_too() -> None:
    """Those that every device runs, in their PTX of sm_90 or later."""
    kernels = re.split(r"\.entry\s[^{]*\{", cuobjdump("-ptx"))[1:]
    assert len(kernels) > 50
    for body in kernels:
        check_start(body)
        # But for a table of the sine's, which no kernel writes: the compiler may move such a load to before the wait.
        assert set(re.findall(r"ld\.global\.nc\.(\w+)", body)) <= {"u32"}


@needs_cuobjdump
@pytest.mark.parametrize("kernel", core.gemm_kernels())
def test_machine_code_waits_before_it_touches_global_memory(kernel: str) -> None:
    family = "3fma8fma_gemm" if "_fp32_" in kernel else "4sm909sm90_gemm"
    parameters = "NS0_6ParamsE" if "_fp32_" in kernel else "NT_6ParamsE"
    check_code(cuobjdump("-sass", "-fun", f"_ZN7cutfuse{family}INS_{len(kernel)}{kernel}EEEv{parameters}"))


def check_code(code: str) -> None:
    before, waits, _ = code.partition("ACQBULK")
    assert waits
    assert "PREEXIT" in before
    assert CODE_ACCESS.findall(before) == []
    addresses = [int(address, 16) for address in re.findall(r"/\*([0-9a-f]{4,})\*/ ", before)]
    targets = [int(target, 16) for target in re.findall(r"\bBRA[\w.]* (?:!?U?P\d, )?0x([0-9a-f]+)", before)]
    assert all(target <= addresses[-1] for target in targets)


MARKS = {
    "pointwise_{}": {"layout", "load", "compute"},
    "pointwise_backward_{}": {"layout", "load", "differentiate", "count", "derivative"},
    "pointwise_backward_columns_{}": {"layout", "load_rows", "differentiate", "count", "derivative"},
    **{f"row_reduce_{name}_{{}}": {"layout", "locate", "fetch", "compute"} for name in REDUCTIONS},
    **{f"strided_reduce_{name}_{{}}": {"layout", "locate", "fetch", "compute"} for name in REDUCTIONS},
}


@needs_ptxas
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MARKS)
def test_kernels_with_marks_wait_where_they_are_launched_early(name: str, dtype: str, tmp_path: Path) -> None:
    """Devices before sm_90 launch none early, and their kernels have no such instruction."""
    kernel = name.format(dtype)
    program = Program.parse("operands=2; mul z r0; silu prev; add prev r1")
    wanted = [0] if "backward" in kernel else []
    for derivatives in (wanted, wanted * 2 and [0, 1]):
        text = specialized(kernel, program, derivatives=derivatives, launches_early=True)
        check_start(re.split(r"\.entry\s[^{]*\{", text)[1])
        assert "ld.global.nc" not in text
        if find_cuobjdump() is not None:
            assemble_without_spills(text, tmp_path, "sm_90a", kernel)
            check_code(cuobjdump("-sass", file=tmp_path / "kernels.cubin"))
    plain = specialized(kernel, program, derivatives=wanted)
    assert "griddepcontrol" not in plain
    assert ".target sm_80" in plain


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MARKS)
def test_kernels_with_marks_move_whole_vectors(name: str, dtype: str) -> None:
    """Of 16 bytes: x, gradients and results that are no reduction's. Functions of 16-bit tensors are the fast ones."""
    text = core.kernel_template(name.format(dtype))
    assert re.findall(r"\.entry (\w+)\(", text) == [name.format(dtype)]
    assert_roundings(text)
    assert set(re.findall(r"^\s*cutfuse\.(\w+)", text, re.MULTILINE)) == MARKS[name]
    loads = re.findall(r"ld\.global\.([\w.]+)", text)
    assert loads
    assert all(re.fullmatch(r"(nc\.)?v4\.[uf]32", load) for load in loads)
    if "reduce" in name:
        return
    stores = [store for store in re.findall(r"st\.global\.([\w.]+)", text) if not store.startswith("v4")]
    assert stores == (["f32"] if "columns" in name else []), "but for a column's sum"
    layout = re.findall(r"cutfuse\.layout ([\d, ]+);", text)[0].split(", ")
    assert layout[4] == ("0" if dtype == "float32" else "1")


@pytest.mark.parametrize("operand", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_operands_of_pointwise_are_loaded_by_vectors(dtype: str, operand: str) -> None:
    """As wide as the operand's elements beside 16 bytes of x are, up to 16 bytes; single elements lie in a branch."""
    program = Program.parse("operands=1; mul z r0")
    text = core.specialize_kernel(core.kernel_template(f"pointwise_{dtype}"), program.native, [core.dtypes()[operand]])
    sizes = {name: getattr(torch, name).itemsize for name in TYPES}
    words = 16 // sizes[dtype] * sizes[operand] // 4
    own = Counter(re.findall(r"ld\.global\.(v\d)", core.kernel_template(f"pointwise_{dtype}")))
    added = Counter(re.findall(r"ld\.global\.(v\d)", text)) - own
    assert added == {f"v{min(words, 4)}": 2 * max(words // 4, 1)}, "of each of two pieces"


def snippet(name: str) -> str:
    found = re.search(
        rf"\.visible \.func[^(]*\([^)]*\) {name}\([^)]*\)\s*\{{(.*?)^\}}", core.op_snippets(), re.M | re.S
    )
    assert found
    return found[1]


@pytest.mark.parametrize("dtype", TYPES)
def test_neighbours_are_loaded_together(dtype: str) -> None:
    """Eight pairs of a matrix's fragment and four of a row's."""
    together = re.compile(
        r"ld\.(?:v2\.f32|v2\.u16|u32)\s[^\[]*\[%rd\d+(?:\+\d\d)?\]"
    )  # of the operand, not of parameters
    assert [len(together.findall(snippet(f"load_{what}_{dtype}"))) for what in ("operand", "row")] == [8, 4]


def test_what_is_staged_is_read_without_a_branch() -> None:
    for name, loads in {"scalar": ["f32"], "column": ["f32"] * 2, "row": ["v2.f32"] * 4}.items():
        text = snippet(f"load_staged_{name}")
        assert "bra" not in text
        assert re.findall(r"ld\.([\w.]*f32)", text) == loads


@pytest.mark.parametrize("dtype", TYPES)
def test_a_multiprocessor_has_as_many_blocks_as_registers_leave_room_for(dtype: str) -> None:
    """Ten without operands, and no fewer than five with four matrices."""
    template, blocks = core.kernel_template(f"pointwise_{dtype}"), []
    for count in range(5):
        chain = "; ".join(["tanh z", *(f"mul prev r{k}" for k in range(count))])
        program = Program.parse(f"operands={count}; {chain}")
        text = core.specialize_kernel(template, program.native, [core.dtypes()[dtype]] * count)
        blocks += re.findall(r"\.minnctapersm (\d+)", text)
    numbers = [int(number) for number in blocks]
    assert numbers[0] == 10
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] >= 5


LOOP = re.compile(r"^\$Lpass\d*:", re.MULTILINE)


@pytest.mark.parametrize("name", ["sm90_bf16_128x128x64_2x1_pingpong", "pointwise_float32", "pointwise_bfloat16"])
def test_programs_are_loops_where_they_are_long_alone(name: str) -> None:
    template = core.kernel_template(name)
    short, long = (
        core.specialize_kernel(template, Program.parse(f"operands=0; {text}").native.without_chain, [])
        for text in ("gelu z; tanh prev", "; ".join(["softplus prev 1.0 20.0"] * 24))
    )
    assert not LOOP.search(short)
    assert LOOP.search(long)
    assert '.pragma "nounroll";' in long, "which ptxas keeps"


def test_an_operand_that_a_line_shares_is_loaded_once() -> None:
    """By a kernel that reduces rows against each other, whose loop loads the pieces of a matrix."""
    template, loads = core.kernel_template("strided_reduce_sum_float32"), {}
    program = Program.parse("operands=1; mul z r0; tanh prev")
    for kind in ("strided", "column", "row", "scalar"):
        named = [core.OperandKind.__members__[kind]]
        text = core.specialize_kernel(template, program.native.without_chain, [core.dtypes()["float32"]], kinds=named)
        loads[kind] = text.count("ld.global") - template.count("ld.global")
    assert loads["row"] < loads["strided"] / 2
    assert loads["scalar"] == 1 < loads["column"]


@pytest.mark.parametrize("name", ["sm90_bf16_128x128x64_2x1_pingpong", "pointwise_float32"])
def test_a_number_is_loaded_once_for_all_elements(name: str) -> None:
    program = Program.parse("operands=0; clamp_open z -1.0 1.0; mul prev 0.5; tanh prev; mul prev 2.0")
    text = core.specialize_kernel(core.kernel_template(name), program.native.without_chain, [])
    loaded = re.findall(r"ld[.\w]*\.f32 (%number\w+), \[", text)
    assert len(loaded) == len(set(loaded)) >= 4


# What ptxas makes of kernels with programs in them.


def test_every_kernel_that_runs_a_program_has_a_template() -> None:
    assert KERNELS
    for kernel in KERNELS:
        text = core.kernel_template(kernel)
        assert re.findall(r"\.entry (\w+)\(", text) == [kernel]
    for kernel in {*core.gemm_kernels(), "sm90_nothing"}.difference(KERNELS):
        assert core.kernel_template(kernel) == ""


def test_a_kernel_is_named_after_its_program() -> None:
    kernel = core.gemm_kernels()[0]
    text = specialized(kernel, Program.parse("operands=1; gelu z; mul prev r0; mul prev 0.5"))
    (name,) = re.findall(r"\.entry (\w+)\(", text)
    assert name == f"{kernel}__gelu_mul"
    assert f"{name}_param_0" in text
    assert not re.findall(rf"\b{kernel}\b", text)
    long = specialized(kernel, Program.parse("operands=0; " + "; ".join(["softplus prev 1.0 20.0"] * 32)))
    assert len(re.findall(r"\.entry (\w+)\(", long)[0]) < 250


# How operands lie, by how many there are.
KINDS = {1: ("source",), 3: ("column", "source", "row")}
# Light ops with three fragments of operands; ops of which each element takes many instructions, as a loop.
PROGRAMS = {
    "short": "operands=3; mul z r0 -> s0; add prev 1.5; relu prev; mul prev r1; sub prev s0; maximum prev r2; neg prev",
    "long": "operands=1; " + "; ".join(["tanh prev", "gelu prev", "softplus prev 1.0 20.0"] * 3) + "; mul prev r0",
}


def has_registers(kernel: str, report: Report) -> bool:
    """A warp-specialised kernel has as many as it was launched with, whatever it uses; others use up to their limit."""
    (registers,) = report.registers.values()
    is_bound_to_two_blocks = "_16x32x" in kernel or "_8x8x" in kernel
    return registers <= (128 if is_bound_to_two_blocks else 255) if "_fp32_" in kernel else registers == 168


# What the driver is given without a function: eight copies of six ops with two operands, the longest of what is short.
INLINED = "operands=2; mul z r0; silu prev; mul prev 0.5; clamp_open prev -1.0 1.0; tanh prev; add prev z; add prev r1"


@needs_ptxas
@pytest.mark.parametrize("kernel", KERNELS)
def test_ptxas_takes_a_program_in_the_place_of_the_calls(kernel: str, tmp_path: Path) -> None:
    options = {"inlines": True, "stores_pre_activation": False}
    text = specialized(kernel, Program.parse(INLINED), ("row", "column"), **options)
    report = assemble_without_spills(text, tmp_path)
    assert has_registers(kernel, report)


# PyTorch's own formulas, with both divisions.
EAGER = (
    "operands=1 eager; bfloat16 z -> s0; silu prev; bfloat16 prev; mul prev r0; bfloat16 prev; gelu prev; div prev s0"
)


@needs_ptxas
@pytest.mark.parametrize("inlines", [False, True])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "_bf16_" in kernel and kernel not in REDUCING])
def test_ptxas_takes_pytorchs_own_formulas(kernel: str, inlines: bool, tmp_path: Path) -> None:
    text = specialized(kernel, Program.parse(EAGER), ("row",), inlines=inlines)
    assert has_registers(kernel, assemble_without_spills(text, tmp_path))


@needs_ptxas
@pytest.mark.parametrize("reduction", FOLDS.values(), ids=FOLDS)
@pytest.mark.parametrize("kernel", REDUCING)
def test_ptxas_takes_a_reduction_in_the_place_of_the_calls(kernel: str, reduction: int, tmp_path: Path) -> None:
    text = specialized(kernel, RELU, inlines=True, reduction=reduction)
    report = assemble_without_spills(text, tmp_path)
    assert list(report.registers.values()) == [168]


@needs_ptxas
@pytest.mark.parametrize("kernel", KERNELS)
def test_ptxas_takes_the_kernel_with_a_program(kernel: str, tmp_path: Path) -> None:
    """Without a warning that wgmma or registers of warp groups are given up, in as many registers, and without spills.
    The same where the copy engine fetches an operand.

    Three matrices' fragments spill up to 92 bytes a call in four kernels that reduce rows and in two that may fetch an
    operand in fp32, less than loading them one by one takes.
    """
    fetches = fetches_operand(kernel)
    spills = "rows_128x128" in kernel or ("sm90_tf32_128x128" in kernel and fetches)
    for name, text in PROGRAMS.items():
        program = Program.parse(text)
        report = assemble(specialized(kernel, program, types=["bfloat16"] * program.operand_count), tmp_path)
        assert not report.warnings, name
        spilled = sum(report.spills.values())
        assert spilled <= (92 if name == "short" and spills else 0), (name, spilled)
        assert has_registers(kernel, report), name
        if fetches:
            fetching = specialized(kernel, program, KINDS[program.operand_count])
            assert has_registers(kernel, assemble_without_spills(fetching, tmp_path, "sm_90a", name)), name


# What ops.def says that an op takes, counted in the PTX that kernels have compiled in.


SPECIAL_FUNCTIONS = {"ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "sqrt"}
FREE = ("ld.param", "st.param", "mov", "ret")  # of the function, which is pasted, and moves that ptxas takes out
FUNCTION = re.compile(
    r"\.visible \.func[^(]*\([^)]*\) op_(fast|accurate)_(\w+)\([^)]*\)\s*\{(.*?)^\}", re.MULTILINE | re.DOTALL
)


def work_of(body: str) -> tuple[int, int]:
    """Instructions of a function, and the special functions among them."""
    instructions = special = 0
    for statement in re.split(r"[;{}\n]", body):
        opcode = re.sub(r"^@!?%?\w+\s+", "", statement.strip()).split(" ")[0].split("\t")[0]
        if not opcode or opcode[0] in "./$%" or opcode.endswith(":") or opcode.startswith(FREE):
            continue
        instructions += 1
        special += opcode.split(".")[0] in SPECIAL_FUNCTIONS or opcode.startswith("div.full")
    return instructions, special


def test_the_table_has_what_the_compiler_makes_of_each_op() -> None:
    counted = {(kind, name): work_of(body) for kind, name, body in FUNCTION.findall(core.op_snippets())}
    table = {}
    for op in core.op_table():
        table["fast", op.name] = op.fast_work
        table["accurate", op.name] = op.accurate_work
    wrong = {
        key: f"ops.def has Work{work}, counted Work{counted[key]}"
        for key, work in table.items()
        if counted[key] != work
    }
    assert not wrong
