"""Decomposes the linear operator for Inductor, where PyTorch's operations are predicted to be faster.

If cuBLAS's product is faster than a fused kernel, Inductor is given the product and the epilogue in PyTorch's
operations, because it compiles the epilogue and the operations around it into one kernel. If a fused kernel is faster,
the operator stays, and its epilogue is compiled into the kernel while Inductor compiles the rest. It also stays in
fp32, whose precision is chosen when the operator runs.

Inductor's code calls the function of an operator that stays by its name, without PyTorch's dispatcher, which converts
the arguments twice.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import composed, dynamo
from ..epilogue import Program
from ..invariance import may_be_batch_invariant
from . import schema
from .layouts import dtype_codes
from .planner import LinearArguments, plan_traced, precision_of, traced_matrices
from .specialize import find_epilogues, request

# Those that code of Inductor's calls by their functions.
UNDISPATCHED: tuple[Callable[..., Any], ...] = (
    schema.linear,
    schema.linear_with_pre_activation,
    schema.product,
    schema.joined,
    schema.pointwise,
    schema.reduce,
    schema.pointwise_backward,
)


@dynamo.assume_constant_result
def register() -> bool:
    """Has Inductor call the operators, decompose the linear one, and mend its views.

    Runs while Dynamo traces a call, before Inductor does.
    """
    # Imported here because that takes seconds, and other backends of torch.compile do not import it.
    from torch._inductor import decomposition, lowering

    if schema.linear in decomposition.decompositions:
        return True
    _lay_out_viewed_memory()
    for operator in UNDISPATCHED:
        # A fallback is how Inductor calls an operator that it does not know. It makes one by itself only for operators
        # without a decomposition, because it does not expect a decomposition to return NotImplemented.
        lowering.make_fallback(operator, lowering.constrain_to_fx_strides, warn=False)
        lowering.lowerings[operator] = _undispatched(lowering.lowerings[operator], operator)
    # The second table is a copy of the first, made once. A setting of Inductor decides which one it reads.
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        table[schema.linear] = linear
    return True


def registered_with_inductor(fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, which PyTorch calls for the shapes of an operator's results, for graphs that reach Inductor by no trace.

    Exported programs do, by AOTInductor, which is loaded by then. Without our fallbacks, Inductor refuses operators
    that have a decomposition where the environment variable CI is set.
    """

    @functools.wraps(fake)
    def registered(*args: Any, **kwargs: Any) -> Any:
        if "torch._inductor.lowering" in sys.modules:
            register()
        return fake(*args, **kwargs)

    return registered


def _lay_out_viewed_memory() -> None:
    """Has Inductor fix the layout of memory where it makes a view of other dimensions of it.

    It takes the strides of such a view from a layout that is still open, and may decide on another one later: whether
    rows are padded depends on what reads them first. The view then reads what nobody has written. Seen with PyTorch
    2.11, in graphs of ours and in its own: gradients of layers whose rows of results are no multiple of 128 bytes.
    """
    from torch._inductor import ir

    create = ir.View.create

    @functools.wraps(create)
    def create_settled(*args: Any, **kwargs: Any) -> Any:
        view = create(*args, **kwargs)
        _settle_layout(view)
        return view

    ir.View.create = staticmethod(create_settled)  # type: ignore[method-assign]


def _settle_layout(view: Any) -> None:
    """Fixes the layout of the memory behind a view, as the view was made of it."""
    from torch._inductor import ir

    memory, has_strides = view, False
    while isinstance(memory, (ir.TensorBox, ir.BaseView, ir.StorageBox)):
        has_strides = has_strides or isinstance(memory, ir.ReinterpretView)
        memory = memory.data
    if has_strides and isinstance(memory, ir.Buffer) and isinstance(memory.layout, ir.FlexibleLayout):
        memory.freeze_layout_with_exact_strides(memory.layout.stride)


def _undispatched(lower: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    """Inductor's lowering of an operator, with the name of the operator's function (`expose`) for what it calls.

    Code in C++ (`cpp_wrapper`) goes through the dispatcher.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        result = lower(*args, **kwargs)
        first = result[0] if isinstance(result, (list, tuple)) else result
        buffer = first.data.data
        # One of several results has the kernel as its input; before PyTorch 2.14 a single one has too.
        kernel = buffer if isinstance(buffer, ir.FallbackKernel) else buffer.inputs[0]
        assert isinstance(kernel, ir.FallbackKernel)
        if V.graph.aot_mode and torch.__version__ < "2.12":  # a TorchVersion, which compares by numbers
            kernel.export_extern_kernel_node = functools.partial(  # type: ignore[method-assign]
                _export_with_types, kernel.export_extern_kernel_node
            )
        if not V.graph.cpp_wrapper:
            kernel.set_python_kernel_name(f"torch.ops.cutfuse.on_{first.get_device().type}.{name_of(operator)}")
        return result

    return lowered


def _export_with_types(export: Callable[[], Any]) -> Any:
    """What `export` gives, which writes the call of an operator for a package of AOTInductor, with the types' numbers
    as the package reads them.

    It writes the numbers of torch.export, and before PyTorch 2.12 the package takes them for those of C++, in which
    fp32 is fp64 and fp16 is fp32 (pytorch/pytorch#169157).
    """
    from torch._inductor.virtualized import V

    exported = export()
    calls = getattr(V.graph, "extern_kernel_nodes", None) or V.extern_kernel_nodes  # of PyTorch 2.8, and of later ones
    for given in calls[-1].node.inputs:
        if given.arg.type == "as_scalar_type":
            given.arg = type(given.arg).create(as_scalar_type=_NUMBERS_IN_CPP[given.arg.value.name])
    return exported


_NUMBERS_IN_CPP = {"HALF": 5, "FLOAT": 6, "DOUBLE": 7, "BFLOAT16": 15}  # c10::ScalarType


def name_of(operator: Any) -> str:
    """An operator's name without its namespace."""
    name: str = operator._schema.name
    return name.removeprefix("cutfuse::")


def expose(functions: Mapping[str, Callable[..., Any]], device_type: str) -> None:
    """Makes the functions that compute the operators on a device known to Inductor's code, which imports torch only."""
    own = {name_of(operator): functions[name_of(operator)] for operator in UNDISPATCHED}
    setattr(torch.ops.cutfuse, f"on_{device_type}", types.SimpleNamespace(**own))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    operands: Sequence[Tensor],
    program: str,
    reduction: str,
    out_dtype: torch.dtype,
    snapshot: Tensor | None = None,
    *planes: Any,
) -> Any:
    """The operator in PyTorch's operations, or NotImplemented if it has to stay."""
    parsed = Program.parse(program)
    if snapshot is not None or _stays(LinearArguments(x, weight, bias, operands, parsed, reduction, out_dtype)):
        return NotImplemented
    return composed.linear(x, weight, bias, operands, parsed, reduction, out_dtype).contiguous()


def _stays(arguments: LinearArguments) -> bool:
    """Whether the operator is to stay. If it does, what it runs in this process's modes is compiled from now on."""
    dtypes = {tensor.dtype for tensor in (arguments.x, *arguments.operands)}
    plan = None if dtypes - dtype_codes().keys() else plan_traced(arguments, precision_of(arguments))
    if plan is None:
        return True
    if plan.is_fused:
        operands = traced_matrices(arguments)
        request(find_epilogues(plan, arguments.x.device.index or 0, arguments.program, operands))
    return plan.is_fused or arguments.x.element_size() != 2 or may_be_batch_invariant()
