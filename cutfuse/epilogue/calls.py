"""From a call in the user's epilogue to a node: which op a torch function or operator means, and on which arguments.

An expression that was traced ahead of time is called again, for operands whose types are known then.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from cutfuse.epilogue import calls, eager
from cutfuse.epilogue.compositions import ROUNDING
from cutfuse.epilogue.errors import EpilogueError, reduces, refusal_of
from cutfuse.epilogue.expression import (
    Call,
    Expr,
    apply,
    operand,
    to_expression,
    to_number,
    topological,
    with_call,
    with_type,
)
from cutfuse.epilogue.table import (
    COMPARISONS,
    LOGICAL,
    REDUCTIONS,
    Op,
    compositions,
    describe_callable,
    find_attribute,
    op_table,
)
from cutfuse.epilogue.types import (
    UNKNOWN,
    ValueType,
    ValueTypes,
    describe_types,
    input_types,
    promote,
    rounds_values,
    under_autocast,
)

# Arguments that say where a result goes, not what it is. All but in-place are accepted at their default only; an
# in-place activation is computed out of place, as nothing else can see its argument.
_PLACEMENT = {"inplace", "out", "memory_format"}
_BITWISE: dict[str, Callable[..., Any]] = {
    "&": torch.bitwise_and,
    "|": torch.bitwise_or,
    "^": torch.bitwise_xor,
    "~": torch.bitwise_not,
}
# Functions of two tensors that reduce a single one, and the reduction.
_OF_TWO: dict[Callable[..., Any], str] = {
    function: f"a{name}" for name in ("max", "min") for function in (getattr(torch, name), getattr(torch.Tensor, name))
}
_CONSTANTS = bool | int | float | str | None
_EXACT_INTEGERS = 2**24  # integers below it are exact in fp32


def operate(symbol: str, arguments: tuple[Any, ...]) -> Expr:
    """What a Python operator gives."""
    if symbol in LOGICAL:
        return call(_BITWISE[symbol], arguments, {})
    table = op_table()
    op = (table.prefix if len(arguments) == 1 else table.infix).get(symbol)
    if op is None:
        raise EpilogueError(f"the operator {symbol} is not in the epilogue language; it has {' '.join(table.infix)}")
    return call(op.function, arguments, dict(op.literals))


def call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Expr:
    """What a torch function or a method of Tensor gives."""
    if rounds_values():
        return eager.call(_call, function, arguments, keywords)
    return _call(function, arguments, keywords)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Expr:
    keywords = _without_placement(function, keywords)
    if function in _OF_TWO:
        _check_two(function, arguments, keywords)
    composition = compositions().get(function)
    if composition is not None:
        result = _compose(function, composition, arguments, keywords)
        if result is not NotImplemented:
            type = _result_type(function, arguments, keywords)
            found = to_expression(result)
            return _with_call(found, function, arguments, keywords) if type == UNKNOWN else with_type(found, type)
    candidates = op_table().callables.get(function)
    if candidates is None:
        refuse_function(function)
    op, tensors, parameters = bind(function, candidates, arguments, keywords)
    if op.infix in COMPARISONS:
        _check_exact(op, tensors)
    values = tuple(map(to_expression, tensors))
    type = _result_type(function, arguments, keywords)
    return apply(op, values, parameters, None if type == UNKNOWN else type)


def _check_two(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raises EpilogueError where a function of `_OF_TWO` reduces: a number in the second place is a dimension."""
    given = (*arguments, *keywords.values())
    if len(given) != 2 or not all(isinstance(item, Expr | torch.Tensor) for item in given):
        bound = _OF_TWO[function]
        raise EpilogueError(
            f"{describe_callable(function)} of one value and not of two is {reduces(bound)}. Of two values it is "
            f"torch.{bound[1:]}imum, and of a value and a number torch.clamp"
        )


def _with_call(found: Expr, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Expr:
    """What a composition gives of values of no known type, marked as that: its ops are not typed as the function is.

    Not where it is the op of the function itself, a cast, or a value that has a type or is an argument.
    """
    given = (*arguments, *keywords.values())
    if found.op is None or found.type != UNKNOWN or found.op.name in ROUNDING.values():
        return found
    if any(item is found for item in given) or not all(isinstance(item, Expr | _CONSTANTS) for item in given):
        return found
    if found.op in op_table().callables.get(function, ()) and _are_given(found.arguments, given):
        return found
    return with_call(found, Call(function, arguments, tuple(keywords.items())))


def _are_given(arguments: tuple[Expr, ...], given: tuple[Any, ...]) -> bool:
    """Whether an op's arguments are those of the call, and none is made of them, as alpha * b is."""
    known = [to_expression(item) for item in given if isinstance(item, Expr | bool | int | float)]
    return all(any(item is value for value in known) for item in arguments)


def _result_type(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> ValueType:
    types = tuple([item.type if isinstance(item, Expr) else item for item in arguments])
    named = {name: item.type if isinstance(item, Expr) else item for name, item in keywords.items()}
    return promote(function, types, named)


def _check_exact(op: Op, values: list[Any]) -> None:
    """Refuses comparisons of integers that fp32 does not hold."""
    values = [to_expression(value) for value in values]
    types = [value.type for value in values]
    if not all(item.is_integer for item in types):
        return
    numbers = [value.number for value in values if value.is_number]
    dtypes = {item.dtype for item in types if not item.is_number}
    ranges = [torch.iinfo(dtype) for dtype in dtypes]
    holds = all(item.min <= number <= item.max for item in ranges for number in numbers)
    is_exact = all(abs(number) < _EXACT_INTEGERS for number in numbers) if numbers else ranges[0].bits <= 16
    if len(dtypes) > 1 or not holds or not is_exact:
        raise EpilogueError(
            f"torch.{op.name} of {describe_types(types)}: PyTorch compares integers exactly, and an epilogue computes "
            "with fp32, which holds them up to 2^24: compare them before, and pass the mask as an operand"
        )


def is_known(function: Callable[..., Any]) -> bool:
    """Whether a callable is in the language. Given the same arguments, it then always gives the same expression."""
    return function in op_table().callables or function in compositions()


def bind(
    function: Callable[..., Any], candidates: tuple[Op, ...], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Op, list[Any], tuple[float, ...]]:
    """The op that a call means, its tensors and its parameters."""
    given = _without_placement(function, _named_arguments(function, candidates[0], arguments, keywords))
    op = _match_literals(function, candidates, given)
    missing = [name for name in op.tensors if name not in given]
    unknown = given.keys() - op.names
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"does not take {unknown.pop()!r} in the epilogue language"
        raise EpilogueError(f"{describe_callable(function)} {what}; its arguments are {', '.join(op.names)}")
    parameters = []
    for name, default in op.parameters:
        value = given.get(name, default)
        if type(value) is not float:
            value = default if value is None else to_number(value, f"{name} of {describe_callable(function)}")
        parameters.append(value)
    return op, [given[name] for name in op.tensors], tuple(parameters)


def _without_placement(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    if _PLACEMENT.isdisjoint(keywords):
        return keywords
    if isinstance(keywords.get("inplace"), Expr):
        raise EpilogueError(
            f"{describe_callable(function)}: inplace has to be True or False, not an operand: {keywords['inplace']!r}"
        )
    for name in _PLACEMENT & keywords.keys():
        if name != "inplace" and keywords[name] is not None:
            raise EpilogueError(
                f"{describe_callable(function)}: {name}= is not in the epilogue language, which has values only"
            )
    return {name: value for name, value in keywords.items() if name not in _PLACEMENT}


def _compose(
    function: Callable[..., Any], composition: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    try:
        return composition(*arguments, **keywords)
    except EpilogueError:
        raise
    except TypeError:
        _bind_signature(function, composition, arguments, keywords)
        raise


def _bind_signature(
    function: Callable[..., Any], python: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Named arguments by the signature of a Python function; what does not fit is reported for `function`."""
    names, count = python.__code__.co_varnames[: python.__code__.co_argcount], len(arguments)
    if len(names) - len(python.__defaults__ or ()) <= count <= len(names) and keywords.keys() <= {*names[count:]}:
        return {**dict(zip(names, arguments, strict=False)), **keywords}  # inspect.Signature.bind takes 12 us
    try:
        return dict(_signature(python).bind(*arguments, **keywords).arguments)
    except TypeError as error:
        raise EpilogueError(f"{describe_callable(function)}: {error} in the epilogue language") from None


@functools.lru_cache(maxsize=256)
def _signature(function: types.FunctionType) -> inspect.Signature:
    return inspect.signature(function)


def _named_arguments(
    function: Callable[..., Any], op: Op, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    if isinstance(function, types.FunctionType) and function.__module__ == "torch.nn.functional":
        return _bind_signature(function, function, arguments, keywords)
    names = op.names
    if len(arguments) > len(names):
        raise EpilogueError(
            f"{describe_callable(function)} has {len(arguments)} arguments; in the epilogue language it takes "
            f"{', '.join(names)}"
        )
    given = dict(zip(names, arguments, strict=False))
    for name, value in keywords.items():
        target = op.tensors[0] if name in ("self", "input") and name not in names else name
        if target in given:
            raise EpilogueError(f"{describe_callable(function)} got {name} twice")
        given[target] = value
    return given


def _match_literals(function: Callable[..., Any], candidates: tuple[Op, ...], given: dict[str, Any]) -> Op:
    for op in candidates:
        if all(_is_literal(given.get(name, value), value) for name, value in op.literals):
            return op
    name = candidates[0].literals[0][0]
    choices = ", ".join(repr(dict(op.literals)[name]) for op in candidates)
    raise EpilogueError(f"{describe_callable(function)}: {name} has to be one of {choices}, got {given[name]!r}")


def _is_literal(given: Any, value: str) -> bool:
    return isinstance(given, str) and given == value  # an expression has no `==` with a string


def _refuse_in_place(name: str) -> NoReturn:
    instead = find_attribute(name.rstrip("_"))
    use = f"; use {name.rstrip('_')}" if callable(instead) and is_known(instead) else ""
    raise EpilogueError(f"{name} works in place, and an epilogue has values only{use}")


def check_refused(function: Callable[..., Any]) -> None:
    """Raises EpilogueError for a function of PyTorch that the table of refusals or that of reductions has."""
    name = getattr(function, "__name__", "")
    if (name in REDUCTIONS or refusal_of(name)) and find_attribute(describe_callable(function)) is function:
        refuse_function(function)


def refuse_function(function: Callable[..., Any]) -> NoReturn:
    name = getattr(function, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        _refuse_in_place(describe_callable(function))
    refusal = f"{describe_callable(function)} is not in the epilogue language"
    if name in REDUCTIONS:
        raise EpilogueError(f"{refusal}: it is {reduces(name)}")
    reason = refusal_of(name)
    if reason is not None:
        raise EpilogueError(f"{refusal}: {reason}")
    raise EpilogueError(
        f"{refusal}, which has elementwise functions only; `python -m cutfuse.epilogue` lists them. Apply others after "
        "the call"
    )


def retype(root: Expr, types: ValueTypes, numbers: Sequence[int | float | None] | None = None) -> Expr:
    """The expression with z and the operands of these types: each function is called again, as in the user's callable.

    numbers: for each operand of the expression the number that replaces it, or None. `types` has those of z and of the
    operands that are not replaced.

    Raises EpilogueError where PyTorch refuses a type, or computes with integers.
    """
    with under_autocast(types):
        return _retype(root, input_types(types), [None] * (len(types) - 1) if numbers is None else numbers)


def _retype(root: Expr, types: ValueTypes, numbers: Sequence[int | float | None]) -> Expr:
    identity = op_table().identity
    leaves = _leaves(types, numbers)
    places: dict[int, Expr] = {}
    for node in topological(root, _called_with):
        arguments = tuple(places[id(argument)] for argument in _called_with(node))
        if node.call is not None:
            call = node.call.map(lambda item: places[id(item)] if isinstance(item, Expr) else item)
            found = calls.call(call.function, call.arguments, dict(call.keywords))
        elif node.leaf:
            found = leaves[node.leaf]
        elif node.op is None:
            found = calls.call(torch.full_like, (leaves[node.type.like], node.number), {}) if node.type.like else node
        elif node.op is identity:
            found = _cast(node, arguments[0], types)
        else:
            found = calls.call(node.op.function, arguments, _keywords(node.op, node.parameters, arguments))
        places[id(node)] = found
    return places[id(root)]


def evaluate_eagerly(root: Expr, z: torch.Tensor, operands: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """The expression on tensors, each function by PyTorch as in the user's callable: in the tensors' types."""
    leaves: dict[str, Any] = {"z": z, **{f"r{index}": operand for index, operand in enumerate(operands)}}
    places: dict[int, Any] = {}
    for node in topological(root, _called_with):
        arguments = [places[id(argument)] for argument in _called_with(node)]
        if node.leaf:
            found = leaves[node.leaf]
        elif node.call is not None:
            call = node.call.map(lambda item: places[id(item)] if isinstance(item, Expr) else item)
            found = call.function(*call.arguments, **dict(call.keywords))
        elif node.number is not None:
            found = _number_of(node.number, node.type, leaves)
        elif node.op is op_table().identity:
            found = arguments[0].to(z.dtype if node.type.dtype is None else node.type.dtype)
        else:
            assert node.op is not None
            found = _run(node.op, arguments, node.op.keywords(node.parameters), z.device)
        places[id(node)] = found
    y: torch.Tensor = places[id(root)]
    return y


def _number_of(number: float, type: ValueType, leaves: dict[str, Any]) -> Any:
    """A number of the kind that it was, or a tensor of it."""
    if type.like:
        return torch.full_like(leaves[type.like], number)
    if type.is_number:
        return number if type.dtype is torch.float64 else bool(number) if type.is_boolean else int(number)
    return torch.tensor(number, dtype=type.dtype, device="cpu")


def _run(op: Op, arguments: list[Any], keywords: Any, device: torch.device) -> torch.Tensor:
    """An op on tensors and numbers. Of a number that its function takes as a tensor alone it makes one."""
    function = op.operator or op.function
    try:
        return function(*arguments, **dict(keywords))
    except TypeError:
        tensors = [item if isinstance(item, torch.Tensor) else torch.tensor(item, device=device) for item in arguments]
        return function(*tensors, **dict(keywords))


def _called_with(node: Expr) -> tuple[Expr, ...]:
    return node.arguments if node.call is None else node.call.inputs


def _keywords(op: Op, parameters: tuple[float, ...], arguments: tuple[Expr, ...]) -> dict[str, Any]:
    """The parameters and literals of a call.

    Whether the user wrote 1 or 1.0 is not known any more. Beside integers it is taken for 1, as clamp then is one of
    integers, which are refused.
    """
    is_exact = all(item.type.is_integer or item.is_boolean for item in arguments)
    values = [int(value) if is_exact and value.is_integer() else value for value in parameters]
    return dict(op.keywords(values))


def _leaves(types: ValueTypes, numbers: Sequence[int | float | None]) -> dict[str, Expr]:
    leaves = {"z": eager.rounded_input(types[0], rounds_values())}
    remaining = enumerate(types[1:])
    for index, number in enumerate(numbers):
        leaves[f"r{index}"] = operand(*next(remaining)) if number is None else to_expression(number)
    return leaves


def _cast(node: Expr, argument: Expr, types: ValueTypes) -> Expr:
    """An identity node, which marks a value as one of a type: of a mask as boolean, of a cast as the cast's."""
    if node.is_boolean and not argument.is_boolean:
        raise EpilogueError(
            f"the epilogue takes {argument!r} as a mask, which is torch.bool, but it is {argument.type.dtype}: pass "
            "operand != 0"
        )
    dtype = types[0].dtype if node.type.dtype is None else node.type.dtype
    return argument if node.is_boolean else calls.call(torch.Tensor.to, (argument, dtype), {})
