"""`cutfuse.mlp`: values and gradients beside PyTorch in fp64, what is kept, and what takes other ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from emulated_device import Entered, emulated_device, needs_exchange_api
from generators import saved_tensors
from mlp_cases import ACTIVATIONS, check, check_case, error, gradients, make, one_node, random_case, sided  # noqa: F401
from model_checks import PYTORCH_WARNINGS
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cutfuse
from cutfuse import arguments
from cutfuse.epilogue import Epilogue
from cutfuse.epilogue.derivative import derive
from cutfuse.layer import schema
from cutfuse.native import use_operators_everywhere

pytestmark = [*PYTORCH_WARNINGS]


@pytest.fixture
def operators() -> Iterator[None]:
    with use_operators_everywhere():
        yield


@pytest.mark.parametrize("seed", range(68))
def test_random_mlps(path: str, seed: int) -> None:
    check_case(random_case(seed, [torch.float32, torch.bfloat16, torch.float16, torch.float64][seed // 17]))


def test_no_gradient_of_an_activation_but_the_long_one_is_a_pass_of_its_own() -> None:
    without = [name for name, f in ACTIVATIONS.items() if f is not None and derive(Epilogue(f).text) is None]
    assert without == ["long"]


@pytest.mark.parametrize(
    ("activation", "gate", "options", "matrices", "has_pass"),
    [
        ("affine", False, {}, 1, False),  # h, for the gradient of w2
        ("relu squared", False, {}, 1, False),
        ("softplus", False, {}, 1, False),
        ("gelu", False, {}, 1, True),
        ("long", False, {}, 1, True),
        ("silu", True, {}, 2, True),
        ("relu squared", False, {"recompute": True}, 0, False),
        ("gelu", False, {"recompute": True}, 0, True),
        ("silu", True, {"recompute": True}, 0, True),
        ("affine", False, {"frozen": ["w2"]}, 0, False),
        ("relu squared", False, {"frozen": ["w2"]}, 1, False),
        ("gelu", False, {"frozen": ["w2"]}, 1, False),
        ("silu", True, {"frozen": ["w2"]}, 2, True),
        ("gelu", False, {"frozen": ["x", "w1", "b1"]}, 1, False),
        ("gelu", False, {"frozen": ["x", "w1", "b1", "w2"]}, 0, False),
    ],
)
def test_matrices_of_the_hidden_width_that_are_kept_and_passes_over_its_gradient(
    operators: None,
    activation: str,
    gate: bool,
    options: dict[str, Any],
    matrices: int,
    has_pass: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass gives the hidden layer again too."""
    passes: list[str] = []

    def counted(name: str, operator: Any) -> Any:
        return lambda *given: (passes.append(name), operator(*given))[1]

    for name in ("pointwise", "pointwise_backward"):
        monkeypatch.setattr(schema, name, counted(name, getattr(schema, name)))
    case = make(0, activation=activation, gate=gate, sizes=(13, 64, 9), **options)
    with saved_tensors() as found:
        y = case.call()
    assert len([tensor for tensor in found.values() if tensor.shape == (14, 64)]) == matrices
    passes.clear()
    own = gradients(y, case.tensors)
    assert passes == ["pointwise_backward"] * has_pass
    wide = case.wide()
    check(own, gradients(case.eager(), case.tensors), gradients(case.eager(wide), wide))


def test_products_of_a_step(operators: None) -> None:
    """Two forwards and four backwards, with the derivative in one of them; those that nobody asks for are not made."""
    counts = {}
    for frozen in ((), ("x",), ("x", "w1", "b1"), ("w2",)):
        case = make(0, torch.bfloat16, frozen=frozen, sizes=(16, 64, 16))
        with FlopCounterMode(display=False) as counter:
            gradients(case.call(), case.tensors)
        counts[frozen] = counter.get_total_flops() / (2 * 14 * 16 * 64)
    assert counts == {(): 6, ("x",): 5, ("x", "w1", "b1"): 3, ("w2",): 5}


def test_a_program_without_room_for_one_more_operand(operators: None) -> None:
    """Two passes then, of which one gives the hidden layer again."""

    def gate(a: Tensor, b: Tensor) -> Tensor:
        for k in range(10):
            a = torch.sin(a * 0.5) + float(k)
        return torch.cos(a) * b

    with pytest.raises(cutfuse.EpilogueError, match="instructions"):
        Epilogue(lambda a, b, c: gate(a, b) * c, 2)
    check_case(make(0, gate=gate))


@needs_exchange_api
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("gate", [False, True])
def test_gradients_take_the_memory_of_what_is_kept_where_nobody_else_has_it(gate: bool) -> None:
    case = make(0, torch.bfloat16, activation="gelu", gate=gate, leading=(32,), sizes=(64, 128, 64))
    with emulated_device() as launches:
        right = gradients(case.call(), case.tensors)

        def inputs_and_outputs(y: Tensor, **options: Any) -> tuple[list[int], list[int]]:
            del launches.launches[:]
            found = torch.autograd.grad(y, list(case.tensors.values()), torch.ones_like(y), **options)
            (launch,) = (launch for launch in launches.launches if launch.function == "pointwise_backward")
            assert all(map(torch.equal, found, again)) if again else True
            again[:] = found
            return [launch.x[0], launch.operands[-1][0]], [launch.outputs[0][1], launch.outputs[-1][1]]

        again: list[Tensor] = []
        y = case.call()
        read, stored = inputs_and_outputs(y, retain_graph=True)
        assert (read[0] != stored[0], read[1]) == (True, stored[1])
        read, stored = inputs_and_outputs(y)
        assert read == stored
        with saved_tensors() as found:
            y = case.call()
        before = [tensor.clone() for tensor in found.values()]
        read, stored = inputs_and_outputs(y)
        assert read[0] != stored[0]
        assert all(map(torch.equal, found.values(), before))
        check(gradients(case.call(), case.tensors), right, right)


def test_a_hidden_layer_that_does_not_depend_on_a_weight(path: str) -> None:
    case = make(0, gate=lambda a, b: torch.tanh(b))
    found, right = (gradients(function(), case.tensors) for function in (case.call, case.eager))
    torch.testing.assert_close(found, right)
    case = make(0, activation="affine")
    y = cutfuse.mlp(case.tensors["x"], case.tensors["w1"], None, case.tensors["w2"], None, activation=lambda z: z > 0.0)
    assert torch.autograd.grad(y.sum(), [case.tensors["w1"], case.tensors["w2"]], allow_unused=True)[1] is not None


@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"gate": True}, {"recompute": True}])
@pytest.mark.parametrize("leading", [(0,), (2, 0), (1,), ()])
def test_no_rows_and_no_dimensions_of_rows(operators: None, leading: tuple[int, ...], options: dict[str, Any]) -> None:
    case = make(0, leading=leading, with_residual=True, **options)
    torch.testing.assert_close(gradients(case.call(), case.tensors), gradients(case.eager(), case.tensors))


@pytest.mark.parametrize("options", [{}, {"gate": True}, {"activation": "relu squared"}, {"gate": sided}])
def test_autocast(path: str, options: dict[str, Any]) -> None:
    case = make(0, with_residual=True, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, eager = (gradients(function(), case.tensors) for function in (case.call, case.eager))
    wide = case.wide()
    exact = gradients(case.eager(wide), wide)
    assert found["y"].dtype == torch.float32  # the residual's
    for name, right in exact.items():
        assert found[name].dtype == torch.float32
        assert error(found[name], right) <= 2.0 * error(eager[name], right) + 0.01


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_checkpoints(path: str, gate: bool, recompute: bool) -> None:
    case = make(0, gate=gate)
    right = gradients(case.call(), case.tensors)
    y = checkpoint(
        lambda x: case.call({**case.tensors, "x": x}, recompute=recompute), case.tensors["x"], use_reentrant=False
    )
    torch.testing.assert_close(gradients(y, case.tensors), right)


@pytest.mark.parametrize("options", [{}, {"gate": True, "is_pair": True}, {"gate": sided, "with_residual": True}])
def test_compiled_and_exported(path: str, options: dict[str, Any]) -> None:
    case = make(0, **options)
    torch._dynamo.reset()

    class Model(torch.nn.Module):
        def forward(self, tensors: dict[str, Tensor]) -> Tensor:
            return case.call(tensors)

    right = gradients(case.call(), case.tensors)
    for backend in ("aot_eager", "cutfuse"):
        y = torch.compile(Model(), backend=backend, fullgraph=True)(case.tensors)
        torch.testing.assert_close(gradients(y, case.tensors), right, rtol=1e-4, atol=1e-4)
    exported = torch.export.export(Model(), (case.tensors,)).module()
    torch.testing.assert_close(exported(case.tensors), right["y"])


def test_a_weight_that_changed_is_an_error(operators: None) -> None:
    case = make(0)
    y = case.call()
    with torch.no_grad():
        case.tensors["w2"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_exchange_api
@pytest.mark.parametrize("way", ["one_node", "layers"])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "relu squared"}, {"gate": True}, {"recompute": True}, {"with_biases": False, "gate": True}],
)
def test_launches_of_a_gpu(options: dict[str, Any], way: str, request: pytest.FixtureRequest) -> None:
    """On what the planner takes of an H200, with the launches computed by PyTorch; the second step runs directly."""
    if way == "one_node":
        request.getfixturevalue(way)
    for leading, sizes in (((32,), (64, 128, 64)), ((3, 50), (72, 264, 40))):
        case = make(0, torch.bfloat16, leading=leading, sizes=sizes, with_residual=True, **options)
        eager = gradients(case.eager(), case.tensors)
        wide = case.wide()
        exact = gradients(case.eager(wide), wide)
        with emulated_device():
            for _ in range(3):
                check(gradients(case.call(), case.tensors), eager, exact)


@pytest.mark.parametrize(
    ("rows", "sizes", "recompute", "is_one_node"),
    [
        (32, (64, 128, 64), False, False),
        (32, (64, 128, 64), True, True),
        (1503, (1040, 1504, 1040), False, False),
        (12608, (768, 3072, 768), False, True),
    ],
)
def test_the_layers_of_an_mlp_that_waits_for_the_host_are_nodes(
    rows: int, sizes: tuple[int, int, int], recompute: bool, is_one_node: bool
) -> None:
    with torch.device("meta"):
        module = cutfuse.nn.MLP(*sizes, activation=F.gelu, dtype=torch.bfloat16, recompute=recompute)
        found = cutfuse.explain(module, torch.empty(rows, sizes[0], dtype=torch.bfloat16), device="H200")
    assert any("kept of the hidden width" in step for step in found.steps) == is_one_node
    assert any("a node for each layer" in reason for reason in found.reasons) != is_one_node
    if rows == 32:
        case = make(0, torch.bfloat16, activation="gelu", leading=(rows,), sizes=sizes)
        with emulated_device():
            node = case.call(recompute=recompute).grad_fn
        assert (type(node).__name__ == "_MLPBackward") == is_one_node


def negated(tensor: Tensor) -> Tensor:
    """The same values as a view of memory that has the opposite ones."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg()
    return view


@needs_exchange_api
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("gate", [False, True])
def test_negated_views_have_their_own_sign(gate: bool) -> None:
    """Among the tensors of a call, and as the gradient that arrives."""
    case = make(0, gate=gate, leading=(32,), sizes=(64, 128, 64), with_residual=True)
    right = gradients(case.eager(), case.tensors)
    grad = torch.randn(right["y"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    with emulated_device():
        for name, tensor in case.tensors.items():
            tensors = {**case.tensors, name: negated(tensor.detach()).requires_grad_()}
            torch.testing.assert_close(gradients(case.call(tensors), tensors), right, rtol=1e-4, atol=1e-4)
        found = torch.autograd.grad(case.call(), list(case.tensors.values()), negated(grad))
    expected = tuple(right[name] for name in case.tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


SLOPE = 0.5


def sloped(z: Tensor) -> Tensor:
    return torch.maximum(z, z * SLOPE)


@needs_exchange_api
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize("gate", [False, True])
def test_calls_like_one_before_are_not_checked_again(gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("cutfuse.mlp")
    checked, prepared = [], module._prepared
    monkeypatch.setattr(module, "_prepared", lambda *given: (checked.append(1), prepared(*given))[1])
    case = make(0, torch.bfloat16, gate=gate, leading=(32,), sizes=(64, 128, 64))
    case.options["activation"] = sloped

    def is_checked(call: Any = case.call) -> bool:
        del checked[:]
        call()
        return bool(checked)

    with emulated_device():
        assert is_checked()
        assert not is_checked()
        first = case.call()
        monkeypatch.setitem(globals(), "SLOPE", 0.25)
        assert is_checked()
        assert not torch.equal(case.call(), first)
        with torch.no_grad():
            is_checked()
            assert not is_checked()
        assert is_checked(lambda: case.call(recompute=True))
        assert is_checked(make(0, torch.bfloat16, gate=gate, leading=(33,), sizes=(64, 128, 64)).call)
        case.tensors["w2"].requires_grad_(False)
        assert is_checked()
        with pytest.raises(ValueError, match="w2 is on meta"):
            case.call({**case.tensors, "w2": case.tensors["w2"].to("meta")})
        monkeypatch.setitem(globals(), "SLOPE", 0.5)
        with torch.autocast("cpu", dtype=torch.float16):
            assert case.call().dtype == torch.float16


@needs_exchange_api
@pytest.mark.parametrize(("way", "forwards", "backwards"), [("layers", 28, 2), ("one_node", 30, 47)])
def test_what_calls_like_one_before_enter(
    way: str, forwards: int, backwards: int, request: pytest.FixtureRequest
) -> None:
    """Few functions, as a small device waits for the host: no checks, no plans, no front door of each layer's."""
    if way == "one_node":
        request.getfixturevalue(way)
    x = torch.randn(32, 64, dtype=torch.bfloat16).requires_grad_()
    module = cutfuse.nn.MLP(64, 128, activation=F.gelu, dtype=torch.bfloat16)
    inputs = [x, *module.parameters()]
    with emulated_device():
        for _ in range(3):
            gradients(module(x), dict(enumerate(inputs)))
        with Entered() as forward:
            y = module(x)
        grad = torch.ones_like(y)
        with Entered() as backward:
            torch.autograd.grad(y, inputs, grad)
    found, behind = forward.names, backward.names
    assert len(found) <= forwards, found
    assert len(behind) <= backwards, behind
    assert not {"_prepared", "_checked", "linear", "_linear_generally", "plan_linear"} & {*found, *behind}


@needs_exchange_api
@pytest.mark.usefixtures("one_node")
def test_a_row_of_ones_is_written_once() -> None:
    cases = [make(0, dtype, leading=(32,), sizes=(64, 128, 64)) for dtype in (torch.bfloat16, torch.float16)]
    with emulated_device() as launches:
        for case in [*cases, *cases]:
            gradients(case.call(), case.tensors)
        rows = [launch.grad[0] for launch in launches.launches if launch.function == "pointwise_backward"]
    assert rows[:2] == rows[2:]
    assert rows[0] != rows[1]


@needs_exchange_api
@pytest.mark.parametrize("way", ["one_node", "layers"])
def test_a_plan_holds_no_callable_that_may_change(way: str, request: pytest.FixtureRequest) -> None:
    if way == "one_node":
        request.getfixturevalue(way)
    case = make(0, torch.bfloat16, leading=(32,), sizes=(64, 128, 64))

    def scaled(by: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
        def change(to: float) -> None:
            nonlocal by
            by = to

        return lambda z: by * torch.tanh(z), change

    def call(activation: Any) -> Tensor:
        case.options["activation"] = activation
        return case.call()

    with emulated_device():
        (first, change), (second, _) = scaled(0.5), scaled(0.5)
        right = call(first)
        assert torch.equal(call(first), right)
        change(2.0)
        assert torch.equal(call(second), right)
        assert not torch.equal(call(first), right)


@needs_exchange_api
@pytest.mark.parametrize("way", ["one_node", "layers"])
def test_results_round_once_in_every_mode(way: str, request: pytest.FixtureRequest) -> None:
    if way == "one_node":
        request.getfixturevalue(way)
    case = make(0, torch.bfloat16, activation="gelu", leading=(32,), sizes=(64, 128, 64))
    with emulated_device():
        right = [gradients(case.call(), case.tensors) for _ in range(2)]
        with cutfuse.rounding("eager"):
            right += [gradients(case.call(), case.tensors) for _ in range(2)]
    for found in right[1:]:
        assert all(torch.equal(found[name], tensor) for name, tensor in right[0].items())


@needs_exchange_api
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # of PyTorch's own decompositions
def test_forward_mode_derivatives_of_calls_like_one_before() -> None:
    case = make(0, gate=True, leading=(32,), sizes=(64, 128, 64), frozen=["x"])
    tangent = torch.randn(case.tensors["x"].shape, generator=torch.Generator().manual_seed(1))

    def derivative(call: Any) -> Tensor:
        with forward_ad.dual_level():
            y = call({**case.tensors, "x": forward_ad.make_dual(case.tensors["x"], tangent)})
            found: Tensor = forward_ad.unpack_dual(y).tangent
            return found

    right = derivative(case.eager)
    # A patch of its own, which ends before that of `emulated_device` for the same function.
    with emulated_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "why_composed", lambda x, arithmetic: arguments.why_transformed())
        first = case.call()
        torch.testing.assert_close(derivative(case.call), right)
        assert type(first.grad_fn) is type(case.call().grad_fn)


@pytest.mark.parametrize(
    ("given", "error_type", "message"),
    [
        ({"w2": torch.ones(9, 30)}, ValueError, r"w1 has to be of shape \(30, 13\) for x .* got \(31, 13\)"),
        ({"b1": torch.ones(30)}, ValueError, r"b1 has to be of shape \(31,\)"),
        ({"residual": torch.ones(9)}, ValueError, r"residual has to be of shape \(2, 7, 9\)"),
        ({"w1": torch.ones(31)}, ValueError, r"x has to be \[\.\.\., K\], w1 \[H, K\]"),
        ({"w2": torch.ones(9, 31, dtype=torch.bfloat16)}, TypeError, "of one type, got torch.float32 and .*bfloat16"),
        ({"w2": torch.ones(9, 31, device="meta")}, ValueError, "w2 is on meta and x on cpu"),
        ({"w2": None}, TypeError, "w2 has to be a tensor, got NoneType"),
        ({"w1": (torch.ones(31, 13), torch.ones(31, 13)), "b1": None}, ValueError, "pairs with a gate"),
        ({"w1": (torch.ones(31, 13), torch.ones(31, 13))}, ValueError, "both pairs or both tensors"),
        ({"gate": sided}, ValueError, "takes no activation"),
        ({"gate": True}, ValueError, r"w1 has to be of shape \(62, 13\) .* and a gate"),
        ({"recompute": 1}, TypeError, "recompute has to be True or False"),
        ({"activation": lambda z: z.sum()}, cutfuse.EpilogueError, "sum"),
    ],
)
def test_errors(given: dict[str, Any], error_type: type[Exception], message: str) -> None:
    case = make(0)
    options = {**case.tensors, "activation": F.gelu, **given}
    with pytest.raises(error_type, match=message):
        cutfuse.mlp(*[options.pop(name) for name in ("x", "w1", "b1", "w2", "b2")], **options)
