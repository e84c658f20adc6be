"""What a direct call launches and allocates: as much as on the general path, and to the same result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import READERS, directly, emulated_device, paused
from emulated_launches import EmulatedLaunches
from test_direct_calls import whole
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Epilogue
from cutfuse.layer import calls, cuda

SPLIT = ["split", "gemm_convert"]

# Rows, columns, depth, type, precision, reduction, number of operands; what is launched.
LAYERS = {
    "split3": (128, 256, 512, torch.float32, "split3", None, 0, SPLIT),
    "split6, in slices of K": (16, 64, 8192, torch.float32, "split6", None, 1, ["split", "split", "gemm_planes"]),
    "guarded": (128, 4096, 4096, torch.float32, "guarded", None, 0, SPLIT * 2),
    "guarded, reduced": (128, 4096, 4096, torch.float32, "guarded", "amax", 0, [*SPLIT * 2, "finalize_partials"]),
    "one kernel": (512, 2048, 64, torch.bfloat16, None, None, 1, ["gemm"]),
    "one kernel, reduced": (4096, 4104, 8, torch.bfloat16, None, "amax", 1, ["gemm", "finalize_partials"]),
    "cuBLAS and one more kernel": (16, 63, 64, torch.bfloat16, None, None, 1, ["pointwise"]),
    "cuBLAS and a reduction": (4, 65_537, 2, torch.bfloat16, None, "amax", 0, ["reduce"]),
    "cuBLAS and a reduction that are faster": (256, 256, 4096, torch.bfloat16, None, "amax", 1, ["reduce"]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_linear_layer(reader: str, layer: str) -> None:
    m, n, k, dtype, mode, reduction, count, names = LAYERS[layer]
    x, weight, bias = (whole(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    operands = [whole(m, n, dtype=dtype) for _ in range(count)]
    epilogue: Callable[..., Tensor] = (lambda z, r: torch.relu(z) + r) if count else torch.relu
    allocate = calls.torch_functions(calls.CPU)["empty_strided"]
    sizes: list[int] = []

    def noted(*arguments: Any) -> Tensor:
        tensor: Tensor = allocate(*arguments)
        sizes.append(tensor.nbytes)
        return tensor

    def made_by(call: Callable[[], Tensor]) -> tuple[Tensor, list[str], list[int]]:
        launches.launches.clear()
        sizes.clear()
        y = call()
        return y, launches.names, sorted(sizes)

    def layer() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)

    program, launches = Epilogue(epilogue, count).program.text, EmulatedLaunches()
    in_mode = cutfuse.precision(mode) if mode else contextlib.nullcontext()
    with in_mode, emulated_device(reader, launches, empty_strided=noted):
        layer()
        y, *found = directly(lambda: made_by(layer))
        with paused():
            expected, *general = made_by(
                lambda: cuda.linear(x, weight, bias, operands, program, reduction or "none", dtype)
            )
    assert found == general
    assert found[0] == names
    assert torch.equal(y, expected)
