"""Whatever a trace can read may change between two calls: the second gives what PyTorch gives."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, resolve
from cutfuse.epilogue.reads import class_token
from cutfuse.epilogue.types import type_of

pytestmark = pytest.mark.usefixtures("recognition")

X = torch.tensor([0.5, -1.5, 2.0])
GLOBAL = 2.0

Change = Callable[[], object]


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


class Scale:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z * self.scale

    def method(self, z: torch.Tensor) -> torch.Tensor:
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


def test_what_the_function_itself_is_called_with_and_runs() -> None:
    def fn(z: torch.Tensor, scale: float = 2.0, *, shift: float = 1.0) -> torch.Tensor:
        return z * scale + shift

    check(
        fn,
        lambda: setattr(fn, "__defaults__", (3.0,)),
        lambda: setattr(fn, "__kwdefaults__", {"shift": 4.0}),
        lambda: setattr(fn, "__code__", (lambda z, scale=None, *, shift=None: z - scale - shift).__code__),
    )
    assert resolve(fn, 1).text == "operands=1; sub z r0; sub prev 4.0"


def test_attributes_of_objects() -> None:
    item = Scale(2.0)
    for fn in (item, item.method, lambda z: z * item.scale):
        item.scale = 2.0
        check(fn, lambda: setattr(item, "scale", 3.0))


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


def test_what_a_captured_function_is_called_with_and_runs() -> None:
    helper = make_helper()
    check(
        lambda z: helper(z),
        lambda: setattr(helper, "__defaults__", (3.0,)),
        lambda: setattr(helper, "__kwdefaults__", {"shift": 4.0}),
        lambda: helper.__kwdefaults__.update(shift=5.0),
        lambda: setattr(helper, "__code__", (lambda z, scale=1, *, shift=1: z - scale * shift).__code__),
    )
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


def test_the_name_that_a_function_reads_of_itself() -> None:
    def fn(z: torch.Tensor) -> torch.Tensor:
        return z * len(fn.__name__)

    check(fn, lambda: setattr(fn, "__name__", "longer"))


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
    assert class_token(nn.LeakyReLU) is None


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
def test_the_default_dtype_changes_while_it_is_traced() -> None:
    """As another thread may at any time."""

    def fn(z: torch.Tensor) -> torch.Tensor:
        return (z > 1) * 2.0

    def profile(frame: types.FrameType, event: str, _: object) -> None:
        if frame.f_code is fn.__code__ and event == "call":
            torch.set_default_dtype(torch.float64)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        resolve(fn, 0, (type_of(X),))
    finally:
        sys.setprofile(before)
        torch.set_default_dtype(torch.float32)
    assert resolve(fn, 0, (type_of(X),)).dtype is torch.float32


def test_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    builtins = {"abs": abs}
    fn = eval("lambda z: abs(z)", {"__builtins__": builtins})
    check(fn, lambda: builtins.update(abs=lambda z: z * 3), lambda: fn.__globals__.update(abs=lambda z: z * 5))
    monkeypatch.setattr(math, "pi", math.pi)
    check(lambda z: z * math.pi, lambda: monkeypatch.setattr(math, "pi", 3.0))


def test_globals_that_are_computed() -> None:
    class Globals(dict):
        def __getitem__(self, name: str) -> object:
            return GLOBAL if name == "scale" else super().__getitem__(name)

    check(eval("lambda z: z * scale", Globals(scale=0.0)), lambda: set_global(3.0))


def test_modules_that_compute_their_attributes() -> None:
    class Settings(types.ModuleType):
        scale = property(lambda self: GLOBAL)

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
    )


def test_kinds_of_code() -> None:
    def fn(z: torch.Tensor) -> torch.Tensor:
        match GLOBAL:
            case float(real=scale):
                total = sum((z * GLOBAL for _ in range(2)), start=z)
            case _:
                total, scale = z, (kept := GLOBAL) + kept
        try:
            return total * sum([scale * GLOBAL for _ in (1,)])
        finally:
            total = z

    check(fn, lambda: set_global(3.0), lambda: set_global(3), lambda: set_global(0.5))


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
