"""The named sizes of the zoo, and how each is built with an example batch."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.llama import Llama, LlamaConfig
from planner.zoo.mlp import MLP, MLPConfig
from planner.zoo.resnet import ResNet, ResNetConfig

Config = GPTConfig | LlamaConfig | ResNetConfig | MLPConfig

EXAMPLE_BATCH = 2


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
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
    "resnet50": ResNetConfig(blocks=(3, 4, 6, 3)),
    "resnet101": ResNetConfig(blocks=(3, 4, 23, 3)),
    "resnet152": ResNetConfig(blocks=(3, 8, 36, 3)),
    "mlp": MLPConfig(features=1024, width=4096, layers=8, classes=1000),
    # For tests and CPUs. gpt-tiny reads bytes: it is what `autoplan run` trains by default.
    "gpt-tiny": GPTConfig(layers=4, width=128, heads=4, context=128, vocabulary=256, tied_embeddings=False),
    "llama-tiny": LlamaConfig(layers=4, width=128, heads=4, key_value_heads=2, hidden=352, vocabulary=256, context=128),
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
            return (
                f"Llama, {c.layers} layers, width {c.width}, {c.key_value_heads} key-value heads, context {c.context}"
            )
        case ResNetConfig():
            return "ResNet, bottleneck blocks, batch norm"
        case MLPConfig() as c:
            return f"MLP, {c.layers} layers, width {c.width}"


def default_sequence_length(name: str) -> int | None:
    """Tokens that the model was trained on; None for a model without a sequence."""
    config = CONFIGS[name]
    return config.context if isinstance(config, GPTConfig | LlamaConfig) else None


def build(
    name: str, *, sequence_length: int | None = None, device: torch.device | str = "cpu"
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model `name` on `device` and an example batch of two samples, the keyword arguments of its forward.

    Raises:
        ModelError: the model cannot take sequences of this length.
    """
    config = _with_sequence_length(name, CONFIGS[name], sequence_length)
    with torch.device(device):
        module = _module(config)
    batch = _batch(config, sequence_length)
    return module, {key: value.to(device) for key, value in batch.items()}


def batch_of_module(module: nn.Module) -> dict[str, Tensor] | None:
    """The example batch of a model of the zoo at its trained sequence length, on its device; None for another model."""
    if not isinstance(module, GPT | Llama | ResNet | MLP):
        return None
    device = next(module.parameters()).device
    return {key: value.to(device) for key, value in _batch(module.config, None).items()}


def _with_sequence_length(name: str, config: Config, sequence_length: int | None) -> Config:
    if sequence_length is None:
        return config
    if sequence_length < 1:
        raise ModelError(f"a sequence length of {sequence_length} is no length; give 1 or more")
    match config:
        case LlamaConfig():
            return replace(config, context=sequence_length)
        case GPTConfig() if sequence_length > config.context:
            raise ModelError(
                f"{name} has learned positions for {config.context} tokens, {sequence_length} do not fit; "
                f"use a sequence length of {config.context} or less"
            )
        case GPTConfig():
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
        case ResNetConfig():
            return {"images": floats(3, config.image, config.image), "labels": integers(config.classes)}
        case MLPConfig():
            return {"features": floats(config.features), "labels": integers(config.classes)}
