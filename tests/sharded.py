"""Whole tensors as the ranks of an axis hold them, and back: what tests of sharding compare with."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.graph import Batch, Block, Graph, Node, Size
from planner.runtime.blocks import constant
from planner.shard.chain import AxisSplit, Link
from planner.shard.localize import Localized
from planner.shard.placement import (
    Conversion,
    Option,
    Placement,
    Q,
    R,
    Sharding,
    conversion,
    differentiable,
    effective,
    operands_of,
)
from planner.shard.rules import options
from planner.trace.aten import run_nodes
from planner.trace.parallel import Communicator, Grid, Threads, bound, piece_of, put_together


def sizes(placement: Placement, micro_batch: int) -> tuple[int, list[int], int]:
    """A split's dim, parts and repeats for a micro-batch."""

    def at(size: Size) -> int:
        return size.per_sample * micro_batch if isinstance(size, Batch) else size

    return placement.dim, [at(p) for p in placement.parts], at(placement.repeats)


def step(source: Placement, target: Placement, *, has_gradient: bool = True) -> Conversion:
    """The conversion, which there must be."""
    made = conversion(source, target, has_gradient=has_gradient)
    assert made is not None
    return made


def _terms(whole: torch.Tensor, degree: int) -> list[torch.Tensor]:
    """Unequal terms that add up to `whole`."""
    draws = torch.Generator().manual_seed(degree)
    if not whole.is_floating_point():
        return [whole if rank == degree - 1 else torch.zeros_like(whole) for rank in range(degree)]
    terms = [torch.randn(whole.shape, dtype=whole.dtype, generator=draws) for _ in range(degree - 1)]
    return [*terms, whole - sum(terms)]


def apart(
    whole: torch.Tensor, placement: Placement, degree: int, *, micro_batch: int = 1, is_gradient: bool = False
) -> list[torch.Tensor]:
    """What each rank holds of a value, or of a gradient; partial ones are unequal terms."""
    if placement.is_split:
        dim, parts, repeats = sizes(placement, micro_batch)
        return [piece_of(whole, dim, parts, repeats, rank, degree).clone() for rank in range(degree)]
    if placement.kind == ("Q" if is_gradient else "P"):
        return _terms(whole, degree)
    return [whole.clone() for _ in range(degree)]


def together(
    held: Sequence[torch.Tensor], placement: Placement, *, micro_batch: int = 1, is_gradient: bool = False
) -> torch.Tensor:
    """The whole of what the ranks hold. Those that should be equal are asserted to be."""
    if placement.is_split:
        return put_together(torch.stack(list(held)), *sizes(placement, micro_batch))
    if placement.kind == ("Q" if is_gradient else "P"):
        return torch.stack(list(held)).sum(0)
    for other in held[1:]:
        torch.testing.assert_close(other, held[0], rtol=1e-9, atol=1e-12, equal_nan=True)
    return held[0]


def split_by(shardings: Sequence[Sharding], degree: int, axis: str = "tp") -> tuple[AxisSplit, ...]:
    """One axis as what splits; no axis where there are no shardings."""
    return (AxisSplit(axis=axis, degree=degree, shardings=tuple(shardings)),) if shardings else ()


# --- whole graphs ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What a run of a graph gives: the loss, gradients of parameters and values of buffers, by tensor index."""

    loss: torch.Tensor
    gradients: Mapping[int, torch.Tensor | None]
    buffers: Mapping[int, torch.Tensor]


def values_of(graph: Graph, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Parameters, buffers, constants and inputs by tensor index."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False)), **batch}
    return {
        i: constant(graph, i, torch.device("cpu")) if t.kind == "constant" else named[t.name].detach()
        for i, t in enumerate(graph.tensors)
        if t.kind != "activation" and (t.kind == "constant" or t.name in named)
    }


def _run(
    graph: Graph, given: Mapping[int, torch.Tensor], micro_batch: int, operators: Mapping[str, Callable[..., Any]]
) -> Outcome:
    """Prelude and blocks forward and backward. The given tensors stay as they are."""
    env = {i: x.clone() for i, x in given.items()}
    leaves = {i: env[i].requires_grad_() for i, t in enumerate(graph.tensors) if t.requires_grad and i in env}
    device = torch.device("cpu")
    nodes = sorted({*graph.prelude.nodes, *(i for block in graph.blocks for i in block.nodes)})
    run_nodes(
        graph.tensors, [graph.nodes[i] for i in nodes], env, micro_batch=micro_batch, device=device, replace=operators
    )
    made = torch.autograd.grad(env[graph.loss], list(leaves.values()), allow_unused=True)
    return Outcome(
        loss=env[graph.loss].detach(),
        gradients=dict(zip(leaves, made, strict=True)),
        buffers={i: env[i] for i, t in enumerate(graph.tensors) if t.kind == "buffer" and i in env},
    )


def run_whole(graph: Graph, values: Mapping[int, torch.Tensor], micro_batch: int) -> Outcome:
    """A graph on one device."""
    return _run(graph, values, micro_batch, {})


def run_localized(
    localized: Localized,
    degree: int,
    values: Mapping[int, torch.Tensor],
    micro_batch: int,
    watch: Callable[[Communicator], Communicator] = lambda communicator: communicator,
) -> Outcome:
    """A graph of one rank on `degree` threads; what they give is put together, and asserted equal where it must be."""
    held = {i: apart(x, localized.placements.get(i, R), degree, micro_batch=micro_batch) for i, x in values.items()}

    def work(communicator: Communicator) -> Outcome:
        own = {i: x[communicator.rank] for i, x in held.items()}
        return _run(localized.graph, own, micro_batch, bound({"tp": watch(communicator)}))

    found = Threads(degree).run(work)
    placed = localized.placements

    def gradient(tensor: int) -> torch.Tensor | None:
        parts = [outcome.gradients[tensor] for outcome in found]
        present = [part for part in parts if part is not None]
        assert len(present) in (0, degree)
        return together(present, placed.get(tensor, R), is_gradient=True) if present else None

    return Outcome(
        loss=together([outcome.loss for outcome in found], R),
        gradients={tensor: gradient(tensor) for tensor in found[0].gradients},
        buffers={t: together([o.buffers[t] for o in found], placed.get(t, R)) for t in found[0].buffers},
    )


def run_chained(links: Sequence[Link], values: Mapping[int, torch.Tensor], micro_batch: int) -> Outcome:
    """A graph that several axes split, on a grid of threads; what they give is put together, axis by axis."""
    grid = Grid([(link.split.axis, link.split.degree) for link in links])

    def each_on(link: Link, held: Sequence[torch.Tensor], tensor: int, *, is_gradient: bool = False) -> torch.Tensor:
        placement = link.local.placements.get(tensor, R)
        return together(held, placement, micro_batch=micro_batch, is_gradient=is_gradient)

    def parts(value: torch.Tensor, tensor: int) -> list[torch.Tensor]:
        held = [value]
        for link in links:
            placement = link.local.placements.get(tensor, R)
            held = [x for one in held for x in apart(one, placement, link.split.degree, micro_batch=micro_batch)]
        return held

    def joined(held: Sequence[torch.Tensor], tensor: int, *, is_gradient: bool = False) -> torch.Tensor:
        for link in reversed(links):
            degree = link.split.degree
            groups = [held[i : i + degree] for i in range(0, len(held), degree)]
            held = [each_on(link, group, tensor, is_gradient=is_gradient) for group in groups]
        return held[0]

    held = {i: parts(x, i) for i, x in values.items()}
    local = links[-1].local.graph
    found = grid.run(
        lambda rank, communicators: _run(
            local, {i: x[rank] for i, x in held.items()}, micro_batch, bound(communicators)
        )
    )

    def gradient(tensor: int) -> torch.Tensor | None:
        present = [g for outcome in found if (g := outcome.gradients[tensor]) is not None]
        assert len(present) in (0, grid.size)
        return joined(present, tensor, is_gradient=True) if present else None

    return Outcome(
        loss=joined([outcome.loss for outcome in found], local.loss),
        gradients={tensor: gradient(tensor) for tensor in found[0].gradients},
        buffers={t: joined([o.buffers[t] for o in found], t) for t in found[0].buffers},
    )


def assert_equal(graph: Graph, found: Outcome, wanted: Outcome, tolerance: float = 1e-9) -> None:
    """Loss, every gradient and every buffer."""
    torch.testing.assert_close(found.loss, wanted.loss, rtol=tolerance, atol=0, msg="loss")
    for name in ("gradients", "buffers"):
        theirs = getattr(wanted, name)
        for tensor, mine in getattr(found, name).items():
            other = theirs[tensor]
            if mine is None or other is None:
                assert mine is other or not (other if mine is None else mine).any()
                continue
            scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 1.0
            is_equal = torch.allclose(mine, other, rtol=tolerance, atol=tolerance * max(scale, 1e-6))
            assert is_equal, f"{name} of {graph.tensors[tensor].name}: {mine} instead of {other}"


# --- shardings by chance --------------------------------------------------------------------------


class Chance:
    """A sharding for every block of a graph, with options drawn by chance among those that can follow one another."""

    def __init__(self, graph: Graph, degree: int, seed: int) -> None:
        self.graph = graph
        self.degree = degree
        self.draw = random.Random(seed)
        self.moving = differentiable(graph)
        self.kept: dict[int, Placement] = {}  # what lives in several blocks
        self.shardings = tuple(self._sharding(block) for block in graph.blocks)

    def _becomes(self, tensor: int, source: Placement | None, target: Placement) -> bool:
        return source in (None, target) or (conversion(source, target, has_gradient=tensor in self.moving) is not None)

    def _sharding(self, block: Block) -> Sharding:
        stored = {*block.parameters, *block.buffers}
        placed: dict[int, Placement | None] = {t: self.kept.get(t) for t in stored}
        placed |= {t: self.kept[t] for t in block.inputs}
        options = tuple(self._option(self.graph.nodes[i], placed, stored) for i in block.nodes)
        for tensor in stored:
            self.kept.setdefault(tensor, placed[tensor] or R)
        for tensor in block.outputs:
            self.kept[tensor] = self._handed_on(tensor, placed[tensor] or R)
        return Sharding(
            options=options,
            **{name: tuple(self.kept[t] for t in getattr(block, name))
               for name in ("parameters", "buffers", "inputs", "outputs")},
        )  # fmt: skip

    def _option(self, node: Node, placed: dict[int, Placement | None], stored: set[int]) -> Option:
        operands = operands_of(node)
        seeds = {t: [p] for t in operands if (p := placed.get(t)) is not None and p.is_part}
        fitting, in_place = [], []
        for option in options(node, self.graph.tensors, self.degree, seeds, self.moving):
            wanted = {
                t: effective(p, has_gradient=t in self.moving) for t, p in zip(operands, option.operands, strict=True)
            }
            if any(p is not None and p.kind in ("L", "D") for p in (*option.operands, *option.outputs)):
                continue  # tests/test_shard_experts.py has them: few can follow one another
            if all(self._becomes(t, placed.get(t, R), p) for t, p in wanted.items()):
                fitting.append((option, wanted))
                if all(placed.get(t, R) in (None, p) for t, p in wanted.items() if t in node.mutates):
                    in_place.append((option, wanted))  # what is written is as it is
        fitting = in_place or fitting
        option, wanted = self.draw.choices(fitting, [8 if o.share < 1 else 1 for o, _ in fitting])[0]
        for tensor, placement in wanted.items():
            if tensor in stored and placed[tensor] is None:
                is_whole = placement.kind == "P" or (tensor not in node.mutates and self.draw.random() < 0.2)
                placed[tensor] = R if is_whole else placement
        for result, made in zip(node.outputs, option.outputs, strict=True):
            if result is not None and made is not None:
                placed[result] = effective(made, has_gradient=result in self.moving)
        return option

    def _handed_on(self, tensor: int, made: Placement) -> Placement:
        if tensor == self.graph.loss or tensor in dict(self.graph.outputs).values():
            return R
        others = [made, R, Q] if tensor in self.moving else [made, R]
        return self.draw.choice([p for p in others if self._becomes(tensor, made, p)])
