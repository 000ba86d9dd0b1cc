"""Causal attention of a part of the queries without a mask, every rank with the same work.

Contiguous parts of the queries would leave the rank with the last of them nearly twice the mean work. So queries are
dealt out in halves of these parts, of which rank r of t gets number r and number 2t - 1 - r: together they see as many
keys on every rank. This is the order of Llama 3's context parallelism (Grattafiori et al. 2024, section 3.3.2) and of
torch's `_HeadTailLoadBalancer`. There the whole sequence lies in that order; here positions stay where they are and
queries, then what is made for them, change places inside of the operator: less to move than keys and values are.

Keys behind the last query of a half are cut away, and what is left is causal along the lower right diagonal, which
kernels know (`torch.nn.attention.bias`): nothing of the size of queries times keys is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import handle_torch_function, has_torch_function

from planner.trace.parallel import Communicator, linear_map, operator

_LARGEST_FLASH_HEAD = 256


@operator("balanced_causal_attention")
def balanced_causal_attention(
    c: Communicator, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Attention of a contiguous part of the queries `[..., L / ranks, E]`, all keys `[..., L, E]` and values.

    `kwargs` are `scale` and `enable_gqa` of `aten.scaled_dot_product_attention`. The part has an even length.
    """
    deal = _deal(c.rank, c.size)
    halves = linear_map(query, lambda x: _dealt(x, c, deal), lambda g: _gathered(g, c, deal))
    length = halves.shape[-2]
    made = []
    for half, number in zip(halves.unbind(), (c.rank, 2 * c.size - 1 - c.rank), strict=True):
        seen = (number + 1) * length
        made.append(lower_right_attention(half, key.narrow(-2, 0, seen), value.narrow(-2, 0, seen), **kwargs))
    return linear_map(torch.stack(made), lambda x: _gathered(x, c, deal), lambda g: _dealt(g, c, deal))


def lower_right_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Causal attention where the last query sees the last key: by a kernel without mask where the device has one."""
    queries, keys = query.shape[-2], key.shape[-2]
    is_cpu = query.device.type == "cpu"
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if enable_gqa and (is_cpu or not is_half or query.shape[-1] > _LARGEST_FLASH_HEAD):
        # no kernel but flash takes heads that share keys
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
        enable_gqa = False
    if queries == keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    if not is_cpu:
        return attention_to_lower_right(query, key, value, scale, enable_gqa)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def attention_to_lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    """Torch's own, which has no form for fake tensors: a `TorchFunctionMode` may put another in its place."""
    if has_torch_function((query, key, value)):
        made: torch.Tensor = handle_torch_function(
            attention_to_lower_right, (query, key, value), query, key, value, scale, enable_gqa
        )
        return made
    bias = causal_lower_right(query.shape[-2], key.shape[-2])
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=enable_gqa)


@dataclass(frozen=True, slots=True)
class _Deal:
    """Who gets the two halves of a rank's part, and who sends it the two that it works on."""

    order: tuple[int, int]  # of the halves, by the ranks that get them
    sends: tuple[int, ...]  # halves to each rank
    receives: tuple[int, ...]  # from each rank: the earlier half comes first


def _deal(rank: int, size: int) -> _Deal:
    """The halves of the sequence are numbered from 0 to 2 size - 1; rank r begins with 2r and 2r + 1.

    >>> _deal(0, 2), _deal(1, 2).order
    (_Deal(order=(0, 1), sends=(1, 1), receives=(1, 1)), (1, 0))
    """
    owners = [min(number, 2 * size - 1 - number) for number in (2 * rank, 2 * rank + 1)]
    sources = [number // 2 for number in (rank, 2 * size - 1 - rank)]
    return _Deal(
        order=(0, 1) if owners[0] <= owners[1] else (1, 0),
        sends=tuple(owners.count(r) for r in range(size)),
        receives=tuple(sources.count(r) for r in range(size)),
    )


def _dealt(x: torch.Tensor, c: Communicator, deal: _Deal) -> torch.Tensor:
    """`[..., L / ranks, E]` as the two halves `[2, ..., L / (2 ranks), E]` that this rank works on."""
    return c.all_to_all_rows(torch.stack(_ordered(x.chunk(2, -2), deal)), deal.sends, deal.receives)


def _gathered(halves: torch.Tensor, c: Communicator, deal: _Deal) -> torch.Tensor:
    """The inverse of `_dealt`."""
    return torch.cat(_ordered(c.all_to_all_rows(halves, deal.receives, deal.sends).unbind(), deal), -2)


def _ordered(halves: Sequence[torch.Tensor], deal: _Deal) -> list[torch.Tensor]:
    """Two halves, swapped if those of a rank go out the other way round; it is its own inverse."""
    return [halves[i] for i in deal.order]
