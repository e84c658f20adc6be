"""A small run of every kernel, for compute-sanitizer: `compute-sanitizer --tool racecheck python tests/sanitize.py`.

Checks nothing itself but that results are finite and that each kernel of the GEMM table ran; pytest checks values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from fused_products import run_plan
from generators import REDUCTIONS
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Epilogue
from cutfuse.layer.call_plans import joined_call
from cutfuse.layer.planner import LinearArguments, layout_of, plan_joined, plan_linear
from cutfuse.layer.prepared import split_weight
from cutfuse.precision import GUARDED

SIX_OPS = Epilogue(lambda z, r, c: torch.clamp(torch.tanh(z) * r, -0.5, 0.5) + torch.sigmoid(z) / (c.abs() + 1))
CHAIN = Epilogue(lambda z: z + 2.0 * torch.sigmoid(z))


def main() -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    for mode in ("off", "now"):  # epilogues interpreted, and compiled in
        cutfuse.set_specialization(mode)
        launched = {name for dtype in (torch.bfloat16, torch.float16, torch.float32) for name in run_gemms(dtype)}
        launched |= set(run_planes()) | set(run_fp32()) | set(run_joined())
        assert launched == set(native.core.gemm_kernels()), set(native.core.gemm_kernels()) - launched
        run_pointwise_and_reductions()
    torch.cuda.synchronize()
    print(f"{len(launched)} GEMM kernels, with epilogues interpreted and compiled in, and all other kernels ran")


def run_gemms(dtype: torch.dtype) -> Iterator[str]:
    """Every row of the table for this type, on a ragged problem of a few tiles, and its name."""
    m, n, k = 200, 328, 136
    x, weight, bias, row, column = (
        torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (n, k), (n,), (1, n), (m, 1))
    )
    x_by_columns, by_columns = (matrix.t().contiguous().t() for matrix in (x, weight))
    layouts = [(x, weight, reduction) for reduction in ("none", *REDUCTIONS)]
    layouts += [(x, by_columns, "none"), (x_by_columns, by_columns, "none"), (x[:9], weight, "none")]
    for (rows, given, reduction), out_dtype in itertools.product(layouts, {dtype, torch.float32}):
        for epilogue, operands in ((SIX_OPS, (row, column[: len(rows)])), (CHAIN, ())):
            arguments = LinearArguments(rows, given, bias, operands, epilogue.program, reduction, out_dtype)
            *kernels, _ = plan_linear(arguments, "tf32").alternatives
            for name in (kernel.name for kernel in kernels if not kernel.rejection):
                check(run_plan(plan_linear(arguments, "tf32", only=name), arguments), name)
                yield name


def run_joined() -> Iterator[str]:
    """Every kernel of several weights, and its name."""
    for dtype in (torch.bfloat16, torch.float16):
        x, *weights = (torch.randn(rows, 136, device="cuda").to(dtype) for rows in (200, 256, 128, 384))
        biases = [None, *(torch.randn(len(weight), device="cuda").to(dtype) for weight in weights[1:])]
        layouts = layout_of(x).of_matrix, [layout_of(weight).of_matrix for weight in weights], dtype, x.device
        for way in plan_joined(*layouts).alternatives[:-1]:
            planned = joined_call(plan_joined(*layouts, only=way.name), x, weights, biases)
            check(planned.run([x, *weights, *biases[1:]], 1), way.name)
            yield way.name


def run_fp32() -> Iterator[str]:
    """Every fp32 kernel on CUDA cores, with vectors and without, storing z or not, and its name."""
    for m, n, k in ((200, 328, 136), (37, 71, 33)):
        x, weight, bias, row, column = (torch.randn(*s, device="cuda") for s in ((m, k), (n, k), (n,), (1, n), (m, 1)))
        x_by_columns, by_columns = (matrix.t().contiguous().t() for matrix in (x, weight))
        layouts = [(x, weight), (x, by_columns), (x_by_columns, by_columns)]
        for (rows, given), (epilogue, operands) in itertools.product(layouts, ((SIX_OPS, (row, column)), (CHAIN, ()))):
            arguments = LinearArguments(rows, given, bias, operands, epilogue.program, "none", torch.float32)
            for stores in (False, True):
                asked = arguments._replace(stores_pre_activation=stores)
                *kernels, _ = plan_linear(asked, GUARDED).alternatives
                for name in (kernel.name for kernel in kernels if "fp32" in kernel.name and not kernel.rejection):
                    found = run_plan(plan_linear(asked, GUARDED, only=name), asked)
                    for result in found if stores else [found]:
                        check(result, name)
                    yield name


def run_planes() -> Iterator[str]:
    """Every kernel over planes, on both sides of the guard, with an infinity, with K whole and in slices."""
    for k in (136, 1032):
        m, n = 200, 328
        weight, bias, row, column = (torch.randn(*shape, device="cuda") for shape in ((n, k), (n,), (1, n), (m, 1)))
        benign = torch.randn(m, k, device="cuda")
        wild = benign * torch.exp2(torch.randint(-20, 21, (1, k), device="cuda"))
        for x in (benign, wild, benign.index_fill(1, torch.tensor([7], device="cuda"), torch.inf)):
            for reduction in ("none", *REDUCTIONS):
                for given in (weight, with_odd_rows(weight)):  # the second is split by a pass of its own
                    operands = row, column
                    arguments = LinearArguments(x, given, bias, operands, SIX_OPS.program, reduction, torch.float32)
                    ways = [way.name for way in plan_linear(arguments, GUARDED).alternatives]
                    over_planes = [name for name in ways if "convert" in name or "split" in name]
                    wanted = next(name for name in over_planes if ("convert" in name) == (given is weight))
                    plan = plan_linear(arguments, GUARDED, only=wanted)
                    y = run_plan(plan, arguments)
                    names = [launch.kernel.name for launch in plan.launches if hasattr(launch, "kernel")]
                    assert x.isinf().any() or y.isfinite().all(), names
                    yield from names
        for scheme in (3, 6):
            split_weight(benign.t().contiguous().t(), scheme)


def with_odd_rows(weight: Tensor) -> Tensor:
    """The same, in rows that the copy engine does not take."""
    return torch.nn.functional.pad(weight, (0, 1))[:, :-1]


def run_pointwise_and_reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((37, 128), (3, 50, 33), (2, 4096), (300, 1096), (5, 3000, 7)):
            x = torch.randn(*shape, device="cuda").to(dtype).requires_grad_()
            row = torch.randn(shape[-1], device="cuda").to(dtype).requires_grad_()
            # Operands in each layout that kernels read in their own way.
            wide = torch.randn(*shape[:-1], shape[-1] + 1, device="cuda").to(dtype)[..., 1:]
            for operand in (x, wide, x.mT.contiguous().mT, x[..., :1], x[..., :1, :1]):
                given = [t.detach() for t in (x, operand)]
                check(cutfuse.pointwise(lambda z, r: torch.tanh(z) * r + z, *given), "pointwise")
            y = cutfuse.pointwise(lambda z, r: torch.tanh(z) * r + z, x, row)
            y.sum().backward(retain_graph=True)  # of a gradient that no compiled kernel takes
            y.backward(torch.ones_like(y))
            check(y, "pointwise")
            check(cutfuse.sigmoid(x.detach()), "pointwise_specialised")
            for dim in range(len(shape)):
                for op in REDUCTIONS:
                    check(cutfuse.reduce(x.detach(), dim, op), "reduce")
                    cutfuse.reduce(x, dim, op, prologue=torch.sigmoid).sum().backward()
                    given = x.detach(), dim, op
                    gated = cutfuse.reduce(*given, prologue=lambda z, r: torch.tanh(z) * r, operands=(row.detach(),))
                    check(gated, "reduce with a program")
    layer = cutfuse.nn.FusedLinear(40, 24, epilogue=torch.nn.functional.silu, reduce="logsumexp").cuda()
    layer(torch.randn(65, 40, device="cuda")).sum().backward()
    check(layer.bias.grad, "pointwise_backward")
    for dtype in (torch.float32, torch.bfloat16):
        layer = cutfuse.nn.FusedLinear(40, 264, epilogue=lambda z: torch.tanh(z) * z).to("cuda", dtype)
        y = layer(torch.randn(65, 40, device="cuda").to(dtype))
        y.backward(torch.ones_like(y))
        check(layer.bias.grad, "pointwise_backward, with column sums")


def check(result: Tensor, kernel: str) -> None:
    assert result.isfinite().all(), f"{kernel} gave a result that is not finite"


if __name__ == "__main__":
    main()
