"""Vision transformer: an image as a sequence of patches, a class token in front, LayerNorm before each sublayer.

Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Sizes of a vision transformer."""

    layers: int
    width: int
    heads: int
    patch: int  # pixels on a side
    image: int = 224  # pixels on a side
    classes: int = 1000
    dropout: float = 0.0
    norm_epsilon: float = 1e-6


class Patches(nn.Module):
    """Patches as tokens with positions, behind the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (config.image // config.patch) ** 2, config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal 0.02 for the two that belong to no layer."""
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1 + patches, width] of `images` [batch, 3, height, width]."""
        patches = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat((self.class_token.expand(images.shape[0], -1, -1), patches), dim=1) + self.positions


class Attention(nn.Module):
    """Self-attention among all patches of an image."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width]."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return y


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))
        return y


class ViT(nn.Module):
    """Images in, mean classification loss out."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.classes)
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal 0.02 for every linear layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats of `images` [batch, 3, height, width] with class `labels` [batch]."""
        x = self.dropout(self.patches(images))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)
