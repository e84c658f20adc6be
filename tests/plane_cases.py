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


def no_data_for_a_while(layer: Layer) -> None:
    """What gathers sharded parameters does: the new storage may lie where the old one was."""
    values = negated(layer)
    layer.weight.data = values.new_empty(0)
    layer.weight.data = values.clone()


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


# What a prepared module refuses to go on with.
SEEN: dict[str, Change] = {
    "in place": lambda layer: layer.weight.neg_(),
    "in inference mode": torch.inference_mode()(lambda layer: layer.weight.neg_()),  # of no inference tensor
    "one element": lambda layer: layer.weight[1, 2].add_(3.0),
    "as output": lambda layer: torch.neg(layer.weight, out=layer.weight),
    "several at once": lambda layer: torch._foreach_neg_([layer.weight]),
    "through an alias": lambda layer: layer.weight.detach().neg_(),  # which shares the version
    "through a view": lambda layer: layer.weight.t()[-2:].neg_(),
    "initialised": lambda layer: nn.init.normal_(layer.weight),
    "transposed in place": lambda layer: layer.weight.t_().neg_().t_(),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": negated(layer)}),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict({"weight": negated(layer)}, assign=True),
    "other parameter": lambda layer: setattr(layer, "weight", nn.Parameter(negated(layer))),
    "to bfloat16 and back": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "other data": lambda layer: setattr(layer.weight, "data", negated(layer)),
    "no data for a while": no_data_for_a_while,
    "set_": lambda layer: layer.weight.set_(negated(layer)),
    "storage elsewhere": storage_elsewhere,
    "SGD": step_of(lambda parameters: SGD(parameters, lr=0.1)),
    "Adam, foreach": step_of(lambda parameters: Adam(parameters, lr=0.1, foreach=True)),
}
SEEN = {name: torch.no_grad()(change) for name, change in SEEN.items()}  # without a gradient, as initialisations do
# What PyTorch does not count: prepare again.
UNSEEN: dict[str, Change] = {
    "through data": lambda layer: layer.weight.data.neg_(),
    "SGD, fused": step_of(lambda parameters: SGD(parameters, lr=0.1, fused=True)),
    "AdamW, fused": step_of(lambda parameters: AdamW(parameters, lr=0.1, fused=True)),
    "optimiser that writes through data": step_of(WritesThroughData),
}
