"""The ranks that split tensors as threads of one process, and the operator at which they go wrong.

What the self-check runs beside the eager module: the blocks of every rank, lowered as in training from the graph of one
rank, on parts of one copy of the model. Values and gradients are put together as the placements say.

If they are not the module's, the graph of one device and that of the ranks run once more, node by node. The first node
whose value differs is at fault; if none does, the one that is first in backward to give an operand another gradient.
Where rounding lets ranks choose otherwise (an expert, the larger of two), the choice is the first that differs, and is
what one device makes of the ranks' operands: no fault, but nothing after it can be compared.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch import fx, nn

from planner.graph import CONVERSIONS, Batch, Block, Graph, Node, Size, TensorKind, reads
from planner.runtime.blocks import Program
from planner.runtime.parts import AXIS, EXPERTS, piece
from planner.runtime.peers import Peers
from planner.runtime.sides import Chain, Left, Repeatable, difference, size_of, tensors_by_name
from planner.shard.chain import AxisSplit, Link, chained
from planner.shard.localize import Localized
from planner.shard.placement import Option, P, Placement, Q, R, Sharding, differentiable, effective, operands_of
from planner.shard.work import flop_of
from planner.trace.aten import call_node
from planner.trace.parallel import Communicator, Grid, put_together

_TIMEOUT_SECONDS = 600.0  # ranks share the cores, so that one may wait long for another
_SMALLEST = 1e-3  # of the largest gradient of its block: gradients that are zero by construction are rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """How a graph is split over the ranks of mesh axes, an axis after the other."""

    graph: Graph
    links: tuple[Link, ...]

    @classmethod
    def of(cls, graph: Graph, splits: Sequence[AxisSplit]) -> "Split":
        """Make the graph of a rank.

        Raises:
            PlanError: as `localize`.
        """
        return cls(graph=graph, links=chained(graph, splits))

    @property
    def first(self) -> "Split":
        """That of the outermost axis alone."""
        return Split(graph=self.graph, links=self.links[:1])

    @property
    def local(self) -> Localized:
        """The graph of a rank, and the placements on the innermost axis."""
        return self.links[-1].local

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Those of the innermost axis."""
        return self.links[-1].split.shardings

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The axes with their sizes, outermost first."""
        return tuple((link.split.axis, link.split.degree) for link in self.links)

    @property
    def degree(self) -> int:
        """Ranks of all axes."""
        return prod(degree for _, degree in self.axes)

    @property
    def axis(self) -> str:
        """The axes in words."""
        return " x ".join(axis for axis, _ in self.axes)

    def placed(self, tensor: int) -> tuple[Placement, ...]:
        """How a tensor is placed on each axis."""
        return tuple(link.local.placements.get(tensor, R) for link in self.links)

    def flop_ratio(self) -> float:
        """FLOP of all ranks together, in units of what one device does."""
        return prod(_flop_ratio(link) for link in self.links)

    def bytes_ratio(self, blocks: Iterable[Block], kind: TensorKind) -> float:
        """Bytes of tensors of a kind that all ranks together hold in blocks, in units of those of one device."""
        one, all_of_them = 0.0, 0.0
        for block in blocks:
            made = (t for i in block.nodes for t in self.graph.nodes[i].outputs if t is not None)
            for tensor in {*made, *block.parameters}:
                if self.graph.tensors[tensor].kind == kind:
                    one += self.graph.tensors[tensor].num_bytes.at(1)
                    all_of_them += self.local.graph.tensors[tensor].num_bytes.at(1) * self.degree
        return all_of_them / one if one else 1.0

    def seen_bytes(self, blocks: Sequence[Block], samples: int) -> float:
        """What `fault_of` keeps: what every node makes and the gradients of it, of one device and of the ranks."""
        made = {t for block in blocks for i in block.nodes for t in self.graph.nodes[i].outputs if t is not None}
        one = sum(self.graph.tensors[tensor].num_bytes.at(samples) for tensor in made)
        return 2 * one * (1 + self.bytes_ratio(blocks, "activation"))

    def steps(self) -> Iterator["Step"]:
        """The nodes of the ranks' blocks in order."""
        whole, local = self.graph, self.local.graph
        blocks = zip(whole.blocks, local.blocks, self.shardings, strict=True)
        for position, (block, mine, sharding) in enumerate(blocks):
            options = zip(block.nodes, sharding.options, strict=True)
            of = next(options, None)
            for index in mine.nodes:
                node = local.nodes[index]
                if of is not None and node.name == whole.nodes[of[0]].name:
                    yield Step(index, node, position, *of)
                    of = next(options, None)
                else:
                    yield Step(index, node, position)


def _flop_ratio(link: Link) -> float:
    """FLOP of all ranks of an axis together, in units of what is split."""
    whole, degree = link.whole, link.split.degree
    each = [
        (flop_of(whole.nodes[index], whole.tensors, 1), option)
        for block, sharding in zip(whole.blocks, link.split.shardings, strict=True)
        for index, option in zip(block.nodes, sharding.options, strict=True)
    ]
    total = sum(flop for flop, _ in each)
    return sum(flop * option.share * degree for flop, option in each) / total if total else float(degree)


@dataclass(frozen=True, slots=True)
class Step:
    """A node of a rank's block: a conversion, or that of a node of the whole graph (`of`) by its option."""

    index: int
    node: Node
    block: int
    of: int | None = None
    option: Option | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RankRun:
    """What forward and backward of one rank gave, gradients and buffers put together where they are parts."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]
    counts: Mapping[tuple[str, torch.dtype], int]


class Ranks:
    """The lowered blocks of every rank on its part of the parameters and buffers of `copied`."""

    def __init__(
        self, copied: nn.Module, split: Split, left: Sequence[Left], samples: int, device: torch.device
    ) -> None:
        self._split = split
        self._samples = samples
        self._device = device
        named = tensors_by_name(copied)
        graph = split.graph
        self._placements = {
            described.name: split.placed(tensor)
            for tensor, described in enumerate(graph.tensors)
            if described.kind in ("parameter", "buffer") and described.name in named
        }
        self._grid = Grid(split.axes, timeout_seconds=_TIMEOUT_SECONDS)
        self.held = [self._held(named, rank) for rank in range(split.degree)]
        self.chains = [
            Chain(held, split.local.graph, left, samples, device, peers=Peers.of(communicators))
            for held, communicators in zip(self.held, self._grid.communicators, strict=True)
        ]

    def _held(self, named: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        made: dict[tuple[int, tuple[Placement, ...]], torch.Tensor] = {}
        result = {}
        places = self._grid.communicators[rank].values()
        for name, placements in self._placements.items():
            whole = named[name]
            key = (id(whole), placements)
            if key not in made:
                part = whole.detach()
                for placement, place in zip(placements, places, strict=True):
                    part = piece(part, placement, place.rank, place.size)
                is_parameter = isinstance(whole, nn.Parameter)
                made[key] = nn.Parameter(part, whole.requires_grad) if is_parameter else part.clone()
            result[name] = made[key]
        return result

    def run(self, batch: Callable[[], Any]) -> list[RankRun]:
        """Forward and backward of every rank; what ranks hold whole is each one's own."""
        before = {name: value.clone() for name, value in self._whole_buffers(0).items()}
        batches = [batch() for _ in self.chains]

        def work(rank: int, _: Mapping[str, Communicator]) -> tuple[torch.Tensor, dict[tuple[str, torch.dtype], int]]:
            on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
            with on_device, torch.enable_grad(), Repeatable() as mode:
                loss = self.chains[rank](batches[rank])
                counts = dict(mode.counts)
                loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach().double(), counts

        found = self._grid.run(work)
        runs = []
        for rank, (loss, counts) in enumerate(found):
            gradients = {
                name: self._together(name, [held[name].grad for held in self.held], rank, is_gradient=True)
                for name, tensor in self.held[rank].items()
                if isinstance(tensor, nn.Parameter)
            }
            after = self._whole_buffers(rank)
            changed = {name: value for name, value in after.items() if not torch.equal(value, before[name])}
            runs.append(RankRun(loss=loss, gradients=gradients, buffers=changed, counts=counts))
        return runs

    def _whole_buffers(self, rank: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in self.held[rank].items():
            if not isinstance(tensor, nn.Parameter):
                value = self._together(name, [held[name] for held in self.held], rank)
                assert value is not None
                found[name] = value
        return found

    def _together(
        self, name: str, values: Sequence[torch.Tensor | None], rank: int, *, is_gradient: bool = False
    ) -> torch.Tensor | None:
        present = [value for value in values if value is not None]
        placements = self._placements[name]
        if len(present) < len(values):
            return values[rank] if all(placement == R for placement in placements) else None
        inner = 1
        for (axis, degree), placement in reversed(list(zip(self._split.axes, placements, strict=True))):
            for first in (r for r in range(len(present)) if r // inner % degree == 0):
                group = range(first, first + degree * inner, inner)
                held = [present[r] for r in group]
                found = together(held, placement, self._samples, is_gradient=is_gradient, axis=axis)
                for number, r in enumerate(group):
                    present[r] = found[number % len(found)]
            inner *= degree
        return present[rank]


def together(
    values: Sequence[torch.Tensor], placement: Placement, samples: int, *, is_gradient: bool = False, axis: str = AXIS
) -> list[torch.Tensor]:
    """The whole of what ranks hold: one where they hold parts or summands, else each rank's.

    The ranks of `ep` all run the same samples here, as if each had its own: an expert's gradient is the sum over them,
    and of what is used among experts a rank has that of the rows there. Means are those of one device.
    """
    if is_gradient and axis == EXPERTS:
        mean = torch.stack(list(values)).sum(0) / len(values)
        return together([value / len(values) for value in values], placement, samples) if placement.is_split else [mean]
    if placement.is_split:

        def at(size: Size) -> int:
            return size.per_sample * samples if isinstance(size, Batch) else size

        parts = [at(part) for part in placement.parts]
        joined = put_together(torch.stack(list(values)), placement.dim, parts, at(placement.repeats))
        if placement.order:
            joined = joined[torch.tensor(placement.order, device=joined.device).argsort()]
        return [joined]
    if placement == (Q if is_gradient else P):
        summed = torch.stack(list(values)).sum(0, dtype=torch.float64 if values[0].is_floating_point() else None)
        return [summed.to(values[0].dtype)]
    return list(values)


# --- where it is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a rank does otherwise than one device: the operator ("" if it is none), how it is split, what differs.

    `is_choice` where the operator is right, and rounding of what it is given makes the difference.
    """

    operator: str
    placed: str
    block: int
    source: str
    what: str
    error: float | None = None  # None where it fails
    is_choice: bool = False

    @property
    def words(self) -> str:
        """The operator as it is run."""
        return f"{self.operator} run as {self.placed}" if self.placed else self.operator


@dataclass(eq=False, slots=True)
class Seen:
    """What the nodes of a run made, the gradients that they gave their operands, and the node that failed."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)  # by tensor
    gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by (node, operand)
    failed: int | None = None


def fault_of(copied: nn.Module, chain: Chain, ranks: Ranks, batch: Callable[[], Any], limit: float) -> Fault | None:
    """The operator at which the ranks leave what one device computes by more than `limit`; None if none is found."""
    split, samples = ranks._split, ranks._samples
    whole = Seen()
    _watch(chain, whole)
    with Repeatable():
        chain(batch()).backward()  # type: ignore[no-untyped-call]
    seen = [Seen() for _ in ranks.chains]
    for one, its in zip(ranks.chains, seen, strict=True):
        _watch(one, its)
    for held in ranks.held:
        for tensor in held.values():
            tensor.grad = None
    steps = list(split.steps())
    failure: Exception | None = None
    try:
        ranks.run(batch)
    except Exception as error:
        failure = error
    failed = next((its.failed for its in seen if its.failed is not None), None)
    if failed is not None:
        step = next(step for step in steps if step.index == failed)
        return _fault(
            split, step, f"it fails with {type(failure).__name__}: {str(failure).splitlines()[0][:200]}", None
        )
    search = _Search(split, whole, seen, samples, limit, steps)
    return search.stored() or search.forward() or search.backward()


def _watch(chain: Chain, seen: Seen) -> None:
    """Run the blocks node by node from now on."""
    index_of = {id(node): index for index, node in enumerate(chain.graph.nodes)}
    for part in chain.lowered():
        part.program.code.forward = _Watch(part.program, index_of, seen).run


class _Watch(fx.Interpreter):
    """Runs a lowered module node by node and takes down what it sees."""

    def __init__(self, program: Program, index_of: Mapping[int, int], seen: Seen) -> None:
        super().__init__(program.code)
        self._sources, self._index_of, self._seen = program.sources, index_of, seen
        self._tensors: dict[fx.Node, int] = {}  # generated variable -> tensor of the graph
        for n in program.code.graph.nodes:
            node = self._sources.get(n.name)
            kind, _, number = str(n.target).partition("_")
            if n.op == "placeholder" and kind in ("in", "attribute"):
                self._tensors[n] = int(number)
            elif node is None and n.args and n.args[0] in self._tensors:  # a scalar that is stored with a dim
                self._tensors[n] = self._tensors[n.args[0]]
            elif node is not None and node.outputs:
                is_item = node.returns_list and n.op == "call_function" and n.args and isinstance(n.args[0], fx.Node)
                is_item = is_item and self._sources.get(n.args[0].name) is node
                made = node.outputs[n.args[1]] if is_item else None if node.returns_list else node.outputs[0]
                if made is not None:
                    self._tensors[n] = made

    def run_node(self, n: fx.Node) -> Any:
        """Its value."""
        node = self._sources.get(n.name)
        is_call = node is not None and not (node.returns_list and n in self._tensors)
        value = self._called(n, cast("Node", node)) if is_call else super().run_node(n)
        tensor = self._tensors.get(n)
        is_input = n.op == "placeholder" and str(n.target).startswith("in_")  # mostly made and taken down before
        if tensor is not None and isinstance(value, torch.Tensor) and not (is_input and tensor in self._seen.values):
            self._seen.values[tensor] = value.detach().clone()
        return value

    def _called(self, n: fx.Node, node: Node) -> Any:
        index = self._index_of[id(node)]

        def operand(given: fx.Node) -> Any:
            value = self.env[given]
            tensor = self._tensors.get(given)
            if tensor is None or tensor in node.mutates or not isinstance(value, torch.Tensor):
                return value
            if not (value.requires_grad and torch.is_grad_enabled()):
                return value
            # A tensor of this use alone.
            own = value.view_as(value)
            own.register_hook(self._noted(index, tensor))  # type: ignore[no-untyped-call]
            return own

        try:
            args, kwargs = fx.map_arg(n.args, operand), fx.map_arg(n.kwargs, operand)
            return getattr(self, n.op)(n.target, args, kwargs)
        except threading.BrokenBarrierError:  # another rank failed
            raise
        except Exception:
            self._seen.failed = index
            raise

    def _noted(self, index: int, tensor: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            before = self._seen.gradients.get((index, tensor))
            value = gradient.detach().clone()
            self._seen.gradients[index, tensor] = value if before is None else before + value

        return note


class _Search:
    """Compares what was seen of one device and of the ranks, in the order in which a fault spreads."""

    def __init__(
        self, split: Split, whole: Seen, ranks: Sequence[Seen], samples: int, limit: float, steps: Sequence[Step]
    ) -> None:
        self._split, self._whole, self._ranks = split, whole, ranks
        self._samples, self._limit, self._steps = samples, limit, steps
        self._moving = differentiable(split.graph)
        self._origin = dict(enumerate(range(len(split.graph.tensors))))  # tensor of a rank -> of the whole graph
        self._placed: dict[int, Placement] = dict(split.local.placements)  # tensor of a rank -> how it is placed
        self._readers: dict[int, list[Step]] = defaultdict(list)
        for step in steps:
            for tensor in dict.fromkeys(reads(step.node)):
                self._readers[tensor].append(step)
            if step.of is None:
                self._origin[_made(step)] = self._origin[next(reads(step.node))]
                continue
            for mine, theirs, placement in self._outputs(step):
                self._origin[mine], self._placed[mine] = theirs, placement
        for step in steps:  # what a conversion makes is as its readers take it
            if step.of is not None:
                self._placed |= {mine: p for mine, p in self._operands(step).items() if mine not in self._placed}
        self._written = {t for node in split.graph.nodes for t in node.mutates}

    def _outputs(self, step: Step) -> Iterator[tuple[int, int, Placement]]:
        """(tensor of a rank, of the whole graph, placement) of what a node makes."""
        if step.of is not None and step.option is not None:
            whole = self._split.graph.nodes[step.of]
            for mine, theirs, placement in zip(step.node.outputs, whole.outputs, step.option.outputs, strict=True):
                if mine is not None and theirs is not None and placement is not None:
                    yield mine, theirs, effective(placement, has_gradient=theirs in self._moving)

    def _operands(self, step: Step) -> dict[int, Placement]:
        """How a node takes each tensor of a rank."""
        if step.of is None or step.option is None:
            return {t: self._placed[t] for t in reads(step.node) if t in self._placed}
        whole = operands_of(self._split.graph.nodes[step.of])
        wanted = {
            t: effective(p, has_gradient=t in self._moving) for t, p in zip(whole, step.option.operands, strict=True)
        }
        return {t: wanted[self._origin[t]] for t in reads(step.node) if self._origin.get(t) in wanted}

    def stored(self) -> Fault | None:
        """A parameter or buffer of which the ranks do not hold their parts."""
        for step in self._steps:
            for tensor in reads(step.node):
                described = self._split.graph.tensors[tensor] if tensor < len(self._split.graph.tensors) else None
                if described is None or described.kind not in ("parameter", "buffer"):
                    continue
                error = self._value_error(tensor, self._split.local.placements.get(tensor, R), tensor)
                if error > self._limit:
                    what = f"parameter {described.name}, held as {self._placed.get(tensor, R)},"
                    return Fault(
                        operator="", placed="", block=step.block, source=step.node.source, what=what, error=error
                    )
        return None

    def forward(self) -> Fault | None:
        """The first node that makes another value."""
        for step in self._steps:
            made: list[tuple[int, int, Placement]] = list(self._outputs(step))
            if step.of is None:
                tensor = _made(step)
                if tensor in self._placed and self._origin[tensor] not in self._written:
                    made = [(tensor, self._origin[tensor], self._placed[tensor])]
            for mine, theirs, placement in made:
                error = self._value_error(mine, placement, theirs)
                if not error <= self._limit:
                    found = _fault(self._split, step, "what it makes", error, self._from_to(step))
                    return replace(found, is_choice=self._is_choice(step, theirs, mine, placement))
        return None

    def _is_choice(self, step: Step, tensor: int, mine: int, placement: Placement) -> bool:
        """Whether a node makes numbers or truths that one device makes as well of what the ranks give it."""
        if step.of is None or self._split.graph.tensors[tensor].dtype.startswith(("float", "bfloat", "complex")):
            return False
        operands = self._joined_operands(step)
        if not operands:
            return False
        device = next(iter(operands.values())).device
        with torch.no_grad():
            node = self._split.graph.nodes[step.of]
            made = dict(call_node(node, operands, micro_batch=self._samples, device=device))
        found = together([seen.values[mine] for seen in self._ranks], placement, self._samples)
        return all(torch.equal(made[tensor], value) for value in found)

    def _joined_operands(self, step: Step) -> dict[int, torch.Tensor] | None:
        """What the ranks give a node, put together, by tensor of the whole graph; None where it cannot be."""
        operands: dict[int, torch.Tensor] = {}
        for own, wanted in self._operands(step).items():
            values = [seen.values.get(own) for seen in self._ranks]
            present = [value for value in values if value is not None]
            if len(present) < len(values) or (wanted.is_part and not wanted.is_split):
                return None
            operands[self._origin[own]] = together(present, wanted, self._samples)[0]
        return operands

    def _is_bend(self, step: Step, tensor: int, found: Sequence[torch.Tensor | None], placement: Placement) -> bool:
        """Whether one device gives an operand this gradient as well, with what the ranks give the node both ways.

        Then rounding decides on which side of a bend a value is, as at the zero of a relu.
        """
        operands = self._joined_operands(step)
        if step.of is None or not operands:
            return False
        leaves = {t: v.detach().clone().requires_grad_(v.is_floating_point()) for t, v in operands.items()}
        device = leaves[tensor].device
        try:
            with torch.enable_grad():
                env = {t: leaf.clone() for t, leaf in leaves.items()}
                made = dict(call_node(self._split.graph.nodes[step.of], env, micro_batch=self._samples, device=device))
            incoming = {theirs: self._joined_gradient(mine) for mine, theirs, _ in self._outputs(step)}
            pairs = [(made[t], g) for t, g in incoming.items() if g is not None and made[t].requires_grad]
            (own,) = torch.autograd.grad([v for v, _ in pairs], [leaves[tensor]], [g for _, g in pairs])
        except Exception:  # it remains at fault
            return False
        return self._error(found, placement, own, is_gradient=True) <= self._limit

    def _joined_gradient(self, mine: int) -> torch.Tensor | None:
        """The gradient that comes to what a rank's node made, put together over its readers."""
        total: torch.Tensor | None = None
        for step in self._readers[mine]:
            placement = self._operands(step).get(mine, R)
            values = [seen.gradients.get((step.index, mine)) for seen in self._ranks]
            present = [value for value in values if value is not None]
            if len(present) == len(values):
                one = together(present, placement, self._samples, is_gradient=True, axis=self._split.axis)[0]
                total = one if total is None else total + one
        return total

    def backward(self) -> Fault | None:
        """The node that is the first in backward to give an operand another gradient."""
        scales: dict[int, float] = defaultdict(float)
        for (index, _), gradient in self._whole.gradients.items():
            block = self._block_of[index]
            scales[block] = max(scales[block], size_of(gradient))
        for step in reversed(self._steps):
            for tensor, placement in self._operands(step).items():
                wanted = (
                    self._sum_of_uses(_made(step))
                    if step.of is None
                    else self._whole.gradients.get((step.of, self._origin[tensor]))
                )
                found = [seen.gradients.get((step.index, tensor)) for seen in self._ranks]
                error = self._error(found, placement, wanted, floor=_SMALLEST * scales[step.block], is_gradient=True)
                if not error <= self._limit:
                    name = self._split.graph.tensors[self._origin[tensor]].name
                    what = f"the gradient that it gives {name}"
                    fault = _fault(self._split, step, what, error, self._from_to(step))
                    return replace(fault, is_choice=self._is_bend(step, self._origin[tensor], found, placement))
        return None

    @property
    def _block_of(self) -> dict[int, int]:
        return {i: position for position, block in enumerate(self._split.graph.blocks) for i in block.nodes}

    def _sum_of_uses(self, tensor: int) -> torch.Tensor | None:
        """The gradient that comes to a converted tensor on one device, which has no such tensor."""
        total: torch.Tensor | None = None
        for step in self._readers[tensor]:
            if step.of is None:
                one = self._sum_of_uses(_made(step))
            else:
                one = self._whole.gradients.get((step.of, self._origin[tensor]))
            if one is not None:
                total = one if total is None else total + one
        return total

    def _value_error(self, mine: int, placement: Placement, theirs: int) -> float:
        found = [seen.values.get(mine) for seen in self._ranks]
        return self._error(found, placement, self._whole.values.get(theirs))

    def _error(
        self,
        found: Sequence[torch.Tensor | None],
        placement: Placement,
        wanted: torch.Tensor | None,
        *,
        floor: float = 0.0,
        is_gradient: bool = False,
    ) -> float:
        """The largest relative difference; 0 where it cannot be told."""
        present = [value for value in found if value is not None]
        if wanted is None or (placement.is_part and not placement.is_split) or (len(present) < len(found)):
            return size_of(wanted) / (size_of(wanted) + floor) if is_gradient and not present and floor else 0.0
        joined = together(present, placement, self._samples, is_gradient=is_gradient, axis=self._split.axis)
        if any(value.shape != wanted.shape or value.dtype != wanted.dtype for value in joined):
            return 1.0
        scale = max(size_of(wanted), floor) or 1.0
        return max(difference(wanted, value) / scale for value in joined)

    def _from_to(self, step: Step) -> str:
        """What a conversion turns into what."""
        if step.of is not None:
            return ""
        source = self._placed.get(next(reads(step.node)), R)
        return f"{source}>{self._placed.get(_made(step), R)}"


def _made(step: Step) -> int:
    """What a conversion makes."""
    assert step.node.op.split(".")[1] in CONVERSIONS
    made = step.node.outputs[0]
    assert made is not None
    return made


def _fault(split: Split, step: Step, what: str, error: float | None, placed: str = "") -> Fault:
    whole = None if step.of is None else split.graph.nodes[step.of]
    return Fault(
        operator=step.node.op if whole is None else whole.op,
        placed=placed if step.option is None else str(step.option),
        block=step.block,
        source=step.node.source,
        what=what,
        error=error,
    )
