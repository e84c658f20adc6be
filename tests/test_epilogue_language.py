"""What users write, traced and run, against the same callable on tensors; and what cannot be traced."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from host_program import run_on_host
from torch import nn

import cutfuse
from cutfuse.epilogue import Epilogue, EpilogueError, evaluate, input, operand

SCALE = 1.25


def helper(z: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return torch.tanh(z) * scale


def several_statements(z: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(z)
    for power in range(2, 4):
        gate = gate + z**power
    return gate * r if SCALE > 1 else gate


# What is no call of a single function, all of which test_epilogue_functions.py has: (callable, tensor operands). The
# callable takes tensors just as well.
LANGUAGE: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "readme": (lambda z: z + 2.0 * torch.sigmoid(z), 0),
    "residual": (lambda z, r: torch.relu(z) * 0.5 + r, 1),
    "reflected": (lambda z: 2 - 3 / (1 + torch.exp(-z)), 0),
    "where": (lambda z: torch.where(z > 0, z, 0.1 * z), 0),
    "where_numbers": (lambda z: torch.where(z >= 0.5, 1.5, -0.25) * z, 0),
    "where_shared": (lambda z, r: torch.where(z < r, z * r, z - z * r), 1),
    "where_method": (lambda z, r: z.where(z > r, r), 1),
    "where_keywords": (lambda z: torch.where(condition=z > 0, input=z, other=z * z), 0),
    "clamp_min": (lambda z: z.clamp(min=0), 0),
    "clamp_both": (lambda z: torch.clamp(z, -1, max=1), 0),
    "clip": (lambda z: torch.clip(z, 0.0, 6.0), 0),
    "powers": (lambda z: z**2 + z**3 - z**1 + abs(z) ** 0.5 + (z * z + 1) ** -1, 0),
    "more_powers": (lambda z: (z * z + 1) ** -0.5 + (z * z + 1) ** -2 + z**4 + (z * z) ** 1.5, 0),
    "power_of_two": (lambda z: 2**z, 0),
    "power_of_number": (lambda z: 1.5**z, 0),
    "pow": (lambda z: torch.pow(z, 2) + z.pow(exponent=3), 0),
    "alpha": (lambda z, r: torch.add(z, r, alpha=2) + z.sub(r, alpha=0.5), 1),
    "method_chain": (lambda z: z.sigmoid().mul(2).add(1).log().neg().exp(), 0),
    "builtins": (lambda z: abs(z) - (+z) * -z, 0),
    "max_of_two": (lambda z, r: torch.max(z, r) - torch.min(z, r), 1),
    "gelu": (lambda z: F.gelu(z) + F.gelu(z, approximate="tanh"), 0),
    "keyword_input": (lambda z: F.leaky_relu(input=z, negative_slope=0.3), 0),
    "inplace_is_functional": (lambda z: F.relu(z, inplace=False) + F.elu(z, 0.5, False), 0),
    "softplus": (lambda z: F.softplus(z, beta=2, threshold=4), 0),
    "masks": (lambda z, r: torch.where((z > 0) & ~(r > 0) | (z < -1), z, r), 1),
    "exclusive_or": (lambda z, r: torch.where((z > 0) ^ (r > 0), z, r), 1),
    "mask_times_value": (lambda z: (z > 0) * z, 0),
    "mask_to_float": (lambda z: (z > 0).float() + (z < 1).to(z.dtype) - (z != z).type(z.dtype), 0),
    "logical": (lambda z, r: torch.where(torch.logical_and(z > 0, torch.logical_not(r > 0)), z, 0.0), 1),
    "numpy_scalars": (lambda z: np.float32(0.5) * z + np.int64(3) - z * np.float64(0.25), 0),
    "tensor_numbers": (lambda z: torch.tensor(0.5) * z + z / torch.tensor(4.0), 0),
    "constants": (lambda z: z * math.pi + torch.tensor(SCALE) * math.sqrt(2), 0),
    "helper_functions": (lambda z: helper(z) + helper(z, scale=SCALE), 0),
    "statements": (several_statements, 1),
    "ignores_z": (lambda z, r: torch.exp(r), 1),
    "operand_only": (lambda z, r: r, 1),
    "four_operands": (lambda z, a, b, c, d: z * a + b * c - d, 4),
    "identity": (lambda z: z, 0),
    "torch_function": (torch.sigmoid, 0),
    "binary_torch_function": (torch.maximum, 1),
    "tensor_method": (torch.Tensor.tanh, 0),
    "functional": (F.softsign, 0),
    "partial": (partial(F.leaky_relu, negative_slope=0.2), 0),
    "silu_module": (nn.SiLU(), 0),
    "sequential": (nn.Sequential(nn.Tanh(), nn.LeakyReLU(0.3), nn.Dropout(), nn.Identity()).eval(), 0),
}
for _module in (
    nn.ReLU(),
    nn.ReLU6(),
    nn.GELU("tanh"),
    nn.ELU(0.5),
    nn.SELU(),
    nn.CELU(0.5),
    nn.Hardswish(),
    nn.Mish(),
):
    LANGUAGE[f"module_{type(_module).__name__}"] = (_module, 0)
for _module in (nn.Softplus(2), nn.Hardtanh(-2, 2), nn.LogSigmoid(), nn.Tanhshrink(), nn.Threshold(0.1, 2), nn.RReLU()):
    LANGUAGE[f"module_{type(_module).__name__}"] = (_module.eval(), 0)


def make_inputs(operand_count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(operand_count)
    return [torch.randn(257, dtype=torch.float64, generator=generator) * 2 for _ in range(1 + operand_count)]


@pytest.mark.parametrize("name", LANGUAGE)
def test_language(name: str) -> None:
    """In fp64 the program gives what the callable gives, gradients too; the native interpreter agrees in fp32."""
    fn, operand_count = LANGUAGE[name]
    epilogue = Epilogue(fn, operand_count)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(operand_count)]
    expected = fn(*inputs).double()
    got = evaluate(epilogue.program, inputs[0], inputs[1:])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    if expected.requires_grad:
        used = [tensor for tensor in inputs if not (name in ("ignores_z", "operand_only") and tensor is inputs[0])]
        want = torch.autograd.grad(expected.sum(), used, allow_unused=True)
        have = torch.autograd.grad(got.sum(), used, allow_unused=True)
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
    plain = [tensor.detach() for tensor in inputs]
    exact = evaluate(epilogue.program, plain[0].float().double(), [tensor.float().double() for tensor in plain[1:]])
    native = run_on_host(epilogue.program, plain[0], plain[1:])
    torch.testing.assert_close(native.double(), exact, rtol=2e-5, atol=2e-5)


def test_in_place_activations_are_functional() -> None:
    assert Epilogue(nn.ReLU(inplace=True)).text == "operands=0; relu z"
    assert Epilogue(lambda z: F.leaky_relu(z, 0.2, True)).text == "operands=0; leaky_relu z 0.2"


def test_equal_subexpressions_are_one() -> None:
    z, r = input(), operand(0)
    assert torch.sigmoid(z) * 2 + r is F.sigmoid(z) * 2 + operand(0)
    assert z * 0.0 is not z * -0.0
    epilogue = Epilogue(lambda z: torch.exp(z) + torch.exp(z) * torch.exp(z))
    assert len(epilogue.program.instructions) == 3


def test_operands_of_any_type_and_shape() -> None:
    z = torch.randn(3, 4, dtype=torch.float64)
    row, column, mask = torch.randn(4), torch.arange(3).unsqueeze(1), torch.rand(3, 4) > 0.5
    epilogue = Epilogue(lambda z, r, c, m: torch.where(m, z * r, z + c))
    torch.testing.assert_close(epilogue(z, row, column, mask), torch.where(mask, z * row, z + column))
    assert Epilogue(lambda z, r: r)(z, row).shape == z.shape
    assert Epilogue(lambda z: z > 0)(z).dtype == torch.bool


class Scaled(nn.Module):
    def forward(self, z: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return z * scale


def test_operand_count_from_the_signature() -> None:
    assert Epilogue(lambda z, r, s=2.0: z * r * s).operand_count == 1
    assert Epilogue(lambda z, *rest: z).operand_count == 0
    assert Epilogue(torch.add).operand_count == 1
    assert Epilogue(torch.addcmul).operand_count == 2
    assert Epilogue(torch.sigmoid).operand_count == 0
    assert Epilogue(nn.GELU()).operand_count == 0
    assert Epilogue(Scaled()).operand_count == 1


def test_builder() -> None:
    z, r = input(), operand(1)
    epilogue = Epilogue.from_expression(torch.relu(z) + r)
    assert epilogue.operand_count == 2
    assert epilogue.text == "operands=2; relu z; add prev r1"
    assert Epilogue.from_expression(z, 3).operand_count == 3
    with pytest.raises(EpilogueError, match="reads operand 1, and is given 1 operand: r1"):
        Epilogue.from_expression(r, 1)
    with pytest.raises(EpilogueError, match="reads operand 1, and is given 0 operands"):
        Epilogue(lambda z: z * r)
    with pytest.raises(EpilogueError, match="operand 4 of an epilogue: a program has at most 4 operands"):
        operand(4)


def test_repr_is_what_was_written() -> None:
    epilogue = Epilogue(lambda z, r: torch.where(z > 0, F.elu(z, alpha=0.5), -r) / 3)
    assert repr(epilogue) == "Epilogue(z, r0 -> (where((z > 0), elu(z, alpha=0.5), -r0) / 3))"
    chain = input()
    for _ in range(3000):
        chain = chain * chain + 1
    assert len(repr(chain)) <= 400


def test_an_epilogue_does_not_change() -> None:
    with pytest.raises(AttributeError, match="does not change"):
        Epilogue(torch.relu).text = "operands=0"


WEIGHT = torch.ones(3)
ERRORS: dict[str, tuple[Callable[..., object], str]] = {
    "branch": (lambda z: z if z > 0 else -z, "branches on data .* use torch.where"),
    "and": (lambda z: torch.where(z > 0 and z < 1, z, 0.0), "&, | and ~ between comparisons"),
    "python_max": (lambda z: max(z, 0), "torch.maximum"),
    "float": (lambda z: float(z), "has no number"),
    "math": (lambda z: math.exp(z), "use the torch function of the same name"),
    "item": (lambda z: z.item(), "has no number"),
    "index": (lambda z: z[0], "indexes, iterates"),
    "iterate": (lambda z: sum(z), "indexes, iterates"),
    "len": (lambda z: len(z), "indexes, iterates"),
    "captured": (lambda z: z * WEIGHT, r"captures a tensor of shape \(3,\) on cpu: pass it through operands="),
    "captured_parameter": (lambda z: z * nn.Parameter(torch.tensor(1.0)), "that needs a gradient: pass it through"),
    "prelu_module": (nn.PReLU(), "captures a tensor .* that needs a gradient"),
    "linear": (nn.Sequential(nn.Linear(2, 2)), "torch.nn.functional.linear is not in the epilogue language"),
    "softmax": (lambda z: F.softmax(z, -1), "torch.nn.functional.softmax is not in the epilogue language"),
    "one_argument_max": (lambda z: torch.max(z), "torch.max of one value .*use reduce=.amax.*torch.maximum"),
    "shape": (lambda z: z * z.shape[0], "reads Tensor.shape of a symbolic value.*no shape"),
    "in_place_method": (lambda z: z.relu_(), "relu_ works in place.*use torch.Tensor.relu"),
    "in_place_function": (lambda z: torch.sigmoid_(z), "torch.sigmoid_ works in place.*use torch.sigmoid"),
    "augmented": (lambda z: z.__iadd__(1), "Tensor.add_ works in place.*use torch.Tensor.add"),
    "out": (lambda z: torch.add(z, 1, out=WEIGHT), "torch.add: out= is not in the epilogue language"),
    "integer": (lambda z: z.to(torch.int32), "casts to torch.int32.*out_dtype="),
    "integer_method": (lambda z: z.long(), "Tensor.long is not in the epilogue language"),
    "list_method": ([].append, "returns None"),
    "string_method": (str.upper, "torch.upper is not in the epilogue language"),
    "shift": (lambda z: z << 1, "operator << is not in the epilogue language"),
    "round": (lambda z: round(z), "torch.round"),
    "divmod": (lambda z: divmod(z, 2), "divmod"),
    "numpy": (lambda z: np.tanh(z), "use the torch function of the same name"),
    "round_itself": (round, r"use torch.round\(z\)"),
    "divmod_of_a_number": (lambda z: divmod(2, z)[0], r"divmod\(\).*torch.remainder\(z, d\)"),
    "shift_of_a_number": (lambda z: 2 >> z, "operator >> is not in the epilogue language"),
    "call": (lambda z: z(), "is not callable.*use Python's operators, functions of torch"),  # type: ignore[operator]
    "vmap": (torch.func.vmap(torch.sigmoid), "reads Tensor.dim of a symbolic value"),
    "format": (lambda z: f"{z:.2f}", "has no number"),
    "device": (lambda z: z.to("cpu"), "moves a value to a device"),
    "operator": (lambda z: z @ z, "torch.Tensor.matmul is not in the epilogue language"),
    "logical_on_floats": (lambda z: z & 1, "the operator & takes comparisons"),
    "condition": (lambda z: torch.where(z, z, 0.0), "torch.where takes comparisons.*got z"),
    "bool_difference": (lambda z: (z > 0) - (z < 0), "does not subtract booleans"),
    "literal": (lambda z: F.gelu(z, approximate="erf"), "approximate has to be one of 'none', 'tanh', got 'erf'"),
    "inplace": (lambda z: F.silu(z, z), "silu: inplace has to be True or False, not an operand: z"),
    "rounding_mode": (lambda z: torch.div(z, 3, rounding_mode="up"), "rounding_mode has to be .* got 'up'"),
    "parameter": (lambda z: F.leaky_relu(z, z), "negative_slope of .* has to be a number, got the expression z"),
    "dropout": (lambda z: F.dropout(z), "dropout draws random numbers"),
    "string": (lambda z: z + "a", "unsupported operand .* 'Tensor' and 'str'"),
    "complex": (lambda z: z * 1j, "got 1j of type complex; an epilogue computes with real numbers"),
    "complex_tensor": (lambda z: z * torch.tensor(1j), r"captures a complex tensor \(torch.complex64\)"),
    "complex_cast": (lambda z: z.cfloat(), "Tensor.cfloat is not in the epilogue language: .*real ones"),
    "detached": (lambda z: z * z.detach(), r"Tensor.detach is not in .* pass it through operands=, detached"),
    "data": (lambda z: z * z.data, r"Tensor.data is not in .* pass it through operands=, detached"),
    "batch_norm": (nn.BatchNorm1d(2), "^torch.nn.BatchNorm1d is not in .* In evaluation it is .*two rows.*operands="),
    "batch_norm_inside": (nn.Sequential(nn.BatchNorm1d(2).eval(), nn.ReLU()), "^torch.nn.BatchNorm1d is not in"),
    "batch_norm_called": (lambda z: nn.BatchNorm2d(2)(z), "^torch.nn.BatchNorm2d is not in"),
    "instance_norm": (nn.InstanceNorm1d(2), "^torch.nn.InstanceNorm1d is not in the .* computes each one alone"),
    "layer_norm": (nn.LayerNorm(2), "layer_norm is not in the epilogue language: it combines elements of a row"),
    "rms_norm": (nn.RMSNorm(2), "rms_norm is not in the epilogue language: it combines elements of a row"),
    "cumsum_itself": (torch.cumsum, "^torch.cumsum is not in the epilogue language"),
    "shapes": (lambda z: z.view(-1), "Tensor.view is not in the epilogue language: it moves or picks elements"),
    "random": (lambda z: z + torch.rand_like(z), "rand_like is not in .* it draws random numbers"),
    "loss": (lambda z: F.mse_loss(z, z), "mse_loss is not in .* a loss reduces elements to one"),
    "cuda": (lambda z: z.cuda(), "Tensor.cuda is not in .* runs where x is"),
    "in_place_only": (lambda z: z.normal_(), "normal_ works in place, and an epilogue has values only$"),
    "huge": (lambda z: z * 10**400, "beyond the range"),
    "list": (lambda z: torch.stack([z, z]), "stack of a list of values"),
    "constant": (lambda z: 1.0, "returns 1.0, which does not depend on its arguments"),
    "nothing": (lambda z: None, "returns None"),
    "tensor": (lambda z: WEIGHT, r"returns a tensor of shape \(3,\)"),
    "module": (lambda z: nn.ReLU(z), r"returns an object of type ReLU: .*call it, as in ReLU\(\)\(z\)"),  # type: ignore[arg-type]
    "pair": (lambda z: (z, z), "returns 2 values"),
    "arity": (lambda z, r: z, "called with the pre-activation and 0 operands"),
    "no_callable": (3.0, "an epilogue is a callable or a cutfuse.Epilogue, got 3.0"),  # type: ignore[dict-item]
    "nested": (lambda z: Epilogue(torch.relu)(z), "an Epilogue inside another"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    fn, message = ERRORS[name]
    with pytest.raises(EpilogueError, match=f"(?s){message}"):
        Epilogue(fn, 0)  # type: ignore[arg-type]


def test_a_value_that_an_epilogue_keeps_is_of_no_use_afterwards() -> None:
    kept: list[torch.Tensor] = []
    Epilogue(lambda z: (kept.append(z), z * 2)[1])
    for use in (bool, len, lambda z: z.sum()):
        with pytest.raises(EpilogueError):
            use(kept[0])
    with pytest.raises(EpilogueError, match="kept a symbolic value, which is used after its trace"):
        bool(kept[0])


def test_what_copies_elements_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's own, of torch.tensor(tensor)
        with pytest.raises(EpilogueError, match="takes the elements of a symbolic value"):
            Epilogue(lambda z: torch.tensor(z) * z)


def test_errors_are_value_and_type_errors() -> None:
    assert issubclass(EpilogueError, ValueError)
    assert issubclass(EpilogueError, TypeError)
    assert hasattr(input(), "sigmoid")


def test_the_users_own_exceptions_pass() -> None:
    def broken(z: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    def wrong_call(z: torch.Tensor) -> torch.Tensor:
        return helper(z, 1, 2)  # type: ignore[call-arg]

    with pytest.raises(KeyError, match="mine"):
        Epilogue(broken)
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        Epilogue(wrong_call)


def test_wrong_number_of_tensors() -> None:
    with pytest.raises(EpilogueError, match="takes 1 operand, got 0"):
        Epilogue(lambda z, r: z * r)(WEIGHT)
    with pytest.raises(EpilogueError, match="5 tensor operands exceed the limit of 4"):
        Epilogue(lambda z, *r: z, 5)


def test_an_unknown_function_is_refused_with_the_command_that_lists_the_known_ones() -> None:
    with pytest.raises(
        EpilogueError, match=r"elementwise functions only; `python -m cutfuse\.epilogue` lists"
    ) as caught:
        Epilogue(lambda z: torch.histc(z))
    assert len(str(caught.value)) < 200


# What it is called in the message, and what the message says to do.
REDUCING: dict[str, tuple[Callable[[torch.Tensor], object], str, str]] = {
    "max": (lambda z: z.max(), "torch.Tensor.max", 'reduce="amax"'),
    "min": (lambda z: z.min(), "torch.Tensor.min", 'reduce="amin"'),
    "max_of_a_dimension": (lambda z: torch.max(z, 1), "torch.max", 'reduce="amax"'),
    "min_of_a_dimension": (lambda z: z.min(0)[0], "torch.Tensor.min", 'reduce="amin"'),
    "max_by_keyword": (lambda z: z.max(dim=1, keepdim=True), "torch.Tensor.max", 'reduce="amax"'),
    "max_with_its_dimension": (lambda z: z.max(1, True), "torch.Tensor.max", 'reduce="amax"'),
    "max_of_another": (lambda z: z.abs().max(), "torch.Tensor.max", 'reduce="amax"'),
    "sum": (lambda z: z.sum(), "torch.Tensor.sum", 'reduce="sum"'),
    "mean": (lambda z: z.mean(), "torch.Tensor.mean", 'reduce="mean"'),
    "amax": (lambda z: z.amax(), "torch.Tensor.amax", 'reduce="amax"'),
    "any": (lambda z: (z > 0).any(), "torch.Tensor.any", "after the call"),
    "std": (lambda z: z.std(), "torch.Tensor.std", "after the call"),
    "norm": (lambda z: z.norm(), "torch.Tensor.norm", "after the call"),
    "softmax": (lambda z: z.softmax(-1), "torch.Tensor.softmax", "after the call"),
    "cumsum": (lambda z: z.cumsum(1), "torch.Tensor.cumsum", "after the call"),
    "layer_norm": (lambda z: F.layer_norm(z, (4,)), "torch.nn.functional.layer_norm", "after the call"),
}


@pytest.mark.parametrize("takes_item", [False, True])
@pytest.mark.parametrize("name", REDUCING)
def test_what_combines_elements_is_refused_by_its_name(name: str, takes_item: bool) -> None:
    fn, known_as, advice = REDUCING[name]
    with pytest.raises(EpilogueError) as caught:
        Epilogue(lambda z: z * fn(z).item() if takes_item else z * fn(z))
    assert str(caught.value).startswith(known_as)
    assert advice in str(caught.value)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, z: torch.Tensor) -> torch.Tensor:
        return torch.round(z)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Reverse(StraightThrough):
    """Its forward computes nothing."""

    @staticmethod
    def forward(ctx: object, z: torch.Tensor) -> torch.Tensor:
        return z


class WithContextApart(StraightThrough):
    @staticmethod
    def forward(z: torch.Tensor) -> torch.Tensor:
        return z * 2

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass


class InEnableGrad(StraightThrough):
    @staticmethod
    def forward(ctx: object, z: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return z * 2


class InModule(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.function.apply(torch.tanh(z)) * 2


FUNCTIONS = (StraightThrough, Reverse, WithContextApart, InEnableGrad)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "call",
    [
        lambda fn, x: cutfuse.linear(x, torch.eye(4, requires_grad=True), epilogue=fn),
        lambda fn, x: cutfuse.pointwise(fn, x),
        lambda fn, x: cutfuse.reduce(x, 1, prologue=fn),
        lambda fn, x: Epilogue(fn),
    ],
    ids=["linear", "pointwise", "reduce", "ahead"],
)
def test_a_function_with_a_backward_of_its_own_is_refused(function: type, call: Callable) -> None:
    message = rf"autograd.Function \S*\.{function.__name__},.* after the call"
    if function is Reverse:  # from PyTorch 2.14 on its apply is written in C, which is seen in no frame
        message += "|view_as is not in the epilogue language"
    for fn in (function.apply, lambda z: function.apply(z + 1) * 2, InModule(function)):
        with pytest.raises(EpilogueError, match=message):
            call(fn, torch.randn(2, 4))


def test_a_function_is_refused_below_transforms() -> None:
    with pytest.raises(
        EpilogueError, match=r"WithContextApart|custom_function_call"
    ):  # the latter from PyTorch 2.14 on
        torch.func.grad(lambda x: cutfuse.pointwise(WithContextApart.apply, x).sum())(torch.randn(4))


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return cutfuse.pointwise(lambda z: torch.relu(z) * SCALE, x)


def test_a_function_may_call_one_with_an_epilogue() -> None:
    x = torch.randn(5)
    torch.testing.assert_close(Calling.apply(x), torch.relu(x) * SCALE)


@torch.no_grad()
def gate(z: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(z)


class Gate:
    @torch.no_grad()
    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(z)


def in_no_grad(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        s = abs(z) + 1
    return z / s


def in_inference_mode(z: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        s = torch.sigmoid(z)
    return z + s


def between_set_grad_enabled(z: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    s = torch.sigmoid(z)
    torch.set_grad_enabled(True)
    return z * s


def left_off(z: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(z)
    torch.set_grad_enabled(False)
    return s


# Where gradients are off: what PyTorch differentiates otherwise than by the formula.
WITHOUT_GRADIENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "helper": lambda z: z * gate(z),
    "all": gate,
    "method": lambda z: z * Gate()(z),
    "with": in_no_grad,
    "inference_mode": in_inference_mode,
    "set_grad_enabled": between_set_grad_enabled,
    "left_off": left_off,
}


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_what_is_computed_without_gradients_is_refused(name: str) -> None:
    fn, x = WITHOUT_GRADIENT[name], torch.randn(2, 4, requires_grad=True)
    try:
        if name != "left_off":  # whose mode PyTorch's own call leaves off
            with torch.inference_mode():  # no gradient is lost here
                torch.testing.assert_close(cutfuse.pointwise(fn, x), fn(x))
        for call in (cutfuse.pointwise, lambda fn, x: cutfuse.reduce(x, 1, prologue=fn), lambda fn, _: Epilogue(fn)):
            with pytest.raises(EpilogueError, match="gradients"):
                call(fn, x)
            assert torch.is_grad_enabled() or name == "left_off"
            torch.set_grad_enabled(True)
        with torch.inference_mode(), pytest.raises(EpilogueError, match="gradients"):
            Epilogue(fn)  # which may be trained with later
    finally:
        torch.set_grad_enabled(True)


def masked_in_no_grad(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mask = torch.sigmoid(z) > 0.5
    return torch.where(mask, z, 0.1 * z)


def gradients_on_again(z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        unused = torch.exp(z)  # noqa: F841
        with torch.enable_grad():
            return torch.sigmoid(z)


@pytest.mark.parametrize("fn", [masked_in_no_grad, gradients_on_again])
def test_a_mode_that_changes_no_gradient_is_no_matter(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    for function in (lambda x: cutfuse.pointwise(fn, x), Epilogue(fn)):
        torch.testing.assert_close(function(x), fn(x))
        (actual,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (function, fn))
        torch.testing.assert_close(actual, expected)


def test_a_trace_made_without_gradients_serves_training() -> None:
    def fn(z: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(z) * 1.5

    x = torch.randn(2, 4, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cutfuse.pointwise(fn, x)
    (actual,), (expected,) = (torch.autograd.grad(f(x).sum(), x) for f in (lambda x: cutfuse.pointwise(fn, x), fn))
    torch.testing.assert_close(actual, expected)


def with_saved_tensors_hooks(z: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 0, lambda tensor: tensor):
        return torch.sigmoid(z)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (with_saved_tensors_hooks, "saved_tensors_hooks"),
        (lambda z: (z * 2).register_hook(lambda gradient: -gradient), "register_hook"),
        (lambda z: torch.utils.checkpoint.checkpoint(torch.sigmoid, z, use_reentrant=True), "CheckpointFunction"),
    ],
)
def test_what_else_changes_a_gradient_is_refused(fn: Callable, message: str) -> None:
    with pytest.raises(EpilogueError, match=message):
        cutfuse.pointwise(fn, torch.randn(4, requires_grad=True))
