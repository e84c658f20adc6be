"""The native module gives a number for callables that it has met, and only while what they read is the same.

What it keeps of them is bounded, freed, and safe after a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import resource
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cutfuse import native
from cutfuse.epilogue import Epilogue, EpilogueError, resolve
from cutfuse.epilogue.fingerprint import detach, fingerprint
from cutfuse.epilogue.reads import NoKeyError
from cutfuse.epilogue.resolve import recognised
from cutfuse.epilogue.types import type_of, unknown_types

GLOBAL = 2.0
NAMESPACE = types.SimpleNamespace(scale=2.0)
TABLE = {"scale": 2.0}
OUTSIDE = 2.0

Fn = Callable[..., Any]

HOME: Any = types.ModuleType("home")
HOME.inner = types.ModuleType("inner")
HOME.inner.scale = 2.0


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known before, and nothing is left."""
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", GLOBAL)
    monkeypatch.setattr(HOME.inner, "scale", 2.0)
    native.core.forget_callables()
    yield
    native.core.forget_callables()


def learn(fn: Any) -> int:
    """The number of a callable, 0 where it has none; that it is recognised is checked, and counted."""
    number = fingerprint(fn) or 0
    before = native.core.callable_counts()["hits"]
    assert native.core.recognise(fn) == number
    assert native.core.callable_counts()["hits"] == before + (number > 0)
    return number


def make(scale: Any) -> Fn:
    return lambda z: torch.sigmoid(z) * scale


def set_global(value: object) -> None:
    sys.modules[__name__].GLOBAL = value  # type: ignore[attr-defined]


def helper(z: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
    return z * scale + shift


def recursive(z: torch.Tensor, depth: int = 3) -> torch.Tensor:
    return z if depth == 0 else recursive(z, depth - 1) * GLOBAL


def capture(value: object) -> Fn:
    return lambda z: z * 2 if value else z


class Settings:
    shift = 1.0

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def scaled(self, z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z) * self.scale

    def shifted(self, z: torch.Tensor, gain: float = 2.0) -> torch.Tensor:
        return z * OUTSIDE * gain + self.shift


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.scale


def imports(z: torch.Tensor) -> torch.Tensor:
    import math as numbers

    return z * numbers.pi


def writes_global(z: torch.Tensor) -> torch.Tensor:
    global GLOBAL
    GLOBAL = GLOBAL + 1
    return z * GLOBAL


def counted(z: torch.Tensor) -> torch.Tensor:
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return z * counted.calls  # type: ignore[attr-defined]


class Layer(nn.Module):
    """A module of a user's own, and one whose method is an epilogue."""

    gain = 1.0

    def __init__(self, a: Any) -> None:
        super().__init__()
        self.a = a
        self.act = nn.LeakyReLU(0.5)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.act(z) * self.a * self.gain

    def method(self, z: torch.Tensor) -> torch.Tensor:
        return self.act(z) * self.act.negative_slope + self.a


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


TANH = nn.Tanh()


KNOWN: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda z: z + 2.0 * torch.sigmoid(z),
    "closure": lambda: make(3.0),
    "global": lambda: lambda z: z * GLOBAL,
    "builtins": lambda: lambda z: sum([z * k for k in range(1, 4)], start=z) * len("ab"),
    "attributes of modules": lambda: lambda z: F.silu(z) * math.pi + HOME.inner.scale,
    "an attribute of a number": lambda: lambda z: z * GLOBAL.real,
    "nested": lambda: lambda z: (lambda y: y * GLOBAL)(torch.tanh(z)),
    "helper": lambda: lambda z: helper(z) + 1,
    "defaults": lambda: lambda z, scale=2.0, *, shift=1.0: z * scale + shift,
    "recursive": lambda: recursive,
    "bool, None, str, bytes, int": lambda: (
        lambda z, items=(True, None, "ab", b"ab", 3, 1 << 80): z * len(items) if items[0] else z
    ),
    "dtype": lambda: (lambda dtype: lambda z: z.to(dtype))(torch.float32),
    "types": lambda: lambda z: z * 2 if isinstance(z, torch.Tensor) else float(z),
    "numpy": lambda: make(np.float64(2.0)),
    "nan": lambda: make(math.nan),
    "torch function": lambda: torch.sigmoid,
    "torch function in Python": lambda: F.leaky_relu,
    "method": lambda: torch.Tensor.tanh,
    "module": lambda: nn.SiLU(),
    "module with a number": lambda: nn.LeakyReLU(0.2),
    "modules": lambda: nn.Sequential(nn.Tanh(), nn.Hardtanh(-2, 2), nn.Sequential(nn.Tanh())),
    "captured module": lambda: (lambda module: lambda z: module(z) + 1)(nn.Tanh()),
    "partial": lambda: functools.partial(F.leaky_relu, negative_slope=0.2),
    "partial with arguments": lambda: functools.partial(lambda scale, z, *, shift: z * scale + shift, 2.0, shift=1.0),
    "captured partial": lambda: (lambda f: lambda z: f(z) * 2)(functools.partial(F.leaky_relu, negative_slope=0.2)),
    "Epilogue": lambda: Epilogue(lambda z: z * 2),
    "captured Epilogue": lambda: (lambda e: lambda z: z * (e.operand_count + 2))(Epilogue(lambda z: z * 2)),
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
    assert resolve(fn, 0) is resolve(fn, 0)
    assert native.core.recognise(KNOWN[case]()) == number


def test_modules_where_a_library_adds_a_function_to_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "smart_apply", lambda module, fn: None, raising=False)
    fn = nn.SiLU()
    number = learn(fn)
    assert number > 1
    assert learn(fn) == number


def test_the_identity() -> None:
    assert native.core.recognise(None) == 1
    taught = recognised(None, (), unknown_types(0))
    assert taught is not None
    assert (taught[0], taught[1].text) == (1, "operands=0")


def test_different_callables_have_different_numbers() -> None:
    scales = [2.0, 2, True, None, 0.0, -0.0, math.nan, -math.nan, "a", b"a", (2.0,), ((2.0,),), 1 << 70, -(1 << 70)]
    fns = [capture(scale) for scale in scales]
    numbers = [learn(fn) for fn in fns]
    assert 0 not in numbers
    assert len(set(numbers)) == len(numbers)
    assert [native.core.recognise(fn) for fn in fns] == numbers


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: z * torch.tensor(2.0),
        lambda z: z * torch.initial_seed(),
        make([2.0]),
        make(types.SimpleNamespace(scale=2.0)),
        (lambda pair: lambda z: pair[0](z) if pair[0] is pair[1] else z)((TANH, TANH)),
        nn.Sequential(TANH, TANH),
        lambda z: z * undefined_name,  # type: ignore[name-defined]  # noqa: F821
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
        lambda z: z * NAMESPACE.scale,
        lambda z: z * TABLE["scale"],
        lambda z: z * float(torch.rand(())),
        lambda z: getattr(z, "sigmoid")(),  # noqa: B009
        lambda z: z if NAMESPACE else z * undefined_name,  # type: ignore[name-defined]  # noqa: F821
        lambda z: (print(end=""), z * 2)[1],
        lambda z: (lambda module: z * module.pi)(math),
        Scale(2.0),
        imports,
        writes_global,
        counted,
    ],
)
def test_what_cannot_be_known_has_no_number_and_is_traced_afresh(fn: Fn) -> None:
    with contextlib.suppress(EpilogueError, NameError, AttributeError):  # some are no epilogues
        assert resolve(fn, 0) is not resolve(fn, 0)
    assert recognised(fn, (), unknown_types(0)) is None
    assert native.core.recognise(fn) == 0


def test_what_is_no_callable_is_not_known() -> None:
    for value in (1, 1.5, "a", b"a", (), {}, [], object(), torch.ones(1), int, Ellipsis, sys, HOME):
        assert native.core.recognise(value) == 0


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


def test_nothing_is_asked_of_a_known_callable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another shape finds its trace by the number; what code reads is asked once."""
    fn = KNOWN["global"]()
    number, kept = learn(fn), resolve(fn, 0)
    monkeypatch.setattr(sys.modules["cutfuse.epilogue.fingerprint"], "_FACTS", {})
    assert resolve(fn, 0) is kept
    assert recognised(fn, (), unknown_types(0)) == (number, kept)
    set_global(3.0)
    assert learn(fn) not in (0, number)


def test_a_copy_leaves_what_it_does_not_know() -> None:
    """An object that took a number's place after the key was computed."""
    settings = Settings(2.0)
    with pytest.raises(NoKeyError):
        detach(lambda z: z * (settings, settings.shift)[1])
    assert vars(settings) == {"scale": 2.0}


def test_the_epilogue_is_the_one_of_that_key() -> None:
    x = torch.ones(3)
    fn = make(2.0)
    assert recognised(fn, (), (type_of(x),)) is None  # nothing was traced yet
    for types_ in ((type_of(x),), (type_of(x.double()),), unknown_types(0)):
        kept = resolve(fn, 0, types_)
        taught = recognised(fn, (), types_)
        assert taught is not None
        assert taught[1] is kept
    fn = lambda z, scale: z * scale  # noqa: E731
    kept = resolve(fn, 0, (type_of(x),), (3.0,))
    taught = recognised(fn, (3.0,), (type_of(x),))
    assert taught is not None
    assert taught[1] is kept
    assert recognised(fn, (-3.0,), (type_of(x),)) is None
    epilogue = Epilogue(fn, 1)
    for numbers, wanted in (((3.0,), "operands=0; mul z 3.0"), ((), "operands=1; mul z r0")):
        taught = recognised(epilogue, numbers, (type_of(x),) * (2 - len(numbers)))
        assert taught is not None
        assert taught[1].text == wanted


def test_an_epilogue_made_again() -> None:
    first, second, third = (Epilogue(lambda z: z * 2) for _ in range(3))
    number = learn(first)
    assert native.core.recognise(second) == number
    other = Epilogue(lambda z: z * 4)
    assert native.core.recognise(other) == 0
    assert learn(other) != number
    assert native.core.recognise(third) == number


def test_globals_that_are_computed() -> None:
    class Globals(dict):
        pass

    fn = eval("lambda z: abs(z)", {})
    assert learn(fn)
    other = types.FunctionType(fn.__code__, Globals(__builtins__=fn.__builtins__))
    other.__qualname__ = fn.__qualname__
    assert fingerprint(other) is None
    assert native.core.recognise(other) == 0


def test_names_of_attributes() -> None:
    module: Any = nn.Tanh()
    module.first, module.second = 1.0, 2.0
    number = learn(module)
    del module.first
    assert native.core.recognise(module) == 0
    module.first = 1.0
    assert native.core.recognise(module) == 0  # in another order
    del module.second, module.first
    module.first, module.third = 1.0, 2.0
    assert native.core.recognise(module) == 0
    del module.third
    module.second = 2.0
    assert native.core.recognise(module) == number


def test_modules_inside_of_a_module() -> None:
    chain = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    number = learn(chain)
    chain.append(nn.Tanh())
    assert native.core.recognise(chain) == 0
    del chain._modules["2"]
    assert native.core.recognise(chain) == number
    del chain._modules["1"]
    assert native.core.recognise(chain) == 0
    chain.append(nn.Tanh())
    del chain[1]  # leaves an OrderedDict, whose order is not that of the dict inside of it
    assert learn(chain) == 0


def test_torch_function_modes_are_not_learnt_under() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    fn = make(2.0)
    resolve(fn, 0)
    with Mode():
        assert recognised(fn, (), unknown_types(0)) is None
    assert learn(fn)


def test_code_at_the_address_of_other_code() -> None:
    numbers, addresses, reused = set(), set(), 0
    for k in range(5000):
        fn = eval(f"lambda z: z * {k}.0")
        numbers.add(learn(fn))
        assert len(numbers) == k + 1
        reused += id(fn.__code__) in addresses
        addresses.add(id(fn.__code__))
        del fn
    assert reused > 10


def test_expressions_at_the_address_of_others() -> None:
    numbers, addresses, reused = set(), set(), 0
    for k in range(300):
        epilogue = Epilogue(lambda z, k=k: torch.atan(z) * k)
        assert native.core.recognise(epilogue) == 0
        numbers.add(learn(epilogue))
        assert len(numbers) == k + 1
        reused += id(epilogue.expression) in addresses
        addresses.add(id(epilogue.expression))
        native.core.forget_callables()
        learn(Epilogue(lambda z: z + 1))
    assert reused > 10


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_a_million_fresh_lambdas() -> None:
    recognise = native.core.recognise
    number = learn(make(2.0))
    counts, before = native.core.callable_counts(), resident_bytes()
    for _ in range(1_000_000):
        assert recognise(make(2.0)) == number
    for k in range(100_000):
        assert recognise(make(k)) == 0
    assert native.core.callable_counts() == {**counts, "hits": counts["hits"] + 1_000_000}
    assert resident_bytes() - before < 20e6


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_the_table_is_bounded() -> None:
    """Of fresh values, and of code that is compiled again."""
    makers: list[Callable[[int], Fn]] = [
        lambda k: make(float(k)),
        lambda k: make(f"{k}" * 100),
        lambda k: eval("lambda z: torch.tanh(z) * GLOBAL", {"torch": torch, "GLOBAL": 2.0}),
    ]
    for maker in makers:
        for k in range(4000):
            fingerprint(maker(k))
    before = resident_bytes()
    for maker in makers:
        for k in range(12_000):
            fingerprint(maker(-k))
            if k % 100 == 0:
                assert native.core.callable_counts()["keys"] <= 4096
    assert resident_bytes() - before < 40e6
    assert learn(make(2.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, which is what is tested
def test_fork() -> None:
    fn = make(2.0)
    number = learn(fn)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            native.core.recognise(fn)
            fingerprint(fn)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                found = fingerprint(fn)
                native.core.forget_callables()
                os._exit(0 if found == number and native.core.recognise(fn) == 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_forgetting() -> None:
    """No number is given twice."""
    fn = make(2.0)
    number = learn(fn)
    native.core.forget_callables()
    assert native.core.callable_counts()["keys"] == 0
    assert native.core.recognise(fn) == 0
    assert learn(fn) > number


def same(p: Any, q: Any) -> Fn:
    return lambda z: z * 2.0 if p is q else z * 3.0


def text_of(fn: Fn) -> str:
    """Of what a call of it runs, now and the next time."""
    text = resolve(fn, 0).text
    assert resolve(fn, 0).text == text
    return text


TWICE, THRICE = "operands=0; mul z 2.0", "operands=0; mul z 3.0"


@pytest.mark.parametrize(
    "value",
    [
        lambda: functools.partial(torch.relu),
        lambda: lambda z: z,
        lambda: (float("2.5"),),
        lambda: float("2.5"),
        lambda: np.float64(2.5),
        lambda: int("1000"),
        lambda: 1 << int("80"),
        lambda: "a b".join("cd"),
        lambda: b"a b".join([b"c", b"d"]),
        lambda: Epilogue(lambda z: z * 2),
    ],
)
def test_one_object_twice_is_not_two_equal_ones(value: Callable[[], Any]) -> None:
    """Neither by its number nor in what is traced."""
    one, two = value(), (value(), value())
    for _ in range(2):
        assert text_of(same(one, one)) == TWICE
        assert text_of(same(*two)) == THRICE
        assert text_of(same(one, two[0])) == THRICE
    numbers = [learn(same(one, one)), learn(same(two[0], two[0])), learn(same(*two))]
    assert numbers[2] == 0 or numbers[2] not in numbers[:2]
    if isinstance(one, functools.partial):
        assert numbers[0] == numbers[1] > 0


def test_numbers_as_operands_are_not_told_apart_by_a_number() -> None:
    def fn(z: Any, a: float, b: float) -> Any:
        return z * 2.0 if a is b else z * 3.0

    one, other = float("2.5"), float("2.5")
    types_ = (type_of(torch.ones(3)),)
    for numbers, text in (((one, one), TWICE), ((one, other), THRICE)):
        assert resolve(fn, 0, types_, numbers).text == text
    assert fingerprint(fn) is None


def test_nans_as_operands_are_not_told_apart_by_a_number() -> None:
    def fn(z: Any, a: float, b: float) -> Any:
        return z * 2.0 if a in (b,) else z * 3.0

    one, other = float("nan"), float("nan")
    types_ = (type_of(torch.ones(3)),)
    for numbers, text in (((one, one), TWICE), ((one, other), THRICE)):
        assert resolve(fn, 0, types_, numbers).text == text
        assert recognised(fn, numbers, types_) is None


def test_a_constant_of_code_is_one_object() -> None:
    def get() -> float:
        return 2.5

    def compare(p: Any) -> Fn:
        return lambda z: z * 2.0 if get() is p else z * 3.0

    assert text_of(compare(get())) == TWICE
    assert text_of(compare(float("2.5"))) == THRICE


@pytest.mark.parametrize("make_number", [lambda: float("nan"), lambda: np.float64("nan")])
def test_a_nan_equals_itself_alone(make_number: Callable[[], Any]) -> None:
    def contains(p: Any, q: Any) -> Fn:
        return lambda z: z * 2.0 if (p,) == q else z * 3.0

    one, other = make_number(), make_number()
    for _ in range(2):
        assert text_of(contains(one, (one,))) == TWICE
        assert text_of(contains(one, (other,))) == THRICE
    assert learn(contains(one, (one,))) == learn(contains(other, (other,))) > 0


@pytest.mark.parametrize(
    "source",
    [
        "lambda z, act: z * SCALE if act is None else act(z)",
        "lambda z, act: act(z) if act is not None and SCALE is not False else z",
        "lambda z, act: z * SCALE if act is torch.relu else act(z)",
        "lambda z, act: z * SCALE if act is not ACT else act(z)",
        "lambda z, act: z * SCALE if z.dtype is torch.float32 else act(z)",
    ],
)
def test_what_is_compared_with_a_function_or_none_has_a_number(source: str) -> None:
    fn = eval(source, {"torch": torch, "SCALE": 2.5, "ACT": F.silu})
    numbers = [learn(functools.partial(fn, act=act)) for act in (None, torch.relu, F.silu, nn.Tanh())]
    assert 0 not in numbers
    assert len(set(numbers)) == len(numbers)


def test_code_with_a_set_in_another_order() -> None:
    sources = ["lambda z: z * [k for k in {8, 0}][0]", "lambda z: z * [k for k in {0, 8}][0]"]
    first, second = map(eval, sources)
    for fn in (first, second):
        factor = float(fn(1))
        assert text_of(fn) == f"operands=0; mul z {factor}"


def test_code_whose_functions_have_another_name() -> None:
    """Which is a part of what they are formatted as."""

    def define(name: str) -> Fn:
        scope: dict[str, Any] = {}
        inner = "def inner(): pass"
        exec(f"def {name}():\n def fn(z):\n  {inner}\n  return z * len(f'{{inner}}'.split('.<')[0])\n return fn", scope)
        fn: Fn = scope[name]()
        fn.__qualname__ = "fn"
        return fn

    assert text_of(define("short")) != text_of(define("longer"))


@pytest.mark.parametrize("constant", [[2.0], torch.tensor(2.0), types.SimpleNamespace(scale=2.0), (np.array(2.0),)])
def test_code_with_a_constant_that_changes(constant: Any) -> None:
    fn = eval("lambda z: z * 'constant'")
    constants = tuple(constant if item == "constant" else item for item in fn.__code__.co_consts)
    fn.__code__ = fn.__code__.replace(co_consts=constants)
    assert fingerprint(fn) is None
    assert native.core.recognise(fn) == 0


def test_attributes_of_an_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(epilogue: Any, name: str) -> Fn:
        fn: Fn = eval(f"lambda z: z * {name}", {"epilogue": epilogue, "len": len})
        return fn

    first = second = Epilogue(lambda z: z * 2)
    while len(second.name) == len(first.name):
        second = Epilogue(lambda z: z * 2)
    assert text_of(read(first, "len(epilogue.name)")) != text_of(read(second, "len(epilogue.name)"))
    texts = set()
    for value in (2.0, 3.0):
        monkeypatch.setattr(Epilogue, "gain", value, raising=False)
        texts.add(text_of(read(first, "epilogue.gain")))
    assert texts == {TWICE, THRICE}


def doubled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.forward(*args, **kwargs) * 2.0


def other_child(self: Any, name: str) -> Any:
    return self.__dict__["_modules"]["other"]


def first_alone(self: Any) -> Iterator[Any]:
    return iter([self[0]])


@pytest.mark.parametrize(
    ("function", "other", "of"),
    [
        (nn.Module._call_impl, doubled_call, nn.Tanh),
        (nn.Module._call_impl, doubled_call, lambda: Layer(2.0).method),
        (nn.Module.__getattr__, other_child, lambda: Layer(2.0).forward),
        (nn.Sequential.__iter__, first_alone, lambda: nn.Sequential(nn.Tanh(), nn.LeakyReLU(0.5))),
    ],
)
def test_a_function_of_modules_whose_code_is_replaced(function: Any, other: Any, of: Callable[[], Any]) -> None:
    fn = of()
    getattr(fn, "__self__", fn).register_module("other", nn.Sigmoid())
    before = text_of(fn)
    assert learn(fn)
    code = function.__code__
    try:
        function.__code__ = other.__code__
        assert native.core.recognise(fn) == 0
        assert resolve(fn, 0).text != before
    finally:
        function.__code__ = code
    assert learn(fn)
    assert text_of(fn) == before


def test_an_attribute_of_a_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = (lambda function: lambda z: z * (lambda value: value.real)(function))(F.leaky_relu)
    texts = set()
    for value in (2.0, 3.0):
        monkeypatch.setattr(F.leaky_relu, "real", value, raising=False)
        texts.add(text_of(fn))
    assert texts == {TWICE, THRICE}


def test_builtins_of_a_function_that_a_callable_makes() -> None:
    """It takes those that the globals have by then, and not its maker's."""
    namespace: dict[str, Any] = {"__builtins__": {"abs": lambda v: v * 2.0}}
    fn = eval("lambda z: (lambda y: abs(y))(z)", namespace)
    assert text_of(fn) == TWICE
    namespace["__builtins__"] = {"abs": lambda v: v * 3.0}
    assert text_of(fn) == THRICE


def test_what_is_read_is_held_while_code_of_a_key_runs() -> None:
    """Of a key that is like a str: a look-up in its dict calls its `__eq__`."""
    alive: list[bool] = []
    namespace: dict[str, Any] = {}

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if namespace.pop("module", None) is not None:
                alive.append(target() is not None)
            return False

    fn = eval("lambda z: z * module.scale", namespace)
    for look_up in (fingerprint, native.core.recognise):
        module: Any = types.ModuleType("module")
        vars(module)[Key("scale")] = 1.0
        target = weakref.ref(module)
        module.scale = 2.5
        namespace["module"] = module
        del module
        look_up(fn)
    assert alive == [True, True]


@pytest.mark.parametrize("name", ["relu", "__mul__"])
def test_a_method_of_tensors_that_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(z: Any) -> Any:
        return z.relu() * 2.0

    before, number = resolve(fn, 0).text, learn(fn)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, name, lambda self, *others: torch.tanh(self))
        assert resolve(fn, 0).text != before
        assert learn(fn) != number
    assert resolve(fn, 0).text == before
