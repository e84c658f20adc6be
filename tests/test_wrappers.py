"""Tensors that wrap others, such as DTensor and quantized weights: PyTorch's own operations take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from emulated_device import direct_calls
from emulated_device import launches as launches
from emulated_launches import EmulatedLaunches
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import cutfuse

pytestmark = pytest.mark.usefixtures("everything_fuses")


@pytest.fixture(autouse=True)
def _refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's TwoTensor runs any operation on what it wraps; here none of cutfuse's."""
    run = TwoTensor.__torch_dispatch__

    def dispatch(kind: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cutfuse":
            raise NotImplementedError(f"{func} of a TwoTensor")
        return run(func, types, args, kwargs)

    monkeypatch.setattr(TwoTensor, "__torch_dispatch__", classmethod(dispatch))


GENERATOR = torch.Generator().manual_seed(0)
X, W, B, R = (torch.randn(shape, generator=GENERATOR) for shape in ((2, 3, 16), (8, 16), (8,), (2, 3, 8)))


class Quantized(Tensor):
    """A weight in 8 bits that knows products and detach() alone, as PyTorch's own operations call them."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantized:
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, weight, *bias = args
        return F.linear(x, weight.values.to(weight.scale.dtype) * weight.scale, *bias)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].values, args[0].scale)
        raise NotImplementedError(f"a quantized weight has no {func}")


def quantized(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Quantized((weight / scale).round().to(torch.int8), scale)


def two(tensor: Tensor) -> Any:
    return TwoTensor(tensor, tensor.clone())


def inner(tensor: Any) -> Tensor:
    return tensor.a if isinstance(tensor, TwoTensor) else tensor.full_tensor()


def gated(z: Tensor, r: Tensor) -> Tensor:
    return torch.tanh(z) * r


# A call of cutfuse with some of these tensors, and what it stands for.
CALLS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "linear": (
        "xwbr",
        lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=gated, operands=(r,)),
        lambda x, w, b, r: gated(F.linear(x, w, b), r),
    ),
    "plain linear": ("xwb", lambda x, w, b: cutfuse.linear(x, w, b), lambda x, w, b: F.linear(x, w, b)),
    "recomputed linear": (
        "xwbr",
        lambda x, w, b, r: cutfuse.linear(x, w, b, epilogue=gated, operands=(r,), recompute=True),
        lambda x, w, b, r: gated(F.linear(x, w, b), r),
    ),
    "rows": (
        "xwb",
        lambda x, w, b: cutfuse.linear(x, w, b, epilogue=torch.tanh, reduce="logsumexp"),
        lambda x, w, b: torch.tanh(F.linear(x, w, b)).logsumexp(-1),
    ),
    "affine rows": (
        "xwb",
        lambda x, w, b: cutfuse.linear(x, w, b, epilogue=lambda z: z / 2, reduce="sum"),
        lambda x, w, b: (F.linear(x, w, b) / 2).sum(-1),
    ),
    "pointwise": ("xr", lambda x, r: cutfuse.pointwise(gated, x[..., :8], r), lambda x, r: gated(x[..., :8], r)),
    "sigmoid": ("x", lambda x: cutfuse.sigmoid(x), lambda x: torch.sigmoid(x)),
    "reduce": (
        "xr",
        lambda x, r: cutfuse.reduce(x[..., :8], -1, "amax", prologue=gated, operands=(r,)),
        lambda x, r: gated(x[..., :8], r).amax(-1),
    ),
    "sum": ("x", lambda x: cutfuse.sum(x, 1), lambda x: x.sum(1)),
}
TENSORS = {"x": X, "w": W, "b": B, "r": R}
PLACES = [(name, place) for name, (places, _, _) in CALLS.items() for place in (*places, "all")]


def given_of(name: str, place: str, wrap: Callable[[Tensor], Any]) -> list[Any]:
    """The tensors of a call, of which those of a place wrap others."""
    return [wrap(TENSORS[key]) if place in (key, "all") else TENSORS[key] for key in CALLS[name][0]]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_pytorchs_operations_are_asked(name: str, place: str, compiles: bool) -> None:
    _, fused, eager = CALLS[name]
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiles else fused
    y: Any = function(*given_of(name, place, two))
    assert isinstance(y, TwoTensor)
    torch.testing.assert_close(y.a, eager(*given_of(name, "", two)))
    torch.testing.assert_close(y.a, y.b)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_wrap_others_too(name: str, compiles: bool) -> None:
    places, fused, eager = CALLS[name]
    function = torch.compile(fused, backend="aot_eager") if compiles else fused
    given = [tensor.requires_grad_() for tensor in given_of(name, "all", two)]
    plain = [tensor.clone().requires_grad_() for tensor in given_of(name, "", two)]
    found: Any = torch.autograd.grad(function(*given).sum(), given)
    expected = torch.autograd.grad(eager(*plain).sum(), plain)
    for gradient, exact, place in zip(found, expected, places, strict=True):
        assert isinstance(gradient, TwoTensor), place
        torch.testing.assert_close(gradient.a, exact)


@pytest.mark.parametrize("name", ["linear", "rows", "affine rows", "plain linear", "recomputed linear"])
def test_a_weight_that_knows_products_alone(name: str) -> None:
    _, fused, eager = CALLS[name]
    exact = given_of(name, "", two)
    given = [quantized(W) if tensor is W else tensor for tensor in exact]
    torch.testing.assert_close(fused(*given), eager(*exact), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("place", "named"), [("x", "x"), ("w", "weight"), ("b", "bias"), ("r", "operand 0")])
def test_the_reason(place: str, named: str) -> None:
    x, w, b, r = given_of("linear", place, two)
    found = cutfuse.explain(cutfuse.linear, x, w, b, epilogue=gated, operands=(r,))
    assert found.path == "composed"
    assert found.reasons[0].startswith(f"{named} is a TwoTensor, a tensor that wraps others")


def test_the_reason_without_a_product() -> None:
    for found in (cutfuse.explain(cutfuse.sum, two(X)), cutfuse.explain(cutfuse.sigmoid, two(X))):
        assert (found.path, found.reasons[0].split(",")[0]) == ("composed", "x is a TwoTensor")


class TaggedParameter(nn.Parameter):
    pass


def test_subclasses_that_wrap_nothing_take_the_operators() -> None:
    for weight in (nn.Parameter(W, requires_grad=False), TaggedParameter(W, requires_grad=False)):
        assert cutfuse.explain(cutfuse.linear, X, weight, epilogue=gated, operands=(R,)).path != "composed"


def test_a_wrapper_takes_no_direct_call(launches: EmulatedLaunches) -> None:
    def call(x: Any) -> Any:
        return cutfuse.linear(x, W, B, epilogue=torch.relu)

    for _ in range(2):
        call(X)
    before, made = direct_calls(), len(launches.launches)
    for _ in range(2):
        assert isinstance(call(two(X)), TwoTensor)
    assert (direct_calls(), len(launches.launches)) == (before, made)


def test_prepare_refuses_it() -> None:
    for weight in (two(W), quantized(W)):
        with pytest.raises(TypeError, match="which wraps other tensors; prepare the local tensor"):
            cutfuse.prepare(weight)


@pytest.mark.parametrize("wrap", [two, quantized])
def test_modules_whose_weight_was_replaced(wrap: Callable[[Tensor], Any]) -> None:
    """As torchao's quantize_ does it."""
    for module, x in (
        (cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu), X),
        (cutfuse.nn.GemmDivideSumScale(16, 8, 1.5), X[0]),
        (cutfuse.nn.LinearSigmoidSum(16, 8), X[0]),
    ):
        module.requires_grad_(False)
        expected = module(x)
        holder = next(part for part in module.modules() if "weight" in part._parameters)
        holder.weight = nn.Parameter(wrap(holder.weight.detach()), requires_grad=False)
        y: Any = module(x)
        torch.testing.assert_close(getattr(y, "a", y), expected, rtol=0.05, atol=0.05)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of this process alone."""
    if not dist.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("compiles", [False, True])
def test_tensor_parallel_layers(mesh: Any, compiles: bool) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def shard(dim: int) -> Callable[..., None]:
        def partition(name: str, module: nn.Module, mesh: Any) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                placement = Shard(dim) if parameter.dim() > dim else Replicate()
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

        return partition

    model = nn.Sequential(
        cutfuse.nn.FusedLinear(16, 8, epilogue=F.gelu),
        cutfuse.nn.FusedLinear(8, 16, epilogue=lambda z: torch.tanh(z) * 2),
    )
    model(X).sum().backward()
    expected, gradient = model(X).detach(), model[0].weight.grad
    model.zero_grad()

    def replicate(module: nn.Module, inputs: tuple[Tensor], mesh: Any) -> tuple[Tensor]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

    distribute_module(model[0], mesh, shard(0), replicate)
    distribute_module(model[1], mesh, shard(1), output_fn=lambda module, y, mesh: y.full_tensor())
    assert isinstance(model[0].weight, DTensor)
    y = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model)(X)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), gradient)
    assert "weight is a DTensor" in cutfuse.explain(model[0], X).reasons[0]


@pytest.mark.parametrize("name", CALLS)
def test_all_of_a_call_are_distributed(mesh: Any, name: str) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    _, fused, eager = CALLS[name]
    if name == "rows" and torch.__version__.startswith("2.8."):
        pytest.skip("DTensor of PyTorch 2.8 has no logsumexp")
    given = given_of(name, "all", lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]))
    torch.testing.assert_close(inner(fused(*given)), eager(*given_of(name, "", two)))
