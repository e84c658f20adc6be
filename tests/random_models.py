"""Random small models as Python source: products, what follows them, writes, modes, views and reductions.

A program is made line by line. Each line runs at once on real tensors, and one that PyTorch refuses is dropped, so that
every program runs. The text is what a fault is reported by: `namespace` makes the inputs and the function of it again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from random_model_lines import LAYER, LINES, WIDTHS, Line, Maker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}
_LEADING = ((4,), (6,), (2, 3), (2, 2), (1, 4), (1,), (2, 1, 3))
_LARGEST = 100.0  # beyond it rounding decides too much


@dataclass(frozen=True)
class Program:
    """A model's source. inputs: the statements that make its tensors and modules."""

    seed: int
    inputs: tuple[str, ...]
    names: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]
    is_rounded: bool  # whether some of it is in bf16
    is_dynamic: bool

    @property
    def source(self) -> str:
        lines = [f"def model({', '.join(self.names)}):", *self.body, f"    return ({', '.join(self.results)},)"]
        return "\n".join((*self.inputs, *lines))


def namespace(is_reference: bool = False, noise: float = 0.0) -> dict[str, Any]:
    """What a program's source reads.

    In a reference every floating-point type is fp64, and autocast does nothing. noise: by how much, relatively, the
    inputs are wrong, so as to see how far an error goes.
    """
    errors = torch.Generator().manual_seed(int(noise * 2**40))
    types = dict.fromkeys(TYPES, torch.float64) if is_reference else dict(TYPES)

    def tensor(seed: int, shape: tuple[int, ...], dtype: str, needs_grad: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if dtype in TYPES:
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(TYPES[dtype])
            return noisy(values.to(types[dtype])).requires_grad_(needs_grad)
        return torch.randint(0 if dtype == "bool" else -2, 2, shape, generator=generator).to(getattr(torch, dtype))

    def module(seed: int, kind: Callable[..., nn.Module], dtype: str, train: bool, *sizes: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = kind(*sizes).to(TYPES[dtype]).to(types[dtype]).train(train)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(noisy(parameter))
        return made

    def noisy(values: Tensor) -> Tensor:
        wrong = torch.randn(values.shape, generator=errors, dtype=torch.float64)
        return (values * (1 + noise * wrong)).to(values.dtype) if noise else values

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=not is_reference)

    known = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "autocast": autocast}
    return {**known, **types, "tensor": tensor, "module": module}


@dataclass
class _Writer(Maker):
    """Makes a program. live: its names and their values so far."""

    choose: random.Random
    dtype: str
    is_rounded: bool
    live: dict[str, Any] = field(default_factory=namespace)
    inputs: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)  # the tensors that later lines may read, oldest first
    count: int = 0
    indent: int = 1
    is_pure: bool = False  # in the body of a checkpoint, which runs twice
    is_focused: bool = False  # whether lines read the latest value

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def input(self, shape: tuple[int, ...], dtype: str | None = None, grad: float = 0.4) -> str:
        name, dtype = self.name("r"), dtype or self.dtype
        needs_grad = dtype in TYPES and self.choose.random() < grad
        self._make(name, f"tensor({self.choose.getrandbits(20)}, {tuple(shape)}, {dtype!r}, {needs_grad})")
        self.names.append(name)
        return name

    def module(self, kind: str, *sizes: int) -> str:
        name, train = self.name("m"), self.choose.random() < 0.4
        sizes_text = "".join(f", {size}" for size in sizes)
        self._make(name, f"module({self.choose.getrandbits(20)}, {kind}, {self.dtype!r}, {train}{sizes_text})")
        return name

    def _make(self, name: str, expression: str) -> None:
        self.inputs.append(f"{name} = {expression}")
        exec(self.inputs[-1], self.live)

    def recent(self, wanted: Callable[[Tensor], bool] = lambda value: value.is_floating_point()) -> str | None:
        """The name of a value, rather a late one than an early one."""
        names = [name for name in reversed(self.values) if wanted(self.live[name])]
        if not names:
            return None
        return names[0 if self.is_focused else min(int(self.choose.expovariate(1.6)), len(names) - 1)]

    def line(self, text: str, result: str = "") -> bool:
        """Adds a statement if PyTorch takes it, and its result if that is a tensor of reasonable numbers."""
        before = dict(self.live)
        try:
            exec(text, self.live)
        except Exception:
            self.live = before
            return False
        if result and not _is_tame(self.live[result]):
            self.live = before
            return False
        self.body.append("    " * self.indent + text)
        if result:
            self.values.append(result)
        return True

    def block(
        self, opening: str, context: contextlib.AbstractContextManager[Any], steps: int, line: Line | None = None
    ) -> None:
        """A `with` statement around some lines, or around one."""
        start = len(self.body)
        self.body.append("    " * self.indent + f"with {opening}:")
        self.indent += 1
        with context:
            self.steps(steps) if line is None else line.add(self)
        self.indent -= 1
        if len(self.body) == start + 1:
            self.body.pop()

    def checkpoint(self, steps: int) -> None:
        """A checkpoint around some lines, of which one or two values go on."""
        start, first, name = len(self.body), len(self.values), self.name("body")
        self.indent, self.is_pure = self.indent + 1, True
        self.steps(steps)
        self.indent, self.is_pure = self.indent - 1, False
        made = self.values[first:]
        if not made:
            del self.body[start:]
            return
        kept = [made[-1], *([made[0]] if len(made) > 2 and self.choose.random() < 0.3 else [])]
        pad = "    " * self.indent
        self.body.insert(start, f"{pad}def {name}():")
        self.body.append(f"{pad}    return ({', '.join(kept)},)")
        self.body.append(f"{pad}{', '.join(kept)}, = checkpoint({name}, use_reentrant=False)")
        self.values[first:] = kept

    def steps(self, count: int) -> None:
        for _ in range(count):
            usable = {line: weight for line, weight in LINES.items() if not (self.is_pure and line.writes)}
            (line,) = self.choose.choices(list(usable), list(usable.values()))
            line.add(self)


def _is_tame(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_complex():
        return False
    value = value.detach().double()
    return bool(value.isfinite().all()) and (value.numel() == 0 or value.abs().max().item() < _LARGEST)


def make_program(seed: int, longest: int = 5) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    dtype = choose.choice(("F32", "F32", "F64", "BF16"))
    writer = _Writer(choose, dtype, is_rounded=dtype == "BF16" or choose.random() < 0.25)
    writer.values.append(writer.input((*choose.choice(_LEADING), choose.choice(WIDTHS))))
    torch.manual_seed(0)
    LAYER.add(writer)
    writer.steps(choose.randint(1, longest))
    inputs, names, body = map(tuple, (writer.inputs, writer.names, writer.body))
    return Program(seed, inputs, names, body, _results(writer), writer.is_rounded, choose.random() < 0.1)


def _results(writer: _Writer) -> tuple[str, ...]:
    """The last value, and perhaps others."""
    *others, last = writer.values
    more = writer.choose.sample(others, min(len(others), writer.choose.choice((0, 0, 1, 2))))
    return (*more, last)
