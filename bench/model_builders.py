"""The whole models of the suite, from configurations with random weights: nothing is downloaded.

Each function gives a module; with `small` one of the same structure with less depth and width.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn


def timm_model(name: str, **sizes: Any) -> nn.Module:
    """A model of timm by its name."""
    import timm

    return timm.create_model(name, pretrained=False, **sizes)


def vit(small: bool) -> nn.Module:
    """ViT-B/16: 197 tokens of 224x224 pixels."""
    sizes = {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 32, "img_size": 64} if small else {}
    return timm_model("vit_base_patch16_224", **sizes)


def convnext(small: bool) -> nn.Module:
    """ConvNeXt-B."""
    sizes = {"depths": (1, 1, 2, 1), "dims": (16, 32, 64, 64), "num_classes": 32} if small else {}
    return timm_model("convnext_base", **sizes)


def mixer(small: bool) -> nn.Module:
    """MLP-Mixer-B/16."""
    from timm.models.mlp_mixer import MlpMixer

    # By its class, as timm's function for the name fixes the depth.
    if small:
        return MlpMixer(num_classes=32, img_size=64, num_blocks=2, embed_dim=64)
    return MlpMixer(num_blocks=12, embed_dim=768)


def swin(small: bool) -> nn.Module:
    """Swin-B with windows of 7x7."""
    sizes: dict[str, Any] = {}
    if small:
        sizes = {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4), "num_classes": 32, "img_size": 56}
    return timm_model("swin_base_patch4_window7_224", **sizes)


def bert(small: bool) -> nn.Module:
    """BERT-large with its head for masked words."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    if small:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
        sizes["vocab_size"] = 128
    return BertForMaskedLM(BertConfig(**sizes))


def gpt2(small: bool) -> nn.Module:
    """GPT-2 medium with its head for the next word."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    if small:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    module = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))
    # transformers derives this from the class's name, not from GPT-2's, and then warns in each forward pass: that would
    # split the graph of every compiler.
    module.loss_type = "ForCausalLM"
    return module


def t5(small: bool) -> nn.Module:
    """The encoder of T5-large."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    if small:
        sizes = {"d_model": 64, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 2, "vocab_size": 128}
    return T5EncoderModel(T5Config(use_cache=False, **sizes))


def whisper(small: bool) -> nn.Module:
    """The encoder of Whisper-small."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    if small:
        sizes = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 256}
        sizes["max_source_positions"] = 64
    return WhisperEncoder(WhisperConfig(**sizes))


def llama(small: bool) -> nn.Module:
    """A Llama of 1.24 billion parameters, of the sizes of Llama 3.2 1B, with its head for the next word."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(use_cache=False, tie_word_embeddings=True, **sizes, **heads))


def mlp(widths: tuple[int, ...], last: nn.Module) -> nn.Sequential:
    """Linear layers of these widths with ReLU between, and `last` at the end."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


def bottom_mlp(small: bool) -> nn.Module:
    """DLRM's MLP of the dense features, which ends in ReLU as those before."""
    return mlp((13, 64, 32, 16) if small else (13, 512, 256, 128), nn.ReLU())


def top_mlp(small: bool) -> nn.Module:
    """DLRM's MLP of the features' interactions, which ends in a probability."""
    return mlp((59, 64, 64, 32, 1) if small else (479, 1024, 1024, 512, 256, 1), nn.Sigmoid())
