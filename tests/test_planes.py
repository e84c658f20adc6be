"""Which planes a weight keeps between calls, and when they are made again: with a split that copies, on the CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from plane_cases import CHANGES, Change, WritesThroughData
from plane_device import COLUMNS, NBYTES, ROWS, Device, is_current, keep, make_layer, make_weight
from torch import Tensor, nn

import cutfuse
from cutfuse.ops import planes
from cutfuse.ops.planes import SPLIT3, SPLIT6, keeps_planes, weight_planes

pytestmark = pytest.mark.usefixtures("device")


def test_kept_from_the_second_unchanged_call_on(device: Device) -> None:
    weight = make_weight()
    assert not keeps_planes(weight, SPLIT3)
    first = weight_planes(weight, SPLIT3)
    assert cutfuse.plane_memory() == 0
    assert keeps_planes(weight, SPLIT3)
    second = weight_planes(weight, SPLIT3)
    assert second is not first
    assert cutfuse.plane_memory() == NBYTES
    assert all(weight_planes(weight, SPLIT3) is second for _ in range(3))
    assert device.splits == 2
    assert is_current(second, weight)


def test_views_keep_planes_as_their_weight_does(device: Device) -> None:
    weight = make_weight()
    for _ in range(4):
        weight_planes(weight.t(), SPLIT3)
    assert device.splits == 2
    assert cutfuse.plane_memory() == NBYTES


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Change) -> None:
    layer = make_layer()
    before = keep(layer.weight).memory
    change(layer)
    assert not torch.equal(before, layer.weight), "the case changes nothing"
    assert not keeps_planes(layer.weight, SPLIT3)
    assert is_current(weight_planes(layer.weight, SPLIT3), layer.weight)
    assert is_current(keep(layer.weight), layer.weight)
    CHANGES["in place"](layer)
    assert is_current(weight_planes(layer.weight, SPLIT3), layer.weight)


@pytest.mark.parametrize(
    "part",
    [lambda flat: flat[1], lambda flat: flat[0].t(), lambda flat: flat[0, :4]],
    ids=["offset", "strides", "shape"],
)
def test_other_data_in_the_same_storage_is_seen(part: Callable[[Tensor], Tensor]) -> None:
    flat = torch.randn(2, 8, 8)
    weight = flat[0].detach()
    keep(weight)
    weight.data = part(flat)
    assert is_current(weight_planes(weight, SPLIT3), weight)


@pytest.mark.parametrize("name", ["in place", "SGD", "other data"])
def test_a_change_before_the_second_call_is_seen(name: str) -> None:
    layer = make_layer()
    weight_planes(layer.weight, SPLIT3)
    CHANGES[name](layer)
    assert is_current(weight_planes(layer.weight, SPLIT3), layer.weight)
    assert cutfuse.plane_memory() == 0
    assert is_current(keep(layer.weight), layer.weight)


@pytest.mark.parametrize("plan", [SPLIT3, SPLIT6])
def test_a_change_is_seen_for_every_plan_and_stream(plan: int, device: Device) -> None:
    weight = make_weight()
    for device.stream in (1, 2):
        keep(weight, plan)
    weight.neg_()
    keep(weight, SPLIT3)
    for device.stream in (1, 2):
        assert is_current(weight_planes(weight, plan), weight)


def test_a_change_of_the_base_is_seen_by_its_views() -> None:
    base = make_weight()
    view, transposed = base[1:5], base.t()
    keep(view), keep(transposed)
    base.neg_()
    assert is_current(weight_planes(view, SPLIT3), view)
    assert is_current(weight_planes(transposed, SPLIT3), transposed)


def test_fused_optimisers_need_the_hook() -> None:
    """Without it the versions would do: then the steps need no count."""
    layer = make_layer()
    version = layer.weight._version
    CHANGES["optimiser that writes through data"](layer)
    assert layer.weight._version == version


def test_every_step_is_counted_once() -> None:
    weight = make_weight()
    weight_planes(weight, SPLIT3)
    weight_planes(weight, SPLIT3)
    optimizer = WritesThroughData([nn.Parameter(make_weight())])
    steps = planes._optimizer_steps
    for _ in range(3):
        optimizer.step()
    assert planes._optimizer_steps == steps + 3


def test_data_at_the_same_addresses_is_seen() -> None:
    """Storages come and go, their addresses again and again: those of a weight that is known are not given out."""
    weight = make_weight()
    for value in range(100):
        keep(weight)
        weight.data = torch.empty(0)
        weight.data = torch.full((ROWS, COLUMNS), float(value))
        assert is_current(weight_planes(weight, SPLIT3), weight)


def test_a_freed_storage_is_seen(device: Device) -> None:
    weight = make_weight()
    keep(weight)
    splits, storage = device.splits, weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    keeps, _ = keeps_planes(weight, SPLIT3), weight_planes(weight, SPLIT3)
    storage.resize_(size)  # a failing assertion prints the weight
    assert not keeps
    assert device.splits == splits + 1


def test_another_tensor_of_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "id", lambda weight: 7, raising=False)
    first, second = make_weight(), -make_weight()
    keep(first)
    assert is_current(weight_planes(second, SPLIT3), second)
    assert is_current(keep(second), second)
    assert is_current(weight_planes(first, SPLIT3), first)


def test_ids_that_are_given_out_again() -> None:
    ids, count = set(), 200
    for value in range(count):
        weight = torch.full((ROWS, COLUMNS), float(value))
        ids.add(id(weight))
        assert not keeps_planes(weight, SPLIT3)
        assert is_current(weight_planes(weight, SPLIT3), weight)
        assert is_current(keep(weight), weight)
        del weight
    assert len(ids) < count
    assert not planes._entries


def test_copies_have_planes_of_their_own() -> None:
    layer = make_layer()
    kept = keep(layer.weight)
    other = copy.deepcopy(layer)
    assert not keeps_planes(other.weight, SPLIT3)
    assert keep(other.weight) is not kept
    with torch.no_grad():
        other.weight.neg_()
    assert weight_planes(layer.weight, SPLIT3) is kept
    assert is_current(weight_planes(other.weight, SPLIT3), other.weight)


def run_backward(layer: nn.Linear) -> None:
    """Twice, so that gradients accumulate."""
    for _ in range(2):
        layer(torch.ones(3, COLUMNS)).square().sum().backward()


UNCHANGED: dict[str, Change] = {
    "read": lambda layer: layer(torch.ones(3, COLUMNS)).sum().item(),
    "backward": run_backward,
    "gradient cleared": lambda layer: layer.zero_grad(),
    "frozen": lambda layer: layer.requires_grad_(False),
    "evaluated": lambda layer: layer.eval(),
    "to its own type": lambda layer: layer.to(torch.float32),
    "saved": lambda layer: copy.deepcopy(layer.state_dict()),
    "looked at": lambda layer: (layer.weight.t(), layer.weight.data, layer.weight.detach(), layer.weight[1:]),
}


@pytest.mark.parametrize("use", UNCHANGED.values(), ids=UNCHANGED)
def test_what_does_not_change_the_weight_keeps_its_planes(use: Change) -> None:
    layer = make_layer()
    kept = keep(layer.weight)
    use(layer)
    assert keeps_planes(layer.weight, SPLIT3)
    assert weight_planes(layer.weight, SPLIT3) is kept


def test_inference_tensors_keep_nothing(device: Device) -> None:
    with torch.inference_mode():
        weight = torch.randn(ROWS, COLUMNS)
    for call in range(4):
        with torch.inference_mode():
            weight.neg_()  # no version counts it
        assert not keeps_planes(weight, SPLIT3)
        assert is_current(weight_planes(weight, SPLIT3), weight)
        assert device.splits == call + 1
    assert cutfuse.plane_memory() == 0


def test_inference_mode_keeps_planes_of_other_tensors() -> None:
    weight = make_weight()
    with torch.inference_mode():
        kept = keep(weight)
    assert weight_planes(weight, SPLIT3) is kept


def test_nothing_is_kept_while_capturing(device: Device) -> None:
    weight = make_weight()
    device.is_capturing = True
    for _ in range(4):
        assert not keeps_planes(weight, SPLIT3)
        weight_planes(weight, SPLIT3)
    assert device.splits == 4
    assert cutfuse.plane_memory() == 0
    device.is_capturing = False
    assert not keeps_planes(weight, SPLIT3)
    keep(weight)


def test_kept_planes_are_not_used_while_capturing(device: Device) -> None:
    """The graph has to split the weight as it is when it is replayed."""
    weight = make_weight()
    kept = keep(weight)
    device.is_capturing = True
    assert not keeps_planes(weight, SPLIT3)
    captured = weight_planes(weight, SPLIT3)
    assert captured is not kept
    device.is_capturing = False
    assert weight_planes(weight, SPLIT3) is kept
    assert cutfuse.plane_memory() == NBYTES


def test_forget_planes_sees_what_no_version_counts() -> None:
    weights = [make_weight(), make_weight()]
    for weight in weights:
        keep(weight)
        weight.data.neg_()
    cutfuse.forget_planes()
    assert cutfuse.plane_memory() == 0
    for weight in weights:
        assert not keeps_planes(weight, SPLIT3)
        assert is_current(weight_planes(weight, SPLIT3), weight)
        assert is_current(keep(weight), weight)


def test_weights_may_go_after_forget_planes() -> None:
    weight = make_weight()
    keep(weight)
    cutfuse.forget_planes()
    keep(weight)
    cutfuse.forget_planes()
    del weight
    gc.collect()
    other = make_weight()
    keep(other)
    assert len(planes._entries) == 1


def test_every_stream_has_planes_of_its_own(device: Device) -> None:
    """Nothing orders one stream's reads after another one's split."""
    weight = make_weight()
    device.stream = 1
    kept = keep(weight)
    device.stream = 2
    other = weight_planes(weight, SPLIT3)
    assert other is not kept
    assert weight_planes(weight, SPLIT3) is other
    device.stream = 1
    assert weight_planes(weight, SPLIT3) is kept
    assert cutfuse.plane_memory() == 2 * NBYTES


def test_every_plan_has_planes_of_its_own() -> None:
    weight = make_weight()
    of_split3, of_split6 = keep(weight, SPLIT3), keep(weight, SPLIT6)
    assert of_split3 is not of_split6
    assert weight_planes(weight, SPLIT3) is of_split3
