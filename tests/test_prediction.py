"""`explain` and `explain_model` for a card that is not there: they say what they say on one."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import cutfuse
from cutfuse import arguments, native
from cutfuse.layer import autograd, linear_plan, planner, training_step
from cutfuse.layer.specialize import COMPILED_IN

pytestmark = [
    *PYTORCH_WARNINGS,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


@contextlib.contextmanager
def on_an_h200() -> Iterator[None]:
    """CPU tensors have the kernels, the facts and the driver of an H200."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", lambda x, arithmetic: "")
        for module in (linear_plan, planner, training_step):
            patch.setattr(module, "device_facts", lambda device: (9, 0, 132))
        patch.setattr(autograd, "stands_in_for", lambda device: True)  # precisions are forced on CUDA devices
        patch.setattr(native.core, "why_not_specialized", lambda: "")
        yield


CHAINS: list[Callable[..., Tensor] | None] = [
    None,
    F.gelu,
    torch.relu,
    lambda z: torch.tanh(z) * z,
    lambda z: z * 0.5,
    lambda z: F.silu(z) + torch.sigmoid(z) * 2.0,
]
SIZES = (1, 8, 64, 100, 256, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_layer(draw: random.Random, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `linear`, without values."""
    (m, n, k), dtype = draw.choices(SIZES, k=3), draw.choice(DTYPES)
    x, weight = (torch.empty(size, k, dtype=dtype, device=device) for size in (m, n))
    weight.requires_grad_(draw.random() < 0.4)
    bias = torch.empty(n, dtype=dtype, device=device) if draw.random() < 0.5 else None
    options: dict[str, Any] = {"epilogue": draw.choice(CHAINS), "reduce": draw.choice([None, None, "sum", "amax"])}
    if draw.random() < 0.3:
        options.update(epilogue=lambda z, r: z + r, operands=(torch.empty(m, n, dtype=dtype, device=device),))
    return (x, weight, bias), options


@pytest.mark.parametrize("seed", range(58))
def test_a_layer_is_explained_as_on_the_card(seed: int) -> None:
    given, options = random_layer(random.Random(seed), "cpu")
    with on_an_h200():
        expected = cutfuse.explain(*given, **options)
    found = [cutfuse.explain(*given, **options, device="H200")]
    given, options = random_layer(random.Random(seed), "meta")
    found.append(cutfuse.explain(*given, **options, device="H200"))
    with FakeTensorMode():
        given, options = random_layer(random.Random(seed), "cpu")
        found.append(cutfuse.explain(*given, **options, device="H200"))
    for one in found:
        assert one.device == "H200"
        for name in ("call", "path", "steps", "reasons", "bytes", "flops", "workspace_bytes", "compiles"):
            assert getattr(one, name) == getattr(expected, name), name


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """With a layer of cutfuse's, which is an operator on the card, and no product of the graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = cutfuse.nn.FusedLinear(width, width, epilogue=F.gelu)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return torch.relu(self.down(y))


BLOCKS: list[Callable[[int], nn.Module]] = [
    Gated,
    Attention,
    Fused,
    lambda width: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
    lambda width: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False), nn.Dropout(0.1)),
]


def random_model(seed: int, device: str) -> tuple[nn.Module, Tensor, bool]:
    """A model, its input, and whether gradients are wanted."""
    draw = random.Random(seed)
    width, rows = draw.choice([64, 256]), draw.choice([4, 128, 512])
    dtype = draw.choice([torch.bfloat16, torch.float32])
    with torch.device(device):
        model = nn.Sequential(*(draw.choice(BLOCKS)(width) for _ in range(3))).to(dtype)
        x = torch.zeros(2, rows, width, dtype=dtype)
    return model.train(draw.random() < 0.5), x, draw.random() < 0.4


def explained(seed: int, place: str, device: str | None) -> cutfuse.compile.report.ModelExplanation:
    model, x, trains = random_model(seed, place)
    torch._dynamo.reset()
    with torch.set_grad_enabled(trains):
        return cutfuse.explain_model(model, x, device=device)


@pytest.mark.parametrize("seed", range(5))
def test_a_model_is_explained_as_on_the_card(seed: int) -> None:
    with on_an_h200():
        expected = explained(seed, "meta", None)
    for place in ("cpu", "meta"):
        found = explained(seed, place, "H200")
        assert found.products == expected.products
        assert (found.graphs, found.device) == (expected.graphs, "H200")
    assert found.products


def fails(x: Tensor) -> Tensor:
    raise ValueError("of the model")


def test_without_a_card_the_tensors_own_device_is_explained() -> None:
    x, weight = torch.randn(8, 16), torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    with pytest.raises(ValueError, match="unknown reduction"):
        cutfuse.explain(x, weight, reduce="max", device="H200")
    with pytest.raises(ValueError, match="of the model"):
        cutfuse.explain_model(fails, x, device="H200")
    told = cutfuse.explain(x, weight, epilogue=torch.relu)
    assert (told.device, told.reasons) == (None, ("x is on cpu; kernels are for CUDA devices",))
    found = cutfuse.explain_model(model, x)
    assert (found.device, found.before, found.products[0].times) == (None, 0.0, None)
    assert found.products[0].reason == "x is on cpu; kernels are for CUDA devices"


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_product_of_several_types_is_refused(device: str, x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """On the meta device PyTorch computes with the input's type, and tells nobody."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.empty(8, 64, dtype=x_dtype, device=device)
    told = rf"^cutfuse.explain_model: 0 multiplies an input of {x_dtype} by a weight of {dtype}, which .*x.to\({dtype}"
    with pytest.raises(TypeError, match=told):
        cutfuse.explain_model(model.to(device, dtype), x, device="H200")


def test_autocast_makes_one_type_of_a_products_matrices_where_it_casts() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()).bfloat16(), torch.randn(8, 64)

    def autocasting(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    with torch.no_grad():
        (product,) = cutfuse.explain_model(autocasting, x, device="H200").products
        assert product.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (product,) = cutfuse.explain_model(model, x, device="H200").products
            assert product.dtype == torch.bfloat16
            with pytest.raises(TypeError, match="casts nothing on the meta device"):
                cutfuse.explain_model(model.to("meta"), x.to("meta"), device="H200")


def test_other_threads_and_later_calls_are_none_of_a_prediction() -> None:
    seen = []

    @torch.compiler.disable
    def layer(x: Tensor) -> Tensor:
        """Runs as it stands while a card is predicted for."""
        other = threading.Thread(target=lambda: seen.append(cutfuse.explain(x, x, epilogue=torch.relu).path))
        other.start()
        other.join()
        return cutfuse.linear(x, x, epilogue=F.gelu)

    x = torch.randn(8, 8)
    cutfuse.explain_model(lambda x: layer(F.linear(x, x)), x, device="H200")
    assert set(seen) == {"composed"}
    for _ in range(3):
        torch.testing.assert_close(cutfuse.linear(x, x, epilogue=F.gelu), F.gelu(F.linear(x, x)))


@pytest.mark.parametrize("device", ["B200", "200", "cuda", torch.device("cpu")])
def test_an_unknown_card_names_the_known_ones(device: Any) -> None:
    x = torch.randn(8, 8)
    for explain in (cutfuse.explain, cutfuse.explain_model):
        with pytest.raises(ValueError, match=rf"^cutfuse.{explain.__name__}: device has to be one of 'H200', 'H100'"):
            explain(torch.relu, x, device=device)


def test_a_cards_name_may_be_in_small_letters() -> None:
    x = torch.empty(64, 64, device="meta")
    for name in ("h200", "h100"):
        assert cutfuse.explain(x, x, epilogue=F.gelu, device=name).device == name.upper()
        assert cutfuse.explain_model(lambda x: F.linear(x, x), x, device=name).device == name.upper()


def test_what_an_mlp_compiles_is_told_layer_by_layer() -> None:
    """Of its fp32 layers one has a program to compile, and the other has none."""
    mlp, x = cutfuse.nn.MLP(512, 2048, device="meta"), torch.empty(4096, 512, device="meta")
    hidden, result = cutfuse.explain(mlp, x, device="H200").compiles.splitlines()
    assert hidden.startswith("hidden layer: the program into sm90_")
    assert result == f"result: {COMPILED_IN}"
    assert not cutfuse.explain(mlp.bfloat16(), x.bfloat16(), device="H200").compiles.startswith("hidden layer")


def test_tensors_on_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = SimpleNamespace(major=8, minor=0, multi_processor_count=108, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: a100)
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r'on cuda:1, a NVIDIA A100; move the call to the CPU or to device="meta"'):
        native.check_devices("explain", "H100", devices)
    native.check_devices("explain", None, devices)
    a100.major, a100.multi_processor_count = 9, 132  # such a card itself
    native.check_devices("explain", "H100", devices)


def test_a_prediction_says_that_it_is_one() -> None:
    x = torch.empty(1024, 1024, device="meta")
    layer = nn.Linear(1024, 1024, device="meta")
    for device, caution in (("H200", ""), ("H100", "with the times of an H200, whose memory is 1.4 times as fast")):
        call = cutfuse.explain(x, x, epilogue=F.gelu, device=device)
        for found in (call, cutfuse.explain_model(layer, x, device=device)):
            for text in (str(found), found._repr_html_()):
                assert f"a prediction for an {device}" in " ".join(text.split())
                assert caution in " ".join(text.split())
