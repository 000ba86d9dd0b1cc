"""A multi-layer perceptron that classifies vectors: the smallest model that has blocks."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Sizes of an MLP."""

    features: int
    width: int
    layers: int  # hidden layers of `width` after the first
    classes: int


class Layer(nn.Module):
    """One hidden layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, outputs]."""
        return F.gelu(self.linear(x))


class MLP(nn.Module):
    """Vectors in, mean classification loss out."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = Layer(config.features, config.width)
        self.blocks = nn.ModuleList(Layer(config.width, config.width) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats of `features` [batch, features] with class `labels` [batch]."""
        x = self.stem(features)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)
