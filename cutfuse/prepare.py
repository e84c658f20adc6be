"""A weight that is split once, instead of in every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments, dynamo, native
from .layer import planner
from .layer.prepared import Prepared, check_unchanged, make_planes, refuse_changed, take_snapshot
from .precision import SPLIT_MODES, checked_mode, product_mode


class PreparedWeight:
    """What `prepare` returns: `cutfuse.linear` takes it in the weight's place.

    weight: the tensor itself, to which gradients flow. mode: the precision that it is prepared for. without_planes: why
    it has no planes, so that calls take the weight itself; empty where it has them. for_operators: what cutfuse's
    operators take beside the weight, of no use otherwise.
    """

    def __init__(self, weight: Tensor, mode: str) -> None:
        self.weight = weight
        self.mode = mode
        self.without_planes = _why_no_planes(weight, mode)  # the reason; empty where there are planes
        scheme = 0 if self.without_planes else planner.first_scheme(mode)
        planes = make_planes(weight, scheme) if scheme else None
        self._snapshot = take_snapshot(weight)
        self._address = weight.data_ptr()
        self.for_operators = Prepared(self._snapshot, planes, scheme)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the planes take, beside the weight's own; 0 where there are none."""
        planes = self.for_operators.planes
        return 0 if planes is None else planes.nbytes

    def check(self) -> None:
        """Raises RuntimeError where the weight has changed since."""
        check_unchanged(self.weight, self._snapshot)
        if self.weight.data_ptr() != self._address:  # of the weight and of its alias
            refuse_changed(self.weight.shape, "its storage was freed or resized")

    def __repr__(self) -> str:
        dtype = str(self.weight.dtype).removeprefix("torch.")
        kept = f"no planes: {self.without_planes}" if self.without_planes else f"planes of {self.nbytes} bytes"
        return f"PreparedWeight({list(self.weight.shape)} {dtype} on {self.weight.device}, {self.mode!r}, {kept})"

    def __reduce__(self) -> tuple[Any, ...]:
        return prepare, (self.weight, self.mode)


def prepare(weight: Tensor, mode: str | None = None) -> PreparedWeight:
    """A weight whose 16-bit parts are made now and kept: `cutfuse.linear` takes it in the weight's place.

    Products of fp32 matrices in "guarded", "split3" and "split6" (see `cutfuse.precision`) split the weight in every
    call. Its planes, which hold these parts, spare them that. They take as much memory as the weight, half as much
    again for "split6": `nbytes` tells how much, and it is free again once nothing refers to the object. What "guarded"
    runs in split3's place seldom runs, and splits the weight itself, as do the products of a backward pass.

    Wherever there are no planes (other types and devices, "ieee" and "tf32") and wherever a call has no use for them,
    a prepared weight means the weight itself, so that code need not ask. `repr` and `cutfuse.explain` tell.

    A call raises RuntimeError where the weight has changed since: it was written in place, an optimiser's step among
    such writes, or it lies in other memory, by an assignment to `.data`, by `set_` or on another device. Some writes
    PyTorch does not count: those in place through `.data`, of fused optimisers' steps, of `torch.distributed`'s
    broadcast and all_reduce, of a CUDA graph's replay, and to tensors made in inference mode. Call `prepare` again
    after them.

    Gradients flow to the weight as usual. Compiled functions take what is prepared outside of them. A call that a CUDA
    graph captures reads the planes in each replay, which checks nothing: keep the object as long as the graph, and
    capture again after preparing again. `copy.deepcopy` and `pickle` copy the weight, and make the planes of the copy.

    Args:
        weight: `[N, K]` in fp64, fp32, bf16 or fp16, on any device and of any strides.
        mode: the precision to prepare for; the one that holds now by default.

    Returns:
        The prepared weight. Its planes are complete, for calls on every stream: the host waits for them.

    Raises:
        ValueError: `weight` has another number of dimensions, or `mode` is no precision.
        TypeError: it is not dense or of another type, or a tensor that wraps others (DTensor).
        RuntimeError: a CUDA graph is being captured.
    """
    return _prepared(weight, mode)


@dynamo.disable_because("cutfuse.prepare splits a weight: call it before what is compiled")
def _prepared(weight: Tensor, mode: str | None) -> PreparedWeight:
    arguments.check_tensor("prepare", "weight", weight)
    arguments.check_floating("prepare", "weight", weight.dtype)
    if weight.dim() != 2:
        raise ValueError(f"cutfuse.prepare: weight has to be [N, K], got shape {tuple(weight.shape)}")
    if arguments.is_wrapper(type(weight)):
        raise TypeError(
            f"cutfuse.prepare: weight is a {type(weight).__name__}, which wraps other tensors; prepare the local tensor"
        )
    with torch.inference_mode(False):  # outside of it autograd and compilers refuse its tensors
        return PreparedWeight(weight, product_mode(checked_mode(mode) or ""))


def is_exporting() -> bool:
    """Whether torch.export runs the call, but for its strict mode: there Dynamo of PyTorch 2.8 answers True always."""
    return not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()


def _why_no_planes(weight: Tensor, mode: str) -> str:
    if mode not in SPLIT_MODES:
        return f'precision "{mode}" takes the weight as it is'
    if weight.dtype != torch.float32:
        return f"planes are of float32 matrices, not of {weight.dtype}"
    elsewhere = planner.why_no_kernels(weight.device)
    if elsewhere or not weight.numel():
        return elsewhere or "it has no elements"
    return "" if native.serves(weight.device) else native.why_unserved(weight.device)
