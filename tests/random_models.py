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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTHS = (4, 4, 6, 5, 1)
NUMBERS = ("2", "0.5", "-1", "1", "True", "3")
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
class Writer:
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


@dataclass(frozen=True)
class Line:
    """A kind of statement. writes: whether it changes what was there before."""

    add: Callable[[Writer], object]
    writes: bool = False


# Where bf16 is rounded differently these differ by more than a rounding.
_JUMPS = (
    *("sign(", " > 0", "> {r}", "threshold", ".bool()", "int64", "amax", "amin", ".max(", ".min(", "min({v}, -1"),
)
_ROUNDS = ("BF16", "autocast")


def _fits(made: Writer, template: str) -> bool:
    """Whether a program has statements like this one: of those that jump and those that round it has one kind."""
    return not any(word in template for word in (_JUMPS if made.is_rounded else _ROUNDS))


def _choose(made: Writer, templates: tuple[str, ...]) -> str:
    return made.choose.choice([template for template in templates if _fits(made, template)])


def _value(made: Writer, expression: str) -> bool:
    name = made.name("v")
    return made.line(f"{name} = {expression}", name)


# Products

_PRODUCTS = (
    "F.linear({x}, {w})",
    "F.linear({x}, {w}, {b})",
    "F.linear({x}, {w}, bias={b})",
    "{x} @ {w}.t()",
    "torch.matmul({x}, {t})",
    "{x}.matmul({t})",
    "torch.mm({x}, {t})",
    "{x} @ {t} + {b}",
    "torch.addmm({b}, {x}, {t})",
    "torch.addmm({b}, {x}, {t}, beta=0.5, alpha=2)",
    "torch.addmm({a}, {x}, {t}, beta={beta})",
    "torch.addmm({a}, {x}, {t}, alpha=0.5)",
    "{a}.addmm({x}, {t}, beta={beta}, alpha=-1)",
    "torch.addmm({c}, {x}, {t}, beta=0.5)",
    "{m}({x})",
    "{m}({x})",
)
_MATRICES = ("addmm", "mm(")


def _add_product(made: Writer) -> None:
    template = made.choose.choice(_PRODUCTS)
    is_matrix = any(name in template for name in _MATRICES)
    x = made.recent(lambda v: v.is_floating_point() and (v.dim() == 2 if is_matrix else v.dim() >= 2))
    if x is None:
        return
    rows, k, n = made.live[x].shape[0], made.live[x].shape[-1], made.choose.choice(WIDTHS)
    dtype = _type_of(made, x)
    shapes = {"w": (n, k), "b": (n,), "t": (k, n), "a": (rows, n), "c": (rows, 1)}
    given = {"x": x, "beta": made.choose.choice(("0", "-2", "0.5", "1"))}
    given |= {name: made.input(shape, dtype) for name, shape in shapes.items() if "{" + name + "}" in template}
    if "{m}" in template:
        given["m"] = made.module("nn.Linear", k, n)
    _value(made, template.format(**given))


def _add_product_of_values(made: Writer) -> None:
    x, other = made.recent(lambda v: v.is_floating_point() and v.dim() >= 2), made.recent(lambda v: v.dim() == 2)
    if x is not None and other is not None:
        _value(made, made.choose.choice(("F.linear({}, {})", "{} @ {}", "{} @ {}.t()")).format(x, other))


def _type_of(made: Writer, name: str) -> str:
    names = {dtype: text for text, dtype in TYPES.items()}
    return names.get(made.live[name].dtype, made.dtype)


# Elementwise

_UNARY = (
    *("torch.tanh({v})", "{v}.sigmoid()", "F.gelu({v})", "F.gelu({v}, approximate='tanh')", "F.silu({v})"),
    *("F.relu({v})", "{v}.relu()", "torch.sin({v})", "F.leaky_relu({v}, 0.1)", "F.hardswish({v})", "F.softplus({v})"),
    *("torch.exp(-{v}.abs())", "{v}.square()", "{v}.clamp(-1, 2)", "torch.clamp({v}, min=-0.5)", "-{v}", "{v} ** 2"),
    *("1 - {v}", "{v} / 3", "2 * {v}", "{v}.rsub(1)", "F.elu({v})", "F.mish({v})", "F.softsign({v})", "{v}.atan()"),
    *("F.dropout({v}, 0.5, False)", "{v}.contiguous()", "F.logsigmoid({v})", "torch.erf({v})", "{v}.clone()"),
    *("torch.rsqrt({v}.abs() + 1)", "torch.where({v} > 0, {v}, 0.5)", "{v} * ({v} > 0)", "({v} > 0.3).float()"),
    *("torch.add({v}, {n})", "{v} + {n}", "{v} * {n}", "{n} - {v}", "F.relu6({v})", "torch.sign({v})", "{v} > 0.25"),
    *("{v} * F.sigmoid({v})", "{v} + {v}", "{v} * torch.tanh(F.softplus({v}))", "F.threshold({v}, 0.1, 0.5)"),
)
_BINARY = (
    *("{v} + {r}", "{r} * {v}", "{r} - {v}", "{v}.sub({r})", "{v} / ({r}.abs() + 1)", "torch.mul({v}, {r})"),
    *("torch.sub({v}, {r}, alpha=2)", "torch.add({r}, {v}, alpha=0.5)", "torch.where({m}, {v}, {r})"),
    *("torch.where({m}, 0.5, {v})", "{v}.masked_fill({m}, -1.0)", "torch.addcmul({v}, {r}, {s}, value=0.5)"),
    *("torch.addcmul({r}, {v}, {s})", "torch.lerp({v}, {r}, 0.3)", "torch.maximum({v}, {r})", "{v} * {m}"),
    *("{v} * {i}", "{v} + {r} * {s}", "F.gelu({v}) * {r} + {s}", "({v} > {r}) * {v}", "{v}.type_as({r})"),
    *("{v} + {r}.detach()", "torch.sigmoid({v}) * {r} + {v}", "torch.where({v} > {r}, {v}, {s})", "{v} * {o} + {r}"),
    *("{v}.masked_fill({m}, 0)", "{v}.to({r})", "torch.min({v}, {r})", "{v} + torch.relu({r})"),
)
_IN_PLACE = (
    *("{v} += {r}", "{v} += 1", "{v}.mul_(2)", "{v} *= {r}", "{v} -= {v}.mean()", "{v} /= 2"),
    *("{v}.add_({r}, alpha=2)", "F.relu({v}, inplace=True)", "torch.relu_({v})", "F.relu({v}, True)"),
    *("F.leaky_relu_({v}, 0.1)", "{v}.tanh_()", "{v}.clamp_(-1, 1)", "{v}.masked_fill_({m}, 0.3)", "{v}.neg_()"),
    *("F.elu_({v}, 0.7)", "F.silu({v}, inplace=True)", "{v}.copy_({r})", "{v}.zero_()", "{v}.sub_({r})"),
    *("{v}[0] = 0.5", "{v}[..., :2] *= 2", "{v}.view(-1).mul_(2)", "{v}[:] = {r}", "{v}.view(-1)[0] = 2"),
    *("{v}.transpose(0, -1).add_(1)", "{v}.t().mul_(2)", "{v}.chunk(2)[0].neg_()", "torch.add({r}, 1, out={v})"),
    *("{v}.squeeze(0).add_(1)", "{v}.addcmul_({r}, {s})", "{v}.detach().mul_(2)", "F.hardtanh({v}, -1, 1, True)"),
    *("F.dropout({v}, 0.5, False, True)", "{v}.lerp_({r}, 0.3)"),
)


def _operand(made: Writer, v: str, dtype: str | None = None) -> str:
    """A value of the model's that broadcasts into another one, or a new input."""
    target = made.live[v].shape
    if dtype is None and made.choose.random() < 0.35:
        found = made.recent(lambda value: value.is_floating_point() and _broadcasts(value.shape, target))
        if found is not None and found != v:
            return found
    shapes = [tuple(target), tuple(target[-1:]), (*target[:-1], 1)[-max(len(target), 1) :], (), (1,)]
    shapes += [(1, *target[1:])] if len(target) > 1 else []
    shapes += [tuple(target[1:])] if len(target) > 2 else []
    shape = made.choose.choice(shapes if made.choose.random() < 0.5 else shapes[:2])
    return made.input(shape if len(target) else (), dtype or made.choose.choice((made.dtype,) * 5 + ("F32", "F64")))


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def _filled(made: Writer, template: str, v: str) -> str:
    types = {"r": None, "s": None, "m": "bool", "i": "int64", "o": "F64"}
    given = {name: _operand(made, v, dtype) for name, dtype in types.items() if "{" + name + "}" in template}
    return template.format(v=v, n=made.choose.choice(NUMBERS), **given)


def _add_elementwise(made: Writer) -> None:
    v = made.recent()
    if v is not None:
        _value(made, _filled(made, _choose(made, made.choose.choice((_UNARY, _BINARY))), v))


def _add_chain(made: Writer) -> None:
    for _ in range(made.choose.randint(2, 3)):
        _add_elementwise(made)


def _add_in_place(made: Writer) -> None:
    """Of a recent value, bound to a name of its own or not; at times of the very inputs."""
    v = made.recent()
    if v is not None:
        _write(made, v)


def _write(made: Writer, v: str) -> None:
    text = _filled(made, _choose(made, _IN_PLACE), v)
    is_call = " = " not in text and "= " not in text.replace("inplace=", "").replace("alpha=", "").replace("out=", "")
    if is_call and made.choose.random() < 0.5:
        _value(made, text)
    else:
        made.line(text)


# Views, casts and what is a cast or a view at times

_VIEWS = (
    *("{v}.view(-1, {n})", "{v}.reshape({rows}, {n})", "{v}.flatten(0, -2)", "{v}.flatten(0, 1)"),
    *("{v}.unflatten(0, ({h}, -1))", "{v}.view({h}, -1, {n})", "{v}.squeeze(0)", "{v}.squeeze()", "{v}.unsqueeze(0)"),
    *("{v}.unsqueeze(1)", "{v}.unsqueeze(-2)", "{v}.transpose(0, 1)", "{v}.transpose(-1, -2)", "{v}.t()"),
    *("{v}.permute(1, 0)", "{v}.permute(1, 0, 2)", "{v}.squeeze(-1)", "{v}.chunk(2, -1)[0]", "{v}.chunk(2, 0)[1]"),
    *("{v}.expand(2, *{v}.shape)", "{v}[..., :2]", "{v}[0]", "{v}.view({v}.shape)", "{v}.reshape(-1)"),
    *("{v}.view(*{v}.shape[:-1], 1, {n})", "{v}.unsqueeze(-1)", "{v}.flatten(1)", "{v}.mT"),
    *("torch.flatten({v}, 0, -2)", "torch.unsqueeze({v}, 1)", "torch.reshape({v}, (-1, {n}))"),
    *("{v}.view(1, -1, {n})",),
)
_CASTS = (
    *("{v}.float()", "{v}.to(F32)", "{v}.to(BF16)", "{v}.to(F64)", "{v}.to(F64).to(F32)", "{v}.to(dtype=BF16)"),
    *("{v}.type(F32)", "{v}.detach()", "{v}.detach()", "{v}.to(BF16).to(F32)", "{v}.bool()", "{v}.to(torch.int64)"),
)
_REDUCTIONS = (
    *("{v}.sum(-1)", "{v}.sum(-1, keepdim=True)", "{v}.mean(-1)", "{v}.mean(dim=-1, keepdim=True)", "{v}.amax(-1)"),
    *("torch.amin({v}, -1, keepdim=True)", "torch.logsumexp({v}, -1)", "{v}.logsumexp(-1, keepdim=True)"),
    *("{v}.sum(0)", "{v}.max(-1).values", "{v}.max(dim=-1, keepdim=True)[0]", "torch.min({v}, -1)[0]", "{v}.sum()"),
    *("{v}.mean(0)", "{v}.sum(-1, dtype=F32)", "{v}.sum((-1,))", "{v}.sum(-1, keepdims=True)"),
    *("{v}.sum({v}.dim() - 1)", "{v}.amax()", "F.softmax({v}, -1)", "F.layer_norm({v}, ({n},))", "{v}.cumsum(-1)"),
    *("{v}.norm(dim=-1)",),
)
_DROPOUTS = ("F.dropout({v}, 0.5, True)", "F.dropout({v}, 0.3)", "{d}({v})", "F.dropout({v}, 0.5, True, True)")


def _add_of(templates: tuple[str, ...]) -> Callable[[Writer], None]:
    def add(made: Writer) -> None:
        v = made.recent()
        if v is None or not made.live[v].dim():
            return
        shape = made.live[v].shape
        rows = made.live[v].numel() // max(shape[-1], 1)
        given = {"v": v, "n": shape[-1], "rows": rows, "h": 2 if rows % 2 == 0 else 1}
        template = _choose(made, templates)
        if "{d}" in template:
            given["d"] = made.module("nn.Dropout")
        _value(made, template.format(**given))

    return add


def _add_dropout(made: Writer) -> None:
    if made.dtype != "BF16":  # another type would draw other random numbers
        _add_of(_DROPOUTS)(made)


def _add_norm(made: Writer) -> None:
    v = made.recent(lambda value: value.is_floating_point() and value.dim() in (2, 3))
    if v is None:
        return
    value = made.live[v]
    if made.choose.random() < 0.5:
        _value(made, f"{made.module('nn.BatchNorm1d', value.shape[1])}({v})")
        return
    rows = [made.input((value.shape[1],), _type_of(made, v), grad=0.3 * (k > 1)) for k in range(4)]
    mean, variance, weight, bias = rows
    made.live[variance].data.abs_()
    training = made.choose.random() < 0.3
    call = f"F.batch_norm({v}, {mean}, {variance}.detach().abs() + 0.1, {weight}, bias={bias}, training={training})"
    _value(made, call if made.choose.random() < 0.5 else f"F.batch_norm({v}, {mean}, {variance} ** 2 + 0.1, eps=0.01)")


def _add_layer(made: Writer) -> None:
    """A product and what follows it: mostly what a region takes, and something that ends one in between."""
    before = set(made.live)
    choice = made.choose.random()
    if choice < 0.2 and not made.is_pure:
        opening = _choose(made, _MODES)
        made.block(opening, eval(opening, made.live), 1, LAYER_PRODUCT)
    else:
        _add_product(made)
    made.is_focused = True
    steps = made.choose.choices(list(_STEPS), list(_STEPS.values()), k=made.choose.randint(2, 5))
    for step in steps:
        if step is _WRITE and not made.is_pure:
            _add_write_to(made, [name for name in (*made.values, *made.names) if name not in before])
        elif not (made.is_pure and step.writes):
            step.add(made)
    if made.choose.random() < 0.35:
        _add_of(_REDUCTIONS)(made)
    made.is_focused = False


def _add_write_to(made: Writer, names: list[str]) -> None:
    """Of what a layer has read, or of an input of the model."""
    names = [name for name in (*names, made.choose.choice(made.names)) if _is_writable(made.live[name])]
    if names:
        _write(made, made.choose.choice(names))


def _is_writable(value: Any) -> bool:
    try:
        return isinstance(value, Tensor) and value.is_floating_point() and not (value.is_leaf and value.requires_grad)
    except RuntimeError:  # a view that was made without gradients, of what has been written with them
        return False


def _add_reuse(made: Writer) -> None:
    """The latest value with an earlier one: what a region may not take in."""
    v = made.values[-1]
    earlier = [name for name in made.values[-6:-1] if made.live[name].shape == made.live[v].shape]
    if earlier:
        template = _choose(
            made, ("{v} + {e}", "{e} * {v}", "torch.sub({e}, {v}, alpha=2)", "torch.where({v} > 0, {e}, {v})")
        )
        _value(made, template.format(v=v, e=made.choose.choice(earlier)))


def _add_mode(made: Writer) -> None:
    opening = _choose(made, _MODES)
    made.block(opening, eval(opening, made.live), made.choose.randint(1, 3))


_MODES = ("torch.no_grad()", "torch.enable_grad()", "autocast()", "autocast()")
LAYER_PRODUCT = Line(_add_product)
LAYER = Line(_add_layer)
_WRITE = Line(_add_write_to, writes=True)
_STEPS = {
    Line(_add_elementwise): 8,
    Line(_add_of(_VIEWS)): 3,
    Line(_add_reuse): 1.5,
    Line(_add_in_place, writes=True): 1.5,
    _WRITE: 3,
    Line(_add_of(_CASTS)): 0.8,
    Line(_add_mode, writes=True): 0.7,
}
LINES: dict[Line, float] = {
    LAYER: 7,
    Line(_add_product_of_values): 0.5,
    Line(_add_elementwise): 2,
    Line(_add_chain): 2,
    Line(_add_in_place, writes=True): 0.5,
    Line(_add_of(_VIEWS)): 1,
    Line(_add_of(_CASTS)): 1,
    Line(_add_of(_REDUCTIONS)): 1.5,
    Line(_add_dropout, writes=True): 0.7,
    Line(_add_norm, writes=True): 0.7,
    Line(_add_mode, writes=True): 1,
    Line(lambda made: made.checkpoint(made.choose.randint(2, 4)), writes=True): 0.5,
}


# Programs


def make_program(seed: int, longest: int = 5) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    dtype = choose.choice(("F32", "F32", "F64", "BF16"))
    writer = Writer(choose, dtype, is_rounded=dtype == "BF16" or choose.random() < 0.25)
    writer.values.append(writer.input((*choose.choice(_LEADING), choose.choice(WIDTHS))))
    torch.manual_seed(0)
    LAYER.add(writer)
    writer.steps(choose.randint(1, longest))
    inputs, names, body = map(tuple, (writer.inputs, writer.names, writer.body))
    return Program(seed, inputs, names, body, _results(writer), writer.is_rounded, choose.random() < 0.1)


def _results(writer: Writer) -> tuple[str, ...]:
    """The last value, and perhaps others."""
    *others, last = writer.values
    more = writer.choose.sample(others, min(len(others), writer.choose.choice((0, 0, 1, 2))))
    return (*more, last)
