"""torch.compile's backend "cutfuse" and the pass for Inductor: names, modes, options, caches, and models left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS
from processes import run_python
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import cutfuse
from cutfuse.compile import fusion

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.usefixtures("everything_fuses"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on disk that start empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 16, generator=generator))
        self.bias = nn.Parameter(torch.randn(8, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.weight, self.bias)) * 2


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.usefixtures("caches")
def test_training_is_found_in_the_caches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # where Inductor makes no fallback by itself for an operator with a decomposition
    model = Layer()

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = call(X)
        return [y, *torch.autograd.grad(y.square().sum(), list(model.parameters()))]

    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(step(torch.compile(model, backend="cutfuse")), step(model))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


@pytest.mark.usefixtures("caches")
def test_the_pass_is_found_in_the_caches_again() -> None:
    model = Layer().requires_grad_(False)
    for hits in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        with cutfuse.compile.installed():
            y, codes = run_and_get_code(torch.compile(model), X)
        torch.testing.assert_close(y, model(X))
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert any("torch.ops.cutfuse.on_cpu.linear(" in code for code in codes) or hits
    assert torch._inductor.config.pre_grad_custom_pass is None


def test_a_model_with_nothing_to_fuse_compiles_to_what_inductor_makes() -> None:
    def model(x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(-1) * 2

    codes = []
    for backend in ("cutfuse", "inductor"):
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            _, (code,) = run_and_get_code(torch.compile(model, backend=backend), X)
        codes.append("\n".join(line for line in code.splitlines() if not line.startswith("#")))
    assert codes[0] == codes[1]


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Inductor is given as its configuration, in place of a compilation."""
    import torch._inductor.compile_fx

    found: list[dict[str, Any]] = []

    def compile_fx(module: fx.GraphModule, inputs: Any, config_patches: Any = None, **_: Any) -> Callable[..., Any]:
        found.append(dict(config_patches or {}))
        return module.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return found


@pytest.mark.parametrize("arguments", [{}, {"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}])
def test_modes_are_inductors(arguments: dict[str, Any], patches: list[dict[str, Any]]) -> None:
    for backend in ("cutfuse", "inductor"):
        torch._dynamo.reset()
        torch.compile(Layer(), backend=backend, **arguments)(X)
    assert patches[0] == patches[1]


def test_regions_are_chosen_under_the_modes_settings(
    patches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that a CUDA graph launches take no time of the host."""
    seen: list[bool] = []
    monkeypatch.setattr(
        "cutfuse.compile.fusion.why_left", lambda _: seen.append(torch._inductor.config.triton.cudagraphs) or "no"
    )
    torch.compile(Layer(), backend="cutfuse", options={"triton.cudagraphs": True})(X)
    torch._dynamo.reset()
    torch.compile(Layer(), backend="cutfuse")(X)
    assert set(seen[: len(seen) // 2]) == {True}
    assert set(seen[len(seen) // 2 :]) == {False}
    assert patches == [{"triton.cudagraphs": True}, {}]


def test_unknown_options_are_refused_by_inductor() -> None:
    with pytest.raises(Exception, match="Unexpected optimization option no_such_option"):
        torch.compile(Layer(), backend="cutfuse", options={"no_such_option": True})(X)


def test_another_librarys_pass_stays(patches: list[dict[str, Any]]) -> None:
    seen: list[int] = []

    def other(graph: fx.Graph) -> None:
        seen.append(len(graph.nodes))

    with torch._inductor.config.patch(pre_grad_custom_pass=other):
        torch.compile(Layer(), backend="cutfuse")(X)
        assert torch._inductor.config.pre_grad_custom_pass is other
        with cutfuse.compile.installed():
            installed: Any = torch._inductor.config.pre_grad_custom_pass
            assert installed.before == (other,)
            assert installed.uuid() is None  # that pass has no number, so nothing may be cached
            installed(fx.symbolic_trace(Layer()).graph)
        assert torch._inductor.config.pre_grad_custom_pass is other
    assert len(seen) == 1


@pytest.mark.usefixtures("caches")
def test_the_installed_pass_sees_what_is_written_around_a_checkpoint() -> None:
    """Inductor runs its passes on the graphs inside of another first."""
    if torch.__version__.startswith("2.8."):
        pytest.skip("the compiler of PyTorch 2.8 itself repeats the write in the backward pass")

    def model(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: F.gelu(F.linear(x, w) + r), x, use_reentrant=False)
        r.add_(1)
        return y * 2

    trained, found = [X.clone().requires_grad_(), torch.randn(8, 16, requires_grad=True)], []
    for function in (model, torch.compile(model)):
        r = torch.ones(5, 8)
        with cutfuse.compile.installed():
            y = function(*trained, r)
        found.append([y, r, *torch.autograd.grad(y.sum(), trained)])
    torch.testing.assert_close(found[1], found[0])


def test_the_installed_pass_leaves_branches() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        z = F.gelu(F.linear(x, w)) * 2
        y: Tensor = torch.cond(z.sum() > 0, lambda z: F.relu(F.linear(z, w.t())), lambda z: F.linear(z, w.t()), (z,))
        return y

    weight = torch.randn(8, 16)
    with cutfuse.compile.installed(), torch.no_grad():
        y, codes = run_and_get_code(torch.compile(model), X, weight)
    torch.testing.assert_close(y, model(X, weight))
    assert sum(code.count("torch.ops.cutfuse.on_cpu.linear(") for code in codes) == 1


def test_installing_twice_is_installing_once() -> None:
    config = torch._inductor.config
    try:
        cutfuse.compile.install()
        first = config.pre_grad_custom_pass
        cutfuse.compile.install()
        assert config.pre_grad_custom_pass is first
    finally:
        for _ in range(2):
            cutfuse.compile.uninstall()
            assert config.pre_grad_custom_pass is None


def test_another_version_of_the_package_is_another_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on disk outlive it."""
    digest_of, numbers = fusion.digest_of, []
    for text in ("a = 1", "a = 2", "a = 2"):
        (tmp_path / "fusion.py").write_text(text)
        digest = digest_of.__wrapped__(tmp_path)
        monkeypatch.setattr(fusion, "digest_of", lambda package, digest=digest: digest)
        numbers.append(fusion.installed_pass(None).uuid())
    assert numbers[0] != numbers[1] == numbers[2]


def test_importing_cutfuse_imports_no_compiler() -> None:
    """It takes seconds."""
    code = "import sys, cutfuse; print('torch._inductor.compile_fx' in sys.modules)"
    assert run_python("-c", code) == "False"
