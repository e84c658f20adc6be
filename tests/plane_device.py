"""A device on the CPU for the tests of prepared weights: its planes are copies, and its products read them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from cutfuse import composed, native
from cutfuse.layer import cuda, planner, prepared, schema
from cutfuse.layer.linear_plan import KEEPS, FusedExplanation, cublas_linear
from cutfuse.layer.planner import LinearArguments, first_scheme, plan_linear, precision_of
from cutfuse.layer.prepared import Planes
from cutfuse.native import use_operators_everywhere
from cutfuse.precision import SPLIT_MODES

if TYPE_CHECKING:
    from cutfuse._C import LinearPlan

ROWS, COLUMNS = 6, 8
SPLIT6 = int(native.module().SplitScheme.split6)
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

    def split_weight(self, weight: Tensor, scheme: int) -> Planes:
        """A copy, so that stale planes are told from new ones."""
        self.log.append(f"split{scheme} on {self.stream}")
        values = weight.detach().contiguous().clone().flatten()
        memory = torch.cat([values, values[: values.numel() // 2]]) if scheme == SPLIT6 else values
        return Planes(scheme, memory.view(torch.uint8))

    def plan_call(
        self, arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = ""
    ) -> SimpleNamespace | LinearPlan:
        """Products of fp32 matrices over planes are fused, of any size; others, of any type, are cuBLAS's."""
        precision = precision_of(arguments, captured_mode)
        if precision not in SPLIT_MODES:
            keeps_type = arguments.out_dtype == arguments.x.dtype
            types = {"x": arguments.x.float(), "out_dtype": torch.float32 if keeps_type else torch.bfloat16}
            return plan_linear(arguments._replace(**types), "ieee")
        reads = kept is not None and kept.scheme == first_scheme(precision)
        return SimpleNamespace(is_fused=True, reads_weight_planes=reads)

    def plan_linear_call(
        self, arguments: LinearArguments, kept: Planes | None = None, captured_mode: str = ""
    ) -> SimpleNamespace:
        """The product by the weight's planes where the plan reads them, and by the weight elsewhere."""
        x, weight, bias, operands, program, reduction, out_dtype, *_ = arguments
        plan = self.plan_call(arguments, kept, captured_mode)

        def run(*given: Any) -> Any:
            if not plan.is_fused:
                z = cublas_linear(x, weight, bias, captured_mode)
            elif plan.reads_weight_planes:
                assert kept is not None
                planes = kept.memory.view(torch.float32)[: weight.numel()].view(weight.shape)
                z = torch.nn.functional.linear(x, planes, bias)
            else:
                z = torch.nn.functional.linear(x, weight, bias)
            if plan.is_fused:
                self.products.append("planes" if plan.reads_weight_planes else "weight")
            y = composed.after_product(z, operands, program, reduction, out_dtype)
            return (y, z) if arguments.stores_pre_activation else y

        return SimpleNamespace(run=run)

    def explain_fused(self, arguments: LinearArguments, kept: Planes | None = None) -> FusedExplanation:
        if precision_of(arguments) not in SPLIT_MODES:
            return FusedExplanation([], [])
        plan = self.plan_call(arguments, kept)
        return FusedExplanation(["kernel", KEEPS if plan.reads_weight_planes else "the weight is split"], [])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """CPU tensors are on a device with kernels over planes, and calls take the operators' CUDA implementations."""
    fake = Device()
    monkeypatch.setattr(planner, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(planner, "device_facts", lambda device: (9, 0, 132))
    monkeypatch.setattr(native, "serves", lambda device: True)
    monkeypatch.setattr(prepared, "split_weight", fake.split_weight)
    monkeypatch.setattr(prepared, "stream_of", lambda index: fake.stream)
    monkeypatch.setattr(cuda, "plan_linear_call", fake.plan_linear_call)
    monkeypatch.setattr(importlib.import_module("cutfuse.explain"), "explain_fused", fake.explain_fused)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", fake.on_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index=None: Stream(fake, DEFAULT))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: Stream(fake, fake.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: fake.recorded.append(stream.cuda_stream))
    monkeypatch.setattr(schema, "linear", cuda.linear)
    with use_operators_everywhere():
        yield fake


def make_layer() -> nn.Linear:
    """Its weight is [ROWS, COLUMNS]."""
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=False)


def make_weight() -> Tensor:
    """Without a gradient."""
    return make_layer().weight.detach().clone()
