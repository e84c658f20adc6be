"""What torch.compile's own compiler is given of a layer: the fused operator, or PyTorch's operations in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from compiled_epilogues import FakeCompiler, compiled_by, core
from processes import run_python
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch._subclasses import FakeTensorMode

import cutfuse
from cutfuse import arguments
from cutfuse.layer import inductor, planner, schema
from cutfuse.layer.layouts import NOT_CUDA
from cutfuse.linear import normalise_linear
from cutfuse.native import use_operators_everywhere
from cutfuse.pointwise import normalise_pointwise
from cutfuse.registration import cache_tag

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]

H200 = (9, 0, 132)
GENERATOR = torch.Generator().manual_seed(0)
W, B = (torch.randn(*shape, generator=GENERATOR).bfloat16() for shape in ((24, 16), (24,)))


def layer(x: Tensor, r: Tensor) -> Tensor:
    return cutfuse.linear(x, W, B, epilogue=lambda z, r: F.gelu(z) * r, operands=(r,))


def inputs(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 16).to(dtype), torch.randn(rows, 24).to(dtype)


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    """The operators run on a CPU too, and nothing that was compiled before is found again."""
    torch._dynamo.reset()
    with use_operators_everywhere(), torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture(params=[NOT_CUDA, H200], ids=["cuBLAS", "fused"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Where small products are cuBLAS's, and where they are fused, with the host's times of public calls."""
    monkeypatch.setattr(planner, "device_facts", lambda device: request.param)
    monkeypatch.setattr(planner, "_issuer", lambda: "call")
    return request.param


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_compiler_is_given_the_faster_one(device: tuple[int, int, int], dynamic: bool | None) -> None:
    """Sizes that change, which Dynamo makes symbols of, make no more graphs than they do in PyTorch's operations."""
    graphs = []

    def compile_forward(graph: fx.GraphModule, _: Sequence[object]) -> fx.GraphModule:
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    backend = aot_autograd(fw_compiler=compile_forward, decompositions=select_decomp_table())
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (4, 5, 6, 9, 24):
        given = inputs(rows)
        torch.testing.assert_close(compiled(*given), layer(*given))
    assert len(graphs) == (1 if dynamic else 2)
    for graph in graphs:
        assert (schema.linear in graph) == (device == H200)
        assert (torch.ops.aten.addmm.default in graph) == (device != H200)


@pytest.mark.parametrize("reduction", [None, "amax"])
def test_the_epilogue_is_compiled_beside_the_graph(device: tuple[int, int, int], reduction: str | None) -> None:
    """Where the operator stays, which with a reduction and an operand of 16x24 it does not: cuBLAS is faster."""

    def reduced(x: Tensor, r: Tensor) -> Tensor:
        operand = B if reduction else r
        return cutfuse.linear(x, W, B, epilogue=lambda z, r: F.gelu(z) * r, operands=(operand,), reduce=reduction)

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, decompositions=select_decomp_table())
    with compiled_by(FakeCompiler()) as compiler:
        given = inputs(16)
        torch.testing.assert_close(torch.compile(reduced, backend=backend)(*given), reduced(*given))
        cutfuse.wait(30)
        kernels = [kernel for kernel, _, _ in compiler.compiled]
        assert core.specialization_count() == len(kernels) == (device == H200)
        assert all(("rows" in kernel) == (reduction is not None) for kernel in kernels)


def test_the_compilers_code(device: tuple[int, int, int]) -> None:
    torch.compile(torch.sin)(torch.ones(3))  # the compiler has been used before
    given = inputs(5)
    y, (code,) = run_and_get_code(torch.compile(layer, fullgraph=True), *given)
    torch.testing.assert_close(y, layer(*given))
    assert ("torch.ops.cutfuse.on_cpu.linear(" in code) == (device == H200)
    assert ("extern_kernels.addmm" in code) == (device != H200)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch 2.8's own
def test_its_code_calls_every_operator_by_its_function() -> None:
    """A layer that trains has a product, a pass and its gradient; a mean has a reduction."""

    def model(x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
        y = cutfuse.linear(x, weight, epilogue=lambda z, r: F.gelu(z) * r, operands=(r,))
        return cutfuse.reduce(y.float(), -1, "sum", prologue=torch.sin)

    x, r = inputs(6)
    compiled = torch.compile(model, fullgraph=True)
    weight = W.clone().requires_grad_()
    _, codes = run_fw_bw_and_get_code(lambda: compiled(x, weight, r))
    code = "".join(codes)
    for name in ("pointwise", "pointwise_backward", "reduce"):
        assert f"torch.ops.cutfuse.on_cpu.{name}(" in code
    assert ".default(" not in "".join(line for line in code.splitlines() if "torch.ops.cutfuse" in line)
    exact = W.double().requires_grad_()
    (F.gelu(x.double() @ exact.t()) * r.double()).sin().sum(-1).sum().backward()
    assert weight.grad is not None
    assert exact.grad is not None
    assert (weight.grad - exact.grad).abs().max() <= 0.03 * exact.grad.abs().max()


def test_it_is_in_either_table_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {}
    for name in (True, False):
        with torch._inductor.config.patch(fallback_random=name):
            tables[name] = select_decomp_table()
        monkeypatch.delitem(tables[name], schema.linear, raising=False)
    with torch._inductor.config.patch(fallback_random=True):
        inductor.register()
    assert all(schema.linear in table for table in tables.values())


def decided(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, epilogue: Callable[..., Tensor], **layout: object
) -> bool:
    """Whether the operator stays for a layer of these sizes on an H200."""
    monkeypatch.setattr(planner, "device_facts", lambda device: H200)
    dtype = layout.get("dtype", torch.bfloat16)
    rows = torch.empty(m, k + 8, dtype=dtype, device="meta")
    x = rows[:, layout.get("first", 0) :][:, :k]
    weight, bias = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((n, k), (n,)))
    text, reduction = cutfuse.Epilogue(epilogue).text, layout.get("reduction", "none")
    y = inductor.linear(x, weight, bias, [], text, reduction, dtype)
    assert y is NotImplemented or y.shape == ((m, n) if reduction == "none" else (m,))
    return y is NotImplemented


def six(z: Tensor) -> Tensor:
    return torch.sigmoid(torch.tanh(torch.relu(z) * 2 + 1)) - 3


def test_it_is_decided_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decided(monkeypatch, 8192, 8192, 1024, F.gelu)
    assert decided(monkeypatch, 197, 1536, 384, F.gelu)  # waits for the host, which issues one kernel sooner than two
    assert not decided(monkeypatch, 96, 1024, 16384, F.gelu)
    assert not decided(monkeypatch, 1024, 32768, 1024, six)
    assert decided(monkeypatch, 8192, 8192, 1024, F.gelu, first=1)  # misaligned, and copied first
    assert decided(monkeypatch, 8192, 8187, 1024, F.gelu)
    assert decided(monkeypatch, 12608, 3072, 768, torch.relu)
    assert decided(monkeypatch, 1576, 3072, 768, F.gelu, dtype=torch.float32)  # its precision is chosen when it runs
    assert decided(monkeypatch, 1576, 3072, 768, F.gelu, dtype=torch.float64)  # which the planner does not know
    for reduction in ("amax", "logsumexp"):
        assert not decided(monkeypatch, 1024, 8192, 8192, six, reduction=reduction)
        assert decided(monkeypatch, 4096, 8192, 1024, six, reduction=reduction)
        assert decided(monkeypatch, 1024, 8192, 8192, six, reduction=reduction, dtype=torch.float32)


@pytest.mark.parametrize("setting", ["triton.cudagraphs", "cpp_wrapper"])
def test_it_depends_on_what_issues_the_launches(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """A graph takes nothing of the host, and code in C++ more for an operator than for two functions."""
    sizes = (96, 4096, 3072)
    assert decided(monkeypatch, *sizes, F.relu)
    with torch._inductor.config.patch({setting: True}):
        assert not decided(monkeypatch, *sizes, F.relu)


def test_what_is_prepared_stays_an_operator() -> None:
    snapshot = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    x = torch.empty(4, 8, dtype=torch.bfloat16, device="meta")
    assert inductor.linear(x, snapshot, None, [], "operands=0", "none", torch.bfloat16, snapshot) is NotImplemented


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors of a GPU that need not be there, in compiled code."""
    monkeypatch.setattr(arguments.native, "operators_everywhere", False)
    monkeypatch.setattr(arguments.native, "serves", lambda device: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode() as mode:
        yield mode


@pytest.mark.parametrize(
    ("dtype", "needs_grad", "opted_in", "is_composed"),
    [
        (torch.bfloat16, True, False, True),
        (torch.float32, True, False, True),
        (torch.bfloat16, False, False, False),
        (torch.float32, True, True, False),  # in a precision that is asked for
        (torch.bfloat16, True, True, True),
    ],
)
def test_compiled_training_is_pytorchs_operations(
    on_a_gpu: FakeTensorMode,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    needs_grad: bool,
    opted_in: bool,
    is_composed: bool,
) -> None:
    monkeypatch.setattr(cutfuse.layer.autograd.process, "opted_in", opted_in)
    x, weight = (torch.empty(8, 8, dtype=dtype, device="cuda") for _ in range(2))
    call = normalise_linear(x, weight.requires_grad_(needs_grad), epilogue=cutfuse.Epilogue(torch.tanh))
    assert ("torch.compile" in call.composed_because) == bool(call.composed_because) == is_composed


def test_compiled_pointwise_is_pytorchs_operations(on_a_gpu: FakeTensorMode) -> None:
    x = torch.empty(8, 8, device="cuda")
    assert "torch.compile" in normalise_pointwise(cutfuse.Epilogue(torch.tanh), x).composed_because


def test_compiled_code_on_disk_is_of_these_operators(
    device: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that was compiled for operators with other arguments would fail."""
    found = torch.compiler.config.cache_key_tag
    assert cache_tag() in found

    def hits(tag: str) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.no_grad(), torch.compiler.config.patch(cache_key_tag=tag):
            torch.compile(layer)(*inputs(5))
        return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        torch._inductor.config.patch(force_disable_caches=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        assert [hits(found), hits(found)] == [0, 1]
        monkeypatch.setattr(schema, "SCHEMAS", (*schema.SCHEMAS, "linear(Tensor x) -> Tensor"))
        assert hits(cache_tag()) == 0


def test_a_users_tag_of_compiled_code_stays() -> None:
    code = "import cutfuse, torch; print(torch.compiler.config.cache_key_tag)"
    assert run_python("-c", code, TORCH_COMPILE_CACHE_KEY_TAG="mine") == "mine" + cache_tag()


def both_products(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The two products behind a gradient that is put together of parts, as of a layer that is split by chunk."""
    rows = torch.cat([a * b.sigmoid(), a + b], 2).reshape(-1, 2 * a.shape[2])
    return schema.product(rows, w, ""), schema.product(rows.t(), x.t(), "")


@pytest.mark.parametrize("width", [1000, 1368])
def test_a_product_of_rows_that_inductor_pads(width: int) -> None:
    """On a CPU it takes settings for what Inductor does on a GPU by itself. PyTorch 2.11 fails without the mend."""
    a, b, x, w = (torch.randn(*shape) for shape in ((4, 100, width), (4, 100, width), (400, 8), (8, 2 * width)))
    inductor.register()
    with torch._inductor.config.patch(disable_padding_cpu=False, force_pointwise_cat=True, realize_opcount_threshold=1):
        found = torch.compile(both_products)(a, b, x, w)
    torch.testing.assert_close(found, both_products(a, b, x, w))


def test_memory_behind_a_view_is_laid_out_as_the_view_has_it() -> None:
    """Of PyTorch up to 2.11, which pads the rows of memory while it makes a view of it, and keeps the layout open."""
    from torch._inductor import ir

    cpu = torch.device("cpu")
    layout = ir.FlexibleLayout(cpu, torch.float32, [4, 3, 5])
    layout.stride = [24, 8, 1]
    memory = ir.Buffer(name="memory", layout=layout)
    view = ir.ReinterpretView(data=ir.StorageBox(memory), layout=ir.FixedLayout(cpu, torch.float32, [12, 5], [8, 1]))
    inductor._settle_layout(ir.TensorBox(view))
    assert isinstance(memory.layout, ir.FixedLayout)
    assert list(memory.layout.stride) == [24, 8, 1]
