"""Every way in which a layer's weight changes under its planes, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import cutfuse

Layer = nn.Linear | cutfuse.nn.FusedLinear
Change = Callable[[Layer], object]


class WritesThroughData(Optimizer):
    """Negates its parameters by writes that no version counts."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.neg_()


def negated(layer: Layer) -> Tensor:
    """What most changes make of the weight."""
    return -layer.weight.detach()


@torch.no_grad()
def in_place(layer: Layer) -> None:
    """Without a gradient, as initialisations do."""
    layer.weight.neg_()


@torch.inference_mode()
def in_inference_mode(layer: Layer) -> None:
    """The weight itself is no inference tensor."""
    layer.weight.neg_()


@torch.no_grad()
def one_element(layer: Layer) -> None:
    """By its index."""
    layer.weight[1, 2] += 3.0


@torch.no_grad()
def as_output(layer: Layer) -> None:
    """As the `out` of an operation."""
    torch.neg(layer.weight, out=layer.weight)


@torch.no_grad()
def several_at_once(layer: Layer) -> None:
    """By an operation on a list."""
    torch._foreach_neg_([layer.weight])


def through_an_alias(layer: Layer) -> None:
    """A detached tensor shares the version."""
    layer.weight.detach().neg_()


@torch.no_grad()
def through_a_view(layer: Layer) -> None:
    """Of its transpose's last rows."""
    layer.weight.t()[-2:].neg_()


@torch.no_grad()
def initialised(layer: Layer) -> None:
    """By torch.nn.init."""
    nn.init.normal_(layer.weight)


@torch.no_grad()
def transposed_in_place(layer: Layer) -> None:
    """The same numbers in another order, and back with a sign."""
    layer.weight.t_()
    layer.weight.neg_()
    layer.weight.t_()


def load_copied(layer: Layer) -> None:
    """The parameter stays."""
    layer.load_state_dict({"weight": negated(layer)})


def load_assigned(layer: Layer) -> None:
    """The parameter is another one."""
    layer.load_state_dict({"weight": negated(layer)}, assign=True)


def other_parameter(layer: Layer) -> None:
    """Assigned by hand."""
    layer.weight = nn.Parameter(negated(layer))


def to_bfloat16_and_back(layer: Layer) -> None:
    """Rounds."""
    layer.to(torch.bfloat16).to(torch.float32)


def other_data(layer: Layer) -> None:
    """The same parameter over another tensor."""
    layer.weight.data = negated(layer)


def no_data_for_a_while(layer: Layer) -> None:
    """What gathers sharded parameters does: the new storage may lie where the old one was."""
    values = negated(layer)
    layer.weight.data = values.new_empty(0)
    layer.weight.data = values.clone()


@torch.no_grad()
def set_to_another(layer: Layer) -> None:
    """By `Tensor.set_`."""
    layer.weight.set_(negated(layer))


def storage_elsewhere(layer: Layer) -> None:
    """The storage is freed and allocated again at another address, and written in a way that no version counts."""
    values, storage = negated(layer), layer.weight.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    storage.resize_(0)
    blockers = []
    while not storage.nbytes() or storage.data_ptr() == address:
        storage.resize_(0)
        blockers.append(torch.empty(size, dtype=torch.uint8, device=values.device))
        storage.resize_(size)
        assert len(blockers) < 100, "the allocator gives the same address again and again"
    layer.weight.data.copy_(values)


def step_of(make: Callable[[list[nn.Parameter]], Optimizer]) -> Change:
    """One step of an optimiser."""

    def change(layer: Layer) -> None:
        layer.weight.grad = torch.ones_like(layer.weight)
        make([layer.weight]).step()
        layer.weight.grad = None

    return change


def written_through_data(layer: Layer) -> None:
    """In place, by what no version counts."""
    layer.weight.data.neg_()


# What a prepared module refuses to go on with.
SEEN: dict[str, Change] = {
    "in place": in_place,
    "in inference mode": in_inference_mode,
    "one element": one_element,
    "as output": as_output,
    "several at once": several_at_once,
    "through an alias": through_an_alias,
    "through a view": through_a_view,
    "initialised": initialised,
    "transposed in place": transposed_in_place,
    "load_state_dict": load_copied,
    "load_state_dict, assigned": load_assigned,
    "other parameter": other_parameter,
    "to bfloat16 and back": to_bfloat16_and_back,
    "other data": other_data,
    "no data for a while": no_data_for_a_while,
    "set_": set_to_another,
    "storage elsewhere": storage_elsewhere,
    "SGD": step_of(lambda parameters: SGD(parameters, lr=0.1)),
    "Adam, foreach": step_of(lambda parameters: Adam(parameters, lr=0.1, foreach=True)),
}
# What PyTorch does not count: prepare again.
UNSEEN: dict[str, Change] = {
    "through data": written_through_data,
    "SGD, fused": step_of(lambda parameters: SGD(parameters, lr=0.1, fused=True)),
    "AdamW, fused": step_of(lambda parameters: AdamW(parameters, lr=0.1, fused=True)),
    "optimiser that writes through data": step_of(WritesThroughData),
}
