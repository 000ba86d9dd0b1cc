"""Buffers that forward updates, after a step on several data ranks: those of one device.

The reference is one device that runs the micro-batches of all data ranks, those of rank 0 first. With the recursion
s <- c s + x, k forwards on each of R ranks from a common s0, and s_r on rank r,

    s_r = c^k s0 + t_r,     s = c^(k R) s0 + sum over r of c^(k (R - 1 - r)) t_r,

so one sum over the data ranks gives the reference exactly. It is taken in float64, in which counters are exact as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from planner.errors import RunError


@dataclass(frozen=True, slots=True)
class DataRanks:
    """The ranks that train the same parameters on other samples; `groups` are those of the data-parallel axes."""

    rank: int
    size: int
    groups: tuple[dist.ProcessGroup, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "DataRanks":
        """From a mesh with the axes dp_replicate and dp_shard."""
        axes = [mesh["dp_replicate"], mesh["dp_shard"]]
        replicate, shard = (axis.get_local_rank() for axis in axes)
        size = axes[0].size() * axes[1].size()
        return cls(replicate * axes[1].size() + shard, size, tuple(a.get_group() for a in axes if a.size() > 1))

    def reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """All-reduce in place."""
        for group in self.groups:
            dist.all_reduce(values, op=op, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recursion:
    """A buffer (it may be another object after a step) and what an update leaves of it.

    Where `counter` is given, the buffer is the mean of all updates; that recursion, by position, counts them.
    """

    read: Callable[[], torch.Tensor]
    decay: float = 1.0
    counter: int | None = None


class Statistics:
    """Brings buffers to the value that one device has, step by step. Nothing happens on one data rank."""

    def __init__(self, recursions: Sequence[Recursion], ranks: DataRanks) -> None:
        self._recursions = tuple(recursions)
        self._ranks = ranks
        self._is_needed = ranks.size > 1 and bool(recursions)
        self._before: list[torch.Tensor] = []

    def begin(self) -> None:
        """Keep the values before the first forward of a step."""
        if self._is_needed:
            self._before = [r.read().detach().double().clone() for r in self._recursions]

    def end(self, num_forwards: int | Sequence[Sequence[int]]) -> None:
        """Merge after the last one (one all-reduce on each data-parallel axis).

        `num_forwards` is how often each data rank updated the buffers in the step; or, for each recursion, how often
        each data rank did.
        """
        if not self._is_needed:
            return
        if isinstance(num_forwards, int):
            num_forwards = [[num_forwards] * self._ranks.size] * len(self._recursions)
        bases, parts = [], []
        for recursion, before, counts in zip(self._recursions, self._before, num_forwards, strict=True):
            after = recursion.read().detach().double()
            if recursion.counter is None:
                base, part = _of_recursion(before, after, recursion.decay, counts, self._ranks.rank)
            else:
                base, part = _of_mean(before, after, self._before[recursion.counter], counts, self._ranks.rank)
            bases.append(base)
            parts.append(part.reshape(-1))
        summed = torch.cat(parts)
        self._ranks.reduce(summed)
        with torch.no_grad():
            whole = torch.split(summed, [part.numel() for part in parts])
            for recursion, base, part in zip(self._recursions, bases, whole, strict=True):
                recursion.read().copy_(base + part.reshape(base.shape))
        self._before = []


def _of_recursion(
    before: torch.Tensor, after: torch.Tensor, decay: float, counts: Sequence[int], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the start leaves in the reference, and what this rank adds to it."""
    own = after - _times(before, decay ** counts[rank])
    return _times(before, decay ** sum(counts)), _times(own, decay ** sum(counts[rank + 1 :]))


def _of_mean(
    before: torch.Tensor, after: torch.Tensor, num_before: torch.Tensor, counts: Sequence[int], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the mean of all updates so far."""
    total = (num_before + sum(counts)).clamp(min=1)
    return before * num_before / total, ((num_before + counts[rank]) * after - num_before * before) / total


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The product; nothing times infinity is nothing."""
    return value * factor if factor else torch.zeros_like(value)


class ModuleStatistics:
    """The same for a module without a graph: norms are merged, other buffers must not differ between ranks."""

    def __init__(self, model: nn.Module, ranks: DataRanks, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._calls: dict[nn.Module, int] = {}
        self._owners: list[nn.Module] = []  # of each recursion
        recursions: list[Recursion] = []
        merged: set[int] = set()
        for module in model.modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                self._calls[module] = 0
                made = _recursions_of(module, len(recursions))
                recursions += made
                self._owners += [module] * len(made)
                merged |= {id(buffer) for buffer in module.buffers(recurse=False)}
                if ranks.size > 1:
                    module.register_forward_hook(self._count)
        self._statistics = Statistics(recursions, ranks)
        self._others = [name for name, buffer in model.named_buffers() if id(buffer) not in merged]
        self._marks: list[tuple[torch.Tensor | None, int]] = []

    def begin(self) -> None:
        """Before the first forward of a step."""
        self._calls = dict.fromkeys(self._calls, 0)
        self._statistics.begin()
        self._marks = self._marked()

    def end(self) -> None:
        """After the last one.

        Raises:
            RunError: ranks have different values of a buffer that is no running mean; on every rank.
        """
        if self._ranks.size == 1 or not (self._calls or self._others):
            return
        changed = [
            new is not old or version != before
            for (old, before), (new, version) in zip(self._marks, self._marked(), strict=True)
        ]
        mine = [*self._calls.values(), *map(int, changed)]
        known = torch.zeros(self._ranks.size, len(mine), dtype=torch.int64, device=self._device)
        known[self._ranks.rank] = torch.tensor(mine)
        self._ranks.reduce(known)
        counts = dict(zip(self._calls, known.T.tolist(), strict=False))  # then come the changes
        self._statistics.end([counts[owner] for owner in self._owners])
        for name, by_rank in zip(self._others, known.T[len(counts) :].tolist(), strict=True):
            if any(by_rank):
                self._compare(name)

    def _count(self, module: nn.Module, *_: object) -> None:
        if module.training:
            self._calls[module] += 1

    def _marked(self) -> list[tuple[torch.Tensor | None, int]]:
        """Object and version of the other buffers: one changes when a buffer is replaced, one when it is written."""
        now = dict(self._model.named_buffers())
        found = (now.get(name) for name in self._others)
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in found]

    def _compare(self, name: str) -> None:
        value = dict(self._model.named_buffers())[name].detach().double()
        bounds = torch.stack([value, -value])
        self._ranks.reduce(bounds, dist.ReduceOp.MAX)
        if not torch.equal(bounds[0], -bounds[1]):
            raise RunError(
                f"forward updates buffer {name} by its samples, and what the data ranks have of it cannot be merged; "
                "plan with dp=1"
            )


def _recursions_of(module: _NormBase, position: int) -> list[Recursion]:
    """The buffers of a norm, the first at `position`. A batch norm without momentum keeps the mean of all updates."""

    def of(name: str, decay: float, counter: int | None = None) -> Recursion:
        return Recursion(read=lambda: module.get_buffer(name), decay=decay, counter=counter)

    is_counting = isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
    decay = 1.0 if module.momentum is None else 1.0 - module.momentum
    counter = position if is_counting and module.momentum is None else None
    return [
        *([of("num_batches_tracked", 1.0)] if is_counting else []),
        of("running_mean", decay, counter),
        of("running_var", decay, counter),
    ]
