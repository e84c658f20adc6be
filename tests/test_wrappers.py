"""Tensors that wrap others, such as DTensor and quantized weights: PyTorch's own operations take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from public_calls import CALLS, TENSORS, gated
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


X, W, B, R = TENSORS.values()


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


PLACES = [(name, place) for name, call in CALLS.items() for place in (*call.tensors, "all")]
COMPILED = [name for name in CALLS if name not in ("mlp", "gated mlp", "head")]  # of layers, which the others call


def given_of(name: str, place: str, wrap: Callable[[Tensor], Any]) -> list[Any]:
    """The tensors of a call, of which those of a place wrap others."""
    return [wrap(TENSORS[key]) if place in (key, "all") else TENSORS[key] for key in CALLS[name].tensors]


@pytest.mark.parametrize(
    ("name", "place", "compiles"),
    [(*case, compiles) for case in PLACES for compiles in (False, True) if not compiles or case[0] in COMPILED],
)
def test_pytorchs_operations_are_asked(name: str, place: str, compiles: bool) -> None:
    _, fused, eager = CALLS[name]
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiles else fused
    y: Any = function(*given_of(name, place, two))
    assert isinstance(y, TwoTensor)
    torch.testing.assert_close(y.a, eager(*given_of(name, "", two)))
    torch.testing.assert_close(y.a, y.b)


@pytest.mark.parametrize(
    ("name", "compiles"), [*((name, False) for name in CALLS), *((name, True) for name in COMPILED)]
)
def test_gradients_wrap_others_too(name: str, compiles: bool) -> None:
    _, fused, eager = CALLS[name]
    function = torch.compile(fused, backend="aot_eager") if compiles else fused
    given = [tensor.requires_grad_() for tensor in given_of(name, "all", two)]
    plain = [tensor.clone().requires_grad_() for tensor in given_of(name, "", two)]
    found: Any = torch.autograd.grad(function(*given).sum(), given)
    expected = torch.autograd.grad(eager(*plain).sum(), plain)
    for gradient, exact in zip(found, expected, strict=True):
        assert isinstance(gradient, TwoTensor)
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
    found = [cutfuse.explain(cutfuse.linear, x, w, b, epilogue=gated, operands=(r,))]
    if place == "x":
        found += [cutfuse.explain(function, x) for function in (cutfuse.sum, cutfuse.sigmoid)]
    for explanation in found:
        assert explanation.path == "composed"
        assert explanation.reasons[0].startswith(f"{named} is a TwoTensor, a tensor that wraps others")


class TaggedParameter(nn.Parameter):
    pass


def test_subclasses_that_wrap_nothing_take_the_operators() -> None:
    for weight in (nn.Parameter(W, requires_grad=False), TaggedParameter(W, requires_grad=False)):
        assert cutfuse.explain(cutfuse.linear, X, weight, epilogue=gated, operands=(R,)).path != "composed"


@pytest.mark.parametrize("wrap", [two, quantized])
def test_modules_whose_weight_was_replaced(wrap: Callable[[Tensor], Any]) -> None:
    """As torchao's quantize_ does it."""
    for module, x in (
        (cutfuse.nn.FusedLinear(8, 6, epilogue=F.gelu), X[None]),
        (cutfuse.nn.GemmDivideSumScale(8, 6, 1.5), X),
        (cutfuse.nn.LinearSigmoidSum(8, 6), X),
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
        cutfuse.nn.FusedLinear(8, 6, epilogue=F.gelu),
        cutfuse.nn.FusedLinear(6, 8, epilogue=lambda z: torch.tanh(z) * 2),
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


@pytest.mark.parametrize("name", [name for name in CALLS if name != "head"])  # whose classes are plain
def test_all_of_a_call_are_distributed(mesh: Any, name: str) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    _, fused, eager = CALLS[name]
    if name == "reduce" and torch.__version__.startswith("2.8."):
        pytest.skip("DTensor of PyTorch 2.8 has no logsumexp")
    given = given_of(name, "all", lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]))
    torch.testing.assert_close(inner(fused(*given)), eager(*given_of(name, "", two)))
