"""BERT: a bidirectional transformer with LayerNorm after each sublayer, trained to fill in masked tokens.

Source: Devlin et al. 2018 (arXiv 1810.04805), section 3; the uncased vocabulary. The second task of the paper, whether
one sentence follows the other, is left out with its pooler, as in later work; segment embeddings are there.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTConfig:
    """Sizes of a BERT."""

    layers: int
    width: int
    heads: int
    context: int = 512  # tokens that have a learned position
    vocabulary: int = 30_522
    segments: int = 2
    dropout: float = 0.0
    norm_epsilon: float = 1e-12


class Embeddings(nn.Module):
    """Token, position and segment, added and normalised."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """[batch, seq, width] of token ids [batch, seq]; without `segment_ids` all are of the first segment."""
        positions = self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        segments = self.segments.weight[0] if segment_ids is None else self.segments(segment_ids)
        x: Tensor = self.dropout(self.norm(self.tokens(input_ids) + positions + segments))
        return x


class Attention(nn.Module):
    """Self-attention among all tokens of a sample."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width]."""
        batch, seq, width = x.shape
        q, k, v = (
            project(x).view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return y


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width]."""
        x = self.norm1(x + self.dropout(self.attention(x)))
        y: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


class BERT(nn.Module):
    """Token ids of which some are masked in, mean loss over the masked ones out."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary)
        self.init_weights()
        self.head.weight = self.embeddings.tokens.weight

    def init_weights(self) -> None:
        """Normal 0.02, as in the paper."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats over the `labels` [batch, seq] that are not -100: the tokens that were masked."""
        x = self.embeddings(input_ids, segment_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(F.gelu(self.transform(x))))  # [batch, seq, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
