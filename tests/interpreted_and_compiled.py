"""Runs programs on a GPU in kernels that interpret them and in kernels with them compiled in, and compares bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from fused_products import run_plan
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program
from cutfuse.layer import cuda
from cutfuse.layer.linear_plan import matrices_of
from cutfuse.layer.planner import LinearArguments, plan_linear
from cutfuse.layer.specialize import find_epilogues

DEVICE = "cuda"
MODES = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "split3"}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 6.0, 1e-20, 88.0, -100.0, 3e4, float("inf"), -float("inf"), float("nan"))


def other_values(interpreted: Tensor, compiled: Tensor) -> Tensor:
    """Where their bits differ. One NaN is as good as another: PTX leaves the sign and payload of most of them open."""
    integers = torch.int16 if interpreted.element_size() == 2 else torch.int32
    return (interpreted.view(integers) != compiled.view(integers)) & ~(interpreted.isnan() & compiled.isnan())


def layer(
    program: Program,
    operands: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.bfloat16,
    reduction: str = "none",
    out_dtype: torch.dtype | None = None,
    shape: tuple[int, int] = (200, 264),
) -> LinearArguments:
    """z `[M, N]` is random but for columns of special values, and its tiles lie across the matrix's end."""
    (m, n), k = shape, 136
    special = torch.tensor(SPECIAL, device=DEVICE)[:n]
    generator = torch.Generator(DEVICE).manual_seed(7)
    x, weight = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for shape in ((m, k), (n, k)))
    weight[: len(special)] = 0
    bias = torch.randn(n, generator=generator, device=DEVICE)
    bias[: len(special)] = special
    return LinearArguments(x, weight, bias.to(dtype), operands, program, reduction, out_dtype or dtype)


def run(arguments: LinearArguments, mode: str, only: str = "") -> Tensor:
    """By the kernel of this name, or by the one that is fastest with the epilogue compiled in."""
    with cutfuse.specialization(mode):
        return run_plan(plan_linear(arguments, MODES[arguments.x.dtype], only=only), arguments)


def kernels_for(arguments: LinearArguments) -> list[str]:
    with cutfuse.specialization("now"):
        *kernels, _ = plan_linear(arguments, MODES[arguments.x.dtype]).alternatives
    return [kernel.name for kernel in kernels if not kernel.rejection]


def assert_same_layer(arguments: LinearArguments, kernels: Sequence[str]) -> None:
    for kernel in kernels:
        interpreted, compiled = (run(arguments, mode, kernel) for mode in ("off", "now"))
        wrong = other_values(interpreted, compiled)
        where = (kernel, arguments.program.text, interpreted[wrong][:4], compiled[wrong][:4])
        assert not wrong.any(), where
    with cutfuse.specialization("now"):
        plan = plan_linear(arguments, MODES[arguments.x.dtype], only=kernels[0])
    epilogues = find_epilogues(plan, 0, arguments.program, matrices_of(arguments))
    assert epilogues
    assert all(epilogue.is_ready for epilogue in epilogues), [epilogue.failure for epilogue in epilogues]


def in_both_modes(call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    with cutfuse.specialization("off"):
        interpreted = call()
    with cutfuse.specialization("now"):
        compiled = call()
    assert native.core.compiled_count() > 0, "nothing has been compiled"
    return interpreted, compiled


def assert_same_pointwise(program: Program, x: Tensor, operands: Sequence[Tensor]) -> None:
    interpreted, compiled = in_both_modes(lambda: cuda.pointwise(x, operands, program.text, x.dtype))
    wrong = other_values(interpreted, compiled)
    assert not wrong.any(), (program.text, tuple(x.shape), x.dtype, interpreted[wrong][:4], compiled[wrong][:4])


def with_special_values(count: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Tensors that are random but for every third column."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    found = [torch.randn(tuple(shape), generator=generator, device=DEVICE).to(dtype) for _ in range(count)]
    special = torch.tensor(SPECIAL, device=DEVICE)
    for k, tensor in enumerate(found):
        places = tensor[..., k::3]
        places.copy_(special.repeat(-(-places.shape[-1] // len(SPECIAL)))[: places.shape[-1]])
    return found


def assert_same_gradients(
    program: Program, grad: Tensor, x: Tensor, operands: Sequence[Tensor], wanted: list[int], column_sum: bool
) -> None:
    """Of the inputs that are wanted: 0 for x, k for operand k - 1; and with them the sums of x's columns."""
    native.core.forget_calls()  # whose plans hold what was compiled before
    native.core.forget_specializations()
    given = grad, x, operands, program.text, "none", None, wanted, column_sum
    results = []
    for mode in ("off", "now"):
        with cutfuse.specialization(mode):
            results.append(cuda.pointwise_backward(*given))
    assert native.core.compiled_count() == 1, "nothing has been compiled"
    for interpreted, compiled in zip(*results, strict=True):
        wrong = other_values(interpreted, compiled)
        assert not wrong.any(), (program.text, wanted, interpreted[wrong][:4], compiled[wrong][:4])


def assert_same_reduction(program: Program, x: Tensor, operands: Sequence[Tensor], reduction: str, dim: int) -> None:
    problem = x, operands, program.text, reduction, (dim % x.dim(),), torch.float32
    interpreted, compiled = in_both_modes(lambda: cuda.reduce(*problem))
    wrong = other_values(interpreted, compiled)
    where = (program.text, tuple(x.shape), x.dtype, reduction, dim, interpreted[wrong][:4], compiled[wrong][:4])
    assert not wrong.any(), where
