"""Which planes a weight keeps between calls, and when they are made again: with a split that copies, on the CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from plane_cases import CHANGES, Change, WritesThroughData
from torch import Tensor, nn

import cutfuse
from cutfuse.ops import planes
from cutfuse.ops.planes import SPLIT3, SPLIT6, Planes, keeps_planes, weight_planes

ROWS, COLUMNS = 6, 8
NBYTES = ROWS * COLUMNS * 4  # of the planes that a copy makes of one weight


class Device:
    """What the module asks of a GPU."""

    def __init__(self) -> None:
        self.splits = 0
        self.stream = 0
        self.memory = 1 << 30
        self.is_capturing = False

    def split(self, matrix: Tensor, plan: int, only_if: Sequence[Planes] = ()) -> Planes:
        """Planes that are a copy, so that stale ones are told from new ones; none of a storage that was freed."""
        self.splits += 1
        values = matrix.detach().clone() if matrix.untyped_storage().nbytes() else torch.empty(0)
        rows, columns = matrix.shape
        return Planes(plan, rows, columns, values, torch.empty(0), torch.empty(0, dtype=torch.int32))


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device of 1 GiB, and nothing kept before and after."""
    fake = Device()
    monkeypatch.setattr(planes, "split", fake.split)
    monkeypatch.setattr(planes, "stream_of", lambda index: fake.stream)
    monkeypatch.setattr(planes, "_device_memory", lambda index: fake.memory)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(planes, "_fraction", 0.25)
    gc.collect()
    cutfuse.forget_planes()
    yield fake
    cutfuse.forget_planes()


def make_layer() -> nn.Linear:
    """Its weight is [ROWS, COLUMNS]."""
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def make_weight() -> Tensor:
    """Without a gradient."""
    return make_layer().weight.detach().clone()


def keep(weight: Tensor, plan: int = SPLIT3) -> Planes:
    """The planes that a weight keeps, after the two calls that it takes."""
    weight_planes(weight, plan)
    kept = weight_planes(weight, plan)
    assert weight_planes(weight, plan) is kept, "not kept"
    return kept


def is_current(found: Planes, weight: Tensor) -> bool:
    """Whether the planes are of the weight as it is now."""
    return torch.equal(found.values, weight.detach())


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
    before = keep(layer.weight).values
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


@pytest.mark.parametrize(("room", "count"), [(0, 0), (NBYTES - 1, 0), (NBYTES, 1), (2 * NBYTES, 2), (3 * NBYTES, 2)])
def test_memory_limit_holds(room: int, count: int, device: Device) -> None:
    device.memory = 4 * room
    weights = [make_weight(), make_weight()]
    for _ in range(3):
        for weight in weights:
            assert is_current(weight_planes(weight, SPLIT3), weight)
    assert cutfuse.plane_memory() == count * NBYTES


def test_memory_limit_counts_all_plans_and_streams(device: Device) -> None:
    device.memory = 4 * 3 * NBYTES
    weight = make_weight()
    for device.stream in (1, 2, 3):
        for plan in (SPLIT3, SPLIT6, SPLIT3, SPLIT6):
            weight_planes(weight, plan)
    assert cutfuse.plane_memory() == 3 * NBYTES


def test_memory_that_is_freed_is_given_to_the_next_weight(device: Device) -> None:
    device.memory = 4 * NBYTES
    first, second = make_weight(), make_weight()
    keep(first)
    weight_planes(second, SPLIT3)
    assert weight_planes(second, SPLIT3) is not weight_planes(second, SPLIT3)
    del first
    gc.collect()
    keep(second)


def test_set_plane_memory_moves_the_limit(device: Device) -> None:
    device.memory = NBYTES
    weight = make_weight()
    for _ in range(3):
        weight_planes(weight, SPLIT3)
    assert cutfuse.plane_memory() == 0
    cutfuse.set_plane_memory(1)
    keep(weight)


def test_set_plane_memory_to_nothing(device: Device) -> None:
    weight = make_weight()
    keep(weight)
    cutfuse.set_plane_memory(0)
    assert cutfuse.plane_memory() == 0
    assert not keeps_planes(weight, SPLIT3)
    splits = device.splits
    for _ in range(3):
        weight_planes(weight, SPLIT3)
    assert device.splits == splits + 3
    assert not planes._entries
    cutfuse.set_plane_memory(0.5)
    keep(weight)


@pytest.mark.parametrize("fraction", [-0.01, 1.01, float("nan"), float("inf")])
def test_set_plane_memory_out_of_bounds(fraction: float) -> None:
    weight = make_weight()
    kept = keep(weight)
    with pytest.raises(ValueError, match=rf"cutfuse: a fraction .* between 0 and 1, got {fraction}"):
        cutfuse.set_plane_memory(fraction)
    assert planes._fraction == 0.25
    assert weight_planes(weight, SPLIT3) is kept


@pytest.mark.parametrize("fraction", [1e-9, 0.25, 0.5, 1, 1.0])
def test_set_plane_memory_within_bounds(fraction: float) -> None:
    cutfuse.set_plane_memory(fraction)
    assert planes._fraction == fraction


def test_plane_memory_is_what_the_planes_take(device: Device) -> None:
    weights = [make_weight(), make_weight()[:3]]
    total = 0
    for weight in weights:
        for plan in (SPLIT3, SPLIT6):
            total += keep(weight, plan).nbytes
            assert cutfuse.plane_memory() == total
    weights[0].neg_()
    weight_planes(weights[0], SPLIT3)  # what it kept is of no use any more
    assert cutfuse.plane_memory() == 2 * weights[1].nbytes


def test_nbytes_counts_every_part() -> None:
    parts = torch.empty(2, 3, 64, dtype=torch.float16), torch.empty(1, 128), torch.empty(5, dtype=torch.int32)
    assert Planes(SPLIT3, 3, 64, *parts).nbytes == 2 * 3 * 64 * 2 + 128 * 4 + 5 * 4


def in_a_cycle(weight: Tensor) -> object:
    """Only the collector of cycles frees it."""
    holder: list[object] = [weight]
    holder.append(holder)
    return holder


@pytest.mark.parametrize("hold", [lambda weight: weight, in_a_cycle], ids=["alone", "in a cycle"])
def test_planes_go_with_the_weight(hold: Callable[[Tensor], object]) -> None:
    weight = make_layer().weight
    other = make_weight()
    keep(weight), keep(other)
    held = hold(weight)
    del weight
    gc.collect()
    assert cutfuse.plane_memory() == 2 * NBYTES
    del held
    gc.collect()
    assert cutfuse.plane_memory() == NBYTES
    assert keeps_planes(other, SPLIT3)
    assert len(planes._entries) == 1


def test_planes_do_not_keep_the_weight_s_memory() -> None:
    weight = make_weight()
    keep(weight)
    storage = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    assert not storage.expired()
    del weight
    assert storage.expired()


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
    assert (of_split3.plan, of_split6.plan) == (SPLIT3, SPLIT6)
    assert weight_planes(weight, SPLIT3) is of_split3
