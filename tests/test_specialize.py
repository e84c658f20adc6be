"""The PTX of programs compiled into the kernels of a build: what it has to say, and what ptxas makes of it.

Its values are compared on a GPU, by test_gpu_specialization.py and test_random_programs.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from specialized_cases import FOUR, GATED, LIGHT, LONG, call_of, program_of, some_programs
from specialized_kernels import assemble_without_spills, assert_roundings, core, needs_ptxas, specialized

from cutfuse.epilogue import Program, op_table

if not core.cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

TYPES = ("float32", "float16", "bfloat16")
# Whose primitives are fast and accurate, and whose threads hold most accumulators.
GEMMS = ("sm90_bf16_128x256x64_2x1_cooperative", "sm90_tf32_128x256x32_2x1_cooperative")
FETCHING, NOT_FETCHING = "sm90_bf16_64x64x128_1x1_pingpong", "sm90_tf32_64x128x32_1x1_pingpong"
RELU = Program.parse("operands=0; relu z")
PASSES = [f"{kernel}_{dtype}" for kernel in ("pointwise", "pointwise_backward", "row_reduce_sum") for dtype in TYPES]


def with_derivatives(kernel: str, program: Program, wanted: Sequence[int] = (0,)) -> str:
    return specialized(kernel, program, derivatives=list(wanted) if "backward" in kernel else [])


# Numbers in every place: arguments, parameters, and the scale and shift that are folded into an instruction.
NUMBERED = (
    "operands=0; sigmoid {}",
    "operands=0; div z {}; softplus prev {} {}",
    "operands=1; mul z {} -> s0; clamp prev {} {}; mul prev r0; mul prev {}; add prev {}; add prev s0",
    f"operands=0; {LONG}; " + "; ".join(["add z {}; mul prev {}; tanh prev"] * 3),
)


@pytest.mark.parametrize("form", NUMBERED)
@pytest.mark.parametrize("kernel", [FETCHING, *PASSES])
def test_programs_that_differ_in_numbers_have_one_text(kernel: str, form: str) -> None:
    """So a number that changes needs no other kernel, and ptxas has none to approximate otherwise than a GPU does."""
    count = form.count("{}")
    programs = (Program.parse(form.format(*(start + k / 8 for k in range(count)))) for start in (0.25, 1.5))
    first, second = (with_derivatives(kernel, program) for program in programs)
    assert first == second


def test_every_rounding_is_named() -> None:
    """Otherwise ptxas may contract a product in one op with a sum in the next."""
    program = Program.parse("operands=4; mul z r0; add prev r1; mul prev r2; sub prev r3")
    text = specialized(GEMMS[0], program)
    for part in (text[text.rindex("\n.func") :], core.op_snippets()):
        assert_roundings(part)
    contracting = core.op_snippets().replace("mul.rn.f32", "mul.f32")
    with pytest.raises(ValueError, match=r"op_fast_square: 'mul.f32.*names no rounding"):
        specialized(GEMMS[0], program, snippets=contracting)


def test_an_operand_that_nothing_reads_is_not_loaded() -> None:
    text = specialized("pointwise_float32", Program.parse("operands=2; mul z r1; tanh prev"))
    assert "%word1_" in text
    assert "%word0_" not in text


def test_a_masked_tangent_is_selected_as_bits() -> None:
    """ptxas of CUDA 13.0 makes a +0 of a -0 that selp.f32 selects beside 1 or -1: its SASS is FSET.BF."""
    program = Program.parse("operands=0; relu z -> s0; clamp_min z z; add prev s0")
    text = with_derivatives("pointwise_backward_float32", program)
    selections = re.findall(r"selp\.\w+(?= [^;]*\b0f80000000\b)", text)
    assert selections
    assert set(selections) == {"selp.b32"}


def test_what_passes_rotate_is_set_before_them() -> None:
    """ptxas takes a register that nothing has set before a loop for any value: a mask of all elements was lost."""
    text = with_derivatives("pointwise_backward_bfloat16", Program.parse(f"operands=0; trunc z; {LONG}"))
    before, *passes = re.split(r"^\$Lpass\d+:", text, flags=re.MULTILINE)
    assert passes
    for body in (before, *passes[:-1]):
        start = body.splitlines()[-40:]
        assert [
            register for register in range(8) if not any(f"mov.f32 %kept0_{register}, " in line for line in start)
        ] == []


def test_tangents_cost_nothing_where_they_are_known() -> None:
    """One that is 1 or masked for good is no instruction, and a factor is computed once for all derivatives."""
    program = Program.parse("operands=2; add z r0; add prev r1; mul prev 2.0; tanh prev")
    one, all_three = (with_derivatives("pointwise_backward_float32", program, wanted) for wanted in ([0], [0, 1, 2]))
    computed = "\t%factor2a_0, "
    assert one.count(computed) == all_three.count(computed) == 2, "once for each piece"
    assert "%factor0" not in all_three
    assert "%tangent0_0" not in all_three
    unreached = Program.parse("operands=1; mul r0 r0 -> s0; mul z s0; add prev s0")
    assert "%factor0" not in with_derivatives("pointwise_backward_float32", unreached)


@pytest.mark.parametrize(("rows", "lanes"), [(64, 8), (1024, 4)])
def test_fewer_threads_of_more_rows(rows: int, lanes: int) -> None:
    """With a program a thread takes up to 32 vectors of a row, where rows are many."""
    matrix = 0, core.dtypes()["bfloat16"], 512, 1, 0
    codes = core.reductions()["sum"], core.dtypes()["float32"]
    problem = core.ReduceProblem(Program.parse(LIGHT).native, (rows, 512, 1), matrix, [matrix], *codes)
    ((blocks, threads),) = core.reduce_launch_shapes(problem, 1)
    assert blocks * threads == rows * lanes


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "reduction", "launches"),
    [
        (341, 3072, "float32", "sum", [(384, 256)]),  # the partial sums of a bias's gradient
        (64, 16384, "float32", "mean", [(2048, 256)]),
        (12, 1000, "float32", "amax", [(4, 256)]),
        (341, 3072, "bfloat16", "sum", [(30, 256), (12, 256)]),  # of a matrix that is no partial sums
        (341, 3072, "float32", "logsumexp", [(60, 256), (12, 256)]),  # whose partial states are pairs
        (2731, 3072, "float32", "sum", [(504, 256), (384, 256)]),  # more than the L2 keeps
    ],
)
def test_few_rows_of_fp32_are_folded_at_once(
    rows: int, columns: int, dtype: str, reduction: str, launches: list[tuple[int, int]]
) -> None:
    matrix = 0, core.dtypes()[dtype], 0, columns, 1
    codes = core.reductions()[reduction], core.dtypes()["float32"]
    problem = core.ReduceProblem(Program.parse("operands=0").native, (1, rows, columns), matrix, [], *codes)
    assert core.reduce_launch_shapes(problem, 132) == launches


# Errors name what a text lacks.

Change = Callable[[str], str]
KERNEL_FAULTS: dict[str, tuple[str, Change]] = {
    "has no kernel": (GEMMS[0], lambda ptx: ptx.replace(".entry", ".func")),
    "has no header": (GEMMS[0], lambda ptx: ptx.replace(".address_size", ".size")),
    "has no function run_epilogue": (GEMMS[0], lambda ptx: ptx.replace("run_epilogue", "epilogue")),
    "declares run_epilogue, but has no body": (GEMMS[0], lambda ptx: ptx[: ptx.rindex("\n.func")]),
    "ends inside run_epilogue": (GEMMS[0], lambda ptx: ptx[: ptx.rindex("}")]),
    "has no parameter": (GEMMS[0], lambda ptx: ptx.replace("_param_2", "_third")),
    "returns no fragment of 64 bytes": (GEMMS[0], lambda ptx: ptx.replace("func_retval0[64]", "func_retval0[32]")),
    "passes no fragment of 64 bytes": (GEMMS[0], lambda ptx: ptx.replace("param_3[64]", "param_3[32]")),
    "gives run_epilogue a fifth parameter that is no fragment": (
        FETCHING,
        lambda ptx: ptx.replace("param_4[32]", "param_4[16]"),
    ),
    "does not say in .* which primitives": (GEMMS[0], lambda ptx: ptx.replace("FastPrimitives", "Primitives")),
    "does not begin with a cutfuse.layout": (
        "pointwise_float32",
        lambda ptx: re.sub(r"cutfuse\.layout [^;]*;", "cutfuse.layout 1, 2;", ptx),
    ),
    "has '%r1' in cutfuse.layout": (
        "pointwise_float32",
        lambda ptx: re.sub(r"cutfuse\.layout \d+", "cutfuse.layout %r1", ptx),
    ),
    "has an unknown mark cutfuse.other": (
        "pointwise_float32",
        lambda ptx: ptx.replace("cutfuse.load", "cutfuse.other"),
    ),
    "has a cutfuse.load without an offset": (
        "pointwise_float32",
        lambda ptx: re.sub(r"cutfuse\.load [^;]*", "cutfuse.load %rd1, %rd2, %rd3, {0}", ptx),
    ),
    "has a cutfuse.compute of another length": (
        "pointwise_float32",
        lambda ptx: re.sub(r"cutfuse\.compute 0, \{%f\d+,", "cutfuse.compute 0, {", ptx),
    ),
    "has no '.minnctapersm": ("pointwise_float32", lambda ptx: ptx.replace(".minnctapersm", ".minblocks")),
    "has a cutfuse.locate without a position": (
        "row_reduce_amax_float32",
        lambda ptx: re.sub(r"cutfuse\.locate [^;]*", "cutfuse.locate %rd1, %rd2, %rd3", ptx),
    ),
    "has a cutfuse.fetch without a piece": (
        "row_reduce_amax_float32",
        lambda ptx: re.sub(r"cutfuse\.fetch [^;]*", "cutfuse.fetch 0", ptx),
    ),
    "has a cutfuse.derivative of another length": (
        "pointwise_backward_float32",
        lambda ptx: re.sub(r"cutfuse\.derivative 0, \{%f\d+,", "cutfuse.derivative 0, {", ptx),
    ),
}


@pytest.mark.parametrize("message", KERNEL_FAULTS)
def test_errors_name_what_a_kernel_lacks(message: str) -> None:
    kernel, change = KERNEL_FAULTS[message]
    text = core.kernel_template(kernel)
    changed = change(text)
    assert changed != text
    derivatives = [0] if "backward" in kernel else []
    with pytest.raises(ValueError, match=f"the kernel's PTX {message}"):
        specialized(kernel, Program.parse("operands=0; tanh z; neg prev"), template=changed, derivatives=derivatives)


SNIPPET_FAULTS: dict[str, Change] = {
    "there is no function op_fast_tanh": lambda ptx: ptx.replace("op_fast_tanh", "op_fast_other"),
    "op_fast_neg: .* does not return": lambda ptx: re.sub(r"(op_fast_neg\([^}]*)ret;", r"\1", ptx),
    "op_fast_neg: 'call": lambda ptx: re.sub(r"(op_fast_neg\([^}]*)ret;", r"\1call.uni other;\nret;", ptx),
}


@pytest.mark.parametrize("message", SNIPPET_FAULTS)
def test_errors_name_what_the_snippets_lack(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specialized(GEMMS[0], Program.parse("operands=0"), snippets=SNIPPET_FAULTS[message](core.op_snippets()))


def test_errors_name_what_is_asked_of_a_kernel() -> None:
    gated, plain = Program.parse("operands=1; mul z r0"), Program.parse("operands=0; tanh z; neg prev")
    with pytest.raises(ValueError, match="operand 0 has 16 bits, and the kernel fetches 0 words of a source"):
        specialized(GEMMS[1], gated, ["source"], ["float16"])
    with pytest.raises(ValueError, match="operand 0 has 32 bits, and the kernel fetches 8 words of a source"):
        specialized(FETCHING, gated, ["source"], ["float32"])
    with pytest.raises(ValueError, match="the program has 1 operands, got 2"):
        specialized(FETCHING, gated, types=["float32"] * 2)
    with pytest.raises(ValueError, match="is of derivatives, and none is asked for"):
        specialized("pointwise_backward_float32", plain)
    with pytest.raises(ValueError, match="has no marks of derivatives"):
        specialized("pointwise_float32", plain, derivatives=[0])


# A call that nvcc makes of the epilogue's function, in whose place a short program is to stand: what may be around it.
RESULT = r"ld\.param\.f32\s+(%f\d+), \[retval0\+0\];"
PARAMETER = r"(\.param \.b32 param1;)(?=(?:(?!call\.uni)[^$])*retval0\[64\])"


@pytest.mark.parametrize(
    ("place", "instead"),
    [
        (RESULT, "add.s32 %f0, 1, 2;"),
        (RESULT, "ld.param.b64 %rd0, [retval0+0];"),
        (RESULT, "ld.param.f32 %f0, [kernel0_param_0];"),
        (PARAMETER, "ld.param.u32 %place, [kernel0_param_0];"),
        (PARAMETER, "mov.b32 {%place, %other}, %rd1;\n.reg .b32 %place;"),
    ],
)
def test_a_call_that_is_not_as_nvcc_writes_it_is_refused(place: str, instead: str) -> None:
    text = core.kernel_template(FETCHING)
    changed = re.sub(place, instead if place == RESULT else rf"{instead}\n\1", text)
    assert changed != text
    with pytest.raises(ValueError, match="around a call that is to be inlined"):
        specialized(FETCHING, RELU, template=changed, inlines=True)


def test_instructions_between_the_parameters_of_a_call_stay() -> None:
    text = re.sub(PARAMETER, r"add.s32 %place, 1, 2;\n\1", core.kernel_template(FETCHING))
    text = re.sub(r"st\.param\.b32\s+\[param1\+0\], %r\d+;", "st.param.b32 [param1+0], %place;", text)
    inlined = specialized(FETCHING, RELU, template=text, inlines=True)
    assert "add.s32 %place, 1, 2;" in inlined
    assert "mov.b32 %m, %place;" in inlined


# What ptxas makes of it: no spills, no warnings and no calls, and room for blocks as the text asks.


def groups_of(programs: Sequence[str], count: int) -> list[Program]:
    """Programs with two operands of so many ops each."""
    parts = [programs[first : first + count] for first in range(0, len(programs), count)]
    return [Program.parse(f"operands=2; copy r1 -> s0; {'; '.join(part)}") for part in parts]


@needs_ptxas
@pytest.mark.parametrize("kernel", GEMMS)
def test_ptxas_takes_every_op_behind_a_product(kernel: str, tmp_path: Path) -> None:
    for program in groups_of([call_of(op.name) for op in op_table().ops], 4):
        assemble_without_spills(specialized(kernel, program), tmp_path, "sm_90a", program.text)


@needs_ptxas
@pytest.mark.parametrize("kernel", GEMMS)
def test_ptxas_takes_random_programs_behind_a_product(kernel: str, tmp_path: Path) -> None:
    programs = [Program.parse(f"operands=4; gelu z; {FOUR}; tanh prev"), *some_programs(24)]
    for number, program in enumerate(programs):
        types = [TYPES[(number + k) % 3] for k in range(program.operand_count)]
        assemble_without_spills(specialized(kernel, program, types=types), tmp_path, "sm_90a", program.text)


def assert_assembles(
    kernel: str, program: Program, number: int, folder: Path, architecture: str = "sm_90a", wanted: Sequence[int] = ()
) -> None:
    """In a kernel without a product, with operands of each type in turn."""
    types = [TYPES[(number + k) % 3] for k in range(program.operand_count)]
    possible = ("strided", "row", "column", "scalar") if "strided_reduce" in kernel else ("strided", "scalar")
    kinds = [possible[(number // 2 + k) % len(possible)] for k in range(program.operand_count)]
    in_lines = kinds if "reduce" in kernel and number % 2 else ()
    is_latest = architecture != "sm_80"
    text = specialized(kernel, program, in_lines, types, derivatives=list(wanted), launches_early=is_latest)
    assert_roundings(text)
    assert "call" not in text
    assemble_without_spills(text, folder, architecture, kernel, program.text, wanted)


@needs_ptxas
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_ptxas_takes_programs_in_pointwise(tmp_path: Path, architecture: str) -> None:
    programs = [program_of(op.name) for op in op_table().ops] + some_programs(60)
    for text in (
        f"gelu z; {FOUR}; tanh prev",
        f"copy z; {LONG}; {FOUR}",
        f"asin z; {FOUR}; atan2 prev r0; {FOUR}; {LONG}",
    ):
        programs += [Program.parse(f"operands=4; {text}")] * 3
    for number, program in enumerate(programs):
        assert_assembles(f"pointwise_{TYPES[number % 3]}", program, number, tmp_path, architecture)


@needs_ptxas
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "kernel",
    [f"{kind}_reduce_{fold}" for kind in ("row", "strided") for fold in ("sum", "amax", "logsumexp")],
)
def test_ptxas_takes_programs_in_reductions(tmp_path: Path, kernel: str, architecture: str) -> None:
    programs = [Program.parse(text) for text in (LIGHT, GATED, "operands=0; tanh z", f"operands=1; mul z r0; {LONG}")]
    programs += [Program.parse(f"operands=4; {text}") for text in (f"gelu z; {FOUR}", f"copy z; {LONG}; {FOUR}")]
    for number, program in enumerate(programs + some_programs(8)):
        assert_assembles(f"{kernel}_{TYPES[number % 3]}", program, number, tmp_path, architecture)


SIX = "mul z 1.5; add prev 0.25; leaky_relu prev 0.1; clamp prev -4.0 4.0; mul prev 0.75; hardswish prev"
SIX_FULL = "mul z 1.5; add prev 0.25; relu prev; minimum prev r0; mul prev 0.75; hardswish prev"
TWELVE = (
    "mul z z; mul prev z; mul prev 0.044715; add prev z; mul prev 0.797; tanh prev; add prev 1.0; mul prev z; "
    "mul prev 0.5; mul prev r0; add prev r1; relu prev"
)
# Usual programs, each in every type, and the inputs whose derivatives are wanted.
USUAL = [
    ("operands=0; gelu z", [0]),
    (f"operands=0; {SIX}", [0]),
    *((f"operands=1; {SIX_FULL}", wanted) for wanted in ([0], [0, 1])),
    *((f"operands=2; {TWELVE}", wanted) for wanted in ([0], [0, 1], [0, 1, 2])),
    (f"operands=2; {LONG.replace('prev', 'z', 1)}; {TWELVE.replace('mul z z', 'mul prev r1')}", [0, 1, 2]),
]


@needs_ptxas
@pytest.mark.parametrize("kernel", ["pointwise_backward", "pointwise_backward_columns"])
def test_ptxas_takes_derivatives(tmp_path: Path, kernel: str) -> None:
    cases = [(Program.parse(text), wanted) for text, wanted in USUAL for _ in TYPES]
    cases += [(program_of(op.name), range(1 + min(op.arity - 1, 2))) for op in op_table().ops]
    drawn = [program for program in some_programs(40) if program.instructions]
    cases += [(program, [0, *range(1, place % 3 + 1)]) for place, program in enumerate(drawn)]
    for number, (program, wanted) in enumerate(cases):
        assert_assembles(f"{kernel}_{TYPES[number % 3]}", program, number, tmp_path, wanted=wanted)
