"""`resolve` never gives a stale trace, and traces nothing twice that it can know to be the same."""

from __future__ import annotations

import functools
import gc
import math
import sys
import threading
import time
import timeit
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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


def test_a_changed_function_in_a_closure() -> None:
    def outer(shift: float, inner: Callable | None) -> Callable[..., torch.Tensor]:
        return lambda z: (z if inner is None else inner(z)) + shift

    assert text_of(outer(1.0, outer(2.0, None))) == "operands=0; add z 2.0; add prev 1.0"
    assert text_of(outer(1.0, outer(3.0, None))) == "operands=0; add z 3.0; add prev 1.0"


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


def test_prebuilt_and_none() -> None:
    epilogue = Epilogue(lambda z, r: z * r)
    assert resolve(epilogue, 1) is epilogue
    with pytest.raises(EpilogueError, match="takes 1 operand, and is given 2"):
        resolve(epilogue, 2)
    assert resolve(None).text == "operands=0"
    with pytest.raises(EpilogueError, match="1 operand, but no epilogue to use them"):
        resolve(None, 1)
    with pytest.raises(EpilogueError, match="an epilogue is a callable"):
        resolve("relu", 0)  # type: ignore[arg-type]


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


def test_numbers_make_no_function_where_the_trace_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(z: torch.Tensor, scale: float) -> torch.Tensor:
        return z * scale

    found = resolve_with(fn, 2.0)
    monkeypatch.setattr(sys.modules["cutfuse.epilogue.resolve"], "bind", None)
    assert resolve_with(fn, 2.0) is found
    fn.__code__ = (lambda z, scale: z + scale).__code__
    monkeypatch.undo()
    assert resolve_with(fn, 2.0).text == "operands=0; add z 2.0"


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


def test_threads() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        def make(scale: float) -> Callable[..., torch.Tensor]:
            return lambda z: torch.sigmoid(z * scale) + z * scale

        try:
            for k in range(300):
                scale = float((k * seed) % 97)
                assert text_of(make(scale)) == f"operands=0; mul z {scale} -> s0; sigmoid prev; add prev s0"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_hit_is_fast() -> None:
    """About 2 us on the machine this was written on, without this file's checks; the bound is for a slow one."""

    def hit() -> None:
        cutfuse.epilogue.resolve(lambda z: z + 2.0 * torch.sigmoid(z), 0)

    seconds = min(timeit.repeat(hit, timer=time.thread_time, number=200, repeat=20)) / 200
    assert seconds < 50e-6
