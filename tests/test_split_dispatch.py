"""How fp32 products are split and launched, on a CPU: the binding's launches are written down instead of made."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import cutfuse
from cutfuse import native
from cutfuse.epilogue import Program
from cutfuse.ops import fused, gemm, planes, split
from cutfuse.precision import GUARDED

IDENTITY = Program.parse("operands=0")
STREAM = 7


class Recorder:
    """The binding, but that launches are only listed, as (name, arguments)."""

    LAUNCHES = ("split", "gemm", "gemm_planes", "gemm_convert", "finalize_partials")

    def __init__(self, module: Any) -> None:
        self._module = module
        self.launches: list[tuple[str, tuple]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in self.LAUNCHES:
            return getattr(self._module, name)

        def launch(*arguments: Any) -> None:
            self.launches.append((name, arguments))

        return launch

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.launches]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(native.module())
    monkeypatch.setattr(native, "module", lambda: found)
    for module in (split, planes, gemm):
        monkeypatch.setattr(module, "stream_of", lambda index: STREAM)
        monkeypatch.setattr(module, "on_device", lambda index: torch.no_grad())
    for module in (split, gemm):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(gemm, "why_not_hopper", lambda x: "")
    return found


def inputs(rows: int, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, depth), torch.randn(columns, depth)


def result_of(x: torch.Tensor, weight: torch.Tensor, reduction: str = "none") -> gemm.Result:
    return gemm.Result(x, weight, None, (), IDENTITY, reduction, torch.float32)


def flags_of(split_launch: tuple) -> tuple[int, int]:
    """Address and number of the flags that a recorded launch of the splitting kernel leaves."""
    _, plan, is_weight, _, rows, columns, _, _, _, _, flags, *_ = split_launch
    return flags, native.module().planes_shape(rows, columns, plan, False, is_weight)[2]


def run(x: torch.Tensor, weight: torch.Tensor, mode: str, reduction: str = "none") -> torch.Tensor | None:
    return fused.run_fused(result_of(x, weight, reduction), mode)


def test_guarded_launches_both_plans(recorder: Recorder) -> None:
    x, weight = inputs(128, 4096, 4096)
    y = run(x, weight, GUARDED)
    assert y.shape == (128, 4096)
    assert recorder.names == ["split", "gemm_convert", "split", "gemm_convert"]
    (_, x3), (_, first), (_, x6), (_, fallback) = recorder.launches
    assert [x3[1], x6[1]] == [planes.SPLIT3, planes.SPLIT6]
    assert x3[2:4] == x6[2:4] == (False, x.data_ptr())
    assert x3[11] is None
    assert [launch[2].name for launch in (first, fallback)] == ["sm90_convert3_128x128x64", "sm90_convert6_128x128x64"]
    assert first[4][:3] == fallback[4][:3] == (weight.data_ptr(), 4096, 4096)
    guard = [flags_of(x3), first[4][3:]]
    assert first[6] == guard[:1]
    assert x6[11] == fallback[6] == guard
    assert (first[7], fallback[7]) == (split.IF_CLEAR, split.IF_TRIPPED)
    assert fallback[-4] == first[-4] == y.data_ptr()


def pieces_of(launches: list[tuple]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Addresses and sizes in a product's launches: what lasts for the next product, and what it may write over."""
    *passes, product = launches
    lasting, passing = [], []
    for launch in passes:
        _, plan, is_weight, _, rows, columns, _, column_stride, values, scales, flags, _, (cleared, count) = launch
        shape = native.module().planes_shape(rows, columns, plan, column_stride != 1, is_weight)
        *_, value_bytes, scale_bytes, flag_bytes = shape
        lasting += [(flags, flag_bytes), (cleared, 4 * count)]
        passing += [(values, value_bytes), (scales, scale_bytes)]
    if len(passes) == 1:
        lasting.append((product[4][3], 4 * product[4][4]))  # flags of the weight
    kernel, tiles = product[2], passes[0][12][1]
    return lasting, [*passing, (product[5][0], 4 * tiles * kernel.slices * kernel.tile_m * kernel.tile_n)]


@pytest.mark.parametrize("mode", ["split3", GUARDED])
@pytest.mark.parametrize("offset", [0, 1], ids=["converted", "split first"])
def test_one_piece_of_memory_holds_a_call(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, offset: int, mode: str
) -> None:
    """Parts overlap only where the first product's are written over by the second's, which no flag is: it guards."""
    x, weight = torch.randn(128, 4096), torch.randn(4096 * 4096 + 1)[offset : 4096 * 4096 + offset].view(4096, 4096)
    allocated: list[tuple[int, int, int]] = []
    empty = torch.empty

    def noted(*arguments: Any, **settings: Any) -> torch.Tensor:
        tensor = empty(*arguments, **settings)
        allocated.append((tensor.data_ptr(), tensor.nbytes, len(recorder.launches)))
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    result = result_of(x, weight)
    split.launch_split(split.plan_split(result, mode), result)
    assert [launches for _, _, launches in allocated] == [0, 0], "the result, and one piece of memory"
    launches = [arguments for _, arguments in recorder.launches]
    passes = 1 + offset
    products = [launches[first : first + passes + 1] for first in range(0, len(launches), passes + 1)]
    assert len(products) == (2 if mode == GUARDED else 1)
    parts = [pieces_of(product) for product in products]
    lasting = [piece for kept, _ in parts for piece in kept]
    address, nbytes, _ = allocated[1]
    for _, passing in parts:
        pieces = [(address, 0), *sorted(piece for piece in [*lasting, *passing] if piece[1]), (address + nbytes, 0)]
        assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(pieces)), pieces


def test_few_tiles_are_multiplied_in_slices(recorder: Recorder) -> None:
    x, weight = inputs(128, 1024, 8192)
    run(x, weight, "split3")
    (_, launch) = recorder.launches[-1]
    slices = launch[2].slices
    assert 4 <= slices <= 132 // 8
    assert all(address % 16 == 0 and address > 0 for address in launch[5])
    assert recorder.launches[0][1][12] == (launch[5][1], 8), "the pass that splits x clears the arrivals at 8 tiles"
    name, _ = split.explain_split(result_of(x, weight), "split3")
    assert f"{slices} slices of K" in name


@pytest.mark.parametrize("plan", [planes.SPLIT3, planes.SPLIT6])
@pytest.mark.parametrize("shape", [(128, 1024, 8192), (256, 512, 1024), (130, 260, 4100), (512, 1024, 1024)])
def test_kept_planes_are_multiplied_in_as_many_slices(shape: tuple[int, int, int], plan: int) -> None:
    case = split.Case.of(result_of(*inputs(*shape)))
    kernels = [split.plan_multiplication(case, plan, converts).kernel for converts in (False, True)]
    assert kernels[0].slices == kernels[1].slices > 1


def test_many_tiles_are_not(recorder: Recorder) -> None:
    run(*inputs(1024, 4096, 1024), "split3")
    (_, launch) = recorder.launches[-1]
    assert (launch[2].slices, recorder.launches[0][1][12][1]) == (1, 0)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("pitch", torch.randn(1024, 1026)[:, :1024]),
        ("address", torch.randn(1024 * 1024 + 1)[1:].view(1024, 1024)),
        ("transposed", torch.randn(1024, 1024).t()),
        ("expanded", torch.randn(1, 1024).expand(1024, 1024)),
    ],
)
def test_weights_that_the_copy_engine_does_not_take_are_split_first(
    recorder: Recorder, name: str, weight: torch.Tensor
) -> None:
    run(torch.randn(1024, 1024), weight, "split3")
    assert recorder.names == ["split", "split", "gemm_planes"], name
    assert recorder.launches[1][1][3] == weight.data_ptr()
    assert recorder.launches[2][1][7] == split.ALWAYS


def test_split6_of_weights_that_the_copy_engine_takes(recorder: Recorder) -> None:
    run(*inputs(130, 260, 76), "split6")
    assert recorder.names == ["split", "gemm_convert"]
    assert recorder.launches[0][1][1] == planes.SPLIT6
    assert recorder.launches[1][1][2].name == "sm90_convert6_128x128x64"


def test_split6_of_other_weights_takes_planes_of_both(recorder: Recorder) -> None:
    run(*inputs(130, 260, 77), "split6")
    assert recorder.names == ["split", "split", "gemm_planes"]
    assert [launch[1] for _, launch in recorder.launches[:2]] == [planes.SPLIT6, planes.SPLIT6]


def test_a_row_reduction_is_folded(recorder: Recorder) -> None:
    x, weight = inputs(300, 1000, 200)
    y = run(x, weight, "split3", "logsumexp")
    assert y.shape == (300,)
    assert recorder.names[-1] == "finalize_partials"
    assert "rows" in recorder.launches[-2][1][2].name


def test_single_rows_have_a_pitch_of_whole_vectors(recorder: Recorder) -> None:
    run(torch.randn(1024, 1001), torch.randn(1, 1001).expand(4, 1001)[:1], "split3", "sum")
    convert = [launch for name, launch in recorder.launches if name == "gemm_convert"]
    assert all(launch[4][1] % 4 == 0 for launch in convert)


def test_small_products_take_cublas_unless_forced(recorder: Recorder) -> None:
    x, weight = inputs(16, 64, 64)
    assert run(x, weight, GUARDED) is None
    assert recorder.launches == []
    assert run(x, weight, "split3").shape == (16, 64)


def test_columns_that_cannot_be_stored_take_cublas(recorder: Recorder) -> None:
    x, weight = inputs(1024, 1022, 1024)
    assert run(x, weight, "split3") is None
    name, reasons = split.explain_split(result_of(x, weight), "split3")
    assert name is None
    assert "N is 1022" in reasons[0]


def test_ieee_splits_nothing(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.undo()
    x, weight = inputs(64, 64, 64)
    assert fused.why_not_split(result_of(x, x), "ieee")
    with cutfuse.precision("ieee"):
        assert torch.equal(fused.cublas_linear(x, weight, None), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("plan", [planes.SPLIT3, planes.SPLIT6])
@pytest.mark.parametrize("shape", [(1, 1), (130, 200), (257, 4097)])
def test_buffers_are_as_large_as_the_kernels_want_them(plan: int, shape: tuple[int, int]) -> None:
    for matrix in (torch.randn(shape), torch.randn(shape[::-1]).t()):
        found = planes.split_weight(matrix, plan)
        transposed = matrix.shape[1] > 1 and matrix.stride(1) != 1
        _, _, count, *sizes = native.module().planes_shape(*shape, plan, transposed, True)
        values, scales, (flags, flag_count) = found.placed
        end = values + found.memory.nbytes
        assert flag_count == count
        assert (scales - values) % 128 == (flags - scales) % 128 == 0
        assert [scales - values >= sizes[0], flags - scales >= sizes[1], end - flags >= sizes[2]] == [True] * 3
        assert end - values - sum(sizes) < 3 * planes.PART, "more than the parts and their alignment"


@pytest.mark.parametrize("mode", ["split3", "split6", GUARDED])
def test_explain_takes_every_mode(mode: str) -> None:
    x, weight = inputs(1024, 4096, 4096)
    name, reasons = split.explain_split(result_of(x, weight), mode)
    assert name is not None
    assert any(reason.startswith("guarded: sm90_convert6") for reason in reasons) == (mode == GUARDED)


def kept_by(weight: torch.Tensor, plan: int) -> planes.Planes:
    """As prepare makes them, and the operators find them by their memory."""
    return planes.planes_in(planes.split_weight(weight, plan).memory, weight, plan)


@pytest.mark.parametrize("mode", ["split3", "split6", GUARDED])
def test_kept_planes_spare_the_pass_that_splits_the_weight(recorder: Recorder, mode: str) -> None:
    x, weight = inputs(1024, 4096, 4096)
    kept = kept_by(weight, split.kept_plan(mode))
    recorder.launches.clear()
    split.launch_split(split.plan_split(result_of(x, weight), mode, kept), result_of(x, weight), kept)
    assert recorder.names == ["split", "gemm_planes", *(["split", "gemm_convert"] if mode == GUARDED else [])]
    (_, of_x), (_, first), *_ = recorder.launches
    assert first[4] == kept.placed.parts
    if mode == GUARDED:
        assert first[6] == recorder.launches[3][1][6] == [flags_of(of_x), kept.placed.flags]
    assert split.KEEPS in split.explain_split(result_of(x, weight), mode, kept)[1]


@pytest.mark.parametrize(("mode", "plan"), [("split3", planes.SPLIT6), ("split6", planes.SPLIT3)])
def test_planes_of_the_other_plan_are_left_alone(recorder: Recorder, mode: str, plan: int) -> None:
    x, weight = inputs(1024, 4096, 4096)
    kept = kept_by(weight, plan)
    recorder.launches.clear()
    assert fused.run_fused(result_of(x, weight), mode, kept).shape == (1024, 4096)
    assert kept.placed.parts not in [arguments[4] for _, arguments in recorder.launches]
    assert split.KEEPS not in split.explain_split(result_of(x, weight), mode, kept)[1]


def test_kept_planes_are_predicted_to_be_faster() -> None:
    x, weight = torch.randn(1024, 4096), torch.randn(4096 * 4096 + 1)[1:].view(4096, 4096)  # cannot be converted
    result = result_of(x, weight)
    without, kept = (split.plan_split(result, GUARDED, kept) for kept in (None, kept_by(weight, planes.SPLIT3)))
    passed = native.module().split_microseconds(4096, 4096)
    assert without.microseconds - kept.microseconds == pytest.approx(passed)
    assert (without.keeps, kept.keeps) == (False, True)
    assert kept.first.weight is None


def test_explain_says_how_the_weight_is_split() -> None:
    x, weight = inputs(1024, 8192, 8192)
    name, reasons = split.explain_split(result_of(x, weight), GUARDED)
    assert "sm90_convert3" in name or "sm90_split3" in name
    assert any("split on its way" in reason or "pass of its own" in reason for reason in reasons)
    assert any("sm90_convert6" in reason for reason in reasons)
