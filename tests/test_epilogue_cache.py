"""What is traced is kept by a key: of values of one moment, of bounded size, that can be met again."""

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
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, resolve
from cutfuse.epilogue.types import UNKNOWN, type_of

pytestmark = pytest.mark.usefixtures("recognition")

GLOBAL = 2.0
SETTINGS = SimpleNamespace(scale=2.0)
TABLE = {"scale": 2.0}


def text_of(fn: Callable[..., object]) -> str:
    return resolve(fn, 0).text  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _restore_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", GLOBAL)


def test_the_same_code_is_traced_once() -> None:
    def make(scale: float) -> Callable[..., torch.Tensor]:
        return lambda z: torch.sigmoid(z) * scale

    assert resolve(make(2.0), 0) is resolve(make(2.0), 0)
    assert resolve(make(2.0), 0) is not resolve(make(3.0), 0)
    assert text_of(make(3.0)) == "operands=0; sigmoid z; mul prev 3.0"


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


@pytest.mark.parametrize(
    "fn",
    [
        lambda z: z * SETTINGS.scale,
        lambda z: z * TABLE["scale"],
        lambda z: z * torch.tensor(2.0),
        lambda z: z * torch.initial_seed(),
        lambda z: z * float(torch.rand(())),
        lambda z: getattr(z, "sigmoid")(),  # noqa: B009
        lambda z: z if SETTINGS else z * undefined_name,  # type: ignore[name-defined]  # noqa: F821
        lambda z: (print(end=""), z * 2)[1],
        lambda z: (lambda module: z * module.pi)(math),
        Scale(2.0),
        imports,
        writes_global,
        counted,
    ],
)
def test_what_cannot_be_known_is_traced_afresh(fn: Callable[..., torch.Tensor]) -> None:
    assert resolve(fn, 0) is not resolve(fn, 0)


def test_a_variable_that_the_function_itself_changes() -> None:
    count = 0

    def fn(z: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return z * count

    assert [text_of(fn), text_of(fn)] == ["operands=0; mul z 1.0", "operands=0; mul z 2.0"]


def test_operand_counts_are_told_apart() -> None:
    def fn(z: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return sum(operands, start=z)  # type: ignore[arg-type]

    assert resolve(fn, 0).text == "operands=0"
    assert resolve(fn, 2).text == "operands=2; add z r0; add prev r1"


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
    assert [resolve_with(fn, number) for number in NUMBERS] == found
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


X = torch.tensor([0.5, -1.5, 2.0])


@pytest.fixture
def during_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Runs functions when the code of a function starts and ends, as another thread might at that time."""
    monkeypatch.setattr(sys.modules[__name__], "GLOBAL", GLOBAL)

    def install(code: types.CodeType, start: Callable[[], object], end: Callable[[], object]) -> None:
        def profile(frame: types.FrameType, event: str, _: object) -> None:
            if frame.f_code is code and event in ("call", "return"):
                (start if event == "call" else end)()

        sys.setprofile(profile)

    before = sys.getprofile()
    yield install
    sys.setprofile(before)


def set_global(value: object) -> None:
    sys.modules[__name__].GLOBAL = value  # type: ignore[attr-defined]


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


def test_signs_of_nan() -> None:
    def make(scale: float) -> Callable[..., torch.Tensor]:
        return lambda z: z * math.copysign(2.0, scale)

    for scale in (math.nan, -math.nan, 0.0, -0.0):
        torch.testing.assert_close(cutfuse.pointwise(make(scale), X), make(scale)(X))


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


@pytest.mark.parametrize("fn", [torch.Tensor.cumsum, torch.Tensor.sum, [].append, str.upper, math.sin])
def test_builtin_functions_that_are_not_in_the_language(fn: Callable) -> None:
    with pytest.raises(EpilogueError):
        resolve(fn, 0)
