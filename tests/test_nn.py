"""The drop-ins: same arguments, parameters, initialisation, values and gradients as the models that they replace."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from generators import FLOATS, assert_no_worse
from torch import Tensor, nn

import cutfuse
from cutfuse import models
from cutfuse.ops.switch import use_operators_everywhere

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
    assert set(models.__all__) == set(MODELS) == set(cutfuse.nn.__all__) - {"FusedLinear"}


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


def test_fused_linear_takes_modules_as_epilogues() -> None:
    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=nn.GELU(approximate="tanh"), dtype=torch.float64)
    x = torch.randn(6, 7, dtype=torch.float64)
    expected = nn.functional.gelu(nn.functional.linear(x, fused.weight, fused.bias), approximate="tanh")
    torch.testing.assert_close(fused(x), expected)


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


def test_misspelt_reduction_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'max'; choose one of 'sum'"):
        cutfuse.nn.FusedLinear(7, 5, reduce="max")


def test_wrong_input_is_an_error_and_not_unfusable() -> None:
    fused = cutfuse.nn.FusedLinear(7, 5, epilogue=torch.sigmoid)
    with pytest.raises(ValueError, match=r"\[..., K\]"):
        fused(torch.randn(6, 8))
    fused(torch.randn(6, 7))
