"""Which models the suite runs, on which batches, and what each is called with.

They are made of configurations with random weights: nothing is downloaded. What builds a model gives, with `small`, one
of the same structure with less depth and width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def timm_model(name: str, reduced: dict[str, Any], small: bool) -> nn.Module:
    """A model of timm by its name. reduced: the sizes of the small one."""
    import timm

    return timm.create_model(name, pretrained=False, **(reduced if small else {}))


# Of 224x224 pixels; ViT makes 197 tokens of them, and Swin has windows of 7x7.
vit = partial(
    timm_model,
    "vit_base_patch16_224",
    {"depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 32, "img_size": 64},
)
convnext = partial(timm_model, "convnext_base", {"depths": (1, 1, 2, 1), "dims": (16, 32, 64, 64), "num_classes": 32})
swin = partial(
    timm_model,
    "swin_base_patch4_window7_224",
    {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4), "num_classes": 32, "img_size": 56},
)


def mixer(small: bool) -> nn.Module:
    """MLP-Mixer-B/16."""
    from timm.models.mlp_mixer import MlpMixer

    # By its class, as timm's function for the name fixes the depth.
    if small:
        return MlpMixer(num_classes=32, img_size=64, num_blocks=2, embed_dim=64)
    return MlpMixer(num_blocks=12, embed_dim=768)


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


def mlp(full: tuple[int, ...], reduced: tuple[int, ...], last: type[nn.Module], small: bool) -> nn.Sequential:
    """Linear layers of these widths with ReLU between, and `last` at the end."""
    layers: list[nn.Module] = []
    for width, following in pairwise(reduced if small else full):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last())


# DLRM's MLPs: of the dense features, which ends in ReLU as those before, and of the features' interactions.
bottom_mlp = partial(mlp, (13, 512, 256, 128), (13, 64, 32, 16), nn.ReLU)
top_mlp = partial(mlp, (479, 1024, 1024, 512, 256, 1), (59, 64, 64, 32, 1), nn.Sigmoid)


FORWARD, TRAINING = "forward", "training"


def field_of(name: str) -> Callable[[Any], Tensor]:
    """Takes one tensor from what a model of transformers gives."""
    return lambda result: getattr(result, name)


@dataclass(frozen=True)
class Inputs:
    """What a model is called with. `tensor` takes the output or the loss from what the model gives.

    `rewind` undoes what a call did to the inputs, before the next call and outside of its time.
    """

    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    tensor: Callable[[Any], Tensor] = lambda result: result
    rewind: Callable[[Inputs], None] = lambda inputs: None

    def call(self, model: Callable[..., Any]) -> Tensor:
        """The tensor of a call of `model`, compiled or not."""
        return self.tensor(model(*self.arguments, **self.keywords))


# Of a module, a batch, the type of its data and FORWARD or TRAINING; made on the default device.
MakeInputs = Callable[[nn.Module, int, torch.dtype, str], Inputs]


@dataclass(frozen=True)
class Batches:
    """A small batch, and those that fill an H200: of the forward pass, and of training where the model is trained."""

    small: int
    forward: int
    training: int | None

    def reduced(self) -> Batches:
        """For the small models: 1 and 4, and of the MLPs 32 and 128."""
        small = min(self.small, 32)
        return Batches(small, 4 * small, None if self.training is None else 4 * small)


@dataclass(frozen=True)
class Model:
    """`package` has to be installed for it, or is empty. `make` takes whether it is to be small."""

    name: str
    package: str
    make: Callable[[bool], nn.Module]
    inputs: MakeInputs
    batches: Batches

    def build(self, small: bool, precision_dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
        """The module with random weights, in eval mode."""
        torch.manual_seed(seed)
        with device:
            return self.make(small).to(precision_dtype).eval()

    def inputs_on(
        self, module: nn.Module, batch: int, dtype: torch.dtype, kind: str, device: torch.device, seed: int
    ) -> Inputs:
        """Random inputs on a device; the same ones for the same seed."""
        torch.manual_seed(seed)
        with device:
            return self.inputs(module, batch, dtype, kind)


def features(module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Rows for an MLP."""
    del kind
    first = next(layer for layer in module.modules() if isinstance(layer, nn.Linear))
    return Inputs((torch.randn(batch, first.in_features, dtype=dtype),))


def images(module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Images of the size that the model takes; 224x224 where it takes any."""
    del kind
    embedding = getattr(module, "patch_embed", None) or getattr(module, "stem", None)
    height, width = getattr(embedding, "img_size", (224, 224))
    return Inputs((torch.randn(batch, 3, height, width, dtype=dtype),))


def sound(module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Mel spectrograms, of which Whisper makes one position for each two frames."""
    del kind
    config = module.config
    frames = 2 * config.max_source_positions
    return Inputs((torch.randn(batch, config.num_mel_bins, frames, dtype=dtype),), tensor=field_of("last_hidden_state"))


def word_numbers(module: nn.Module, batch: int, length: int) -> Tensor:
    """Random words of the vocabulary."""
    return torch.randint(module.config.vocab_size, (batch, length))


def length_for(module: nn.Module, length: int) -> int:
    """The sequence's length, and a short one for a small model, whose vocabulary is small."""
    return length if module.config.vocab_size > 1000 else 16


def encoder_words(length: int, module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Words for an encoder without a head."""
    del dtype, kind
    words = word_numbers(module, batch, length_for(module, length))
    return Inputs((words,), tensor=field_of("last_hidden_state"))


def words_for_logits(
    length: int, module: nn.Module, batch: int, dtype: torch.dtype, kind: str, **keywords: int
) -> Inputs:
    """Words, and in training the right ones, which make the model give its loss. keywords: of the forward pass."""
    del dtype
    words = word_numbers(module, batch, length_for(module, length))
    if kind == TRAINING:
        return Inputs((words,), {"labels": words}, field_of("loss"))
    return Inputs((words,), keywords, field_of("logits"))


# Words whose next one is asked for, as generation begins; in training every next word.
prompt = partial(words_for_logits, logits_to_keep=1)


def one_token(length: int, module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """The last word of `length`, with keys and values of those before in a cache of fixed size, which it fills."""
    from transformers import StaticCache

    del kind
    config = module.config
    length = length_for(module, length)
    cache = StaticCache(config=config, max_cache_len=length)
    device = torch.get_default_device()
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    keywords = {"past_key_values": cache, "use_cache": True}
    inputs = Inputs((word_numbers(module, batch, 1),), keywords, field_of("logits"), partial(forget_last, length - 1))
    inputs.rewind(inputs)
    return inputs


def forget_last(length: int, inputs: Inputs) -> None:
    """The cache holds `length` words again."""
    for layer in inputs.keywords["past_key_values"].layers:
        layer.cumulative_length.fill_(length)


MODELS = (
    Model("DLRM bottom MLP", "", bottom_mlp, features, Batches(2048, 65536, 65536)),
    Model("DLRM top MLP", "", top_mlp, features, Batches(2048, 65536, 65536)),
    Model("ViT-B/16", "timm", vit, images, Batches(1, 256, 64)),
    Model("ConvNeXt-B", "timm", convnext, images, Batches(1, 256, 64)),
    Model("MLP-Mixer-B", "timm", mixer, images, Batches(1, 256, 64)),
    Model("Swin-B", "timm", swin, images, Batches(1, 128, 64)),
    Model("BERT-large", "transformers", bert, partial(words_for_logits, 512), Batches(1, 32, 16)),
    Model("GPT-2 medium", "transformers", gpt2, partial(prompt, 1024), Batches(1, 16, 8)),
    Model("T5-large encoder", "transformers", t5, partial(encoder_words, 512), Batches(1, 32, 16)),
    Model("Whisper-small encoder", "transformers", whisper, sound, Batches(1, 32, 16)),
    Model("Llama 1B", "transformers", llama, partial(prompt, 2048), Batches(1, 8, 2)),
    Model("Llama 1B, one token", "transformers", llama, partial(one_token, 2048), Batches(1, 64, None)),
)


PACKAGES = tuple(dict.fromkeys(model.package for model in MODELS if model.package))


def remark_on(package: str) -> str:
    """Which models need a package that is not installed, and how to install it."""
    names = ", ".join(model.name for model in MODELS if model.package == package)
    return f'{package} is not installed, so these models are left out: {names} (pip install "cutfuse[models]").'
