"""A device on the CPU for the tests of prepared weights: its planes are copies, and its products read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cutfuse import native
from cutfuse.ops import composed, cpu, cuda, gemm, planes, prepared, schema, split
from cutfuse.ops.gemm import Result
from cutfuse.ops.planes import SPLIT6, Layout, Planes
from cutfuse.ops.switch import use_operators_everywhere

ROWS, COLUMNS = 6, 8
NBYTES = ROWS * COLUMNS * 4  # of one weight, and of its planes in split3
DEFAULT = 0


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.cuda_stream = handle

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def synchronize(self) -> None:
        self.device.log.append(f"host waits for {self.cuda_stream}")


class Device:
    """What is asked of a GPU: `log` has the splits and what orders them, `products` how the weight of each came."""

    def __init__(self) -> None:
        self.stream = DEFAULT
        self.is_capturing = False
        self.log: list[str] = []
        self.products: list[str] = []
        self.recorded: list[int] = []  # streams on which planes were used, as the allocator is told

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream.cuda_stream
        yield
        self.stream = before

    def split_weight(self, weight: Tensor, plan: int) -> Planes:
        """A copy, so that stale planes are told from new ones."""
        self.log.append(f"split{plan} on {self.stream}")
        values = weight.detach().contiguous().clone().flatten()
        memory = torch.cat([values, values[: values.numel() // 2]]) if plan == SPLIT6 else values
        return Planes(plan, Layout(weight.shape[1], 0, memory.nbytes, 0, 0), memory.view(torch.uint8))

    def run_split(self, result: Result, mode: str, kept: Planes | None = None) -> Tensor:
        """The product by the weight's kept planes where the mode takes them, and by the weight elsewhere."""
        weight = result.weight
        if kept is not None and self.takes(kept, mode):
            weight = kept.memory.view(torch.float32)[: weight.numel()].view(weight.shape)
        self.products.append("weight" if weight is result.weight else "planes")
        if not result.reduces:
            return composed.linear(result.x, weight, result.bias, result.operands, result.program, result.out_dtype)
        return composed.linear_reduce(
            result.x, weight, result.bias, result.operands, result.program, result.reduction, result.out_dtype
        )

    def explain_split(self, result: Result, mode: str, kept: Planes | None = None) -> tuple[str, list[str]]:
        return "kernel", [split.KEEPS if self.takes(kept, mode) else "the weight is split"]

    def takes(self, kept: Planes | None, mode: str) -> bool:
        return kept is not None and kept.plan == split.kept_plan(mode)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """CPU tensors are on a device with kernels over planes, and calls take the operators' CUDA implementations."""
    fake = Device()
    monkeypatch.setattr(gemm, "why_not_hopper", lambda x: "")
    monkeypatch.setattr(native, "serves", lambda device: True)
    monkeypatch.setattr(prepared, "split_weight", fake.split_weight)
    monkeypatch.setattr(prepared, "stream_of", lambda index: fake.stream)
    monkeypatch.setattr(planes, "layout_of", lambda *_: None)
    monkeypatch.setattr(split, "run_split", fake.run_split)
    monkeypatch.setattr(split, "explain_split", fake.explain_split)
    # What is not multiplied over planes is so by cuBLAS.
    monkeypatch.setattr(gemm, "run_gemm", lambda result: None)
    monkeypatch.setattr(gemm, "explain_gemm", lambda result: (None, []))
    monkeypatch.setattr(cuda, "pointwise", lambda *arguments, in_place: cpu.pointwise(*arguments))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", fake.on_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index=None: Stream(fake, DEFAULT))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: Stream(fake, fake.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: fake.recorded.append(stream.cuda_stream))
    for name in ("linear", "linear_reduce"):
        monkeypatch.setattr(schema, name, getattr(cuda, name))
    with use_operators_everywhere():
        yield fake


def make_layer() -> nn.Linear:
    """Its weight is [ROWS, COLUMNS]."""
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def make_weight() -> Tensor:
    """Without a gradient."""
    return make_layer().weight.detach().clone()
