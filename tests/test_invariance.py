"""Batch invariance, without a GPU: which kernels run, whatever the number of rows, and when the mode holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_device import EmulatedLaunches, directly
from emulated_device import launches as launches
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import MODULE, contiguous, plan, products, requests
from test_precision import in_new_thread
from torch import Tensor

import cutfuse
from cutfuse import composed, invariance, native
from cutfuse.invariance import is_batch_invariant
from cutfuse.reduce import ReduceCall, _in_rows, normalise_reduce

ROWS = (1, 2, 7, 8, 16, 63, 64, 65, 128, 129, 500, 1024, 4097, 8192, 32768)


def order_of(found: Any) -> tuple[Any, ...]:
    """What decides in which order a plan's kernels add a row."""
    if not found.is_fused:
        return ()
    (product,) = products(found)
    kernel = product.kernel
    planes = any(kind in kernel.name for kind in ("split", "convert"))
    cores = "_fp32_" in kernel.name
    assert kernel.slices == 1
    assert not cores or kernel.tile_m <= 32
    folds = [launch.batch_invariant for launch in found.launches if isinstance(launch, MODULE.FoldPartials)]
    assert folds == [True] * len(folds)
    return planes, cores, "6" in kernel.name.split("x")[0] and planes, kernel.tile_n if folds else 0, len(folds)


LAYERS = st.sampled_from(["tf32", "split3", "split6"]).flatmap(lambda precision: requests(precision=precision))
MORE = st.fixed_dictionaries(
    {"specialized_cost": st.sampled_from([None, 1.0]), "stores_pre_activation": st.booleans()},
    optional={"output": st.just("float32")},
)


@settings(max_examples=200, deadline=None)
@given(LAYERS, MORE, st.lists(st.one_of(st.sampled_from(ROWS), st.integers(1, 40000)), min_size=2, max_size=6))
def test_the_order_of_sums_does_not_depend_on_the_rows(
    layer: tuple[Any, dict[str, Any]], more: dict[str, Any], rows: list[int]
) -> None:
    options = {**layer[1], **more}
    options["stores_pre_activation"] &= options["reduction"] == "none"
    orders = {
        m: order_of(plan(**{**options, "m": m, "x": contiguous(m, options["k"])}, batch_invariant=True)) for m in rows
    }
    assert len(set(orders.values())) == 1, orders


def test_cublas_is_no_alternative_where_a_kernel_is_one() -> None:
    layer = {"n": 64, "k": 32768, "epilogue_cost": 0.0, "bias": None}
    assert not plan(m=197, **layer).is_fused
    found = plan(m=197, **layer, batch_invariant=True)
    assert found.is_fused
    assert found.alternatives[-1].rejection == "cuBLAS chooses by the number of rows in which order it adds"


def test_a_single_row_of_tf32_runs_like_others() -> None:
    layer = {"n": 1024, "k": 1024, "dtype": "float32", "precision": "tf32"}
    assert not plan(m=1, **layer).is_fused
    assert plan(m=1, **layer, batch_invariant=True).is_fused


def test_a_scheme_that_looks_at_all_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="guarded products look at all rows"):
        plan(m=8, dtype="float32", precision="guarded", batch_invariant=True)


def test_fp32_columns_that_planes_do_not_store_are_multiplied_on_cuda_cores() -> None:
    layer = {"n": 1023, "k": 512, "dtype": "float32", "precision": "split6", "batch_invariant": True}
    names = {plan(m=m, **layer).alternatives[0].name for m in ROWS}
    assert names <= {"sm90_fp32_16x32x64", "sm90_fp32_32x32x64"}


def test_a_linear_layer_is_planned_for_the_mode(launches: EmulatedLaunches) -> None:
    x, weight, bias = torch.randn(24, 256), torch.randn(64, 256), torch.randn(64)

    def run() -> Tensor:
        return cutfuse.linear(x, weight, bias, epilogue=torch.nn.functional.gelu)

    run()
    launches.launches.clear()
    with cutfuse.batch_invariant():
        y = run()
        assert {launch.kernel for launch in launches.launches if hasattr(launch, "kernel")} <= {
            "sm90_split6_128x128x64",
            "sm90_convert6_128x128x64",
        }
        again = directly(run)
    torch.testing.assert_close(again, y, rtol=0, atol=0)
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x.double(), weight.double(), bias.double()))
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_plain_layer_runs_a_kernel(launches: EmulatedLaunches, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 64).to(dtype), torch.randn(32, 64).to(dtype)
    with cutfuse.batch_invariant():
        for _ in range(2):
            launches.launches.clear()
            y = cutfuse.linear(x, weight)
            assert any(name.startswith("gemm") for name in launches.names)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": lambda x: x.t().contiguous().t(),
    "off the boundary": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
    "with gaps": lambda x: torch.cat([x, x[:, :1]], 1)[:, : x.shape[1]],
    "every second": lambda x: torch.stack([x, x], 2)[:, :, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_no_kernel_reads_are_copied(launches: EmulatedLaunches, layout: str) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    with cutfuse.batch_invariant():
        expected = cutfuse.linear(x, weight, epilogue=torch.relu)
        for _ in range(3):
            y = cutfuse.linear(LAYOUTS[layout](x), weight, epilogue=torch.relu)
            torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_a_row_reduction_folds_in_one_order(launches: EmulatedLaunches) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(512, 64).bfloat16()
    with cutfuse.batch_invariant():
        for op in ("sum", "logsumexp"):
            launches.launches.clear()
            cutfuse.linear(x, weight, reduce=op)
            (fold,) = [launch for launch in launches.launches if launch.function == "finalize_partials"]
            assert (fold.tiles, fold.batch_invariant) == (4, True)


REDUCED: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
    "rows": lambda x: (x, 1),
    "columns": lambda x: (x.t(), 0),
    "all but the first": lambda x: (x.view(x.shape[0], 4, -1), (1, 2)),
    "all but the last": lambda x: (x.t().reshape(4, -1, x.shape[0]), (0, 1)),
    "off the boundary": lambda x: (LAYOUTS["off the boundary"](x), 1),
    "with gaps": lambda x: (LAYOUTS["with gaps"](x), 1),
}


@pytest.mark.parametrize("layout", REDUCED)
@pytest.mark.parametrize("columns", [20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_are_of_aligned_rows(layout: str, columns: int, dtype: torch.dtype) -> None:
    x, dim = REDUCED[layout](torch.randn(6, columns).to(dtype))
    operands = torch.randn(x.shape), torch.randn(())
    call = normalise_reduce(x, dim, prologue=lambda z, r, s: z * r + s, operands=operands)
    assert isinstance(call, ReduceCall)
    rows = _in_rows(call)
    again = _in_rows(rows)
    assert rows.dims == (1,) or rows is call
    matrix = rows.x.view(6, columns) if rows is call else rows.x
    assert again is rows or again.x.data_ptr() == rows.x.data_ptr()
    assert (matrix.shape, matrix.data_ptr() % 16, matrix.stride(0) * dtype.itemsize % 16) == ((6, columns), 0, 0)
    assert matrix.stride(1) == 1
    found = composed.reduce(rows.x, rows.operands, rows.prologue.program, "sum", rows.dims, torch.float32)
    torch.testing.assert_close(found, (x * operands[0] + operands[1]).sum(dim), rtol=1e-4, atol=1e-4)


def test_a_reduction_is_planned_for_the_mode(launches: EmulatedLaunches) -> None:
    x = torch.randn(6, 64)
    for _ in range(2):
        with cutfuse.batch_invariant():
            cutfuse.reduce(x, 1)
        cutfuse.reduce(x, 1)
        cutfuse.reduce(x, 0)
    assert [launch.batch_invariant for launch in launches.launches] == [True, False, False]


def test_a_training_step_runs_kernels_forwards_and_any_way_backwards(launches: EmulatedLaunches) -> None:
    x = torch.randn(6, 64, requires_grad=True)
    weight = torch.randn(32, 64, requires_grad=True)
    for epilogue in (None, torch.relu):
        launches.launches.clear()
        with cutfuse.batch_invariant():
            y = cutfuse.linear(x, weight, epilogue=epilogue)
            assert any("6" in getattr(launch, "kernel", "") for launch in launches.launches)
            y.sum().backward()
        assert x.grad is not None


def test_an_mlp_and_a_head_run_kernels(launches: EmulatedLaunches) -> None:
    x, w1, w2 = torch.randn(6, 64), torch.randn(128, 64), torch.randn(64, 128)
    target = torch.arange(6)
    with cutfuse.batch_invariant():
        y = cutfuse.mlp(x, w1, None, w2, None, activation=torch.nn.functional.silu)
        loss = cutfuse.linear_cross_entropy(x, w1, target, reduction="none")
        assert {launch.function for launch in launches.launches} <= {
            "split",
            "gemm_planes",
            "gemm_convert",
            "finalize_partials",
            "reduce",
            "pointwise",
        }
        assert all(launch.batch_invariant for launch in launches.launches if launch.function == "reduce")
    h = torch.nn.functional.silu(x @ w1.t())
    torch.testing.assert_close(y, h @ w2.t(), rtol=1e-3, atol=1e-3)
    expected = torch.nn.functional.cross_entropy(x @ w1.t(), target, reduction="none")
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "pointwise": (lambda: cutfuse.pointwise(torch.relu, torch.randn(4, 64)), "round differently"),
    "precision": (lambda: in_ieee(torch.randn(4, 64), torch.randn(8, 64)), 'precision "ieee"'),
}


def in_ieee(x: Tensor, weight: Tensor) -> Tensor:
    with cutfuse.precision("ieee"):
        return cutfuse.linear(x, weight)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_computes_is_refused(launches: EmulatedLaunches, case: str) -> None:
    call, reason = REFUSED[case]
    call()
    with cutfuse.batch_invariant():
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=f"same bits in every batch here: .*{reason}.*Change that"):
                call()
        with cutfuse.batch_invariant(False):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: cutfuse.linear(x, x),
        lambda x: cutfuse.linear(x, x, epilogue=torch.relu),
        lambda x: cutfuse.mlp(x, x, None, x, None),
        lambda x: cutfuse.pointwise(torch.relu, x),
        lambda x: cutfuse.reduce(x, 1),
        lambda x: cutfuse.reduce(x.int(), 1, "mean"),
        lambda x: cutfuse.explain(x, x),
        lambda x: cutfuse.nn.FusedLinear(8, 8)(x),
    ],
)
def test_a_cpu_is_refused(call: Callable[[Tensor], object]) -> None:
    x = torch.randn(8, 8)
    call(x)
    with cutfuse.batch_invariant(), pytest.raises(NotImplementedError, match="every batch here: x is"):
        call(x)


def test_explain_says_what_holds() -> None:
    x, weight = torch.randn(1, 4096, device="meta"), torch.randn(4096, 4096, device="meta")
    assert cutfuse.explain(cutfuse.linear, x, weight, epilogue=torch.relu, device="H200").bits == ""
    with cutfuse.batch_invariant():
        found = cutfuse.explain(cutfuse.linear, x, weight, epilogue=torch.relu, device="H200")
        assert found.path == "fused"
        assert "same bits in every batch" in found.bits
        assert f"bits       {found.bits}" in str(found)
        copied = cutfuse.explain(cutfuse.linear, x.bfloat16(), weight[:4095].bfloat16(), device="H200")
        assert (copied.path, bool(copied.bits)) == ("product", True)
        with cutfuse.precision("ieee"), pytest.raises(NotImplementedError, match='precision "ieee"'):
            cutfuse.explain(cutfuse.linear, x, weight, device="H200")


def test_backward_passes_leave_the_mode_and_count_no_context_where_it_does_not_hold() -> None:
    with cutfuse.batch_invariant():
        with invariance.without_batch_invariance():
            assert not is_batch_invariant()
        assert is_batch_invariant()
    cutfuse.set_batch_invariant(True)
    with invariance.without_batch_invariance():
        assert not is_batch_invariant()
    cutfuse.set_batch_invariant(False)
    assert isinstance(invariance.without_batch_invariance(), contextlib.nullcontext)


def test_tracing_sees_the_mode_while_it_holds_in_any_thread_and_no_longer() -> None:
    assert not invariance.process.holds_somewhere
    with cutfuse.batch_invariant(), cutfuse.batch_invariant(False):
        assert in_new_thread(lambda: invariance.process.holds_somewhere)
    assert not invariance.process.holds_somewhere
    cutfuse.set_batch_invariant(True)
    assert cutfuse.get_batch_invariant()
    with cutfuse.batch_invariant():
        pass
    assert invariance.process.holds_somewhere
    cutfuse.set_batch_invariant(False)
    assert not invariance.process.holds_somewhere


@pytest.mark.parametrize("choose", [cutfuse.batch_invariant, cutfuse.set_batch_invariant])
def test_other_values_are_refused(choose: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="enabled has to be True or False, got 'on'"):
        choose("on")


COMPILED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "plain layer": (lambda x, w: cutfuse.linear(x, w), "linear"),
    "epilogue": (lambda x, w: cutfuse.linear(x, w, epilogue=torch.relu), "linear"),
    "affine sum": (lambda x, w: cutfuse.linear(x, w, reduce="sum"), "linear"),
    "columns": (lambda x, w: cutfuse.reduce(x, 0), "reduce"),
    "ragged rows": (lambda x, w: cutfuse.reduce(x[:, :13], 1), "reduce"),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_calls_operators_once_the_mode_was_asked_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, operator = COMPILED[case]
    monkeypatch.setattr(invariance.process, "holds_somewhere", True)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x, weight = torch.randn(6, 16), torch.randn(8, 16)
    with native.use_operators_everywhere():
        expected = function(x, weight)
        found = torch.compile(function, fullgraph=True, backend=backend)(x, weight)
    torch.testing.assert_close(found, expected)
    assert any(f"cutfuse.{operator}" in name for name in called), called


def test_a_compiled_call_is_refused_while_it_is_traced() -> None:
    x = torch.randn(8, 8)
    compiled = torch.compile(lambda x: cutfuse.linear(x, x, epilogue=torch.relu), backend="eager")
    with cutfuse.batch_invariant(), pytest.raises(NotImplementedError, match="every batch here: x is on cpu"):
        compiled(x)
