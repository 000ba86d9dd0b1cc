"""Operators that stand in an ATen operator's place where a rank must know which part of a dim it has.

They take that operator's arguments, with the parts of one rank. `planner.shard.rules` says when they are used, and
`planner.shard.rules.special` what they communicate.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from planner.trace.aten import torch_operator
from planner.trace.parallel import Communicator, operator, piece_of

_aten: Any = torch.ops.aten
_MEAN, _SUM = 1, 2  # `reduction` of a loss; 0 keeps every term


def _gathered(c: Communicator, *rows: torch.Tensor) -> torch.Tensor:
    """`[ranks, rows, ...]`: small tensors of equal shape, all of them in one collective."""
    return c.all_gather(torch.stack(rows).unsqueeze(0))


def _accumulated(x: torch.Tensor) -> torch.Tensor:
    """As kernels compute: halves as float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check_range(indices: torch.Tensor, is_known: torch.Tensor, what: str, count: int) -> None:
    """Raise where no rank has what an index asks for, without waiting for the device."""
    _aten._assert_async.msg(
        (is_known | ((indices >= 0) & (indices < count))).all(), f"{what} is out of range: there are {count}"
    )


@operator("part_of_mean")
def part_of_mean(c: Communicator, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mean over one of equal parts, such that the sum over ranks is the mean of all."""
    made: torch.Tensor = torch_operator(name)(*args, **kwargs)
    return made / c.size


@operator("dropout")
def dropout(
    c: Communicator, x: torch.Tensor, p: float, train: bool, dim: int, parts: Sequence[int], repeats: int
) -> torch.Tensor:
    """Dropout of a part. The runtime draws for the whole and takes this part; here each rank draws for itself."""
    made: torch.Tensor = _aten.dropout.default(x, p, train)
    return made


@operator("dropout_of_parts")
def dropout_of_parts(
    c: Communicator, x: torch.Tensor, p: float, train: bool, dim: int, parts: Sequence[int], repeats: int, of: Any
) -> torch.Tensor:
    """Dropout of a part of a part: `of` is the axis that has cut before, with dim, parts and repeats."""
    made: torch.Tensor = _aten.dropout.default(x, p, train)
    return made


@operator("embedding")
def embedding(
    c: Communicator,
    weight: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of this rank's part of the vocabulary, zeros for the others': the sum over ranks is the embedding."""
    rows = weight.shape[0]
    _check_range(ids, torch.zeros_like(ids, dtype=torch.bool), "a token", rows * c.size)
    local = ids - c.rank * rows
    is_elsewhere = (local < 0) | (local >= rows)
    padding = padding_idx - c.rank * rows if padding_idx >= 0 else -1
    padding = padding if 0 <= padding < rows else -1
    found = _aten.embedding.default(weight, local.masked_fill(is_elsewhere, 0), padding, scale_grad_by_freq, sparse)
    made: torch.Tensor = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
    return made


def _highest(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest of a rank's part, finite even where all of the part is masked by -inf."""
    return logits.amax(dim).clamp_min(torch.finfo(logits.dtype).min)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each target, and its gradient for the logits of this rank's classes (the last dim).

    Each rank finds its maximum, its sum of exponentials, its sum of logits and, where it has it, the target's logit:
    one all-gather of four numbers for each target. Its own logits and the normalizer are saved.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, smoothing: float, c: Communicator) -> torch.Tensor:
        logits = _accumulated(x)
        classes = x.shape[-1]
        local = target - c.rank * classes
        is_here = (local >= 0) & (local < classes)
        local = local.masked_fill(~is_here, 0)
        highest = _highest(logits, -1)
        exponentials = (logits - highest.unsqueeze(-1)).exp_().sum(-1)
        at_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
        of_ranks = _gathered(c, highest, exponentials, at_target, logits.sum(-1))
        maximum = of_ranks[:, 0].amax(0)
        normalizer = ((of_ranks[:, 0] - maximum).exp() * of_ranks[:, 1]).sum(0).log() + maximum
        ctx.save_for_backward(x, local, is_here, normalizer)
        ctx.smoothing, ctx.num_classes = smoothing, classes * c.size
        found = normalizer - of_ranks[:, 2].sum(0)
        if smoothing:
            found = (1 - smoothing) * found + smoothing * (normalizer - of_ranks[:, 3].sum(0) / ctx.num_classes)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, local, is_here, normalizer = ctx.saved_tensors
        made = (_accumulated(x) - normalizer.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            made -= ctx.smoothing / ctx.num_classes
        own = is_here.to(made.dtype).mul_(ctx.smoothing - 1).unsqueeze(-1)
        made.scatter_add_(-1, local.unsqueeze(-1), own)
        made *= gradient.unsqueeze(-1)
        return made.to(x.dtype), None, None, None


@operator("cross_entropy")
def cross_entropy(
    c: Communicator,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    counted_over: Communicator | None = None,
) -> torch.Tensor:
    """`aten.cross_entropy_loss` of logits of which each rank has a part of the classes. Every rank gets the loss.

    Where the ranks of another axis have shared out the targets, a mean divides by the number of valid ones of all of
    them (`counted_over`).
    """
    last = x.movedim(1, -1) if x.dim() > 1 else x
    is_ignored = target == ignore_index
    _check_range(target, is_ignored, "a target class", last.shape[-1] * c.size)
    each: torch.Tensor = _CrossEntropy.apply(last, target.masked_fill(is_ignored, 0), label_smoothing, c)  # type: ignore[no-untyped-call]
    each = each.masked_fill(is_ignored, 0)
    if reduction == _MEAN:
        count = (~is_ignored).sum()
        each = each.sum() / (count if counted_over is None else counted_over.all_reduce(count))
    elif reduction == _SUM:
        each = each.sum()
    return each.to(x.dtype)


@operator("cross_entropy_of_part")
def cross_entropy_of_part(
    c: Communicator,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`aten.cross_entropy_loss` of a part of the targets: its sum over ranks is the loss.

    A mean divides by the number (the weight) of the valid targets of all ranks.
    """
    inner = _SUM if reduction == _MEAN else reduction
    made: torch.Tensor = _aten.cross_entropy_loss.default(x, target, weight, inner, ignore_index, label_smoothing)
    if reduction != _MEAN:
        return made
    is_valid = target != ignore_index
    if weight is None:
        return made / c.all_reduce(is_valid.sum())
    weights = weight.detach()[target.masked_fill(~is_valid, 0)].masked_fill(~is_valid, 0)
    return (made / c.all_reduce(_accumulated(weights).sum())).to(made.dtype)


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, along a dim of which each rank has a part: the collectives are one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, is_log: bool, c: Communicator) -> torch.Tensor:
        logits = _accumulated(x)
        highest = _highest(logits, dim)
        exponentials = (logits - highest.unsqueeze(dim)).exp_().sum(dim)
        of_ranks = _gathered(c, highest, exponentials)
        maximum = of_ranks[:, 0].amax(0)
        normalizer = ((of_ranks[:, 0] - maximum).exp() * of_ranks[:, 1]).sum(0).log() + maximum
        made = logits - normalizer.unsqueeze(dim)
        made = (made if is_log else made.exp_()).to(x.dtype)
        ctx.save_for_backward(made)
        ctx.dim, ctx.is_log, ctx.communicator = dim, is_log, c
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (made,) = ctx.saved_tensors
        value, incoming = _accumulated(made), _accumulated(gradient)
        weighed = incoming if ctx.is_log else incoming * value
        total = ctx.communicator.all_reduce(weighed.sum(ctx.dim)).unsqueeze(ctx.dim)
        found = incoming - value.exp() * total if ctx.is_log else weighed - value * total
        return found.to(made.dtype), None, None, None


@operator("softmax")
def softmax(c: Communicator, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`aten.softmax` along a dim that is split."""
    x = x if dtype is None else x.to(dtype)
    made: torch.Tensor = _Softmax.apply(x, dim % x.dim(), False, c)  # type: ignore[no-untyped-call]
    return made


@operator("log_softmax")
def log_softmax(c: Communicator, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`aten.log_softmax` along a dim that is split."""
    x = x if dtype is None else x.to(dtype)
    made: torch.Tensor = _Softmax.apply(x, dim % x.dim(), True, c)  # type: ignore[no-untyped-call]
    return made


@operator("causal_attention")
def causal_attention(
    c: Communicator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    parts: Sequence[int],
    repeats: int,
    **kwargs: Any,
) -> torch.Tensor:
    """Causal attention of a part of the queries, all keys and values: each rank masks by where its queries are."""
    queries = torch.arange(query.shape[-2] * c.size, device=query.device)
    mask = piece_of(queries, 0, parts, repeats, c.rank, c.size).unsqueeze(-1) >= torch.arange(
        key.shape[-2], device=key.device
    )
    if kwargs.pop("enable_gqa", False):  # kernels that take a mask take no grouped heads
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        mask = mask & attn_mask if is_bool else attn_mask.masked_fill(~mask, float("-inf"))
    made: torch.Tensor = _aten.scaled_dot_product_attention.default(query, key, value, mask, dropout_p, False, **kwargs)
    return made


@operator("shared_heads_attention")
def shared_heads_attention(
    c: Communicator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    heads: int,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of a contiguous part of `heads` query heads, with the heads of keys and values that these share."""
    mine = query.shape[-3]
    group = heads // key.shape[-3]
    wanted = torch.arange(c.rank * mine, (c.rank + 1) * mine, device=query.device) // group
    made: torch.Tensor = _aten.scaled_dot_product_attention.default(
        query, key.index_select(-3, wanted), value.index_select(-3, wanted), *args, **kwargs
    )
    return made
