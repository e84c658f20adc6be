"""Which epilogues that read attributes of objects have a number, and which have none: methods, and lambdas."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recognition_checks import HOME, Fn, check_number, learn
from recognition_checks import afresh as afresh
from recognition_world import Layer
from torch import nn

from cutfuse import native
from cutfuse.epilogue.fingerprint import fingerprint
from cutfuse.epilogue.namespaces import NoKeyError
from cutfuse.epilogue.recognition import recognised
from cutfuse.epilogue.types import unknown_types

OUTSIDE = 2.0
FINGERPRINT: Any = sys.modules["cutfuse.epilogue.fingerprint"]
DETACH: Any = sys.modules["cutfuse.epilogue.detach"]


class Settings:
    shift = 1.0

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def scaled(self, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z) * self.scale

    def shifted(self, z: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
        return z * OUTSIDE * gain + self.shift


class Nested:
    inner = Settings(2.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Computing(Settings):
    """Attributes and methods that may give something else in every call."""

    def __init__(self) -> None:
        super().__init__(2.0)

    @property
    def value(self) -> float:
        return OUTSIDE

    def __getattr__(self, name: str) -> float:
        return OUTSIDE

    def doubled(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.value

    def passing(self, z: torch.Tensor) -> torch.Tensor:
        return take(self, z)

    def rebound(self, z: torch.Tensor) -> torch.Tensor:
        self = Settings(OUTSIDE)  # type: ignore[assignment]
        return z * self.scale

    def captured(self, z: torch.Tensor) -> torch.Tensor:
        return (lambda: z * self.scale)()

    @classmethod
    def of_class(cls, z: torch.Tensor) -> torch.Tensor:
        return z * cls.shift


def take(settings: Settings, z: torch.Tensor) -> torch.Tensor:
    return z * settings.real  # type: ignore[attr-defined]  # which a number has too


class Intercepting(Settings):
    def __init__(self) -> None:
        super().__init__(2.0)

    def __getattribute__(self, name: str) -> Any:
        return OUTSIDE if name == "scale" else super().__getattribute__(name)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Closing(Settings):
    def __init__(self) -> None:
        super().__init__(2.0)

    def __del__(self) -> None:
        pass


KNOWN: dict[str, Callable[[], Any]] = {
    "attribute of an object": lambda: (lambda settings: lambda z: z * settings.scale)(Settings(2.0)),
    "attribute of a class": lambda: (lambda settings: lambda z: z * settings.shift)(Settings(2.0)),
    "attribute of a frozen object": lambda: (lambda settings: lambda z: z * settings.scale)(Frozen(2.0)),
    "attribute of an attribute": lambda: (lambda settings: lambda z: z * settings.scale.scale)(Settings(Frozen(2.0))),
    "attribute of a module in an object": lambda: (lambda of: lambda z: z * of.scale.inner.scale)(Settings(HOME)),
    "attributes of one name": lambda: (lambda settings: lambda z: z * settings.scale.scale)(Settings(Settings(2.0))),
    "number of a class": lambda: (lambda settings: lambda z: z * settings.shift.real)(Settings(2.0)),
    "number of an object": lambda: (lambda settings: lambda z: z * settings.scale.real)(Settings(2.0)),
    "method of an object": lambda: Settings(2.0).scaled,
    "method with a default": lambda: Settings(2.0).shifted,
    "method of a module": lambda: Layer(2.0).method,
    "forward of a user's module": lambda: Layer(2.0).forward,
    "attribute of a class in a module": lambda: (lambda of: lambda z: of.act(z) * of.gain)(Layer(2.0)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_is_recognised(case: str) -> None:
    fn = KNOWN[case]()
    number = learn(fn)
    assert number > 1
    assert learn(fn) == number
    assert check_number(KNOWN[case]()) == number


@pytest.mark.parametrize(
    "fn",
    [
        (lambda settings: lambda z: (z, settings)[0] * settings.scale)(Settings(2.0)),
        (lambda settings: lambda z: z * settings.inner.scale)(Nested()),
        (lambda settings: lambda z: z * settings.value)(Computing()),
        (lambda settings: lambda z: z * settings.missing)(Computing()),
        (lambda settings: lambda z: z * settings.scale)(Intercepting()),
        (lambda settings: lambda z: z * settings.scale)(Slotted()),
        (lambda settings: lambda z: z * settings.scale)(Settings),
        (lambda settings: lambda z: settings.scaled(z))(Settings(2.0)),
        Computing().doubled,
        Computing().passing,
        Computing().rebound,
        Computing().captured,
        Computing.of_class,
        (lambda method: lambda z: method(z) + len(f"{method}"))(Settings(2.0).scaled),
        (lambda settings: lambda z: z * settings.scale)(Closing()),
        (lambda module: lambda z: module.mean * z)(Layer(2.0)),
        Layer(2.0),
        nn.Sequential(Layer(2.0)),
    ],
)
def test_what_has_no_number(fn: Fn) -> None:
    assert recognised(fn, (), unknown_types(0)) is None
    assert native.core.recognise(fn) == 0


def test_attributes_that_are_read_behind_a_jump() -> None:
    """Of either value: the one before the jump, and the one that was put on the stack elsewhere."""
    scaled: Any = torch.nn.functional.silu

    def choose(settings: Any) -> Fn:
        return lambda z: z * (scaled if settings.flag else settings).scale

    settings: Any = Settings(2.0)
    settings.flag = True
    assert fingerprint(choose(settings)) is None


def test_an_attribute_of_an_object_over_one_that_becomes_a_descriptor() -> None:
    class Later:
        pass

    class Shadowed:
        scale: Any = Later()

    shadowed = Shadowed()
    vars(shadowed)["scale"] = 2.0
    assert fingerprint(lambda z: z * shadowed.scale) is None


def test_a_class_that_changes_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Settings):
        scale = property(lambda self: OUTSIDE)  # type: ignore[assignment]

    settings = Settings(2.0)
    fn = (lambda settings: lambda z: z * settings.scale)(settings)
    read_plain = FINGERPRINT.read_plain

    def change(value: Any, kind: type, name: str) -> Any:
        found = read_plain(value, kind, name)
        value.__class__ = Other
        return found

    with monkeypatch.context() as patch:
        patch.setattr(FINGERPRINT, "read_plain", change)
        assert fingerprint(fn) is None


def test_descriptors_that_raise() -> None:
    class Asked(type):
        def __getattr__(cls, name: str) -> Any:
            raise KeyError(name)

    class Value(metaclass=Asked):
        pass

    class Odd(Settings):
        scale: Any = Value()
        __dict__ = types.FunctionType.__dict__["__dict__"]  # type: ignore[assignment]

    for name in ("scale", "shift"):
        fn = eval(f"lambda z: z * settings.{name}", {"settings": Odd.__new__(Odd)})
        assert fingerprint(fn) is None


def test_a_copy_leaves_what_it_does_not_know() -> None:
    """An object that took a number's place after the key was computed."""
    settings = Settings(2.0)
    with pytest.raises(NoKeyError):
        DETACH.detach(lambda z: z * (settings, settings.shift)[1])
    assert vars(settings) == {"scale": 2.0}
