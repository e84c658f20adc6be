"""What is traced is kept by a key: of values of one moment, of bounded size, that can be met again.

Whatever a trace can read may change between two calls: the second gives what PyTorch gives.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
import timeit
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, resolve
from cutfuse.epilogue.reads import is_of_torch
from cutfuse.epilogue.types import UNKNOWN, type_of

GLOBAL = 2.0
X = torch.tensor([0.5, -1.5, 2.0])

Change = Callable[[], object]


def text_of(fn: Callable[..., object]) -> str:
    return resolve(fn, 0).text  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _restore_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", GLOBAL)


def set_global(value: object) -> None:
    sys.modules[__name__].GLOBAL = value  # type: ignore[attr-defined]


def check(fn: Callable[..., torch.Tensor], *changes: Change) -> None:
    """fn's values before and after each change, against PyTorch's; each change has to be one that shows."""
    wanted = fn(X)
    torch.testing.assert_close(cutfuse.pointwise(fn, X), wanted)
    for change in changes:
        change()
        before, wanted = wanted, fn(X)
        assert not torch.equal(before, wanted)
        torch.testing.assert_close(cutfuse.pointwise(fn, X), wanted)


def test_a_variable_that_the_function_itself_changes() -> None:
    count = 0

    def fn(z: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return z * count

    assert [text_of(fn), text_of(fn)] == ["operands=0; mul z 1.0", "operands=0; mul z 2.0"]


NUMBERS: list[float] = [2.0, 2, 0.0, -0.0, 1.0, 1, True, math.inf, math.nan, 1 << 60, np.float64(2.0)]


def resolve_with(fn: Callable[..., object], *numbers: float | None) -> Epilogue:
    return resolve(fn, numbers.count(None), (type_of(torch.ones(3)), *[UNKNOWN] * numbers.count(None)), numbers)


def test_operands_that_are_numbers() -> None:
    """By their types and bits; traced with them in place, and once."""

    def fn(z: torch.Tensor, *scales: float) -> torch.Tensor:
        return sum(
            (z * scale if isinstance(scale, float) else torch.where(z > 0, z, scale) for scale in scales), start=z
        )

    found = [resolve_with(fn, number) for number in NUMBERS]
    again = [resolve_with(fn, number) for number in NUMBERS]
    # A NaN is traced in every call.
    assert [one is two for one, two in zip(found, again, strict=True)] == [number == number for number in NUMBERS]
    assert len({epilogue.name for epilogue in found}) == len(NUMBERS)
    assert [epilogue.text for epilogue in found] == [resolve_with(functools.partial(fn), k).text for k in NUMBERS]
    assert [epilogue.text for epilogue in found] == [resolve_with(lambda z, k=k: fn(z, k)).text for k in NUMBERS]
    assert resolve_with(fn, 2.0, None) is not resolve_with(fn, None, 2.0)
    assert resolve_with(fn, 2.0, None) is not resolve_with(fn, 2.0)
    assert resolve_with(fn, None) is not resolve_with(fn)


def test_numbers_that_no_key_holds() -> None:
    for number in (Real(2.0), 1 << 4000):
        results = [resolve_with(lambda z, scale: z if scale else z * 2, number) for _ in range(2)]
        assert results[0] is not results[1]
        assert results[0].text == "operands=0"


class Real(float):
    pass


def test_failed_traces_are_not_kept() -> None:
    with pytest.raises(EpilogueError, match="captures a tensor"):
        text_of(lambda z: z * torch.ones(2))
    for _ in range(2):
        with pytest.raises(EpilogueError, match=r"torch\.flip"):
            text_of(lambda z: torch.flip(z, [0]))


def test_caches_are_bounded() -> None:
    codes, epilogues = [], []
    for k in range(2100):
        fn = eval(f"lambda z: z * {k}.0")
        epilogue = resolve(fn, 0)
        assert epilogue.program.instructions[0].arguments[1] == k
        codes.append(weakref.ref(fn.__code__))
        epilogues.append(weakref.ref(epilogue))
    del fn, epilogue
    gc.collect()
    for references in (codes, epilogues):
        assert sum(reference() is not None for reference in references) <= 1024


def test_a_hit_is_fast() -> None:
    """About 2 us on the machine this was written on, without this file's checks; the bound is for a slow one."""

    def hit() -> None:
        cutfuse.epilogue.resolve(lambda z: z + 2.0 * torch.sigmoid(z), 0)

    seconds = min(timeit.repeat(hit, timer=time.thread_time, number=200, repeat=20)) / 200
    assert seconds < 50e-6


@pytest.fixture
def during_calls() -> Iterator[Callable]:
    """Runs functions when the code of a function starts and ends, as another thread might at that time."""

    def install(code: types.CodeType, start: Callable[[], object], end: Callable[[], object]) -> None:
        def profile(frame: types.FrameType, event: str, _: object) -> None:
            if frame.f_code is code and event in ("call", "return"):
                (start if event == "call" else end)()

        sys.setprofile(profile)

    before = sys.getprofile()
    yield install
    sys.setprofile(before)


class Layer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.scale

    def scaled(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.child.scale


@pytest.mark.parametrize("end", [2.0, 3.0], ids=["changed back", "changed"])
@pytest.mark.parametrize(
    "way", ["global", "helper", "closure", "module", "tuple", "partial", "object", "method", "nn.Module"]
)
def test_what_changes_while_it_is_traced(during_calls: Callable, way: str, end: float) -> None:
    settings = types.ModuleType("settings")
    settings.inner = types.ModuleType("inner")  # type: ignore[attr-defined]
    settings.inner.scale = 2.0

    layer = Layer(2.0)
    layer.child = Layer(2.0)
    rectifier, scale = nn.LeakyReLU(2.0), 2.0

    def set_scale(value: float) -> None:
        nonlocal scale
        set_global(value)
        settings.inner.scale = layer.scale = layer.child.scale = rectifier.negative_slope = scale = value

    def helper(z: torch.Tensor) -> torch.Tensor:
        return z * GLOBAL

    functions = (helper, 1.0)
    fn, traced = {
        "global": (helper, helper),
        "helper": ((lambda z: helper(z) + 1), helper),
        "closure": ((of_closure := lambda z: z * scale), of_closure),
        "module": ((read := lambda z: z * settings.inner.scale), read),
        "tuple": ((lambda z: functions[0](z) * functions[1]), helper),
        "partial": (functools.partial(helper), helper),
        "object": ((of_object := lambda z: z * layer.child.scale), of_object),
        "method": (layer.scaled, Layer.scaled),
        "nn.Module": (nn.Sequential(nn.Identity(), rectifier), nn.LeakyReLU.forward),
    }[way]
    during_calls(traced.__code__, lambda: set_scale(3.0), lambda: set_scale(end))
    cutfuse.pointwise(fn, X)
    sys.setprofile(None)
    for scale in (2.0, 3.0):
        set_scale(scale)
        torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))


def test_a_class_that_changes_while_it_is_traced(during_calls: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Identity(), nn.Tanh())
    with monkeypatch.context() as patch:
        patched = functools.partial(patch.setattr, nn.Tanh, "forward", lambda self, z: z * 5)
        during_calls(nn.Identity.forward.__code__, patched, lambda: None)
        torch.testing.assert_close(cutfuse.pointwise(module, X), X * 5)
        sys.setprofile(None)
    torch.testing.assert_close(cutfuse.pointwise(module, X), torch.tanh(X))


LARGE: dict[str, Callable[[], object]] = {
    "str": lambda: "x" * 100_000,
    "bytes": lambda: bytes(100_000),
    "tuple": lambda: ("x" * 100,) * 100_000,
    "int": lambda: 1 << 100_000,
    "tuples": lambda: functools.reduce(lambda item, _: (item, item), range(30), ()),
}
CAPTURES: dict[str, Callable] = {
    "closure": lambda large: lambda z: z * 2 if large else z,
    "helper": lambda large: (lambda helper: lambda z: helper(z) + 1)(lambda z: z * 2 if large else z),
    "default": lambda large: lambda z, item=large: z * 2 if item else z,
    "keyword default": lambda large: lambda z, *, item=large: z * 2 if item else z,
    "tuple": lambda large: (lambda pair: lambda z: z * 2 if pair else z)((1.0, (large, 2.0))),
    "global": lambda large: eval("lambda z: z * 2 if large else z", {"large": large}),
    "module": lambda large: eval("lambda z: z * 2 if home.large else z", {"home": make_module(large)}),
    "partial argument": lambda large: functools.partial(lambda item, z: z * 2 if item else z, large),
    "partial keyword": lambda large: functools.partial(lambda z, item: z * 2 if item else z, item=large),
    "module attribute": lambda large: with_attribute(nn.Tanh(), large),
    "object": lambda large: (lambda item: lambda z: z * 2 if item.large else z)(Holder(large)),
    "method": lambda large: Holder(large).doubled,
    "globals that nothing reads": lambda large: eval("(lambda scale: lambda z: z * scale)(2.0)", {"large": large}),
    "Epilogue": lambda large: Epilogue(lambda z: z * (2 if large is not None else 3)),
    "changed closure": lambda large: closing_over(large),
    "changed module": lambda large: with_attribute(called(nn.Tanh()), large),
}


class Holder:
    def __init__(self, large: object) -> None:
        self.large = large

    def doubled(self, z: torch.Tensor) -> torch.Tensor:
        return z * 2 if self.large else z


def make_module(large: object) -> types.ModuleType:
    module = types.ModuleType("home")
    module.large = large  # type: ignore[attr-defined]
    return module


def with_attribute(module: nn.Module, large: object) -> nn.Module:
    module.large = large  # type: ignore[assignment]
    return module


def called(fn: Any) -> Any:
    cutfuse.pointwise(fn, X)
    return fn


def closing_over(large: object) -> Callable[..., torch.Tensor]:
    """A large object from the second call on."""
    item: object = 2.0

    def fn(z: torch.Tensor) -> torch.Tensor:
        return z * 2 if item else z

    called(fn)
    item = large
    return fn


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", LARGE)
def test_nothing_large_stays(kind: str, capture: str) -> None:
    large = LARGE[kind]()
    watched = large[0] if isinstance(large, tuple) else large
    before = sys.getrefcount(watched)
    fn = CAPTURES[capture](large)
    torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))
    del fn
    gc.collect()
    assert sys.getrefcount(watched) == before


def test_no_large_code_stays() -> None:
    for body in (
        f"z * len({'x' * 100_000!r})",
        f"z * {tuple(range(10_000))}[len('ab')]",
        f"z * 2 if z is {'x' * 100_000} else z",
    ):
        fn = eval(f"lambda z: {body}", {"x" * 100_000: None})
        torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))
        code = weakref.ref(fn.__code__)
        del fn
        gc.collect()
        assert code() is None


def make_nan() -> float:
    return float("nan")


@pytest.mark.parametrize(
    "make",
    [
        lambda: (lambda scale: lambda z: z * scale)(make_nan()),
        lambda: (lambda scales: lambda z: z * scales[1])((1.0, make_nan())),
        lambda: (lambda nan: lambda z, scale=nan: z * scale)(make_nan()),
        lambda: (lambda scale: lambda z: z * scale)(np.float64(make_nan())),
        lambda: functools.partial(F.leaky_relu, negative_slope=make_nan()),
        lambda: nn.Sequential(nn.LeakyReLU(make_nan())),
        lambda: eval("lambda z: (lambda y: y * 2.0)(z)"),
        lambda: eval("lambda z: z * (1e999 - 1e999)"),
        lambda: (lambda other: lambda z: z * (other.operand_count + 2))(Epilogue(lambda z: z + 1)),
    ],
    ids=["closure", "tuple", "default", "numpy", "partial", "module", "code", "constant", "epilogue"],
)
def test_what_is_made_for_every_call_evicts_nothing(make: Callable[[], Callable]) -> None:
    useful = [(lambda scale: lambda z: torch.tanh(z) * scale)(float(k)) for k in range(400)]
    kept = [resolve(fn, 0) for fn in useful]
    for _ in range(1100):
        resolve(make(), 0)
    assert all(resolve(fn, 0) is epilogue for fn, epilogue in zip(useful, kept, strict=True))


def test_functions_that_share_helpers() -> None:
    def both(first: Callable, second: Callable) -> Callable[..., torch.Tensor]:
        return lambda z: first(z) if second is not None else z

    fn = both(torch.tanh, torch.sigmoid)
    for _ in range(24):
        fn = both(fn, fn)
    start = time.perf_counter()
    assert resolve(fn, 0).text == "operands=0; tanh z"
    assert time.perf_counter() - start < 5
    assert resolve(fn, 0) is resolve(fn, 0)


def test_long_chains_of_functions() -> None:
    def link(following: object) -> Callable[..., torch.Tensor]:
        return lambda z: z * 2 if following is not None else z

    for length in (20, 200, 2000, 20_000):
        fn = None
        for _ in range(length):
            fn = link(fn)
        assert resolve(link(fn), 0).text == "operands=0; mul z 2.0"


def test_deep_tuples() -> None:
    deep: tuple = ()
    for _ in range(20_000):
        deep = (deep,)
    assert resolve(lambda z: z * len(deep), 0).text == "operands=0; mul z 1.0"


# What changes between two calls.


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.scale


def test_globals_and_closures() -> None:
    """Of the function itself, of one that it calls, and of one that is made inside of it."""
    scale = 2.0

    def scaled(z: torch.Tensor) -> torch.Tensor:
        return z * GLOBAL

    def nested(z: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return y * scale + GLOBAL

        return inner(z)

    def set_scale(value: float) -> None:
        nonlocal scale
        scale = value

    for fn in (scaled, nested, lambda z: scaled(z) + 1):
        set_global(2.0)
        check(fn, lambda: set_global(3.0), lambda: set_global(torch.tensor(4.0)))
    for fn in (nested, lambda z: z * scale):
        set_scale(2.0)
        check(fn, lambda: set_scale(3.0))
    set_global(torch.ones(3))
    with pytest.raises(EpilogueError, match="captures a tensor"):
        resolve(scaled, 0)


def test_a_function_in_the_place_of_another() -> None:
    item = Scale(6.0)
    set_global(torch.relu)
    check(
        lambda z: GLOBAL(z),  # type: ignore[operator]
        lambda: set_global(torch.tanh),
        lambda: set_global(lambda z: z * 5),
        lambda: set_global(item),
        lambda: setattr(item, "scale", 7.0),
    )


def test_modules_and_their_hooks() -> None:
    module, handles = nn.LeakyReLU(0.25), []
    chain = nn.Sequential(nn.Tanh(), module)

    def double(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    for fn in (module, chain):
        module.negative_slope = 0.25
        check(
            fn,
            lambda: setattr(module, "negative_slope", 0.5),
            lambda: handles.append(module.register_forward_hook(double)),
            lambda: handles.pop().remove(),
            lambda: handles.append(nn.modules.module.register_module_forward_hook(double)),
            lambda: handles.pop().remove(),
        )
    check(chain, lambda: chain.__setitem__(0, nn.ReLU()))
    dropout = nn.Dropout()
    assert resolve(dropout.eval(), 0).text == "operands=0"
    with pytest.raises(EpilogueError, match="dropout draws"):
        resolve(dropout.train(), 0)


def make_helper() -> Callable[..., torch.Tensor]:
    def helper(z: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
        "ab"
        return z * scale + shift

    return helper


ATTRIBUTES = ["__name__", "__doc__", "__qualname__", "__module__"]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize(
    "source",
    [
        "lambda z: z * len(helper.{})",
        "lambda z: (lambda h: z * len(h.{}))(helper)",
        "lambda z: z * len(package.helper.{})",
        "lambda z, h=helper: z * len(h.{})",
        "lambda z: z * len(pair[0].{})",
        "lambda z: z * len('{{0.{}}}'.format(helper))",
        "lambda z: z * len(template.format(helper))",
        "lambda z: z * len(getattr(helper, '{}'))",
    ],
)
def test_attributes_of_a_captured_function(source: str, attribute: str) -> None:
    helper = make_helper()
    package = types.ModuleType("package")
    package.helper = helper  # type: ignore[attr-defined]
    names = {"helper": helper, "package": package, "pair": (helper, 1.0), "template": f"{{0.{attribute}}}"}
    check(eval(source.format(attribute), names), lambda: setattr(helper, attribute, "a name of 21 letters."))


@pytest.mark.parametrize("source", ["f'{helper}'", "'%s' % helper", "'%s' % (helper,)"])
def test_the_text_of_a_captured_function(source: str) -> None:
    helper = make_helper()
    check(eval(f"lambda z: z * len({source})", {"helper": helper}), lambda: setattr(helper, "__qualname__", "h"))


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_a_function_is_called_with_and_runs(is_captured: bool) -> None:
    helper = make_helper()
    check(
        (lambda z: helper(z)) if is_captured else helper,
        lambda: setattr(helper, "__defaults__", (3.0,)),
        lambda: setattr(helper, "__kwdefaults__", {"shift": 4.0}),
        lambda: helper.__kwdefaults__.update(shift=5.0),
        lambda: setattr(helper, "__code__", (lambda z, scale=1, *, shift=1: z - scale * shift).__code__),
    )
    assert resolve(helper, 1).text == "operands=1; mul r0 5.0; sub z prev"
    check(lambda z: z * helper.__defaults__[0], lambda: setattr(helper, "__defaults__", (4.0,)))
    check(lambda z: z * helper.__kwdefaults__["shift"], lambda: helper.__kwdefaults__.update(shift=6.0))


def test_own_attributes_of_a_captured_function() -> None:
    helper = make_helper()
    helper.real = 3.0  # type: ignore[attr-defined]
    check(lambda z: z * helper.real, lambda: setattr(helper, "real", 4.0))  # type: ignore[attr-defined]
    check(lambda z: (lambda h: z * h.real)(helper), lambda: setattr(helper, "real", 5.0))
    partial = functools.partial(make_helper(), scale=2.0)
    partial.real = 3.0  # type: ignore[attr-defined]
    check(lambda z: (lambda p: z * p.real)(partial), lambda: setattr(partial, "real", 4.0))
    check(lambda z: z * partial.keywords["scale"], lambda: partial.keywords.update(scale=5.0))


def test_functions_that_are_one_or_two() -> None:
    first, second = make_helper(), make_helper()
    same = (first, first)

    def fn(z: torch.Tensor) -> torch.Tensor:
        return z * (2.0 if same[0] is same[1] else 3.0)

    def change() -> None:
        nonlocal same
        same = (first, second)

    check(fn, change)


@pytest.fixture
def tanh_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(nn.Tanh, "forward", nn.Tanh.forward)
    yield monkeypatch
    monkeypatch.undo()
    torch.testing.assert_close(cutfuse.pointwise(nn.Tanh(), X), torch.tanh(X))


@pytest.mark.parametrize("captured", [False, True])
def test_a_patched_class_of_torch_nn(tanh_class: pytest.MonkeyPatch, captured: bool) -> None:
    module = nn.Sequential(nn.Tanh(), nn.Identity())
    check(
        (lambda z: module(z) + 1) if captured else module,
        lambda: tanh_class.setattr(nn.Tanh, "forward", lambda self, z: z * 5),
        lambda: tanh_class.setattr(nn.Tanh, "forward", lambda self, z: z * GLOBAL),
        lambda: set_global(7.0),
        lambda: tanh_class.setattr(nn.Tanh, "__call__", lambda self, z: z * 11),
        lambda: tanh_class.setattr(nn.Sequential, "__iter__", lambda self: iter(())),
    )


def test_an_attribute_of_a_class_of_torch_nn(tanh_class: pytest.MonkeyPatch) -> None:
    module = nn.Tanh()
    tanh_class.setattr(nn.Tanh, "gain", 2.0, raising=False)
    check(lambda z: module(z) * module.gain, lambda: tanh_class.setattr(nn.Tanh, "gain", 3.0))
    check(lambda z: (lambda m: m(z) * m.gain)(module), lambda: tanh_class.setattr(nn.Tanh, "gain", 4.0))
    tanh_class.setattr(nn.Tanh, "forward", lambda self, z: z * self.gain)
    check(module, lambda: tanh_class.setattr(nn.Tanh, "gain", 5.0))


@pytest.mark.parametrize("home", [nn.LeakyReLU, nn.Module])
def test_a_property_of_a_class_of_torch_nn(monkeypatch: pytest.MonkeyPatch, home: type[nn.Module]) -> None:
    slope = property(lambda self: GLOBAL)
    set_global(0.25)
    check(
        nn.LeakyReLU(0.5),
        lambda: monkeypatch.setattr(home, "negative_slope", slope, raising=False),
        lambda: set_global(0.125),
    )


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_patched_module_base(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(
        nn.Tanh(),
        lambda: monkeypatch.setattr(nn.Module, name, lambda self, z: z * GLOBAL),
        lambda: set_global(3.0),
    )


def test_a_function_that_is_added_to_the_base_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "added", lambda self, z: self(z) * GLOBAL, raising=False)
    module = nn.Tanh()
    check(
        lambda z: module.added(z) + 1,
        lambda: set_global(3.0),
        lambda: monkeypatch.setattr(nn.Module, "added", lambda self, z: self(z) * 5),
    )


def test_a_function_of_the_base_by_the_name_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "negative_slope", lambda self: GLOBAL, raising=False)
    module = nn.LeakyReLU(0.5)
    check(module, lambda: setattr(module, "negative_slope", 0.25))
    assert not is_of_torch(nn.LeakyReLU)


def test_the_class_of_a_module() -> None:
    class Scaled(nn.Tanh):
        scale = 2.0

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return z * self.scale

    module = nn.Tanh()
    check(
        module,
        lambda: setattr(module, "__class__", nn.Sigmoid),
        lambda: setattr(module, "__class__", Scaled),
        lambda: setattr(Scaled, "scale", 3.0),
        lambda: setattr(module, "forward", lambda z: z * GLOBAL),
        lambda: set_global(4.0),
    )


def test_patched_functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trace: computing a stale one with PyTorch's operations would call the patched function too."""
    tanh, silu = nn.Tanh(), nn.Sequential(nn.SiLU())
    assert [resolve(fn, 0).text for fn in (tanh, silu)] == ["operands=0; tanh z", "operands=0; silu z"]
    monkeypatch.setattr(torch, "tanh", torch.sigmoid)
    monkeypatch.setattr(F, "silu", lambda input, inplace=False: input * GLOBAL)
    assert [resolve(fn, 0).text for fn in (tanh, silu)] == ["operands=0; sigmoid z", "operands=0; mul z 2.0"]
    set_global(3.0)
    assert resolve(silu, 0).text == resolve(lambda z: F.silu(z), 0).text == "operands=0; mul z 3.0"


def test_functions_of_torch_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    check(lambda z: F.leaky_relu(z), lambda: monkeypatch.setattr(F.leaky_relu, "__defaults__", (0.5, False)))
    code = (lambda input, inplace=False: input * 3).__code__
    check(lambda z: F.hardswish(z), lambda: monkeypatch.setattr(F.hardswish, "__code__", code))
    check(lambda z: z * len(F.selu.__name__), lambda: monkeypatch.setattr(F.selu, "__name__", "s"))


def test_a_torch_function_mode() -> None:
    class Tanh(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return (torch.tanh if func is torch.relu else func)(*args, **(kwargs or {}))

    def fn(z: torch.Tensor) -> torch.Tensor:
        return torch.relu(z) * 3

    with Tanh():
        torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))
    torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))
    kept = resolve(fn, 0)
    with Tanh():
        assert resolve(fn, 0).text == "operands=0; tanh z; mul prev 3.0"
    with torch.device("cpu"):
        assert resolve(fn, 0) is kept


def test_a_torch_dispatch_mode() -> None:
    """What a mode makes of the probes of PyTorch's types is not remembered."""

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result.double() if "expm1" in str(func) else result

    def fn(z: torch.Tensor) -> torch.Tensor:
        return torch.expm1(z) * 3

    with Wide():
        cutfuse.pointwise(fn, X)
    torch.testing.assert_close(cutfuse.pointwise(fn, X), fn(X))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        ("torch.get_default_dtype() == torch.float32", lambda: torch.set_default_dtype(torch.float64)),
        ("torch.finfo().bits == 32", lambda: torch.set_default_dtype(torch.float64)),
        ("torch.is_grad_enabled()", lambda: torch.set_grad_enabled(False)),
        ("torch.is_autocast_enabled('cpu')", lambda: torch.set_autocast_enabled("cpu", True)),
        ("torch.get_num_threads() == 1", lambda: torch.set_num_threads(3 - min(torch.get_num_threads(), 2))),
        ("torch.initial_seed() == 5", lambda: torch.manual_seed(5)),
    ],
)
def test_states_of_torch(read: str, change: Change) -> None:
    threads, seed = torch.get_num_threads(), torch.initial_seed()
    try:
        check(eval(f"lambda z: z * (2.0 if {read} else 3.0)", {"torch": torch}), change)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_num_threads(threads)
        torch.manual_seed(seed)


@pytest.fixture
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def make_masked() -> Callable[..., torch.Tensor]:
    return lambda z, scale=2.0: (z > 0) * scale


MASKED: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "callable": lambda x: (cutfuse.pointwise(make_masked(), x), make_masked()(x)),
    "where": lambda x: (cutfuse.pointwise(where := lambda z: torch.where(z > 0, 1.0, 3.0), x), where(x)),
    "number": lambda x: (cutfuse.pointwise(make_masked(), x, 3.0), make_masked()(x, 3.0)),
    "Epilogue": lambda x: (cutfuse.pointwise(EPILOGUE, x), make_masked()(x)),
    "Epilogue and number": lambda x: (cutfuse.pointwise(SCALED_EPILOGUE, x, 3.0), make_masked()(x, 3.0)),
    "linear": lambda x: (
        cutfuse.linear(x, torch.eye(3, dtype=x.dtype), epilogue=make_masked(), reduce="sum"),
        make_masked()(x).sum(-1),
    ),
    "reduced mask": lambda x: (cutfuse.reduce(x, -1, "logsumexp", prologue=lambda z: z > 0), (x > 0).logsumexp(-1)),
    "finfo": lambda x: (cutfuse.pointwise(named := lambda z: z * len(f"{torch.finfo()}"), x), named(x)),
}
EPILOGUE = Epilogue(make_masked(), 0)
SCALED_EPILOGUE = Epilogue(make_masked(), 1)


@pytest.mark.parametrize("case", MASKED)
@pytest.mark.usefixtures("_default_dtype")
def test_the_default_dtype(case: str) -> None:
    """What PyTorch gives a mask times a number in."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        result, wanted = MASKED[case](X)
        torch.testing.assert_close(result, wanted)  # the types, too


@pytest.mark.usefixtures("_default_dtype")
def test_the_default_dtype_changes_while_it_is_traced(during_calls: Callable) -> None:
    """As another thread may at any time."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        return (z > 1) * 2.0

    during_calls(fn.__code__, lambda: torch.set_default_dtype(torch.float64), lambda: None)
    resolve(fn, 0, (type_of(X),))
    sys.setprofile(None)
    torch.set_default_dtype(torch.float32)
    assert resolve(fn, 0, (type_of(X),)).dtype is torch.float32


def test_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    builtins = {"abs": abs}
    fn = eval("lambda z: abs(z)", {"__builtins__": builtins})
    check(fn, lambda: builtins.update(abs=lambda z: z * 3), lambda: fn.__globals__.update(abs=lambda z: z * 5))
    monkeypatch.setattr(math, "pi", math.pi)
    check(lambda z: z * math.pi, lambda: monkeypatch.setattr(math, "pi", 3.0))


def test_modules_that_compute_their_attributes() -> None:
    class Settings(types.ModuleType):
        scale = property(lambda self: GLOBAL)

    class Package(types.ModuleType):
        settings = property(lambda self: types.SimpleNamespace(scale=GLOBAL))

    package = types.ModuleType("package")
    package.settings = types.ModuleType("settings")  # type: ignore[attr-defined]
    package.settings.scale = 1.0
    fn = eval("lambda z: z * package.settings.scale + package.settings.scale", {"package": package})
    check(
        fn,
        lambda: setattr(package.settings, "scale", 1.5),
        lambda: package.settings.__dict__.update(__getattr__=lambda name: GLOBAL) or delattr(package.settings, "scale"),
        lambda: set_global(3.0),
        lambda: (setattr(package, "settings", Settings("settings")), set_global(4.0)),
        lambda: set_global(5.0),
        lambda: (fn.__globals__.update(package=Package("package")), set_global(6.0)),
        lambda: set_global(7.0),
    )


def test_a_module_in_the_place_of_a_number() -> None:
    home: Any = types.ModuleType("home")
    module: Any = types.ModuleType("module")
    module.imag = 2.0
    home.first, home.second = 2.0, module
    check(
        eval("lambda z: z * (1 + home.first.imag + 3 * home.second.imag)", {"home": home}),
        lambda: (setattr(home, "first", module), setattr(home, "second", 2.0)),
        lambda: setattr(home, "second", module),
        lambda: setattr(home, "first", 2.0),
    )


def test_an_empty_container_in_the_place_of_a_value() -> None:
    module = nn.Tanh()
    module.first, module.second = {}, None  # type: ignore[assignment]
    check(
        lambda z: z * (2 if module.first is None else 3),
        lambda: (setattr(module, "first", None), setattr(module, "second", {})),
        lambda: (setattr(module, "first", {}), setattr(module, "second", None)),
    )


def test_mutual_recursion() -> None:
    def even(z: torch.Tensor, depth: int = 4) -> torch.Tensor:
        return z if depth == 0 else odd(z, depth - 1) * GLOBAL

    def odd(z: torch.Tensor, depth: int) -> torch.Tensor:
        return even(z, depth - 1) + GLOBAL

    check(even, lambda: set_global(3.0))
    assert resolve(even, 0) is resolve(even, 0)
