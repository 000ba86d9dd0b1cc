"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases.

Sources: Touvron et al. 2023 (arXiv 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783), table 3.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama."""

    layers: int
    width: int
    heads: int
    key_value_heads: int
    hidden: int  # width inside the SwiGLU
    vocabulary: int
    context: int  # tokens it was trained on; rotary positions take any length
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5


def rotary_table(seq: int, head: int, base: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [seq, head] of the rotary angles, in the dtype of `x` but computed in at least float32.

    Parameter-free and free of buffers, so that every pipeline stage can compute it anew.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequencies = base ** -(torch.arange(0, head, 2, device=x.device, dtype=dtype) / head)
    angles = torch.outer(torch.arange(seq, device=x.device, dtype=dtype), frequencies)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [batch, heads, seq, head] turned by the angles of its positions; halves are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.key_value_heads = config.heads, config.key_value_heads
        self.head = config.width // config.heads
        self.query = nn.Linear(config.width, config.heads * self.head, bias=False)
        self.key = nn.Linear(config.width, config.key_value_heads * self.head, bias=False)
        self.value = nn.Linear(config.width, config.key_value_heads * self.head, bias=False)
        self.out = nn.Linear(config.heads * self.head, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, width]."""
        batch, seq, _ = x.shape
        q = self.query(x).view(batch, seq, self.heads, self.head).transpose(1, 2)
        k = self.key(x).view(batch, seq, self.key_value_heads, self.head).transpose(1, 2)
        v = self.value(x).view(batch, seq, self.key_value_heads, self.head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.key_value_heads != self.heads,
        )
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head))
        return y


class SwiGLU(nn.Module):
    """A gated two-layer network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] of each token alone."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, width]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Llama(nn.Module):
    """Token ids in, mean next-token loss out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal 0.02; what is added to the residual stream is scaled down with the depth."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith((".out", ".down")) else 0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats; `labels` [batch, seq] are shifted already: the token after each input."""
        x = self.tokens(input_ids)
        head = self.config.width // self.config.heads
        cos, sin = rotary_table(input_ids.shape[1], head, self.config.rope_base, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))  # [batch, seq, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
