"""Calls, layers and blocks as users write them, in PyTorch and with cutfuse; and how a case of both is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse
from bench import specialized
from bench.launches import Checked
from bench.suite import Figures, Session
from bench.timing import HOST, TURNS, Launch, time_in_turns, wait_for
from bench.workloads import Shape, frobenius_error, note_wrong, random_tensor

Result = Tensor | tuple[Tensor, ...]
Function = Callable[..., Result]

LAYERS = 8  # in one compiled function: what entering it costs, in which the two do not differ, is shared by so many


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A layer and what follows it."""
    return F.gelu(F.linear(x, weight, bias))


def fused_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with cutfuse, with a lambda that is new on each call."""
    return cutfuse.linear(x, weight, bias, epilogue=lambda z: F.gelu(z))


def fused_linear_residual(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """A layer, relu, and a tensor of the result's shape."""
    return cutfuse.linear(x, weight, bias, epilogue=lambda z, r: torch.relu(z) + r, operands=(residual,))


def fused_three_ops(x: Tensor, operand: Tensor) -> Tensor:
    """Three operations without a product."""
    return cutfuse.pointwise(lambda v, u: torch.sigmoid(v) * u + v, x, operand)


def training_step(layer: Callable[..., Tensor], count: int | None = None) -> Function:
    """Of the layer's tensors and the gradient that arrives: its result, and the gradients of its first `count` tensors.

    None: of all.
    """

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        *own, gradient = tensors
        y = layer(*own)
        return y, *torch.autograd.grad(y, own[:count], gradient)

    return step


def repeated(layer: Callable[..., Tensor]) -> Function:
    """Of x and the weights and biases of layers: `layer` once with each of these."""

    def layers(x: Tensor, *parameters: Tensor) -> Tensor:
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            x = layer(x, weight, bias)
        return x

    return layers


def parameter_tensors(shape: Shape, precision: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Weight `[N, K]` and bias `[N]`; the weight is scaled so that the product is about normal."""
    _, n, k = shape
    weight = random_tensor((n, k), precision, device, seed).mul_(k**-0.5)
    return weight, random_tensor((n,), precision, device, seed + 1)


def layer_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, K]`, weight and bias."""
    m, _, k = shape
    return [random_tensor((m, k), precision, device, seed=1), *parameter_tensors(shape, precision, device, seed=2)]


def product_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and weight."""
    return layer_tensors(shape, precision, device)[:2]


def residual_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x, weight, bias and a residual `[M, N]`."""
    return [*layer_tensors(shape, precision, device), random_tensor(shape[:2], precision, device, seed=4)]


def training_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x, weight and bias, which need gradients, and the gradient that arrives, `[M, N]`."""
    leaves = [tensor.requires_grad_() for tensor in layer_tensors(shape, precision, device)]
    return [*leaves, random_tensor(shape[:2], precision, device, seed=4)]


def repeated_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x and the weights and biases of `LAYERS` layers; K = N."""
    parameters = [parameter_tensors(shape, precision, device, seed=2 + 2 * index) for index in range(LAYERS)]
    return [layer_tensors(shape, precision, device)[0], *chain.from_iterable(parameters)]


def elementwise_tensors(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, N]` and an operand of its shape."""
    return [random_tensor(shape[:2], precision, device, seed) for seed in (1, 4)]


def single_tensor(shape: Shape, precision: str, device: torch.device) -> list[Tensor]:
    """x `[M, N]`."""
    return elementwise_tensors(shape, precision, device)[:1]


class PlainBlock(nn.Module):
    """`x + down(gelu(up(norm(x))))` of x `[..., width]`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class FusedBlock(nn.Module):
    """The same with what follows each linear layer inside it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = cutfuse.nn.FusedLinear(width, hidden, epilogue=F.gelu)
        self.down = cutfuse.nn.FusedLinear(hidden, width, epilogue=lambda z, residual: residual + z)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)), x)


def build_stacks(
    count: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Sequential, nn.Sequential]:
    """`count` blocks in plain PyTorch, and `count` with cutfuse that share their parameters."""
    torch.manual_seed(0)
    with device:
        plain = nn.Sequential(*(PlainBlock(width, hidden) for _ in range(count))).to(dtype)
    with torch.device("meta"):
        fused = nn.Sequential(*(FusedBlock(width, hidden) for _ in range(count)))
    fused.load_state_dict(plain.state_dict(keep_vars=True), strict=True, assign=True)
    return plain, fused


PYTORCH, CUTFUSE = "pytorch", "cutfuse"


@dataclass(frozen=True)
class Calls:
    """Without arguments: PyTorch's call, cutfuse's, and PyTorch's of the same tensors in fp64."""

    pytorch: Callable[[], Result]
    cutfuse: Callable[[], Result]
    exact: Callable[[], Result]


@dataclass(frozen=True)
class Group:
    """Cases that are alike: their name, what PyTorch runs, and which time is taken.

    With `compiles`, both calls are of functions that torch.compile compiled.
    """

    name: str
    rival: str
    time: str = HOST
    needs_grad: bool = False
    compiles: bool = False


def calls_of(group: Group, pytorch: Function, cutfuse: Function, tensors: Sequence[Tensor]) -> Calls:
    """The calls of both functions on the same tensors, compiled for these sizes where the group is."""
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
    # A partial calls the function from C: no frame of Python is between the clock and the two functions.
    own, other = (partial(in_its_way(group, function), *tensors) for function in (pytorch, cutfuse))
    return Calls(own, other, lambda: pytorch(*wide))


def in_its_way(group: Group, function: Function) -> Function:
    """The function as the group calls it: compiled for these sizes, or as it is."""
    return torch.compile(function, fullgraph=True, dynamic=False) if group.compiles else function


def parts_of(result: Result) -> tuple[Tensor, ...]:
    """A call's results, without their graph."""
    return tuple(part.detach() for part in (result if isinstance(result, tuple) else (result,)))


def error_of(result: Result, exact: Result) -> float:
    """The largest relative error among a call's results; raises ValueError where their number or a shape differs."""
    parts, expected = parts_of(result), parts_of(exact)
    shapes, exact_shapes = ([tuple(part.shape) for part in own] for own in (parts, expected))
    if shapes != exact_shapes:
        raise ValueError(f"the results have shapes {shapes}, but should have {exact_shapes}")
    return max(frobenius_error(part, whole) for part, whole in zip(parts, expected, strict=True))


def prepare(
    group: Group, precision: str, build: Callable[[torch.device], Calls], session: Session
) -> Callable[[], Figures]:
    """Build and check both calls; what times those that are right."""
    built = build(session.device)
    exact = built.exact()
    checked: Checked[Launch] = Checked(session)

    def check(call: Launch, entry: Figures) -> Launch:
        note_wrong(entry, error_of(call(), exact), precision)
        return call

    for name, call in ((PYTORCH, built.pytorch), (CUTFUSE, built.cutfuse)):
        checked.add(name, partial(check, call))
    specialized.wait()  # A kernel that is compiled meanwhile slows every call, and then runs in part of them.

    def timed() -> Figures:
        turn, wait = TURNS[group.time], wait_for(session.device)
        return checked.figures(time_in_turns(checked.timed, turn, wait, session.effort, session.seed))

    return timed
