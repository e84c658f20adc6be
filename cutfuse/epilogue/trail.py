"""The reads behind a key, for the native module, which recognises a callable by making them again."""

from __future__ import annotations

import types
from typing import Any

from cutfuse.epilogue.namespaces import can_change

# What is read, of which of the values met so far, by which name or index; the kind of answer, and the answer.
Step = tuple[str, int, Any, str, Any]


class Trail:
    """What `fingerprint` reads, in the order in which it does, and what each read gave.

    The values met are numbered in the order in which they are found, the callable first: `csrc/call/callable_walk.h`
    has the same order. `csrc/call/observations.h` says what each read is.

    slot: the value that is being looked at. is_complete: nothing was read that the native module cannot read.
    """

    __slots__ = ("is_complete", "slot", "steps")

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.slot = 0
        self.is_complete = True

    def add(self, read: str, answer: str, found: Any, argument: Any = None) -> None:
        self.steps.append((read, self.slot, argument, answer, found))

    def add_known(self, function: types.FunctionType, code: types.CodeType, defaults: tuple[Any, ...] | None) -> None:
        """A function written in Python that stands for itself as long as it is not patched."""
        self.add("value", "same", function)
        self.add("code", "same", code)
        self.add("default values", "same", defaults)

    def add_attributes(self, attributes: dict[str, Any], children: int) -> None:
        """Of a module of torch.nn: their names and types, and the number of modules inside of it."""
        self.add("attributes", "names", (tuple(attributes), tuple(map(type, attributes.values())), children))
        is_readable = all(type(name) is str for name in attributes)
        if not is_readable or (children and type(attributes["_modules"]) is not dict):
            self.is_complete = False

    def add_float_type(self, kind: type[float]) -> None:
        """One of NumPy's, which cannot change."""
        self.add("value", "float of type", kind)
        if can_change(kind):
            self.is_complete = False

    def add_hook_check(self, check: types.FunctionType, code: types.CodeType, names: tuple[str, ...]) -> None:
        """The function that found no global hook, and the containers that it asks."""
        self.add("hooks", "none", None, (check.__globals__, check.__name__, code, names))
