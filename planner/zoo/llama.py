"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases. Mixtral: the same with experts.

Sources: Touvron et al. 2023 (arXiv 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783), table 3; Jiang et al. 2024
(arXiv 2401.04088), section 2 and table 1.
"""

import math
from dataclasses import dataclass
from typing import Any

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
    experts: int = 0  # SwiGLU networks of a layer, of which each token takes some; 0: one, which all take
    experts_per_token: int = 2
    balance_loss: float = 0.0  # weight of the loss that keeps experts equally busy; it couples the samples of a batch


# A grouped product for the dtypes that torch's own refuses on fake tensors (all but bfloat16). An operator of its own,
# since the rows of a group are known from values only. One definition in a process, however often this file is loaded.
if not hasattr(torch.ops.autoplan_zoo, "grouped_mm_fallback"):

    @torch.library.custom_op("autoplan_zoo::grouped_mm_fallback", mutates_args=())
    def _grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:  # noqa: A002
        output = input.new_zeros(input.shape[0], weight.shape[2])
        start = 0
        for group, end in enumerate(offs.tolist()):
            output[start:end] = input[start:end] @ weight[group]
            start = end
        return output

    @torch.library.custom_op("autoplan_zoo::grouped_mm_fallback_backward", mutates_args=())
    def _grouped_mm_fallback_backward(
        input: Tensor,  # noqa: A002
        weight: Tensor,
        offs: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor]:
        input_grad, weight_grad = torch.zeros_like(input), torch.zeros_like(weight)
        start = 0
        for group, end in enumerate(offs.tolist()):
            input_grad[start:end] = grad[start:end] @ weight[group].T
            weight_grad[group] = input[start:end].T @ grad[start:end]
            start = end
        return input_grad, weight_grad

    @_grouped_mm_fallback.register_fake
    def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:  # noqa: A002
        return input.new_empty(input.shape[0], weight.shape[2])

    @_grouped_mm_fallback_backward.register_fake
    def _(input: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        return torch.empty_like(input), torch.empty_like(weight)

    def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        input_grad, weight_grad = torch.ops.autoplan_zoo.grouped_mm_fallback_backward(*ctx.saved_tensors, grad)
        return input_grad, weight_grad, None

    _grouped_mm_fallback.register_autograd(_backward, setup_context=_save)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, out]: the rows of `x` [rows, in] up to the first of `ends` [groups] by the first `weight`, and so on.

    `weight` is [groups, in, out], `ends` int32.
    """
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight, offs=ends)
    y: Tensor = torch.ops.autoplan_zoo.grouped_mm_fallback(x, weight, ends)
    return y


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


class Experts(nn.Module):
    """Several SwiGLU networks; each token goes through those that its router likes best, however busy they are."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.count, self.taken, self.balance_loss = config.experts, config.experts_per_token, config.balance_loss
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, config.width, 2 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))
        self.residual_std = 0.02 / math.sqrt(2 * config.layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the linear layers of a dense model."""
        nn.init.normal_(self.gate_up, std=0.02)
        nn.init.normal_(self.down, std=self.residual_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[batch, seq, width] of each token alone; and this layer's balance loss, if the model has one.

        The balance loss is that of Fedus et al. 2021 (arXiv 2101.03961), equation 4: 1 where all experts are equally
        busy, over the tokens of this batch.
        """
        width = x.shape[2]
        tokens = x.reshape(-1, width)
        scores = self.router(tokens).softmax(1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, experts = scores.topk(self.taken)  # [tokens, taken]
        weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
        experts = experts.flatten()  # [tokens * taken]
        order = experts.argsort(stable=True)  # by expert: what grouped_mm wants
        chosen = experts.unsqueeze(1) == torch.arange(self.count, device=x.device)  # [tokens * taken, experts]
        ends = chosen.sum(0).cumsum(0).to(torch.int32)
        gate, up = grouped_mm(tokens[order // self.taken], self.gate_up, ends).chunk(2, dim=1)
        outputs = grouped_mm(F.silu(gate) * up, self.down, ends)[order.argsort()]  # in the order of the tokens again
        y = (outputs.view(-1, self.taken, width) * weights.unsqueeze(2)).sum(1).view_as(x)
        if not self.balance_loss:
            return y, None
        return y, self.count * (chosen.to(scores.dtype).mean(0) * scores.mean(0)).sum()


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.mlp = Experts(config) if config.experts else SwiGLU(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, balance: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """[batch, seq, width], and the sum of the balance losses up to here, if the model has one."""
        x = x + self.attention(self.norm1(x), cos, sin)
        if isinstance(self.mlp, SwiGLU):
            return x + self.mlp(self.norm2(x)), balance
        y, own = self.mlp(self.norm2(x))
        return x + y, own if balance is None else balance + own


class Llama(nn.Module):
    """Token ids in, mean next-token loss out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
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
        balance: Tensor | None = None
        for block in self.blocks:
            x, balance = block(x, cos, sin, balance)
        logits = self.head(self.norm(x))  # [batch, seq, vocabulary]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss if balance is None else loss + self.config.balance_loss * balance / self.config.layers
