"""The drop-ins: same arguments, parameters, initialisation, values and gradients as the models that they replace."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from test_epilogue_language import StraightThrough, gate
from torch import Tensor, nn

import cutfuse
from cutfuse import models

# Name, constructor arguments, input shape, parameters.
MODELS = {
    "LinearSigmoidSum": ((24, 40), (6, 24), {"linear.weight": (40, 24), "linear.bias": (40,)}),
    "Sigmoid": ((), (6, 24), {}),
    "GemmDivideSumScale": ((24, 40, 1.5), (6, 24), {"weight": (40, 24)}),
    "SumReduction": ((1,), (6, 8, 5), {}),
    "GemmSigmoidScaleResidual": ((24, 40, 2.0), (6, 24), {"gemm.weight": (40, 24), "gemm.bias": (40,)}),
}


def make_pair(name: str) -> tuple[nn.Module, nn.Module]:
    arguments, *_ = MODELS[name]
    pair = []
    for home in (models, cutfuse.nn):
        torch.manual_seed(0)
        pair.append(getattr(home, name)(*arguments))
    return pair[0], pair[1]


def test_every_model_has_a_drop_in() -> None:
    others = {"FusedLinear", "LinearCrossEntropy", "MLP", "fuse_mlps"}
    assert set(models.__all__) == set(MODELS) == set(cutfuse.nn.__all__) - others


@pytest.mark.parametrize("name", MODELS)
def test_same_signature_and_parameters(name: str) -> None:
    reference, fused = make_pair(name)
    assert inspect.signature(type(fused)) == inspect.signature(type(reference))
    for module in (reference, fused):
        assert {key: tuple(t.shape) for key, t in module.state_dict().items()} == MODELS[name][2]
    for a, b in zip(reference.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a, b)  # one seed, the same weights
    fused.load_state_dict({key: torch.randn_like(t) for key, t in reference.state_dict().items()}, strict=True)
    reference.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(MODELS[name][1])
    torch.testing.assert_close(fused(x), reference(x))


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, path: str) -> None:
    reference, fused = make_pair(name)
    x = torch.randn(MODELS[name][1], requires_grad=True)
    expected = reference(x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, *reference.parameters()), grad)
    torch.testing.assert_close(torch.autograd.grad(fused(x), (x, *fused.parameters()), grad), wanted)


def test_scaling_factor_may_change_and_may_be_a_tensor() -> None:
    reference, fused = make_pair("GemmSigmoidScaleResidual")
    x = torch.randn(6, 24)
    for factor in (3.0, 0, torch.tensor(0.5), nn.Parameter(torch.tensor(0.25))):
        for module in (reference, fused):
            if isinstance(factor, nn.Parameter) and hasattr(module, "scaling_factor"):
                del module.scaling_factor
            module.scaling_factor = factor
        torch.testing.assert_close(fused(x), reference(x))


@pytest.mark.parametrize("name", MODELS)
def test_modules_copy_and_pickle(name: str) -> None:
    """A pickle that 0.2.0 made loads too: it names the module of each class, as in `cutfuse.nn.drop_ins`."""
    former = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for module, package in zip(make_pair(name), ("cutfuse.models", "cutfuse.nn"), strict=True):
        pickled = pickle.dumps(module, protocol=0)
        old = pickled.replace(type(module).__module__.encode() + b"\n", f"{package}.{former}\n".encode())
        assert old != pickled
        x = torch.randn(MODELS[name][1])
        for other in (copy.deepcopy(module), pickle.loads(pickled), pickle.loads(old)):
            assert type(other) is type(module)
            torch.testing.assert_close(other(x), module(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated in PyTorch, still used
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torch.jit.script], ids=["fx", "jit"])
@pytest.mark.parametrize("name", MODELS)
def test_older_tracers_get_the_plain_model(name: str, trace: Callable[[nn.Module], nn.Module]) -> None:
    _, module = make_pair(name)
    x, traced = torch.randn(MODELS[name][1]), trace(nn.Sequential(module))
    torch.testing.assert_close(traced(x), module(x))
    torch.testing.assert_close(trace(module)(x), module(x))
    assert type(module) is getattr(cutfuse.nn, name)
    for parameter in module.parameters():
        parameter.data.mul_(2)
    torch.testing.assert_close(traced(x), module(x))  # the parameters are shared


@pytest.mark.parametrize("name", ["LinearSigmoidSum", "GemmDivideSumScale", "GemmSigmoidScaleResidual"])
def test_more_dimensions_transforms_and_meta_tensors(name: str) -> None:
    reference, fused = (module.double() for module in make_pair(name))
    x = torch.randn(4, 6, 24, dtype=torch.float64)
    torch.testing.assert_close(fused(x), reference(x))
    torch.testing.assert_close(torch.vmap(fused)(x), torch.vmap(reference)(x))
    parameters = dict(fused.named_parameters())

    def loss(module: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, parameters, (x[0],)).square().sum()

    actual = torch.func.grad(lambda p: loss(fused, p))(parameters)
    torch.testing.assert_close(actual, torch.func.grad(lambda p: loss(reference, p))(parameters))
    assert fused.to("meta")(x[0].to("meta")).shape == reference(x[0]).shape


# FusedLinear.


def test_fused_linear_is_a_linear_layer_with_what_follows() -> None:
    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=torch.sigmoid, reduce="sum", keepdim=True)
    x = torch.randn(2, 3, 7)
    torch.testing.assert_close(fused(x), torch.sigmoid(pre_activation(fused, x)).sum(-1, keepdim=True))
    assert repr(fused) == (
        "FusedLinear(in_features=7, out_features=5, bias=True, epilogue=sigmoid, reduce='sum', keepdim=True)"
    )


def pre_activation(layer: cutfuse.nn.FusedLinear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def unfused(call: Callable[..., Tensor], *given: Tensor | float, reason: str = "") -> Tensor:
    """What a call gives that warns once of an epilogue that runs unfused. Elsewhere that warning is an error."""
    with pytest.warns(UserWarning, match=f"unfused: .*{reason}") as record:
        y = call(*given)
    (warning,) = (warning for warning in record if "unfused" in str(warning.message))
    if isinstance(call, cutfuse.nn.FusedLinear):
        assert warning.filename == __file__
    return y


def _scripted_sigmoid(z: Tensor) -> Tensor:
    return torch.sigmoid(z)


def _twice(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return fn(z) * 2


def _only_tensors(z: Tensor) -> Tensor:
    assert type(z) is Tensor
    return z * 2


UNFUSABLE: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], str]] = {
    "function": (lambda: lambda z: torch.softmax(z, -1), "torch.softmax is not in the epilogue language"),
    "method": (lambda: lambda z: z.cumsum(-1), "Tensor.cumsum"),
    "method of the class": (lambda: lambda z: torch.Tensor.cumsum(z, -1), "Tensor.cumsum"),
    "scripted function": (lambda: torch.jit.script(_scripted_sigmoid), ""),
    "scripted module": (lambda: torch.jit.script(nn.GELU()), ""),
    "calls a scripted function": (lambda: functools.partial(_twice, torch.jit.script(_scripted_sigmoid)), ""),
    "branch": (lambda: lambda z: z if z.sum() > 0 else -z, ""),
    "too long": (lambda: lambda z: sum((torch.sin(z * k) for k in range(40)), z), "at most 32"),
    "checks its argument": (lambda: _only_tensors, "AssertionError"),
    "a backward of its own": (lambda: lambda z: StraightThrough.apply(torch.tanh(z)), ""),
    "a gate without a gradient": (lambda: lambda z: z * gate(z), ""),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", UNFUSABLE)
def test_what_cannot_be_traced_runs_unfused_after_one_warning(name: str, compiled: bool) -> None:
    make, reason = UNFUSABLE[name]
    epilogue = make()
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=epilogue)
    x = torch.randn(6, 7)
    torch._dynamo.reset()
    call = torch.compile(module, backend="aot_eager") if compiled else module
    expected = epilogue(pre_activation(module, x))
    (wanted,) = torch.autograd.grad(expected.sum(), module.weight)
    for y in (unfused(call, x, reason=reason), call(x)):
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), module.weight)[0], wanted)


@pytest.mark.parametrize("fullgraph", [None, True, False], ids=["eager", "fullgraph", "compiled"])
def test_a_forgotten_operand_is_an_error_and_not_remembered(fullgraph: bool | None) -> None:
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z, r: z * r)
    x, row = torch.randn(6, 7), torch.randn(5)
    torch._dynamo.reset()
    call = module if fullgraph is None else torch.compile(module, fullgraph=fullgraph, backend="eager")
    for operands in ((), (row, row), (2.0, 2.0)):
        with pytest.raises(cutfuse.EpilogueError, match=f"the pre-activation and {len(operands)} operands;"):
            call(x, *operands)
    for operand in (row, 2.0, 3):
        torch.testing.assert_close(call(x, operand), pre_activation(module, x) * operand)
    assert cutfuse.explain(module, x, row).program.text == "operands=1; mul z r0"  # which an unfused call has not


@pytest.mark.parametrize(
    ("epilogue", "arguments", "error", "message"),
    [
        (torch.sigmoid, (torch.ones(6, 8),), ValueError, r"^cutfuse.nn.FusedLinear: .*\[..., K\]"),
        (None, (torch.ones(6, 7), 1.0), cutfuse.EpilogueError, "1 operand, but no epilogue that takes any"),
        (None, (torch.ones(6, 7), torch.ones(5)), cutfuse.EpilogueError, "1 operand, but no epilogue that takes any"),
        (None, (torch.ones(6, 7), "1"), TypeError, "^cutfuse.nn.FusedLinear: operand 0 has to be .* a number, got str"),
    ],
)
def test_wrong_arguments_are_errors_and_not_unfusable(
    epilogue: Callable[[Tensor], Tensor] | None, arguments: tuple, error: type[Exception], message: str
) -> None:
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=epilogue)
    with pytest.raises(error, match=message):
        module(*arguments)
    module(torch.randn(6, 7))


def test_an_exception_of_the_epilogues_own_passes_through_and_is_not_remembered() -> None:
    scales: dict[str, float] = {}
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z: z * scales["now"])
    x = torch.randn(6, 7)
    with pytest.raises(KeyError, match="now"):
        module(x)
    scales["now"] = 2.0
    module(x)
    assert cutfuse.explain(module, x).program.text == "operands=0; mul z 2.0"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_assigning_an_epilogue_starts_afresh(compiled: bool) -> None:
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z: z.cumsum(-1))
    x = torch.randn(6, 7)
    torch._dynamo.reset()
    call = torch.compile(module, backend="eager") if compiled else module
    expected = pre_activation(module, x)
    unfused(call, x)
    for epilogue in (torch.tanh, nn.GELU(), None, cutfuse.Epilogue(torch.sigmoid)):
        module.epilogue = epilogue
        torch.testing.assert_close(call(x), expected if epilogue is None else epilogue(expected))
    assert cutfuse.explain(module, x).program.text == "operands=0; sigmoid z"
    module.epilogue = lambda z: z.cumsum(-1)
    unfused(call, x)
    module.reduce, module.keepdim = "sum", True
    torch.testing.assert_close(unfused(call, x), expected.cumsum(-1).sum(-1, keepdim=True))


def test_numbers_and_tensors_as_operands_are_told_apart() -> None:
    def raise_to(z: Tensor, exponent: Tensor | int) -> Tensor:
        return z.pow(exponent) if isinstance(exponent, int) else z.cumsum(-1) * exponent

    module = cutfuse.nn.FusedLinear(7, 5, epilogue=raise_to)
    x = torch.randn(6, 7)
    unfused(module, x, torch.ones(5))
    module(x, 2)
    assert cutfuse.explain(module, x, 2).program.operand_count == 0
    torch._dynamo.reset()
    torch.compile(cutfuse.nn.FusedLinear(7, 5, epilogue=raise_to), fullgraph=True, backend="eager")(x, 2)


def test_settings_are_checked_when_they_are_given() -> None:
    with pytest.raises(TypeError, match=r"callable or a cutfuse\.Epilogue, got str"):
        cutfuse.nn.FusedLinear(7, 5, epilogue="relu")
    with pytest.raises(cutfuse.EpilogueError, match=r"nn\.FusedLinear: the epilogue is the class torch\.nn\.ReLU"):
        cutfuse.nn.FusedLinear(7, 5, epilogue=nn.ReLU)
    with pytest.raises(TypeError, match="keepdim has to be True or False, got 1"):
        cutfuse.nn.FusedLinear(7, 5, reduce="sum", keepdim=1)
    module = cutfuse.nn.FusedLinear(7, 5)
    for name, value in (
        ("epilogue", "relu"),
        ("epilogue", nn.ReLU),
        ("reduce", "max"),
        ("reduce", ["sum"]),
        ("keepdim", None),
    ):
        with pytest.raises((TypeError, ValueError), match=r"nn\.FusedLinear"):
            setattr(module, name, value)
    assert (module.epilogue, module.reduce, module.keepdim) == (None, None, False)


def test_fused_linear_copies_pickles_and_keeps_an_epilogues_parameters() -> None:
    x = torch.randn(6, 7)
    for epilogue in (_only_tensors, nn.PReLU(), torch.tanh):
        module = cutfuse.nn.FusedLinear(7, 5, epilogue=epilogue, reduce="amax")
        y = module(x) if epilogue is torch.tanh else unfused(module, x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(other(x), y)
            assert other.state_dict().keys() == module.state_dict().keys()
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=nn.PReLU())
    assert list(module.state_dict()) == ["weight", "bias", "epilogue.weight"]
    module.epilogue = torch.tanh
    assert list(module.state_dict()) == ["weight", "bias"]


def test_an_adapter_of_the_weight_lies_before_the_epilogue() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, 7)), nn.Parameter(torch.randn(5, 2))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.b @ self.a

    layer = cutfuse.nn.FusedLinear(7, 5, epilogue=torch.tanh)
    weight, adapter, x = layer.weight.detach().clone(), LowRank(), torch.randn(6, 7)
    nn.utils.parametrize.register_parametrization(layer, "weight", adapter)
    expected = torch.tanh(F.linear(x, weight + adapter.b @ adapter.a, layer.bias))
    torch.testing.assert_close(layer(x), expected)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*torch.(quint8|qint8)")
def test_dynamic_quantization_leaves_a_fused_linear() -> None:
    assert not isinstance(cutfuse.nn.FusedLinear(7, 5), nn.Linear)
    if not [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]:
        pytest.skip("this PyTorch has no quantized kernels")
    model = nn.Sequential(cutfuse.nn.FusedLinear(7, 5, epilogue=torch.relu), nn.Linear(5, 5)).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert isinstance(quantized[0], cutfuse.nn.FusedLinear)
    assert type(quantized[1]) is not nn.Linear
    x = torch.randn(6, 7)
    assert torch.equal(quantized[0](x), model[0](x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (64, 1)], ids=str)
def test_initialisation_and_state_dict_are_those_of_linear(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(*shape, bias=bias)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    fused = cutfuse.nn.FusedLinear(*shape, bias=bias, epilogue=torch.relu)
    assert torch.equal(torch.get_rng_state(), state)

    def check_equal() -> None:
        assert list(fused.state_dict()) == list(plain.state_dict()) == ["weight", "bias"][: 1 + bias]
        for name, tensor in plain.state_dict().items():
            assert torch.equal(fused.state_dict()[name], tensor)

    check_equal()
    assert (fused.in_features, fused.out_features) == shape
    assert (fused.bias is None) == (not bias)
    for module in (plain, fused):
        torch.manual_seed(4)
        module.reset_parameters()
    check_equal()
    plain.reset_parameters()
    assert str(fused.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    check_equal()
    fused.reset_parameters()
    plain.load_state_dict(fused.state_dict())
    check_equal()
    other = cutfuse.nn.FusedLinear(shape[0], shape[1] + 1, bias)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        other.load_state_dict(plain.state_dict())


def test_device_and_type_are_those_given() -> None:
    layer = cutfuse.nn.FusedLinear(7, 5, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(layer.weight, nn.Linear(7, 5, dtype=torch.bfloat16).weight)
    assert nn.utils.skip_init(cutfuse.nn.FusedLinear, 7, 5, epilogue=torch.relu).weight.shape == (5, 7)


# from_linear.


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_shares_the_parameters(bias: bool) -> None:
    linear = nn.Linear(7, 5, bias=bias, dtype=torch.float64).eval()
    linear.weight.requires_grad_(False)
    state = torch.get_rng_state()
    layer = cutfuse.nn.FusedLinear.from_linear(linear, torch.sigmoid, "sum", True, recompute=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.training) == (7, 5, False)
    assert (layer.epilogue, layer.reduce, layer.keepdim, layer.recompute) == (torch.sigmoid, "sum", True, True)
    assert list(layer.state_dict()) == list(linear.state_dict())
    x = torch.randn(6, 7, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.mul_(2)
    torch.testing.assert_close(layer(x), torch.sigmoid(linear(x)).sum(-1, keepdim=True))
    assert cutfuse.nn.FusedLinear.from_linear(nn.Linear(7, 5)).training
    with pytest.raises(ValueError, match="unknown reduction 'max'"):
        cutfuse.nn.FusedLinear.from_linear(linear, reduce="max")
    named = type("Named", (cutfuse.nn.FusedLinear,), {})
    assert type(named.from_linear(nn.Linear(7, 5), epilogue=torch.relu)) is named


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_forward(layer: nn.Linear) -> nn.Linear:
    """As libraries wrap the call of one module."""
    layer.forward = torch.relu
    return layer


def with_hook(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(_double_output)
    return layer


def _double_output(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return 2 * y


NOT_PLAIN: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "another module": (lambda: nn.Conv1d(7, 5, 1), TypeError, "linear has to be an nn.Linear, got Conv1d"),
    "a weight": (lambda: torch.randn(5, 7), TypeError, "an nn.Linear, got Tensor"),
    "a subclass that computes more": (lambda: Doubled(7, 5), ValueError, "Doubled has a forward of its own"),
    "an assigned forward": (lambda: with_forward(nn.Linear(7, 5)), ValueError, "Linear has a forward of its own"),
    "hooks": (lambda: with_hook(nn.Linear(7, 5)), ValueError, "Linear has hooks: _double_output"),
    "a parametrization": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(7, 5)),
        ValueError,
        "the weight of ParametrizedLinear is computed .*remove_parametrizations",
    ),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_from_linear_refuses_what_it_would_change(name: str) -> None:
    make, error, message = NOT_PLAIN[name]
    with pytest.raises(error, match=rf"cutfuse\.nn\.FusedLinear\.from_linear: .*{message}"):
        cutfuse.nn.FusedLinear.from_linear(make())


# Layers inside of drop-ins that have been replaced.


REPLACEMENTS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "adapter": lambda layer: nn.Sequential(layer, nn.Linear(layer.out_features, layer.out_features)),
    "other forward": lambda layer: Doubled(layer.in_features, layer.out_features),
    "hook": with_hook,
    "pruned": lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "no layer": lambda layer: nn.Identity(),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize(("name", "layer"), [("LinearSigmoidSum", "linear"), ("GemmSigmoidScaleResidual", "gemm")])
def test_a_drop_in_computes_what_its_layer_was_replaced_by(
    name: str, layer: str, replacement: str, compiled: bool
) -> None:
    reference, fused = (module.eval() for module in make_pair(name))
    setattr(reference, layer, REPLACEMENTS[replacement](getattr(reference, layer)))
    setattr(fused, layer, getattr(reference, layer))
    torch._dynamo.reset()
    call = torch.compile(fused, backend="eager", fullgraph=True) if compiled else fused
    x = torch.randn(MODELS[name][1])
    expected, actual = reference(x), call(x)
    torch.testing.assert_close(actual, expected)
    parameters = list(reference.parameters())
    if parameters:
        wanted = torch.autograd.grad(expected.sum(), parameters)
        torch.testing.assert_close(torch.autograd.grad(actual.sum(), parameters), wanted)


def test_explain_says_that_a_layer_was_replaced() -> None:
    fused = cutfuse.nn.LinearSigmoidSum(7, 5)
    fused.linear = nn.Sequential(fused.linear)
    explanation = cutfuse.explain(fused, torch.randn(6, 7))
    assert explanation.path == "composed"
    assert explanation.reasons[0] == "Sequential has a forward of its own: the plain model runs"
