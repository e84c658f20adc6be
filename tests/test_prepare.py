"""`cutfuse.prepare`: when a weight's planes are multiplied, and which changes of the weight are refused, on the CPU."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plane_cases import SEEN, Change
from plane_device import COLUMNS, DEFAULT, NBYTES, ROWS, Device, make_weight
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import cutfuse
from cutfuse import matrix_vector
from cutfuse.layer import cuda
from cutfuse.layer.linear_plan import KEEPS
from cutfuse.layer.prepared import check_unchanged
from cutfuse.nn.fused_linear import PreparesWeight
from cutfuse.precision import MODES

X = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))


def sigmoid_of(weight: Tensor | cutfuse.PreparedWeight) -> Tensor:
    with torch.no_grad():
        return cutfuse.linear(X, weight, epilogue=torch.sigmoid)


def check_current(prepared: cutfuse.PreparedWeight) -> None:
    """The result is that of the weight as it is now."""
    assert torch.equal(sigmoid_of(prepared), torch.sigmoid(nn.functional.linear(X, prepared.weight.detach())))


# What is kept, and what is multiplied.


@pytest.mark.parametrize(("mode", "nbytes"), [("guarded", NBYTES), ("split3", NBYTES), ("split6", 3 * NBYTES // 2)])
def test_planes_are_made_once_and_multiplied_in_every_call(device: Device, mode: str, nbytes: int) -> None:
    weight = make_weight()
    with cutfuse.precision(mode):
        prepared = cutfuse.prepare(weight)
        for _ in range(3):
            check_current(prepared)
    assert device.products == ["planes"] * 3
    assert len([entry for entry in device.log if entry.startswith("split")]) == 1
    assert (prepared.weight is weight, prepared.mode, prepared.nbytes) == (True, mode, nbytes)


@pytest.mark.parametrize("reduce", [None, "amax"])
def test_planes_are_multiplied_whatever_follows(device: Device, reduce: str | None) -> None:
    weight, bias = make_weight(), torch.randn(ROWS)
    arguments = {"epilogue": lambda z, r: z.tanh() * r, "operands": (torch.randn(ROWS),), "reduce": reduce}
    y = cutfuse.linear(X.view(1, 3, COLUMNS), cutfuse.prepare(weight), bias, **arguments)
    assert torch.equal(y, cutfuse.linear(X.view(1, 3, COLUMNS), weight, bias, **arguments))
    assert device.products == ["planes", "weight"]


@pytest.mark.parametrize("mode", [None, *MODES])
def test_other_modes_multiply_the_weight_itself(device: Device, mode: str | None) -> None:
    prepared = cutfuse.prepare(make_weight(), "split3")
    with cutfuse.precision(mode):
        check_current(prepared)
        explanation = cutfuse.explain(X, prepared, epilogue=torch.sigmoid)
    takes_planes = mode in (None, "guarded", "split3")
    assert device.products == (["planes"] if takes_planes else ["weight"] if mode == "split6" else [])
    useless = 'the weight is prepared for "split3", but this call does not read its planes'
    assert (explanation.steps if takes_planes else explanation.reasons)[-1] == (KEEPS if takes_planes else useless)


def test_the_mode_is_the_one_that_holds_or_the_one_that_is_given(device: Device) -> None:
    weight = make_weight()
    assert cutfuse.prepare(weight).mode == "guarded"
    with cutfuse.precision("split6"):
        assert cutfuse.prepare(weight).mode == "split6"
        assert cutfuse.prepare(weight, "split3").mode == "split3"
    with cutfuse.precision("tf32"):
        assert cutfuse.prepare(weight).nbytes == 0
        assert cutfuse.prepare(weight, mode="guarded").nbytes == NBYTES


@pytest.mark.parametrize(
    ("change", "mode", "reason"),
    [
        (lambda weight: weight, "ieee", 'precision "ieee" takes the weight as it is'),
        (lambda weight: weight, "tf32", 'precision "tf32" takes the weight as it is'),
        (lambda weight: weight.bfloat16(), "guarded", "planes are of float32 matrices, not of torch.bfloat16"),
        (lambda weight: weight.double(), None, "planes are of float32 matrices, not of torch.float64"),
        (lambda weight: weight[:0], "split6", "it has no elements"),
    ],
)
def test_what_has_no_planes_is_the_weight_itself(
    device: Device, change: Callable[[Tensor], Tensor], mode: str | None, reason: str
) -> None:
    weight = change(make_weight())
    prepared = cutfuse.prepare(weight, mode)
    assert (prepared.nbytes, device.log) == (0, [])
    assert reason in repr(prepared)
    x = X.to(weight.dtype)
    arguments = {"epilogue": torch.sigmoid}
    assert torch.equal(cutfuse.linear(x, prepared, **arguments), cutfuse.linear(x, weight, **arguments))
    if weight.numel():
        assert f"the prepared weight has no planes: {reason}" in cutfuse.explain(x, prepared, **arguments).reasons


def test_on_a_cpu_there_are_no_planes() -> None:
    prepared = cutfuse.prepare(make_weight(), "split6")
    check_current(prepared)
    why = "no planes: fused products run on CUDA devices, not on cpu"
    assert repr(prepared) == f"PreparedWeight([{ROWS}, {COLUMNS}] float32 on cpu, 'split6', {why})"
    explanation = cutfuse.explain(cutfuse.linear, X, prepared, epilogue=torch.sigmoid)
    assert f"prepared weight [{ROWS}, {COLUMNS}] float32" in explanation.call
    assert explanation.reasons[-1].endswith(why)


def test_repr_tells_the_memory(device: Device) -> None:
    expected = f"PreparedWeight([{ROWS}, {COLUMNS}] float32 on cpu, 'guarded', planes of {NBYTES} bytes)"
    assert repr(cutfuse.prepare(make_weight())) == expected


def test_autocast_casts_the_weight_itself(device: Device) -> None:
    prepared = cutfuse.prepare(make_weight())
    with torch.autocast("cpu", torch.bfloat16):
        y = sigmoid_of(prepared)
        assert torch.equal(y, sigmoid_of(prepared.weight))
    assert y.dtype == torch.bfloat16
    assert "planes" not in device.products


def test_an_affine_row_sum_needs_no_planes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_vector, "LEAST_FLOPS_OF_A_STEP", 0)
    prepared = cutfuse.prepare(make_weight())
    assert cutfuse.explain(X, prepared, epilogue=lambda z: z / 2, reduce="sum").path == "matrix-vector"


# Gradients.


def test_gradients_flow_to_the_weight(device: Device) -> None:
    weight = make_weight().requires_grad_()
    x = X.clone().requires_grad_()
    found = torch.autograd.grad(cutfuse.linear(x, cutfuse.prepare(weight), epilogue=torch.sigmoid).sum(), (x, weight))
    expected = torch.autograd.grad(torch.sigmoid(nn.functional.linear(x, weight)).sum(), (x, weight))
    torch.testing.assert_close(found, expected)


def test_a_forward_for_gradients_multiplies_planes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the product is forced to planes, as on a GPU."""
    monkeypatch.setattr("cutfuse.layer.autograd.is_forced", lambda x, mode="": True)
    weight, bias = make_weight().requires_grad_(), torch.randn(ROWS).requires_grad_()
    prepared = cutfuse.prepare(weight)
    arguments = {"epilogue": torch.sigmoid, "reduce": "logsumexp"}
    assert KEEPS in cutfuse.explain(X, prepared, bias, **arguments).reasons
    assert KEEPS not in cutfuse.explain(X, weight, bias, **arguments).reasons
    y = cutfuse.linear(X, prepared, bias, **arguments)
    assert device.products == ["planes"]
    expected = torch.sigmoid(nn.functional.linear(X, weight, bias)).logsumexp(-1)
    torch.testing.assert_close(y, expected)
    second = [torch.autograd.grad(z.square().sum(), (weight, bias), create_graph=True) for z in (y, expected)]
    torch.testing.assert_close(*second)


# Changes. Those of layers are further below.


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "written in place .version 0 then, 1 now": lambda weight: weight.neg_(),
    "it lies in other memory": lambda weight: setattr(weight, "data", weight.clone()),
    r"strides were \(8, 1\), and are \(8, 1\) with shape \(4, 8\)": lambda weight: setattr(weight, "data", weight[:4]),
    r"strides were \(8, 1\), and are \(1, 6\)": lambda weight: setattr(
        weight, "data", weight.data.as_strided((ROWS, COLUMNS), (1, ROWS))
    ),
    "it was torch.float32 and is torch.float64": lambda weight: setattr(weight, "data", weight.double()),
    "its storage was freed or resized": lambda weight: weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("has_planes", [True, False])
@pytest.mark.parametrize("message", CHANGES)
def test_a_change_is_refused_and_named(message: str, has_planes: bool, request: pytest.FixtureRequest) -> None:
    """With planes and without them, so that what runs on a CPU runs on a GPU."""
    if has_planes:
        request.getfixturevalue("device")
    weight = make_weight()
    prepared = cutfuse.prepare(weight)
    CHANGES[message](weight)
    for use in (sigmoid_of, lambda prepared: cutfuse.explain(X, prepared)):
        with pytest.raises(RuntimeError, match=rf"a weight of shape \(6, 8\) .*{message}.*; call prepare again"):
            use(prepared)


def test_another_device_is_named() -> None:
    weight = make_weight()
    with pytest.raises(RuntimeError, match="it was on cpu and is on meta; call prepare again"):
        check_unchanged(weight.to("meta"), weight)


def test_the_operators_refuse_a_change_too(device: Device) -> None:
    """Compiled code has nothing but them."""
    prepared = cutfuse.prepare(make_weight())
    prepared.weight.neg_()
    for reduction in ("none", "sum"):
        arguments = (X, prepared.weight, None, [], "operands=0", reduction, torch.float32, *prepared.for_operators)
        with pytest.raises(RuntimeError, match="written in place"):
            torch.ops.cutfuse.linear(*arguments)
    with pytest.raises(RuntimeError, match="written in place"):
        cuda.linear(*arguments)
    device.is_capturing = True  # by torch.compile, perhaps of copies of what was checked before
    cuda.linear(*arguments)


def test_addresses_are_not_given_to_others_meanwhile(device: Device) -> None:
    weight = make_weight()
    for value in range(100):
        prepared = cutfuse.prepare(weight)
        weight.data = torch.empty(0)
        weight.data = torch.full((ROWS, COLUMNS), float(value))
        with pytest.raises(RuntimeError, match="other memory"):
            sigmoid_of(prepared)


def test_inference_tensors_and_inference_mode(device: Device) -> None:
    with torch.inference_mode():
        of_inference = cutfuse.prepare(torch.randn(ROWS, COLUMNS))
        check_current(of_inference)
    weight = make_weight()
    with torch.inference_mode():
        other = cutfuse.prepare(weight)
        check_current(other)
    assert not any(t.is_inference() for t in (other.for_operators.planes, other.for_operators.snapshot))
    weight.requires_grad_()
    cutfuse.linear(X, other, epilogue=torch.sigmoid).sum().backward()
    with torch.inference_mode():
        weight.neg_()
    with pytest.raises(RuntimeError, match="written in place"):
        sigmoid_of(other)
    of_inference.weight.data = torch.randn(ROWS, COLUMNS)
    with pytest.raises(RuntimeError, match="other memory"):
        sigmoid_of(of_inference)


# Arguments.

REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "no tensor": (([1.0],), TypeError, "cutfuse.prepare: weight has to be a tensor, got list"),
    "prepared already": ((cutfuse.prepare(torch.ones(2, 2)),), TypeError, "has to be a tensor, got PreparedWeight"),
    "a vector": ((torch.ones(3),), ValueError, r"weight has to be \[N, K\], got shape \(3,\)"),
    "integers": ((torch.ones(2, 2).int(),), TypeError, "bfloat16 or float16, got torch.int32"),
    "8 bits": (
        (torch.ones(2, 2).to(torch.float8_e4m3fn),),
        TypeError,
        "weight has to be float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
    ),
    "sparse": ((torch.eye(3).to_sparse(),), TypeError, "make it dense with .to_dense"),
    "a mode": ((torch.ones(2, 2), "fp8"), ValueError, "a precision is one of .* got 'fp8'"),
    "a tensor of tensors": (
        (TwoTensor(torch.ones(2, 2), torch.ones(2, 2)),),
        TypeError,
        "weight is a TwoTensor, which wraps other tensors; prepare the local tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments(name: str) -> None:
    given, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        cutfuse.prepare(*given)


def test_wrong_arguments_of_calls() -> None:
    prepared = cutfuse.prepare(make_weight())
    with pytest.raises(ValueError, match=r"got shapes \(3, 5\) and \(6, 8\)"):
        cutfuse.linear(torch.randn(3, 5), prepared)
    with pytest.raises(TypeError, match=r"x torch\.float64, weight torch\.float32"):
        cutfuse.linear(X.double(), prepared)


# Copies and memory.


def test_a_pickle_holds_no_planes(device: Device) -> None:
    weight = torch.randn(64, 64)
    assert len(pickle.dumps(cutfuse.prepare(weight))) < 1.2 * len(pickle.dumps(weight))


def test_memory_goes_with_the_object(device: Device) -> None:
    prepared = cutfuse.prepare(make_weight())
    planes = weakref.ref(prepared.for_operators.planes)
    sigmoid_of(prepared)
    assert planes() is not None
    del prepared
    gc.collect()
    assert planes() is None


# Streams and graphs.


def test_planes_are_complete_when_prepare_returns(device: Device) -> None:
    device.stream = 7
    cutfuse.prepare(make_weight())
    assert device.log == [f"{DEFAULT} waits for 7", f"split3 on {DEFAULT}", f"host waits for {DEFAULT}"]
    assert device.stream == 7


def test_the_allocator_is_told_of_other_streams(device: Device) -> None:
    prepared = cutfuse.prepare(make_weight())
    for device.stream in (DEFAULT, 7, DEFAULT, 8):
        check_current(prepared)
    assert device.recorded == [7, 8]


def test_a_capture_reads_planes_and_makes_none(device: Device) -> None:
    prepared = cutfuse.prepare(make_weight())
    device.is_capturing = True
    check_current(prepared)
    assert device.products == ["planes"]
    with pytest.raises(RuntimeError, match=r"a CUDA graph is being captured .* prepare the weight before"):
        cutfuse.prepare(make_weight())
    assert cutfuse.prepare(make_weight(), "ieee").nbytes == 0
    prepared.weight.neg_()
    with pytest.raises(RuntimeError, match="written in place"):
        sigmoid_of(prepared)


# Modules of `cutfuse.nn` whose weight is prepared, and the changes of it that they refuse, on the CPU.


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


def check_layer(layer: nn.Module) -> None:
    """The result is that of the weight as it is now."""
    with torch.no_grad():
        assert torch.equal(layer(X), torch.sigmoid(nn.functional.linear(X, layer.weight)))


def test_every_module_that_multiplies_by_a_weight_prepares_it() -> None:
    public = {name: getattr(cutfuse.nn, name) for name in cutfuse.nn.__all__}
    found = [name for name, each in public.items() if isinstance(each, type) and issubclass(each, PreparesWeight)]
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
    check_layer(layer.prepare())
    SEEN["in place"](layer)
    with pytest.raises(RuntimeError, match="call prepare again"):
        call(layer)
    check_layer(layer.train())


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
    check_layer(layer)
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
    """In the same mode, whose planes no other mode reads."""
    module = MODELS[name]().prepare("split6")
    other = copied(module)
    with cutfuse.precision("split6"):
        assert torch.equal(call(other), call(module))
    call(module)
    assert device.products == ["planes", "planes", "weight"]
    assert (other._prepared.mode, other._prepared.nbytes) == ("split6", 3 * NBYTES // 2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    with pytest.raises(RuntimeError, match="written in place"):
        call(other)
    call(module)


def test_shallow_copies_share_the_weight_and_not_what_is_prepared(device: Device) -> None:
    layer = make_layer()
    check_layer(copy.copy(layer).prepare())
    check_layer(layer)
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
