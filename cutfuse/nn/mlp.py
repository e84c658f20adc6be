"""An MLP as a module, and the MLPs that models have, computed in the same way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..composed import PyTorchCall
from ..epilogue import Epilogue
from ..epilogue.errors import EpilogueError
from ..mlp import Gate, MLPCall, hidden_function, mlp, normalise_mlp
from .fused_linear import check_is_linear, has_hooks, is_plain, registered_parameters, why_not_plain

_Result = TypeVar("_Result")  # of a call: a tensor, or for `explain` the call itself
_ROWS = 3  # on which a fused MLP is compared with the one that it was


class MLP(nn.Module):
    """`fc2(activation(fc1(x)))`, with or without a gate and a residual, as one node of the autograd graph: see
    `cutfuse.mlp`.

    Its `state_dict` has `fc1.weight` `[hidden_features, in_features]`, `fc1.bias`, `fc2.weight` and `fc2.bias`, as
    timm's `Mlp`. With a gate `fc1` has twice as many rows, those of the gate before those that it multiplies, as timm's
    `GluMlp(gate_last=False)`. Both are `nn.Linear`s: one that is given hooks, is replaced by an adapter or is quantized
    is called as PyTorch calls it, and the MLP runs unfused.

    Args:
        in_features, hidden_features: the sizes of x and of the hidden layer.
        out_features: of the result; `in_features` by default.
        activation: a function of the pre-activation; of a gate's with a gate. None is the identity. Not used where the
            gate is a function.
        gate: True multiplies `activation` of `fc1`'s first half by the second half; a function of both halves gives the
            hidden layer itself.
        bias, device, dtype: as of `nn.Linear`, for both layers.
        residual: add x to the result, where `forward` is given no other residual.
        recompute: keep nothing of the hidden width for the backward pass, which computes it again.

    `from_modules` makes one of layers that there are.
    """

    fc1: nn.Module
    up: nn.Module | None  # of `from_modules` alone
    fc2: nn.Module

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: Callable[..., Tensor] | Epilogue | None = F.gelu,
        gate: Gate = False,
        bias: bool = True,
        residual: bool = False,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_features = in_features if out_features is None else out_features
        if residual and out_features != in_features:
            raise ValueError(
                f"cutfuse.nn.MLP: x of {in_features} features cannot be added to a result of {out_features}; give "
                "forward the residual, and residual=False"
            )
        rows = hidden_features if gate is False else 2 * hidden_features
        fc1 = nn.Linear(in_features, rows, bias, device, dtype)
        self._take(fc1, None, nn.Linear(hidden_features, out_features, bias, device, dtype))
        self._set(activation, gate, residual, recompute)

    @classmethod
    def from_modules(
        cls,
        fc1: nn.Linear,
        fc2: nn.Linear,
        activation: Callable[..., Tensor] | Epilogue | None = F.gelu,
        gate: Gate = False,
        up: nn.Linear | None = None,
        residual: bool = False,
        recompute: bool = False,
    ) -> MLP:
        """An MLP of these layers, in the mode of `fc1`: training or evaluation.

        up: with a gate the layer that `fc1`, then the gate's, is multiplied by; None where `fc1` has the rows of both.
        The other arguments are those of the constructor.

        Raises TypeError where a layer is no `nn.Linear`, and ValueError where one has a forward of its own, as a layer
        of 8 bits has, or hooks, or a parametrization.
        """
        for name, layer in (("fc1", fc1), ("fc2", fc2), *([] if up is None else [("up", up)])):
            check_is_linear("nn.MLP.from_modules", layer, name)
        if up is not None and gate is False:
            raise ValueError("cutfuse.nn.MLP.from_modules: up is the layer beside a gate; pass gate=True too")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(fc1, up, fc2)
        module._set(activation, gate, residual, recompute)
        return module.train(fc1.training)

    def _take(self, fc1: nn.Module, up: nn.Module | None, fc2: nn.Module) -> None:
        self.fc1, self.fc2 = fc1, fc2
        self.up = up

    def _set(
        self, activation: Callable[..., Tensor] | Epilogue | None, gate: Gate, residual: bool, recompute: bool
    ) -> None:
        self.activation = None if callable(gate) else activation
        self.gate, self.residual, self.recompute = gate, residual, recompute

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: `[..., in_features]`; residual: `[..., out_features]`, added to the result in place of x."""
        if residual is None and self.residual:
            residual = x
        parts = self._parts
        if parts.are_readable:
            return parts.call(mlp, x, residual, self.recompute)
        y = parts.run_unfused(x)
        return y if residual is None else y + residual

    def normalise_call(self, x: Tensor, residual: Tensor | None = None) -> MLPCall | PyTorchCall:
        """What `cutfuse.explain` describes."""
        reason = next(filter(None, map(why_not_plain, self._parts.layers)), "")
        if reason:
            return PyTorchCall("linear", [x], f"{reason}: the layers run unfused")
        if residual is None and self.residual:
            residual = x
        return self._parts.call(normalise_mlp, x, residual, self.recompute)

    @property
    def _parts(self) -> _Parts:
        if torch.compiler.is_dynamo_compiling():
            return _Parts(self.fc1, self.up, self.fc2, self.activation, self.gate)
        modules: Any = self._modules  # where nn.Module looks last
        return _Parts(modules["fc1"], self.up, modules["fc2"], self.activation, self.gate)

    def extra_repr(self) -> str:
        activation = getattr(self.activation, "__name__", self.activation)
        gate = getattr(self.gate, "__name__", self.gate)
        return f"activation={activation!s}, gate={gate!s}, residual={self.residual}, recompute={self.recompute}"


@dataclass
class _Parts:
    """The layers of an MLP, and what is between them. up: None without a gate, and where fc1 has the rows of both."""

    fc1: nn.Module
    up: nn.Module | None
    fc2: nn.Module
    activation: Any
    gate: Gate

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for layer in (self.fc1, self.up, self.fc2) if layer is not None]

    @property
    def are_readable(self) -> bool:
        return _is_readable(self.fc1) and _is_readable(self.fc2) and (self.up is None or _is_readable(self.up))

    def call(
        self, function: Callable[..., _Result], x: Tensor, residual: Tensor | None = None, recompute: bool = False
    ) -> _Result:
        """What `mlp`, or what takes its arguments, gives."""
        w1: Any
        b1: Any
        (w1, b1), (w2, b2) = _weight_and_bias(self.fc1), _weight_and_bias(self.fc2)
        if self.up is not None:
            up, up_bias = _weight_and_bias(self.up)
            w1, b1 = (w1, up), None if b1 is None else (b1, up_bias)
        options = {"activation": self.activation, "gate": self.gate, "residual": residual, "recompute": recompute}
        return function(x, w1, b1, w2, b2, **options)

    def run_unfused(self, x: Tensor) -> Tensor:
        z = self.fc1(x)
        if self.gate is False:
            pre_activations = [z]
        else:
            pre_activations = [z, self.up(x)] if self.up is not None else list(z.chunk(2, -1))
        hidden = hidden_function(self.activation, self.gate)
        y: Tensor = self.fc2(pre_activations[0] if hidden is None else hidden(*pre_activations))
        return y


def _is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in transformers, whose weight is `[in_features, out_features]`."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _is_readable(layer: nn.Module) -> bool:
    """Whether weight and bias are all of a layer."""
    return is_plain(layer) or (_is_conv1d(layer) and not has_hooks(layer))


def _weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Of a readable layer: `[out_features, in_features]` and `[out_features]`."""
    if type(layer) is nn.Linear and not torch.compiler.is_dynamo_compiling():
        found = registered_parameters(layer)
        if found is not None:
            return found
    return layer.weight.t() if _is_conv1d(layer) else layer.weight, layer.bias


# The names of what MLPs of timm and transformers consist of: the first layer or the gate's, the one beside it, the
# last one and the activation.
_NAMES = (
    ("fc1", "", "fc2", "act"),  # timm's Mlp and GluMlp
    ("fc1_g", "fc1_x", "fc2", "act"),  # timm's SwiGLU
    ("fc1", "", "fc2", "activation_fn"),  # CLIP, SigLIP, Phi
    ("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Mistral, Qwen, Gemma
    ("gate_up_proj", "", "down_proj", "activation_fn"),  # Phi-3
    ("c_fc", "", "c_proj", "act"),  # GPT-2
)


def fuse_mlps(model: nn.Module) -> list[str]:
    """Has the MLPs of a model computed by `cutfuse.mlp`, in place, and gives their names.

    It knows those of timm (`Mlp`, `GluMlp`, `SwiGLU`) and of transformers (GPT-2, CLIP, Llama, Phi-3 and what is built
    like them) by the names of their layers, and takes none that gives another result on a few random rows, nor one
    whose activation is not in the epilogue language. Modules, parameters and `state_dict` stay as they are: the MLPs
    are given a `forward`, which `del module.forward` takes back. Where a dropout would drop, or a layer has hooks or
    was replaced since, that calls the module's own.

    Weights have to have values: on the meta device no MLP can be compared.
    """
    found = []
    for name, module in model.named_modules():
        if "forward" in module.__dict__ or isinstance(module, MLP):
            continue
        chosen = _choose(module)
        if chosen is not None:
            module.forward = functools.partial(_forward, module, *chosen)
            found.append(name)
    return found


# What `mlp` takes for an activation and a gate, of the activation of an MLP's.
_GATES: dict[str, Callable[[Any], tuple[Any, Gate]]] = {
    "none": lambda activation: (activation, False),
    "first half": lambda activation: (activation, True),
    "second half": lambda activation: (None, lambda value, gate: value * activation(gate)),
}


def _choose(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """The names of a module's parts and of its gate; None where it is no such MLP."""
    for names in _NAMES:
        parts = [getattr(module, name, None) for name in names if name]
        if not all(callable(part) for part in parts):
            continue
        for gate in ("first half",) if names[1] else _GATES:
            if _computes(module, names, gate):
                return names, gate
    return None


def _parts(module: nn.Module, names: tuple[str, ...], gate: str) -> _Parts:
    parts: list[Any] = [getattr(module, name) if name else None for name in names]
    fc1, up, fc2, activation = parts
    return _Parts(fc1, up, fc2, *_GATES[gate](activation))


def _computes(module: nn.Module, names: tuple[str, ...], gate: str) -> bool:
    """Whether `cutfuse.mlp` of the parts gives what the module gives, in evaluation, on a few random rows."""
    parts = _parts(module, names, gate)
    if not parts.are_readable or any(layer.weight.is_meta for layer in parts.layers):
        return False
    weight, _ = _weight_and_bias(parts.fc1)
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(1, _ROWS, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype)
    modes = {part: part.training for part in module.modules()}
    try:
        with torch.no_grad():
            y, right = parts.call(mlp, x), module.eval()(x)
    except (EpilogueError, ValueError, TypeError, RuntimeError):
        return False
    finally:
        for part, mode in modes.items():
            part.training = mode
    tolerance = max(8.0 * torch.finfo(weight.dtype).eps, 1e-3)  # another structure differs by the values themselves
    return (
        isinstance(right, Tensor)
        and y.shape == right.shape
        and torch.allclose(y, right, rtol=tolerance, atol=tolerance * float(right.abs().max()))
    )


def _forward(module: nn.Module, names: tuple[str, ...], gate: str, x: Tensor, *others: Any, **options: Any) -> Any:
    """In place of a module's own forward, which other arguments are for."""
    parts = _parts(module, names, gate)
    if others or options or _drops(module) or not parts.are_readable:
        return type(module).forward(module, x, *others, **options)
    return parts.call(mlp, x)


def _drops(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0.0 for part in module.children())
