"""What a direct call allocates and launches: the same as the general path, address by address."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import READERS, core, direct_calls, emulated_device, paused
from emulated_launches import RecordedLaunches
from torch import Tensor

import cutfuse
from cutfuse.epilogue import Epilogue
from cutfuse.layer import calls, cuda

STREAM = 7


class Allocations:
    """Memory by the order in which it was asked for, apart from that of the call's tensors."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        self.given = given
        self.made: list[Tensor] = []

    def noted(self, empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **settings: Any) -> Tensor:
            self.made.append(empty(*arguments, **settings))
            return self.made[-1]

        return allocate

    @property
    def sizes(self) -> list[int]:
        return [tensor.nbytes for tensor in self.made]

    def placed(self, value: Any) -> Any:
        """With each address in these tensors as the tensor's name and an offset into it."""
        if isinstance(value, tuple | list):
            return [self.placed(item) for item in value]
        if type(value) is not int or value < 1 << 20:
            return value
        for name, tensor in (*self.given.items(), *enumerate(self.made)):
            if 0 <= value - tensor.data_ptr() < max(tensor.untyped_storage().nbytes(), 1):
                return name, value - tensor.data_ptr()
        return "elsewhere"


def described(launches: RecordedLaunches, allocations: Allocations) -> list[dict[str, Any]]:
    """Programs and problems, of which each launch has objects of its own, by what they say."""
    result = []
    for launch in launches.launches:
        fields = {name: allocations.placed(value) for name, value in vars(launch).items()}
        program = fields.pop("program", None)
        fields["program"] = None if program is None else (len(program), program.operand_count, program.cost)
        fields["problem"] = repr(fields.get("problem"))
        result.append(fields)
    return result


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
    x, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    operands = [torch.zeros(m, n, dtype=dtype) for _ in range(count)]
    epilogue: Callable[..., Tensor] = (lambda z, r: torch.relu(z) + r) if count else torch.relu
    given = {"x": x, "weight": weight, "bias": bias, **{f"operand {i}": t for i, t in enumerate(operands)}}
    functions = {"current_stream": lambda index: STREAM, "exchange_api": None} if reader == "attributes" else {}
    program = Epilogue(epilogue, count).program.text
    allocate = calls.torch_functions(calls.CPU)["empty_strided"]
    with cutfuse.precision(mode) if mode else contextlib.nullcontext():
        general, expected = Allocations(given), RecordedLaunches()
        with emulated_device(reader, expected, empty_strided=general.noted(allocate), **functions), paused():
            y = cuda.linear_reduce(x, weight, bias, operands, program, reduction or "none", dtype)
        general.made.append(y)
        made, launches = Allocations(given), RecordedLaunches()
        with emulated_device(reader, launches, empty_strided=made.noted(allocate), **functions):
            cutfuse.linear(x, weight, bias, epilogue=epilogue, operands=operands, reduce=reduction)
            made.made.clear()
            launches.launches.clear()
            before = direct_calls()
            made.made.append(core.call_linear(x, weight, bias, epilogue, operands, reduction, False, None))
            assert direct_calls() == before + 1
    assert described(launches, made) == described(expected, general)
    assert launches.names == names
    assert sorted(made.sizes) == sorted(general.sizes)
