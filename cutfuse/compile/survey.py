"""What an explanation says of a model beside the products of its graphs: those that PyTorch would refuse, and those
inside of other calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx, nn

from ..arguments import is_wrapper
from .nodes import any_example, example_of, is_call, module_of, name_of
from .products import find_product

_CASTS_NOTHING = "; torch.autocast casts nothing on the meta device, so move both to the CPU if it is to cast them"

# Functions with weights among their arguments, which multiply by them inside.
_HOLD_PRODUCTS = {
    *("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "bilinear"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    *("convolution", "_convolution"),
}
# Functions that multiply what they are given: by a weight or, as attention does, by other values.
_PRODUCTS = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm"),
    *("einsum", "tensordot", "inner", "multi_dot", "chain_matmul"),
    *("_scaled_mm", "scaled_mm", "_grouped_mm", "grouped_mm", "_scaled_grouped_mm", "scaled_grouped_mm"),
}


def why_refused(graphs: Iterable[fx.Graph]) -> str:
    """Which product PyTorch would refuse on a card because its matrices have several types; empty where none has.

    No kernel runs on the meta device, so that nobody refuses it there. Elsewhere autocast may make one type of them.
    """
    nodes = [node for graph in graphs for node in graph.nodes]
    is_casting = any(is_call(node) and name_of(node) == "_enter_autocast" for node in nodes)
    for product in map(find_product, nodes):
        if product is None:
            continue
        x, weight = example_of(product.x), example_of(product.weight)
        is_meta = x.device.type == "meta"
        if x.dtype == weight.dtype or is_wrapper(type(x)) or is_wrapper(type(weight)):
            continue
        if is_meta or not (is_casting or torch.is_autocast_enabled(x.device.type)):
            return (
                f"{module_of(product.node)} multiplies an input of {x.dtype} by a weight of {weight.dtype}, which "
                f"PyTorch refuses: give the input the model's type (x.to({weight.dtype})), or the model the input's"
                f"{_CASTS_NOTHING if is_meta else ''}"
            )
    return ""


def unlisted_calls(graphs: Iterable[fx.Graph]) -> Counter[str]:
    """How often graphs call each function that multiplies by a weight, and is no product that could be fused."""
    nodes = [node for graph in graphs for node in graph.nodes if is_call(node)]
    return Counter(name_of(node) for node in nodes if _multiplies_by_weight(node) and find_product(node) is None)


def _multiplies_by_weight(node: fx.Node) -> bool:
    name = name_of(node)
    return name in _HOLD_PRODUCTS or (name in _PRODUCTS and any(map(_is_weight, node.all_input_nodes)))


def _is_weight(node: fx.Node) -> bool:
    """Whether a value is a parameter, or is computed of one alone."""
    while is_call(node) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return isinstance(any_example(node), nn.Parameter)


def unlisted_modules(model: object) -> Counter[str]:
    """The recurrent layers of a model, of which Dynamo makes no graph unless it is told to (`allow_rnn`)."""
    if torch._dynamo.config.allow_rnn or not isinstance(model, nn.Module):
        return Counter()
    kinds = (nn.LSTM, nn.GRU, nn.RNN)
    return Counter(f"nn.{kind.__name__}" for layer in model.modules() for kind in kinds if isinstance(layer, kind))
