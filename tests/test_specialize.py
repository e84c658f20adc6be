"""Specialized epilogues without a GPU: the values of their PTX, the bits of the interpreter, what ptxas makes of it."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from host_program import run_on_host
from hypothesis import given, settings
from random_programs import OPERANDS, Recipe, make_inputs, make_program, recipes
from specialized_backward import SpecializedBackward, backward_text
from specialized_cases import FOUR, LONG, SPECIAL, long_program, program_of, some_programs
from specialized_kernels import (
    FRAGMENT,
    SpecializedEpilogue,
    assemble,
    assert_roundings,
    compile_ptx,
    gather,
    make_kernel,
    merge,
    needs_ptxas,
    operand_types,
    specialize,
    spread,
)

from cutfuse import native
from cutfuse.epilogue import Program, op_table

if not native.module().cuda_build:
    pytest.skip("this build of cutfuse has no CUDA kernels", allow_module_level=True)

PRIMITIVES = ("Accurate", "Fast")
THREADS = 64
# Ops that are exact, or rounded once: everywhere the same.
ROUNDED_ONCE = """
copy neg abs square sign floor ceil round trunc relu relu6 leaky_relu clamp hardtanh hardsigmoid hardswish logical_not
add sub mul maximum minimum clamp_min clamp_max gt ge lt le eq ne logical_and logical_or where clamp_tensor lerp
"""
EXACT_NAMES = frozenset(ROUNDED_ONCE.split())
# Units in the last place of the fast primitives: the argument of ex2 is rounded once, |x| * 2^-24, the distribution of
# gelu is a fit, and others are series of few terms near 0.
FAST_ULPS = {
    **dict.fromkeys(("exp", "sigmoid", "silu", "gelu_tanh", "tanh", "mish"), 64),
    **dict.fromkeys(("expm1", "elu", "selu", "celu", "log", "log1p", "logsigmoid", "softplus", "erf"), 128),
    "gelu": 1200,
    "hardswish": 2,
}


def order_of(values: torch.Tensor) -> torch.Tensor:
    """Integers that neighbouring fp32 numbers are neighbours in."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def assert_near(got: torch.Tensor, expected: torch.Tensor, ulps: int, floor: float) -> None:
    """Within `ulps` units in the last place or `floor`, and NaN where NaN is expected."""
    assert torch.equal(got.isnan(), expected.isnan())
    near = (order_of(got) - order_of(expected)).abs() <= ulps
    near |= (got - expected).abs() <= floor
    wrong = ~(near | got.isnan())
    assert not wrong.any(), (got[wrong][:4], expected[wrong][:4])


def run(program: Program, z: torch.Tensor, operands: list[torch.Tensor], primitives: str = "Accurate") -> torch.Tensor:
    """The specialized program at z, of any number of elements, and operands of as many: each thread takes 16."""
    count = -(-len(z) // FRAGMENT) * FRAGMENT
    fragments = [torch.nn.functional.pad(item, (0, count - len(item))).view(-1, FRAGMENT) for item in (z, *operands)]
    text = specialize(make_kernel(primitives), program)
    result = SpecializedEpilogue(text).run(program, fragments[0], [spread(item) for item in fragments[1:]])
    return result.reshape(-1)[: len(z)]


@functools.cache
def special_inputs() -> list[torch.Tensor]:
    """Every pair of special values, and ordinary ones."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    others = torch.randn(THREADS * FRAGMENT - len(pairs), 3, generator=generator) * 3
    z, r, s = pairs[:, 0], pairs[:, 1], pairs[:, 1].roll(7)
    return [torch.cat([special, other]) for special, other in zip((z, r, s), others.T, strict=True)]


@pytest.mark.parametrize("primitives", PRIMITIVES)
@pytest.mark.parametrize("name", [op.name for op in op_table().ops])
def test_an_op_gives_what_the_host_does(name: str, primitives: str) -> None:
    """Up to roundings of the approximations in it, and numbers below the smallest normal one."""
    z, *operands = special_inputs()
    program = program_of(name)
    expected = run_on_host(program, z, operands)
    # gelu adds 1 and an erf near -1. A quick reciprocal flushes where sigmoid is subnormal, and silu and mish with it.
    floor = {"gelu": 1e-6, "silu": 1e-35, "mish": 1e-35}.get(name, 1.2e-38)
    ulps = 0 if name in EXACT_NAMES else 4
    if primitives == "Fast":
        if name == "hardswish":  # the host multiplies by 6 before it divides by 6, which overflows
            floor, expected = 1e-7, torch.where(expected.isinf() & z.isfinite(), z, expected)
        ulps = FAST_ULPS.get(name, ulps)
    assert_near(run(program, z, operands, primitives), expected, ulps, floor if ulps else 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "operands=0",
        "operands=0; add 1.0 2.0; mul prev z",
        "operands=2; copy r1 -> s5; mul z 3.0 -> s0; sub 1.0 prev; add s0 prev; add prev r0; where prev 2.0 s5",
        "operands=0; mul z z -> s0; add prev z -> s0; sub s0 1.5",
        "operands=1; mul z 2.0; add prev 3.0; mul r0 prev; sub prev 0.1",
        "operands=0; relu z; mul prev 0.3; add prev z",
    ],
)
def test_every_source_of_an_argument(text: str) -> None:
    program = Program.parse(text)
    z, *operands = [tensor.float() for tensor in make_inputs()][: 1 + program.operand_count]
    assert_near(run(program, z, operands), run_on_host(program, z, operands), 0, 0.0)


MATRIX = torch.randn(9, 8 * 128, generator=torch.Generator().manual_seed(2))
LAYOUTS = {
    "matrix": MATRIX,
    "transposed": MATRIX.T.contiguous().T,
    "odd row pitch": torch.nn.functional.pad(MATRIX, (0, 1))[:, :-1],
    "row": MATRIX[0].clone(),
    "column": MATRIX[:, :1].clone(),
    "number": MATRIX[0, 0].clone(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", ["short", "long"])
def test_operands_of_every_layout(dtype: torch.dtype, length: str) -> None:
    program = Program.parse(
        "operands=1; mul z r0" if length == "short" else f"operands=1; mul z r0; {LONG}; mul prev r0"
    )
    text = None
    z = torch.randn(8, FRAGMENT, generator=torch.Generator().manual_seed(3))
    for name, layout in LAYOUTS.items():
        operand = layout.to(dtype)
        text = text or specialize(make_kernel("Accurate"), program, operand_types([operand]))
        values = gather(operand, 8).float()
        expected = run_on_host(program, z.reshape(-1), [values.reshape(-1)]).view(z.shape)
        got = SpecializedEpilogue(text).run(program, z, [operand])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


KINDS = {"row": MATRIX[0].clone(), "odd row": MATRIX[0, 1:].clone(), "column": MATRIX[:, :1].clone()}
KINDS["scalar"] = MATRIX[0, 0].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("name", KINDS)
def test_operands_of_every_kind(name: str, dtype: torch.dtype, length: str) -> None:
    """Of few elements, which are loaded once and held: as matrices of them are."""
    middle = f"{LONG}; " if length == "long" else ""
    program = Program.parse(f"operands=3; mul z r0; {middle}mul prev r1; add prev r2")
    operands = [MATRIX.bfloat16(), KINDS[name].to(dtype), MATRIX[0].half()]
    z = torch.randn(8, FRAGMENT, generator=torch.Generator().manual_seed(3))
    columns = len(KINDS["odd row"]) if name == "odd row" else None
    kinds = ["strided", name.split()[-1], "row"]
    if columns:
        operands = [operands[0][:, :columns], operands[1], operands[2][:columns]]
    results = [
        SpecializedEpilogue(specialize(make_kernel("Accurate"), program, operand_types(operands), kinds=own)).run(
            program, z, operands, columns=columns
        )
        for own in (kinds, ())
    ]
    assert torch.equal(results[0], results[1])
    assert results[0].unique().numel() > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", ["short", "long"])
def test_a_source_is_a_fragment(dtype: torch.dtype, length: str) -> None:
    """Between two operands that are loaded."""
    middle = f"{LONG}; " if length == "long" else ""
    program = Program.parse(f"operands=3; mul z r0; {middle}mul prev r1; add prev r2")
    operands = [MATRIX, MATRIX.flip(0).contiguous().to(dtype), MATRIX[:, :1].clone()]
    z = torch.randn(8, FRAGMENT, generator=torch.Generator().manual_seed(3))
    types = operand_types(operands)
    plain = SpecializedEpilogue(specialize(make_kernel("Accurate"), program, types)).run(program, z, operands)
    kernel = make_kernel("Accurate", source_bytes=FRAGMENT * dtype.itemsize)
    fetching = SpecializedEpilogue(specialize(kernel, program, types, kinds=["strided", "source", "column"]))
    unread = [operands[0], torch.full_like(operands[1], torch.nan), operands[2]]
    got = fetching.run(program, z, unread, source=gather(operands[1], 8))
    assert torch.equal(got, plain)


def test_a_source_has_to_be_what_the_kernel_fetches() -> None:
    program = Program.parse("operands=1; mul z r0")
    half = operand_types([MATRIX.half()])
    with pytest.raises(ValueError, match="operand 0 has 16 bits, and the kernel fetches 0 words of a source"):
        specialize(make_kernel("Fast"), program, half, kinds=["source"])
    with pytest.raises(ValueError, match="operand 0 has 32 bits, and the kernel fetches 8 words of a source"):
        specialize(make_kernel("Fast", source_bytes=32), program, kinds=["source"])
    with pytest.raises(ValueError, match="no fragment of 32 or 64 bytes"):
        specialize(make_kernel("Fast", source_bytes=16), program)


@pytest.mark.parametrize("length", ["short", "long"])
def test_nothing_is_read_outside_the_matrix(length: str) -> None:
    """The last threads' fragments lie across its end: there the operand is 0, and its memory ends."""
    program = Program.parse("operands=1; add z r0" if length == "short" else f"operands=1; {LONG}; add z r0")
    z = torch.randn(2, FRAGMENT)
    text = specialize(make_kernel("Accurate"), program)
    operand = MATRIX[:, : 128 + 11].clone()
    inside = gather(torch.nn.functional.pad(operand, (0, 256 - operand.shape[1])), 2)
    got = SpecializedEpilogue(text).run(program, z, [operand], columns=operand.shape[1])
    assert torch.equal(got, z + inside)


# Numbers in every place: arguments, parameters, and the scale and shift that are folded into an instruction.
NUMBERED = (
    "operands=0; sigmoid {}",
    "operands=0; div z {}; softplus prev {} {}",
    "operands=1; mul z {} -> s0; clamp prev {} {}; mul prev r0; mul prev {}; add prev {}; add prev s0",
    f"operands=0; {LONG}; " + "; ".join(["add z {}; mul prev {}; tanh prev"] * 3),
)


@pytest.mark.parametrize("form", NUMBERED)
def test_programs_that_differ_in_numbers_have_one_text(form: str) -> None:
    """So a number that changes needs no other kernel, and ptxas has none to approximate otherwise than a GPU does."""
    count = form.count("{}")
    first, second = (Program.parse(form.format(*(start + k / 8 for k in range(count)))) for start in (0.25, 1.5))
    text = specialize(make_kernel("Accurate"), first)
    assert text == specialize(make_kernel("Accurate"), second)
    z, *operands = [tensor.float() for tensor in make_inputs()][: 1 + first.operand_count]
    matrices = [spread(operand.view(-1, FRAGMENT)) for operand in operands]
    for program in (first, second):
        got = SpecializedEpilogue(text).run(program, z.view(-1, FRAGMENT), matrices).reshape(-1)
        torch.testing.assert_close(got, run_on_host(program, z, operands), rtol=1e-5, atol=1e-6)


def test_every_rounding_is_named() -> None:
    """Otherwise ptxas may contract a product in one op with a sum in the next."""
    program = Program.parse("operands=4; mul z r0; add prev r1; mul prev r2; sub prev r3")
    for text in (specialize(make_kernel("Fast"), program), native.module().op_snippets()):
        assert_roundings(text)
    contracting = native.module().op_snippets().replace("mul.rn.f32", "mul.f32")
    with pytest.raises(ValueError, match=r"op_fast_square: 'mul.f32.*names no rounding"):
        specialize(make_kernel("Fast"), program, snippets=contracting)


KERNEL_FAULTS = {
    "has no kernel": lambda ptx: ptx.replace(".entry", ".func"),
    "has no header": lambda ptx: ptx.replace(".address_size", ".size"),
    "has no function run_epilogue": lambda ptx: ptx.replace("run_epilogue", "epilogue"),
    "declares run_epilogue, but has no body": lambda ptx: ptx[: ptx.rindex("\n.func")],
    "ends inside run_epilogue": lambda ptx: ptx[: ptx.rindex("}")],
    "has no parameter": lambda ptx: ptx.replace("_param_2", "_third"),
    "returns no fragment of 64 bytes": lambda ptx: ptx.replace("func_retval0[64]", "func_retval0[32]"),
    "passes no fragment of 64 bytes": lambda ptx: ptx.replace("param_3[64]", "param_3[32]"),
    "does not say in .* which primitives": lambda ptx: ptx.replace("AccuratePrimitives", "Primitives"),
}


@pytest.mark.parametrize("message", KERNEL_FAULTS)
def test_errors_name_what_a_kernel_lacks(message: str) -> None:
    kernel = KERNEL_FAULTS[message](make_kernel("Accurate"))
    with pytest.raises(ValueError, match=f"the kernel's PTX {message}"):
        specialize(kernel, Program.parse("operands=0"))


SNIPPET_FAULTS = {
    "there is no function op_fast_tanh": lambda ptx: ptx.replace("op_fast_tanh", "op_fast_other"),
    "op_fast_neg: .* does not return": lambda ptx: re.sub(r"(op_fast_neg\([^}]*)ret;", r"\1", ptx),
    "op_fast_neg: 'call": lambda ptx: re.sub(r"(op_fast_neg\([^}]*)ret;", r"\1call.uni other;\nret;", ptx),
}


@pytest.mark.parametrize("message", SNIPPET_FAULTS)
def test_errors_name_what_the_snippets_lack(message: str) -> None:
    snippets = SNIPPET_FAULTS[message](native.module().op_snippets())
    with pytest.raises(ValueError, match=message):
        specialize(make_kernel("Fast"), Program.parse("operands=0"), snippets=snippets)


def test_wrong_operand_types() -> None:
    with pytest.raises(ValueError, match="the program has 1 operands, got 2"):
        specialize(make_kernel("Fast"), Program.parse("operands=1; add z r0"), [0, 0])


def assert_assembles(programs: list[Program], folder: Path) -> None:
    """ptxas takes all of them in one module, each in a kernel like a GEMM, without spills and warnings."""
    types = [[number % 3 for _ in range(program.operand_count)] for number, program in enumerate(programs)]
    kernels = [
        specialize(make_kernel(PRIMITIVES[number % 2], number), program, types[number])
        for number, program in enumerate(programs)
    ]
    report = assemble(merge(kernels), folder)
    assert not report.warnings
    assert len(report.registers) == len(programs)
    spilling = [name for name, spills in report.spills.items() if spills]
    texts = [programs[int(re.findall(r"\d+", name)[0])].text for name in spilling]
    assert not spilling, texts
    assert max(report.registers.values()) <= 168


@needs_ptxas
def test_ptxas_takes_every_op(tmp_path: Path) -> None:
    assert_assembles([program_of(op.name) for op in op_table().ops for _ in PRIMITIVES], tmp_path)


@needs_ptxas
def test_ptxas_takes_random_programs(tmp_path: Path) -> None:
    programs = some_programs(100)
    programs += [Program.parse(f"operands=4; {text}") for text in (f"gelu z; {FOUR}; tanh prev", f"{LONG}; {FOUR}")]
    assert max(program.operand_count for program in programs[:-2]) == OPERANDS
    assert_assembles(programs, tmp_path)


# The interpreter of the same kernels gives the same bits. It is compiled here, alone and without CUTLASS, with the
# kernels' options. What PTX leaves open is the same in both runs; what ptxas may do with it is for a GPU to tell.


SOURCE = """
#include "epilogue/sm90_epilogue_function.h"

using namespace cutfuse;

template <class Primitives>
__global__ void call(sm90::EpilogueParams const* params, float* data) {
  Fragment<sm90::kFragmentSize> z;
  for (int i = 0; i < sm90::kFragmentSize; ++i) z.values[i] = data[i];
  z = sm90::run_epilogue<Primitives>(params, threadIdx.x, threadIdx.y, z);
  for (int i = 0; i < sm90::kFragmentSize; ++i) data[i] = z.values[i];
}

template __global__ void call<FastPrimitives>(sm90::EpilogueParams const*, float*);
template __global__ void call<AccuratePrimitives>(sm90::EpilogueParams const*, float*);
"""


@pytest.fixture(scope="module")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SpecializedEpilogue]:
    ptx = compile_ptx(SOURCE, tmp_path_factory.mktemp("interpreter"), ["-arch=compute_90a"])
    return {name: SpecializedEpilogue(ptx, f"run_epilogue\\w*{name}Primitives") for name in ("Fast", "Accurate")}


def assert_same_bits(
    interpreters: dict[str, SpecializedEpilogue], program: Program, z: torch.Tensor, operands: list[torch.Tensor]
) -> None:
    fragments = z.view(-1, FRAGMENT)
    matrices = [spread(operand.view(-1, FRAGMENT)) for operand in operands]
    for name, interpreter in interpreters.items():
        specialized = SpecializedEpilogue(specialize(make_kernel(name), program))
        got, expected = (epilogue.run(program, fragments, matrices) for epilogue in (specialized, interpreter))
        wrong = got.view(torch.int32) != expected.view(torch.int32)
        assert not wrong.any(), (name, program.text, got[wrong][:4], expected[wrong][:4])


def test_every_op_has_the_interpreters_bits(interpreters: dict[str, SpecializedEpilogue]) -> None:
    z, *operands = special_inputs()
    for op in op_table().ops:
        assert_same_bits(interpreters, program_of(op.name), z, operands)


@given(recipe=recipes())
@settings(max_examples=25)
def test_random_programs_have_the_interpreters_bits(
    interpreters: dict[str, SpecializedEpilogue], recipe: Recipe
) -> None:
    z, *operands = [tensor.float() for tensor in make_inputs()]
    assert_same_bits(interpreters, make_program(recipe), z, operands)


@pytest.mark.parametrize("op", ["relu", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh"])
def test_chains_that_are_compiled_in_have_the_interpreters_bits(
    interpreters: dict[str, SpecializedEpilogue], op: str
) -> None:
    z = torch.tensor((SPECIAL * 2)[:32])
    for text in (f"{op} z", f"{op} z; mul prev 0.3", f"{op} z; mul prev 0.3; add prev z"):
        assert_same_bits(interpreters, Program.parse(f"operands=0; {text}"), z, [])


@given(recipe=recipes())
@settings(max_examples=6)
def test_long_programs_have_the_interpreters_bits(interpreters: dict[str, SpecializedEpilogue], recipe: Recipe) -> None:
    """What is written as a loop over passes."""
    program = long_program(recipe)
    assert "$Lpass:" in specialize(make_kernel("Fast"), program)
    z, *operands = [tensor.float() for tensor in make_inputs()]
    assert_same_bits(interpreters, program, z, operands)


# The short forms of functions of 16-bit tensors: how accurate they are in compiled kernels, without a GPU.


def op_call(name: str) -> str:
    parameters = " ".join(repr(float(default)) for _, default in op_table().op(name).parameters)
    return f"{name} z {parameters}".rstrip()


def _exact(name: str, z: torch.Tensor) -> torch.Tensor:
    if name == "gelu":
        return z * torch.special.ndtr(z)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return torch.where(z > 20, z, function(z)) if name == "softplus" else function(z)


# Relative to the value, or absolute: a few parts of what 16 bits round away, 2^-12 of it.
@pytest.mark.parametrize(
    ("name", "relative", "absolute"),
    [
        ("gelu", 1.6e-5, 2.2e-8),
        ("tanh", 3e-6, 0),
        ("mish", 4e-6, 0),
        ("expm1", 3e-6, 0),
        ("elu", 3e-6, 0),
        ("selu", 3e-6, 0),
        ("celu", 3e-6, 0),
        ("log", 4e-6, 0),
        ("log1p", 4e-6, 0),
        ("logsigmoid", 6e-6, 0),
        ("softplus", 6e-6, 0),
        ("softsign", 1e-6, 0),
        ("erf", 8e-6, 0),
    ],
)
def test_fast_functions_are_exact_to_16_bits(name: str, relative: float, absolute: float) -> None:
    z = torch.cat([torch.linspace(-12, 12, 512 * FRAGMENT), 10.0 ** -torch.linspace(0, 30, 4 * FRAGMENT)])
    z = z[z > 0] if name == "log" else z[z > -0.999] if name == "log1p" else z
    z = z[: len(z) // FRAGMENT * FRAGMENT]
    exact = _exact(name, z.double())
    program = Program.parse(f"operands=0; {op_call(name)}")
    function = SpecializedEpilogue(specialize(make_kernel("Fast"), program))
    got = function.run(program, z.view(-1, FRAGMENT), []).reshape(-1)
    wrong = (got - exact).abs() > relative * exact.abs() + absolute
    assert not wrong.any(), (z[wrong][:4], got[wrong][:4], exact[wrong][:4])


@pytest.mark.parametrize("op", ["sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "mish", "elu", "erf", "softplus"])
def test_derivatives_of_fast_functions_are_exact_to_16_bits(op: str) -> None:
    """Those of 16-bit inputs: within 1e-5 of what PyTorch computes in fp64, before they are rounded."""
    x = torch.linspace(-12, 12, 4096).bfloat16().view(16, 256)
    exact = x.double().requires_grad_()
    functions = {"gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh")}
    function = functions.get(op) or getattr(torch.special if op == "erf" else torch.nn.functional, op)
    (expected,) = torch.autograd.grad(function(exact).sum(), exact)
    program = Program.parse(f"operands=0; {op_call(op)}")
    grad = torch.ones_like(x)
    (got,) = SpecializedBackward(backward_text(program, x.dtype)).run(program, grad, x, dtypes=[torch.float32]).of
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-6)
