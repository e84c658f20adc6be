"""`cutfuse.nn.MLP` beside modules of PyTorch, and models whose MLPs are fused in place."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mlp_cases import sided
from model_checks import PYTORCH_WARNINGS
from torch import Tensor, nn

import cutfuse
from cutfuse.nn import MLP, fuse_mlps

pytestmark = [*PYTORCH_WARNINGS]


class TimmMlp(nn.Module):
    """As timm has it."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(16, 64), nn.GELU(), nn.Dropout(drop)
        self.norm: nn.Module = nn.Identity()
        self.fc2, self.drop2 = nn.Linear(64, 16), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(x))  # type: ignore[no-any-return]


class TimmGluMlp(nn.Module):
    def __init__(self, gate_last: bool) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2, self.gate_last = nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(32, 16), gate_last

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(a * self.act(b) if self.gate_last else self.act(a) * b)  # type: ignore[no-any-return]


class Gated(nn.Module):
    """As timm's SwiGLU with the first names, and as Llama's of transformers with the second."""

    def __init__(self, names: Sequence[str], bias: bool) -> None:
        super().__init__()
        self.names = names
        sizes = (16, 40), (16, 40), (40, 16)
        layers = [*(nn.Linear(*size, bias=bias) for size in sizes), nn.SiLU()]
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down, act = (getattr(self, name) for name in self.names)
        return down(act(gate(x)) * up(x))  # type: ignore[no-any-return]


SWIGLU, LLAMA = ("fc1_g", "fc1_x", "fc2", "act"), ("gate_proj", "up_proj", "down_proj", "act_fn")


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(0.2 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def gelu_new(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))


class GPT2MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = Conv1D(64, 16), Conv1D(16, 64), nn.Dropout(0.1)
        self.act = gelu_new

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))  # type: ignore[no-any-return]


def step(module: nn.Module, x: Tensor, *more: Any) -> list[Tensor]:
    y = module(x, *more)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def example(rows: tuple[int, ...] = (2, 5)) -> Tensor:
    return torch.randn(*rows, 16).requires_grad_()


def test_a_module_is_what_it_says(path: str) -> None:
    module = MLP(16, 64, activation=F.gelu)
    plain = nn.Sequential(module.fc1, nn.GELU(), module.fc2)
    x = example()
    right = step(plain, x)
    torch._dynamo.reset()
    for call in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(step(call, x), right)
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    added = MLP.from_modules(module.fc1, module.fc2, residual=True, recompute=True)  # type: ignore[arg-type]
    torch.testing.assert_close(added(x), x + plain(x))
    torch.testing.assert_close(added(x, 2.0 * x), 2.0 * x + plain(x))
    assert added.fc1 is module.fc1
    assert "recompute=True" in repr(added)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [True, sided])
def test_gates(path: str, gate: Any, bias: bool) -> None:
    packed = MLP(16, 40, 8, activation=F.silu, gate=gate, bias=bias)
    x = example()
    a, b = packed.fc1(x).chunk(2, -1)
    expected = packed.fc2(F.silu(a) * b if gate is True else sided(a, b))
    parts = [nn.Linear(16, 40, bias) for _ in range(2)]
    for name, joined in packed.fc1.named_parameters():
        for part, rows in zip(parts, joined.chunk(2), strict=True):
            setattr(part, name, nn.Parameter(rows.detach()))
    separate = MLP.from_modules(parts[0], packed.fc2, F.silu, gate=gate, up=parts[1])  # type: ignore[arg-type]
    for module in (packed, separate):
        torch.testing.assert_close(module(x), expected)


def test_hooks_and_layers_in_the_place_of_others_run(path: str) -> None:
    module, x = MLP(16, 64, activation=F.gelu), example()
    right, seen = module(x), []
    handle = module.fc1.register_forward_hook(lambda layer, given, z: seen.append(z.shape))
    torch.testing.assert_close(module(x), right)
    assert seen == [(2, 5, 64)]
    handle.remove()
    module.fc2 = nn.Sequential(module.fc2, nn.ReLU())  # an adapter
    torch.testing.assert_close(module(x), F.relu(right))
    outside = []
    module.register_full_backward_hook(lambda layer, of_x, of_y: outside.append(len(of_x)))
    step(module, x)
    assert outside == [1]


def test_parameters_that_are_computed_or_given_for_a_call(path: str) -> None:
    module, x = MLP(16, 64, activation=F.gelu), example()
    doubled = {name: 2.0 * parameter.detach() for name, parameter in module.named_parameters()}
    right = F.linear(F.gelu(F.linear(x, doubled["fc1.weight"], doubled["fc1.bias"])), *list(doubled.values())[2:])
    torch.testing.assert_close(torch.func.functional_call(module, doubled, (x,)), right)
    before = module(x)
    torch.nn.utils.parametrizations.weight_norm(module.fc1)
    torch.testing.assert_close(module(x), before)
    with torch.no_grad():
        module.fc1.parametrizations.weight.original0.mul_(2.0)  # type: ignore[union-attr]
    assert not torch.allclose(module(x), before)
    del module.fc2.bias
    module.fc2.bias = torch.zeros(16)  # no parameter
    assert not torch.allclose(module(x), before)


def test_copies_pickles_and_other_types(path: str) -> None:
    module, x = MLP(16, 64, activation=F.gelu, residual=True), example()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))
    module = module.to(torch.bfloat16)
    assert module(x.bfloat16()).dtype == torch.bfloat16


def test_errors() -> None:
    with pytest.raises(ValueError, match="x of 16 features cannot be added to a result of 8"):
        MLP(16, 64, 8, residual=True)
    layers = nn.Linear(16, 64), nn.Linear(64, 16)
    with pytest.raises(TypeError, match=r"from_modules: fc2 has to be an nn.Linear, got ReLU"):
        MLP.from_modules(layers[0], nn.ReLU())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="up is the layer beside a gate"):
        MLP.from_modules(*layers, up=layers[0])
    layers[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="has hooks"):
        MLP.from_modules(*layers)


@pytest.mark.parametrize(
    "make",
    [
        TimmMlp,
        functools.partial(TimmGluMlp, gate_last=True),
        functools.partial(TimmGluMlp, gate_last=False),
        functools.partial(Gated, SWIGLU, bias=True),
        functools.partial(Gated, LLAMA, bias=False),
        GPT2MLP,
    ],
)
def test_mlps_of_models(path: str, make: Any) -> None:
    model = nn.Sequential(nn.LayerNorm(16), make(), make()).eval()
    x, names, right = example(), list(model.state_dict()), copy.deepcopy(model)
    assert fuse_mlps(model) == ["1", "2"]
    assert fuse_mlps(model) == []
    torch.testing.assert_close(step(model, x), step(right, x), rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()  # and not the first one's
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), right(x))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), right(x))
    del model[1].forward
    torch.testing.assert_close(model(x), right(x))


def test_a_fused_mlp_drops_and_has_hooks_as_before() -> None:
    model = nn.Sequential(TimmMlp(drop=0.5))
    assert fuse_mlps(model) == ["0"]
    assert model[0].training
    x, seen = example(), []
    assert (model(x) == 0.0).any()
    model.eval()
    model[0].fc1.register_forward_hook(lambda *given: seen.append(1))
    model(x)
    assert seen == [1]


def test_what_computes_something_else_is_left() -> None:
    scaled = type("Scaled", (TimmMlp,), {"forward": lambda self, x: 2.0 * TimmMlp.forward(self, x)})()
    normalised, batched = TimmMlp(), TimmMlp()
    normalised.norm = nn.LayerNorm(64)
    batched.act = nn.Softmax(-1)  # type: ignore[assignment]
    with torch.device("meta"):
        meta = TimmMlp()
    model = nn.ModuleList([scaled, normalised, batched, meta, MLP(16, 64), cutfuse.nn.FusedLinear(16, 16)])
    assert fuse_mlps(model) == []
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, "101 MB"),
        ({"activation": F.relu}, "101 MB"),
        ({"activation": F.silu, "gate": True}, "201 MB"),
        ({"recompute": True}, "nothing, and computes it again"),
    ],
)
def test_an_explanation_says_what_is_kept_and_launched(options: dict[str, Any], kept: str) -> None:
    with torch.device("meta"):
        module, x = MLP(768, 3072, dtype=torch.bfloat16, **options), torch.empty(16384, 768, dtype=torch.bfloat16)
    found = cutfuse.explain(module, x, device="H200")
    assert f"kept of the hidden width 3072 for the backward pass: {kept}" in found.steps
    assert any(step.startswith("hidden layer: sm90_bf16_") for step in found.steps)
    # The derivative is in a product where it reads the hidden layer; a pass gives that layer again too.
    of_gradient = next(step for step in found.steps if step.startswith("backward, hidden layer's gradient: "))
    assert ("sm90_bf16_nn_" in of_gradient) == (options.get("activation") is F.relu)
    assert ("pointwise_backward kernel" in of_gradient) == (options.get("activation") is not F.relu)
    assert found.flops == 2 * 16384 * sum(layer.weight.numel() for layer in (module.fc1, module.fc2))
    with torch.no_grad():
        assert not any("backward" in step for step in cutfuse.explain(module, x, device="H200").steps)
    module.fc1.register_forward_hook(lambda *given: None)
    assert "hooks" in cutfuse.explain(module, x, device="H200").reasons[0]


def test_an_explanation_on_a_cpu_is_of_the_layers() -> None:
    x, w1, w2 = example(), torch.randn(64, 16), torch.randn(16, 64)
    found = cutfuse.explain(cutfuse.mlp, x, w1, None, w2, None, activation=F.gelu, residual=x)
    assert found.path == "composed"
    assert [step.partition(":")[0] for step in found.steps] == ["hidden layer", "hidden layer", "result", "result"]
