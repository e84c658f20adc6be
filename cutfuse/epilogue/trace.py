"""Epilogues: a callable run once on symbolic values, its expression, and its program."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cutfuse import dynamo
from cutfuse.epilogue.calls import check_refused, evaluate_eagerly, is_known, retype
from cutfuse.epilogue.eager import rounded_input
from cutfuse.epilogue.errors import EpilogueError, OperandCountError, counted, refusal_of, refuse
from cutfuse.epilogue.expression import Expr, operand
from cutfuse.epilogue.lower import Affine, count_operands_read, lower, split_affine
from cutfuse.epilogue.program import Program, arithmetic_dtype, evaluate
from cutfuse.epilogue.table import Op, compositions, describe_callable, op_table, without_annotations
from cutfuse.epilogue.traced_tensor import (
    Modes,
    TracedTensor,
    WithoutGradient,
    check_end,
    refuse_without_gradient,
    run_symbolically,
    unwrap,
)
from cutfuse.epilogue.types import (
    InputDtype,
    ValueTypes,
    input_types,
    refuse_unknown_type,
    types_of,
    under_autocast,
    unknown_types,
)

ONE_SCALAR = "an epilogue returns one elementwise expression of the pre-activation and the operands"

_numbers = itertools.count()
_epilogues: weakref.WeakValueDictionary[str, Epilogue] = weakref.WeakValueDictionary()


def epilogue_called(name: str) -> Epilogue:
    """The Epilogue with that name. Dynamo reads names as constants; it could not read the Epilogue."""
    return _epilogues[name]


class Epilogue:
    """An epilogue, traced: `Epilogue(lambda z, r: torch.sigmoid(z) * 2 + r)`.

    fn: a callable of the pre-activation and of `operand_count` tensor operands. Where that is None it is the number of
    further positional arguments without a default.

    Never changes: what fn reads from outside is fixed when it is traced. Raises EpilogueError where fn cannot be traced
    or does not fit a program. Calling it computes it on tensors by composed PyTorch operations.

    It serves tensors of every type, so fn cannot ask for one: `z.dtype` is known only as a type to cast to. Which types
    PyTorch would give, and whether it takes those of the operands, is found when they are known, see `for_types`.

    program: the program. text: its text form. expression: what it computes. operand_count: how many tensor operands it
    takes. affine: its affine form in the pre-activation, or None. dtype: what PyTorch's result would be of, or None
    where that depends on the tensors. name: unique in this process.
    """

    program: Program
    text: str
    expression: Expr
    operand_count: int
    dtype: torch.dtype | None
    name: str
    _by_types: dict[tuple[ValueTypes, torch.dtype], Epilogue]

    def __init__(self, fn: Callable[..., Any], operand_count: int | None = None) -> None:
        count = count_operands(fn) if operand_count is None else operand_count
        if not isinstance(count, int) or count < 0:
            limit = op_table().limits["operands"]
            raise EpilogueError(f"operand_count has to be an integer from 0 to {limit}, got {count!r}")
        try:
            expression = trace(fn, unknown_types(count), is_kept=True)
        except EpilogueError:
            raise
        except (TypeError, ValueError, IndexError) as error:
            if operand_count is None:
                check_variadic(fn, count, error)
            raise
        self._set(expression, count)

    @classmethod
    def from_expression(cls, expression: Expr, operand_count: int | None = None, is_eager: bool = False) -> Epilogue:
        """From an expression of `input()` and `operand(k)`. By default it takes as many operands as it reads.

        is_eager: as of a Program.
        """
        epilogue = cls.__new__(cls)
        count = count_operands_read(expression) if operand_count is None else operand_count
        epilogue._set(expression, count, is_eager)
        return epilogue

    @classmethod
    def from_text(cls, text: str) -> Epilogue:
        """From a program's text form."""
        program = Program.parse(text)
        return cls.from_expression(program.expression, program.operand_count, program.is_eager)

    def _set(self, expression: Expr, operand_count: int, is_eager: bool = False) -> None:
        program = lower(expression, operand_count, is_eager)
        values = {
            "program": program,
            "text": program.text,
            "expression": expression,
            "operand_count": operand_count,
            "dtype": expression.type.dtype,
            "name": f"epilogue{next(_numbers)}",
            "_by_types": {},
        }
        self.__dict__.update(values)
        _epilogues[self.name] = self

    @functools.cached_property
    def affine(self) -> Affine | None:
        return split_affine(self.expression)

    def for_types(self, types: ValueTypes) -> Epilogue:
        """The same for a pre-activation and operands of these types.

        Raises EpilogueError where PyTorch refuses them, or computes with integers.
        """
        key = types, torch.get_default_dtype()  # which a mask times a number is of
        found = self._by_types.get(key)
        if found is None:
            found = self._by_types[key] = Epilogue.from_expression(retype(self.expression, types), self.operand_count)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"an Epilogue does not change, so {name} cannot be set")

    def __call__(self, z: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        """On tensors, in fp32 (fp64 for fp64): z's shape, and the type that PyTorch gives.

        z: integers and booleans are taken as the default floating type. operands: each broadcasts to z.
        """
        for value in (z, *operands):
            if isinstance(value, TracedTensor | Expr):
                raise EpilogueError("an Epilogue inside another one's callable: call the plain function instead")
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(f"an Epilogue is called with tensors, got {kind}; cutfuse.pointwise takes numbers too")
        if not z.is_floating_point():
            z = z.to(torch.get_default_dtype())
        if len(operands) != self.operand_count:
            raise OperandCountError(f"{self!r} takes {counted(self.operand_count, 'operand')}, got {len(operands)}")
        typed = self.for_types(types_of(z, *operands))
        y = evaluate(typed.program, z.to(arithmetic_dtype(z, operands)), operands).to(typed.dtype)
        return y.clone() if y is z else y

    def run_eagerly(self, z: torch.Tensor, *operands: torch.Tensor | float) -> torch.Tensor:
        """On tensors, each function by PyTorch, in their types."""
        return evaluate_eagerly(self.expression, z, operands)

    def __repr__(self) -> str:
        operands = "".join(f", r{k}" for k in range(self.operand_count))
        return f"Epilogue(z{operands} -> {self.expression!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Epilogue.from_expression, (self.expression, self.operand_count, self.program.is_eager)


@dynamo.disable  # after a graph break Dynamo would try to compile this
def trace(fn: Callable[..., Any], types: ValueTypes, is_kept: bool = False) -> Expr:
    """The expression that fn computes from the pre-activation and operands of these types.

    is_kept: whether it serves later calls, which may be differentiated although this one is not.
    """
    if not callable(fn):
        raise EpilogueError(f"an epilogue is a callable or a cutfuse.Epilogue, got {fn!r} of type {type(fn).__name__}")
    refuse_class("the epilogue", fn)
    _check_scripted(fn)
    symbolic = symbolic_arguments(types)
    try:
        with (
            contextlib.nullcontext() if is_kept else dynamo.NOT_COMPILING,
            _gradients_on() if is_kept else contextlib.nullcontext(),
            under_autocast(types, watched=True),
        ):
            start = Modes.now()
            result = run_symbolically(fn, symbolic, start)
            check_end(start, Modes.now())
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        check_refused(fn)
        if isinstance(error, TypeError):
            check_arity(fn, len(types) - 1, error)
        if not isinstance(error, EpilogueError):
            _check_operation(error)
        _check_module(error)
        raise
    return check_result(unwrap(result))


@contextlib.contextmanager
def _gradients_on() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def refuse_class(name: str, fn: Any) -> None:
    """Raises EpilogueError for a class of modules: its call makes a module, and computes nothing."""
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        is_of_pytorch = getattr(torch.nn, fn.__name__, None) is fn
        path = f"torch.nn.{fn.__name__}" if is_of_pytorch else f"{fn.__module__}.{fn.__qualname__}"
        refuse(f"{name} is the class {path}; pass an instance, such as {path}()")


def _check_scripted(fn: Callable[..., Any]) -> None:
    if isinstance(fn, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        raise EpilogueError(
            f"the epilogue is scripted ({type(fn).__name__}), and TorchScript takes no symbolic values: pass the "
            "Python function or module that torch.jit.script was given"
        )


def _check_operation(error: Exception) -> None:
    """Raises EpilogueError where the error is a refusal, by Python or a library, of the symbolic value's type."""
    reason = str(error)
    if InputDtype.__name__ in reason:
        refuse_unknown_type()
    if "TorchScript interpreter" in reason:
        raise EpilogueError(
            "the epilogue calls a scripted function or module, and TorchScript takes no symbolic values: call the "
            "Python function or module that torch.jit.script was given"
        ) from None
    if TracedTensor.__name__ in reason:
        reason = reason.splitlines()[0].replace(TracedTensor.__name__, "Tensor")
        raise EpilogueError(
            f"the epilogue does what a symbolic value cannot take ({reason}): it is traced on one, so use Python's "
            "operators, functions of torch and methods called on the value itself, as in z.sigmoid()"
        ) from error


def _check_module(error: Exception) -> None:
    """Raises EpilogueError where the error is that of a module of torch.nn that the table of refusals has."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kind = type(frame.f_locals.get("self"))
        reason = refusal_of(kind.__name__) if kind.__module__.startswith("torch.nn.") else None
        if reason is not None:
            message = f"torch.nn.{kind.__name__} is not in the epilogue language: {reason}"
            raise EpilogueError(message).with_traceback(error.__traceback__) from None


def symbolic_arguments(types: ValueTypes) -> list[Expr]:
    """z and the operands."""
    limit = op_table().limits["operands"]
    if len(types) - 1 > limit:
        raise EpilogueError(
            f"{len(types) - 1} tensor operands exceed the limit of {limit}: combine some of them beforehand (numbers "
            "do not count)"
        )
    z, *operands = input_types(types)
    return [rounded_input(z, types[0].rounds), *(operand(index, type) for index, type in enumerate(operands))]


def check_result(result: Any) -> Expr:
    """What the callable returned, if that is an expression that is not a number. Raises EpilogueError otherwise."""
    if isinstance(result, WithoutGradient):
        refuse_without_gradient(result)
    if isinstance(result, Expr) and not result.is_number:
        return result
    if isinstance(result, torch.Tensor):
        raise EpilogueError(
            f"the epilogue returns a tensor of shape {tuple(result.shape)} that does not come from its arguments: "
            f"{ONE_SCALAR}; pass tensors through operands="
        )
    if isinstance(result, tuple | list):
        raise EpilogueError(f"the epilogue returns {len(result)} values: {ONE_SCALAR}")
    if isinstance(result, Expr | bool | int | float | str | None):
        raise EpilogueError(f"the epilogue returns {result!r}, which does not depend on its arguments: {ONE_SCALAR}")
    if isinstance(result, torch.nn.Module):
        kind = type(result).__name__
        raise EpilogueError(
            f"the epilogue returns an object of type {kind}: {ONE_SCALAR}; make the module before and call it, as in "
            f"{kind}()(z)"
        )
    # Its repr might compute with symbolic values that it holds.
    raise EpilogueError(f"the epilogue returns an object of type {type(result).__name__}: {ONE_SCALAR}")


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_arity(fn: Callable[..., Any], operand_count: int, error: Exception) -> None:
    """Raises OperandCountError where fn, whose call raised `error`, does not take z and that many operands.

    An EpilogueError of a Python function's is of its body: a call with other arguments does not come to that.
    """
    function, bound, keywords = _without_partial(fn)
    if isinstance(error, EpilogueError) and not is_known(function):
        return
    signature = _signature(function)
    if signature is None:
        return
    try:
        signature.bind(*bound, *[None] * (1 + operand_count), **keywords)
    except TypeError:
        raise OperandCountError(
            f"the epilogue {_name(function)}{without_annotations(signature)} is called with the pre-activation and "
            f"{counted(operand_count, 'operand')}"
        ) from error


def check_variadic(fn: Callable[..., Any], operand_count: int, error: Exception) -> None:
    """Raises EpilogueError where fn takes any number of operands, so that the count of those it lacks is unknown."""
    signature = _signature(fn)
    kinds = set() if signature is None else {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        raise EpilogueError(
            f"the epilogue takes any number of arguments, and fails with {counted(operand_count, 'operand')} "
            f"({error}): say how many it has, Epilogue(fn, operand_count=...)"
        ) from error


def count_operands(fn: Callable[..., Any]) -> int:
    """How many arguments without a default a callable takes after the first."""
    signature = _signature(fn)
    parameters = [] if signature is None else list(signature.parameters.values())
    required = [item for item in parameters if item.kind in _POSITIONAL and item.default is item.empty]
    return max(len(required) - 1, 0)


def _without_partial(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function inside of a functools.partial, and what it is given there; any other callable and nothing."""
    if isinstance(fn, functools.partial):
        return fn.func, fn.args, fn.keywords
    return fn, (), {}


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """A callable's signature, by the language's own tables for functions of PyTorch that have none in Python."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        pass
    if not callable(fn):
        return None
    if fn in compositions():
        return inspect.signature(compositions()[fn])
    candidates = op_table().callables.get(fn)
    return _signature_of_op(candidates[0]) if candidates else None


def _signature_of_op(op: Op) -> inspect.Signature:
    positional, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            *(inspect.Parameter(name, positional) for name in op.tensors),
            *(inspect.Parameter(name, positional, default=default) for name, default in op.parameters),
            *(inspect.Parameter(name, by_keyword, default=default) for name, default in op.literals),
        ]
    )


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, torch.nn.Module):
        return f"{type(function).__name__}.forward"
    if is_known(function):
        return describe_callable(function)
    return str(getattr(function, "__name__", type(function).__name__))
