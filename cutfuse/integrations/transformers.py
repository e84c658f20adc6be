"""The loss of causal language models of Hugging Face's transformers, without their logits."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..head import linear_cross_entropy
from ..nn.fused_linear import check_is_linear

_Model = TypeVar("_Model", bound=nn.Module)

# Those whose logits are their lm_head's, perhaps scaled and with a softcap, as their configurations say.
MODEL_TYPES = (
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "llama", "ministral", "mistral", "olmo", "olmo2"),
    *("olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
)


def without_logits(model: _Model, **options: Any) -> _Model:
    """Changes a causal language model of transformers so that it computes its loss without logits; gives it back.

    This holds in training mode, for calls with labels: `logits` of their result is None. Other calls, as of `generate`
    and in evaluation, are as before. `del model.forward` takes the change back.

    Args:
        model: such as `LlamaForCausalLM`, of a type in `MODEL_TYPES`; of an adapter, the model that it is around.
        options: keyword arguments of `cutfuse.linear_cross_entropy`, such as `label_smoothing`, `z_loss` and
            `part_bytes`.

    Raises:
        ValueError: a model of another type, with a loss function or a forward of its own, or with a head that is no
            plain linear layer.
        TypeError: a head that is no `nn.Linear`.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    function = "cutfuse.integrations.transformers.without_logits"
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in MODEL_TYPES or not hasattr(model, "lm_head"):
        raise ValueError(
            f"{function}: {type(model).__name__} of type {kind!r} is not known to compute its "
            f"loss as {', '.join(MODEL_TYPES)} do with an lm_head; call cutfuse.linear_cross_entropy with its "
            "hidden states"
        )
    given: Any = model
    if given.loss_function is not ForCausalLMLoss or "forward" in model.__dict__:
        raise ValueError(
            f"{function}: {type(model).__name__} has another loss function or another forward "
            "than its class, which the change would not call; change the model before anything else does"
        )
    check_is_linear("integrations.transformers.without_logits", given.lm_head)
    usual: Callable[..., Any] = type(given).forward
    signature = inspect.signature(usual)
    scaling = {"softcap": "final_logit_softcapping", "temperature": "logits_scaling"}
    options = {**{name: getattr(config, key) for name, key in scaling.items() if hasattr(config, key)}, **options}
    states: list[Any] = []  # of the body, while a call needs them: a hook of that call would be none that Dynamo traces

    def keep(body: nn.Module, inputs: Any, output: Any) -> None:
        if states:
            states[0] = output.last_hidden_state

    @functools.wraps(usual)
    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        call = signature.bind(self, *args, **keywords).arguments
        others = call.get("kwargs", {})
        labels, shifted = call.get("labels"), others.get("shift_labels")
        keeps_all = isinstance(call.get("logits_to_keep", 0), int) and call.get("logits_to_keep", 0) == 0
        if not self.training or not keeps_all or labels is None:
            return usual(self, *args, **keywords)
        returns = others.get("return_dict")
        is_tuple = not (self.config.return_dict if returns is None else returns)
        own = {name: value for name, value in call.items() if name not in ("self", "labels", "kwargs")}
        none = torch.zeros(0, dtype=torch.int64, device=labels.device)
        states.append(None)
        try:
            output = usual(self, **{**own, **others, "return_dict": True, "logits_to_keep": none})
        finally:
            hidden = states.pop()
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=others.get("ignore_index", -100))[..., 1:]
        loss = _loss(hidden, self.lm_head, shifted.to(hidden.device), options, **others)
        output = type(output)(**{**output, "loss": loss, "logits": None})
        return output.to_tuple() if is_tuple else output

    given.base_model.register_forward_hook(keep)
    given.forward = types.MethodType(forward, model)
    return model


def _loss(
    hidden: Tensor,
    head: nn.Linear,
    target: Tensor,
    options: dict[str, Any],
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """As transformers' ForCausalLMLoss has it, of hidden states `[..., K]` and the classes `[...]` of their tokens."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(
        hidden, head.weight, target, head.bias, ignore_index=ignore_index, reduction=reduction, **options
    )
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)
