"""The native module gives a number for callables that it has met, and only while what they read is the same.

What it keeps of them is bounded, freed, and safe after a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import math
import os
import resource
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cutfuse import native
from cutfuse.epilogue import Epilogue, EpilogueError, reads, resolve
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


def test_instructions_are_those_of_dis() -> None:
    """Their names, and the names and constants that they take, whatever this Python's bytecode is."""
    takes = {*dis.hasname, *dis.hasconst, *dis.haslocal, *dis.hasfree} - {dis.opmap.get("KW_NAMES")}  # 3.11's dis fails
    codes = [
        value.__code__ for value in (*vars(dis).values(), *vars(F).values()) if isinstance(value, types.FunctionType)
    ]
    for code in codes:  # grows while it is walked
        codes.extend(value for value in code.co_consts if isinstance(value, types.CodeType))
        expected = [item for item in dis.get_instructions(code) if item.opname != "CACHE"]
        for item, found in zip(expected, reads._instructions(code), strict=True):
            assert found.opname == item.opname
            assert item.opcode not in takes or repr(found.argval) == repr(item.argval)
    assert len(codes) > 100


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


@pytest.mark.parametrize("value", [lambda: (float("2.5"),), lambda: functools.partial(torch.relu)])
def test_one_object_twice_is_not_two_equal_ones(value: Callable[[], Any]) -> None:
    """Neither by its number nor in what is traced."""

    def scaled(p: Any, q: Any) -> Fn:
        return lambda z: z * 2.0 if p is q else z * 3.0

    one, two = value(), (value(), value())
    for _ in range(2):
        for fn, factor in ((scaled(one, one), 2.0), (scaled(*two), 3.0), (scaled(one, two[0]), 3.0)):
            assert resolve(fn, 0).text == f"operands=0; mul z {factor}"
    assert learn(scaled(one, one)) == learn(scaled(two[0], two[0])) != learn(scaled(*two))


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
