"""Modules of `cutfuse.nn` whose weight is prepared, and the changes of it that they refuse, on the CPU."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from plane_cases import SEEN, UNSEEN, Change
from plane_device import COLUMNS, NBYTES, ROWS, Device
from torch import Tensor, nn

import cutfuse
from cutfuse.nn.fused_linear import PreparesWeight

X = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))


def make_layer(bias: bool = False) -> cutfuse.nn.FusedLinear:
    """Its weight is [ROWS, COLUMNS]."""
    torch.manual_seed(0)
    return cutfuse.nn.FusedLinear(COLUMNS, ROWS, bias, epilogue=torch.sigmoid)


MODELS = {
    "FusedLinear": lambda: make_layer(bias=True),
    "LinearSigmoidSum": lambda: cutfuse.nn.LinearSigmoidSum(COLUMNS, ROWS),
    "GemmSigmoidScaleResidual": lambda: cutfuse.nn.GemmSigmoidScaleResidual(COLUMNS, ROWS, 2.0),
}


@torch.no_grad()
def call(module: nn.Module) -> Tensor:
    return module(X)


def check_current(layer: nn.Module) -> None:
    """The result is that of the weight as it is now."""
    with torch.no_grad():
        assert torch.equal(layer(X), torch.sigmoid(nn.functional.linear(X, layer.weight)))


def test_every_module_that_multiplies_by_a_weight_prepares_it() -> None:
    found = [name for name in cutfuse.nn.__all__ if issubclass(getattr(cutfuse.nn, name), PreparesWeight)]
    assert found == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_planes_are_multiplied_until_training(device: Device, name: str) -> None:
    module = MODELS[name]()
    expected, state = call(module), module.state_dict().keys()
    assert module.prepare() is module
    assert torch.equal(call(module), expected)
    module.eval()
    call(module)
    assert module.state_dict().keys() == state
    module.train()
    call(module)
    assert device.products == ["weight", "planes", "planes", "weight"]


def test_the_mode_is_passed_on(device: Device) -> None:
    layer = make_layer().prepare("split6")
    with cutfuse.precision("split6"):
        check_current(layer)
    check_current(layer)
    assert device.products == ["planes", "weight"]


@pytest.mark.parametrize("has_planes", [True, False])
@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_every_change_is_refused(change: Change, has_planes: bool, request: pytest.FixtureRequest) -> None:
    """With planes and without them, so that what runs on a CPU runs on a GPU."""
    if has_planes:
        request.getfixturevalue("device")
    layer = make_layer().prepare()
    before = layer.weight.detach().clone()
    change(layer)
    assert not torch.equal(before, layer.weight), "the case changes nothing"
    for with_gradient in (False, True):
        with torch.set_grad_enabled(with_gradient), pytest.raises(RuntimeError, match="call prepare"):
            layer(X)
    check_current(layer.prepare())
    SEEN["in place"](layer)
    with pytest.raises(RuntimeError, match="call prepare again"):
        call(layer)
    check_current(layer.train())


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_seen_is_there_after_preparing_again(device: Device, change: Change) -> None:
    layer = make_layer().prepare()
    change(layer)
    check_current(layer.prepare())
    assert device.products == ["planes"]


def run_backward(layer: nn.Module) -> None:
    """Twice, so that gradients accumulate."""
    for _ in range(2):
        layer(X).square().sum().backward()


UNCHANGED: dict[str, Change] = {
    "read": lambda layer: layer(X).sum().item(),
    "backward": run_backward,
    "gradient cleared": lambda layer: layer.zero_grad(),
    "frozen": lambda layer: layer.requires_grad_(False),
    "evaluated": lambda layer: layer.eval(),
    "to its own type": lambda layer: layer.to(torch.float32),
    "to its own device": lambda layer: layer.to("cpu"),
    "saved": lambda layer: copy.deepcopy(layer.state_dict()),
    "looked at": lambda layer: (layer.weight.t(), layer.weight.data, layer.weight.detach(), layer.weight[1:]),
    "moved in inference mode": torch.inference_mode()(lambda layer: layer.weight.clone().neg_()),
}


@pytest.mark.parametrize("use", UNCHANGED.values(), ids=UNCHANGED)
def test_what_does_not_change_the_weight_keeps_its_planes(device: Device, use: Change) -> None:
    layer = make_layer().prepare()
    use(layer)
    device.products.clear()
    check_current(layer)
    assert device.products == ["planes"]


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved_and_loaded],
    ids=["copied", "pickled", "saved"],
)
@pytest.mark.parametrize("name", MODELS)
def test_copies_are_prepared_for_themselves(device: Device, name: str, copied: Change) -> None:
    module = MODELS[name]().prepare()
    other = copied(module)
    assert torch.equal(call(other), call(module))
    assert device.products == ["planes"] * 2
    assert other._prepared.nbytes == NBYTES
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    with pytest.raises(RuntimeError, match="written in place"):
        call(other)
    call(module)


def test_shallow_copies_share_the_weight_and_not_what_is_prepared(device: Device) -> None:
    layer = make_layer()
    check_current(copy.copy(layer).prepare())
    check_current(layer)
    assert device.products == ["planes", "weight"]


def test_an_epilogue_that_is_not_fused_takes_the_weight_itself(device: Device) -> None:
    layer = make_layer().prepare()
    layer.epilogue = lambda z: z.cumsum(-1)
    with pytest.warns(UserWarning, match="unfused"):
        y = call(layer)
    assert torch.equal(y, nn.functional.linear(X, layer.weight).cumsum(-1))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "FusedLinear"])
def test_plain_models_of_prepared_ones(name: str) -> None:
    module = MODELS[name]().prepare()
    for plain in (torch.fx.symbolic_trace(module), torch.jit.script(module)):
        torch.testing.assert_close(plain(X), module(X))
    assert module._prepared is not None


def test_parameters_given_by_functional_call_are_another_weight(device: Device) -> None:
    layer = make_layer().prepare()
    given = {"weight": torch.randn(ROWS, COLUMNS)}
    with pytest.raises(RuntimeError, match=r"FusedLinear: the weight is another tensor .* or train"):
        torch.func.functional_call(layer, given, (X,))
    y = torch.func.functional_call(layer.train(), given, (X,))
    torch.testing.assert_close(y, torch.sigmoid(X @ given["weight"].t()))
