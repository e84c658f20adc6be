"""The op table as Python sees it, the register of compositions of its ops, and the table of reductions.

An op is a row of csrc/epilogue/ops.def, matched to PyTorch's callables; nothing here names one. A row's signature and
aliases say which torch function it stands for; functions of the same name in `torch`, `torch.nn.functional`,
`torch.special` and `torch.Tensor` are found from that name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutfuse import native

if TYPE_CHECKING:
    from cutfuse._C import OpInfo, ReductionInfo


# Python's spelling of each operator: the language, not the list of ops. What a symbol computes is for the op table.
INFIX = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "truediv",
    "**": "pow",
    "&": "and",
    "|": "or",
    "^": "xor",
    "//": "floordiv",
    "%": "mod",
    "@": "matmul",
    "<<": "lshift",
    ">>": "rshift",
}
COMPARISONS = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}
PREFIX = {"-": "neg", "+": "pos", "~": "invert"}
# Operators that PyTorch has for booleans but not for floats.
LOGICAL = {"&", "|", "^", "~"}

_HOMES = (torch, torch.nn.functional, torch.special, torch.Tensor)
_PREFIXES = ("fft", "linalg", "special")
# The name that PyTorch gives to an argument that has to be boolean.
CONDITION = "condition"
_CONSTANTS = {"inf": math.inf, "nan": math.nan}


@dataclass(frozen=True, eq=False)
class Op:
    """One row of the table.

    `tensors` and `parameters` are the names that the canonical torch callable `function` gives its arguments, with the
    parameters' defaults; `literals` are its string arguments, which a call has to match.
    """

    code: int
    name: str
    path: str
    function: Callable[..., torch.Tensor]
    tensors: tuple[str, ...]
    parameters: tuple[tuple[str, float], ...]
    literals: tuple[tuple[str, str], ...]
    infix: str | None
    prefix: str | None
    aliases: tuple[str, ...]
    formula: str
    special: str
    eager: str  # "exact", "kept", "none" or a formula: see ops.def

    @property
    def arity(self) -> int:
        return len(self.tensors)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of all arguments, in their order."""
        return (*self.tensors, *[name for name, _ in self.parameters], *[name for name, _ in self.literals])

    @functools.cached_property
    def operator(self) -> Callable[[Any, Any], Any] | None:
        """Python's operator on float tensors and numbers, for infix ops whose operator alone is the op.

        PyTorch has & and | for booleans only, and // without the derivative that div with its literal has.
        """
        if self.infix is None or self.infix in LOGICAL or self.literals:
            return None
        function: Callable[[Any, Any], Any] = getattr(operator, (INFIX | COMPARISONS)[self.infix])
        return function

    @functools.cached_property
    def is_boolean(self) -> bool:
        """Whether PyTorch gives booleans for floats, as comparisons do."""
        probe = torch.zeros(1, dtype=torch.float32, device="cpu")
        arguments = [probe.bool() if name == CONDITION else probe for name in self.tensors]
        return self.compose(arguments, [default for _, default in self.parameters]).dtype == torch.bool

    def compose(self, tensors: Iterable[torch.Tensor], parameters: Iterable[float]) -> torch.Tensor:
        """The op as PyTorch computes it."""
        return self.function(*tensors, **dict(self.keywords(parameters)))

    def keywords(self, parameters: Iterable[float]) -> tuple[tuple[str, float | str], ...]:
        """The keyword arguments of a PyTorch call with these parameters.

        An infinite default means that there is no bound, and is left out: only then PyTorch 2.15 has a derivative of
        clamp at an infinity, and PyTorch's second derivative of logit is NaN where logit is. clamp takes at least one.
        """
        given = [(name, value, default) for (name, default), value in zip(self.parameters, parameters, strict=True)]
        bounded = [(name, value) for name, value, default in given if value != default or not math.isinf(default)]
        if not bounded and len(given) > 1:
            bounded = [(name, value) for name, value, _ in given]
        return (*self.literals, *bounded)


class OpTable:
    """Ops by code, by name, by PyTorch callable and by operator symbol; and the limits of a program.

    `callables` maps a callable to its candidates, which differ in their literals only.
    """

    def __init__(self, rows: Iterable[OpInfo], limits: Mapping[str, int]) -> None:
        self.ops = tuple(parse_op(code, row) for code, row in enumerate(rows))
        self.limits = dict(limits)
        self.by_name = {op.name: op for op in self.ops}
        self.infix = {op.infix: op for op in self.ops if op.infix}
        self.prefix = {op.prefix: op for op in self.ops if op.prefix}
        self.callables: dict[Callable[..., Any], tuple[Op, ...]] = {}
        for op in self.ops:
            for function in find_callables(op):
                self.callables[function] = (*self.callables.get(function, ()), op)

    @property
    def identity(self) -> Op:
        """The op that only copies its argument: unary plus."""
        return self.prefix["+"]

    def op(self, name: str) -> Op:
        if name not in self.by_name:
            raise ValueError(f"unknown op {name!r}; the ops are {', '.join(self.by_name)}")
        return self.by_name[name]


@functools.lru_cache(maxsize=1)
def op_table() -> OpTable:
    """The native module's table."""
    return OpTable(native.core.op_table(), native.core.limits())


def parse_op(code: int, row: OpInfo) -> Op:
    """An op from its row.

    Raises ValueError where the signature does not fit the arity and parameter count, or names no PyTorch callable.
    """
    path, tensors, keywords = parse_signature(row.signature)
    parameters = tuple((name, value) for name, value in keywords if not isinstance(value, str))
    literals = tuple((name, value) for name, value in keywords if isinstance(value, str))
    if len(tensors) != row.arity or len(parameters) != row.parameter_count:
        raise ValueError(
            f"op {row.name}: signature {row.signature!r} has {len(tensors)} tensors and {len(parameters)} "
            f"parameters, but the row says {row.arity} and {row.parameter_count}"
        )
    function = find_attribute(path)
    if function is None:
        raise ValueError(f"op {row.name}: torch {torch.__version__} has no {path}")
    aliases = row.aliases.split()
    symbols = [alias.rpartition(":")[2] for alias in aliases if not _is_dotted(alias)]
    symbol = symbols[0] if symbols else None
    return Op(
        code=code,
        name=row.name,
        path=path,
        function=function,
        tensors=tensors,
        parameters=parameters,
        literals=literals,
        infix=symbol if row.arity == 2 else None,
        prefix=symbol if row.arity == 1 else None,
        aliases=tuple(alias for alias in aliases if _is_dotted(alias)),
        formula=row.formula,
        special=row.special,
        eager=row.eager,
    )


def parse_signature(signature: str) -> tuple[str, tuple[str, ...], list[tuple[str, float | str]]]:
    """`"torch.clamp(input, min=-inf)"` gives `("torch.clamp", ("input",), [("min", -inf)])`."""
    call = ast.parse(signature, mode="eval").body
    if not isinstance(call, ast.Call) or not all(isinstance(argument, ast.Name) for argument in call.args):
        raise ValueError(f"{signature!r} is not a signature")
    names = tuple(argument.id for argument in call.args if isinstance(argument, ast.Name))
    keywords = [(keyword.arg, _default(keyword.value)) for keyword in call.keywords if keyword.arg is not None]
    return ast.unparse(call.func), names, keywords


def find_attribute(path: str) -> Any:
    """What a dotted name stands for, or None in a version of PyTorch that lacks it."""
    root, *names = path.split(".")
    return functools.reduce(lambda home, name: getattr(home, name, None), names, {"torch": torch}.get(root))


def find_callables(op: Op) -> list[Callable[..., Any]]:
    """Every PyTorch callable that stands for the op, the canonical one first; those of other versions are left out."""
    found = [find_attribute(path) for path in (op.path, *op.aliases)]
    for path in (op.path, *op.aliases):
        found.extend(find_namesakes(path))
    if op.infix:
        found.append(getattr(torch.Tensor, f"__{(INFIX | COMPARISONS)[op.infix]}__", None))
    return list(dict.fromkeys(item for item in found if callable(item)))


def find_namesakes(path: str) -> list[Callable[..., Any]]:
    """The functions with the name of a dotted path in torch, its submodules and Tensor."""
    found = [getattr(home, path.rpartition(".")[2], None) for home in _HOMES]
    return [item for item in found if callable(item)]


def describe_callable(function: Callable[..., Any]) -> str:
    """The dotted name under which users know a PyTorch callable."""
    name = getattr(function, "__name__", repr(function))
    if isinstance(function, types.FunctionType | types.BuiltinFunctionType):
        for home in _HOMES[:3]:
            if getattr(home, name, None) == function:
                return f"{home.__name__}.{name}"
        # In torch._C, torch.special.bessel_j0 is named special_bessel_j0.
        home_name, _, bare = name.partition("_")
        if home_name in _PREFIXES and getattr(getattr(torch, home_name), bare, None) == function:
            return f"torch.{home_name}.{bare}"
    if getattr(torch.Tensor, name, None) == function:
        return f"torch.Tensor.{name}"
    return f"{getattr(function, '__module__', None) or 'torch'}.{name}"


def _default(node: ast.expr) -> float | str:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -float(_default(node.operand))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    value = ast.literal_eval(node)
    return value if isinstance(value, str) else float(value)


def _is_dotted(alias: str) -> bool:
    return alias[0].isalpha() and ":" not in alias


Composition = Callable[..., Any]
_Function = TypeVar("_Function", bound=Composition)

_registered: list[tuple[tuple[str, ...], bool, Composition]] = []
_roundings: dict[Composition, str] = {}

# Where PyTorch rounds in a composition.
ONCE = "once"  # it is one function, in which nothing but the value needs rounding
NUMBERS = "numbers"  # the same, but the numbers are rounded to the values' type first
STEPS = "steps"  # its steps are functions of PyTorch's there too
UNKNOWN_STEPS = "unknown"


def composes(*paths: str, exact: bool = False, rounding: str = UNKNOWN_STEPS) -> Callable[[_Function], _Function]:
    """Registers a composition under dotted names of torch functions.

    It has the torch function's own signature and returns an expression, or NotImplemented to leave the call to the op
    table. It holds for every callable of the op that a path belongs to, or for the functions of the same name in torch,
    its submodules and Tensor; for the path alone where it is exact.
    """

    def register(function: _Function) -> _Function:
        _registered.append((paths, exact, function))
        _roundings[function] = rounding
        return function

    return register


def rounding_of(composition: Composition | None) -> str:
    """Where PyTorch rounds in a composition, or in the function of an op: once."""
    return ONCE if composition is None else _roundings[composition]


@functools.lru_cache(maxsize=1)
def compositions() -> dict[Callable[..., Any], Composition]:
    """By PyTorch callable; those that this version of PyTorch lacks are left out."""
    by_op: dict[int, list[Callable[..., Any]]] = {}
    for function, candidates in op_table().callables.items():
        by_op.setdefault(candidates[0].code, []).append(function)
    result: dict[Callable[..., Any], Composition] = {}
    for paths, exact, composition in sorted(_registered, key=lambda entry: entry[1]):
        for path in paths:
            target = find_attribute(path)
            if target is None:
                continue
            op = next(iter(op_table().callables.get(target, ())), None)
            functions = [target] if exact else find_namesakes(path) if op is None else by_op[op.code]
            result.update(dict.fromkeys(functions, composition))
    return result


class Description(NamedTuple):
    """How a function is written and what it computes, for lists of the language.

    names: dotted ones and, of an op, its operators, as `a + b`. formula: over the arguments a, b and c, in their order.
    special: what is to know at NaN, infinities and ties.
    """

    names: tuple[str, ...]
    signature: str
    formula: str
    special: str = ""

    @property
    def spellings(self) -> str:
        return ", ".join([f"{self.names[0]}{self.signature}", *self.names[1:]])


def describe_op(op: Op) -> Description:
    arguments = list(op.tensors)
    arguments += [f"{name}={value:g}" for name, value in op.parameters]
    arguments += [f"{name}={value!r}" for name, value in op.literals]
    operators = [f"a {op.infix} b"] if op.infix else [f"{op.prefix}a"] if op.prefix else []
    return Description((op.path, *op.aliases, *operators), f"({', '.join(arguments)})", op.formula, op.special)


def describe_compositions() -> Iterator[Description]:
    for paths, _, composition in _registered:
        call = without_annotations(inspect.signature(composition))
        yield Description(paths, str(call), " ".join((composition.__doc__ or "").split()))


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=signature.empty)


def _read_table() -> list[ReductionInfo]:
    try:
        return native.core.reduction_table()
    except (ImportError, AttributeError):  # AttributeError: a module of an older build
        return []  # importing cutfuse succeeds without its module, so that cutfuse.report can tell of it


_TABLE = _read_table()

# The reductions that there are: by name, PyTorch's own.
REDUCTIONS: dict[str, Callable[..., Tensor]] = {row.name: getattr(torch, row.name) for row in _TABLE}
# What the gradient of the result is multiplied by for each element: see csrc/reduce/reductions.def.
GRADIENTS = {row.name: row.gradient for row in _TABLE}
# Those whose gradients depend on their results.
NEEDS_RESULT = tuple([row.name for row in _TABLE if row.needs_result])
# Those that a factor may be taken out of.
ADDITIVE = tuple([row.name for row in _TABLE if row.is_additive])
