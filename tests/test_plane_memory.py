"""How much memory kept planes take, and when they give it back: with a split that copies, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from plane_device import NBYTES, Device, is_current, keep, make_layer, make_weight
from torch import Tensor

import cutfuse
from cutfuse.ops import planes
from cutfuse.ops.planes import SPLIT3, SPLIT6, keeps_planes, weight_planes

pytestmark = pytest.mark.usefixtures("device")


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
            total += keep(weight, plan).memory.nbytes
            assert cutfuse.plane_memory() == total
    weights[0].neg_()
    weight_planes(weights[0], SPLIT3)  # what it kept is of no use any more
    assert cutfuse.plane_memory() == 2 * weights[1].nbytes


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
