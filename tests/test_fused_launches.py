"""What is allocated and launched for a linear layer, on a CPU: the binding's launches are written down, not made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import RecordedLaunches, directly, emulated_device
from fused_products import IDENTITY, arguments_of, explain, inputs, run_plan
from torch import Tensor

import cutfuse
from cutfuse import native
from cutfuse.layer import cuda, linear_plan, planner, prepared
from cutfuse.precision import GUARDED

STREAM = 7
RUN = native.module().RunWhen
REDUCTIONS = native.module().reductions()


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedLaunches]:
    found = RecordedLaunches()

    def planes_of(weight: Tensor, *given: prepared.Planes) -> prepared.Planes | None:
        return given[0] if given else None

    monkeypatch.setattr(cuda, "planes_of", planes_of)
    monkeypatch.setattr(prepared, "stream_of", lambda index: STREAM)
    monkeypatch.setattr(prepared, "on_device", lambda index: contextlib.nullcontext())
    functions = {"current_stream": lambda index: STREAM, "empty_strided": found.allocate}
    with emulated_device("attributes", found, **functions):
        yield found


def run(
    x: Tensor, weight: Tensor, mode: str, reduction: str = "none", kept: prepared.Planes | None = None, **options: Any
) -> Tensor:
    """By the operators' implementation, which needs no kernels where PyTorch multiplies."""
    _, _, bias, operands, program, _, out_dtype, *_ = arguments_of(x, weight, reduction, **options)
    planes = () if kept is None else (kept,)
    with cutfuse.precision(mode):
        y: Tensor = cuda.linear(x, weight, bias, operands, program.text, reduction, out_dtype, *planes)
    return y


def planes_of(launch: SimpleNamespace) -> list[tuple[int, int]]:
    """The values, the scales and the flags that a pass writes."""
    transposed = launch.columns > 1 and launch.column_stride != 1
    *_, values, scales, flags = native.module().planes_shape(
        launch.rows, launch.columns, launch.scheme, transposed, launch.is_weight
    )
    return [
        (launch.values, launch.values + values),
        (launch.scales, launch.scales + scales),
        (launch.flags, launch.flags + flags),
    ]


def flags_of(launch: SimpleNamespace) -> tuple[int, int]:
    """Address and number of the flags that a pass leaves."""
    first, end = planes_of(launch)[2]
    return first, (end - first) // 4


def test_guarded_launches_both_products(recorder: RecordedLaunches) -> None:
    x, weight = inputs(128, 4096, 4096)
    y = run(x, weight, GUARDED)
    assert y.shape == (128, 4096)
    assert recorder.names == ["split", "gemm_convert", "split", "gemm_convert"]
    (address, nbytes, launched), (begin, size, launched_then) = recorder.allocated
    assert (address, nbytes, launched, launched_then) == (y.data_ptr(), y.nbytes, 0, 0)
    x3, first, x6, fallback = recorder.launches
    assert [x3.scheme, x6.scheme] == [3, 6]
    for launch in (x3, x6):
        assert (launch.is_weight, launch.source, launch.rows, launch.columns) == (False, x.data_ptr(), 128, 4096)
        assert (launch.row_stride, launch.column_stride) == (4096, 1)
    for launch in (first, fallback):
        assert launch.b[:3] == (weight.data_ptr(), 4096, 4096)
        assert (launch.d, launch.partials, launch.bias) == (y.data_ptr(), 0, 0)
        assert launch.program.is_same(IDENTITY.native)
        assert (launch.operands, launch.stream) == ([], STREAM)
    assert [first.kernel, fallback.kernel] == ["sm90_convert3_128x128x64", "sm90_convert6_128x128x64"]
    assert (first.a, fallback.a) == ((x3.values, x3.scales), (x6.values, x6.scales))
    guard = [flags_of(x3), first.b[3:]]
    assert first.guard == guard[:1]
    assert x3.guard is None
    assert x6.guard == fallback.guard == guard
    assert (first.run, fallback.run) == (RUN.if_clear, RUN.if_tripped)
    pieces = [*planes_of(x3), *planes_of(x6), (first.b[3], first.b[3] + 4 * first.b[4])]
    assert all(begin <= piece < end <= begin + size for piece, end in pieces)


@pytest.mark.parametrize("reduction", ["none", "logsumexp"])
def test_a_launch_is_the_plans(recorder: RecordedLaunches, reduction: str) -> None:
    x, weight = inputs(200, 328, 136, torch.bfloat16)
    arguments = arguments_of(x, weight, reduction)
    for way in planner.plan_linear(arguments, "tf32").alternatives[:-1]:
        recorder.launches.clear()
        recorder.allocated.clear()
        planned = planner.plan_linear(arguments, "tf32", only=way.name)
        run_plan(planned, arguments)
        launch, *folds = recorder.launches
        chosen = planned.launches[0].kernel
        assert (launch.kernel, launch.swizzle) == (way.name, chosen.swizzle)
        assert launch.raster_along_m == chosen.raster_along_m
        assert len(folds) == (reduction != "none")
        for fold, (address, nbytes, _) in zip(folds, recorder.allocated[1:], strict=True):
            assert launch.partials == fold.partials == address
            assert nbytes >= 4 * -(-328 // launch.tile_n) * 200 * 2
            assert (fold.rows, fold.count, fold.reduction) == (200, 328, REDUCTIONS[reduction])


def test_few_tiles_are_multiplied_in_slices(recorder: RecordedLaunches) -> None:
    x, weight = inputs(128, 1024, 8192)
    run(x, weight, "split3")
    first, launch = recorder.launches
    slices = launch.slice_count
    assert 4 <= slices <= 132 // 8
    assert all(address % 16 == 0 and address > 0 for address in launch.slices)
    assert first.cleared == (launch.slices[1], 8), "the pass that splits x clears the arrivals at 8 tiles"
    name, _ = explain(x, weight, "split3")
    assert f"{slices} slices of K" in name


def test_many_tiles_are_not(recorder: RecordedLaunches) -> None:
    run(*inputs(1024, 4096, 1024), "split3")
    first, *_, launch = recorder.launches
    assert launch.slice_count == 1
    assert first.cleared == launch.slices == (0, 0), "null pointers: there are no sums and no arrivals"


def test_single_rows_have_a_pitch_of_whole_vectors(recorder: RecordedLaunches) -> None:
    arguments = arguments_of(torch.randn(1024, 1001), torch.randn(1, 1001).expand(4, 1001)[:1], "sum")
    plan = planner.plan_linear(arguments, "split3", only="sm90_convert3_rows_128x128x64")
    run_plan(plan, arguments)
    (convert,) = (launch for launch in recorder.launches if launch.function == "gemm_convert")
    assert convert.b[:3] == (arguments.weight.data_ptr(), 1024, 1001)


@pytest.mark.parametrize("shape", [(0, 64, 64), (16, 0, 64), (16, 64, 0)])
def test_products_of_nothing_launch_nothing(recorder: RecordedLaunches, shape: tuple[int, int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("split3", GUARDED, "tf32"):
            x, weight = inputs(*shape, dtype)
            assert torch.equal(run(x, weight, mode), x @ weight.t())
    assert recorder.launches == []


def test_products_of_a_backward_pass_take_no_fused_kernel_but_over_planes(recorder: RecordedLaunches) -> None:
    x, weight = inputs(1024, 8192, 1024)
    for mode in ("tf32", "ieee"):
        assert torch.equal(cuda.product(x, weight, mode), x @ weight.t())
    assert recorder.launches == []
    cuda.product(x, weight, GUARDED)
    assert recorder.names.count("split") >= 2


@pytest.mark.parametrize("mode", ["split3", "split6", GUARDED])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_kept_planes_spare_the_pass_that_splits_the_weight(recorder: RecordedLaunches, layout: str, mode: str) -> None:
    x, weight = inputs(1024, 4096, 4096)
    weight = weight.t() if layout == "transposed" else weight
    kept = prepared.split_weight(weight, planner.first_scheme(mode))
    (made,) = recorder.launches
    assert (made.source, made.is_weight, made.scheme) == (weight.data_ptr(), True, kept.scheme)
    begin, end = kept.memory.data_ptr(), kept.memory.data_ptr() + kept.memory.nbytes
    pieces = [(begin, begin), *planes_of(made), (end, end)]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(pieces))
    recorder.launches.clear()
    run(x, weight, mode, kept=kept)
    of_x, product, *rest = recorder.launches
    assert [of_x.is_weight, product.function, product.b] == [False, "gemm_planes", (made.values, made.scales)]
    if mode == GUARDED:
        guard = [flags_of(of_x), flags_of(made)]
        assert [product.guard, rest[0].guard, rest[-1].guard] == [guard] * 3
    else:
        assert rest == []
    assert linear_plan.KEEPS in explain(x, weight, mode, kept=kept)[1]
    others = prepared.split_weight(weight, kept.scheme)
    made = recorder.launches.pop()
    recorder.launches.clear()
    directly(lambda: run(x, weight, mode, kept=others))
    assert recorder.launches[1].b == (made.values, made.scales)


@pytest.mark.parametrize(("mode", "scheme"), [("split3", 6), ("split6", 3), ("ieee", 3), ("tf32", 3)])
def test_planes_of_another_scheme_are_left_alone(recorder: RecordedLaunches, mode: str, scheme: int) -> None:
    x, weight = inputs(1024, 4096, 4096)
    kept = prepared.split_weight(weight, scheme)
    made = recorder.launches.pop()
    assert run(x, weight, mode, kept=kept).shape == (1024, 4096)
    assert (made.values, made.scales) not in [getattr(launch, "b", None) for launch in recorder.launches]
    assert "split" in recorder.names or set(recorder.names) <= {"gemm"}
    assert linear_plan.KEEPS not in explain(x, weight, mode, kept=kept)[1]
