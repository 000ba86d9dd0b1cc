"""The named sizes of the zoo, and how each is built with an example batch."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.zoo.bert import BERT, BERTConfig
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.mlp import MLP, MLPConfig
from planner.zoo.resnet import ResNet, ResNetConfig
from planner.zoo.t5 import T5, T5Config
from planner.zoo.text import IGNORED, MASKED_FRACTION
from planner.zoo.unet import UNet, UNetConfig
from planner.zoo.vit import ViT, ViTConfig

Config = GPTConfig | LlamaConfig | ResNetConfig | MLPConfig | BERTConfig | T5Config | ViTConfig | UNetConfig

EXAMPLE_BATCH = 2
MASK_TOKEN = 103  # of BERT's uncased vocabulary; a smaller one masks with its last token


def _gpt(layers: int, width: int, heads: int, context: int) -> GPTConfig:
    return GPTConfig(layers=layers, width=width, heads=heads, context=context)


def _llama2(layers: int, width: int, heads: int, key_value_heads: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=key_value_heads,
        hidden=hidden,
        vocabulary=32_000,
        context=4096,
    )


def _llama3(layers: int, width: int, heads: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=8,
        hidden=hidden,
        vocabulary=128_256,
        context=8192,
        rope_base=500_000.0,
    )


def _t5(layers: int, width: int, heads: int, head: int, hidden: int) -> T5Config:
    return T5Config(layers=layers, width=width, heads=heads, head=head, hidden=hidden)


def _mixtral(layers: int, width: int, heads: int, hidden: int, context: int) -> LlamaConfig:
    return LlamaConfig(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=8,
        hidden=hidden,
        vocabulary=32_000,
        context=context,
        rope_base=1_000_000.0,
        experts=8,
    )


CONFIGS: Mapping[str, Config] = {
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    # Table 2.1 gives 24 heads of 128 for 1.3B and a width of 5140 for 13B, which do not fit together;
    # the usual corrections are taken.
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    # The model card of Llama 3.2; its head is tied to the embedding, here it is not: 1.5 instead of 1.2 billion.
    "llama3-1b": _llama3(16, 2048, 32, 8192),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    # Jiang et al. 2024, table 1; 8x22B: the config.json that Mistral AI released with it (version 0.1).
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32_768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 65_536),
    # Devlin et al. 2018, section 3.
    "bert-base": BERTConfig(layers=12, width=768, heads=12),
    "bert-large": BERTConfig(layers=24, width=1024, heads=16),
    # Raffel et al. 2019, section 3.7 (there 3B and 11B; the sizes of heads are in the released configs).
    "t5-small": _t5(6, 512, 8, 64, 2048),
    "t5-base": _t5(12, 768, 12, 64, 3072),
    "t5-large": _t5(24, 1024, 16, 64, 4096),
    "t5-3b": _t5(24, 1024, 32, 128, 16384),
    "t5-11b": _t5(24, 1024, 128, 128, 65536),
    # Dosovitskiy et al. 2020, table 1.
    "vit-b16": ViTConfig(layers=12, width=768, heads=12, patch=16),
    "vit-l16": ViTConfig(layers=24, width=1024, heads=16, patch=16),
    "vit-h14": ViTConfig(layers=32, width=1280, heads=16, patch=14),
    # Ronneberger et al. 2015, figure 1, and one with fewer and more channels.
    "unet-small": UNetConfig(channels=32),
    "unet": UNetConfig(),
    "unet-large": UNetConfig(channels=128),
    "resnet50": ResNetConfig(blocks=(3, 4, 6, 3)),
    "resnet101": ResNetConfig(blocks=(3, 4, 23, 3)),
    "resnet152": ResNetConfig(blocks=(3, 8, 36, 3)),
    "mlp": MLPConfig(features=1024, width=4096, layers=8, classes=1000),
    # For tests and CPUs. gpt-tiny reads bytes: it is what `autoplan run` trains by default.
    "gpt-tiny": GPTConfig(layers=4, width=128, heads=4, context=128, vocabulary=256, tied_embeddings=False),
    "llama-tiny": LlamaConfig(layers=4, width=128, heads=4, key_value_heads=2, hidden=352, vocabulary=256, context=128),
    "moe-tiny": LlamaConfig(
        layers=4, width=128, heads=4, key_value_heads=2, hidden=176, vocabulary=256, context=128, experts=4
    ),
    "bert-tiny": BERTConfig(layers=4, width=128, heads=4, context=128, vocabulary=257),
    "t5-tiny": T5Config(layers=2, width=128, heads=4, head=32, hidden=512, context=64, vocabulary=257),
    "vit-tiny": ViTConfig(layers=4, width=64, heads=4, patch=8, image=32, classes=10),
    "unet-tiny": UNetConfig(levels=4, channels=8, image=32),
    "resnet-tiny": ResNetConfig(blocks=(1, 1, 1, 1), channels=8, classes=10, image=64),
    "mlp-tiny": MLPConfig(features=16, width=32, layers=4, classes=10),
}
NAMES: tuple[str, ...] = tuple(CONFIGS)


def describe(name: str) -> str:
    """What a model is, in a few words."""
    match CONFIGS[name]:
        case GPTConfig() as c:
            return f"GPT, {c.layers} layers, width {c.width}, context {c.context}"
        case LlamaConfig() as c:
            kind = f"Mixtral, {c.experts} experts, {c.experts_per_token} for each token" if c.experts else "Llama"
            return (
                f"{kind}, {c.layers} layers, width {c.width}, {c.key_value_heads} key-value heads, context {c.context}"
            )
        case BERTConfig() as c:
            return f"BERT, {c.layers} layers, width {c.width}, context {c.context}"
        case T5Config() as c:
            return f"T5, {c.layers} + {c.layers} layers, width {c.width}, {c.heads} heads of {c.head}"
        case ViTConfig() as c:
            return f"vision transformer, {c.layers} layers, width {c.width}, patches of {c.patch}, images of {c.image}"
        case UNetConfig() as c:
            return f"U-Net, {c.levels} levels, {c.channels} channels, images of {c.image}"
        case ResNetConfig():
            return "ResNet, bottleneck blocks, batch norm"
        case MLPConfig() as c:
            return f"MLP, {c.layers} layers, width {c.width}"


def default_sequence_length(name: str) -> int | None:
    """Tokens that the model was trained on; None for a model without a sequence."""
    config = CONFIGS[name]
    return config.context if isinstance(config, GPTConfig | LlamaConfig | BERTConfig | T5Config) else None


def task(name: str) -> str:
    """What a model learns, and so what its batch means: `causal-lm`, `masked-lm`, ..., as of Hugging Face models."""
    match CONFIGS[name]:
        case GPTConfig() | LlamaConfig():
            return "causal-lm"
        case BERTConfig():
            return "masked-lm"
        case T5Config():
            return "seq2seq"
        case UNetConfig():
            return "segmentation"
        case ResNetConfig() | ViTConfig():
            return "image-classification"
        case MLPConfig():
            return "classification"


def build(
    name: str,
    *,
    sequence_length: int | None = None,
    device: torch.device | str = "cpu",
    batch_device: torch.device | str | None = None,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model `name` on `device` and an example batch of two samples, the keyword arguments of its forward.

    The batch is on `batch_device`, by default `device`.

    Raises:
        ModelError: the model cannot take sequences of this length.
    """
    config = _with_sequence_length(name, CONFIGS[name], sequence_length)
    with torch.device(device):
        module = _module(config)
    batch = _batch(config, sequence_length)
    return module, {key: value.to(batch_device or device) for key, value in batch.items()}


def batch_of_module(module: nn.Module) -> dict[str, Tensor] | None:
    """The example batch of a model of the zoo at its trained sequence length, on its device; None for another model."""
    if not isinstance(module, GPT | Llama | ResNet | MLP | BERT | T5 | ViT | UNet):
        return None
    device = next(module.parameters()).device
    return {key: value.to(device) for key, value in _batch(module.config, None).items()}


def _with_sequence_length(name: str, config: Config, sequence_length: int | None) -> Config:
    if sequence_length is None:
        return config
    if sequence_length < 1:
        raise ModelError(f"a sequence length of {sequence_length} is no length; give 1 or more")
    match config:
        case LlamaConfig() | T5Config():
            return replace(config, context=sequence_length)
        case GPTConfig() | BERTConfig() if sequence_length > config.context:
            raise ModelError(
                f"{name} has learned positions for {config.context} tokens, {sequence_length} do not fit; "
                f"use a sequence length of {config.context} or less"
            )
        case GPTConfig() | BERTConfig():
            return config
        case _:
            raise ModelError(f"{name} has no sequence; leave out the sequence length")


def _module(config: Config) -> nn.Module:
    match config:
        case GPTConfig():
            return GPT(config)
        case LlamaConfig():
            return Llama(config)
        case ResNetConfig():
            return ResNet(config)
        case MLPConfig():
            return MLP(config)
        case BERTConfig():
            return BERT(config)
        case T5Config():
            return T5(config)
        case ViTConfig():
            return ViT(config)
        case UNetConfig():
            return UNet(config)


def _batch(config: Config, sequence_length: int | None) -> dict[str, Tensor]:
    """Two samples with fixed values."""
    generator = torch.Generator().manual_seed(0)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, (EXAMPLE_BATCH, *shape), generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(EXAMPLE_BATCH, *shape, generator=generator)

    match config:
        case GPTConfig() | LlamaConfig():
            tokens = integers(config.vocabulary, (sequence_length or config.context) + 1)
            return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        case BERTConfig():
            length = sequence_length or config.context
            tokens = integers(config.vocabulary, length)
            places = torch.rand(EXAMPLE_BATCH, length, generator=generator).argsort(dim=1)
            masked = places < max(1, round(MASKED_FRACTION * length))  # as many in each sample
            mask = min(MASK_TOKEN, config.vocabulary - 1)
            return {"input_ids": tokens.where(~masked, mask), "labels": tokens.where(masked, IGNORED)}
        case T5Config():
            length = sequence_length or config.context
            return {"input_ids": integers(config.vocabulary, length), "labels": integers(config.vocabulary, length)}
        case UNetConfig():
            side = config.image
            return {"images": floats(config.inputs, side, side), "labels": integers(config.classes, side, side)}
        case ResNetConfig() | ViTConfig():
            return {"images": floats(3, config.image, config.image), "labels": integers(config.classes)}
        case MLPConfig():
            return {"features": floats(config.features), "labels": integers(config.classes)}
