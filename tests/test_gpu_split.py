"""The kernels that split fp32 matrices to planes, bit for bit against torch operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import split_cases as cases
import torch
from split_cases import NOT_FINITE, OUT_OF_RANGE, SCHEMES
from torch import Tensor

from cutfuse.native import module

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
POISON = 0x5A
MARGIN = 256  # bytes around each output, and its alignment
SHAPES = [(1, 1), (3, 64), (130, 1000), (257, 4097), (64, 8192), (700, 70), (1, 20000), (200, 260)]

Layout = Callable[[int, int], Tensor]


def random(*shape: int) -> Tensor:
    """Normal numbers over some octaves, with zeros."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, device=DEVICE)
    octaves = torch.randint(-3, 4, shape, generator=generator, device=DEVICE)
    return torch.where(x.abs() < 0.01, 0.0, torch.ldexp(x, octaves))


LAYOUTS: dict[str, Layout] = {
    "contiguous": random,
    "misaligned": lambda rows, columns: random(rows * columns + 1)[1:].view(rows, columns),
    "pitched": lambda rows, columns: random(rows, columns + 5)[:, :columns],
    "pitched_aligned": lambda rows, columns: random(rows, cases.round_up(columns, 4) + 8)[:, :columns],
    "transposed": lambda rows, columns: random(columns, rows).T,
    "transposed_pitched": lambda rows, columns: random(columns, rows + 3)[:, 1 : rows + 1].T,
    "stepped": lambda rows, columns: random(rows, 2 * columns)[:, ::2],
    "doubly_stepped": lambda rows, columns: random(2 * columns, 3 * rows)[::2, ::3].T,
    "repeated_rows": lambda rows, columns: random(1, columns).expand(rows, columns),
}


def layouts(*names: str) -> pytest.MarkDecorator:
    """Runs a test for each of these layouts, or for all."""
    return pytest.mark.parametrize("layout", [LAYOUTS[name] for name in names or LAYOUTS], ids=names or LAYOUTS)


@dataclass(frozen=True)
class Output:
    """Bytes with a poisoned margin on either side, themselves poisoned."""

    buffer: Tensor

    @staticmethod
    def of(size: int) -> Output:
        return Output(torch.full((size + 2 * MARGIN,), POISON, dtype=torch.uint8, device=DEVICE))

    @property
    def inside(self) -> Tensor:
        return self.buffer[MARGIN:-MARGIN]

    def check_margins(self) -> None:
        assert (self.buffer[:MARGIN] == POISON).all(), "written before the start"
        assert (self.buffer[-MARGIN:] == POISON).all(), "written past the end"


@dataclass(frozen=True)
class Result:
    outputs: tuple[Output, Output, Output]
    values: Tensor
    scales: Tensor
    flag_words: Tensor

    @property
    def flags(self) -> int:
        words = set(self.flag_words.tolist())
        assert words <= {0, 1, 2, 3}
        return int(any(word & 1 for word in words)) | 2 * int(any(word & 2 for word in words))

    @property
    def untouched(self) -> bool:
        return all(bool((output.buffer == POISON).all()) for output in self.outputs)


def call_split(
    x: Tensor, scheme: int, guard: list[tuple[int, int]] | None = None, *, is_weight: bool = False
) -> Result:
    rows, columns = x.shape
    row_stride, column_stride = x.stride()
    shape = module().planes_shape(rows, columns, scheme, column_stride != 1, is_weight)
    pitch, scale_pitch, flag_count, *sizes = shape
    outputs = tuple(Output.of(size) for size in sizes)
    values, scales, flags = (output.inside for output in outputs)
    module().split(
        torch.cuda.current_stream().cuda_stream,
        scheme,
        is_weight,
        x.data_ptr(),
        rows,
        columns,
        row_stride,
        column_stride,
        values.data_ptr(),
        scales.data_ptr(),
        flags.data_ptr(),
        guard,
    )
    torch.cuda.synchronize()
    for output in outputs:
        output.check_margins()
    return Result(
        outputs,
        values.view(cases.DTYPES[scheme]).view(pitch // cases.BLOCK, cases.PLANES[scheme], rows, cases.BLOCK),
        scales.view(torch.float32).view(pitch // cases.BLOCK, scale_pitch),
        flags.view(torch.int32).view(flag_count),
    )


def check(x: Tensor, scheme: int, *, is_weight: bool = False) -> Result:
    result = call_split(x, scheme, is_weight=is_weight)
    expected = cases.emulate(x.cpu(), scheme, is_weight)
    cases.assert_same_bits(result.values.cpu(), expected.values)
    cases.assert_same_bits(result.scales.cpu(), expected.scales)
    return result


@pytest.mark.parametrize("scheme", SCHEMES)
@layouts()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split(shape: tuple[int, int], layout: Layout, scheme: int) -> None:
    for is_weight in cases.ROLES:
        assert check(layout(*shape), scheme, is_weight=is_weight).flags == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@layouts("contiguous", "misaligned", "transposed", "transposed_pitched")
def test_more_tiles_than_thread_blocks(layout: Layout, scheme: int) -> None:
    for is_weight in cases.ROLES:
        result = check(layout(2200, 4160), scheme, is_weight=is_weight)
        assert len(result.flag_words) == 1056
        assert result.flags == 0


@layouts("contiguous", "misaligned", "transposed", "stepped")
@pytest.mark.parametrize("shape", [(1, 70), (15, 64), (17, 1000), (130, 200), (300, 4160)], ids=str)
def test_a_weights_rows_share_scales(shape: tuple[int, int], layout: Layout) -> None:
    """Rows of very different size: each group of sixteen takes the scale of its largest."""
    x = layout(*shape)
    x *= torch.exp2(torch.arange(shape[0], device=DEVICE) * 7 % 23 - 11.0).unsqueeze(1)
    result = check(x, 3, is_weight=True)
    assert result.flags == cases.expected_flags(x.cpu(), 3, is_weight=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@layouts("contiguous", "misaligned", "transposed")
def test_special_values(layout: Layout, scheme: int) -> None:
    x = layout(300, 520)
    powers = torch.tensor([2.0**exponent for exponent in range(-149, 128)], device=DEVICE)
    x[: len(powers)] = torch.sign(x[: len(powers)]) * powers.unsqueeze(1)
    x[280, :8] = torch.tensor(
        [torch.finfo(torch.float32).max, -1e-45, 1e-39, 2.0**-126, -0.0, 0.0, 65520.0, 1.9999999], device=DEVICE
    )
    x[281] = 0
    x[282, 64:128] = -0.0
    special = torch.tensor([float("inf"), float("-inf"), float("nan")], device=DEVICE)
    x[283, 70:73] = special
    x[284] = special.repeat(174)[:520]
    result = check(x, scheme)
    assert result.flags == (NOT_FINITE | OUT_OF_RANGE if scheme == 3 else NOT_FINITE)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("octaves", [20, 60, 126, 150])
def test_wide_range(octaves: int, scheme: int) -> None:
    """Exponents spread evenly over so many octaves up and down, beyond those of fp32 too."""
    x = random(33, 200)
    x = torch.ldexp(x, torch.linspace(-octaves, octaves, x.numel(), device=DEVICE).round().view_as(x))
    for is_weight in cases.ROLES:
        check(torch.nan_to_num(x, posinf=1e38, neginf=-1e38), scheme, is_weight=is_weight)


def ones(layout: Layout, rows: int, columns: int) -> Tensor:
    x = layout(rows, columns)
    x.fill_(1.0)
    return x


@pytest.mark.parametrize("at", [(0, 0), (300, 1000), (511, 2041)], ids=str)
@layouts("contiguous", "misaligned", "transposed", "stepped")
def test_flags(layout: Layout, at: tuple[int, int]) -> None:
    """Each criterion on both sides; a thread block takes at least 4096 elements here."""
    row, column = at
    block = column // 64 * 64
    x = ones(layout, 512, 2044)

    def flags_with(value: float, count: int) -> tuple[int, int]:
        x[row, block : block + count] = value
        result = check(x, 3).flags, check(x, 6).flags
        x[row, block : block + count] = 1.0
        return result

    assert flags_with(2.0**-18, 3) == (0, 0)
    assert flags_with(2.0**-18, 4) == (OUT_OF_RANGE, 0)
    assert flags_with(2.0**-17, 40) == (0, 0)
    assert flags_with(0.0, 40) == (0, 0)
    assert flags_with(1.5 * 2.0**60, 64) == (0, 0)
    assert flags_with(2.0**-60, 64) == (0, 0)
    assert flags_with(2.0**61, 64) == (OUT_OF_RANGE, 0)
    assert flags_with(2.0**-61, 64) == (OUT_OF_RANGE, 0)
    assert flags_with(float("inf"), 1) == (OUT_OF_RANGE | NOT_FINITE, NOT_FINITE)
    assert flags_with(float("nan"), 64) == (OUT_OF_RANGE | NOT_FINITE, NOT_FINITE)


@pytest.mark.parametrize("is_weight", cases.ROLES)
def test_how_many_a_block_may_have_out_of_range(is_weight: bool) -> None:
    x, many = ones(LAYOUTS["contiguous"], 512, 2044), cases.MANY[is_weight]
    x[300, 960 : 960 + many - 1] = 2.0**-18
    assert check(x, 3, is_weight=is_weight).flags == 0
    x[300, 1020] = 2.0**-18
    assert check(x, 3, is_weight=is_weight).flags == OUT_OF_RANGE


@layouts("contiguous", "misaligned", "transposed")
def test_flags_of_rare_elements(layout: Layout) -> None:
    """One element in every block trips everywhere, one in every eighth block nowhere."""
    x = ones(layout, 256, 2048)
    x[::8, ::64] = 1e-12
    assert check(x, 3).flags == 0
    x[:, ::64] = 1e-12
    assert (check(x, 3).flag_words == OUT_OF_RANGE).all()


@layouts("contiguous", "transposed")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_guard(scheme: int, layout: Layout) -> None:
    x = layout(130, 1000)
    calm = torch.zeros(1056, dtype=torch.int32, device=DEVICE)
    finite = torch.full((3000,), NOT_FINITE, dtype=torch.int32, device=DEVICE)
    trips = calm.clone()
    trips[-1] = OUT_OF_RANGE
    expected = call_split(x, scheme)

    def run(*guard: Tensor | None) -> Result:
        return call_split(x, scheme, [(0, 5) if flags is None else (flags.data_ptr(), len(flags)) for flags in guard])

    assert run().untouched
    assert run(None, None).untouched
    assert run(calm, finite).untouched
    assert run(trips[:-1], calm).untouched, "beyond the count"
    for guard in ((trips,), (calm, trips), (trips, finite), (None, trips)):
        result = run(*guard)
        for own, reference in zip(result.outputs, expected.outputs, strict=True):
            assert torch.equal(own.buffer, reference.buffer)


def test_offsets_beyond_2_31_elements() -> None:
    """Rows and columns that lie 2^31 elements apart and more."""
    source = torch.zeros((1 << 31) + 4096, device=DEVICE)
    for strides in (((1 << 30) + 4, 1), (1, (1 << 30) + 4), (64, (1 << 30) + 1)):
        x = source.as_strided((3, 3), strides)
        x.copy_(random(3, 3))
        check(x, 3)


def test_empty() -> None:
    for shape in ((0, 5), (5, 0)):
        assert call_split(torch.empty(shape, device=DEVICE), 3).untouched


def test_bad_arguments() -> None:
    split = module().split
    with pytest.raises(ValueError, match="scheme has to be 3 or 6, got 5"):
        split(0, 5, False, 8, 1, 1, 1, 1, 8, 8, 8, None)
    with pytest.raises(ValueError, match=r"null pointers for \(2, 3\)"):
        split(0, 3, False, 0, 2, 3, 3, 1, 0, 0, 0, None)
    with pytest.raises(ValueError, match="at most two operands' flags, got 3"):
        split(0, 3, False, 8, 2, 3, 3, 1, 8, 8, 8, [(0, 0)] * 3)
    for words in ((0, 3), (8, -1)):
        with pytest.raises(ValueError, match=rf"words to clear .* got {words[1]} words at {words[0]} for \(2, 3\)"):
            split(0, 3, False, 8, 2, 3, 3, 1, 8, 8, 8, None, words)
    with pytest.raises(ValueError, match=r"got 2 words at 8 for \(0, 3\)"):
        split(0, 3, False, 8, 0, 3, 3, 1, 8, 8, 8, None, (8, 2))
    with pytest.raises(RuntimeError, match=r"split failed with cudaErrorInvalidValue .*shape \(4294967296, 3\)"):
        split(0, 3, False, 8, 1 << 32, 3, 3, 1, 8, 8, 8, None)
