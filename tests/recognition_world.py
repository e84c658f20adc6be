"""Callables that read each other, numbers, modules and classes, and random changes of all that they read."""

from __future__ import annotations

import builtins
import functools
import math
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cutfuse.epilogue import Epilogue

NAMES = ("a", "b", "c", "abs")


class Settings:
    """An object whose attributes epilogues read; `scaled` and `nested` are such epilogues."""

    gain: Any = 1.0

    def __init__(self) -> None:
        self.a: Any = 1.0

    def scaled(self, z: Any) -> Any:
        return z * self.a + self.gain * b  # type: ignore[name-defined]  # noqa: F821

    def nested(self, z: Any, d: float = 2.0) -> Any:
        return self.inner.a(z) * self.inner.gain * d  # type: ignore[attr-defined]


class Layer(nn.Module):
    """A module of a user's own, and one whose methods are epilogues."""

    gain = 1.0

    def __init__(self, a: Any) -> None:
        super().__init__()
        self.a = a
        self.act = nn.LeakyReLU(0.5)

    def forward(self, z: Any) -> Any:
        return self.act(z) * self.a * self.gain

    def method(self, z: Any) -> Any:
        return self.act(z) * self.act.negative_slope + self.a


SOURCES = (
    "lambda z: z * a",
    "lambda z: a(z) + b",
    "lambda z: abs(z) + a",
    "lambda z: z * home.a + home.inner.a",
    "lambda z: home.a.real(z) * a.b",
    "lambda z: (lambda y: y * b + c(y))(z)",
    "lambda z: f(z) * g(z)",
    "lambda z, d=2.0, *, k=3.0: z * d + k + a",
    "lambda z: F.leaky_relu(z) + F.hardswish(z)",
    "lambda z: z if f is g else c",
    "(lambda cell: lambda z: z * cell)(1.0)",
    "(lambda cell, other: lambda z: z * cell + (lambda: other)())(1.0, 2.0)",
    "(lambda cell: lambda z: cell(z) * a)(f)",
    "(lambda cell: lambda z: cell.a * z + cell.b.a)(home)",
    "lambda z: z * settings.a + settings.inner.gain",
    "(lambda cell: lambda z: cell.act(z) * cell.a)(layer)",
)
EPILOGUES = [Epilogue(lambda z: z * 2), Epilogue(lambda z: z * 3)]


class World:
    """callables: what may be recognised. change(): changes something that one of them may read, or puts it back."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.patch = patch
        self.home, self.inner = types.ModuleType("home"), types.ModuleType("inner")
        self.namespace: dict[str, Any] = {
            "F": F,
            "torch": torch,
            "home": self.home,
            "__builtins__": dict(vars(builtins)),
        }
        self.namespace.update(dict.fromkeys(NAMES[:3], 1.0), f=lambda z: z * 2, g=lambda z: z * 3)
        self.kinds = [type(kind.__name__, (kind,), {}) for kind in (Settings, Settings, Layer, Layer)]
        self.objects = [self.kinds[0](), self.kinds[1](), self.kinds[2](0.5)]
        self.objects[0].inner = self.objects[1]
        self.layers = [self.kinds[2](1.0), self.kinds[3](2.0)]
        self.namespace.update(settings=self.objects[0], layer=self.objects[2])
        vars(self.home).update(a=1.0, inner=self.inner)
        vars(self.inner).update(a=1.0)
        self.functions: list[Any] = [eval(source, self.namespace) for source in SOURCES]
        self.namespace.update(f=self.functions[0], g=self.functions[7])
        self.partials = [
            functools.partial(F.leaky_relu, negative_slope=0.5),
            functools.partial(self.functions[7], d=1.0),
        ]
        self.children = [nn.Tanh(), nn.LeakyReLU(0.25)]  # made before their classes are patched
        self.modules = [nn.Tanh(), nn.LeakyReLU(0.5), nn.Hardtanh(-1.0, 1.0)]
        self.chain = nn.Sequential(nn.Tanh(), nn.Sequential(nn.LeakyReLU(0.5), nn.Identity()))
        self.callables = [*self.functions, *self.partials, *self.modules, self.chain, *EPILOGUES, torch.tanh, F.silu]
        own = self.namespace  # of functions whose globals are the world's
        for name in ("scaled", "nested"):
            original = getattr(Settings, name)
            function = types.FunctionType(original.__code__, own, name, original.__defaults__)
            self.callables += [types.MethodType(function, item) for item in self.objects[:2]]
        self.callables += [item.method for item in (self.objects[2], *self.layers)] + self.layers
        self.hooks: list[Any] = []
        self.changes: list[Callable[[], object]] = [
            self.set_global,
            self.set_global,
            self.set_builtin,
            self.set_attribute_of_home,
            self.set_cell,
            self.set_defaults,
            self.set_keyword_defaults,
            self.set_name,
            self.set_own_attribute,
            self.set_code,
            self.set_keyword,
            self.set_attribute_of_module,
            self.set_child,
            self.set_class,
            self.patch_class,
            self.patch_forward,
            self.patch_function,
            self.set_hook,
            self.set_global_hook,
            self.set_attribute_of_object,
            self.set_attribute_of_object,
            self.set_attribute_of_class,
            self.set_class_of_object,
            self.set_child_of_object,
        ]

    def change(self) -> str:
        change = self.random.choice(self.changes)
        change()
        return change.__name__

    def value(self) -> Any:
        pick = self.random.choice
        return pick(
            [
                *(0.0, -0.0, 1.0, 2.0, math.nan, -math.nan, 1, 2, True, None, "a", b"a", 1 << 70, torch.float16),
                *(
                    (),
                    (1.0, 2),
                    (pick(self.functions),) * 2,
                    np.float64(pick([1.0, 2.0])),
                    [1.0],
                    self.home,
                    self.inner,
                ),
                *(self.objects[0], self.objects[2]),
                *(torch.tanh, F.silu, F.leaky_relu, torch.Tensor, float, abs, pick(EPILOGUES), torch.ones(2)),
                *(pick(self.functions), pick(self.functions), pick(self.partials), pick(self.modules), self.chain),
            ]
        )

    def set_global(self) -> None:
        name = self.random.choice(NAMES)
        if self.random.random() < 0.1:
            self.namespace.pop(name, None)
        else:
            self.namespace[name] = self.value()

    def set_builtin(self) -> None:
        self.namespace["__builtins__"]["abs"] = self.random.choice([abs, torch.abs, 1.0])

    def set_attribute_of_home(self) -> None:
        home, name = self.random.choice([(self.home, "a"), (self.home, "b"), (self.home, "inner"), (self.inner, "a")])
        if self.random.random() < 0.1:
            vars(home).pop(name, None)
        else:
            setattr(home, name, self.inner if name == "inner" and self.random.random() < 0.8 else self.value())

    def set_cell(self) -> None:
        function = self.random.choice([item for item in self.functions if item.__closure__])
        cell = self.random.choice(function.__closure__)
        if self.random.random() < 0.1:
            cell.cell_contents = None
            del cell.cell_contents
        else:
            cell.cell_contents = self.value()

    def set_defaults(self) -> None:
        function = self.random.choice(self.functions)
        function.__defaults__ = self.random.choice([None, (), (2.0,), (self.value(),), (self.value(), self.value())])

    def set_keyword_defaults(self) -> None:
        function = self.random.choice(self.functions)
        function.__kwdefaults__ = self.random.choice([None, {}, {"k": 3.0}, {"k": self.value()}, {"l": 3.0, "k": 3.0}])
        if function.__kwdefaults__ and self.random.random() < 0.3:
            function.__kwdefaults__["k"] = self.value()

    def set_name(self) -> None:
        self.random.choice(self.functions).__qualname__ = self.random.choice(["one", "two", "".join(["o", "ne"])])

    def set_own_attribute(self) -> None:
        owner = self.random.choice([*self.functions, *self.partials])
        if owner.__dict__:
            owner.__dict__.clear()
        else:
            owner.real = 1.0

    def set_code(self) -> None:
        function = self.random.choice(self.functions)
        others = [
            item for item in self.functions if len(item.__code__.co_freevars) == len(function.__code__.co_freevars)
        ]
        function.__code__ = self.random.choice(others).__code__

    def set_keyword(self) -> None:
        keywords = self.random.choice(self.partials).keywords
        keywords[self.random.choice(["d", "negative_slope"])] = self.value()
        if len(keywords) > 1 and self.random.random() < 0.5:
            keywords.pop(next(iter(keywords)))

    def set_attribute_of_module(self) -> None:
        module = self.random.choice([*self.modules, self.chain])
        name = self.random.choice(["negative_slope", "min_val", "extra", "other", "training"])
        if self.random.random() < 0.3:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = self.random.choice([self.value(), {}, set(), None, 0.5])

    def set_child(self) -> None:
        self.chain[self.random.randrange(2)] = self.random.choice([*self.children, *self.modules])

    def set_class(self) -> None:
        self.random.choice(self.modules).__class__ = self.random.choice(
            [nn.Tanh, nn.LeakyReLU, nn.Hardtanh, nn.Sigmoid]
        )

    def patch_class(self) -> None:
        kind = self.random.choice([nn.Tanh, nn.LeakyReLU, nn.Module])
        name = self.random.choice(["gain", "negative_slope", "extra_repr", "__call__"])
        value = self.random.choice([1.0, lambda self, z=None: z, property(lambda self: 1.0)])
        self.patch.setattr(kind, name, value, raising=False)
        if self.random.random() < 0.8:
            self.patch.undo()

    def patch_forward(self) -> None:
        forward = self.random.choice([nn.Tanh, nn.LeakyReLU]).forward
        other = (lambda self, input: input * 2).__code__
        for name, value in (("__code__", other), ("__defaults__", (1.0,)), ("__qualname__", "other")):
            if self.random.random() < 0.5:
                self.patch.setattr(forward, name, value)
        if self.random.random() < 0.5:
            self.patch.setattr(nn.Tanh, "forward", lambda self, z: z * 2)

    def patch_function(self) -> None:
        self.patch.setattr(F.leaky_relu, "__defaults__", self.random.choice([(0.5, False), (0.25, False)]))
        if self.random.random() < 0.5:
            self.patch.setattr(F.hardswish, "__code__", (lambda input, inplace=False: input * 3).__code__)
        if self.random.random() < 0.7:
            self.patch.undo()

    def set_attribute_of_object(self) -> None:
        item, name = (
            self.random.choice([*self.objects, *self.layers]),
            self.random.choice(["a", "inner", "gain", "act"]),
        )
        attributes = object.__getattribute__(item, "__dict__")
        if self.random.random() < 0.2:
            attributes.pop(name, None)
        else:
            attributes[name] = self.random.choice([self.value(), 1.0, 2.0, self.objects[1]])

    def set_attribute_of_class(self) -> None:
        kind, name = self.random.choice(self.kinds), self.random.choice(["gain", "a", "act", "__getattr__", "forward"])
        if name in vars(kind):
            delattr(kind, name)
        elif name == "__getattr__":
            kind.__getattr__ = self.random.choice([lambda self, name: 3.0, nn.Module.__getattr__])
        elif name == "forward":
            kind.forward = lambda self, z: z * self.gain
        else:
            value = self.random.choice([1.0, 2.0, property(lambda self: 1.0), lambda self, z: z, self.value()])
            setattr(kind, name, value)

    def set_class_of_object(self) -> None:
        item = self.random.choice([*self.objects, *self.layers])
        kinds = self.kinds[2:] if isinstance(item, nn.Module) else self.kinds[:2]
        item.__class__ = self.random.choice(kinds)

    def set_child_of_object(self) -> None:
        item = self.random.choice([self.objects[2], *self.layers])
        home = self.random.choice(["_modules", "_parameters", "_buffers"])
        children = object.__getattribute__(item, "__dict__")[home]
        if self.random.random() < 0.3:
            children.pop("act", None)
        elif home == "_modules":
            children["act"] = self.random.choice([*self.children, *self.modules, None])
        elif self.random.random() < 0.3:
            children["act"] = None

    def set_hook(self) -> None:
        if self.hooks:
            self.hooks.pop().remove()
        else:
            self.hooks.append(self.random.choice([*self.modules, self.chain]).register_forward_hook(lambda *_: None))

    def set_global_hook(self) -> None:
        handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
        if self.random.random() < 0.5:
            self.hooks.append(handle)
        else:
            handle.remove()

    def end(self) -> None:
        self.patch.undo()
        for handle in self.hooks:
            handle.remove()
