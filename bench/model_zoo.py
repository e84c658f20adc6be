"""Which models the suite runs, on which batches, and what each is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import model_builders as builders

FORWARD, TRAINING = "forward", "training"


def itself(result: Tensor) -> Tensor:
    """What a model gives that is a tensor."""
    return result


def field_of(name: str) -> Callable[[Any], Tensor]:
    """Takes one tensor from what a model of transformers gives."""
    return lambda result: getattr(result, name)


def nothing(inputs: Inputs) -> None:
    """For models that no call changes."""
    del inputs


@dataclass(frozen=True)
class Inputs:
    """What a model is called with. `tensor` takes the output or the loss from what the model gives.

    `rewind` undoes what a call did to the inputs, before the next call and outside of its time.
    """

    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    tensor: Callable[[Any], Tensor] = itself
    rewind: Callable[[Inputs], None] = nothing

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


def masked_words(length: int, module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Words, and in training the right ones, which make the model give its loss."""
    del dtype
    words = word_numbers(module, batch, length_for(module, length))
    if kind == TRAINING:
        return Inputs((words,), {"labels": words}, field_of("loss"))
    return Inputs((words,), tensor=field_of("logits"))


def prompt(length: int, module: nn.Module, batch: int, dtype: torch.dtype, kind: str) -> Inputs:
    """Words whose next one is asked for, as generation begins; in training every next word."""
    del dtype
    words = word_numbers(module, batch, length_for(module, length))
    if kind == TRAINING:
        return Inputs((words,), {"labels": words}, field_of("loss"))
    return Inputs((words,), {"logits_to_keep": 1}, field_of("logits"))


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
    Model("DLRM bottom MLP", "", builders.bottom_mlp, features, Batches(2048, 65536, 65536)),
    Model("DLRM top MLP", "", builders.top_mlp, features, Batches(2048, 65536, 65536)),
    Model("ViT-B/16", "timm", builders.vit, images, Batches(1, 256, 64)),
    Model("ConvNeXt-B", "timm", builders.convnext, images, Batches(1, 256, 64)),
    Model("MLP-Mixer-B", "timm", builders.mixer, images, Batches(1, 256, 64)),
    Model("Swin-B", "timm", builders.swin, images, Batches(1, 128, 64)),
    Model("BERT-large", "transformers", builders.bert, partial(masked_words, 512), Batches(1, 32, 16)),
    Model("GPT-2 medium", "transformers", builders.gpt2, partial(prompt, 1024), Batches(1, 16, 8)),
    Model("T5-large encoder", "transformers", builders.t5, partial(encoder_words, 512), Batches(1, 32, 16)),
    Model("Whisper-small encoder", "transformers", builders.whisper, sound, Batches(1, 32, 16)),
    Model("Llama 1B", "transformers", builders.llama, partial(prompt, 2048), Batches(1, 8, 2)),
    Model("Llama 1B, one token", "transformers", builders.llama, partial(one_token, 2048), Batches(1, 64, None)),
)


PACKAGES = tuple(dict.fromkeys(model.package for model in MODELS if model.package))


def remark_on(package: str) -> str:
    """Which models need a package that is not installed, and how to install it."""
    names = ", ".join(model.name for model in MODELS if model.package == package)
    return f'{package} is not installed, so these models are left out: {names} (pip install "cutfuse[models]").'
