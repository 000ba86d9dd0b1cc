"""GPT-2 and GPT-3: learned positions, LayerNorm before each sublayer, GELU, a plain causal transformer.

Sources: Radford et al. 2019 (GPT-2); Brown et al. 2020 (arXiv 2005.14165), table 2.1. GPT-3's alternating sparse
attention is not public; all layers are dense here, as in every reimplementation.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT."""

    layers: int
    width: int
    heads: int
    context: int  # tokens that have a learned position
    vocabulary: int = 50257
    tied_embeddings: bool = True  # the head is the token embedding, as in GPT-2
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, width]
        """[batch, seq, width]: each token attends to itself and those before it."""
        batch, seq, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )  # [batch, heads, seq, head]
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return y


class MLP(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] of each token alone."""
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    """Token ids in, mean next-token loss out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.init_weights()
        if config.tied_embeddings:
            self.head.weight = self.tokens.weight

    def init_weights(self) -> None:
        """GPT-2's: normal 0.02; what is added to the residual stream is scaled down with the depth."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith((".out", ".down")) else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats; `labels` [batch, seq] are shifted already: the token after each input."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [batch, seq, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
