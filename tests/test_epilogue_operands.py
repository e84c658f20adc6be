"""How kernels with a program compiled in take its operands: by how they lie, by type, and by the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from compiled_epilogues import FakeCompiler, compiled_by, core
from plan_cases import plan

from cutfuse.epilogue import Program

M, N = 512, 2048
ADDRESS = 1 << 20
DTYPES = core.dtypes()
COOPERATIVE, PINGPONG = "sm90_bf16_128x256x64_2x1_cooperative", "sm90_bf16_128x128x64_2x1_pingpong"

Matrix = tuple[int, int, int, int, int]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with compiled_by(FakeCompiler()):
        yield


def matrix(rows: int, columns: int, dtype: str = "bfloat16", address: int = ADDRESS) -> Matrix:
    return address, DTYPES[dtype], 0, rows, columns


def kinds(*operands: Matrix, kernel: str = PINGPONG, **options: Any) -> list[str]:
    names = [f"r{k}" for k in range(len(operands))]
    program = Program.parse(f"operands={len(names)}; tanh z; " + "; ".join(f"mul prev {name}" for name in names))
    found = plan(M, N, 1024, only=kernel, epilogue_cost=4.0, specialized_cost=1.0, **options)
    (epilogue,) = core.find_epilogues(found, 0, program.native, list(operands))
    assert epilogue.kernel.startswith(kernel)
    return [kind.name for kind in epilogue.operand_kinds]


@pytest.mark.parametrize("kernel", [COOPERATIVE, PINGPONG])
def test_by_how_they_lie(kernel: str) -> None:
    assert kinds(matrix(0, 0), matrix(0, 1), matrix(1, 0), matrix(N, 1), kernel=kernel) == [
        "scalar",
        "row",
        "column",
        "source",
    ]
    assert kinds(matrix(0, 2), matrix(7, 0), matrix(1, M), kernel=kernel) == ["strided", "column", "strided"]


@pytest.mark.parametrize(
    ("operand", "kind"),
    [
        (matrix(N, 1), "source"),
        (matrix(N + 8, 1), "source"),
        (matrix(N, 1, address=0), "source"),  # not known yet
        (matrix(N + 4, 1), "strided"),  # rows begin between the copy engine's boundaries
        (matrix(N, 1, address=ADDRESS + 8), "strided"),
        (matrix(N - 8, 1), "strided"),  # rows that overlap
        (matrix(N, 1, "float16"), "strided"),
        (matrix(N, 1, "float32"), "strided"),
    ],
)
def test_what_the_copy_engine_takes(operand: Matrix, kind: str) -> None:
    assert kinds(operand) == [kind]


def test_the_first_matrix_is_fetched_and_no_other() -> None:
    assert kinds(matrix(N, 1), matrix(N, 1)) == ["source", "strided"]
    assert kinds(matrix(N, 1, "float32"), matrix(N, 1)) == ["strided", "source"]


@pytest.mark.parametrize(
    ("kernel", "kind", "options"),
    [
        ("sm90_tf32_128x128x32_2x1_pingpong", "source", {"dtype": "float32", "precision": "tf32"}),
        ("sm90_tf32_128x256x32_2x1_cooperative", "strided", {"dtype": "float32", "precision": "tf32"}),
        ("sm90_split3_128x128x64", "strided", {"dtype": "float32", "precision": "split3"}),
        ("sm90_bf16_rows_128x128x64_2x1_pingpong", "strided", {"reduction": "sum"}),
        ("sm90_bf16_f32_128x256x64_2x1_cooperative", "strided", {"output": "float32"}),
    ],
)
def test_which_kernels_fetch(kernel: str, kind: str, options: dict[str, Any]) -> None:
    operand = matrix(N, 1, options.get("dtype", "bfloat16"))
    assert kinds(operand, kernel=kernel, **options) == [kind]


def test_operands_that_lie_otherwise_are_another_kernel() -> None:
    before = core.specialization_count()
    for operand in (matrix(N, 1), matrix(0, 1), matrix(N, 1), matrix(N + 8, 1)):
        kinds(operand)
    assert core.specialization_count() == before + 2


@pytest.mark.parametrize(
    ("reduction", "suffix"),
    [("sum", "_sum"), ("mean", "_sum"), ("amax", "_amax"), ("amin", "_amin"), ("logsumexp", "_logsumexp")],
)
def test_a_kernel_is_compiled_for_each_fold(reduction: str, suffix: str) -> None:
    kernel = "sm90_bf16_rows_128x128x64_2x1_pingpong"
    program = Program.parse("operands=0; tanh z")
    found = plan(M, N, 1024, only=kernel, epilogue_cost=4.0, specialized_cost=1.0, reduction=reduction)
    (epilogue,) = core.find_epilogues(found, 0, program.native, [])
    assert epilogue.kernel == kernel + suffix


def test_a_kernel_that_stores_the_pre_activation_is_one_of_its_own() -> None:
    program = Program.parse("operands=0; tanh z")
    found = []
    for stores in (False, True):
        planned = plan(M, N, 1024, only=PINGPONG, epilogue_cost=4.0, specialized_cost=1.0, stores_pre_activation=stores)
        found += core.find_epilogues(planned, 0, program.native, [])
    assert [epilogue.kernel for epilogue in found] == [PINGPONG, PINGPONG + "_z"]
    assert found[0] is not found[1]
