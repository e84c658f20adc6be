"""Models on two processes: in DistributedDataParallel, and divided among them; values and gradients are PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from documents import ROOT, blocks_of, pages

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")

BEFORE = """
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import cutfuse

rank, file, transport = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(transport, init_method=f"file://{file}", rank=rank, world_size=2)
"""
# Each layer is larger than a bucket, so that DDP reduces their gradients one by one, and Dynamo splits the graph there.
SCRIPT = """
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel

from cutfuse.compile import fusion, model
from cutfuse.native import use_operators_everywhere

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
"""


def run_processes(script: str, folder: Path, transport: str = "gloo") -> list[str]:
    """What each of two processes prints, which meet before the script and part behind it."""
    program = f"{BEFORE}\n{script}\ndist.destroy_process_group()"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(folder / "store"), transport], cwd=folder, **pipes
        )
        for rank in range(2)
    ]
    try:
        finished = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, finished, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in finished]


def test_ddp(tmp_path: Path) -> None:
    for out in run_processes(SCRIPT, tmp_path):
        assert out.splitlines()[-1] == "True ['gelu(z)', 'relu(z)', 'silu(z)']"


# A `FusedLinear` whose outputs are divided among two processes by the functions of docs/modules.md.


SHARDED_SCRIPT = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))


def check(epilogue, *operands):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 4)})
    x, *given = [value() if callable(value) else value for value in (lambda: torch.randn(3, 6), *operands)]
    x.requires_grad_()
    expected = plain.down(epilogue(plain.up(x), *given))
    wanted = torch.autograd.grad(expected.square().sum(), [x, *plain.parameters()])
    model = nn.ModuleDict({"up": cutfuse.nn.FusedLinear(6, 8, epilogue=epilogue), "down": nn.Linear(8, 4)})
    model.load_state_dict(plain.state_dict())
    column_wise(model.up, mesh)
    parallelize_module(model, mesh, {"down": RowwiseParallel()})
    hidden = model.up(x, *given)
    assert hidden.shape == (3, 4), hidden.shape
    y = model.down(hidden)
    torch.testing.assert_close(y, expected)
    actual = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in actual]
    torch.testing.assert_close(whole, list(wanted))


check(F.gelu)
check(lambda z, r, s: torch.relu(z) * s + r, lambda: torch.randn(3, 8), 0.5)
check(torch.mul, lambda: torch.randn(8))
try:
    parallelize_module(cutfuse.nn.FusedLinear(6, 8), mesh, ColwiseParallel())
except NotImplementedError as error:
    print(error)
"""


def recipe() -> str:
    """The functions of the page."""
    blocks = blocks_of(ROOT / "docs" / "modules.md")
    (functions,) = (block.code for block in blocks if "def column_wise(" in block.code)
    return functions


@pytest.mark.skipif(not pages(), reason="the documentation is only in the source tree")
def test_tensor_parallel(tmp_path: Path) -> None:
    for out in run_processes(recipe() + SHARDED_SCRIPT, tmp_path):
        assert "only support nn.Linear and nn.Embedding" in out


# A head whose vocabulary is divided among two processes, in parts that differ.
HEAD_SCRIPT = """
import itertools

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cutfuse import head

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
tensors = [torch.randn(*shape) for shape in ((2, 6, 16), (301, 16), (301,))]
target = torch.randint(301, (2, 6))
target[0, :2] = torch.tensor([-100, 300])
rows = []
statistics = head.logit_statistics


def counted(x, weight, *given):
    rows.append(weight.shape[0])
    return statistics(x, weight, *given)


head.logit_statistics = counted


def loss(x, weight, bias, target, softcap, smoothing):
    options = {"softcap": softcap, "temperature": 0.7}
    found = cutfuse.linear_cross_entropy(x, weight, target, bias, label_smoothing=smoothing, z_loss=1e-3, **options)
    logprob, entropy = cutfuse.linear_logprob(x, weight, target.clamp(min=0), bias, entropy=True, **options)
    return found + (logprob * 0.3 + entropy).mean()


for placement, softcap, smoothing in itertools.product((Replicate(), Shard(1)), (None, 3.0), (0.0, 0.1)):
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = loss(*plain, target, softcap, smoothing)
    wanted = torch.autograd.grad(expected, plain)
    rows.clear()
    places = (placement, Shard(0), Shard(0))
    own = [distribute_tensor(t, mesh, [place]).requires_grad_() for t, place in zip(tensors, places, strict=True)]
    given = distribute_tensor(target, mesh, [placement]) if softcap else target
    found = loss(*own, given, softcap, smoothing)
    torch.testing.assert_close(found, expected)
    gradients = [gradient.full_tensor() for gradient in torch.autograd.grad(found, own)]
    torch.testing.assert_close(gradients, list(wanted))
    assert rows == [151 - rank] * 2, rows
try:
    cutfuse.linear_cross_entropy(own[0], own[1], target + 2)
except RuntimeError as error:
    print(error)
"""


def test_a_sharded_vocabulary(tmp_path: Path) -> None:
    for out in run_processes(HEAD_SCRIPT, tmp_path):
        assert "a target is no class of the vocabulary, nor the one that is ignored" in out
