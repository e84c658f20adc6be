"""Random models that are trained, as Python source: linear layers of any width, and what models have around them.

`make_model(seed)` gives the same model for a seed everywhere. Its lines run at once on tensors without memory, which is
how shapes are known; the text is what a fault is reported by. What `random_models.py` makes is smaller in width and
wilder in form, without a device: writes, modes and types that change.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Precision:
    """What a model computes in. unit: the relative error of one rounding, of factors where these are rounded."""

    dtype: torch.dtype
    unit: float
    matmul: str = "highest"
    autocast: torch.dtype | None = None


PRECISIONS = {
    "fp32": Precision(torch.float32, 2.0**-24),
    "tf32": Precision(torch.float32, 2.0**-11, matmul="high"),
    "bf16": Precision(torch.bfloat16, 2.0**-9),
    "fp16": Precision(torch.float16, 2.0**-12),
    "autocast bf16": Precision(torch.float32, 2.0**-9, autocast=torch.bfloat16),
    "autocast fp16": Precision(torch.float32, 2.0**-12, autocast=torch.float16),
}
_PRECISION_WEIGHTS = (6, 4, 4, 3, 2, 2)


@dataclass(frozen=True)
class Sizes:
    """Of how many rows the inputs are, and how wide layers."""

    rows: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]  # ranges


# Inductor pads rows of more than 1024 elements that are no multiple of 128 bytes: a third of the layers is so wide.
DEVICE_SIZES = Sizes((1, 7, 64, 197, 512, 788, 1000, 1576, 2048), ((16, 700), (16, 700), (1000, 3000)))
CPU_SIZES = Sizes((1, 3, 8, 12, 26), ((16, 100), (16, 100), (1000, 1400)))
_WIDEST = 6200
_MOST_PRODUCTS = 5


@dataclass(frozen=True)
class TrainedModel:
    """A model's source. layout: of x, dimensions in the order of memory."""

    seed: int
    precision: str
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    needs_grad: bool
    modules: tuple[str, ...]
    body: tuple[str, ...]
    has_jumps: bool  # whether a gradient depends on a comparison

    @property
    def source(self) -> str:
        return "\n".join(
            (
                f"# seed {self.seed}, {self.precision}, x {self.shape} in the order {self.layout} of dimensions, "
                f"with{'' if self.needs_grad else 'out'} a gradient",
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.modules),
                "",
                "    def forward(self, x):",
                *(f"        {line}" for line in self.body),
            )
        )


def namespace(device: str = "cpu", autocast: torch.dtype | None = None) -> dict[str, Any]:
    """What a model's source reads. autocast: what `autocast()` casts to; nothing where it is None."""

    def context() -> torch.autocast:
        return torch.autocast(device, autocast, enabled=autocast is not None)

    return {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint, "autocast": context}


class _Writer:
    """Makes a model line by line. live: its names and their values so far; values: those that later lines may read."""

    def __init__(self, choose: random.Random, sizes: Sizes, precision: str) -> None:
        self.choose, self.sizes, self.precision = choose, sizes, precision
        self.modules: list[str] = []
        self.body: list[str] = []
        self.values: list[str] = []
        self.live: dict[str, Any] = {**namespace(), "self": nn.Module()}
        self.indent, self.count, self.products, self.has_jumps = 0, 0, 0, False

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def likely(self, chance: float) -> bool:
        return self.choose.random() < chance

    def module(self, prefix: str, made: str) -> str:
        """A line of __init__; the attribute's name."""
        name = f"self.{self.name(prefix)}"
        self.set_up(f"{name} = {made}")
        return name

    def set_up(self, line: str) -> None:
        with torch.device("meta"):
            exec(line, self.live)
        self.modules.append(line)

    def lines(self, names: int, *templates: str, **given: Any) -> list[str] | None:
        """A line that makes new values, of the first of the shuffled templates that PyTorch takes; None if of none."""
        for template in self.choose.sample(templates, len(templates)):
            made = [f"v{self.count + 1 + k}" for k in range(names)]
            text = f"{', '.join(made)} = {template.format(**given)}"
            known = dict(self.live)
            try:
                exec(text, known)
            except (RuntimeError, IndexError, ValueError, AssertionError):
                continue
            if all(_is_usable(known[name]) for name in made):
                self.live.update({name: known[name] for name in made})
                self.count += names
                self.body.append("    " * self.indent + text)
                self.values += made
                self.has_jumps |= any(word in template for word in _JUMPS)
                return made
        return None

    def value(self, *templates: str, **given: Any) -> str | None:
        made = self.lines(1, *templates, **given)
        return made[0] if made else None

    def shape(self, v: str) -> tuple[int, ...]:
        return tuple(self.live[v].shape)

    def width(self) -> int:
        lowest, highest = self.choose.choice(self.sizes.widths)
        n = self.choose.randint(lowest, highest)
        kind = self.choose.choice((128, 32, 32, 8, 8, 1, 1, 0))
        if kind == 0:  # beside a multiple
            return max(n - n % 32, 32) + self.choose.choice((-1, 1, 2))
        return max(n - n % kind, kind)


def _is_usable(value: Any) -> bool:
    return isinstance(value, Tensor) and 2 <= value.dim() <= 4 and value.numel() > 0 and value.shape[-1] <= _WIDEST


# Layers

_JUMPS = ("relu", "hardswish", "hardtanh", "amax", "maximum")
_ACTIVATIONS = (
    *("F.gelu({v})", "F.gelu({v}, approximate='tanh')", "F.silu({v})", "F.relu({v})", "torch.tanh({v})"),
    *("F.relu({v}) ** 2", "F.relu({v}).square()", "torch.sigmoid({v})", "{v} * torch.sigmoid(1.702 * {v})"),
    *("F.leaky_relu({v}, 0.1)", "F.elu({v})", "F.softplus({v})", "F.mish({v})", "F.hardswish({v})", "{v} * {v}"),
    *("0.5 * {v} * (1 + torch.erf({v} / 2 ** 0.5))", "{v} * torch.tanh(F.softplus({v}))", "torch.sin({v})"),
)
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


def _linear(made: _Writer, v: str, n: int, is_module: bool = False) -> str:
    """An expression of a product of v with a new weight, or one that there is already."""
    made.products += 1
    k = made.shape(v)[-1]
    layers = {name: layer for name, layer in made.live["self"].named_children() if isinstance(layer, nn.Linear)}
    if not is_module and made.likely(0.2):
        again = [f"self.{name}({v})" for name, layer in layers.items() if layer.in_features == k]
        again += [f"F.linear({v}, self.{name}.weight.t())" for name, layer in layers.items() if layer.out_features == k]
        if again:
            return made.choose.choice(again)
    form = made.choose.choice(("module",) * 6 + ("parameter", "columns", "addmm"))
    if is_module or form == "module":
        return f"{_layer(made, k, n)}({v})"
    shape = f"{n}, {k}" if form == "parameter" else f"{k}, {n}"
    weight = made.module("w", f"nn.Parameter(torch.randn({shape}) / {k} ** 0.5)")
    bias = made.module("b", f"nn.Parameter(0.1 * torch.randn({n}))")
    if form == "parameter":
        return made.choose.choice((f"F.linear({v}, {weight}, {bias})", f"F.linear({v}, {weight})"))
    if form == "columns":
        return made.choose.choice((f"{v} @ {weight} + {bias}", f"torch.matmul({v}, {weight})"))
    return f"torch.addmm({bias}, {v}.reshape(-1, {k}), {weight}).view(*{v}.shape[:-1], {n})"


def _layer(made: _Writer, k: int, n: int) -> str:
    has_bias = made.likely(0.75)
    layer = made.module("l", f"nn.Linear({k}, {n}{'' if has_bias else ', bias=False'})")
    if made.likely(0.12):
        made.set_up(f"{layer}.weight.requires_grad_(False)")
    elif has_bias and made.likely(0.1):
        made.set_up(f"{layer}.bias.requires_grad_(False)")
    return layer


def _add_linear(made: _Writer, v: str) -> None:
    y = made.value(_linear(made, v, made.width()))
    if y and made.likely(0.7):
        _add_activation(made, y)


def _add_activation(made: _Writer, v: str) -> None:
    made.value(*_ACTIVATIONS, v=v)


def _add_gate(made: _Writer, v: str) -> None:
    n = made.width()
    z = made.value(_linear(made, v, 2 * n, is_module=True))
    halves = z and made.lines(2, *_HALVES, z=z, n=n)
    if not halves:
        return
    y = made.value(*_GATES, a=halves[0], b=halves[1])
    if y and made.likely(0.6):
        down = made.value(_linear(made, y, made.shape(v)[-1]))
        if down and made.likely(0.6):
            made.value("{v} + {y}", "{y} + {v}", "torch.add({v}, {y}, alpha=0.5)", v=v, y=down)


def _add_thirds(made: _Writer, v: str) -> None:
    """Queries, keys and values, or what is combined of three."""
    heads, n = made.choose.choice((1, 2, 3, 4)), made.choose.choice((8, 13, 24, 32, 64, 100))
    z = made.value(_linear(made, v, 3 * heads * n, is_module=True))
    if z is None:
        return
    forms = [
        f"{z}.chunk(3, dim=-1)",
        f"{z}.split({heads * n}, -1)",
        f"{z}.unflatten(-1, (3, {heads * n})).unbind(-2)",
    ]
    q, k, w = made.lines(3, *forms) or (None,) * 3
    if q is None:
        return
    rows = made.shape(q)[-2]
    if len(made.shape(q)) == 3 and rows <= 256 and made.likely(0.5):
        parts = [f"{part}.unflatten(-1, ({heads}, {n})).transpose(1, 2)" for part in (q, k, w)]
        heads_of = made.lines(3, f"({', '.join(parts)})")
        if heads_of:
            q, k, w = heads_of
            y = made.value(f"({q} @ {k}.transpose(-1, -2) * {n} ** -0.5).softmax(-1) @ {w}")
            y = y and made.value(
                f"{y}.transpose(1, 2).flatten(-2)", f"{y}.transpose(1, 2).reshape(*{z}.shape[:-1], -1)"
            )
            if y:
                made.value(_linear(made, y, made.shape(v)[-1]))
            return
    made.value(f"{q} * torch.sigmoid({k}) + {w}", f"F.silu({q}) * {k} + torch.tanh({w})", f"{q} * {k} - {w}")


def _add_cat(made: _Writer, v: str) -> None:
    n = made.width()
    first = _linear(made, v, n)
    m = n if made.likely(0.4) else made.width()
    second = made.choose.choice((v, _linear(made, v, m), f"F.gelu({_linear(made, v, m)})"))
    parts = made.choose.sample((first, second), 2)
    form = made.choose.choice(("torch.cat(({}, {}), -1)", "torch.cat([{}, {}], dim=-1)", "torch.stack(({}, {}), -2)"))
    y = made.value(form.format(*parts), f"torch.cat(({parts[0]}, {parts[1]}), -1)")
    if y and made.likely(0.5):
        _add_activation(made, y)


# What lies between

_ORDERS = (
    *("{v}.transpose(-1, -2)", "{v}.transpose(0, 1)", "{v}.permute(1, 0, 2)", "{v}.permute(0, 2, 1, 3)", "{v}.mT"),
    *("{v}.permute(1, 2, 0, 3)", "{v}.permute(0, 2, 1)", "{v}.permute(2, 0, 1, 3).contiguous()"),
    *("{v}.transpose(1, 2).contiguous()", "{v}.permute(2, 0, 1)", "{v}.transpose(0, 1).flatten(0, 1)"),
)
_VIEWS = (
    *("{v}.flatten(0, 1)", "{v}.reshape(-1, {n})", "{v}.flatten(0, -2)", "{v}.flatten(1)", "{v}.flatten(-2)"),
    *("{v}.view({rows}, {n})", "{v}.unsqueeze(1)", "{v}.unsqueeze(0)", "{v}.unflatten(-1, ({h}, -1))"),
    *("{v}.unflatten(-1, (-1, {h})).transpose(-1, -2)", "{v}.contiguous()", "{v}[..., 1:]", "{v}[:, 1:]", "{v}[1:]"),
    *("{v}[..., ::2]", "{v}.narrow(-1, 0, {part})", "{v}.view(1, {rows}, {n})", "{v}.reshape({h}, -1, {n})"),
)


def _add_view(made: _Writer, v: str) -> None:
    shape = made.shape(v)
    n, rows = shape[-1], made.live[v].numel() // shape[-1]
    h = next((h for h in made.choose.sample((2, 3, 4, 8), 4) if n % h == 0 and n >= 16 * h), 1)
    forms = _ORDERS if made.likely(0.5) else _VIEWS
    made.value(*forms, v=v, n=n, rows=rows, h=h, part=max(n - made.choose.choice((1, 8, 32)), 1))


def _add_residual(made: _Writer, v: str) -> None:
    """Of an earlier value of this shape, or of a layer that gives one."""
    others = [name for name in ("x", *made.values) if name != v and made.shape(name) == made.shape(v)]
    if others and made.likely(0.7):
        r = made.choose.choice(others)
    else:
        fitting = [name for name in ("x", *made.values) if made.shape(name)[:-1] == made.shape(v)[:-1]]
        r = made.value(_linear(made, made.choose.choice(fitting), made.shape(v)[-1])) or v
    scale = made.module("s", f"nn.Parameter(torch.rand({made.shape(v)[-1]}))")
    made.value("{v} + {r}", "{r} + {v}", "{r} - 0.5 * {v}", "{r} + {s} * {v}", "torch.add({v}, {r})", v=v, r=r, s=scale)


def _add_norm(made: _Writer, v: str) -> None:
    n = made.shape(v)[-1]
    if n < 16:
        return
    norm = made.choose.choice(("LayerNorm", "LayerNorm", "RMSNorm"))
    options = made.choose.choice(("", "", ", elementwise_affine=False", ", bias=False" * (norm == "LayerNorm")))
    made.value(f"{made.module('n', f'nn.{norm}({n}{options})')}({v})")


def _add_scale(made: _Writer, v: str) -> None:
    n = made.shape(v)[-1]
    s = made.module("s", made.choose.choice((f"nn.Parameter(torch.rand({n}))", f"nn.Buffer(torch.randn({n}))")))
    forms = (
        "{v} * {s}",
        "{v} * 0.5",
        "{v} / 3",
        "{v} + {s}",
        "torch.addcmul({v}, {v}, {s})",
        "{v} * {v}.mean(-1, True)",
    )
    made.value(*forms, v=v, s=s)


def _add_dropout(made: _Writer, v: str) -> None:
    made.value(f"{made.module('d', 'nn.Dropout(0.2)')}({v})", f"F.dropout({v}, 0.3, self.training)")


def _add_checkpoint(made: _Writer, v: str) -> None:
    """Of one or two steps, which only give their last value."""
    if made.indent:
        return
    start, known = len(made.body), len(made.values)
    made.indent = 1
    for _ in range(made.choose.randint(1, 2)):
        _step(made)
    made.indent = 0
    if len(made.values) == known:
        return
    name, y = made.name("part"), made.values[-1]
    made.body.insert(start, f"def {name}({v}):")
    made.body += [f"    return {y}", f"{y} = checkpoint({name}, {v}, use_reentrant=False)"]
    made.values[known:] = [y]


@dataclass(frozen=True)
class _Kind:
    add: Callable[[_Writer, str], None]
    weight: int
    products: int = field(default=0)  # at most


_KINDS = (
    _Kind(_add_linear, 6, 1),
    _Kind(_add_gate, 5, 2),
    _Kind(_add_thirds, 2, 2),
    _Kind(_add_cat, 3, 3),
    _Kind(_add_view, 4),
    _Kind(_add_residual, 4, 1),
    _Kind(_add_norm, 3),
    _Kind(_add_activation, 2),
    _Kind(_add_scale, 2),
    _Kind(_add_dropout, 1),
    _Kind(_add_checkpoint, 2, 1),
)


def _step(made: _Writer) -> None:
    v = made.values[-1] if made.values and made.likely(0.85) else made.choose.choice(["x", *made.values])
    usable = [kind for kind in _KINDS if made.products + kind.products <= _MOST_PRODUCTS]
    (kind,) = made.choose.choices(usable, [kind.weight for kind in usable])
    kind.add(made, v)


# How a model ends

_HEADS = (
    *("{v}.mean(-1)", "{v}.sum(-1)", "{v}.mean(1)", "{v}.sum(-1, keepdim=True)", "torch.logsumexp({v}, -1)"),
    *("{v}.logsumexp(-1, keepdim=True)", "{v}.float()", "{v}.mean()", "{v}.square().mean(-1)", "F.softmax({v}, -1)"),
)


def _end(made: _Writer) -> str:
    """The expression that the model returns."""
    v = made.values[-1]
    result = v
    if made.likely(0.4):
        heads = (*_HEADS, "{v}.amax(-1)") if made.precision == "fp32" else _HEADS
        head = made.choose.choice(heads)
        made.has_jumps |= "amax" in head
        result = head.format(v=v)
    elif made.likely(0.15):
        rows = made.live[v].numel() // made.shape(v)[-1]
        targets = made.module("t", f"nn.Buffer(torch.arange({rows}) % {made.shape(v)[-1]})")
        result = f"F.cross_entropy({v}.reshape({rows}, -1).float(), {targets}, reduction='sum')"
    others = [name for name in made.values[:-1] if name != v]
    if others and made.likely(0.2):
        return f"{result}, {made.choose.choice(others)}"
    return f"{result},"


def _shape(choose: random.Random, sizes: Sizes) -> tuple[int, ...]:
    """Of x without its last dimension: one to three sizes."""
    rows, count = choose.choice(sizes.rows), choose.choice((1, 1, 2, 2, 2, 3))
    if count == 1:
        return (rows,)
    first = choose.choice((1, 2, 3, 4, 8))
    second = max(rows // first, 1)
    if count == 2:
        return (first, second)
    middle = choose.choice((1, 2, 7, 14))
    return (first, middle, max(second // middle, 1))


def make_model(seed: int, sizes: Sizes = DEVICE_SIZES) -> TrainedModel:
    """The model of a seed."""
    choose = random.Random(seed)
    (precision,) = choose.choices(list(PRECISIONS), _PRECISION_WEIGHTS)
    made = _Writer(choose, sizes, precision)
    shape = (*_shape(choose, sizes), made.width())
    layout = tuple(range(len(shape)))
    if len(shape) > 2 and made.likely(0.15):
        layout = (1, 0, *layout[2:])
    # As it lies in memory, which says of which shapes it has a view.
    in_memory = torch.empty([shape[dimension] for dimension in layout], device="meta")
    made.live["x"] = in_memory.permute(*(layout.index(dimension) for dimension in range(len(shape))))
    for _ in range(choose.randint(2, 5)):
        _step(made)
    while not made.products or not made.values:
        _add_linear(made, "x")
    result = _end(made)
    body = [*made.body, f"return {result}"]
    read = set(re.findall(r"self\.(\w+)", "\n".join(body)))
    modules = tuple(line for line in made.modules if re.findall(r"self\.(\w+)", line)[0] in read)
    trained = made.live["self"].named_parameters()
    needs_grad = made.likely(0.6) or not any(p.requires_grad and name.partition(".")[0] in read for name, p in trained)
    if PRECISIONS[precision].autocast:
        body = ["with autocast():", *(f"    {line}" for line in body)]
    return TrainedModel(seed, precision, shape, layout, needs_grad, modules, tuple(body), made.has_jumps)
