"""Every row of the op table, found in PyTorch, traced, run and differentiated: a new row is tested by being there."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from host_program import run_on_host
from torch_answers import SPECIAL, derivatives, values

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, Instruction, Program, evaluate, op_table, resolve
from cutfuse.epilogue.table import CONDITION, Op, OpTable, find_attribute, find_callables, parse_op
from cutfuse.epilogue.types import ValueType
from cutfuse.native import module

OPS = op_table().ops
ORDINARY = [*torch.linspace(-9, 9, 73, dtype=torch.float64).tolist(), 1e-6, -1e-6, 19.9, 20.1, -40.0, 60.0, -86.0]


def op_of(fn: Callable[..., torch.Tensor], operands: int) -> Op:
    return resolve(fn, operands, (ValueType(torch.float32),) * (operands + 1)).expression.op


# PyTorch's derivatives at ties changed in 2.15; the table has both, and an epilogue the one of this PyTorch.
CLAMPS = {op_of(lambda z: z.clamp(0, 1), 0), op_of(lambda z, low, high: z.clamp(low, high), 2)}
HALVED_TIES = op_of(torch.clamp_min, 1).path == "torch.maximum"
FOREIGN = {op for op in OPS if op.path == "torch.clamp" and op not in CLAMPS}
FOREIGN |= {op for op in OPS if op.path in ("torch.clamp_min", "torch.clamp_max") and HALVED_TIES}

each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def parameter_sets(op: Op) -> list[tuple[float, ...]]:
    defaults = tuple(default for _, default in op.parameters)
    return list(dict.fromkeys([defaults, (0.5, 0.75)[: len(defaults)]]))


def make_program(op: Op, parameters: tuple[float, ...]) -> Program:
    """The op alone: z first, then the operands, argument c through a slot."""
    if op.arity < 3:
        instructions = [Instruction(op.name, ("z", "r0")[: op.arity], parameters)]
    else:
        instructions = [
            Instruction(op_table().identity.name, ("r1",), (), 0),
            Instruction(op.name, ("z", "r0", "s0"), parameters),
        ]
    return Program(tuple(instructions), op.arity - 1)


def arguments_of(op: Op, values: list[float], dtype: torch.dtype) -> list[torch.Tensor]:
    chosen = values if op.arity < 3 or len(values) <= len(SPECIAL) else values[::3]
    return list(torch.tensor(list(itertools.product(chosen, repeat=op.arity)), dtype=dtype).unbind(-1))


def compute(op: Op, arguments: list[torch.Tensor], parameters: tuple[float, ...]) -> torch.Tensor:
    tensors = [item != 0 if name == CONDITION else item for name, item in zip(op.tensors, arguments, strict=True)]
    return op.compose(tensors, parameters).to(arguments[0].dtype)


def function_of(op: Op, parameters: tuple[float, ...]) -> Callable[..., torch.Tensor]:
    return lambda *tensors: compute(op, list(tensors), parameters)


def arguments_tie(op: Op, arguments: list[torch.Tensor], parameters: tuple[float, ...]) -> torch.Tensor:
    """Where the derivative is not the same in every version of PyTorch, and the row has that of another one."""
    if op.path == "torch.atan2":  # NaN at the origin in 2.8
        return (arguments[0] == 0) & (arguments[1] == 0)
    if op.path == "torch.clamp" and parameters and all(map(math.isinf, parameters)):
        return ~arguments[0].isfinite()  # PyTorch's takes one bound at least, which an infinity then is
    if op not in FOREIGN:
        return torch.zeros_like(arguments[0], dtype=torch.bool)
    bounds = [*arguments[1:], *(torch.full_like(arguments[0], bound) for bound in parameters)]
    tie = torch.stack([arguments[0] == bound for bound in bounds] + [bounds[0] == bounds[-1]] * (len(bounds) > 1))
    return tie.any(0) | torch.stack([*arguments, *bounds]).isnan().any(0)


def test_the_table_is_the_modules_table() -> None:
    rows = module().op_table()
    assert [op.name for op in OPS] == [row.name for row in rows]
    assert [op.code for op in OPS] == list(range(len(rows)))
    assert op_table().limits == module().limits()


@each_op
def test_callables_are_found_and_mean_the_op(op: Op) -> None:
    functions = find_callables(op)
    assert functions[0] == find_attribute(op.path)
    for function in functions:
        assert op in op_table().callables[function]
        assert {item.path for item in op_table().callables[function]} == {op.path}


@each_op
def test_calling_the_torch_function_gives_the_op(op: Op) -> None:
    def call(z: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        tensors = [item != 0 if name == CONDITION else item for name, item in zip(op.tensors, (z, *rest), strict=True)]
        return op.compose(tensors, parameters)

    parameters = parameter_sets(op)[-1]
    # In fp64 a cast to fp32 rounds.
    node = resolve(call, op.arity - 1, (ValueType(torch.float64),) * op.arity).expression
    if op is op_table().identity:
        assert node.leaf == "z"
    elif op not in FOREIGN:
        assert node.op is op
        assert node.parameters == parameters


@each_op
def test_operators(op: Op) -> None:
    arguments = dict(zip("ab", arguments_of(op, ORDINARY, torch.float32), strict=False))
    for symbol in filter(None, (op.infix, op.prefix)):
        formula = f"a {symbol} b" if op.arity == 2 else f"{symbol}a"
        if op.is_boolean and symbol in "&|~":
            formula = re.sub("[ab]", r"(\g<0> > 0)", formula)
        fn = eval(f"lambda {', '.join(arguments)}: {formula}")
        expected = fn(*arguments.values())
        torch.testing.assert_close(Epilogue(fn)(*arguments.values()), expected, equal_nan=True)


@each_op
def test_value_on_the_host(op: Op) -> None:
    for parameters in parameter_sets(op):
        arguments = arguments_of(op, ORDINARY, torch.float32)
        expected = compute(op, [item.double() for item in arguments], parameters).float()
        got = run_on_host(make_program(op, parameters), arguments[0], arguments[1:])
        # Interpolation cancels.
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=3e-7 if op.arity < 3 else 1e-6, equal_nan=True)


@each_op
def test_special_values_on_the_host_are_pytorchs(op: Op) -> None:
    for parameters in parameter_sets(op):
        arguments = arguments_of(op, SPECIAL, torch.float32)
        # Through fp64: in fp32, PyTorch's vectorised gelu on the CPU gives NaN at inf where its scalar one gives inf.
        expected = compute(op, [item.double() for item in arguments], parameters).float()
        got = run_on_host(make_program(op, parameters), arguments[0], arguments[1:])
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
        expected, known = values(function_of(op, parameters), arguments)
        known &= expected == 0  # whose signs are compared
        assert torch.equal(got.signbit()[known], expected.signbit()[known])


@each_op
@pytest.mark.parametrize("drawn", [ORDINARY, SPECIAL], ids=["ordinary", "special"])
def test_derivatives_on_the_host_are_autograds(op: Op, drawn: list[float]) -> None:
    for parameters in parameter_sets(op):
        arguments = [item.double() for item in arguments_of(op, drawn, torch.float32)]
        ties = arguments_tie(op, arguments, parameters)
        for wrt, (expected, known) in enumerate(derivatives(function_of(op, parameters), arguments)):
            known &= ~ties
            got = run_on_host(make_program(op, parameters), arguments[0], arguments[1:], wrt)
            torch.testing.assert_close(got[known], expected.float()[known], rtol=1e-5, atol=1e-6, equal_nan=True)


@each_op
def test_composed_value_and_gradient(op: Op) -> None:
    for parameters in parameter_sets(op):
        arguments = [item.requires_grad_() for item in arguments_of(op, ORDINARY + SPECIAL, torch.float64)]
        expected = compute(op, arguments, parameters)
        got = evaluate(make_program(op, parameters), arguments[0], arguments[1:])
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        if expected.requires_grad:
            want = torch.autograd.grad(expected.sum(), arguments, allow_unused=True)
            have = torch.autograd.grad(got.sum(), arguments, allow_unused=True)
            torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True)


def test_no_python_file_lists_the_ops() -> None:
    """Names that are a function's only spelling, such as softsign, occur in no module of the package, except that
    `derivative.py` has inverses and bounds of some, which their rows do not say."""
    package = Path(cutfuse.__file__).parent
    sources = {path: path.read_text() for path in package.glob("epilogue/*.py") if path.name != "derivative.py"}
    activations = [op.name for op in OPS if op.path.startswith("torch.nn.functional.")]
    assert activations
    for path, source in sources.items():
        listed = [name for name in activations if re.search(rf"\b{name}\b", source)]
        assert not listed, f"{path.name} names {listed}"


ROW = {
    "name": "logit",
    "arity": 1,
    "parameter_count": 1,
    "signature": "torch.logit(input, eps=-inf)",
    "aliases": "torch.special.logit torch.absent neg:-",
    "formula": "ln(a / (1 - a))",
    "special": "",
    "eager": "none",
}


def test_a_row_is_all_it_takes() -> None:
    table = OpTable([SimpleNamespace(**ROW)], module().limits())
    op = table.op("logit")
    assert (op.arity, op.parameters, op.prefix, op.infix) == (1, (("eps", -math.inf),), "-", None)
    assert {torch.logit, torch.special.logit, torch.Tensor.logit} <= set(table.callables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arity": 2}, "the row says 2 and 1"),
        ({"parameter_count": 0}, "the row says 1 and 0"),
        ({"signature": "torch.absent(input, eps=1)"}, "has no torch.absent"),
        ({"signature": "torch.logit"}, "not a signature"),
    ],
)
def test_bad_rows(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_op(0, SimpleNamespace(**ROW | change))


def test_unknown_op() -> None:
    with pytest.raises(ValueError, match="unknown op 'frobnicate'; the ops are"):
        op_table().op("frobnicate")
    with pytest.raises(EpilogueError, match="unknown op 'frobnicate'"):
        Program.parse("operands=0; frobnicate z")
