"""A model in DistributedDataParallel, on two processes: values and gradients are PyTorch's, and regions are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

WORLD = 2
# Each layer is larger than a bucket, so that DDP reduces their gradients one by one, and Dynamo splits the graph there.
SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel

from cutfuse.compile import fusion, model
from cutfuse.native import use_operators_everywhere

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
reports, fuse = [], fusion.fuse


def collect(module):
    found = fuse(module)
    reports.append(found)
    return found


fusion.fuse = collect
aot_eager.config = {}  # the settings that Inductor would compile under
model._inductor = lambda mode, options: aot_eager  # which takes a tenth of the time


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 512), nn.Linear(512, 600), nn.Linear(600, 512)

    def forward(self, x):
        return F.relu(self.third(F.silu(self.second(F.gelu(self.first(x))))))


def train(backend):
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Model(), bucket_cap_mb=1)
    compiled = torch.compile(wrapped, backend=backend) if backend else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    values = []
    for _ in range(3):
        y = compiled(x)
        y.square().mean().backward()
        values += [y.detach().clone(), *(parameter.grad.clone() for parameter in wrapped.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return values


with use_operators_everywhere():
    torch.testing.assert_close(train("cutfuse"), train(None), rtol=1e-4, atol=1e-5)
programs = [product.program for found in reports for product in found]
print(f"{len(reports) > 1} {sorted(programs)}")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=tmp_path, **pipes) for rank in range(WORLD)
    ]
    try:
        finished = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, finished, strict=True):
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == "True ['gelu(z)', 'relu(z)', 'silu(z)']", error
