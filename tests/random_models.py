"""Random models as Python source: products, what follows them, writes, modes, views and reductions.

`make_program` makes small ones with everything that a model may do, `make_trained_program` those of any width that are
trained on a device, without writes and changes of type. A program is made line by line. Each line runs at once, on
real tensors or on tensors without memory, and one that PyTorch refuses is dropped, so that every program runs. The text
is what a fault is reported by: `build` makes the inputs and the function of it.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTHS = (4, 4, 6, 5, 1)
NUMBERS = ("2", "0.5", "-1", "1", "True", "3")
TYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}
_LEADING = ((4,), (6,), (2, 3), (2, 2), (1, 4), (1,), (2, 1, 3))
_LARGEST = 100.0  # beyond it rounding decides too much


@dataclass(frozen=True)
class Precision:
    """What a trained model computes in. unit: the relative error of a rounding, of factors where these are rounded."""

    dtype: str
    unit: float
    matmul: str = "highest"
    autocast: torch.dtype | None = None


PRECISIONS = {
    "fp32": Precision("F32", 2.0**-24),
    "tf32": Precision("F32", 2.0**-11, matmul="high"),
    "bf16": Precision("BF16", 2.0**-9),
    "fp16": Precision("F16", 2.0**-12),
    "autocast bf16": Precision("F32", 2.0**-9, autocast=torch.bfloat16),
    "autocast fp16": Precision("F32", 2.0**-12, autocast=torch.float16),
}


@dataclass(frozen=True)
class Program:
    """A model's source. inputs: the statements that make its tensors and modules. precision: of one that is trained."""

    seed: int
    inputs: tuple[str, ...]
    names: tuple[str, ...]
    body: tuple[str, ...]
    results: tuple[str, ...]
    is_rounded: bool  # whether some of it is in bf16
    is_dynamic: bool
    precision: str = ""

    @property
    def source(self) -> str:
        lines = [f"def model({', '.join(self.names)}):", *self.body, f"    return ({', '.join(self.results)},)"]
        return "\n".join((*self.inputs, *lines))


@dataclass
class Built:
    """A program's function, with its tensors and modules."""

    model: Callable[..., Any]
    inputs: list[Tensor]
    modules: list[nn.Module]


def build(program: Program, device: str = "cpu", is_reference: bool = False, noise: float = 0.0) -> Built:
    """Makes a model. The arguments are those of `namespace`."""
    autocast = PRECISIONS[program.precision].autocast if program.precision else torch.bfloat16
    known = namespace(device, is_reference, noise, autocast)
    exec(program.source.replace(".float()", ".double()") if is_reference else program.source, known)
    modules = [value for value in known.values() if isinstance(value, nn.Module)]
    return Built(known["model"], [known[name] for name in program.names], modules)


def namespace(
    device: str = "cpu",
    is_reference: bool = False,
    noise: float = 0.0,
    autocast_dtype: torch.dtype | None = torch.bfloat16,
) -> dict[str, Any]:
    """What a program's source reads.

    In a reference every floating-point type is fp64, and autocast does nothing. noise: by how much, relatively, the
    inputs are wrong, so as to see how far an error goes.
    """
    place = "cpu" if device == "meta" else device
    errors = torch.Generator(place).manual_seed(int(noise * 2**40))
    types = dict.fromkeys(TYPES, torch.float64) if is_reference else dict(TYPES)

    def tensor(
        seed: int, shape: tuple[int, ...], dtype: str, needs_grad: bool = False, scale: float | None = None
    ) -> Tensor:
        if device == "meta":
            values = torch.empty(shape, dtype=types.get(dtype) or getattr(torch, dtype), device=device)
            return values.requires_grad_(needs_grad)
        generator = torch.Generator(place).manual_seed(seed)
        if dtype in TYPES:
            values = torch.randn(shape, generator=generator, dtype=torch.float64, device=place)
            values = (values if scale is None else values * scale).to(TYPES[dtype])
            return noisy(values.to(types[dtype])).requires_grad_(needs_grad)
        found = torch.randint(0 if dtype == "bool" else -2, 2, shape, generator=generator, device=place)
        return found.to(getattr(torch, dtype))

    def module(seed: int, kind: Callable[..., nn.Module], dtype: str, train: bool, *sizes: int) -> nn.Module:
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            made = kind(*sizes).to(TYPES[dtype]).to(types[dtype]).train(train)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(noisy(parameter))
        return made

    def noisy(values: Tensor) -> Tensor:
        if not noise:
            return values
        wrong = torch.randn(values.shape, generator=errors, dtype=torch.float64, device=place)
        return (values * (1 + noise * wrong)).to(values.dtype)

    def autocast() -> torch.autocast:
        enabled = autocast_dtype is not None and not is_reference
        return torch.autocast(place, autocast_dtype, enabled=enabled)

    known = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "autocast": autocast}
    return {**known, **types, "tensor": tensor, "module": module}


@dataclass
class Writer:
    """Makes a program. live: its names and their values so far. width: draws how many columns a layer has."""

    choose: random.Random
    dtype: str
    is_rounded: bool
    lines: dict[Line, float]
    width: Callable[[random.Random], int]
    live: dict[str, Any] = field(default_factory=namespace)
    is_trained: bool = False  # in one precision, without writes and with most gradients
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

    def input(self, shape: tuple[int, ...], dtype: str | None = None, grad: float = 0.4, scale: str = "") -> str:
        name, dtype = self.name("r"), dtype or self.dtype
        needs_grad = dtype in TYPES and self.choose.random() < (0.85 if self.is_trained else grad)
        scale = f", {scale}" if scale and self.is_trained else ""
        self._make(name, f"tensor({self.choose.getrandbits(20)}, {tuple(shape)}, {dtype!r}, {needs_grad}{scale})")
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
        is_latest = self.is_focused or (self.is_trained and self.choose.random() < 0.85)
        return names[0 if is_latest else min(int(self.choose.expovariate(1.6)), len(names) - 1)]

    def line(self, text: str, result: str = "") -> bool:
        """Adds a statement if PyTorch takes it, and its result if that is a tensor of reasonable numbers."""
        before = dict(self.live)
        try:
            exec(text, self.live)
        except Exception:
            self.live = before
            return False
        results = result.split(", ") if result else []
        is_fine = _is_matrix if self.is_trained else _is_tame
        if not all(is_fine(self.live[name]) for name in results):
            self.live = before
            return False
        self.body.append("    " * self.indent + text)
        self.values += results
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
            usable = {line: weight for line, weight in self.lines.items() if not (self.is_pure and line.writes)}
            (line,) = self.choose.choices(list(usable), list(usable.values()))
            line.add(self)


def _is_tame(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.is_complex():
        return False
    value = value.detach().double()
    return bool(value.isfinite().all()) and (value.numel() == 0 or value.abs().max().item() < _LARGEST)


def _is_matrix(value: Any) -> bool:
    """Of two to four dimensions, and no wider than two or three layers side by side."""
    return isinstance(value, Tensor) and 2 <= value.dim() <= 4 and value.numel() > 0 and value.shape[-1] <= _WIDEST


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


def _add_product(made: Writer) -> bool:
    template = made.choose.choice(_PRODUCTS)
    is_matrix = any(name in template for name in _MATRICES)
    x = made.recent(lambda v: v.is_floating_point() and (v.dim() == 2 if is_matrix else v.dim() >= 2))
    if x is None:
        return False
    rows, k, n = made.live[x].shape[0], made.live[x].shape[-1], made.width(made.choose)
    dtype = _type_of(made, x)
    shapes = {"w": (n, k), "b": (n,), "t": (k, n), "a": (rows, n), "c": (rows, 1)}
    given = {"x": x, "beta": made.choose.choice(("0", "-2", "0.5", "1"))}
    scales = dict.fromkeys("wt", f"{k} ** -0.5")
    for name, shape in shapes.items():
        if "{" + name + "}" in template:
            given[name] = made.input(shape, dtype, scale=scales.get(name, ""))
    if "{m}" in template:
        given["m"] = made.module("nn.Linear", k, n)
    return _value(made, template.format(**given))


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
    others = () if made.is_trained else ("F32", "F64")
    return made.input(shape if len(target) else (), dtype or made.choose.choice((made.dtype,) * 5 + others))


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


def _filled(made: Writer, template: str, v: str) -> str:
    types = {"r": None, "s": None, "m": "bool", "i": "int64", "o": None if made.is_trained else "F64"}
    given = {name: _operand(made, v, dtype) for name, dtype in types.items() if "{" + name + "}" in template}
    number = made.choose.choice(NUMBERS)
    if made.is_trained:  # of which nothing runs before it is compiled: what PyTorch refuses is no model
        number = number.replace("True", "1.5")
        template = template.replace("torch.lerp({v}, {r}, 0.3)", "torch.lerp({v}, {r}.to({v}), 0.3)")
    return template.format(v=v, n=number, **given)


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


# Of models that are trained: what product passes split the columns of, and put together again

_WIDEST = 6200
_HALVES = (
    *("{z}.chunk(2, dim=-1)", "torch.chunk({z}, 2, -1)", "{z}.split({n}, dim=-1)", "torch.split({z}, [{n}, {n}], -1)"),
    *("({z}[..., :{n}], {z}[..., {n}:])", "{z}.unflatten(-1, (2, {n})).unbind(-2)", "{z}.tensor_split(2, -1)"),
    *("{z}.view(*{z}.shape[:-1], {n}, 2).unbind(-1)", "{z}.reshape(*{z}.shape[:-1], 2, {n}).unbind(-2)"),
)
_GATES = (
    *("F.silu({a}) * {b}", "F.gelu({a}) * {b}", "{a} * torch.sigmoid({b})", "F.relu({a}) * {b}", "{a} * {b}"),
    *("torch.tanh({a}) * torch.sigmoid({b})", "{a} + F.silu({b})", "F.gelu({b}, approximate='tanh') * {a}"),
    *("F.silu({a}) * {b} * 0.5 + {a}", "torch.cat((F.silu({a}), {b}), -1)", "torch.cat(({b}, {a}), dim=-1)"),
)
_THIRDS = ("{z}.chunk(3, dim=-1)", "{z}.split({n}, -1)", "{z}.unflatten(-1, (3, {n})).unbind(-2)")
_COMBINED = ("{q} * torch.sigmoid({k}) + {v}", "F.silu({q}) * {k} + torch.tanh({v})", "{q} * {k} - {v}")
_JOINED = ("torch.cat(({}, {}), -1)", "torch.cat([{}, {}], dim=-1)", "torch.stack(({}, {}), -2)")
_HEADS = (
    *("{v}.mean(-1)", "{v}.sum(-1)", "{v}.mean(1)", "{v}.sum(-1, keepdim=True)", "torch.logsumexp({v}, -1)"),
    *("{v}.logsumexp(-1, keepdim=True)", "{v}.float()", "{v}.mean()", "{v}.square().mean(-1)", "F.softmax({v}, -1)"),
    "F.cross_entropy({v}.reshape({rows}, -1).float(), torch.arange({rows}, device={v}.device) % {n}, reduction='sum')",
)


def _add_activated(made: Writer) -> None:
    while not _add_product(made):
        pass
    if made.choose.random() < 0.7:
        made.is_focused = True
        _add_elementwise(made)
        made.is_focused = False


def _added_layer(made: Writer, x: str, n: int) -> str | None:
    """A module's layer, of new columns."""
    _value(made, f"{made.module('nn.Linear', made.live[x].shape[-1], n)}({x})")
    return made.values[-1]


def _parts(made: Writer, templates: tuple[str, ...], count: int, **given: Any) -> list[str]:
    """Several values at once, of the first of the shuffled templates that PyTorch takes; none if it takes none."""
    for template in made.choose.sample(templates, len(templates)):
        names = [made.name("v") for _ in range(count)]
        if made.line(f"{', '.join(names)} = {template.format(**given)}", ", ".join(names)):
            return names
    return []


def _add_gate(made: Writer) -> None:
    x, n = made.recent(), made.width(made.choose)
    parts = _parts(made, _HALVES, 2, z=_added_layer(made, x, 2 * n), n=n)
    if parts and _parts(made, _GATES, 1, a=parts[0], b=parts[1]) and made.choose.random() < 0.6:
        down = _added_layer(made, made.values[-1], made.live[x].shape[-1])
        if made.choose.random() < 0.6:
            _value(made, f"{x} + {down}")


def _add_thirds(made: Writer) -> None:
    """Queries, keys and values, or what is combined of three."""
    x, heads, width = made.recent(), made.choose.choice((1, 2, 3, 4)), made.choose.choice((8, 13, 24, 32, 64, 100))
    z = _added_layer(made, x, 3 * heads * width)
    parts = _parts(made, _THIRDS, 3, z=z, n=heads * width)
    if not parts:
        return
    if made.live[z].dim() != 3 or made.live[z].shape[1] > 256 or made.choose.random() < 0.5:
        _parts(made, _COMBINED, 1, q=parts[0], k=parts[1], v=parts[2])
        return
    q, k, v = (f"{part}.unflatten(-1, ({heads}, {width})).transpose(1, 2)" for part in parts)
    _value(made, f"({q} @ {k}.transpose(-1, -2) * {width} ** -0.5).softmax(-1) @ {v}")
    _value(made, f"{made.values[-1]}.transpose(1, 2).flatten(-2)")
    _added_layer(made, made.values[-1], made.live[x].shape[-1])


def _add_cat(made: Writer) -> None:
    """Of a layer, and another one of the same rows or what both are of."""
    x = made.recent()
    first = _added_layer(made, x, made.width(made.choose))
    second = x if made.choose.random() < 0.3 else _added_layer(made, x, made.width(made.choose))
    pair = made.choose.sample((first, second), 2)
    _parts(made, tuple(form.format(*pair) for form in _JOINED), 1)


def _add_tied(made: Writer) -> None:
    """A product with a weight that there is already."""
    x = made.recent()
    k = made.live[x].shape[-1]
    weights = [w for w in made.names if made.live[w].dim() == 2 and made.live[w].is_floating_point()]
    again = [f"F.linear({x}, {w})" for w in weights if made.live[w].shape[1] == k]
    again += [f"{x} @ {w}" for w in weights if made.live[w].shape[0] == k]
    if again:
        _value(made, made.choose.choice(again))


def _add_normed(made: Writer) -> None:
    x = made.recent()
    if made.live[x].shape[-1] >= 16:
        kind = made.choose.choice(("nn.LayerNorm", "nn.LayerNorm", "nn.RMSNorm"))
        _value(made, f"{made.module(kind, made.live[x].shape[-1])}({x})")


_TRAINED_LINES: dict[Line, float] = {
    Line(_add_activated): 6,
    Line(_add_gate): 5,
    Line(_add_thirds): 2,
    Line(_add_cat): 3,
    Line(_add_tied): 1.5,
    Line(_add_normed): 3,
    Line(_add_elementwise): 6,
    Line(_add_reuse): 3,
    Line(_add_of(_VIEWS)): 4,
    Line(lambda made: made.checkpoint(made.choose.randint(1, 2)), writes=True): 2,
}


# Programs


def make_program(seed: int, longest: int = 5) -> Program:
    """The program of a seed."""
    choose = random.Random(seed)
    dtype = choose.choice(("F32", "F32", "F64", "BF16"))
    is_rounded = dtype == "BF16" or choose.random() < 0.25
    writer = Writer(choose, dtype, is_rounded, LINES, lambda choose: choose.choice(WIDTHS))
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


@dataclass(frozen=True)
class Sizes:
    """Of how many rows the inputs are, and how wide layers."""

    rows: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]  # ranges

    def width(self, choose: random.Random) -> int:
        n = choose.randint(*choose.choice(self.widths))
        multiple = choose.choice((128, 32, 32, 8, 8, 1, 1, 0))
        if multiple == 0:  # beside one
            return max(n - n % 32, 32) + choose.choice((-1, 1, 2))
        return max(n - n % multiple, multiple)


# Inductor pads rows of more than 1024 elements that are no multiple of 128 bytes: a third of the layers is so wide.
DEVICE_SIZES = Sizes((1, 7, 64, 197, 512, 788, 1000, 1576, 2048), ((16, 700), (16, 700), (1000, 3000)))
CPU_SIZES = Sizes((1, 3, 8, 12, 26), ((16, 100), (16, 100), (1000, 1400)))


def make_trained_program(seed: int, sizes: Sizes = DEVICE_SIZES) -> Program:
    """The program of a seed that is trained: of one precision, a function of its first input."""
    choose = random.Random(seed)
    (precision,) = choose.choices(list(PRECISIONS), (6, 4, 4, 3, 2, 2))
    dtype, live = PRECISIONS[precision].dtype, namespace("meta", autocast_dtype=None)
    writer = Writer(choose, dtype, True, _TRAINED_LINES, sizes.width, live, is_trained=True)
    rows, count = choose.choice(sizes.rows), choose.choice((1, 1, 2, 2, 2, 3))
    outer, middle = (choose.choice((1, 2, 3, 4, 8)), choose.choice((1, 2, 7, 14))) if count > 1 else (1, 1)
    leading = (outer, middle)[: count - 1]
    inner = max(rows // (outer * middle if count == 3 else outer), 1)
    writer.values.append(writer.input((*leading, inner, sizes.width(choose))))
    if count > 1 and choose.random() < 0.15:  # as it lies behind a convolution, or a batch that is not the first
        _value(writer, f"{writer.names[0]}.transpose(0, 1).contiguous().transpose(0, 1)")
    _add_activated(writer)
    writer.steps(choose.randint(1, 4))
    results = _results(writer)
    if choose.random() < 0.5:
        v = results[-1]
        n = writer.live[v].shape[-1]
        head = choose.choice(_HEADS).format(v=v, n=n, rows=writer.live[v].numel() // n)
        results = (*results[:-1], head)
    body = writer.body
    if PRECISIONS[precision].autocast:
        body = ["    with autocast():", *(f"    {line}" for line in body)]
    read = set(re.findall(r"\b[rm]\d+\b", "\n".join((*body, *results))))
    inputs = tuple(line for line in writer.inputs if line.partition(" ")[0] in {*read, writer.names[0]})
    names = tuple(name for name in writer.names if name in {*read, writer.names[0]})
    return Program(seed, inputs, names, tuple(body), results, True, False, precision)
