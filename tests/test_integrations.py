"""Heads of other libraries: Liger's loss module, and models of transformers, beside their own losses."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_checks import PYTORCH_WARNINGS
from torch import Tensor, nn

from cutfuse.integrations.liger import LigerFusedLinearCrossEntropyLoss
from cutfuse.integrations.transformers import without_logits

pytestmark = [*PYTORCH_WARNINGS, pytest.mark.usefixtures("one_thread")]


def test_the_loss_of_liger() -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((12, 16), (300, 16), (300,)))
    target = torch.randint(300, (12,))
    target[3] = 7
    options: dict[str, Any] = {"ignore_index": 7, "label_smoothing": 0.1, "reduction": "sum"}
    loss = LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-3, softcap=5.0, accum_dtype=torch.float32, **options)
    logits = 5 * torch.tanh(F.linear(x, weight, bias) / 5)
    usual = F.cross_entropy(logits, target, **options)
    usual = usual + 1e-3 * (logits.logsumexp(-1).square() * (target != 7)).sum()
    found = loss(weight, x, target, bias)
    torch.testing.assert_close(found, usual)
    leaves = [x, weight, bias]
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(usual, leaves))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ce_weight", torch.ones(300)),
        ("return_z_loss", True),
        ("accum_dtype", torch.bfloat16),
        ("use_token_scaling", True),
        ("return_token_accuracy", True),
        ("return_predicted_tokens", True),
    ],
)
def test_what_the_loss_of_liger_has_not(name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"LigerFusedLinearCrossEntropyLoss has no {name}; "):
        LigerFusedLinearCrossEntropyLoss(**{name: value})


has_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {"Llama": {}, "Qwen3": {"tie_word_embeddings": True}, "Gemma2": {"final_logit_softcapping": 2.0}}
MODELS["Granite"] = {"logits_scaling": 3.0}


def make(family: str) -> Any:
    import transformers

    torch.manual_seed(0)
    options = {**SIZES, **MODELS[family], "pad_token_id": 0, "attn_implementation": "eager", "attention_dropout": 0.0}
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def words_and_labels() -> tuple[Tensor, Tensor]:
    words = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[:, :3] = -100
    return words, labels


@has_transformers
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(9)}, {"return_dict": False}], ids=str)
def test_models_compute_their_loss_without_logits(family: str, options: dict[str, Any]) -> None:
    usual = make(family)
    own = without_logits(copy.deepcopy(usual), part_bytes=1 << 14)
    words, labels = words_and_labels()
    outputs = [model(words, labels=labels, **options) for model in (usual, own)]
    losses = [output[0] for output in outputs]
    torch.testing.assert_close(*losses)
    if isinstance(outputs[1], tuple):
        assert not any(isinstance(item, Tensor) and item.shape[-1:] == (300,) for item in outputs[1])
    else:
        assert outputs[1].logits is None
        assert [name for name in outputs[0] if name != "logits"] == list(outputs[1])
    for loss in losses:
        loss.backward()
    for (name, right), found in zip(usual.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-4, atol=1e-6, msg=name)


@has_transformers
def test_other_calls_are_as_before() -> None:
    usual = make("Llama")
    own = without_logits(copy.deepcopy(usual))
    words, labels = words_and_labels()
    assert inspect.signature(own.forward) == inspect.signature(usual.forward)
    torch.testing.assert_close(own(words).logits, usual(words).logits)
    kept = {"labels": labels[:, -4:], "logits_to_keep": 4}
    torch.testing.assert_close(own(words, **kept).logits, usual(words, **kept).logits)
    for model in (usual, own):
        model.eval()
    torch.testing.assert_close(own(words, labels=labels).logits, usual(words, labels=labels).logits)
    assert torch.equal(*(m.generate(words[:1], max_new_tokens=3, do_sample=False) for m in (own, usual)))
    copied = copy.deepcopy(own).train()
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert copied(words, labels=labels).loss.item() == pytest.approx(torch.tensor(300.0).log().item())
    del own.forward
    assert own.train()(words, labels=labels).logits is not None


@has_transformers
def test_a_changed_model_compiles_whole() -> None:
    torch._dynamo.reset()
    model = without_logits(make("Qwen3"))
    words, labels = words_and_labels()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for call in (compiled, model):
        loss = call(words, labels=labels, use_cache=False).loss
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*gradients)


@has_transformers
def test_models_that_cannot_be_changed() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=30, n_positions=16)
    with pytest.raises(ValueError, match="GPT2LMHeadModel of type 'gpt2' is not known to compute its loss as gemma"):
        without_logits(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="Linear of type 'Linear' is not known"):
        without_logits(nn.Linear(3, 4))
    changed = without_logits(make("Llama"))
    with pytest.raises(ValueError, match="LlamaForCausalLM has another loss function or another forward"):
        without_logits(changed)
    own = make("Llama")
    own.loss_function = F.cross_entropy
    with pytest.raises(ValueError, match="has another loss function"):
        without_logits(own)
    hooked = make("Llama")
    hooked.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ValueError, match="which the new layer would not run"):
        without_logits(hooked)
