"""A `FusedLinear` whose outputs are divided among two processes by the functions of docs/modules.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from documents import ROOT, blocks_of, pages

WORLD = 2
SCRIPT = """
import sys

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
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
dist.destroy_process_group()
"""


def recipe() -> str:
    """The functions of the page, and the imports above them."""
    blocks = blocks_of(ROOT / "docs" / "modules.md")
    (functions,) = (block.code for block in blocks if "def column_wise(" in block.code)
    return f"import torch\nfrom torch import Tensor, nn\n\nimport cutfuse\n{functions}"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.skipif(not pages(), reason="the documentation is only in the source tree")
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", recipe() + SCRIPT]
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
        assert "only support nn.Linear and nn.Embedding" in out
