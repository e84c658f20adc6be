"""The gradient of a program as a program: what a product's epilogue makes of the gradient that the product gives.

PyTorch differentiates the program, once, on numbers that stand for its values. What its backward pass does with them is
read off as expressions, of PyTorch's own decompositions where a function is not in the language. So the formulas are
PyTorch's, and there is no table of them.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutfuse.epilogue import calls
from cutfuse.epilogue.errors import EpilogueError
from cutfuse.epilogue.expression import Expr, apply, constant, input, operand, topological, unmarked
from cutfuse.epilogue.program import Program, evaluate
from cutfuse.epilogue.table import find_namesakes, op_table
from cutfuse.epilogue.trace import Epilogue

# What a gradient reads beside the gradient that arrives.
NOTHING = "nothing"  # of a program that is affine
OUTPUT = "output"
INPUT = "input"

_LARGEST_SCALE = 256.0  # by which a result may be divided again: 16-bit types hold it with the same relative error
_SOFTPLUS_IS_LINEAR = 17.0  # from here on it is its argument in fp32, so that no two arguments have one value
_SAME = ("alias", "detach", "clone", "view", "expand", "lift_fresh")
_NUMBERS: dict[str, Callable[..., Any]] = {  # functions that make a number a tensor
    "scalar_tensor": lambda number, **_: number,
    "full": lambda size, number, **_: number,
    "full_like": lambda tensor, number, **_: number,
    "new_full": lambda tensor, size, number, **_: number,
    "zeros_like": lambda tensor, **_: 0.0,
    "ones_like": lambda tensor, **_: 1.0,
    "empty_like": lambda tensor, **_: math.nan,  # until it is filled
    "fill": lambda tensor, number: number,
}
_OF_BOOLEANS = {"and": "logical_and", "or": "logical_or"}  # a program has no integers, of which these are others
_PLACES = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")

# PyTorch notes for all threads together whether a dispatch mode is entered, and each mode's exit restores what it found
# at its entry: of two threads that take turns the second one would leave the note behind, and Dynamo compiles nothing
# while it stands.
_recording = threading.Lock()


class Derivative(NamedTuple):
    """epilogue: the gradient of z, of the result's gradient and of one operand: what `reads` says, if anything."""

    epilogue: Epilogue
    reads: str


@functools.lru_cache(maxsize=1024)
def derive(program: str) -> Derivative | None:
    """Of a program without operands, in its text form; None where its gradient does not become a program."""
    try:
        value, gradient = _differentiate(Program.parse(program))
        if not gradient.reads:  # of comparisons, where the gradient is a number
            return None
        if "r0" not in gradient.reads:
            return Derivative(Epilogue.from_expression(gradient, 0), NOTHING)
        of_output = _in_output(gradient, value)
        if of_output is not None:
            return Derivative(Epilogue.from_expression(of_output, 1), OUTPUT)
        return Derivative(Epilogue.from_expression(gradient, 1), INPUT)
    except (
        EpilogueError,
        TypeError,
    ):  # beyond the language, for which PyTorch's operators may raise TypeError, or long
        return None


def _differentiate(program: Program) -> tuple[Expr, Expr]:
    """The program's value, of `operand(0)`, and the gradient of that, of `input()` too."""
    recorder = _Recorder()
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        z, arriving = (torch.full((1,), 0.5, dtype=torch.float32, device="cpu") for _ in range(2))
        recorder.put(z, operand(0))
        recorder.put(arriving, input())
        z.requires_grad_()
        with _recording, recorder:
            value = evaluate(program, z)
            if not value.requires_grad:
                raise EpilogueError("the program has no gradient")
            (gradient,) = torch.autograd.grad(value, z, arriving)
    return recorder.of(value), recorder.of(gradient)


class _Recorder(TorchDispatchMode):
    """Writes down expressions of the tensors that are computed within it, by where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self._expressions: dict[int, Expr] = {}
        self._tensors: list[Tensor] = []  # whose memory has to stay theirs

    def put(self, tensor: Tensor, expression: Expr) -> None:
        self._tensors.append(tensor)
        self._expressions[tensor.data_ptr()] = expression

    def of(self, tensor: Tensor) -> Expr:
        found = self._expressions.get(tensor.data_ptr())
        if found is None:
            raise EpilogueError("a gradient reads a tensor that does not come from its arguments")
        return found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        name = function._schema.name.partition("::")[2].strip("_")
        found = self._expression(name, args, given)
        if found is None:
            decomposition = torch._decomp.decomposition_table.get(function, _no_decomposition)
            if name == "logit_backward" and args[2:] not in ((), (None,)):
                decomposition = _no_decomposition  # it gives 0 at NaN, and PyTorch NaN
            with self:
                result = decomposition(*args, **given)
            if result is NotImplemented:
                raise EpilogueError(f"{function} is not in the epilogue language")
            return result
        result = function(*args, **given)
        self.put(result, found)
        return result

    def _expression(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Expr | None:
        """None where the language has no such function."""
        if name in _NUMBERS:
            return constant(float(_NUMBERS[name](*args, **given)))
        # Numbers without a fraction are integers here, of which alone PyTorch would make another integer.
        values: list[Any] = [
            self.of(item) if isinstance(item, Tensor) else float(item) if type(item) is int else item for item in args
        ]
        if name == "to_copy":
            return _cast(values[0], given.get("dtype"))
        if name in _SAME or name == "copy":
            same: Expr = values[name == "copy"]
            return same
        keywords = {
            key: self.of(item) if isinstance(item, Tensor) else item
            for key, item in given.items()
            if key not in _PLACES
        }
        names = find_namesakes(_OF_BOOLEANS.get(name.removeprefix("bitwise_"), name))
        function = next((function for function in names if calls.is_known(function)), None)
        if function is None:
            return None
        try:
            return _simplified(unmarked(calls.call(function, tuple(values), keywords)))
        except (EpilogueError, TypeError, AttributeError):  # for parameters that the language lacks, or numbers alone
            return None


def _no_decomposition(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented


def _cast(value: Expr, dtype: torch.dtype | None) -> Expr:
    if dtype == torch.float16 or dtype == torch.bfloat16:
        return apply(op_table().op("half" if dtype == torch.float16 else "bfloat16"), (value,))
    return apply(op_table().op("float"), (value,)) if value.is_boolean else value


def _simplified(node: Expr) -> Expr:
    """Without a factor of 1, and without asking a boolean whether it is 0."""
    name = "" if node.op is None else node.op.name
    if name not in ("mul", "div", "pow", "ne"):
        return node
    first, second = map(unmarked, node.arguments)
    if name == "ne":
        is_number = first.op is not None and first.op.name == "float"  # as `evaluate` makes one of each boolean
        return first.arguments[0] if is_number and second.number == 0.0 else node
    if second.number == 1.0:
        return first
    return second if name == "mul" and first.number == 1.0 else node


def _in_output(gradient: Expr, value: Expr) -> Expr | None:
    """A gradient of `operand(0)` where that is the program's value, and not z; None where it cannot be."""
    known = _known_of_output(value)
    found: dict[int, Expr] = {}
    for node in topological(gradient, lambda node: () if id(node) in known else node.arguments):
        if id(node) in known:
            found[id(node)] = known[id(node)]
        elif node.leaf == "r0":
            return None
        elif node.op is None:
            found[id(node)] = node
        else:
            arguments = tuple(found[id(argument)] for argument in node.arguments)
            found[id(node)] = apply(node.op, arguments, node.parameters)
    return found[id(gradient)]


def _known_of_output(value: Expr) -> dict[int, Expr]:
    """What the program computes on the way to its value, of the value, by the node's identity.

    Only by inverses that make no rounding error of the value larger.
    """
    node, own = unmarked(value), operand(0)
    known = {id(node): own}
    while (step := _inverse(node, own)) is not None:
        node, own = step
        known[id(node)] = own
    return known


def _inverse(node: Expr, own: Any) -> tuple[Expr, Any] | None:
    """The argument of a node, and what it is of the node's value `own`; None where that does not give it."""
    if node.op is None:
        return None
    name, arguments = node.op.name, tuple(map(unmarked, node.arguments))
    first = arguments[0]
    if name == "neg":
        return first, -own
    if name in ("mul", "div"):
        if first is arguments[1] and name == "mul" and _is_positive(first):
            return first, torch.sqrt(own)
        if name == "mul" and first.is_number:
            first, scale = arguments[1], first.number
        else:
            scale = arguments[1].number
        if scale is None or not 1.0 / _LARGEST_SCALE <= abs(scale) <= _LARGEST_SCALE:
            return None
        return first, own / scale if name == "mul" else own * scale
    is_square = name == "square" or (name == "pow" and arguments[1].number == 2.0)
    if is_square and _is_positive(first):
        return first, torch.sqrt(own)
    if name == "leaky_relu" and 1.0 / _LARGEST_SCALE <= node.parameters[0] <= 1.0:
        return first, torch.where(own > 0.0, own, own / node.parameters[0])
    if name == "softplus":
        beta, threshold = node.parameters
        if threshold < _SOFTPLUS_IS_LINEAR:
            return None
        inner = torch.log(torch.expm1(own * beta)) / beta
        return first, torch.where(own * beta > threshold, own, inner)
    return None


def _is_positive(node: Expr) -> bool:
    """Whether a value is never below 0."""
    if node.op is None:
        return False
    bounds = node.parameters[:1] if node.op.name in ("clamp", "clamp_open", "hardtanh") else ()
    if node.op.name == "clamp_min":
        bounds = tuple(argument.number for argument in node.arguments[1:] if argument.number is not None)
    return node.op.name in ("relu", "relu6", "sigmoid", "exp", "exp2", "abs", "sqrt", "softplus", "hardsigmoid") or any(
        bound >= 0.0 for bound in bounds
    )
