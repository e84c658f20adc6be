"""The drop-ins: same arguments, parameters, initialisation, values and gradients as the models that they replace."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune
from generators import FLOATS, assert_no_worse
from torch import Tensor, nn

import cutfuse
from cutfuse import models
from cutfuse.native import use_operators_everywhere

# Name, constructor arguments, input shape.
MODELS = {
    "LinearSigmoidSum": ((24, 40), (6, 24)),
    "Sigmoid": ((), (6, 24)),
    "GemmDivideSumScale": ((24, 40, 1.5), (6, 24)),
    "SumReduction": ((1,), (6, 8, 5)),
    "GemmSigmoidScaleResidual": ((24, 40, 2.0), (6, 24)),
}
PARAMETERS = {
    "LinearSigmoidSum": {"linear.weight": (40, 24), "linear.bias": (40,)},
    "Sigmoid": {},
    "GemmDivideSumScale": {"weight": (40, 24)},
    "SumReduction": {},
    "GemmSigmoidScaleResidual": {"gemm.weight": (40, 24), "gemm.bias": (40,)},
}


def make_pair(name: str) -> tuple[nn.Module, nn.Module]:
    arguments, _ = MODELS[name]
    pair = []
    for home in (models, cutfuse.nn):
        torch.manual_seed(0)
        pair.append(getattr(home, name)(*arguments))
    return pair[0], pair[1]


def test_every_model_has_a_drop_in() -> None:
    assert (
        set(models.__all__)
        == set(MODELS)
        == set(cutfuse.nn.__all__)
        - {
            "FusedLinear",
            "LinearCrossEntropy",
            "MLP",
            "fuse_mlps",
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_same_signature_and_parameters(name: str) -> None:
    reference, fused = make_pair(name)
    assert inspect.signature(type(fused)) == inspect.signature(type(reference))
    for module in (reference, fused):
        assert {key: tuple(t.shape) for key, t in module.state_dict().items()} == PARAMETERS[name]
    for a, b in zip(reference.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a, b)  # one seed, the same weights


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_loads_both_ways(name: str) -> None:
    reference, fused = make_pair(name)
    fused.load_state_dict({key: torch.randn_like(t) for key, t in reference.state_dict().items()}, strict=True)
    reference.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(MODELS[name][1])
    torch.testing.assert_close(fused(x), reference(x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_error_is_at_most_the_references(name: str, dtype: torch.dtype) -> None:
    reference, fused = (module.to(dtype) for module in make_pair(name))
    rows, *rest = MODELS[name][1]
    x = torch.randn(64 * rows, *rest, dtype=dtype)  # of a few sums the error is chance
    exact = copy.deepcopy(reference).double()(x.double())
    assert fused(x).dtype == reference(x).dtype
    assert_no_worse(fused(x), reference(x), exact)


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, operators: bool) -> None:
    reference, fused = make_pair(name)
    x = torch.randn(MODELS[name][1], requires_grad=True)
    expected = reference(x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, *reference.parameters()), grad)
    if operators:
        with use_operators_everywhere():
            actual = fused(x)
    else:
        actual = fused(x)
    torch.testing.assert_close(torch.autograd.grad(actual, (x, *fused.parameters()), grad), wanted)


@pytest.mark.parametrize("name", ["LinearSigmoidSum", "GemmDivideSumScale", "GemmSigmoidScaleResidual"])
def test_inputs_that_are_no_matrices(name: str) -> None:
    reference, fused = make_pair(name)
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(fused(x), reference(x))


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
    _, fused = make_pair(name)
    x = torch.randn(MODELS[name][1])
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(other(x), fused(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_pickle_of_a_module_that_0_2_0_made_loads(name: str) -> None:
    """It names the module of each class, as in `cutfuse.nn.drop_ins`."""
    former = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for module, package in zip(make_pair(name), ("cutfuse.models", "cutfuse.nn"), strict=True):
        pickled = pickle.dumps(module, protocol=0)
        old = pickled.replace(type(module).__module__.encode() + b"\n", f"{package}.{former}\n".encode())
        assert old != pickled
        assert type(pickle.loads(old)) is type(module)


@pytest.mark.parametrize("name", ["LinearSigmoidSum", "GemmDivideSumScale", "GemmSigmoidScaleResidual"])
def test_function_transforms_and_meta_tensors(name: str) -> None:
    reference, fused = (module.double() for module in make_pair(name))
    x = torch.randn(4, 6, 24, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(fused)(x), torch.vmap(reference)(x))
    parameters = dict(fused.named_parameters())

    def loss(module: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, parameters, (x[0],)).square().sum()

    actual = torch.func.grad(lambda p: loss(fused, p))(parameters)
    torch.testing.assert_close(actual, torch.func.grad(lambda p: loss(reference, p))(parameters))
    assert fused.to("meta")(x[0].to("meta")).shape == reference(x[0]).shape


# FusedLinear.


def test_fused_linear_is_a_linear_layer_with_what_follows() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5)
    torch.manual_seed(0)
    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=torch.sigmoid, reduce="sum", keepdim=True)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(fused.weight, plain.weight)
    plain.load_state_dict(fused.state_dict(), strict=True)
    x = torch.randn(2, 3, 7)
    torch.testing.assert_close(fused(x), torch.sigmoid(plain(x)).sum(-1, keepdim=True))
    assert repr(fused) == (
        "FusedLinear(in_features=7, out_features=5, bias=True, epilogue=sigmoid, reduce='sum', keepdim=True)"
    )


def test_fused_linear_takes_operands() -> None:
    fused = cutfuse.nn.FusedLinear(7, 5, bias=False, epilogue=lambda z, r, s: torch.relu(z) * s + r)
    x, residual = torch.randn(6, 7), torch.randn(6, 5)
    torch.testing.assert_close(fused(x, residual, 0.5), torch.relu(x @ fused.weight.t()) * 0.5 + residual)


def test_an_unfusable_epilogue_runs_unfused_and_says_so_once() -> None:
    def normalise(z: Tensor) -> Tensor:
        return torch.softmax(z, -1)

    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=normalise, reduce="amax")
    x = torch.randn(6, 7)
    with pytest.warns(UserWarning, match="unfused: .*softmax") as record:
        y = fused(x)
    assert len(record) == 1
    assert record[0].filename == __file__
    expected = torch.softmax(nn.functional.linear(x, fused.weight, fused.bias), -1).amax(-1)
    torch.testing.assert_close(y, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(x), expected)


def test_wrong_input_is_an_error_and_not_unfusable() -> None:
    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=torch.sigmoid)
    with pytest.raises(ValueError, match=r"\[..., K\]"):
        fused(torch.randn(6, 8))
    fused(torch.randn(6, 7))


def unfused_warnings(call: Callable[[], object]) -> list[str]:
    """The warnings of a call that an epilogue runs unfused."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in record if "unfused" in str(warning.message)]


def _scripted_sigmoid(z: Tensor) -> Tensor:
    return torch.sigmoid(z)


def _twice(fn: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return fn(z) * 2


def _only_tensors(z: Tensor) -> Tensor:
    assert type(z) is Tensor
    return z * 2


UNFUSABLE: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "method": lambda: lambda z: z.cumsum(-1),
    "method of the class": lambda: lambda z: torch.Tensor.cumsum(z, -1),
    "scripted function": lambda: torch.jit.script(_scripted_sigmoid),
    "scripted module": lambda: torch.jit.script(nn.GELU()),
    "calls a scripted function": lambda: functools.partial(_twice, torch.jit.script(_scripted_sigmoid)),
    "branch": lambda: lambda z: z if z.sum() > 0 else -z,
    "too long": lambda: lambda z: sum((torch.sin(z * k) for k in range(40)), z),
    "checks its argument": lambda: _only_tensors,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", UNFUSABLE)
def test_what_cannot_be_traced_runs_unfused_after_one_warning(name: str, compiled: bool) -> None:
    epilogue = UNFUSABLE[name]()
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=epilogue)
    x = torch.randn(6, 7)
    torch._dynamo.reset()
    call = torch.compile(module, backend="eager") if compiled else module
    assert len(unfused_warnings(lambda: call(x))) == 1
    assert unfused_warnings(lambda: call(x)) == []
    torch.testing.assert_close(call(x), epilogue(nn.functional.linear(x, module.weight, module.bias)))


@pytest.mark.parametrize("fullgraph", [None, True, False], ids=["eager", "fullgraph", "compiled"])
def test_a_forgotten_operand_is_an_error_and_not_remembered(fullgraph: bool | None) -> None:
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z, r: z * r)
    x, row = torch.randn(6, 7), torch.randn(5)
    torch._dynamo.reset()
    call = module if fullgraph is None else torch.compile(module, fullgraph=fullgraph, backend="eager")
    for operands in ((), (row, row), (2.0, 2.0)):
        with pytest.raises(cutfuse.EpilogueError, match=f"the pre-activation and {len(operands)} operands;"):
            call(x, *operands)
    expected = nn.functional.linear(x, module.weight, module.bias)
    for operand in (row, 2.0, 3):
        assert (
            unfused_warnings(lambda operand=operand: torch.testing.assert_close(call(x, operand), expected * operand))
            == []
        )
    assert cutfuse.explain(module, x, row).program.text == "operands=1; mul z r0"  # which an unfused call has not


@pytest.mark.parametrize("operands", [(1.0,), (torch.ones(5),)], ids=["number", "tensor"])
def test_operands_without_an_epilogue_are_an_error(operands: tuple) -> None:
    module = cutfuse.nn.FusedLinear(7, 5)
    with pytest.raises(cutfuse.EpilogueError, match="1 operand, but no epilogue that takes any"):
        module(torch.randn(6, 7), *operands)
    with pytest.raises(TypeError, match=r"^cutfuse.nn.FusedLinear: operand 0 has to be a tensor or a number, got str"):
        module(torch.randn(6, 7), "1")


def test_an_exception_of_the_epilogues_own_passes_through_and_is_not_remembered() -> None:
    scales: dict[str, float] = {}
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z: z * scales["now"])
    x = torch.randn(6, 7)
    with pytest.raises(KeyError, match="now"):
        module(x)
    scales["now"] = 2.0
    assert unfused_warnings(lambda: module(x)) == []
    assert cutfuse.explain(module, x).program.text == "operands=0; mul z 2.0"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_assigning_an_epilogue_starts_afresh(compiled: bool) -> None:
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=lambda z: z.cumsum(-1))
    x = torch.randn(6, 7)
    torch._dynamo.reset()
    call = torch.compile(module, backend="eager") if compiled else module
    expected = nn.functional.linear(x, module.weight, module.bias)
    assert len(unfused_warnings(lambda: call(x))) == 1
    for epilogue in (torch.tanh, nn.GELU(), None, cutfuse.Epilogue(torch.sigmoid)):
        module.epilogue = epilogue
        assert unfused_warnings(lambda: call(x)) == []
        torch.testing.assert_close(call(x), expected if epilogue is None else epilogue(expected))
    assert cutfuse.explain(module, x).program.text == "operands=0; sigmoid z"
    module.epilogue = lambda z: z.cumsum(-1)
    assert len(unfused_warnings(lambda: call(x))) == 1
    module.reduce, module.keepdim = "sum", True
    assert len(unfused_warnings(lambda: call(x))) == 1
    torch.testing.assert_close(call(x), expected.cumsum(-1).sum(-1, keepdim=True))


def test_numbers_and_tensors_as_operands_are_told_apart() -> None:
    def raise_to(z: Tensor, exponent: Tensor | int) -> Tensor:
        return z.pow(exponent) if isinstance(exponent, int) else z.cumsum(-1) * exponent

    module = cutfuse.nn.FusedLinear(7, 5, epilogue=raise_to)
    x = torch.randn(6, 7)
    assert len(unfused_warnings(lambda: module(x, torch.ones(5)))) == 1
    assert unfused_warnings(lambda: module(x, 2)) == []
    assert cutfuse.explain(module, x, 2).program.operand_count == 0
    torch._dynamo.reset()
    fresh = cutfuse.nn.FusedLinear(7, 5, epilogue=raise_to)
    assert unfused_warnings(lambda: torch.compile(fresh, fullgraph=True, backend="eager")(x, 2)) == []


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
        unfused_warnings(lambda module=module: module(x))
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert (
                unfused_warnings(lambda module=module, other=other: torch.testing.assert_close(other(x), module(x)))
                == []
            )
            assert other.state_dict().keys() == module.state_dict().keys()
    module = cutfuse.nn.FusedLinear(7, 5, epilogue=nn.PReLU())
    assert list(module.state_dict()) == ["weight", "bias", "epilogue.weight"]
    module.epilogue = torch.tanh
    assert list(module.state_dict()) == ["weight", "bias"]


# A FusedLinear is no nn.Linear.

LAYERS = {
    "no epilogue": lambda: cutfuse.nn.FusedLinear(7, 5),
    "no bias": lambda: cutfuse.nn.FusedLinear(7, 5, bias=False, epilogue=torch.relu),
    "reduced": lambda: cutfuse.nn.FusedLinear(7, 5, epilogue=torch.sigmoid, reduce="sum", keepdim=True),
    "of another type": lambda: cutfuse.nn.FusedLinear(7, 5, epilogue=torch.tanh, dtype=torch.float64),
    "a subclass": lambda: type("Named", (cutfuse.nn.FusedLinear,), {})(7, 5, epilogue=torch.relu),
    "from_linear": lambda: cutfuse.nn.FusedLinear.from_linear(nn.Linear(7, 5), epilogue=torch.relu),
}


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """What libraries do that quantize, adapt or convert layers."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, make(child))
        else:
            replace_linears(child, make)


def make_plain(layer: nn.Linear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


@pytest.mark.parametrize("name", LAYERS)
def test_what_replaces_linear_layers_leaves_a_fused_linear(name: str) -> None:
    layer = LAYERS[name]()
    assert not isinstance(layer, nn.Linear)
    model = nn.Sequential(layer, nn.Sequential(nn.Linear(5, 5)))
    x = torch.randn(6, 7, dtype=layer.weight.dtype)
    expected = layer(x)
    replace_linears(model, make_plain)
    assert model[0] is layer
    replace_linears(model, lambda _: nn.Identity())
    assert isinstance(model[1][0], nn.Identity)
    assert torch.equal(model[0](x), expected)


class Adapted(nn.Module):
    """A product beside a layer, as peft adds one: what it refuses it cannot compute."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"Target module {layer} is not supported")
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


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
    expected = torch.tanh(nn.functional.linear(x, weight + adapter.b @ adapter.a, layer.bias))
    torch.testing.assert_close(layer(x), expected)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*torch.(quint8|qint8)")
def test_dynamic_quantization_leaves_a_fused_linear() -> None:
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


def test_from_linear_makes_the_class_that_it_is_called_on() -> None:
    class Named(cutfuse.nn.FusedLinear):
        pass

    assert type(Named.from_linear(nn.Linear(7, 5), epilogue=torch.relu)) is Named


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
    "a FusedLinear": (lambda: cutfuse.nn.FusedLinear(7, 5), TypeError, "an nn.Linear, got FusedLinear"),
    "a weight": (lambda: torch.randn(5, 7), TypeError, "an nn.Linear, got Tensor"),
    "a subclass that computes more": (lambda: Doubled(7, 5), ValueError, "Doubled has a forward of its own"),
    "a forward that was assigned": (
        lambda: with_forward(nn.Linear(7, 5)),
        ValueError,
        "Linear has a forward of its own",
    ),
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
    "adapter": Adapted,
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
    fused.linear = Adapted(fused.linear)
    explanation = cutfuse.explain(fused, torch.randn(6, 7))
    assert explanation.path == "composed"
    assert explanation.reasons[0] == "Adapted has a forward of its own: the plain model runs"
