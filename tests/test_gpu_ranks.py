"""Layers on two GPUs: sharded by FSDP2 over two processes, and replicated by threads; beside PyTorch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_model_ddp import run_processes
from torch import Tensor, nn

import cutfuse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHARDED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DTYPE = torch.{dtype}
torch.cuda.set_device(rank)
TOLERANCE = {{torch.float32: 1e-4, torch.bfloat16: 3e-2}}[DTYPE]


class Model(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own
        self.fc = cutfuse.nn.FusedLinear(96, 104, epilogue=F.silu) if own else nn.Linear(96, 104)
        self.mlp = cutfuse.nn.MLP(104, 320, residual=True) if own else nn.ModuleDict(
            {{"fc1": nn.Linear(104, 320), "fc2": nn.Linear(320, 104)}}
        )
        self.head = cutfuse.nn.LinearCrossEntropy(104, 1003) if own else nn.Linear(104, 1003, bias=False)

    def forward(self, x, target):
        if self.own:
            return self.head(self.mlp(self.fc(x)), target)
        y = F.silu(self.fc(x))
        y = self.mlp["fc2"](F.gelu(self.mlp["fc1"](y))) + y
        return F.cross_entropy(self.head(y).float(), target)


def train(own, compiled=False):
    torch.manual_seed(0)
    model = Model(own).cuda()
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    for layer in (model.fc, model.head, model):
        fully_shard(layer, mp_policy=policy)
    call = torch.compile(model, backend="cutfuse") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(4):
        x = torch.randn(72, 96, generator=generator).cuda()
        loss = call(x, torch.randint(1003, (72,), generator=generator).cuda())
        loss.backward()
        found.append([loss.detach().float(), *(p.grad.full_tensor() for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return found


expected = train(False)
for found in (train(True), train(False, compiled=True)):
    for step, expected_step in zip(found, expected):
        for got, wanted in zip(step, expected_step):
            error = (got - wanted).norm() / wanted.norm()
            assert error < TOLERANCE, (error, got.shape)
print("right")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_sharded_over_two_devices(dtype: str, tmp_path: Path) -> None:
    for out in run_processes(SHARDED.format(dtype=dtype), tmp_path, "nccl"):
        assert out.splitlines()[-1] == "right"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_threads_replicate_on_two_devices(dtype: torch.dtype) -> None:
    model = nn.Sequential(cutfuse.nn.FusedLinear(96, 320, epilogue=torch.tanh), cutfuse.nn.MLP(320, 512))
    model = model.to("cuda", dtype)
    x = torch.randn(130, 96, device="cuda", dtype=dtype)

    def step(call: nn.Module) -> list[Tensor]:
        y = call(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]

    expected = step(model)
    for _ in range(3):
        torch.testing.assert_close(step(nn.DataParallel(model)), expected, rtol=2e-2, atol=2e-2)
