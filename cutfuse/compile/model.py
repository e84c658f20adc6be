"""The backend of torch.compile, the pass for Inductor's own, and what explains both.

Imports PyTorch's compilers where they are needed: they take seconds, and `import cutfuse` does not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx
from torch._inductor import config

from ..layer.specialize import background
from ..native import check_devices, predicting

if TYPE_CHECKING:
    from .report import ModelExplanation, ProductReport

_UNLIMITED = 1 << 30


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="cutfuse")`: fuses what follows linear layers, and gives the rest to Inductor.

    mode, options: Inductor's, as in `torch.compile(model, mode=..., options=...)`.
    """
    from ..layer import inductor
    from .fusion import fuse

    inductor.register()
    compile_rest: Any = torch._TorchCompileInductorWrapper(mode, options, None)  # what torch.compile calls
    with config.patch(compile_rest.config):  # whether kernels are launched by a graph changes what is faster
        fuse(module)
    compiled: Callable[..., Any] = compile_rest(module, inputs)
    background.wait()  # for what has been compiled beside it: a graph that is captured has what is ready
    return compiled


def _reset() -> None:
    """What torch._dynamo.reset() asks of a backend: Inductor forgets the CUDA graphs that it has recorded."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


backend.reset = _reset  # type: ignore[attr-defined]  # PyTorch looks there


def install() -> None:
    """Makes Inductor itself fuse what follows linear layers: every `torch.compile(model)` from now on, in this process.

    Passes that other libraries have installed stay, and run before. Installing twice is installing once.
    """
    from .fusion import installed_pass

    config.pre_grad_custom_pass = installed_pass(config.pre_grad_custom_pass)


def uninstall() -> None:
    """Undoes `install`. Models that are compiled stay as they are."""
    from .fusion import without_pass

    config.pre_grad_custom_pass = without_pass(config.pre_grad_custom_pass)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """A context in which models that torch.compile compiles are fused. Compilation is at a model's first call."""
    from .fusion import installed_pass

    with config.patch(pre_grad_custom_pass=installed_pass(config.pre_grad_custom_pass)):
        yield


def explain_model(model: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> ModelExplanation:
    """What `torch.compile(model, backend="cutfuse")` fuses in a call of model, product by product; print the result.

    Runs the model once, by PyTorch's own operations and the fused layers, without Inductor. As in any call, a model in
    training mode updates its statistics, and random numbers advance.

    device: "H200" or "H100", to predict for such a card, which this machine need not have. The model and its inputs are
    on the CPU then, or on the meta device, where the run takes neither memory nor time. Without a GPU PyTorch turns
    `torch.autocast("cuda")` off, with a warning: `torch.autocast("cpu", dtype=torch.bfloat16)` stands for it, with the
    model and its inputs on the CPU. It casts nothing on the meta device.

    Raises what the call raises; TypeError where a product's input and weight have several types, which no kernel checks
    on the meta device; ValueError for another device, and where tensors are on a CUDA device that is no such card.
    """
    from torch import _dynamo

    from .fusion import fuse, graphs_of
    from .nodes import is_call, needs_gradient
    from .report import ModelExplanation
    from .survey import unlisted_calls, unlisted_modules, why_refused

    model = _uncompiled(model)
    products: list[ProductReport] = []
    unlisted = unlisted_modules(getattr(model, "__self__", model))
    devices: set[torch.device] = set()
    graphs, trains = 0, False

    def collect(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs, trains
        graphs += 1
        trains |= any(is_call(node) and needs_gradient(node) for node in module.graph.nodes)
        devices.update(given.device for given in inputs if isinstance(given, torch.Tensor))
        own = [graph_module.graph for graph_module in graphs_of(module)]
        refused = why_refused(own)
        if refused:
            return functools.partial(_refuse, f"cutfuse.explain_model: {refused}")
        unlisted.update(unlisted_calls(own))
        products.extend(fuse(module, predicts=True))
        return module.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Each call is traced as a first one: no earlier call counts against a limit, or makes a size vary.
    limits: dict[str, Any] = {"recompile_limit": _UNLIMITED, "accumulated_recompile_limit": _UNLIMITED}
    as_first = _dynamo.config.patch(suppress_errors=False, automatic_dynamic_shapes=False, **limits)
    with predicting("explain_model", device) as card, as_first:
        torch.compile(_with_own_code(call), backend=collect, **_own_limit())(*args, **kwargs)
    check_devices("explain_model", card, devices)
    precision = torch.get_float32_matmul_precision()
    return ModelExplanation(tuple(products), graphs, card, trains, precision, unlisted)


def _refuse(why: str, *args: Any) -> NoReturn:
    """Runs in the place of a graph, so that Dynamo does not wrap the error in one of its own."""
    raise TypeError(why)


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile or a module's compile() was given: compiled, it would call a backend of its own."""
    if isinstance(model, types.MethodType):
        return types.MethodType(_uncompiled(model.__func__), model.__self__)
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    found: Any = model
    if isinstance(model, torch.nn.Module):
        return found if model._compiled_call_impl is None else found._call_impl  # type: ignore[no-any-return]
    return getattr(found, "_torchdynamo_orig_callable", found)  # type: ignore[no-any-return]


def _own_limit() -> dict[str, Any]:
    """What keeps an explanation from counting against the limits of the model's own code, from PyTorch 2.13 on."""
    name = "isolate_recompiles"
    return {name: True} if name in inspect.signature(torch.compile).parameters else {}


def _with_own_code(function: Any) -> Callable[..., Any]:
    """A copy of a function that Dynamo has not seen: it keeps by code what it compiled, and which code failed."""
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
