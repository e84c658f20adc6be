"""Times the element kernel of the backward pass, interpreted and compiled, beside PyTorch's copy: for a GPU.

`python tests/backward_figures.py [ROWS COLUMNS]`
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutfuse
from cutfuse.layer import schema

REPEATS = 15


def six_light(z: Tensor) -> Tensor:
    v = F.leaky_relu(z * 1.5 + 0.25, 0.1)
    v = torch.clamp(v, -4.0, 4.0) * 0.75
    return F.hardswish(v)


def six_light_full(z: Tensor, a: Tensor) -> Tensor:
    v = torch.minimum(torch.relu(z * 1.5 + 0.25), a) * 0.75
    return F.hardswish(v)


CHAINS: dict[str, tuple[Callable[..., Tensor], int, list[int]]] = {
    "six Light ops": (six_light, 0, [0]),
    "six Light ops, a full operand": (six_light_full, 1, [0]),
    "six Light ops, a full operand and its gradient": (six_light_full, 1, [0, 1]),
    "gelu": (F.gelu, 0, [0]),
}


def seconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def report(name: str, dtype: torch.dtype, shape: tuple[int, int], copy_rate: float) -> None:
    function, operand_count, wanted = CHAINS[name]
    program = cutfuse.Epilogue(function, operand_count).program.text
    grad, x, *operands = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2 + operand_count))
    moved = (2 + operand_count + len(wanted)) * x.numel() * x.itemsize
    for column_sum in (False, True):
        results = {}
        for mode in ("off", "now"):
            cutfuse.set_specialization(mode)
            given = grad, x, operands, program, "none", None, wanted, column_sum
            call = functools.partial(schema.pointwise_backward, *given)
            results[mode] = call()
            duration = seconds(call)
            what = f"{name}{', column sums' if column_sum else ''}, {str(dtype)[6:]}, {mode}"
            print(f"{what:80} {duration * 1e6:8.1f} us  {moved / duration / copy_rate:.3f} of the copy rate")
        print("the same bits" if same_bits(results["off"], results["now"]) else "OTHER BITS")


def main() -> None:
    rows, columns = (int(number) for number in sys.argv[1:3] or (8192, 16384))
    for dtype in (torch.bfloat16, torch.float32):
        source = torch.randn(rows, columns, device="cuda").to(dtype)
        target = torch.empty_like(source)
        copied = 2 * source.numel() * source.itemsize
        copy_rate = copied / seconds(lambda target=target, source=source: target.copy_(source))
        print(f"{str(dtype)[6:]}: a copy at {copy_rate / 1e12:.2f} TB/s")
        for name in CHAINS:
            report(name, dtype, (rows, columns), copy_rate)


if __name__ == "__main__":
    main()
