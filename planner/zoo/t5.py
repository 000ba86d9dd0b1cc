"""T5: an encoder and a decoder with relative position biases, RMSNorm before each sublayer, no biases, one embedding.

Source: Raffel et al. 2019 (arXiv 1910.10683), sections 2.1 and 3.1.1 and table of sizes in 3.7. The position bias of a
stack belongs to its first layer, which hands it to the others.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """Sizes of a T5."""

    layers: int  # of the encoder, and as many of the decoder
    width: int
    heads: int
    head: int  # width of one head; heads times head need not be the width
    hidden: int  # width inside the feed-forward network
    context: int = 512  # tokens it was trained on, of input and of output; relative positions take any length
    vocabulary: int = 32_128
    buckets: int = 32  # of relative positions
    max_distance: int = 128  # beyond it all positions share a bucket
    dropout: float = 0.0
    norm_epsilon: float = 1e-6


def position_buckets(
    queries: int, keys: int, *, both_sides: bool, buckets: int, max_distance: int, device: torch.device
) -> Tensor:
    """[queries, keys] int64: the bucket of each key's position relative to the query's.

    Half of the buckets are one distance each, the others grow with its logarithm (section 2.1 of the paper). With
    `both_sides` half are for keys after the query; without, those are all in bucket 0.
    """
    distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)  # > 0: an earlier key
    offset = torch.zeros_like(distance)
    if both_sides:
        buckets //= 2
        offset = (distance < 0).long() * buckets
        distance = distance.abs()
    distance = distance.clamp(min=0)
    exact = buckets // 2
    # In this order and in float32 as in the authors' code: powers of two lie on the border of two buckets.
    growth = (distance.clamp(min=1).to(torch.float32) / exact).log() / math.log(max_distance / exact)
    far = exact + (growth * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class PositionBias(nn.Module):
    """What attention adds to its scores for each relative position; nothing is seen of later tokens in a decoder."""

    def __init__(self, config: T5Config, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.max_distance = config.max_distance
        self.table = nn.Embedding(config.buckets, config.heads)

    def forward(self, x: Tensor) -> Tensor:
        """[1, heads, seq, seq] for `x` [batch, seq, width]."""
        seq = x.shape[1]
        buckets = position_buckets(
            seq, seq, both_sides=not self.causal, buckets=self.table.num_embeddings, max_distance=self.max_distance,
            device=x.device,
        )  # fmt: skip
        bias: Tensor = self.table(buckets).permute(2, 0, 1).unsqueeze(0)
        if self.causal:
            later = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
            bias = bias.masked_fill(later, float("-inf"))
        return bias


class Attention(nn.Module):
    """Attention of one sequence to another (or to itself), its scores not scaled, as the initialisation expects."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.heads * config.head
        self.heads, self.head = config.heads, config.head
        self.dropout = config.dropout
        self.query = nn.Linear(config.width, inner, bias=False)
        self.key = nn.Linear(config.width, inner, bias=False)
        self.value = nn.Linear(config.width, inner, bias=False)
        self.out = nn.Linear(inner, config.width, bias=False)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> Tensor:
        """[batch, seq, width] from queries of `x` [batch, seq, width] and keys of `source` [batch, keys, width]."""
        q, k, v = (
            project(given).view(given.shape[0], given.shape[1], self.heads, self.head).transpose(1, 2)
            for project, given in ((self.query, x), (self.key, source), (self.value, source))
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0, scale=1.0
        )  # [batch, heads, seq, head]
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.heads * self.head))
        return y


class FeedForward(nn.Module):
    """Two linear layers with ReLU between them."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] of each token alone."""
        y: Tensor = self.down(self.dropout(F.relu(self.up(x))))
        return y


class Block(nn.Module):
    """One layer of either stack; that of a decoder also attends to what the encoder made."""

    def __init__(self, config: T5Config, *, decoder: bool, first: bool) -> None:
        super().__init__()
        self.position_bias = PositionBias(config, causal=decoder) if first else None
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon) if decoder else None
        self.cross = Attention(config) if decoder else None
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor | None, encoded: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[batch, seq, width], and the bias [1, heads, seq, seq] for the next layer."""
        if self.position_bias is not None:
            bias = self.position_bias(x)
        assert bias is not None
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        if self.cross is not None and self.cross_norm is not None and encoded is not None:
            x = x + self.dropout(self.cross(self.cross_norm(x), encoded, None))
        return x + self.dropout(self.mlp(self.norm2(x))), bias


class Stack(nn.Module):
    """The layers of the encoder or of the decoder, and the norm at their end."""

    def __init__(self, config: T5Config, *, decoder: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, decoder=decoder, first=not index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """[batch, seq, width]."""
        x = self.dropout(x)
        bias: Tensor | None = None
        for block in self.blocks:
            x, bias = block(x, bias, encoded)
        y: Tensor = self.dropout(self.norm(x))
        return y


class T5(nn.Module):
    """Token ids of the input in, mean loss of predicting those of the output out."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)  # of both stacks, and the head
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self.init_weights()

    def init_weights(self) -> None:
        """Scores and sums have unit variance without a scale in attention (the code of the paper's authors)."""
        config = self.config
        fan_in = {"out": config.heads * config.head, "down": config.hidden}
        for name, module in self.named_modules():
            leaf = name.rpartition(".")[2]
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0 if leaf == "tokens" else config.width**-0.5)
            elif isinstance(module, nn.Linear):
                std = (config.width * config.head if leaf == "query" else fan_in.get(leaf, config.width)) ** -0.5
                nn.init.normal_(module.weight, std=std)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy in nats over the `labels` [batch, target seq] that are not -100.

        The decoder reads the labels shifted by one, from token 0 on, which is also its padding.
        """
        shifted = F.pad(labels[:, :-1], (1, 0)).clamp(min=0)
        encoded = self.encoder(self.tokens(input_ids))
        decoded = self.decoder(self.tokens(shifted), encoded) * self.config.width**-0.5  # since the head is shared
        logits = F.linear(decoded, self.tokens.weight)  # [batch, target seq, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
