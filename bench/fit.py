"""The fit suite: layers drawn at random by every kernel that takes them and by cuBLAS, for the planner's tables.

Then a device's table of predicted times is fitted to samples of it, with what the choice by the table loses.

The planner's own formulas predict, with other numbers (`predict_ways`). A fit is held to the numbers that the samples'
file begins with, each by `HELD` of its own size: they stand for what was measured before and not kept.

To weigh the ways that are near the fastest more than others lost more: 1.0090 for 1.0080, held out.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from bench.goals import MEAN, TARGET_DEVICE, WORST, cases_with
from bench.launches import check_all, interleaved
from bench.suite import Case, Figures, Goal, Results, Session, Suite, Turn
from bench.tables import MISSING, Table, microseconds, of, ratio, table_of, times_of
from bench.timing import Effort
from bench.workloads import Range, dimensions, drawn_shapes, random_tensor
from cutfuse import native
from cutfuse.epilogue import Program, evaluate
from cutfuse.layer.call_plans import given_to, linear_call
from cutfuse.layer.planner import LinearArguments, plan_linear

if TYPE_CHECKING:
    from cutfuse import _C

Numbers = dict[str, float]  # of a table, by their names

PRODUCT, UNFUSED = "cuBLAS", "cuBLAS and one more kernel"  # as the planner names them
SAMPLES = Path(__file__).parent / "samples"
TABLES = Path(__file__).parent.parent / "csrc" / "plan" / "devices"
ERROR = 0.08  # of a prediction that is as good as can be, in the logarithm
HELD, HELD_LOOSELY = 0.1, 1.0
LOOSE = "per_further"  # of what rows' boundaries add, where the earlier numbers had one term for two
SMALL = 0.2  # a number below is held, and varied, as if it were as large as this
STEPS = 40
LEAST_GAIN = 1e-4  # of the sum of squares, beyond which no further step is taken
SPLIT_SEED = 0
ABOUT = ("bf16, measured by `python -m bench fit`: each launch behind other work, so that none waits for the host.",)
FEW_ROWS = 512
SHOWN = 8


@dataclass(frozen=True)
class Layer:
    """A 16-bit layer of contiguous matrices; what follows its product by the program's text, and a reduction's name."""

    m: int
    n: int
    k: int
    program: str
    reduction: str = "none"

    def request(self, multiprocessors: int, *, is_bare: bool = False) -> _C.LinearRequest:
        """What the planner is asked; is_bare: without what follows the product."""
        core = native.core
        program = Program.parse("operands=0" if is_bare else self.program)
        bf16, costs = core.dtypes()["bfloat16"], program.native
        operand_bytes = 2.0 * program.operand_count
        return core.LinearRequest(
            x=(self.m, self.k, self.k, 1, True),
            weight=(self.n, self.k, self.k, 1, True),
            bias=None,
            input=bf16,
            output=bf16,
            reduction=0 if is_bare else {"none": 0, **core.reductions()}[self.reduction],
            epilogue_cost=costs.cost,
            specialized_cost=costs.specialized_cost(is_accurate=False),
            generated_cost=costs.generated_cost,
            operand_bytes=operand_bytes,
            fetched_bytes=min(operand_bytes, 2.0),
            precision=core.Precision.tf32,  # 16-bit products have one precision alone
            weight_has_planes=False,
            stores_pre_activation=False,
            device=(9, 0, multiprocessors),
            issuer=core.Issuer.call,
        )

    @property
    def title(self) -> str:
        """As tables print it."""
        return f"{self.m}x{self.n}x{self.k} {self.program}" + (f", {self.reduction}" * (self.reduction != "none"))


@dataclass(frozen=True)
class Sample:
    """What the ways of computing a layer took, in microseconds."""

    layer: Layer
    times: Mapping[str, float]


@dataclass(frozen=True)
class Samples:
    """Of one device. earlier: the numbers that a fit is held to, by their names. shortest_us: of kernels and of
    cuBLAS's product, below which a time is the host's and is not counted.
    """

    device: str
    multiprocessors: int
    gigabytes_per_second: float
    about: Sequence[str]
    shortest_us: Mapping[str, float]
    earlier: Numbers
    samples: Sequence[Sample]

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Of a file that `save` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        ways = content.pop("ways")
        rows = content.pop("samples")
        samples = [
            Sample(Layer(*layer), {way: us for way, us in zip(ways, times, strict=True) if us is not None})
            for layer, times in rows
        ]
        return cls(**content, samples=samples)

    def save(self, path: Path) -> None:
        """One line for each sample, rounded to 0.01 us."""
        ways = list(dict.fromkeys(way for sample in self.samples for way in sample.times))
        head = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "samples"}
        rows = []
        for sample in self.samples:
            layer = [getattr(sample.layer, name) for name in Layer.__dataclass_fields__]
            times = [round(sample.times[way], 2) if way in sample.times else None for way in ways]
            rows.append(json.dumps([layer, times], separators=(",", ":")))
        text = json.dumps({**head, "ways": ways}, indent=1).removesuffix("\n}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + ',\n "samples": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")

    def counts(self, way: str, us: float) -> bool:
        """Whether a time is the device's."""
        return us >= self.shortest_us.get("product" if way in (PRODUCT, UNFUSED) else "kernel", 0.0)

    def of(self, samples: Sequence[Sample]) -> Samples:
        """The same device with other samples."""
        return replace(self, samples=samples)

    def halves(self) -> tuple[Samples, Samples]:
        """Two random halves, the same ones each time."""
        order = random.Random(SPLIT_SEED).sample(list(self.samples), len(self.samples))
        middle = len(order) // 2
        return self.of(order[:middle]), self.of(order[middle:])

    def predict(self, way: str, numbers: Numbers, layers: Iterable[Layer], *, is_bare: bool = False) -> list[float]:
        """The microseconds of a way, by the table with these numbers."""
        requests = [layer.request(self.multiprocessors, is_bare=is_bare) for layer in layers]
        found = native.core.predict_ways(requests, way, named_table(self.device), {**self.earlier, **numbers})
        return list(found)


def named_table(device: str) -> str:
    """The table by whose rows a device's numbers are named: its own, or the first one."""
    tables = native.core.device_times()
    return device if device in tables else next(iter(tables))


@dataclass
class Fit:
    """The numbers that samples determine, varied by `SMALL` or their own size."""

    samples: Samples
    fixed: Numbers = field(default_factory=dict)  # that are not fitted

    @cached_property
    def requests(self) -> dict[str, tuple[list[_C.LinearRequest], Tensor]]:
        """Of each way, those whose time counts, and the time's logarithm."""
        found = {}
        for way in dict.fromkeys(way for sample in self.samples.samples for way in sample.times):
            counted = [one for one in self.samples.samples if self.samples.counts(way, one.times.get(way, -1.0))]
            multiprocessors = self.samples.multiprocessors
            requests = [one.layer.request(multiprocessors, is_bare=way == PRODUCT) for one in counted]
            measured = torch.tensor([one.times[way] for one in counted], dtype=torch.float64).log()
            if counted:
                found[way] = requests, measured
        return found

    def predict(self, way: str, numbers: Numbers) -> Tensor:
        """Logarithms of the microseconds of all that counts."""
        own = {**self.samples.earlier, **self.fixed, **numbers}
        found = native.core.predict_ways(self.requests[way][0], way, named_table(self.samples.device), own)
        return torch.tensor(found, dtype=torch.float64).log()

    @cached_property
    def ways_of(self) -> dict[str, list[str]]:
        """The ways that a number matters to, of each number that matters to some."""
        before = {way: self.predict(way, {}) for way in self.requests}
        found = {}
        for name, number in self.samples.earlier.items():
            other = {name: number + max(number, SMALL)}
            ways = [way for way in self.requests if not torch.equal(self.predict(way, other), before[way])]
            if ways and name not in self.fixed:
                found[name] = ways
        return found

    def run(self) -> Numbers:
        """The numbers with the least robust error, to three digits: Levenberg and Marquardt's method."""
        names = list(self.ways_of)
        start = torch.tensor([self.samples.earlier[name] for name in names], dtype=torch.float64)
        size = start.clamp(min=SMALL)
        held = torch.tensor([HELD_LOOSELY if LOOSE in name else HELD for name in names], dtype=torch.float64)

        def numbers_at(place: Tensor) -> Numbers:
            return dict(zip(names, (start + size * place).tolist(), strict=True))

        def errors(place: Tensor) -> Tensor:
            numbers = numbers_at(place)
            return torch.cat([(self.predict(way, numbers) - own) / ERROR for way, (_, own) in self.requests.items()])

        def cost(found: Tensor, place: Tensor) -> float:
            return float((2 * ((1 + found**2).sqrt() - 1)).sum() + ((place / held) ** 2).sum())

        place = torch.zeros_like(start)
        found = errors(place)
        damping = 1e-3
        for _ in range(STEPS):
            slope = self._slope(numbers_at(place), size)
            weight = (1 + found**2).rsqrt()  # of each error: one that is large counts by its size alone
            curvature = slope.T @ (weight[:, None] * slope) + torch.diag(held**-2)
            downhill = -(slope.T @ (weight * found) + place / held**2)
            while damping < 1e9:
                step = torch.linalg.solve(curvature + damping * torch.diag(curvature.diagonal()), downhill)
                other = torch.maximum(place + step, -start / size)
                changed = errors(other)
                gain = cost(found, place) - cost(changed, other)
                if gain > 0:
                    break
                damping *= 10
            else:
                break
            place, found, damping = other, changed, damping / 10
            if gain < LEAST_GAIN:
                break
        return {name: rounded(number) for name, number in numbers_at(place).items()}

    def _slope(self, numbers: Numbers, size: Tensor) -> Tensor:
        """Of each error, by each number."""
        step = 1e-4
        before = {way: self.predict(way, numbers) for way in self.requests}
        columns = []
        for (name, ways), own in zip(self.ways_of.items(), size.tolist(), strict=True):
            other = {**numbers, name: numbers[name] + step * own}
            moved = {way: (self.predict(way, other) - before[way]) / (step * ERROR) for way in ways}
            columns.append(torch.cat([moved.get(way, torch.zeros_like(before[way])) for way in self.requests]))
        return torch.stack(columns, dim=1)


def rounded(number: float) -> float:
    """To the digits that a table has."""
    return float(f"{number:.3g}")


@dataclass(frozen=True)
class Choice:
    """A layer whose ways were all measured, and the predicted best one's time over the measured best one's."""

    layer: Layer
    chosen: str
    best: str
    loss: float


def choices(samples: Samples, numbers: Numbers, *, with_cublas: bool) -> list[Choice]:
    """Of the layers of which all kernels' times count. with_cublas: beside the kernels, cuBLAS and one more kernel.

    Where only cuBLAS's product was measured, the time of the kernel behind it is the predicted one.
    """
    judged = []
    for one in samples.samples:
        kernels = [samples.counts(way, us) for way, us in one.times.items() if is_kernel(way)]
        if kernels and all(kernels):
            judged.append(one)
    layers = [one.layer for one in judged]
    ways = dict.fromkeys(way for one in judged for way in one.times if is_kernel(way))
    predicted = {way: samples.predict(way, numbers, layers) for way in ways}
    unfused = samples.predict(UNFUSED, numbers, layers)
    product = samples.predict(PRODUCT, numbers, layers, is_bare=True)
    found = []
    for place, one in enumerate(judged):
        times = {way: (predicted[way][place], us) for way, us in one.times.items() if is_kernel(way)}
        if UNFUSED in one.times:
            measured = one.times[UNFUSED]
        elif PRODUCT in one.times and one.layer.reduction == "none":  # large reductions are fused always
            measured = one.times[PRODUCT] + unfused[place] - product[place]
        else:
            measured = None
        if with_cublas and measured is not None:
            times[UNFUSED] = unfused[place], measured
        chosen, best = (min(times, key=lambda way: times[way][index]) for index in (0, 1))
        found.append(Choice(one.layer, chosen, best, times[chosen][1] / times[best][1]))
    return found


def is_kernel(way: str) -> bool:
    """Whether it is a fused kernel."""
    return way not in (PRODUCT, UNFUSED)


def held_out_fits(samples: Samples, fixed: Numbers | None = None) -> list[tuple[Samples, Numbers]]:
    """Each half of the layers with the numbers that are fitted to the other half."""
    first, second = samples.halves()
    fixed = fixed or {}
    return [(other, fixed | Fit(own, fixed).run()) for own, other in ((first, second), (second, first))]


def held_out(fits: Sequence[tuple[Samples, Numbers]], *, with_cublas: bool) -> list[Choice]:
    """The choices for either half."""
    return [one for half, numbers in fits for one in choices(half, numbers, with_cublas=with_cublas)]


def losses(chosen: Sequence[Choice]) -> tuple[str, str, str]:
    """How many, the mean and the worst."""
    if not chosen:
        return "0", "", ""
    return (
        str(len(chosen)),
        f"{statistics.fmean(one.loss for one in chosen):.4f}",
        ratio(max(one.loss for one in chosen)),
    )


def held_out_tables(samples: Samples) -> list[Table]:
    """What the choice loses by the earlier numbers and by those fitted to the other half, and where it loses most."""
    rows = []
    worst: list[Choice] = []
    fits = held_out_fits(samples)
    for title, with_cublas in (("of kernels", False), ("and of cuBLAS", True)):
        before, after = choices(samples, {}, with_cublas=with_cublas), held_out(fits, with_cublas=with_cublas)
        kinds: dict[str, Callable[[Choice], bool]] = {
            "all": lambda one: True,
            f"M below {FEW_ROWS}": lambda one: one.layer.m < FEW_ROWS,
        }
        for program in sorted({one.layer.program for one in after}):
            kinds[program] = lambda one, program=program: one.layer.program == program
        for kind, covers in kinds.items():
            own, then = ([one for one in found if covers(one)] for found in (after, before))
            rows.append((f"{kind}, {title}", *losses(own), *losses(then)[1:]))
        worst += sorted(after, key=lambda one: -one.loss)[:SHOWN]
    columns = ("held-out layers", "count", "mean", "worst", "mean before", "worst before")
    losing = dict(zip(columns, zip(*rows, strict=True), strict=True))
    wrong = {
        "layer": [one.layer.title for one in worst],
        "chosen": [one.chosen for one in worst],
        "fastest": [one.best for one in worst],
        "time over its": [ratio(one.loss) for one in worst],
    }
    return [Table("The chosen way's time over the best one's", losing), Table("Where it is largest", wrong)]


def terms_table(samples: Samples) -> Table:
    """What each term is worth: the held-out mean where it is 0 in every row that has it."""
    # Rates are no terms: times are divided by them.
    terms = dict.fromkeys(name.rpartition(".")[2] for name in Fit(samples).ways_of if "bytes" not in name)
    without: dict[str, Numbers] = {"none": {}}
    for term in terms:
        without[term] = {name: 0.0 for name in samples.earlier if name.rpartition(".")[2] == term}
    found = [losses(held_out(held_out_fits(samples, fixed), with_cublas=True)) for fixed in without.values()]
    columns = {"without": list(without), "mean": [mean for _, mean, _ in found]}
    return Table("Terms", {**columns, "worst": [worst for *_, worst in found]})


def table_text(samples: Samples, fitted: Numbers) -> str:
    """The device's table as a file of csrc/plan/devices has it."""
    path = samples_path(samples.device)
    count = sum(samples.counts(way, us) for one in samples.samples for way, us in one.times.items())
    rest = {name: number for name, number in samples.earlier.items() if name not in fitted}

    def rows(numbers: Numbers) -> list[str]:
        return [f"CUTFUSE_TIME({name}, {number:.6g})" for name, number in numbers.items()]

    device = f'"{samples.device}", {samples.multiprocessors}, {samples.gigabytes_per_second:g}'
    return "\n".join(
        [
            "// Written by `python -m bench refit`, of " + f"bench/samples/{path.name}: change the samples instead.",
            f"CUTFUSE_DEVICE({device})",
            "",
            f"// Fitted to {count} times of {len(samples.samples)} layers.",
            *rows(fitted),
            "",
            f"// Not yet with samples: {len(rest)} numbers.",
            *rows(rest),
            "",
        ]
    )


def measured_anew(device: str, multiprocessors: int, samples: Sequence[Sample]) -> Samples:
    """Samples that take the place of a device's: held to the same numbers, or to those of the first table.

    All times are the device's, whatever they are.
    """
    path = samples_path(device)
    if path.exists():
        return replace(Samples.load(path), about=ABOUT, shortest_us={}, samples=samples)
    _, gigabytes, numbers = native.core.device_times()[named_table(device)]
    return Samples(device, multiprocessors, gigabytes, ABOUT, {}, numbers, samples)


def samples_path(device: str) -> Path:
    """Where a device's samples are."""
    return SAMPLES / f"{file_name(device)}.json"


def table_path(device: str) -> Path:
    """Where a device's table is."""
    return TABLES / f"{file_name(device).removeprefix('nvidia-')}.def"


def file_name(device: str) -> str:
    """A device's name in the names of files."""
    return device.lower().replace(" ", "-")


def write_table(samples: Samples) -> Path:
    """Write the device's table of the fit to all samples; gives where it is."""
    path = table_path(samples.device)
    path.write_text(table_text(samples, Fit(samples).run()), encoding="utf-8")
    return Path(os.path.relpath(path))


PRECISION, MODE = "bf16", "tf32"  # the planner's name of 16-bit products' one precision
ROWS, SIZES, COUNT = Range(16, 16384), Range(256, 12288), 800
SMALL_ROWS, SMALL_SIZES, FEW = Range(1, 16), Range(16, 64), 8
FOLLOWING = (
    ("operands=0; relu z", "none"),
    ("operands=0; gelu z", "none"),
    ("operands=1; add z r0", "none"),
    ("operands=0; gelu z", "sum"),
)
MEAN_AT_MOST, WORST_AT_MOST = 1.03, 1.15
KERNEL = "fused kernels"
CONTENDERS = (KERNEL, PRODUCT, UNFUSED)
EFFORT = Effort(0.6, 5, 20)

Launches = dict[str, Callable[[], Any]]


def launches_of(layer: Layer, device: torch.device) -> Launches:
    """Every way of computing the layer by its name, and cuBLAS's product alone; on the CPU PyTorch's own."""
    m, n, k = layer.m, layer.n, layer.k
    x, weight = (random_tensor(shape, PRECISION, device, seed) for seed, shape in enumerate(((m, k), (n, k))))
    program = Program.parse(layer.program)
    operands = [random_tensor((m, n), PRECISION, device, 2 + place) for place in range(program.operand_count)]
    arguments = LinearArguments(x, weight, None, operands, program, layer.reduction, x.dtype)
    found: Launches = {PRODUCT: lambda: F.linear(x, weight)}
    if device.type != "cuda":

        def unfused() -> Tensor:
            y = evaluate(program, F.linear(x, weight), operands)
            return y if layer.reduction == "none" else y.sum(-1)

        return {**found, UNFUSED: unfused}
    for way in plan_linear(arguments, MODE).alternatives:
        if not way.rejection:
            call = linear_call(plan_linear(arguments, MODE, only=way.name), arguments)
            found[way.name] = partial(call.run, *given_to(arguments))
    return found


def prepare(layer: Layer, session: Session) -> Turn:
    """Compiles what follows the product into each kernel, and gives what times all ways."""

    def check(way: str, _: Figures) -> Callable[[], Any]:
        launches[way]()
        return launches[way]

    with cutfuse.specialization("now"):
        launches = launches_of(layer, session.device)
        names = [way for way in launches if (KERNEL if is_kernel(way) else way) in session.contenders]
        checked = check_all(session, names, check)

    def timed() -> Figures:
        with cutfuse.specialization("now"):
            return interleaved(checked)

    return timed


def fit_cases(small: bool, quick: bool, seed: int) -> Iterator[Case]:
    """Other layers for each seed; what follows the product in turn."""
    ranges = (SMALL_ROWS, SMALL_SIZES) if small else (ROWS, SIZES)
    shapes = drawn_shapes(FEW if small or quick else COUNT, *ranges, odd_ones=False, seed=seed)
    for number, ((m, n, k), (program, reduction)) in enumerate(zip(shapes, cycle(FOLLOWING))):
        layer = Layer(m, n, k, program, reduction)
        variant = f"{number:03} {layer.program}, {layer.reduction}"
        about = {"layer": list(astuple(layer))}
        yield Case(
            "layer", variant, dimensions((m, n, k)), PRECISION, partial(prepare, layer), seconds=1.4, about=about
        )


def sample_of(case: Figures) -> Sample:
    """What was measured of a layer. A time that the host may be a part of is left out."""
    entries = case["contenders"]
    times = {way: own["median_us"] for way, own in entries.items() if "median_us" in own and not own.get("late")}
    return Sample(Layer(*case["layer"]), times)


def samples_of(results: Results) -> Samples:
    """What a run measured, for the fit."""
    machine = results["machine"]
    samples = [sample_of(case) for case in results["cases"]]
    return measured_anew(str(machine["device"]), machine.get("multiprocessors", 0), samples)


def over_best(case: Figures) -> float | None:
    """The time of the way that the module's table for an H200 chooses over that of the fastest one."""
    multiprocessors, gigabytes, numbers = native.core.device_times()[TARGET_DEVICE]
    sample = sample_of(case)
    samples = Samples(TARGET_DEVICE, multiprocessors, gigabytes, (), {}, numbers, [sample])
    return next((one.loss for one in choices(samples, {}, with_cublas=True)), None)


def fastest(case: Figures) -> str:
    """The fastest way of computing a layer."""
    own = {way: entry["median_us"] for way, entry in case["contenders"].items() if "median_us" in entry}
    own.pop(PRODUCT, None)
    return min(own, key=lambda way: own[way]) if own else MISSING


def finish(results: Results) -> list[str]:
    """Write the samples and the table of the device; gives what the choice by it loses."""
    samples = samples_of(results)
    path = samples_path(samples.device)
    samples.save(path)
    samples = Samples.load(path)  # rounded, as `refit` reads them
    lines = [f"**{table.title}**\n\n{table.markdown()}" for table in held_out_tables(samples)]
    written = write_table(samples)
    return [*lines, f"Samples: {Path(os.path.relpath(path))}. Table: {written}. Build the module again to plan by it."]


SUITE = Suite(
    name="fit",
    cases=fit_cases,
    goals=tuple(
        Goal("chosen way", "fastest", cases_with(), over_best, limit, measure)
        for measure, limit in ((MEAN, MEAN_AT_MOST), (WORST, WORST_AT_MOST))
    ),
    contenders=CONTENDERS,
    tables=(
        table_of(
            "Every layer",
            {
                "fastest": fastest,
                "its us": lambda case: of(fastest(case), "median_us", microseconds)(case),
                **times_of({UNFUSED: UNFUSED}),
            },
        ),
    ),
    about=(
        f"M of {ROWS.least} to {ROWS.most}, N and K of {SIZES.least} to {SIZES.most}, drawn by the seed; medians of "
        "single launches from a cold cache, all ways of a layer in turns.",
        "A whole run writes the device's samples and its table, and says what the choice by a fit to half of the "
        "layers loses for the other half.",
    ),
    effort=EFFORT,
    time_limit_s=1140.0,
    compiles=False,
    finish=finish,
)
